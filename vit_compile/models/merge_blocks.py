"""Patches in the order of merge blocks: those of an `m` x `m` block lie together, and blocks in raster order.

What belongs to a patch is most often made of something of its row and something of its column. Computed for all patches in raster
order and then sorted, it takes several passes over all patches; put in order first, an axis at a time, it takes one.

Shapes: h and w patches of an image, m side of a merge block, P values of a patch, T patches of a clip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from vit_compile.models.agreement import agreed, identical

Grid = tuple[int, int, int]
"""Patches along time, height and width; a still image has one along time."""

_SAMPLES: tuple[tuple[Grid, ...], ...] = (((1, 2, 3),), ((2, 5, 1), (1, 1, 4)), ((1, 1, 40),))
"""Grids, in merge blocks, on which a quick way is compared with that of transformers: thin ones, a clip, several at once."""


def merge_order(height: int, width: int, merge: int, frames: int = 1) -> torch.Tensor:
    """Patches in raster order, picked so that each `merge` x `merge` block of a frame lies together: int64 [frames * h * w]."""
    patches = torch.arange(frames * height * width, device="cpu").view(frames, height // merge, merge, width // merge, merge)
    return patches.transpose(2, 3).flatten()


def as_rows(rows: torch.Tensor, merge: int) -> torch.Tensor:
    """Values of rows [h,P], h a multiple of `merge`, as [h/m,1,m*m*P]: those of every patch of a block."""
    values = rows.shape[1]
    blocks = rows.view(-1, 1, merge, 1, values).expand(-1, -1, -1, merge, -1)
    return blocks.reshape(-1, 1, merge * merge * values)


def as_columns(columns: torch.Tensor, merge: int) -> torch.Tensor:
    """Values of columns [w,P], w a multiple of `merge`, as [1,w/m,m*m*P]."""
    values = columns.shape[1]
    blocks = columns.view(1, -1, 1, merge, values).expand(-1, -1, merge, -1, -1)
    return blocks.reshape(1, -1, merge * merge * values)


def combined(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor,
    *,
    values: int,
    frames: int,
) -> torch.Tensor:
    """[T,P], of which each patch's values are combined from those of its row and its column.

    Args:
        combine: an elementwise function that broadcasts.
        rows, columns: see `as_rows`, `as_columns`; with m = 1 patches keep raster order.
        values: P.
        frames: each has the same values; T is frames * h * w.
    """
    one = combine(rows, columns).view(-1, values)
    return one if frames == 1 else one.repeat(frames, 1)


_axes: dict[Hashable, tuple[torch.Tensor, ...]] = {}
_KEPT_AXES = 512
"""Of one size each. Sides of images repeat, where whole sizes do not."""


def kept(key: Hashable, make: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What is made for one size of an axis, on the CPU, remembered under `key`. Not to be written to."""
    found = _axes.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = make()
        # Under a mode of the caller's they may be something else: that is for this call alone.
        if len(_axes) < _KEPT_AXES and all(type(part) is torch.Tensor and part.is_cpu for part in found):
            _axes[key] = found
    return found


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
    made = [combined(torch.add, _numbers(h, merge)[0], _numbers(w, merge)[1], values=2, frames=t) for t, h, w in grids]
    return made[0] if len(made) == 1 else torch.cat(made)


def _numbers(size: int, merge: int) -> tuple[torch.Tensor, ...]:
    """(number of the row, 0) as rows, and (0, number of the column) as columns, of so many each."""

    def make() -> tuple[torch.Tensor, ...]:
        numbers = torch.arange(size, device="cpu")
        zeros = torch.zeros_like(numbers)
        rows, columns = torch.stack((numbers, zeros), 1), torch.stack((zeros, numbers), 1)
        return as_rows(rows, merge), as_columns(columns, merge)

    return kept((size, merge), make)


def _agree(vision_utils: Any, merge: int) -> bool:
    return agreed((vision_utils, merge), functools.partial(_same, vision_utils, merge), _SAMPLES)


def _same(vision_utils: Any, merge: int, sample: Sequence[Grid]) -> bool:
    grids = [(t, h * merge, w * merge) for t, h, w in sample]
    return identical(_quick(grids, merge), _public(vision_utils, grids, merge))
