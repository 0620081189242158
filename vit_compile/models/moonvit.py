"""What the towers of Kimi-K2.5 and Kimi-VL share: MoonViT, rows in raster order, attention over a whole clip."""

from __future__ import annotations

from typing import Any

import torch

from vit_compile.errors import ModelError
from vit_compile.models.binding import (
    floating_dtype,
)
from vit_compile.runtime.table import EncoderTable, ItemSize

TOKEN_RANGE = (64, 4096)
TAPS = 4
"""Of cubic interpolation, along one axis."""


class MoonVitTable(EncoderTable):
    """What both towers share: rows are patches, an item's key is its grid (t, h, w), and a clip is one segment."""

    tower: Any
    merge: int

    @property
    def _positions(self) -> Any:
        """The module with the learned positions."""
        return self.tower.patch_embed.pos_emb

    def item_size(self, key: Any) -> ItemSize:
        """Patches and merged patches of all frames, in one segment."""
        t, h, w = key
        return ItemSize(rows=t * h * w, tokens=t * h * w // self.merge**2)

    def _merge_size(self) -> int:
        rows, columns = self.tower.merge_kernel_size
        if rows != columns:
            raise ModelError(f"{type(self.tower).__name__} merges {rows} x {columns} patches: expected a square.")
        return int(rows)

    def _example(self, key: tuple[int, int, int], channels_and_sides: tuple[int, ...]) -> dict[str, Any]:
        """Seeded patches with their metadata, where the tower is."""
        device, rows = next(self.tower.parameters()).device, key[0] * key[1] * key[2]
        patches = torch.randn(rows, *channels_and_sides, generator=torch.Generator().manual_seed(0))
        metadata = {name: value.to(device) for name, value in self.item_metadata(key, "main").items()}
        return {"pixel_values": patches.to(device, floating_dtype(self.tower)), "max_seqlen": rows, **metadata}


def side_limited_example(tokens: int, merge: int, longest: int) -> tuple[int, int, int]:
    """About square, and no side longer than a tower has positions for."""
    height = max(1, min(int(tokens**0.5), longest // merge))
    return (1, height * merge, min(tokens // height, longest // merge) * merge)
