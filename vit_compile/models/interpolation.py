"""Interpolated position embeddings: which entries of the table a patch mixes, and with which weights, made quickly.

transformers makes them for every patch at once, in some thirty passes over all patches, which on a CPU takes about a millisecond
for an image of 4000 patches: as long as a graph's replay may take, for every size that was not seen before. The two axes are
independent, so that it is enough to ask for each row and each column, and to combine them. The part of transformers that works
on one axis is private: before it is used it must agree, bit for bit, with the public function.

Shapes: T patches, h and w patches of an image, K taps of an axis (2 for bilinear, 4 for bicubic).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vit_compile.models.merge_blocks import Grid, agreed, outer

_AXIS = "_interpolation_axis_taps_weights"
_SAMPLES = ((1, 2, 3), (2, 5, 1), (1, 1, 40))
"""Grids, in merge blocks, on which the quick way is compared: thin ones, a clip, axes longer and shorter than the table's."""
_KEPT_AXES = 1024
_axes: dict[Any, Any] = {}


def indices_and_weights(
    vision_utils: Any, grid: Grid, *, side: int, mode: str, align_corners: bool, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `transformers.vision_utils.get_vision_interpolation_indices_and_weights` gives for one image or clip, bit for bit.

    Args:
        vision_utils: the module of transformers.
        grid: (t, h, w) in patches.
        side: of the square table of embeddings.
        mode, align_corners: of the interpolation.
        merge: side of a merge block in patches; patches of a block lie together.

    Returns:
        int64 [T,K*K] into the flattened table, and float32 [T,K*K].
    """
    if not agrees(vision_utils, side, mode, align_corners, merge):
        return _public(vision_utils, grid, side, mode, align_corners, merge)
    return _by_axis(vision_utils, grid, side, mode, align_corners, merge)


def _public(
    vision_utils: Any, grid: Grid, side: int, mode: str, align_corners: bool, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([grid], device="cpu"), side, mode=mode, align_corners=align_corners, spatial_merge_size=merge
    )
    return indices, weights


def _by_axis(
    vision_utils: Any, grid: Grid, side: int, mode: str, align_corners: bool, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    t, h, w = grid
    row_taps, row_weights = _axis(vision_utils, h, side, mode, align_corners)
    column_taps, column_weights = _axis(vision_utils, w, side, mode, align_corners)
    return (
        outer(torch.add, _pairs(row_taps, 2) * side, _pairs(column_taps, 1), frames=t, merge=merge),
        outer(torch.mul, _pairs(row_weights, 2), _pairs(column_weights, 1), frames=t, merge=merge),
    )


def _pairs(axis: torch.Tensor, dim: int) -> torch.Tensor:
    """[size,K*K] from [size,K]: each tap with each of the other axis, which runs along `dim` of [size,K,K]."""
    size, taps = axis.shape
    return axis.unsqueeze(dim).expand(size, taps, taps).reshape(size, taps * taps)


def _axis(vision_utils: Any, size: int, side: int, mode: str, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps int64 [size,K] and weights float32 [size,K] of an axis. Not to be written to."""
    key = (vision_utils, size, side, mode, align_corners)
    found = _axes.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            axis, device = getattr(vision_utils, _AXIS), torch.device("cpu")
            index, of = torch.arange(size, device=device), torch.tensor(size, device=device)
            found = tuple(axis(index, of, side, mode, align_corners))
        # Under a mode of the caller's they may be something else: that is for this call alone.
        if len(_axes) < _KEPT_AXES and all(type(part) is torch.Tensor and part.is_cpu for part in found):
            _axes[key] = found
    return found


def agrees(vision_utils: Any, side: int, mode: str, align_corners: bool, merge: int) -> bool:
    """Is the quick way there, and does it give the same bits on samples? Remembered once it is known."""
    how = (vision_utils, side, mode, align_corners, merge)
    return agreed(how, functools.partial(_same, how), _SAMPLES)


def _same(how: Any, sample: Grid) -> bool:
    (vision_utils, *options), (t, h, w) = how, sample
    grid = (t, h * options[-1], w * options[-1])
    pairs = zip(_by_axis(vision_utils, grid, *options), _public(vision_utils, grid, *options), strict=True)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
