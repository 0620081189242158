"""timm's `VisionTransformer` with images at their native sizes in one packed call.

Other models of timm and torchvision take images of one size: `tile_table_for` in `vit_compile.models.tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from vit_compile.attention.varlen import varlen_attention
from vit_compile.errors import GridError, ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, Call, Execute, Unserved, original
from vit_compile.models.dense_table import PackedDenseTable

BLOCKS = ("Block", "ResPostBlock")
"""Blocks that mix rows in `F.scaled_dot_product_attention` only."""


class PackedAttention(TorchFunctionMode):
    """`F.scaled_dot_product_attention` inside keeps to segments.

    Args:
        cu_seqlens: int32 [S+1], offsets in rows.
        max_seqlen: no segment is longer.

    Raises:
        ModelError: it is called with several batch items, a mask, dropout or causally.
    """

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
        super().__init__()
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        if query.shape[0] != 1 or attn_mask is not None or dropout_p or is_causal:
            raise ModelError("packed attention takes one batch item, without mask and dropout, and is not causal.")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        found = varlen_attention(q, k, v, self.cu_seqlens, self.max_seqlen, q.shape[-1] ** -0.5 if scale is None else scale)
        return found.transpose(0, 1)[None]


class TimmTable(PackedDenseTable):
    """timm's `VisionTransformer`; features are what its `forward_features` returns for each image, [prefix + h * w, width].

    Raises:
        ModelError: blocks, attention or patch embedding are of another kind, or attention is not fused (`set_fused_attn`).
    """

    def __init__(self, tower: Any, **options: Any) -> None:
        self.tower = tower
        self._check()
        self.any_size = tower.dynamic_img_size
        super().__init__(tower, **options)

    def _check(self) -> None:
        """Raise `ModelError` where rows might mix outside of `PackedAttention`."""
        tower = self.tower
        if not _is_timms(tower.patch_embed, "PatchEmbed") or tower.patch_embed.dynamic_img_pad:
            raise ModelError("the patch embedding of this VisionTransformer is not a plain one, or pads images.")
        for block in tower.blocks:
            kinds = type(block).__name__, type(getattr(block, "attn", None)).__name__
            plain = _is_timms(block, *BLOCKS) and _is_timms(block.attn, "Attention")
            if not plain or not block.attn.fused_attn:
                raise ModelError(
                    f"blocks of this VisionTransformer are {kinds[0]} with {kinds[1]}: packed calls need {' or '.join(BLOCKS)} "
                    "with fused Attention (timm.layers.set_fused_attn). tile_table_for takes images of one size."
                )

    @property
    def before(self) -> int:  # type: ignore[override]
        """See `PackedDenseTable`."""
        return 0 if self.tower.no_embed_class else self.tower.num_prefix_tokens

    @property
    def pools_first_row(self) -> bool:  # type: ignore[override]
        """See `PackedDenseTable`."""
        return self.tower.attn_pool is None and self.tower.global_pool == "token"

    def convolution(self) -> Any:
        """See `PackedDenseTable`."""
        return self.tower.patch_embed.proj

    def patch_norm(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedDenseTable`."""
        found: torch.Tensor = self.tower.patch_embed.norm(x)
        return found

    def positions(self) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        return None if self.tower.pos_embed is None else self.tower.pos_embed[0]

    def sides(self) -> tuple[int, int]:
        """See `PackedDenseTable`."""
        rows, columns = self.tower.patch_embed.grid_size
        return rows, columns

    def interpolated(self, table: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """See `PackedDenseTable`."""
        resample = import_module("timm.layers").resample_abs_pos_embed
        mixed: torch.Tensor = resample(table[None], new_size=[height, width], old_size=list(self.sides()), num_prefix_tokens=0)
        return mixed[0]

    def prefix(self) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        tokens = [token[0] for token in (self.tower.cls_token, self.tower.reg_token) if token is not None]
        if not tokens:
            return None
        table, together = self.positions(), torch.cat(tokens)
        return together if table is None else together + table[: self.before] if self.before else together

    def blocks(self, x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """See `PackedDenseTable`."""
        found: torch.Tensor = self.tower.norm(self.tower.blocks(self.tower.norm_pre(x)))
        return found

    def switched(self) -> None:
        """Nothing of the model is changed."""

    def attention(self, values: Mapping[str, Any]) -> Any:
        """See `PackedDenseTable`."""
        self._check()
        return PackedAttention(values["cu_seqlens"], values["max_seqlen"])

    def pool(self, last: torch.Tensor) -> torch.Tensor | None:
        """What the model makes of features: logits, or pooled features."""
        found: torch.Tensor = self.tower.forward_head(last)
        return found

    def output(self, last: torch.Tensor, pooled: torch.Tensor | None) -> Any:
        """Of `encode`: what the model returns."""
        return pooled

    def alone(self, image: torch.Tensor) -> Any:
        """See `PackedDenseTable`."""
        if not self.any_size:
            raise GridError(
                f"an image of {list(image.shape[2:])} pixels: expected at least {self.least} patches along each side."
            )
        height, width = (side // patch * patch for side, patch in zip(image.shape[2:], self.patch, strict=True))
        return self.tower.forward_head(original(self.tower, "forward_features")(image[:, :, :height, :width]))

    def is_native(self, height: int, width: int) -> bool:
        """See `PackedDenseTable`."""
        return (height, width) == tuple(self.tower.patch_embed.img_size)

    def refuse(self, pixels: Any, interpolate: bool) -> None:
        """See `PackedDenseTable`."""
        super().refuse(pixels, interpolate)
        if any(side % patch for side, patch in zip(pixels.shape[2:], self.patch, strict=True)):
            raise Unserved("sides are not multiples of the patch")


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The model with its `forward_features`; its head is called by its own `forward`.

    Args:
        model: a `VisionTransformer`.
        towers: class names.
        fields: features are the same either way.
        options: see `PackedDenseTable`.
    """
    table = TimmTable(model, **options)

    def serve(execute: Execute, x: Any) -> Any:
        table.refuse(x, interpolate=False)
        return torch.stack(execute(table.request(x)))

    call = Call(owner=model, method="forward_features", takes=("x",), serve=serve)
    return Binding(table=table, calls=(call,), encode=table.encode)


def _is_timms(module: nn.Module, *names: str) -> bool:
    """Is it of one of timm's own classes? A subclass may compute something else."""
    return type(module).__name__ in names and type(module).__module__.partition(".")[0] == "timm"


def is_timm(model: nn.Module) -> bool:
    """Is it timm's `VisionTransformer`? Does not import timm."""
    return type(model).__name__ == "VisionTransformer" and type(model).__module__ == "timm.models.vision_transformer"


ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="timm VisionTransformer",
        model_types=(),
        classes=("VisionTransformer",),
        binder=bind,
        matches=is_timm,
        buffers=("patches", "cu_seqlens", "kind", "first", "taps"),
        tokens="1 + registers + h w",
        versions=(),
        limits=(
            "Tested with timm 1.0.31.",
            "Blocks are Block or ResPostBlock with fused Attention; features are those of forward_features, and the head runs "
            "after the replay.",
            "Its forward answers other sizes than its own with dynamic_img_size=True; `encode` always interpolates.",
            "Positions are antialiased: images with a side of less than about a third of the trained one are not packed.",
        ),
    ),
)
