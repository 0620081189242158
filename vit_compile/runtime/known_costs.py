"""Measured times of graphs and of eager runs: noted to be saved, and looked up once they were loaded.

An encoder is known by its fingerprint: the class, the names, shapes and dtypes of its weights, the device's kind, torch, and what
the configuration says about how graphs are made. Times of a graph are known by its path, budget, axes and room.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vit_compile.attention.choice import device_name
from vit_compile.options import BackendOptions
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.replay_times import ReplayTime

MOST_MS = 1e6
MOST_SQUARES = 1 << 60


@dataclass(slots=True)
class Costs:
    """Times of one encoder."""

    graphs: dict[str, ReplayTime] = field(default_factory=dict)
    """Times of a replay, by `str(GraphKey)`."""

    eager: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    """By path, of an eager run: milliseconds that do not depend on its tokens, of each token, the least that a run takes, and of
    each square (`planner.EagerCost`)."""

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        graphs = {label: [time.ms, time.slope, time.squares] for label, time in self.graphs.items()}
        return {"graphs": graphs, "eager": {path: list(cost) for path, cost in self.eager.items()}}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Costs:
        """From what `as_dict` made.

        Raises:
            TypeError, ValueError, KeyError: it is something else.
        """
        eager = {}
        for path, (base, slope, least, by_squares) in given["eager"].items():
            eager[str(path)] = (_time(base), _time(slope), _time(least), _time(by_squares))
        graphs = {
            str(label): ReplayTime(_time(ms), _time(slope), _squares(squares))
            for label, (ms, slope, squares) in given["graphs"].items()
        }
        return cls(graphs, eager)


def _time(value: object) -> float:
    """A time in milliseconds that a plan can be made with."""
    found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= found <= MOST_MS:
        raise ValueError(f"{value!r} is no time in milliseconds")
    return found


def _squares(value: object) -> int:
    """The squares of a layout."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_SQUARES:
        raise ValueError(f"{value!r} is no sum of squares")
    return value


_measured: dict[str, Costs] = {}
_loaded: dict[str, Costs] = {}
_lock = threading.Lock()


def measured() -> dict[str, Costs]:
    """What this process measured or loaded, by fingerprint; a copy."""
    with _lock:
        return {name: Costs(dict(costs.graphs), dict(costs.eager)) for name, costs in _measured.items()}


def loaded(fingerprint: str) -> Costs:
    """What was loaded about an encoder; empty if nothing was. A copy."""
    with _lock:
        costs = _loaded.get(fingerprint, Costs())
        return Costs(dict(costs.graphs), dict(costs.eager))


def note(fingerprint: str, costs: Costs) -> None:
    """Keep what was measured, to be saved. An encoder in the same process measures for itself all the same."""
    with _lock:
        _add(_measured, fingerprint, costs)


def load(found: Mapping[str, Costs]) -> None:
    """Encoders that are captured from now on take these times instead of measuring."""
    with _lock:
        for fingerprint, costs in found.items():
            _add(_loaded, fingerprint, costs)
            there = _measured.get(fingerprint, Costs())
            _measured[fingerprint] = Costs(costs.graphs | there.graphs, costs.eager | there.eager)


def _add(kept: dict[str, Costs], fingerprint: str, costs: Costs) -> None:
    there = kept.setdefault(fingerprint, Costs())
    there.graphs |= costs.graphs
    there.eager |= costs.eager


def forget() -> None:
    """Forget everything that was measured and loaded."""
    with _lock:
        _measured.clear()
        _loaded.clear()


def fingerprint(
    modules: Sequence[nn.Module], config: EncoderConfig, device: torch.device, dtype: torch.dtype, room: tuple[int, int]
) -> str:
    """Of an encoder, equal in other processes and on other machines of the same kind.

    Args:
        modules: the encoder's.
        room: most items and most frames of a replay.
    """
    weights: list[tuple[object, ...]] = [
        (type(module).__qualname__, name, tuple(weight.shape), str(weight.dtype))
        for module in modules
        for name, weight in module.named_parameters()
    ]
    weights += [  # numbers of heads, windows, and other sizes that no weight shows
        (name, key, value)
        for module in modules
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, int | float | str) and key != "training"
    ]
    made = [config.mode, config.compiler, config.attention, config.isolate]
    made.append(BackendOptions().passes if config.passes is None else config.passes)
    parts = [device_name(device), torch.__version__, str(dtype), room, made, weights]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
