"""The processes of a run: one, or the ranks of a `torchrun`, which keep in step and agree on when to stop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vit_compile.errors import OptionError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those of the run."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None: this process alone. Its CPU backend carries what is agreed on, outside of what is timed."""

    def barrier(self) -> None:
        """Wait for the others."""
        if self.group is not None:
            self.agree(False)

    def agree(self, wish: bool) -> bool:
        """What rank 0 wishes."""
        return bool(self.share([float(wish)])[0]) if self.group is not None else wish

    def share(self, values: Sequence[float]) -> list[float]:
        """Those of rank 0."""
        if self.group is None:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.broadcast(shared, group_src=0, group=self.group)
        found: list[float] = shared.tolist()
        return found

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, entry by entry."""
        if self.group is None or not values:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        found: list[float] = largest.tolist()
        return found


def is_distributed() -> bool:
    """Was this process started by `torchrun` with others?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_device(device: torch.device) -> torch.device:
    """The device of this rank.

    Raises:
        OptionError: there are fewer GPUs than ranks on this machine.
    """
    if not is_distributed() or device.type != "cuda":
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise OptionError(f"rank {local} of this machine has no GPU: torch sees {torch.cuda.device_count()}.")
    return torch.device("cuda", local)


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run; a process group is made and ended where there are several."""
    if not is_distributed():
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
