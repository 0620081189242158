"""Features held against eager's: which requests are compared, what is kept of them, and by how much they differ."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from vit_compile.tools.bench.cases import Case, Traffic
from vit_compile.tools.bench.peer import Setup
from vit_compile.tools.bench.peers_eager import make_eager
from vit_compile.tools.bench.workload import Inputs, Pixels
from vit_compile.tools.encoding import full_float32

MAX_KEPT_VALUES = 500_000_000
"""Of all requests that are compared: their features lie in host memory, up to twice."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Eager's features of one request, on the host."""

    eager: list[torch.Tensor]
    fp32: list[torch.Tensor] | None
    """The same weights in float32; None where eager computes in it."""


References = dict[tuple[str, int], Reference]
"""By case and number of the request."""


def references(setup: Setup, traffic: Traffic, pixels: Pixels, count: int) -> References:
    """Runs eager, and a float32 copy of the tower, on the first requests of each case."""
    found: References = {}
    wanted = [(case, number) for case in traffic.cases for number in numbers(case, count, traffic.is_single)]
    requests = [(case.requests[number], number) for case, number in wanted]
    eager = _features(setup, (pixels.inputs(*request) for request in requests), whole=traffic.is_single)
    exact: list[list[torch.Tensor]] | list[None] = [None] * len(eager)
    if setup.tower.dtype != torch.float32:
        exact = _in_float32(setup, (pixels.inputs(*request) for request in requests[: len(eager)]))
    for (case, number), one, other in zip(wanted, eager, exact, strict=False):
        found[case.label, number] = Reference(one, other)
    return found


def numbers(case: Case, count: int, is_single: bool) -> range:
    """Requests of a case that are compared: the same one need not be twice."""
    return range(1 if is_single else min(count, len(case.requests)))


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest over the items: norm of the difference / norm. Infinite where shapes differ; NaN stays NaN."""
    if len(got) != len(want) or any(a.shape != b.shape for a, b in zip(got, want, strict=False)):
        return float("inf")
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        there = b.to(a.device, torch.float64)
        one = ((a.to(torch.float64) - there).norm() / there.norm()).item()
        worst = one if one != one or one > worst else worst
        if worst != worst:
            break
    return worst


def _features(setup: Setup, requests: Iterable[Inputs], *, whole: bool) -> list[list[torch.Tensor]]:
    """Of eager, on the host, for as many requests as fit; `whole`: for all of them."""
    peer, kept = make_eager(setup), 0
    found: list[list[torch.Tensor]] = []
    for inputs in requests:
        output = peer.call(peer.prepare(inputs))
        items = [item.cpu() for item in peer.features(output, inputs)]
        kept += sum(item.numel() for item in items)
        if found and not whole and kept > MAX_KEPT_VALUES:
            break
        found.append(items)
    return found


def _in_float32(setup: Setup, requests: Iterable[Inputs]) -> list[list[torch.Tensor]]:
    """Of the same weights and pixels, computed in float32."""
    exact = replace(setup.tower, module=copy.deepcopy(setup.tower.module).float(), dtype=torch.float32)
    with full_float32():
        return _features(replace(setup, tower=exact), map(_as_float32, requests), whole=True)


def _as_float32(inputs: Inputs) -> Inputs:
    images, clips = (None if rows is None else rows.float() for rows in (inputs.image_rows, inputs.clip_rows))
    batches = tuple(replace(batch, pixels=batch.pixels.float()) for batch in inputs.batches)
    return replace(inputs, image_rows=images, clip_rows=clips, batches=batches)
