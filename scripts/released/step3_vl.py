"""Step3-VL and Step3.7 at their released vision sizes: an image as one view and three tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.released import Released
from tests.models.reference import step3_vl as published

TILES = 3
_VISION = {"hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16, "image_size": 728, "patch_size": 14}
_VISION |= {"mlp_ratio": 8960 / 1536}
_TEXT = {"hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 64}
_TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 512}
_TEXT |= {"moe_intermediate_size": 64, "share_expert_dim": 64}


def _step3p7(depth: int | None) -> nn.Module:
    from transformers import Step3p7Config, Step3p7ForConditionalGeneration

    vision = _VISION if depth is None else _VISION | {"num_hidden_layers": depth}
    config = Step3p7Config(vision_config=vision, text_config=_TEXT, image_token_id=60)
    model: nn.Module = Step3p7ForConditionalGeneration(config)
    return model.eval()


def _published(depth: int | None) -> nn.Module:
    sizes = published.RELEASED if depth is None else published.RELEASED | {"num_hidden_layers": depth}
    return published.Step3VLForConditionalGeneration(sizes).eval()


def _pixels(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    view, tiles = (torch.randn(n, 3, s, s, generator=generator) for n, s in ((1, 728), (TILES, 504)))
    return view.to(device, dtype), tiles.to(device, dtype)


def _step3p7_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    view, tiles = _pixels(device, dtype)
    return {"pixel_values": view, "pixel_values_local": tiles, "num_local_patches": [TILES]}


def _published_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    view, tiles = _pixels(device, dtype)
    return {"pixel_values": view, "patch_pixel_values": tiles, "num_patches": [TILES]}


def _features(model: Any, inputs: dict[str, Any]) -> Any:
    return model.model.get_image_features(**inputs)


def _budgets(view: int, tile: int) -> dict[str, Any]:
    """One view and four; three tiles and twelve."""
    ladders = {"global": (view, 4 * view), "local": (TILES * tile, 4 * TILES * tile)}
    return {"path_token_budgets": ladders, "max_items_per_batch": 12}


MODELS: tuple[Released, ...] = (
    Released(
        name="Step3-VL",
        architecture="Step3-VL",
        build=_published,
        inputs=_published_inputs,
        call=_features,
        options=_budgets(2708, 1300),
        image="728 x 728 and 3 tiles of 504 x 504",
    ),
    Released(
        name="Step-3.7-Flash",
        architecture="Step3.7",
        build=_step3p7,
        inputs=_step3p7_inputs,
        call=_features,
        options=_budgets(169, 81),
        image="728 x 728 and 3 tiles of 504 x 504",
    ),
)
