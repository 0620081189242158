"""PaddleOCR-VL at its released vision size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.released import Released

_GRID = (1, 46, 64)
"""Of one page of 644 x 896 pixels, in patches: 736 tokens."""


def _build(depth: int | None) -> nn.Module:
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    config = PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27 if depth is None else depth,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 384,
        },
        text_config={
            "hidden_size": 1024,  # the projector's output width
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [16, 24, 24]},
        },
    )
    return PaddleOCRVLForConditionalGeneration(config).eval()


def _inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    t, h, w = _GRID
    pixels = torch.randn(t * h * w, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels.to(device, dtype), "image_grid_thw": torch.tensor([_GRID], device=device)}


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


MODELS: tuple[Released, ...] = (
    Released(
        name="PaddleOCR-VL",
        architecture="PaddleOCR-VL",
        build=_build,
        inputs=_inputs,
        call=_call,
        options={"token_budgets": (768, 3072), "token_range": (768, 3072)},
        image="644 x 896",
    ),
)
