"""FLOPs that a request needs: matrix products and attention of the real rows, nothing for padding, two per multiply-add.

What the roofline divides by. Element-wise work and softmax are left out, as `torch.utils.flop_counter` leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vit_compile.planning.units import Grid
from vit_compile.tools.bench.towers import Tower

_PER_TOKEN = ("merger", "downsample")
"""Modules of packed towers that see merged rows: each row of theirs is one output token."""


@dataclass(frozen=True, slots=True)
class FlopFormula:
    """FLOPs of one item as a function of its grid."""

    per_patch: int
    per_row: int
    """For each row of the blocks: a patch, or a class or register token of a dense tower."""

    per_token: int
    """For each output token of a packed tower."""

    per_image: int

    full_attention: int
    """Times the square of a segment's rows."""

    window_attention: int
    """Times the sum of the squares of the windows' rows."""

    merge: int
    extra: int
    """Class and register tokens of an image."""

    window: int
    """Side of a window, in patches; 0 without windows."""

    def __call__(self, grids: Sequence[Grid]) -> int:
        """FLOPs of a request."""
        return sum(self._item(grid) for grid in grids)

    def _item(self, grid: Grid) -> int:
        t, h, w = grid
        rows = h * w + self.extra
        linear = h * w * self.per_patch + rows * self.per_row + h * w // self.merge**2 * self.per_token + self.per_image
        windows = self.window_attention * _squares(h, self.window) * _squares(w, self.window) if self.window else 0
        return t * (linear + self.full_attention * rows**2 + windows)


def formula_for(tower: Tower) -> FlopFormula:
    """From the tower's modules: every linear layer and patch convolution, by the rows that it sees."""
    module, packed = tower.module, tower.kind == "packed"
    per_patch = per_row = per_token = per_image = 0
    for name, layer in module.named_modules():
        parts = name.split(".")
        cost = _products(layer)
        if "head" in parts or "pooler" in parts:
            more_rows, more_image = _pooling(layer, cost)
            per_row, per_image = per_row + more_rows, per_image + more_image
        elif packed and any(kind in name for kind in _PER_TOKEN):
            per_token += cost
        elif isinstance(layer, nn.Conv2d | nn.Conv3d) or (packed and "patch_embed" in parts):
            per_patch += cost
        else:
            per_row += cost
    layers, width = _blocks(module.config)
    full = _full_layers(module.config, layers)
    window = getattr(module.config, "window_size", 0) if full < layers else 0
    return FlopFormula(
        per_patch=per_patch,
        per_row=per_row,
        per_token=per_token,
        per_image=per_image,
        full_attention=4 * width * full,
        window_attention=4 * width * (layers - full),
        merge=tower.geometry.merge_size,
        extra=tower.geometry.extra_tokens,
        window=window // tower.geometry.patch_size,
    )


def _products(layer: nn.Module) -> int:
    """FLOPs of one row: two for each weight."""
    weight: Any = getattr(layer, "weight", None)
    return 2 * weight.numel() if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d) else 0


def _pooling(layer: nn.Module, cost: int) -> tuple[int, int]:
    """(for each row, for each image) of a layer of a pooling head, in which one query looks at all rows."""
    if isinstance(layer, nn.MultiheadAttention):
        width = layer.embed_dim
        return 2 * 2 * width**2 + 4 * width, 2 * width**2  # keys, values, scores and sums; the query
    return 0, cost


def _blocks(config: Any) -> tuple[int, int]:
    """Layers, and width of attention."""
    layers: int = getattr(config, "depth", None) or config.num_hidden_layers
    width: int = config.hidden_size
    return layers, width


def _full_layers(config: Any, layers: int) -> int:
    chosen = getattr(config, "fullatt_block_indexes", None)
    return layers if chosen is None else sum(index < layers for index in chosen)


def _squares(side: int, window: int) -> int:
    """Sum of the squares of a side's parts, cut into windows."""
    whole, rest = divmod(side, window)
    return whole * window**2 + rest**2
