"""MiniCPM-V 4.6 at its released vision size (SigLIP2-400M): a photograph as a thumbnail and six slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.released import Released

SLICES, SIDE, PATCH = 7, 32, 14
"""Thumbnail included; patches of 448 x 448 pixels."""

_VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_VISION |= {"image_size": 980, "patch_size": PATCH}
_TEXT = {"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
_TEXT |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_TEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}


def _build(depth: int | None) -> nn.Module:
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration

    vision = _VISION if depth is None else _VISION | {"num_hidden_layers": depth}
    config = MiniCPMV4_6Config(
        vision_config=vision,
        text_config=_TEXT,
        insert_layer_id=min(6, vision["num_hidden_layers"] - 1),
        image_token_id=60,
        video_token_id=61,
    )
    model: nn.Module = MiniCPMV4_6ForConditionalGeneration(config)
    return model.eval()


def _inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    pixels = torch.randn(1, 3, PATCH, SLICES * SIDE**2 * PATCH, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([(SIDE, SIDE)] * SLICES, device=device)
    return {"pixel_values": pixels.to(device, dtype), "target_sizes": sizes}


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model.model.get_image_features(**inputs)


MODELS: tuple[Released, ...] = (
    Released(
        name="MiniCPM-V-4.6",
        architecture="MiniCPM-V 4.6",
        build=_build,
        inputs=_inputs,
        call=_call,
        options={"token_budgets": (SIDE**2 // 16, SLICES * SIDE**2 // 16, 4 * SLICES * SIDE**2 // 16)},
        image="448 x 448 and 6 slices",
    ),
)
