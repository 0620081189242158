"""DeepSeek-OCR, DeepSeek-OCR 2 and Unlimited-OCR at their released vision sizes: a page as one view and 2 x 3 tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scripts.released import Released
from tests.models.reference import deepseek_ocr as published

COLUMNS, ROWS = 2, 3
_TEXT = {"hidden_size": 1280, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
_TEXT |= {"num_attention_heads": 10, "num_key_value_heads": 10, "n_routed_experts": 4, "num_experts_per_tok": 2}
_TEXT |= {"mlp_layer_types": ["dense"], "bos_token_id": 1, "eos_token_id": 2}
_QWEN2 = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 8}
_QWEN2 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


def _with_depth(kind: str, encoder: dict[str, Any]) -> Callable[[int | None], nn.Module]:
    def build(depth: int | None) -> nn.Module:
        import transformers

        sam = {} if depth is None else {"num_hidden_layers": depth, "global_attn_indexes": [depth - 1]}
        layers = {"num_hidden_layers": 24 if depth is None else depth}
        vision = {"sam_config": sam, "encoder_config": encoder | layers}
        config = getattr(transformers, f"{kind}Config")(vision_config=vision, text_config=_TEXT, image_token_id=60)
        model: Any = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        return _filled(model.eval(), model.model.vision_tower.sam_encoder)

    return build


def _published(depth: int | None) -> nn.Module:
    sizes = published.RELEASED
    if depth is not None:
        sizes = sizes | {"sam_depth": depth, "depth": depth, "global_layers": (depth - 1,)}
    model = published.DeepseekOCRForCausalLM(sizes).eval()
    return _filled(model, model.model.sam_model)


@torch.no_grad()
def _filled(model: nn.Module, sam: nn.Module) -> nn.Module:
    """Weights of SAM start as zeros, or nearly, which would hide its features."""
    for parameter in sam.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
    return model


def _pixels(tile: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    view, tiles = (torch.randn(n, 3, s, s, generator=generator) for n, s in ((1, 1024), (COLUMNS * ROWS, tile)))
    return view.to(device, dtype), tiles.to(device, dtype)


def _ocr2_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    view, tiles = _pixels(768, device, dtype)
    return {"pixel_values": view, "pixel_values_local": tiles, "num_local_patches": [COLUMNS * ROWS]}


def _unlimited_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    view, tiles = _pixels(640, device, dtype)
    grid = {"num_local_patches": [COLUMNS * ROWS], "patches_grid": [[COLUMNS, ROWS]]}
    return {"pixel_values": view, "pixel_values_local": tiles, **grid}


def _published_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    view, tiles = _pixels(640, device, dtype)
    return {"images": [(tiles, view)], "images_spatial_crop": torch.tensor([[COLUMNS, ROWS]])}


def _features(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


def _forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model(*inputs.values())


def _budgets(**tokens: int) -> dict[str, Any]:
    """One view and four; six tiles and twenty-four."""
    ladders = {path: (n, 4 * n) if "global" in path else (6 * n, 24 * n) for path, n in tokens.items()}
    return {"path_token_budgets": ladders, "max_items_per_batch": 24}


_AS_WRITTEN = {"mode": "eager"}
"""Inductor takes minutes for the windowed attention of SAM with its relative positions."""

MODELS: tuple[Released, ...] = (
    Released(
        name="DeepSeek-OCR",
        architecture="DeepSeek-OCR",
        build=_published,
        inputs=_published_inputs,
        call=_forward,
        options={**_budgets(sam_global=256, sam_local=100, vision_global=257, vision_local=101), **_AS_WRITTEN},
        image="1024 x 1024 and 6 tiles of 640 x 640",
    ),
    Released(
        name="DeepSeek-OCR-2",
        architecture="DeepSeek-OCR 2",
        build=_with_depth("DeepseekOcr2", _QWEN2),
        inputs=_ocr2_inputs,
        call=_features,
        options={**_budgets(**{"global": 256, "local": 144}), **_AS_WRITTEN},
        image="1024 x 1024 and 6 tiles of 768 x 768",
    ),
    Released(
        name="Unlimited-OCR",
        architecture="Unlimited-OCR",
        build=_with_depth("UnlimitedOcr", {}),
        inputs=_unlimited_inputs,
        call=_features,
        options={**_budgets(**{"global": 256, "local": 100}), **_AS_WRITTEN},
        image="1024 x 1024 and 6 tiles of 640 x 640",
    ),
)
