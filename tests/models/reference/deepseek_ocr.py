"""DeepSeek-OCR as its published description says: a small stand-in for the vision half of the remote code.

A SAM-like encoder (windowed attention with relative positions in most layers, a neck, two convolutions of stride 2) makes a map.
A CLIP-like encoder takes that map in place of its own patch embeddings. Both outputs, side by side, are projected. Modules and
parameters have their published names; `forward` goes through the images one by one, as the published one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RELEASED: dict[str, Any] = {"img_size": 1024, "patch": 16, "sam_width": 768, "sam_heads": 12, "sam_depth": 12, "window": 14}
RELEASED |= {"global_layers": (2, 5, 8, 11), "neck": 256, "width": 1024, "heads": 16, "depth": 24, "positions": 16, "out": 1280}
"""Sizes of the released model."""
TINY: dict[str, Any] = {"img_size": 64, "patch": 4, "sam_width": 16, "sam_heads": 2, "sam_depth": 2, "window": 6}
TINY |= {"global_layers": (1,), "neck": 8, "width": 32, "heads": 4, "depth": 2, "positions": 4, "out": 24}
"""16 tokens a view (20 with newlines), 9 a tile; resized positions in both encoders."""


def resized(table: torch.Tensor, side: int) -> torch.Tensor:
    """Positions [1, H, W, C] for a map of another side."""
    if table.shape[1] == side:
        return table
    grid = F.interpolate(
        table.permute(0, 3, 1, 2).float(), size=(side, side), mode="bicubic", antialias=True, align_corners=False
    )
    return grid.to(table.dtype).permute(0, 2, 3, 1)


def relative(side: int, table: torch.Tensor) -> torch.Tensor:
    """[side, side, C]: the row of the table, resized to 2 * side - 1 rows, for every difference of positions."""
    if len(table) != 2 * side - 1:
        table = F.interpolate(table.float().T[None], size=2 * side - 1, mode="linear")[0].T.to(table.dtype)
    return torch.stack([table[number : number + side].flip(0) for number in range(side)])


class SamAttention(nn.Module):
    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * side - 1, width // heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * side - 1, width // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, _ = x.shape
        q, k, v = self.qkv(x).flatten(1, 2).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        grid = q.unflatten(2, (height, width))
        rows = torch.einsum("bnhwc,hkc->bnhwk", grid, relative(height, self.rel_pos_h))
        columns = torch.einsum("bnhwc,wkc->bnhwk", grid, relative(width, self.rel_pos_w))
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(4).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(out.transpose(1, 2).reshape(batch, height, width, -1))


class SamBlock(nn.Module):
    def __init__(self, width: int, heads: int, side: int, window: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.window = SamAttention(width, heads, window or side), window
        self.mlp = nn.Module()
        self.mlp.lin1, self.mlp.lin2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        if not self.window:
            return self.attn(x)
        batch, height, width, channels = x.shape
        down, right = -height % self.window, -width % self.window
        x = F.pad(x, (0, 0, 0, right, 0, down))
        across = (height + down) // self.window, (width + right) // self.window
        x = x.reshape(batch, across[0], self.window, across[1], self.window, channels).transpose(2, 3).flatten(0, 2)
        x = self.attn(x).reshape(batch, *across, self.window, self.window, channels).transpose(2, 3)
        return x.reshape(batch, height + down, width + right, channels)[:, :height, :width]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp.lin2(F.gelu(self.mlp.lin1(self.norm2(x))))


class LayerNorm2d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6).permute(0, 3, 1, 2)


class ImageEncoderViT(nn.Module):
    """[N, 3, S, S] -> [N, width, S / patch / 4, S / patch / 4]."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.img_size, width, neck = sizes["img_size"], sizes["sam_width"], sizes["neck"]
        side = self.img_size // sizes["patch"]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, sizes["patch"], sizes["patch"])
        self.pos_embed = nn.Parameter(torch.zeros(1, side, side, width))
        self.blocks = nn.ModuleList(
            SamBlock(width, sizes["sam_heads"], side, 0 if number in sizes["global_layers"] else sizes["window"])
            for number in range(sizes["sam_depth"])
        )
        convolutions = nn.Conv2d(width, neck, 1, bias=False), nn.Conv2d(neck, neck, 3, padding=1, bias=False)
        self.neck = nn.Sequential(convolutions[0], LayerNorm2d(neck), convolutions[1], LayerNorm2d(neck))
        self.net_2 = nn.Conv2d(neck, 2 * neck, 3, stride=2, padding=1, bias=False)
        self.net_3 = nn.Conv2d(2 * neck, sizes["width"], 3, stride=2, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(x).permute(0, 2, 3, 1)
        x = x + resized(self.pos_embed, x.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.net_3(self.net_2(self.neck(x.permute(0, 3, 1, 2))))


class VitEmbeddings(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, self.side = sizes["width"], sizes["positions"]
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.patch_embedding = nn.Conv2d(3, width, 14, 14, bias=False)
        self.position_embedding = nn.Embedding(self.side**2 + 1, width)

    def forward(self, pixel_values: torch.Tensor, patch_embeds: torch.Tensor | None) -> torch.Tensor:
        batch = pixel_values.shape[0]
        maps = self.patch_embedding(pixel_values) if patch_embeds is None else patch_embeds
        rows = torch.cat([self.class_embedding.expand(batch, 1, -1), maps.flatten(2).transpose(1, 2)], dim=1)
        first, grid = self.position_embedding.weight[:1], self.position_embedding.weight[1:]
        grid = resized(grid.view(1, self.side, self.side, -1), maps.shape[-1]).flatten(0, 2)
        return rows + torch.cat([first, grid])


class VitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj, self.self_attn.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.self_attn.qkv_proj(self.layer_norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.self_attn.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        inner = self.mlp.fc1(self.layer_norm2(x))
        return x + self.mlp.fc2(inner * torch.sigmoid(1.702 * inner))


class VitModel(nn.Module):
    """Pixels and a map [N, width, h, w] in place of their patch embeddings -> [N, 1 + h * w, width]."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings, self.pre_layrnorm = VitEmbeddings(sizes), nn.LayerNorm(sizes["width"])
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(VitBlock(sizes["width"], sizes["heads"]) for _ in range(sizes["depth"]))

    def forward(self, x: torch.Tensor, patch_embeds: torch.Tensor | None) -> torch.Tensor:
        x = self.pre_layrnorm(self.embeddings(x, patch_embeds))
        for layer in self.transformer.layers:
            x = layer(x)
        return x


class MlpProjector(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class DeepseekOCRModel(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.sam_model, self.vision_model = ImageEncoderViT(sizes), VitModel(sizes)
        self.projector = MlpProjector(2 * sizes["width"], sizes["out"])
        self.image_newline = nn.Parameter(torch.randn(sizes["out"]))
        self.view_seperator = nn.Parameter(torch.randn(sizes["out"]))

    def forward(
        self, images: Sequence[tuple[torch.Tensor, torch.Tensor]], images_spatial_crop: torch.Tensor
    ) -> list[torch.Tensor]:
        """(tiles [P, 3, s, s], view [1, 3, S, S]) and (columns, rows) of each image -> [tokens, out] of each image."""
        return [
            self.image(tiles, view, int(crop[0]), int(crop[1]))
            for (tiles, view), crop in zip(images, images_spatial_crop, strict=True)
        ]

    def image(self, tiles: torch.Tensor, view: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        (whole,) = self.encode(view)
        found: list[torch.Tensor] = []
        if columns > 1 or rows > 1:
            # Line by line of the whole picture: the same line of every tile of a row, and a newline.
            maps = self.encode(tiles)
            side = math.isqrt(maps.shape[1])
            for row in range(rows):
                for line in range(side):
                    own = maps[row * columns : (row + 1) * columns]
                    found += [tile[line * side : (line + 1) * side] for tile in own]
                    found.append(self.image_newline[None])
        side = math.isqrt(len(whole))
        for line in range(side):
            found += [whole[line * side : (line + 1) * side], self.image_newline[None]]
        return torch.cat([*found, self.view_seperator[None]])

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        low = self.sam_model(pixels)
        high = self.vision_model(pixels, low)
        return self.projector(torch.cat((high[:, 1:], low.flatten(2).permute(0, 2, 1)), dim=-1))


class DeepseekOCRForCausalLM(nn.Module):
    """The model in its place; its text half is left out."""

    def __init__(self, sizes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.model = DeepseekOCRModel(sizes or TINY)

    def forward(self, *images: Any) -> list[torch.Tensor]:
        return self.model(*images)
