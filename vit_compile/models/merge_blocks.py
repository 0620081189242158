"""Patches in the order of merge blocks: those of an `m` x `m` block lie together, and blocks in raster order.

What belongs to a patch is most often made of something of its row and something of its column. Computed for all patches in raster
order and then sorted, it takes several passes over all patches; put in order first, an axis at a time, it takes one.

Shapes: h and w patches of an image, m side of a merge block, P values of a patch, T patches of a clip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

S = TypeVar("S")
Grid = tuple[int, int, int]
"""Patches along time, height and width; a still image has one along time."""

_SAMPLES: tuple[tuple[Grid, ...], ...] = (((1, 2, 3),), ((2, 5, 1), (1, 1, 4)), ((1, 1, 40),))
"""Grids, in merge blocks, on which a quick way is compared with that of transformers: thin ones, a clip, several at once."""


def merge_order(height: int, width: int, merge: int, frames: int = 1) -> torch.Tensor:
    """Patches in raster order, picked so that each `merge` x `merge` block of a frame lies together: int64 [frames * h * w]."""
    patches = torch.arange(frames * height * width, device="cpu").view(frames, height // merge, merge, width // merge, merge)
    return patches.transpose(2, 3).flatten()


def outer(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor,
    *,
    frames: int,
    merge: int,
) -> torch.Tensor:
    """[T,P], of which each patch's values are combined from those of its row [h,P] and its column [w,P].

    Args:
        combine: an elementwise function that broadcasts.
        rows, columns: h and w multiples of `merge`.
        frames: each has the same values; T is frames * h * w.
        merge: 1 keeps raster order.
    """
    (h, values), w = rows.shape, columns.shape[0]
    block = (merge, merge, values)
    of_rows = rows.view(h // merge, 1, merge, 1, values).expand(-1, -1, *block).reshape(h // merge, 1, -1)
    of_columns = columns.view(1, w // merge, 1, merge, values).expand(-1, -1, *block).reshape(1, w // merge, -1)
    combined = combine(of_rows, of_columns).view(h * w, values)
    return combined if frames == 1 else combined.repeat(frames, 1)


def position_ids(vision_utils: Any, grids: Sequence[Grid], merge: int) -> torch.Tensor:
    """Row and column of every patch, int64 [T,2]: what `transformers.vision_utils.get_vision_position_ids` gives, several times
    as fast. Where the two do not agree on samples, that function is asked."""
    if not _agree(vision_utils, merge):
        return _public(vision_utils, grids, merge)
    return _quick(grids, merge)


def _public(vision_utils: Any, grids: Sequence[Grid], merge: int) -> torch.Tensor:
    ids: torch.Tensor = vision_utils.get_vision_position_ids(torch.tensor(grids, device="cpu"), merge)
    return ids


def _quick(grids: Sequence[Grid], merge: int) -> torch.Tensor:
    made = []
    for t, h, w in grids:
        rows, columns = torch.zeros(2, max(h, w), 2, dtype=torch.int64, device="cpu").unbind()
        rows[:h, 0], columns[:w, 1] = torch.arange(h, device="cpu"), torch.arange(w, device="cpu")
        made.append(outer(torch.add, rows[:h], columns[:w], frames=t, merge=merge))
    return made[0] if len(made) == 1 else torch.cat(made)


_agreed: dict[Any, bool] = {}


def agreed(key: Hashable, same: Callable[[S], bool], samples: Iterable[S]) -> bool:
    """Does a quick way give the `same` as the one it stands for, on all samples? Remembered under `key` once it is known."""
    if key not in _agreed:
        try:
            _agreed[key] = all(map(same, samples))
        except Exception:  # what it is compared with may be gone, or the caller has set a mode
            return False
    return _agreed[key]


def _agree(vision_utils: Any, merge: int) -> bool:
    return agreed((vision_utils, merge), functools.partial(_same, vision_utils, merge), _SAMPLES)


def _same(vision_utils: Any, merge: int, sample: Sequence[Grid]) -> bool:
    grids = [(t, h * merge, w * merge) for t, h, w in sample]
    one, other = _quick(grids, merge), _public(vision_utils, grids, merge)
    return one.dtype == other.dtype and torch.equal(one, other)
