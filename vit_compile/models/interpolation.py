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

from vit_compile.models.agreement import agreed, identical
from vit_compile.models.merge_blocks import Grid, as_columns, as_rows, combined, kept

_AXIS = "_interpolation_axis_taps_weights"
_SAMPLES = ((1, 2, 3), (2, 5, 1), (1, 1, 40))
"""Grids, in merge blocks, on which the quick way is compared: thin ones, a clip, axes longer and shorter than the table's."""


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
    how = (vision_utils, side, mode, align_corners, merge)
    row_indices, row_weights, _, _ = _axis(h, *how)
    _, _, column_indices, column_weights = _axis(w, *how)
    values = row_indices.shape[-1] // merge**2
    return (
        combined(torch.add, row_indices, column_indices, values=values, frames=t),
        combined(torch.mul, row_weights, column_weights, values=values, frames=t),
    )


def _axis(size: int, vision_utils: Any, side: int, mode: str, align_corners: bool, merge: int) -> tuple[torch.Tensor, ...]:
    """Indices and weights of an axis of so many patches as rows, and as columns: int64 and float32, K*K values of a patch."""

    def make() -> tuple[torch.Tensor, ...]:
        axis, device = getattr(vision_utils, _AXIS), torch.device("cpu")
        index, of = torch.arange(size, device=device), torch.tensor(size, device=device)
        taps, weights = axis(index, of, side, mode, align_corners)
        return (
            as_rows(_pairs(taps, 2) * side, merge),
            as_rows(_pairs(weights, 2), merge),
            as_columns(_pairs(taps, 1), merge),
            as_columns(_pairs(weights, 1), merge),
        )

    return kept((vision_utils, size, side, mode, align_corners, merge), make)


def _pairs(axis: torch.Tensor, dim: int) -> torch.Tensor:
    """[size,K*K] from [size,K]: each tap with each of the other axis, which runs along `dim` of [size,K,K]."""
    size, taps = axis.shape
    return axis.unsqueeze(dim).expand(size, taps, taps).reshape(size, taps * taps)


def agrees(vision_utils: Any, side: int, mode: str, align_corners: bool, merge: int) -> bool:
    """Is the quick way there, and does it give the same bits on samples? Remembered once it is known."""
    how = (vision_utils, side, mode, align_corners, merge)
    return agreed(how, functools.partial(_same, how), _SAMPLES)


def _same(how: Any, sample: Grid) -> bool:
    (vision_utils, *options), (t, h, w) = how, sample
    grid = (t, h * options[-1], w * options[-1])
    return all(map(identical, _by_axis(vision_utils, grid, *options), _public(vision_utils, grid, *options)))
