"""Trying things that may fail, and saying what failed as a value: recordings and proofs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from vit_compile.backend.cuda import Recorder
from vit_compile.errors import ProtocolError, SkipError, first_line
from vit_compile.stats import Skip, logger


class Recordable(Protocol):
    """Something that can be recorded: a capture of the backend, a graph of the runtime."""

    milliseconds: float
    recorder: Recorder | None

    @property
    def label(self) -> str:
        """For messages."""
        ...

    def record(self, args: Sequence[Any]) -> None:
        """Warm up and record, with a call's arguments as data."""
        ...


R = TypeVar("R", bound=Recordable)


def record(make: Callable[[], R], args: Sequence[Any], label: str) -> R | Skip:
    """Make a capture and record it with a call's arguments as data; a skip with the reason where that fails.

    A recording on a device is tried twice, since another thread's synchronisation breaks it.
    """
    started = time.perf_counter()
    try:
        with torch.inference_mode(False), torch.no_grad():
            made = _record_twice(make, args)
    except torch.OutOfMemoryError as error:
        skip = Skip("out-of-memory", f"{label}: {first_line(error)}")
    except (SkipError, ProtocolError):
        raise
    except Exception as error:
        return Skip("capture-failed", f"{label}: {type(error).__name__}: {first_line(error)}")
    else:
        made.milliseconds = (time.perf_counter() - started) * 1e3
        return made
    # Here, not above: the error holds the frames it came through, and with them their tensors. Cycles among frames hold more.
    gc.collect()
    torch.cuda.empty_cache()
    return skip


def _record_twice(make: Callable[[], R], args: Sequence[Any]) -> R:
    made = make()
    try:
        made.record(args)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if made.recorder is None:
            raise
        logger.warning("capture of %s failed, trying once more: %s", made.label, first_line(error))
        made = make()
        made.record(args)
    return made


def trial(proof: Callable[[], Skip | None]) -> Skip | None:
    """Run a proof; one that cannot be carried out proves nothing."""
    try:
        return proof()
    except Exception as error:
        return Skip("padding-unproved", f"the trial failed: {type(error).__name__}: {first_line(error)}")
