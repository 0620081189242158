"""Boundaries of packed images: those of transformers, from Python integers, which is quicker than operations on three numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from vit_compile.models.agreement import agreed, identical
from vit_compile.models.merge_blocks import Grid

_SAMPLES: tuple[tuple[Grid, ...], ...] = (((1, 2, 3),), ((3, 2, 2), (1, 1, 4), (2, 1, 1)))


def cu_seqlens(vision_utils: Any, grids: Sequence[Grid], *, merge_temporal: bool = False) -> torch.Tensor:
    """What `transformers.vision_utils.get_vision_cu_seqlens` gives: int32 [S+1].

    Args:
        vision_utils: the module of transformers; where it gives something else on samples, it is asked.
        grids: (t, h, w) in patches of each image or clip.
        merge_temporal: a clip is one segment, not one for each frame.
    """
    same = functools.partial(_same, vision_utils, merge_temporal)
    if not agreed(("cu_seqlens", vision_utils, merge_temporal), same, _SAMPLES):
        return _public(vision_utils, grids, merge_temporal)
    return _quick(grids, merge_temporal)


def _public(vision_utils: Any, grids: Sequence[Grid], merge_temporal: bool) -> torch.Tensor:
    grid = torch.tensor(grids, device="cpu")
    ends: torch.Tensor = vision_utils.get_vision_cu_seqlens(grid, **({"merge_temporal": True} if merge_temporal else {}))
    return ends


def _quick(grids: Sequence[Grid], merge_temporal: bool) -> torch.Tensor:
    lengths = [t * h * w for t, h, w in grids] if merge_temporal else [h * w for t, h, w in grids for _ in range(t)]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")


def _same(vision_utils: Any, merge_temporal: bool, sample: Sequence[Grid]) -> bool:
    return identical(_quick(sample, merge_temporal), _public(vision_utils, sample, merge_temporal))
