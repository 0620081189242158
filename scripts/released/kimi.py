"""Kimi-K2.5 and Kimi-VL at their released vision sizes, which are the same: MoonViT of 27 layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.released import Released
from tests.models.reference import kimi_vl as published

SIDE, PATCH = 64, 14
"""Patches of 896 x 896 pixels."""


def _k25(depth: int | None) -> nn.Module:
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": 64,
    }
    vision = {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    vision |= {} if depth is None else {"num_hidden_layers": depth}
    config = Kimi_K25Config(text_config=text, vision_config=vision, image_token_id=60, video_token_id=61)
    model: nn.Module = Kimi_K25ForConditionalGeneration(config)
    return model.eval()


def _vl(depth: int | None) -> nn.Module:
    return published.kimi_vl(**({} if depth is None else {"num_hidden_layers": depth})).eval()


def _pixels(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SIDE**2, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _k25_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"pixel_values": _pixels(device, dtype), "image_grid_thw": torch.tensor([(1, SIDE, SIDE)], device=device)}


def _vl_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"pixel_values": _pixels(device, dtype), "image_grid_hws": torch.tensor([(SIDE, SIDE)], device=device)}


def _k25_call(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


def _vl_call(model: Any, inputs: dict[str, Any]) -> Any:
    return model._extract_image_features(**inputs)


_OPTIONS = {"token_budgets": (SIDE**2 // 4, SIDE**2)}

MODELS: tuple[Released, ...] = (
    Released(
        name="Kimi-K2.5",
        architecture="Kimi-K2.5",
        build=_k25,
        inputs=_k25_inputs,
        call=_k25_call,
        options=_OPTIONS,
        image="896 x 896",
    ),
    Released(
        name="Kimi-VL-A3B",
        architecture="Kimi-VL",
        build=_vl,
        inputs=_vl_inputs,
        call=_vl_call,
        options=_OPTIONS,
        image="896 x 896",
    ),
)
