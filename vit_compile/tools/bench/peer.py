"""What a peer is: a way to run a tower, set up once, then called with one request after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vit_compile.tools.bench.ladders import Ladder
from vit_compile.tools.bench.towers import Tower
from vit_compile.tools.bench.workload import Inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a peer is made from."""

    tower: Tower
    ladder: Ladder
    """Fitted, or the user's."""

    powers: Ladder
    """Powers of two."""

    capacities: tuple[int, ...]
    compiler: str
    is_single: bool
    """The cases are single requests that are repeated."""

    warmup: Sequence[Inputs]
    """What is served before anything is timed."""

    group: dist.ProcessGroup | None = None


class Peer(Protocol):
    """A tower that was set up. What `call` does is timed, and nothing else is."""

    def prepare(self, inputs: Inputs) -> Any:
        """What a caller would have at hand before the call."""

    def call(self, prepared: Any) -> Any:
        """Serve one request."""

    def features(self, output: Any, inputs: Inputs) -> list[torch.Tensor]:
        """Of each item [tokens, width], from what `call` returned, before the next call."""

    def close(self) -> None:
        """Give everything back and leave the tower as it was."""


class Observed(Protocol):
    """A peer with an encoder manager inside."""

    def stats(self) -> Mapping[str, Any]:
        """`EncoderCudaGraphManager.snapshot`."""

    def budgets(self) -> tuple[int, ...]:
        """The ladder, in output tokens."""

    def replay_ms(self, before: Mapping[str, Any], after: Mapping[str, Any], calls: int) -> tuple[float, float]:
        """Host and wall milliseconds, per call, of nothing but the replays that there were between two snapshots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSpec:
    """A row of the registry."""

    name: str
    summary: str
    make: Callable[[Setup], Peer]
    ours: bool = False
    """Runs through this package: a difference beyond tolerance is a failure of the whole run."""

    compiles: bool = False
    refuses: Callable[[Setup], str | None] = lambda setup: None
    """Why it cannot run on this set-up."""

    max_requests: int | None = None
    """Most requests of mixed traffic, for a peer that takes seconds for each new size."""

    rehearses: bool = False
    """Serves all measured requests of mixed traffic before the clock starts, so that no compilation falls among them."""

    in_groups: bool = False
    """Can run on the ranks of a process group."""


def packed_outputs(output: Any) -> tuple[torch.Tensor, ...]:
    """What a language model gets from a packed tower: merged features, then the deepstack levels, [tokens, width] each."""
    return (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))


def packed_features(outputs: Sequence[torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    """`packed_outputs` of a whole request, side by side and cut into items."""
    return list(torch.cat(list(outputs), dim=1).split(list(inputs.tokens)))


def dense_arguments(tower: Tower) -> dict[str, Any]:
    """Keyword arguments with which a dense tower takes images of any size."""
    return {"interpolate_pos_encoding": True} if tower.interpolates else {}


def dense_features(outputs: Sequence[torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    """`last_hidden_state` of each batch [n,L,D], as items in their order."""
    found = {
        at: item
        for batch, output in zip(inputs.batches, outputs, strict=True)
        for at, item in zip(batch.positions, output, strict=True)
    }
    return [found[at] for at in range(len(found))]
