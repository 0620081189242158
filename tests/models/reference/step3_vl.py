"""Step3-VL as its published description says: a small stand-in for the vision half of the remote code.

A vision transformer whose layers normalise behind attention and behind the MLP, with the class token four times in front. The
model drops those, halves the map twice by convolutions, and projects. Names of modules are the published ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RELEASED: dict[str, int] = {"image_size": 728, "patch_size": 14, "hidden_size": 1792, "num_hidden_layers": 63}
RELEASED |= {"num_attention_heads": 16, "intermediate_size": 15360, "output_hidden_size": 4096, "out": 7168}
"""Sizes of the released model."""
TINY: dict[str, int] = {"image_size": 52, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "intermediate_size": 64, "output_hidden_size": 16, "out": 24}
"""9 tokens a view, 4 a tile."""
CLASS_TOKENS = 4


class Step3VisionEmbeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.side = config.image_size // config.patch_size
        self.class_embedding = nn.Parameter(torch.randn(1, config.hidden_size))
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(self.side**2 + 1, config.hidden_size)

    def positions(self, side: int) -> torch.Tensor:
        table = self.position_embedding.weight
        if side == self.side:
            return table
        grid = table[1:].view(1, self.side, self.side, -1).permute(0, 3, 1, 2).float()
        grid = F.interpolate(grid, size=(side, side), mode="bicubic", antialias=True, align_corners=False).to(table.dtype)
        return torch.cat([table[:1], grid.permute(0, 2, 3, 1).flatten(0, 2)])

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        maps = self.patch_embedding(pixel_values)
        classes = self.class_embedding.expand(len(maps), 1, -1)
        rows = torch.cat([classes, maps.flatten(2).transpose(1, 2)], dim=1) + self.positions(maps.shape[-1])
        return torch.cat([rows[:, :1].expand(-1, CLASS_TOKENS - 1, -1), rows], dim=1)


class Step3VisionLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj, self.self_attn.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.self_attn.qkv_proj(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.self_attn.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.layer_norm1(attended)
        inner = self.mlp.fc1(x)
        return x + self.layer_norm2(self.mlp.fc2(inner * torch.sigmoid(1.702 * inner)))


class Step3VisionTransformer(nn.Module):
    """[N, 3, S, S] -> [N, 4 + (S / patch)**2, hidden_size]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.embeddings = config, Step3VisionEmbeddings(config)
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(Step3VisionLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(pixel_values)
        for layer in self.transformer.layers:
            x = layer(x)
        return x


class Step3VLModel(nn.Module):
    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        config = SimpleNamespace(**sizes)
        self.vision_model = Step3VisionTransformer(config)
        self.vit_downsampler = nn.Conv2d(config.hidden_size, config.output_hidden_size, 2, stride=2)
        self.vit_downsampler2 = nn.Conv2d(config.output_hidden_size, 2 * config.output_hidden_size, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(2 * config.output_hidden_size, config.out, bias=False)

    def get_image_features(
        self, pixel_values: torch.Tensor, patch_pixel_values: torch.Tensor | None, num_patches: Sequence[int]
    ) -> list[torch.Tensor]:
        """Views of all images, their tiles one after another, tiles of each image -> [tokens, out] of each image."""
        views = self.encode(pixel_values)
        tiles = self.encode(patch_pixel_values) if patch_pixel_values is not None and len(patch_pixel_values) else None
        found, start = [], 0
        for view, count in zip(views, num_patches, strict=True):
            parts = [] if tiles is None else [tiles[number] for number in range(start, start + count)]
            start += count
            found.append(torch.cat([*parts, view]))
        return found

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.vision_model(pixels)[:, CLASS_TOKENS:]
        side = math.isqrt(hidden.shape[1])
        maps = hidden.permute(0, 2, 1).reshape(len(hidden), -1, side, side)
        maps = self.vit_downsampler2(self.vit_downsampler(maps))
        return self.vit_large_projector(maps.flatten(2).permute(0, 2, 1))


class Step3VLForConditionalGeneration(nn.Module):
    """The model in its place; its text half is left out."""

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        super().__init__()
        self.model = Step3VLModel(sizes or TINY)
