"""timm's `vit_base_patch16_224` with images of any size."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from scripts.released import Released


def _build(depth: int | None) -> nn.Module:
    kind = import_module("timm.models.vision_transformer").VisionTransformer
    made: nn.Module = kind(depth=12 if depth is None else depth, dynamic_img_size=True)
    return made.eval()


def _inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(1, 3, 320, 480, generator=torch.Generator().manual_seed(0)).to(device, dtype)}


def _forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


MODELS: tuple[Released, ...] = (
    Released(
        name="timm ViT-base/16",
        architecture="timm VisionTransformer",
        build=_build,
        inputs=_inputs,
        call=_forward,
        options={"token_budgets": (768, 3072)},
        image="320 x 480",
    ),
)
