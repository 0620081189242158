"""Boundaries from Python integers: those of transformers."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vit_compile.models import agreement, boundaries, merge_blocks

vision_utils = pytest.importorskip("transformers.vision_utils")
GRIDS = [[(1, 2, 2)], [(5, 4, 6)], [(1, 8, 12), (3, 2, 2), (1, 1, 40)], [(2, 3, 1)] * 17]


@pytest.mark.parametrize("merge_temporal", [False, True])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_they_are_those_of_transformers(grids: list[merge_blocks.Grid], merge_temporal: bool) -> None:
    """Images, clips and several of them: the same numbers and dtype, through the quick way, which is known to agree."""
    got = boundaries.cu_seqlens(vision_utils, grids, merge_temporal=merge_temporal)
    want = vision_utils.get_vision_cu_seqlens(torch.tensor(grids), merge_temporal=merge_temporal)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert agreement._agreed["cu_seqlens", vision_utils, merge_temporal]


def clip_by_clip(grid: torch.Tensor) -> torch.Tensor:
    """What a later transformers might mean: a clip is one segment."""
    ends: torch.Tensor = vision_utils.get_vision_cu_seqlens(grid, merge_temporal=True)
    return ends


def wider(grid: torch.Tensor) -> torch.Tensor:
    """The same numbers in another dtype."""
    ends: torch.Tensor = vision_utils.get_vision_cu_seqlens(grid).long()
    return ends


@pytest.mark.parametrize("other", [clip_by_clip, wider])
def test_others_are_asked_for(other: Any) -> None:
    """Where transformers means something else, its function is used."""
    module: Any = types.ModuleType("vision_utils")
    module.get_vision_cu_seqlens = other
    grids = [(3, 4, 6), (1, 2, 2)]
    got, want = boundaries.cu_seqlens(module, grids), other(torch.tensor(grids))
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("context", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_a_mode_of_the_caller_is_not_remembered(context: Any) -> None:
    """What fake tensors or a default device say is for that call: later ones get the numbers, quickly."""
    key = ("cu_seqlens", vision_utils, False)
    agreement._agreed.pop(key, None)
    with contextlib.suppress(Exception), context:
        boundaries.cu_seqlens(vision_utils, [(2, 4, 6)])
    got = boundaries.cu_seqlens(vision_utils, [(2, 4, 6)])
    assert type(got) is torch.Tensor
    assert got.tolist() == [0, 24, 48]
    assert agreement._agreed[key]
