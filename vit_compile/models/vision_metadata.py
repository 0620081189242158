"""Precomputed keyword arguments for packed Hugging Face towers (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4.xV, GLM-OCR).

Called with `grid_thw` alone, such a tower computes positions, boundaries and window order inside its forward, with host
reads that break a trace. Given these values instead, it traces into one graph without any.

Shapes: T patches, S segments (one per frame), W windows, m merge size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from vit_compile.errors import GridError, MissingDependencyError, ModelError
from vit_compile.models.boundaries import cu_seqlens
from vit_compile.models.interpolation import indices_and_weights
from vit_compile.models.merge_blocks import Grid, position_ids


def vision_metadata(
    tower: torch.nn.Module, grids: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Everything a tower would compute from `grid_thw`, for `tower(pixel_values, **vision_metadata(tower, grids))`.

    Args:
        tower: a packed vision tower; what it needs is read from its attributes.
        grids: one (t, h, w) in patches per image or clip, in the order of the rows of `pixel_values`.
        device: where the tensors go; None means the CPU.

    Returns:
        A dict with, for every tower:
            position_ids: int64 [T,2];
            cu_seqlens: int32 [S+1], one segment per frame;
            max_seqlen: int, the longest segment in patches;
            grid_thw: None, or int64 [S,3] with one row (1, h, w) per frame for towers that read it (GLM-4.xV);
        with windows (Qwen2.5-VL) also:
            window_index: int64 [T/m^2], the order of merge blocks by window;
            cu_window_seqlens: int32 [W+1];
            max_window_seqlen: int, patches of a full window (the same for all grids);
        with interpolated positions (Qwen3-VL) also:
            interp_indices: int64 [T,taps]; interp_weights: float32 [T,taps], to be kept in float32.

    Raises:
        GridError: no grid, a grid that is not three positive integers, or a side that is not a multiple of m.
        ModelError: the tower is not of this kind.
        MissingDependencyError: transformers is missing or too old.
    """
    try:
        from transformers import vision_utils
    except ImportError as error:
        raise MissingDependencyError(
            f"vision_metadata needs transformers 5.17 or newer ({error}): pip install 'vit_compile[hf]'."
        ) from error
    merge = getattr(getattr(tower, "config", None), "spatial_merge_size", None)
    if not isinstance(merge, int):
        raise ModelError(f"{type(tower).__name__} has no config.spatial_merge_size: it is not a packed tower with grids.")
    checked = check_grids(grids, merge)
    tensors: dict[str, torch.Tensor] = {
        "position_ids": position_ids(vision_utils, checked, merge),
        "cu_seqlens": cu_seqlens(vision_utils, checked),
    }
    others: dict[str, int | None] = {"max_seqlen": max(h * w for _, h, w in checked)}
    side: Any = getattr(tower, "num_grid_per_side", None)
    if side is not None:
        mode: Any = tower.interpolation_mode
        align_corners: Any = tower.interpolation_align_corners
        made = [
            indices_and_weights(vision_utils, one, side=side, mode=mode, align_corners=align_corners, merge=merge)
            for one in checked
        ]
        joined = made[0] if len(made) == 1 else [torch.cat(parts) for parts in zip(*made, strict=True)]
        tensors["interp_indices"], tensors["interp_weights"] = joined
    window_pixels: Any = getattr(tower, "window_size", None)
    if window_pixels:
        patch_pixels: Any = tower.patch_size
        tensors["window_index"], tensors["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            torch.tensor(checked, device="cpu"), merge, window_pixels, patch_pixels
        )
        others["max_window_seqlen"] = (window_pixels // merge // patch_pixels * merge) ** 2
    if hasattr(getattr(tower, "embeddings", None), "interpolated_method"):
        # The tower counts frames by cu_seqlens and looks each one up here.
        tensors["grid_thw"] = torch.tensor([(1, h, w) for t, h, w in checked for _ in range(t)], device="cpu")
    else:
        others["grid_thw"] = None
    return (tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}) | others


def check_grids(grids: Sequence[Sequence[int]], merge: int) -> list[Grid]:
    """The grids as tuples of Python ints.

    Args:
        grids: (t, h, w) in patches; any integers, also NumPy's.
        merge: side of a merge block in patches.

    Raises:
        GridError: see `vision_metadata`.
    """
    if len(grids) == 0:
        raise GridError("no grids: give one (t, h, w) in patches per image or clip.")
    checked: list[Grid] = []
    for i, grid in enumerate(grids):
        try:
            t, h, w = (operator.index(side) for side in grid)
        except (TypeError, ValueError):
            raise GridError(f"grid {i} is {grid!r}: expected three integers (t, h, w), in patches.") from None
        if min(t, h, w) < 1:
            raise GridError(f"grid {i} is {(t, h, w)}: t, h and w must be at least 1 patch.")
        if h % merge or w % merge:
            raise GridError(f"grid {i} is {(t, h, w)}: h and w must be multiples of the merge size {merge}; resize the image.")
        checked.append((t, h, w))
    return checked
