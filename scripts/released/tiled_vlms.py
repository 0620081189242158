"""InternVL3, Gemma 3, Llama 4, LLaVA, Idefics3 and SmolVLM at their released vision sizes: an image as its tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from scripts.released import Released
from tests.models.reference.internvl_chat import internvl_chat

INTERN_VIT_300M = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
SIGLIP_SO400M = {"hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304, "patch_size": 14}
SIGLIP_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "patch_size": 16}
CLIP_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "patch_size": 14}
LLAMA4_VISION = {
    "hidden_size": 1408,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "image_size": 336,
    "patch_size": 14,
    "vision_output_dim": 4096,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "pixel_shuffle_ratio": 0.5,
}
_PLACEHOLDER = 3


def _text(width: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    return {**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, **more}


def _transformers(kind: str, vision: Mapping[str, Any], layers: int, **config: Any) -> Callable[[int | None], nn.Module]:
    def build(depth: int | None) -> nn.Module:
        import transformers

        sizes = {**vision, "num_hidden_layers": layers if depth is None else depth}
        made = getattr(transformers, f"{kind}Config")(vision_config=sizes, **config)
        model: nn.Module = getattr(transformers, f"{kind}ForConditionalGeneration")(made)
        return model.eval()

    return build


def _published(depth: int | None) -> nn.Module:
    layers = 24 if depth is None else depth
    return internvl_chat(hidden=1024, layers=layers, heads=16, mlp=4096, image=448, patch=14, width=4096).eval()


def _released(
    name: str,
    architecture: str,
    build: Callable[[int | None], nn.Module],
    *,
    tiles: int,
    side: int,
    tokens: int,
    call: Callable[[Any, torch.Tensor], Any] = lambda model, pixels: model.model.get_image_features(pixels),
) -> Released:
    """`tokens` are those of a tile that budgets count."""

    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        pixels = torch.randn(tiles, 3, side, side, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels.to(device, dtype)}

    return Released(
        name=name,
        architecture=architecture,
        build=build,
        inputs=inputs,
        call=lambda model, given: call(model, given["pixel_values"]),
        options={"token_budgets": (tiles * tokens, 4 * tiles * tokens)},
        image=f"{tiles} tiles of {side} x {side}" if tiles > 1 else f"{side} x {side}",
    )


def _tower(model: Any, pixels: torch.Tensor) -> Any:
    return model.model.vision_model(pixels)


MODELS: tuple[Released, ...] = (
    _released(
        "InternVL3-8B",
        "InternVL 2-3.5",
        _transformers(
            "InternVL",
            {**INTERN_VIT_300M, "image_size": [448, 448], "patch_size": [14, 14]},
            24,
            text_config=_text(3584, model_type="qwen2"),
            image_token_id=_PLACEHOLDER,
        ),
        tiles=7,
        side=448,
        tokens=256,
    ),
    _released(
        "InternVL2.5-8B (remote code)",
        "InternVL 2-3.5 (remote code)",
        _published,
        tiles=7,
        side=448,
        tokens=256,
        call=lambda model, pixels: model.extract_feature(pixels),
    ),
    _released(
        "Gemma-3-4B",
        "Gemma 3",
        _transformers(
            "Gemma3",
            {**SIGLIP_SO400M, "image_size": 896, "vision_use_head": False},
            27,
            text_config=_text(2560),
            mm_tokens_per_image=256,
            image_token_index=_PLACEHOLDER,
        ),
        tiles=1,
        side=896,
        tokens=256,
    ),
    _released(
        "Llama-4-Scout-17B-16E",
        "Llama 4",
        _transformers(
            "Llama4",
            LLAMA4_VISION,
            34,
            text_config=_text(5120, intermediate_size_mlp=64, num_local_experts=2),
            image_token_index=_PLACEHOLDER,
        ),
        tiles=5,
        side=336,
        tokens=144,
        call=lambda model, pixels: model.vision_model(pixels),
    ),
    _released(
        "LLaVA-1.5-7B",
        "LLaVA",
        _transformers(
            "Llava",
            {**CLIP_LARGE, "model_type": "clip_vision_model", "image_size": 336, "projection_dim": 768},
            24,
            text_config=_text(4096, model_type="llama"),
            image_token_index=_PLACEHOLDER,
        ),
        tiles=1,
        side=336,
        tokens=576,
    ),
    _released(
        "Idefics3-8B",
        "Idefics3",
        _transformers(
            "Idefics3",
            {**SIGLIP_SO400M, "image_size": 364},
            27,
            text_config=_text(4096, model_type="llama"),
            scale_factor=2,
            image_token_id=_PLACEHOLDER,
            pad_token_id=0,
        ),
        tiles=13,
        side=364,
        tokens=169,
        call=_tower,
    ),
    _released(
        "SmolVLM2-2.2B",
        "SmolVLM",
        _transformers(
            "SmolVLM",
            {**SIGLIP_SO400M, "image_size": 384},
            27,
            text_config=_text(2048, model_type="llama"),
            scale_factor=3,
            image_token_id=_PLACEHOLDER,
            pad_token_id=0,
        ),
        tiles=13,
        side=384,
        tokens=81,
        call=_tower,
    ),
    _released(
        "SmolVLM-256M",
        "SmolVLM",
        _transformers(
            "SmolVLM",
            {**SIGLIP_BASE, "image_size": 512},
            12,
            text_config=_text(576, model_type="llama"),
            scale_factor=4,
            image_token_id=_PLACEHOLDER,
            pad_token_id=0,
        ),
        tiles=13,
        side=512,
        tokens=64,
        call=_tower,
    ),
)
