"""Patches in the order of merge blocks, and positions made in that order."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vit_compile.models import agreement, merge_blocks

Grids = list[tuple[int, int, int]]


def drawn(merge: int) -> Grids:
    """Grids of several shapes."""
    generator = torch.Generator().manual_seed(merge)
    sides = torch.randint(1, 12, (9, 3), generator=generator).tolist()
    return [(1, merge, merge), (1, 40 * merge, merge), (3, merge, 7 * merge), *((t, h * merge, w * merge) for t, h, w in sides)]


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("values", [1, 3])
def test_combined_is_raster_order_picked_by_merge_order(values: int, merge: int) -> None:
    """Combined in raster order and then sorted by `merge_order`, patches have the same values."""
    for t, h, w in drawn(merge):
        rows, columns = torch.randn(h, values), torch.randn(w, values)
        raster = (rows[:, None] * columns[None]).view(h * w, values).repeat(t, 1)
        want = raster[merge_blocks.merge_order(h, w, merge, t)]
        arranged = merge_blocks.as_rows(rows, merge), merge_blocks.as_columns(columns, merge)
        assert torch.equal(merge_blocks.combined(torch.mul, *arranged, values=values, frames=t), want)


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_position_ids_are_those_of_transformers(merge: int) -> None:
    """One image or clip, and several: equal, through the quick way."""
    vision_utils = pytest.importorskip("transformers.vision_utils")
    grids = drawn(merge)
    assert merge_blocks._agree(vision_utils, merge)
    for some in (*([grid] for grid in grids), grids):
        want = vision_utils.get_vision_position_ids(torch.tensor(some), merge)
        got = merge_blocks.position_ids(vision_utils, some, merge)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def columns_first(grid: torch.Tensor, merge: int) -> torch.Tensor:
    """What a later transformers might mean by positions."""
    return merge_blocks._quick([tuple(row) for row in grid.tolist()], merge).flip(1)


def test_other_positions_are_asked_for() -> None:
    """Where transformers means something else, its function is used: the numbers are its own."""
    module: Any = types.ModuleType("vision_utils")
    module.get_vision_position_ids = columns_first
    got = merge_blocks.position_ids(module, [(2, 4, 6)], 2)
    assert torch.equal(got, columns_first(torch.tensor([(2, 4, 6)]), 2))


def test_a_mode_of_the_caller_is_not_remembered() -> None:
    """Fake tensors, or a default device, say nothing about agreement: later calls get the numbers, on the CPU."""
    vision_utils = pytest.importorskip("transformers.vision_utils")
    for context in (torch.device("meta"), FakeTensorMode()):
        agreement._agreed.clear()
        with contextlib.suppress(Exception), context:
            merge_blocks.position_ids(vision_utils, [(1, 4, 6)], 2)
        got = merge_blocks.position_ids(vision_utils, [(1, 4, 6)], 2)
        assert type(got) is torch.Tensor
        assert torch.equal(got, vision_utils.get_vision_position_ids(torch.tensor([(1, 4, 6)]), 2))
        assert merge_blocks._agree(vision_utils, 2)
        with context:  # and what is known to agree works under it, or says what is wrong with it
            if isinstance(context, torch.device):
                assert merge_blocks.position_ids(vision_utils, [(1, 4, 6)], 2).is_cpu
                assert merge_blocks.merge_order(4, 6, 2).is_cpu
