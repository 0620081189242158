"""Packed towers with grids, at the vision configurations of released models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from scripts.released import Released

IMAGE_TOKEN, VIDEO_TOKEN = 30, 31

QWEN3_TOWER = {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}
QWEN3_SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}
GLM_TOWER = {"depth": 24, "hidden_size": 1536, "num_heads": 12, "image_size": 336, "out_hidden_size": 4096}


def _text(width: int, moe: Mapping[str, Any] | None) -> dict[str, Any]:
    """One layer that is never called; its width is the vision part's."""
    return {
        "vocab_size": 32,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "layer_types": ["full_attention"],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        **(moe or {}),
    }


MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
GLM_MOE = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}


def _build(
    depth: int | None, *, classes: str, vision: Mapping[str, Any], width: int, moe: Mapping[str, Any] | None = None
) -> nn.Module:
    import transformers

    config_class, model_class = (getattr(transformers, f"{classes}{suffix}") for suffix in ("Config", "Model"))
    values = {**vision, **({"depth": depth} if depth is not None else {})}
    if depth is not None and "deepstack_visual_indexes" in values:
        levels = len(values["deepstack_visual_indexes"])
        values["deepstack_visual_indexes"] = list(range(min(levels, depth)))
    if depth is not None and "fullatt_block_indexes" in values:
        values["fullatt_block_indexes"] = [depth - 1]
    config = config_class(
        text_config=_text(width, moe), vision_config=values, image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN
    )
    model: nn.Module = model_class(config).eval()
    return model


def _inputs(device: torch.device, dtype: torch.dtype, *, patch: int, height: int, width: int) -> dict[str, Any]:
    """An image of so many patches."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(height * width, 3 * 2 * patch**2, generator=generator)
    return {"pixel_values": pixels.to(device, dtype), "image_grid_thw": torch.tensor([(1, height, width)], device=device)}


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


def _released(
    name: str,
    architecture: str,
    classes: str,
    vision: Mapping[str, Any],
    *,
    width: int,
    patch: int,
    moe: Mapping[str, Any] | None = None,
    side: int = 64,
) -> Released:
    """A square image of `side` patches."""
    tokens = side * side // 4
    return Released(
        name=name,
        architecture=architecture,
        build=partial(_build, classes=classes, vision=vision, width=width, moe=moe),
        inputs=partial(_inputs, patch=patch, height=side, width=side),
        call=_call,
        options={
            "token_budgets": [tokens, 4 * tokens],
            "token_range": (64, 4 * tokens),
            "max_items_per_batch": 4,
            "max_frames_per_batch": 4,
            "segment_capacities": (1, 4),
        },
        image=f"{side * patch} x {side * patch}",
    )


MODELS: tuple[Released, ...] = (
    _released(
        "Qwen2-VL-7B",
        "Qwen2-VL",
        "Qwen2VL",
        {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 3584},
        width=3584,
        patch=14,
    ),
    _released(
        "Qwen2.5-VL-7B",
        "Qwen2.5-VL",
        "Qwen2_5_VL",
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 3584,
        },
        width=3584,
        patch=14,
    ),
    _released("Qwen3-VL-8B", "Qwen3-VL", "Qwen3VL", QWEN3_TOWER, width=4096, patch=16),
    _released("Qwen3-VL-2B", "Qwen3-VL", "Qwen3VL", QWEN3_SMALL_TOWER, width=2048, patch=16),
    _released(
        "Qwen3-VL-30B-A3B", "Qwen3-VL-MoE", "Qwen3VLMoe", {**QWEN3_TOWER, "out_hidden_size": 2048}, width=2048, patch=16, moe=MOE
    ),
    _released("Qwen3.5-27B", "Qwen3.5, Qwen3.6", "Qwen3_5", {"out_hidden_size": 5120}, width=5120, patch=16),
    _released(
        "Qwen3.5-35B-A3B", "Qwen3.5-MoE, Qwen3.6-MoE", "Qwen3_5Moe", {"out_hidden_size": 2048}, width=2048, patch=16, moe=MOE
    ),
    _released("GLM-4.1V-9B", "GLM-4.1V", "Glm4v", {**GLM_TOWER, "intermediate_size": 13696}, width=4096, patch=14),
    _released("GLM-4.5V", "GLM-4.5V", "Glm4vMoe", {**GLM_TOWER, "intermediate_size": 10944}, width=4096, patch=14, moe=GLM_MOE),
    _released(
        "GLM-4.6V-Flash",
        "GLM-4.6V",
        "Glm46V",
        {**GLM_TOWER, "intermediate_size": 13696, "model_type": "glm4v_vision"},
        width=4096,
        patch=14,
    ),
    _released(
        "GLM-OCR",
        "GLM-OCR",
        "GlmOcr",
        {
            "depth": 24,
            "hidden_size": 1024,
            "num_heads": 16,
            "intermediate_size": 4096,
            "out_hidden_size": 1536,
            "attention_bias": True,
        },
        width=1536,
        patch=14,
    ),
)
