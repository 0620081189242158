"""Pixtral-12B and Mistral-Small-3.1 at their released vision sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from scripts.released import Released


def _text(width: int) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "hidden_size": width,  # the projector's output width
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
    }


def _vision(depth: int | None, patch_size: int, image_size: int) -> dict[str, Any]:
    return {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24 if depth is None else depth,
        "num_attention_heads": 16,
        "patch_size": patch_size,
        "image_size": image_size,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }


def _pixtral(depth: int | None) -> nn.Module:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=_vision(depth, patch_size=16, image_size=1024),
        text_config=_text(5120),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_index=10,
    )
    return LlavaForConditionalGeneration(config).eval()


def _mistral3(depth: int | None) -> nn.Module:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(
        vision_config=_vision(depth, patch_size=14, image_size=1540),
        text_config=_text(5120),
        vision_feature_layer=-1,
        spatial_merge_size=2,
        image_token_index=10,
    )
    return Mistral3ForConditionalGeneration(config).eval()


def _inputs(device: torch.device, dtype: torch.dtype, *, size: tuple[int, int]) -> dict[str, Any]:
    pixels = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels.to(device, dtype), "image_sizes": torch.tensor([size], device=device)}


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


MODELS: tuple[Released, ...] = (
    Released(
        name="Pixtral-12B",
        architecture="Pixtral",
        build=_pixtral,
        inputs=functools.partial(_inputs, size=(768, 1024)),  # 3072 tokens
        call=_call,
        options={"token_budgets": (3072, 6144), "token_range": (3072, 6144)},
        image="768 x 1024",
    ),
    Released(
        name="Mistral-Small-3.1-24B",
        architecture="Mistral 3",
        build=_mistral3,
        inputs=functools.partial(_inputs, size=(756, 1008)),  # 972 tokens
        call=_call,
        options={"token_budgets": (1024, 4096), "token_range": (1024, 4096)},
        image="756 x 1008",
    ),
)
