"""Dense towers at their released sizes: DINOv2 (also with registers), DINOv3, SigLIP, CLIP, ViT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from scripts.released import Released


def _layers(values: Mapping[str, Any], depth: int | None) -> dict[str, Any]:
    return dict(values) if depth is None else {**values, "num_hidden_layers": depth}


def _bare(model: str, config: str, values: Mapping[str, Any]) -> Callable[[int | None], nn.Module]:
    """A vision model by itself."""

    def build(depth: int | None) -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**_layers(values, depth)))
        return made.eval()

    return build


def _with_text(kind: str, text: Mapping[str, Any], values: Mapping[str, Any], **more: Any) -> Callable[[int | None], nn.Module]:
    """A vision model beside a text model of one layer."""

    def build(depth: int | None) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(text_config=dict(text), vision_config=_layers(values, depth), **more)
        made: nn.Module = getattr(transformers, f"{kind}Model")(config)
        return made.eval()

    return build


def _image(height: int, width: int, **more: Any) -> Callable[[torch.device, torch.dtype], dict[str, Any]]:
    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        pixels = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels.to(device, dtype), **more}

    return inputs


def _forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


def _image_features(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


def _budgets(*budgets: int) -> dict[str, Any]:
    return {"token_budgets": budgets}


_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 64}

MODELS: tuple[Released, ...] = (
    Released(
        name="DINOv2-base",
        architecture="DINOv2",
        build=_bare("Dinov2Model", "Dinov2Config", {**_BASE, "image_size": 518, "patch_size": 14}),
        inputs=_image(448, 630),
        call=_forward,
        options=_budgets(1536, 6144),
        image="448 x 630",
    ),
    Released(
        name="DINOv2-with-registers-base",
        architecture="DINOv2 with registers",
        build=_bare(
            "Dinov2WithRegistersModel",
            "Dinov2WithRegistersConfig",
            {**_BASE, "image_size": 518, "patch_size": 14, "num_register_tokens": 4},
        ),
        inputs=_image(448, 630),
        call=_forward,
        options=_budgets(1536, 6144),
        image="448 x 630",
    ),
    Released(
        name="DINOv3-ViT-L/16",
        architecture="DINOv3",
        build=_bare(
            "DINOv3ViTModel",
            "DINOv3ViTConfig",
            {**_LARGE, "intermediate_size": 4096, "image_size": 224, "patch_size": 16, "num_register_tokens": 4},
        ),
        inputs=_image(512, 640),
        call=_forward,
        options=_budgets(1536, 6144),
        image="512 x 640",
    ),
    Released(
        name="SigLIP-SO400M/14-384",
        architecture="SigLIP",
        build=_with_text(
            "Siglip",
            {**_TEXT, "hidden_size": 64, "projection_size": 1152},
            {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 384,
                "patch_size": 14,
            },
        ),
        inputs=_image(384, 384),
        call=_image_features,
        options=_budgets(768, 3072),
        image="384 x 384",
    ),
    Released(
        name="CLIP-ViT-L/14-336",
        architecture="CLIP",
        build=_with_text(
            "CLIP",
            _TEXT,
            {**_LARGE, "intermediate_size": 4096, "image_size": 336, "patch_size": 14, "projection_dim": 768},
            projection_dim=768,
        ),
        inputs=_image(336, 336),
        call=_image_features,
        options=_budgets(768, 3072),
        image="336 x 336",
    ),
    Released(
        name="ViT-base/16-224",
        architecture="ViT",
        build=_bare("ViTModel", "ViTConfig", {**_BASE, "intermediate_size": 3072, "image_size": 224, "patch_size": 16}),
        inputs=_image(320, 480, interpolate_pos_encoding=True),
        call=_forward,
        options=_budgets(768, 3072),
        image="320 x 480",
    ),
)
