"""Where the time of a capture goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

FIRST_RUNS, KERNELS, WARM_UP, RECORDING, TRIALS, TIMING = PHASES = (
    "first runs",
    "attention kernels",
    "warm-up",
    "recording",
    "trials",
    "timing",
)
"""The first run of each graph, which traces and compiles; choosing among attention kernels; further runs before the recording;
the recording itself; runs that show whether the graph is right; runs that time it, and eager ones."""


class Phases:
    """Seconds by phase, work on the device included. Not for several threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What happens inside belongs to a phase, also when it fails."""
        started = time.perf_counter()
        try:
            yield
            if self._device.type == "cuda":  # not the whole device: another thread may be recording
                torch.cuda.current_stream(self._device).synchronize()
        finally:
            self.seconds[name] += time.perf_counter() - started
