"""SigLIP 2 NaFlex at its released vision sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scripts.released import Released

HEIGHT, WIDTH, PADDED = 13, 19, 256
"""Patches of a 3:4 photograph at the default of 256 patches, and what its processor pads them to."""


def _build(**vision: Any) -> Callable[[int | None], nn.Module]:
    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def build(depth: int | None) -> nn.Module:
        from transformers import Siglip2Config, Siglip2Model

        layers = {} if depth is None else {"num_hidden_layers": depth}
        made: nn.Module = Siglip2Model(Siglip2Config(text_config=text, vision_config={**vision, **layers}))
        return made.eval()

    return build


def _inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    pixels = torch.randn(1, PADDED, 768, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(PADDED) < HEIGHT * WIDTH).long()[None]
    return {
        "pixel_values": (pixels * mask[..., None]).to(device, dtype),
        "pixel_attention_mask": mask.to(device),
        "spatial_shapes": torch.tensor([[HEIGHT, WIDTH]], device=device),
    }


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    output = model.get_image_features(**inputs)
    real = inputs["pixel_attention_mask"].sum()
    # What is in padded positions nobody should read: the model's own code computes something there, the encoder gives zeros.
    output.last_hidden_state = output.last_hidden_state[:, :real]
    return output


_COMMON = {
    "architecture": "SigLIP 2 (NaFlex)",
    "inputs": _inputs,
    "call": _call,
    "options": {"token_budgets": (256, 512, 1024)},
    "image": "208 x 304",
}

MODELS: tuple[Released, ...] = (
    Released(
        name="SigLIP2-base-naflex",
        build=_build(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_patches=256,
            patch_size=16,
        ),
        **_COMMON,
    ),
    Released(
        name="SigLIP2-so400m-naflex",
        build=_build(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            num_patches=256,
            patch_size=16,
        ),
        **_COMMON,
    ),
)
