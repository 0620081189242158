"""Kimi-VL's vision side with the module structure that its published remote code has, written from its description.

Names of modules, attributes and arguments are those of the published code; what an adapter enters is where it is there.

Shapes: T patches in raster order, E hidden size, D width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MERGE = (2, 2)


def segments_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_cu_seqlens: torch.Tensor | None = None,
    k_cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain softmax attention, one segment after another: [T, heads, dim] -> [T, heads * dim]."""
    assert q_cu_seqlens is not None
    out = []
    for start, stop in zip(q_cu_seqlens.tolist(), q_cu_seqlens.tolist()[1:], strict=False):
        a, b, c = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        scores = (a @ b.transpose(1, 2)).float() * q.shape[-1] ** -0.5
        out.append((scores.softmax(-1).to(q.dtype) @ c).transpose(0, 1).flatten(1))
    return torch.cat(out)


VL_VISION_ATTENTION_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"eager": segments_attention}


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Pairs of [T, heads, dim] as complex numbers, times factors complex64 [T, dim / 2]."""
    assert freqs_cis.dtype == torch.complex64
    assert x.shape[0] == freqs_cis.shape[0]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).type_as(x)


class Learnable2DInterpPosEmb(nn.Module):
    """A table [height, width, E], resampled to each image's grid."""

    def __init__(self, height: int, width: int, dim: int, interpolation_mode: str = "bicubic") -> None:
        super().__init__()
        self.interpolation_mode = interpolation_mode
        self.weight = nn.Parameter(torch.randn(height, width, dim))

    def forward(self, x: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        """x [T, E] plus positions."""
        table = self.weight.permute(2, 0, 1)[None]
        sizes = grid_hws.tolist()
        found = [
            F.interpolate(table, size=size, mode=self.interpolation_mode)[0].permute(1, 2, 0).flatten(0, 1) for size in sizes
        ]
        return x + torch.cat(found)


class MoonVisionPatchEmbed(nn.Module):
    """Patches [T, 3, p, p] to [T, E]."""

    def __init__(self, dim: int, patch_size: int, height: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)
        self.pos_emb = Learnable2DInterpPosEmb(height, width, dim)

    def forward(self, x: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        """[T, E]."""
        return self.pos_emb(self.proj(x).view(x.shape[0], -1), grid_hws)


class Rope2DPosEmb:
    """Rotary factors over a grid; even pairs turn with the column, odd ones with the row. Made when they are first asked for."""

    def __init__(self, dim: int, max_height: int, max_width: int, theta_base: float = 10000) -> None:
        self.dim, self.max_height, self.max_width, self.theta_base = dim, max_height, max_width, theta_base
        self.freqs_cis: torch.Tensor | None = None

    def get_freqs_cis(self, grid_hws: torch.Tensor) -> torch.Tensor:
        """complex64 [T, dim / 2]."""
        if self.freqs_cis is None:
            self.freqs_cis = self._made(grid_hws.device)
        sizes = grid_hws.tolist()
        assert all(h <= self.max_height and w <= self.max_width for h, w in sizes)
        return torch.cat([self.freqs_cis[:h, :w].reshape(-1, self.dim // 2) for h, w in sizes])

    def _made(self, device: torch.device) -> torch.Tensor:
        speeds = 1.0 / self.theta_base ** (torch.arange(0, self.dim, 4, device=device).float() / self.dim)
        rows = torch.arange(self.max_height, device=device).float()[:, None] * speeds
        columns = torch.arange(self.max_width, device=device).float()[:, None] * speeds
        by_row = torch.polar(torch.ones_like(rows), rows)[:, None].expand(-1, self.max_width, -1)
        by_column = torch.polar(torch.ones_like(columns), columns)[None].expand(self.max_height, -1, -1)
        return torch.stack([by_column, by_row], dim=-1).flatten(2)


class MLP2(nn.Module):
    """Two layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class MoonVitEncoderLayer(nn.Module):
    """A block; it looks its attention up by name in this module's dict at each call."""

    def __init__(self, num_heads: int, hidden_dim: int, mlp_dim: int, attn_implementation: str) -> None:
        super().__init__()
        self.num_heads, self.attn_implementation = num_heads, attn_implementation
        self.norm0, self.norm1 = nn.LayerNorm(hidden_dim), nn.LayerNorm(hidden_dim)
        self.mlp = MLP2(hidden_dim, mlp_dim)
        self.wqkv, self.wo = nn.Linear(hidden_dim, 3 * hidden_dim), nn.Linear(hidden_dim, hidden_dim)

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, rope_freqs_cis: torch.Tensor) -> torch.Tensor:
        """[T, E]."""
        q, k, v = self.wqkv(self.norm0(hidden_states)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        attend = VL_VISION_ATTENTION_FUNCTIONS[self.attn_implementation]
        q, k = rotate(q, rope_freqs_cis), rotate(k, rope_freqs_cis)
        hidden_states = hidden_states + self.wo(attend(q, k, v, q_cu_seqlens=cu_seqlens, k_cu_seqlens=cu_seqlens))
        return hidden_states + self.mlp(self.norm1(hidden_states))


class MoonVitEncoder(nn.Module):
    """All blocks."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rope_2d = Rope2DPosEmb(config.hidden_size // config.num_attention_heads, 512, 512)
        self.blocks = nn.ModuleList(
            MoonVitEncoderLayer(
                config.num_attention_heads, config.hidden_size, config.intermediate_size, config._attn_implementation
            )
            for _ in range(config.num_hidden_layers)
        )
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        """[T, E]."""
        factors = self.rope_2d.get_freqs_cis(grid_hws=grid_hws)
        cu_seqlens = F.pad(grid_hws.prod(-1).cumsum(0, dtype=torch.int32), (1, 0))
        for block in self.blocks:
            hidden_states = block(hidden_states, cu_seqlens, rope_freqs_cis=factors)
        return self.final_layernorm(hidden_states)


class MoonVitPretrainedModel(nn.Module):
    """Patches of images to a list of merged patches [n, 4, E], one for each image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.merge_kernel_size, self.patch_size = config, MERGE, config.patch_size
        self.patch_embed = MoonVisionPatchEmbed(
            config.hidden_size, config.patch_size, config.init_pos_emb_height, config.init_pos_emb_width
        )
        self.encoder = MoonVitEncoder(config)

    def forward(self, pixel_values: torch.Tensor, grid_hws: torch.Tensor) -> list[torch.Tensor]:
        """A list."""
        hidden_states = self.encoder(self.patch_embed(pixel_values, grid_hws), grid_hws)
        merged = []
        sizes = grid_hws.tolist()
        for image, (h, w) in zip(hidden_states.split([h * w for h, w in sizes]), sizes, strict=True):
            blocks = image.view(h // 2, 2, w // 2, 2, -1).permute(0, 2, 1, 3, 4)
            merged.append(blocks.reshape(h * w // 4, 4, -1))
        return merged


class KimiVLMultiModalProjector(nn.Module):
    """Lists of [n, 4, E] to [sum of n, D]."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.hidden_size = 4 * hidden_size
        self.pre_norm = nn.LayerNorm(hidden_size)
        self.linear_1, self.act = nn.Linear(self.hidden_size, self.hidden_size), nn.GELU()
        self.linear_2 = nn.Linear(self.hidden_size, width)

    def forward(self, image_features: list[torch.Tensor]) -> torch.Tensor:
        """[sum of n, D]."""
        merged = self.pre_norm(torch.cat(image_features)).view(-1, self.hidden_size)
        return self.linear_2(self.act(self.linear_1(merged)))


class KimiVLForConditionalGeneration(nn.Module):
    """The vision side only."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config.vision_config.hidden_size, config.text_config.hidden_size)

    def _extract_image_features(self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor) -> torch.Tensor:
        return self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))


def vision_config(**values: Any) -> SimpleNamespace:
    """The published sizes, or others."""
    published = {
        "model_type": "moonvit",
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "_attn_implementation": "eager",
    }
    return SimpleNamespace(**{**published, **values})


def kimi_vl(width: int = 2048, **values: Any) -> KimiVLForConditionalGeneration:
    """With random weights."""
    config = SimpleNamespace(
        model_type="kimi_vl", vision_config=vision_config(**values), text_config=SimpleNamespace(hidden_size=width)
    )
    return KimiVLForConditionalGeneration(config)
