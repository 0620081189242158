"""InternVLChat as its published description says: a small stand-in for the remote code.

The vision transformer is pre-norm with a class token in front, learned positions and layer scale. `extract_feature` drops the
class token, folds blocks of patches into channels (`pixel_shuffle`) and projects them (`mlp1`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class InternVisionEmbeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.class_embedding = nn.Parameter(torch.randn(1, 1, size))
        self.patch_embedding = nn.Conv2d(3, size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Parameter(torch.randn(1, 1 + (config.image_size // config.patch_size) ** 2, size))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        classes = self.class_embedding.expand(patches.shape[0], 1, -1).to(patches.dtype)
        return torch.cat([classes, patches], dim=1) + self.position_embedding.to(patches.dtype)


class InternAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv, self.proj = (
            nn.Linear(config.hidden_size, 3 * config.hidden_size),
            nn.Linear(config.hidden_size, config.hidden_size),
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch, tokens, size = hidden_states.shape
        q, k, v = self.qkv(hidden_states).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (size // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, tokens, size))


class InternVisionEncoderLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.attn, self.norm1, self.norm2 = InternAttention(config), nn.LayerNorm(size), nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, config.intermediate_size), nn.GELU(), nn.Linear(config.intermediate_size, size))
        self.ls1, self.ls2 = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states)) * self.ls1
        return hidden_states + self.mlp(self.norm2(hidden_states)) * self.ls2


class InternVisionModel(nn.Module):
    """Returns `last_hidden_state`, and `hidden_states` if it is asked for them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.embeddings = config, InternVisionEmbeddings(config)
        self.layers = nn.ModuleList(InternVisionEncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, pixel_values: torch.Tensor, output_hidden_states: bool = False, return_dict: bool = True) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        hidden_states = [self.embeddings(pixel_values)]
        for layer in self.layers:
            hidden_states.append(layer(hidden_states[-1]))
        last = hidden_states[-1]
        return BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=last[:, 0], hidden_states=tuple(hidden_states) if output_hidden_states else None
        )


class InternVLChatModel(nn.Module):
    """The vision half: `extract_feature`, [N, 3, S, S] -> [N, (S / patch * downsample_ratio)**2, llm_hidden_size]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        self.config, self.vision_model = config, InternVisionModel(vision)
        self.select_layer, self.ps_version = config.select_layer, config.ps_version
        self.downsample_ratio = config.downsample_ratio
        folded = vision.hidden_size * int(1 / self.downsample_ratio) ** 2
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(folded),
            nn.Linear(folded, config.llm_hidden_size),
            nn.GELU(),
            nn.Linear(config.llm_hidden_size, config.llm_hidden_size),
        )

    def pixel_shuffle(self, x: torch.Tensor, scale_factor: float = 0.5) -> torch.Tensor:
        """[N, W, H, C] -> [N, W * scale, H * scale, C / scale**2]; version "v1" leaves the sides exchanged."""
        block = int(1 / scale_factor)
        n, w, h, c = x.shape
        blocks = x.reshape(n, w // block, block, h // block, block, c).permute(0, 1, 3, 2, 4, 5).flatten(3)
        return blocks.transpose(1, 2).contiguous() if self.ps_version == "v1" else blocks.contiguous()

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if self.select_layer == -1:
            found = self.vision_model(pixel_values=pixel_values, output_hidden_states=False, return_dict=True).last_hidden_state
        else:
            output = self.vision_model(pixel_values=pixel_values, output_hidden_states=True, return_dict=True)
            found = output.hidden_states[self.select_layer]
        found = found[:, 1:]
        side = int(found.shape[1] ** 0.5)
        found = self.pixel_shuffle(found.reshape(found.shape[0], side, side, -1), scale_factor=self.downsample_ratio)
        return self.mlp1(found.reshape(found.shape[0], -1, found.shape[-1]))


def internvl_chat(
    *,
    hidden: int,
    layers: int,
    heads: int,
    mlp: int,
    image: int,
    patch: int,
    width: int,
    select_layer: int = -1,
    version: str = "v2",
) -> InternVLChatModel:
    """A model with these sizes; `width` is the language model's."""
    vision = SimpleNamespace(
        model_type="intern_vit_6b",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp,
        image_size=image,
        patch_size=patch,
        num_channels=3,
    )
    config = SimpleNamespace(
        model_type="internvl_chat",
        vision_config=vision,
        llm_hidden_size=width,
        downsample_ratio=0.5,
        select_layer=select_layer,
        ps_version=version,
    )
    return InternVLChatModel(config)
