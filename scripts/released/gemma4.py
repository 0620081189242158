"""Gemma 4 at its released vision sizes: the small tower (E2B, E4B) and the large one (26B-A4B, 31B)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scripts.released import Released

HEIGHT, WIDTH, PADDED = 42, 57, 2520
"""Patches of a 3:4 photograph at the default of 280 tokens, and what its processor pads them to."""


def _build(text_width: int, **vision: Any) -> Callable[[int | None], nn.Module]:
    text = {
        "hidden_size": text_width,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 32,
        "layer_types": ["full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size": 256,
        "vocab_size_per_layer_input": 256,
    }

    def build(depth: int | None) -> nn.Module:
        from transformers import Gemma4Config, Gemma4ForConditionalGeneration

        layers = {} if depth is None else {"num_hidden_layers": depth}
        config = Gemma4Config(text_config=text, vision_config={**vision, **layers}, audio_config=None)
        model = Gemma4ForConditionalGeneration(config).eval()
        if config.vision_config.standardize:
            tower = model.model.vision_tower
            tower.std_bias.zero_()
            tower.std_scale.fill_(1.0)
        return model

    return build


def _inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    patches = HEIGHT * WIDTH
    pixels, positions = torch.zeros(1, PADDED, 768), torch.full((1, PADDED, 2), -1)
    pixels[0, :patches] = torch.rand(patches, 768, generator=torch.Generator().manual_seed(0))
    number = torch.arange(patches)
    positions[0, :patches] = torch.stack([number % WIDTH, number // WIDTH], dim=-1)
    return {"pixel_values": pixels.to(device, dtype), "image_position_ids": positions.to(device)}


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


_COMMON = {
    "architecture": "Gemma 4",
    "inputs": _inputs,
    "call": _call,
    "options": {"token_budgets": (280, 560, 1120)},
    "image": "672 x 912",
}

MODELS: tuple[Released, ...] = (
    Released(
        name="Gemma-4-E4B",
        build=_build(
            2560,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=16,
            num_attention_heads=12,
            num_key_value_heads=12,
            head_dim=64,
            use_clipped_linears=True,
        ),
        **_COMMON,
    ),
    Released(
        name="Gemma-4-31B",
        build=_build(
            5376,
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=72,
            standardize=True,
        ),
        **_COMMON,
    ),
)
