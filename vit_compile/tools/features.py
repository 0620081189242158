"""The features file: one pooled vector per image, in safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from vit_compile.errors import OptionError
from vit_compile.tools.vision_models import VisionModel


def write_features(path: str | Path, features: Mapping[str, torch.Tensor], model: VisionModel, *, max_patches: int) -> Path:
    """Writes pooled features with what made them.

    Args:
        path: the file to write; its folder is made.
        features: name -> float32 tensor [D].
        model: its name, pooling and preprocessing go into the file's metadata (strings, as the format wants).
        max_patches: the cap under which the images were resized.
    Returns:
        The path.
    """
    path = Path(path)
    metadata = {
        "format": "pt",
        "model": model.name,
        "family": model.family,
        "pooling": model.encoder.pooling,
        "dtype": str(model.dtype).removeprefix("torch."),
        "preprocessing": json.dumps(preprocessing(model, max_patches=max_patches)),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in features.items()}, path, metadata=metadata)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}.") from error
    return path


def preprocessing(model: VisionModel, *, max_patches: int) -> dict[str, object]:
    """The preprocessing as plain values, for files and reports."""
    fixed = model.fixed_grid
    return {
        "resize": "bicubic, native aspect ratio" if fixed is None else f"bicubic, {fixed.height}x{fixed.width}",
        "patch_side": model.patch_side,
        "max_patches": max_patches if fixed is None else fixed.patches,
        "image_mean": list(model.normalization.mean),
        "image_std": list(model.normalization.std),
        "statistics_from": model.normalization.source,
    }
