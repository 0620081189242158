"""Taps and weights of interpolated positions, made by axis: those of transformers, bit for bit."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vit_compile.models import agreement, interpolation

vision_utils = pytest.importorskip("transformers.vision_utils")

MODES = [("bilinear", True), ("bilinear", False), ("bicubic", True), ("bicubic", False)]


def public(
    grid: tuple[int, int, int], side: int, mode: str, align_corners: bool, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers gives."""
    made: tuple[torch.Tensor, torch.Tensor] = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), side, mode=mode, align_corners=align_corners, spatial_merge_size=merge
    )
    return made


@pytest.mark.parametrize(("mode", "align_corners"), MODES)
@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("side", [1, 5, 48])
def test_the_same_bits(side: int, merge: int, mode: str, align_corners: bool) -> None:
    """For thin and long images, clips, tables smaller and larger than the image: equal to the public function, through the
    quick way."""
    assert interpolation.agrees(vision_utils, side, mode, align_corners, merge)
    generator = torch.Generator().manual_seed(side * merge)
    drawn = [tuple(torch.randint(1, limit, (), generator=generator).item() for limit in (4, 30, 30)) for _ in range(8)]
    for t, h, w in [(1, 1, 1), (2, 1, 50), (1, 50, 1), *drawn]:
        how = ((int(t), int(h) * merge, int(w) * merge), side, mode, align_corners, merge)
        got = interpolation.indices_and_weights(
            vision_utils, how[0], side=side, mode=mode, align_corners=align_corners, merge=merge
        )
        for one, other in zip(got, public(*how), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), how


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_mode_of_the_caller_is_not_remembered(device: str) -> None:
    """What was made under a default device or with fake tensors is for that call: later ones get the numbers, on the CPU."""
    how: dict[str, Any] = {"side": 11, "mode": "bilinear", "align_corners": True, "merge": 2}
    grid = (1, 46, 58)  # sizes that no other test asks for
    agreement._agreed.clear()
    context = torch.device(device) if device == "meta" else FakeTensorMode()
    with contextlib.suppress(Exception), context:
        interpolation.indices_and_weights(vision_utils, grid, **how)
    got = interpolation.indices_and_weights(vision_utils, grid, **how)
    for one, other in zip(got, public(grid, 11, "bilinear", True, 2), strict=True):
        assert type(one) is torch.Tensor
        assert torch.equal(one, other)
    assert interpolation.agrees(vision_utils, 11, "bilinear", True, 2)


def with_axis(axis: Any) -> types.ModuleType:
    """transformers with another private part."""
    made = types.ModuleType("vision_utils")
    vars(made)["get_vision_interpolation_indices_and_weights"] = vision_utils.get_vision_interpolation_indices_and_weights
    if axis is not None:
        vars(made)["_interpolation_axis_taps_weights"] = axis
    return made


def raises(*args: Any) -> Any:
    """A private function with other arguments."""
    raise TypeError("unexpected")


def shifted(*args: Any) -> Any:
    """One that means something else."""
    taps, weights = vision_utils._interpolation_axis_taps_weights(*args)
    return taps, weights.flip(1)


@pytest.mark.parametrize("axis", [None, raises, shifted], ids=["gone", "raises", "differs"])
def test_without_the_private_part(axis: Any) -> None:
    """Where it is gone, or became something else, the public function is used: the numbers stay."""
    module = with_axis(axis)
    assert not interpolation.agrees(module, 7, "bilinear", True, 2)
    grid = (2, 6, 10)
    got = interpolation.indices_and_weights(module, grid, side=7, mode="bilinear", align_corners=True, merge=2)
    for one, other in zip(got, public(grid, 7, "bilinear", True, 2), strict=True):
        assert torch.equal(one, other)
