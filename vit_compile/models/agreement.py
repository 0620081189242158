"""Quick ways that stand for functions of transformers: used only where both give the same on samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch

S = TypeVar("S")

_agreed: dict[Hashable, bool] = {}


def agreed(key: Hashable, same: Callable[[S], bool], samples: Iterable[S]) -> bool:
    """Does a quick way give the `same` as the one it stands for, on all samples? Remembered under `key` once it is known."""
    if key not in _agreed:
        try:
            _agreed[key] = all(map(same, samples))
        except Exception:  # what it is compared with may be gone, or the caller has set a mode
            return False
    return _agreed[key]


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same values in the same dtype?"""
    return one.dtype == other.dtype and torch.equal(one, other)
