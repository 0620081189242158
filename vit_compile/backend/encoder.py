"""What the traced graphs of one encoder share: captures, their memory pool, a lock and the caps.

A model can be traced several times (batch 1 apart from larger ones, no_grad apart from inference_mode). Traces with the
same weights belong to one encoder, so that `max_graphs` and `max_graph_bytes` hold for the model, not for a trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from vit_compile.attention.choice import KernelChoices
from vit_compile.backend.capture import Capture
from vit_compile.backend.cuda import Recorder, seconds_captured
from vit_compile.backend.sizes import Env
from vit_compile.stats import Skip


class Owner(Protocol):
    """A traced graph that holds captures; they go when it goes."""

    captures: dict[Env, Capture]
    failures: dict[Env, Skip]


class Encoder:
    """Captures of one encoder, held by its traced graphs. Every method is called with `lock` held."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.device = device
        self.recorder = Recorder(device) if device.type == "cuda" else None
        self.owners: weakref.WeakSet[Owner] = weakref.WeakSet()

    def use_attention(self, wanted: str, *, strict: bool) -> None:
        """Record what comes with this choice of attention kernels; see `BackendOptions.attention`."""
        if self.recorder is not None and self.recorder.kernels.wanted != wanted:
            self.recorder.kernels = KernelChoices(wanted, self.device, seconds_captured, strict=strict)

    def captures(self) -> list[Capture]:
        """All captures of all graphs."""
        return [capture for owner in list(self.owners) for capture in owner.captures.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all captures."""
        return sum(capture.nbytes for capture in self.captures())

    def room_for_one_more(self, max_graphs: int, max_graph_bytes: int | None) -> Skip | None:
        """Why no further capture is allowed, or None."""
        held = len(self.captures())
        if held >= max_graphs:
            return Skip("max-graphs", f"{held} captures are held; max_graphs={max_graphs}")
        if max_graph_bytes is not None and self.nbytes >= max_graph_bytes:
            return Skip("max-graph-bytes", f"captures take {self.nbytes} bytes; max_graph_bytes={max_graph_bytes}")
        return None

    def start_afresh_if_empty(self) -> None:
        """Give back the pool of captures that went with their graphs, before it is used again."""
        if self.recorder is not None and not self.captures():
            self.recorder.abandon_pool()

    def drop(self, owner: Owner, targets: Sequence[Env]) -> None:
        """Forget captures of one graph; their memory goes back to the pool, and to the device with the last of them."""
        if self.recorder is not None and targets:
            torch.cuda.synchronize(self.device)
        for target in targets:
            owner.captures.pop(target, None)
        self.start_afresh_if_empty()

    def clear(self) -> None:
        """Forget all captures and failures."""
        for owner in list(self.owners):
            self.drop(owner, list(owner.captures))
            owner.failures.clear()
        self.start_afresh_if_empty()  # also where the graphs went before, and their captures with them


_encoders: WeakIdKeyDictionary = WeakIdKeyDictionary()
_nameless: weakref.WeakSet[Encoder] = weakref.WeakSet()
_lock = threading.Lock()


def encoders() -> list[Encoder]:
    """All encoders of this process."""
    with _lock:
        return [*(encoder for by_device in _encoders.values() for encoder in by_device.values()), *_nameless]


def encoder_of(weights: Sequence[Any], device: torch.device) -> Encoder:
    """The encoder to which a graph with these weights belongs; a graph without weights has its own."""
    if not weights:
        alone = Encoder(device)
        with _lock:
            _nameless.add(alone)
        return alone
    with _lock:
        by_device: dict[torch.device, Encoder] = _encoders.setdefault(weights[0], {})
        if device not in by_device:
            by_device[device] = Encoder(device)
        return by_device[device]
