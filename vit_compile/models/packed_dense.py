"""Dense ViTs with images at their native sizes in one packed call: DINOv2 (also with registers), DINOv3, SigLIP, CLIP, ViT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, Call, Execute, find_module, original, undone_on_failure
from vit_compile.models.dense_table import PackedDenseTable, Replaced, blank_before
from vit_compile.runtime.table import Buffer


class Dinov3Table(PackedDenseTable):
    """Rotary positions of patch centres; nothing is learned."""

    def convolution(self) -> Any:
        """See `PackedDenseTable`."""
        return self.tower.embeddings.patch_embeddings

    def positions(self) -> torch.Tensor | None:
        """There are none."""
        return None

    def prefix(self) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        return torch.cat([self.tower.embeddings.cls_token[0], self.tower.embeddings.register_tokens[0]])

    def more_buffers(self) -> dict[str, Buffer]:
        """Cosines and sines in float32; the forward rounds them as the tower does."""
        (width,) = self._rotation(1, 1)[0].shape[1:]
        return {name: Buffer(role=Role.ROWS, shape=(width,), dtype=torch.float32) for name in ("cos", "sin")}

    def more_metadata(self, height: int, width: int) -> dict[str, torch.Tensor]:
        """The tower's own; those of prefix tokens turn nothing."""
        cos, sin = self._rotation(height, width)
        unturned = cos.new_ones(self.prefix_tokens, cos.shape[1])
        return {"cos": torch.cat([unturned, cos]), "sin": blank_before(sin, self.prefix_tokens)}

    @torch.no_grad()
    def _rotation(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.tower.rope_embeddings
        seen = Replaced(rope, inv_freq=rope.inv_freq.cpu(), training=False)  # in train mode they are jittered
        shape_only = torch.empty(1, 1, 1, 1, device="cpu").expand(1, 1, height * self.patch[0], width * self.patch[1])
        cos, sin = type(rope).forward(seen, shape_only)
        return cos, sin

    def blocks(self, x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """See `PackedDenseTable`."""
        turned = values["cos"].to(x.dtype), values["sin"].to(x.dtype)
        found: torch.Tensor = self.tower.norm(self.tower.model(x, position_embeddings=turned, return_dict=True).last_hidden_state)
        return found


class ViTTable(PackedDenseTable):
    """No encoder module, and perhaps a pooler."""

    any_size = False

    def blocks(self, x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """See `PackedDenseTable`."""
        for layer in self.tower.layers:
            x = layer(x, None)
        found: torch.Tensor = self.tower.layernorm(x)
        return found

    def pool(self, last: torch.Tensor) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        pooled: torch.Tensor | None = None if self.tower.pooler is None else self.tower.pooler(last)
        return pooled

    def alone(self, image: torch.Tensor) -> Any:
        """See `PackedDenseTable`."""
        return original(self.tower, "forward")(image, interpolate_pos_encoding=True, return_dict=True)


class ClipTable(ViTTable):
    """Positions in an `nn.Embedding`, a norm before the blocks, and one on the class token only."""

    def convolution(self) -> Any:
        """See `PackedDenseTable`."""
        return self.tower.embeddings.patch_embedding

    def read_layers(self) -> Sequence[tuple[Any, type[nn.Module]]]:
        """See `PackedDenseTable`."""
        return (*super().read_layers(), (self.tower.embeddings.position_embedding, nn.Embedding))

    def positions(self) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        weight: torch.Tensor = self.tower.embeddings.position_embedding.weight
        return weight

    def seen_with(self, table: torch.Tensor) -> Any:
        """See `PackedDenseTable`."""
        numbers = torch.arange(len(table), device="cpu")[None]
        return Replaced(self.tower.embeddings, position_embedding=nn.Embedding.from_pretrained(table), position_ids=numbers)

    def prefix(self) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        embeddings = self.tower.embeddings
        first: torch.Tensor = embeddings.class_embedding[None] + embeddings.position_embedding.weight[:1]
        return first

    def blocks(self, x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """See `PackedDenseTable`."""
        found: torch.Tensor = self.tower.encoder(self.tower.pre_layrnorm(x), return_dict=True).last_hidden_state
        return found

    def pool(self, last: torch.Tensor) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        pooled: torch.Tensor = self.tower.post_layernorm(last[:, 0])
        return pooled


class SiglipTable(ClipTable):
    """No class token; the pooling head attends to all tokens of an image."""

    before = 0
    pools_first_row = False

    def prefix(self) -> torch.Tensor | None:
        """There is none."""
        return None

    def blocks(self, x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """See `PackedDenseTable`."""
        found: torch.Tensor = self.tower.post_layernorm(self.tower.encoder(x, return_dict=True).last_hidden_state)
        return found

    def pool(self, last: torch.Tensor) -> torch.Tensor | None:
        """See `PackedDenseTable`."""
        pooled: torch.Tensor | None = self.tower.head(last) if self.tower.use_head else None
        return pooled

    def is_native(self, height: int, width: int) -> bool:
        """Its forward checks no sizes: patches get the positions in order, which are theirs on the table's own grid only."""
        return (height // self.patch[0], width // self.patch[1]) == self.sides()


TABLES: Mapping[str, Callable[..., PackedDenseTable]] = {
    "Dinov2Model": PackedDenseTable,
    "Dinov2WithRegistersModel": PackedDenseTable,
    "DINOv3ViTModel": Dinov3Table,
    "SiglipVisionModel": SiglipTable,
    "CLIPVisionModel": ClipTable,
    "ViTModel": ViTTable,
}


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The vision model inside a model, by its class, with its forward.

    Args:
        model: a whole model, or its vision model.
        towers: class names of vision models.
        fields: features are `last_hidden_state` either way.
        options: see `PackedDenseTable`.
    """
    tower = find_module(model, *towers)
    table = TABLES[type(tower).__name__](tower, **options)
    assert table.switch is not None, "these towers look their attention up"
    with undone_on_failure(table.switch):
        table.check()

    def serve(execute: Execute, pixel_values: Any, interpolate_pos_encoding: Any) -> Any:
        table.refuse(pixel_values, bool(interpolate_pos_encoding))
        last = torch.stack(execute(table.request(pixel_values)))
        return table.output(last, table.pool(last))

    call = Call(owner=tower, method="forward", takes=("pixel_values", "interpolate_pos_encoding"), serve=serve)
    return Binding(table=table, calls=(call,), switch=table.switch, encode=table.encode)


_ROWS_ONLY = ("patches", "cu_seqlens")
_LEARNED = (*_ROWS_ONLY, "kind", "first", "taps")
_TOKENS_ONLY = (
    "Features of `encoder_for` are `last_hidden_state`; pooled outputs and projections are computed after the replay, from "
    "`accelerate`."
)
_NATIVE = "Its forward answers other sizes than the trained one with interpolate_pos_encoding=True; `encode` always interpolates."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="DINOv2",
        model_types=("dinov2",),
        classes=("Dinov2Model",),
        binder=bind,
        buffers=_LEARNED,
        tokens="1 + h w",
        limits=(_TOKENS_ONLY,),
    ),
    Architecture(
        name="DINOv2 with registers",
        model_types=("dinov2_with_registers",),
        classes=("Dinov2WithRegistersModel",),
        binder=bind,
        buffers=_LEARNED,
        tokens="1 + registers + h w",
        limits=(
            _TOKENS_ONLY,
            "Its positions are antialiased: images with a side of less than about a third of the trained one go through the "
            "model's own code, one by one.",
        ),
    ),
    Architecture(
        name="DINOv3",
        model_types=("dinov3_vit",),
        classes=("DINOv3ViTModel",),
        binder=bind,
        buffers=(*_ROWS_ONLY, "kind", "cos", "sin"),
        tokens="1 + registers + h w",
        limits=(
            _TOKENS_ONLY,
            "Its rotary positions are kept for each grid: a `rope_embeddings.inv_freq` that is changed in place is not noticed.",
        ),
    ),
    Architecture(
        name="SigLIP",
        model_types=("siglip", "siglip_vision_model"),
        classes=("SiglipVisionModel",),
        binder=bind,
        buffers=(*_ROWS_ONLY, "first", "taps"),
        tokens="h w",
        limits=(
            _TOKENS_ONLY,
            _NATIVE,
            "The pooling head runs eagerly after the replay, once for all images of equal length.",
        ),
    ),
    Architecture(
        name="CLIP",
        model_types=("clip", "clip_vision_model"),
        classes=("CLIPVisionModel",),
        binder=bind,
        buffers=_LEARNED,
        tokens="1 + h w",
        limits=(_TOKENS_ONLY, _NATIVE),
    ),
    Architecture(
        name="ViT",
        model_types=("vit",),
        classes=("ViTModel",),
        binder=bind,
        buffers=_LEARNED,
        tokens="1 + h w",
        limits=(_TOKENS_ONLY, _NATIVE),
    ),
)
