"""Graph passes: small rewrites of the traced graph that keep its numbers.

A pass has a name, can be switched off by name (`passes=[...]`), rewrites in place and returns how many sites it
rewrote. Passes run before the split, in the order of `PASSES`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from vit_compile.backend.passes.activation_epilogue import ActivationEpilogue
from vit_compile.backend.passes.aligned_linear import AlignedLinear
from vit_compile.backend.passes.padding_columns import PaddingColumns
from vit_compile.backend.passes.patch_embedding import PatchEmbeddingGemm
from vit_compile.options import DEFAULT_PASSES, PASS_NAMES
from vit_compile.stats import counters


class GraphPass(Protocol):
    """A rewrite. The backend calls it once for every traced graph."""

    name: str

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite `gm` in place, set `example_value` on every new node, return the number of rewritten sites."""
        ...


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did."""

    name: str
    sites: int
    milliseconds: float


PASSES: dict[str, GraphPass] = {
    each.name: each for each in (PatchEmbeddingGemm(), ActivationEpilogue(), AlignedLinear(), PaddingColumns())
}
assert tuple(PASSES) == PASS_NAMES, "options.PASS_NAMES lists the passes"


def run_pass(gm: fx.GraphModule, name: str) -> PassReport:
    """Run one pass and leave the graph recompiled and lint clean."""
    started = time.perf_counter()
    sites = PASSES[name](gm)
    counters.add_sites(name, sites)
    if sites:
        gm.graph.lint()
        gm.recompile()
    return PassReport(name, sites, (time.perf_counter() - started) * 1e3)


def selected(names: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the passes to run: the default ones for None."""
    return DEFAULT_PASSES if names is None else tuple(names)
