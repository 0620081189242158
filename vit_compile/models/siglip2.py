"""SigLIP 2 (NaFlex): padded batches of patches, packed.

The padding is taken off on the way in, and the real patches of all images lie end to end with attention within each, so the
same graphs serve any mixture of sizes, and no padding is computed.

What depends on an image's size alone are the weights with which its positions are interpolated from the learned grid. They are
found by the tower's own resize, applied to grids of ones and zeros, and multiply the learned grid inside the forward: weights
that change in place change the positions with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vit_compile.attention.varlen import varlen_attention
from vit_compile.backend.roles import Role
from vit_compile.errors import InputError, ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import (
    Binding,
    Call,
    Execute,
    Unserved,
    check_reentry,
    comparable,
    find_module,
    noise,
    original,
    plain_layer,
    undone_on_failure,
)
from vit_compile.models.hf_attention import AttentionSwitch, packed_segments
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_rows
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

EXAMPLE = (2, 3)
"""Patches of the image on which a table is compared with its tower."""


class Siglip2Table(EncoderTable):
    """A SigLIP 2 tower: rows are patches, an item's key is its size (h, w) in patches, and every image is a segment.

    Args:
        tower: a `Siglip2VisionModel` whose attention is switched.
        fields: "tokens" for the last hidden state [h * w, E]; "pooled" for the pooled embedding [1, E]; "all" for both side by
            side [h * w, 2 * E] (the embedding in every row), or what there is of them.
        token_range: (smallest, largest) useful budget in patches.
        segment_capacities: see `EncoderTable`.

    Requests are what the processor makes:
        pixel_values: [images, P, 3 * patch_size^2]; pixel_attention_mask: [images, P], 1 for an image's patches, which come
        first; spatial_shapes: [images, 2], (h, w).
    Or the same without padding and mask: pixel_values [T, 3 * patch_size^2].

    Raises:
        ModelError: "pooled" of a tower that has no pooling head.
        InputError (from requests): sizes and mask that do not agree.
    """

    def __init__(
        self,
        tower: Any,
        *,
        fields: str = "tokens",
        token_range: tuple[int, int] = (64, 4096),
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
    ) -> None:
        self.tower, self.has_head = tower, bool(tower.use_head)
        if fields == "pooled" and not self.has_head:
            raise ModelError(f"{type(tower).__name__} has no pooling head.")
        self.fields = "tokens" if not self.has_head else fields
        for layer, kind in self._read_layers():
            plain_layer(layer, kind)
        self.grid_side, self.width = tower.embeddings.position_embedding_size, tower.config.hidden_size
        example_pixels = noise(tower, EXAMPLE[0] * EXAMPLE[1], tower.embeddings.patch_embedding.in_features)
        example = self._example(example_pixels)
        self.output_type = type(example)
        channels = tower.embeddings.patch_embedding.in_features
        super().__init__(
            modalities={"image": Modality(data={"pixel_values": "pixel_values"}, per_item=("spatial_shapes",))},
            paths=single_path(
                buffers={
                    "pixel_values": Buffer(role=Role.ROWS, shape=(channels,)),
                    "resize_weights": Buffer(role=Role.ROWS, shape=(2, self.grid_side), dtype=torch.float32),
                    "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
                }
            ),
            out_hidden_size=self.width * (2 if self.fields == "all" else 1),
            token_range=token_range,
            segment_capacities=segment_capacities,
        )
        if comparable(tower):
            self._check(example_pixels, example)

    def _read_layers(self) -> Sequence[tuple[Any, type[nn.Module]]]:
        """Layers whose weights are read and that are not called, with the class that they must have."""
        found = [(self.tower.embeddings.position_embedding, nn.Embedding)]
        return [*found, (self.tower.head.attention, nn.MultiheadAttention)] if self.has_head else found

    @torch.no_grad()
    def _example(self, pixels: torch.Tensor) -> Any:
        """What the tower returns for one image of `EXAMPLE`."""
        size = torch.tensor([EXAMPLE], device=pixels.device)
        mask = torch.ones(1, len(pixels), dtype=torch.int64, device=pixels.device)
        example = original(self.tower, "forward")(pixels[None], mask, size, return_dict=True)
        expected = ["last_hidden_state", *(["pooler_output"] if self.has_head else [])]
        if list(example.keys()) != expected:
            raise ModelError(f"{type(self.tower).__name__} returns {list(example.keys())}: expected {expected}.")
        return example

    @torch.no_grad()
    def _check(self, pixels: torch.Tensor, example: Any) -> None:
        """Raise `ModelError` where the tower's own forward returned something else for these patches."""
        metadata = {name: value.to(pixels.device) for name, value in self.item_metadata(EXAMPLE, "main").items()}
        got = self.forward("main", {**metadata, "pixel_values": pixels, "max_seqlen": len(pixels)})
        if self.fields != "pooled":
            check_reentry(self.tower, got[:, : self.width], example.last_hidden_state[0])
        if self.fields != "tokens":
            check_reentry(self.tower, got[:1, -self.width :], example.pooler_output)

    def prepare_request(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Padded batches without their padding."""
        if "pixel_attention_mask" not in inputs or not {"pixel_values", "spatial_shapes"} <= inputs.keys():
            return inputs
        given = dict(inputs)
        pixels, mask = given["pixel_values"], given.pop("pixel_attention_mask")
        sizes = _sizes(pixels, mask, given["spatial_shapes"])
        parts = [image[: h * w] for image, (h, w) in zip(pixels, sizes, strict=True)]
        return given | {"pixel_values": torch.cat(parts) if parts else pixels.flatten(0, 1), "spatial_shapes": sizes}

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Sizes (h, w) in patches."""
        sizes = host_rows("spatial_shapes", inputs["spatial_shapes"], 2)
        for number, (h, w) in enumerate(sizes):
            if min(h, w) < 1:
                raise InputError(f"image {number} of spatial_shapes is {h} x {w} patches.")
        return sizes

    def item_size(self, key: Any) -> ItemSize:
        """As many tokens as patches."""
        h, w = key
        return ItemSize(rows=h * w, tokens=h * w)

    def example_key(self, tokens: int) -> Hashable:
        """About square."""
        height = max(1, int(tokens**0.5))
        return (height, tokens // height)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """Boundaries, and the weights of the learned grid's rows and of its columns for each patch."""
        h, w = key
        side, identity = self.grid_side, torch.eye(self.grid_side)
        rows, columns = identity[:, None].expand(-1, side, -1), identity[None].expand(side, -1, -1)
        # Channels of the first half are 1 in one row of the grid, those of the second in one column: resizing is linear, and
        # works along one side after the other, so what comes out is the weight of that row and of that column.
        resized = self.tower.embeddings.resize_positional_embeddings(
            torch.cat([rows, columns], dim=-1), torch.tensor([key]), max_length=h * w
        )
        return {
            "resize_weights": resized[0].unflatten(1, (2, side)),
            "cu_seqlens": torch.tensor([0, h * w], dtype=torch.int32),
        }

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower's embeddings, encoder and norm, and its pooling head."""
        tower, boundaries, longest = self.tower, values["cu_seqlens"], values["max_seqlen"]
        hidden = self._embedded(values["pixel_values"], values["resize_weights"])[None]
        with packed_segments(boundaries, longest):
            hidden = tower.encoder(inputs_embeds=hidden, attention_mask=None, return_dict=True).last_hidden_state
        tokens: torch.Tensor = tower.post_layernorm(hidden)[0]
        if self.fields == "tokens":
            return tokens
        pooled = self._pooled(tokens, boundaries, longest)
        return pooled if self.fields == "pooled" else torch.cat([tokens, pooled], dim=1)

    def _embedded(self, pixels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer, kind in self._read_layers():
            if type(layer) is not kind:  # since: all that can be asked under a trace
                plain_layer(layer, kind)
        embeddings = self.tower.embeddings
        learned = embeddings.position_embedding.weight
        by_place = (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)
        positions: torch.Tensor = (by_place @ learned.float()).to(learned.dtype)
        patches: torch.Tensor = embeddings.patch_embedding(pixels.to(embeddings.patch_embedding.weight.dtype))
        return patches + positions

    def _pooled(self, tokens: torch.Tensor, boundaries: torch.Tensor, longest: int) -> torch.Tensor:
        """Each image's pooled embedding, in all of its rows: [T, E].

        The head's attention takes one image per batch item. Over packed rows every row asks the head's one question within its
        own image, and one answer of each image goes on.
        """
        head = self.tower.head
        attention, rows = head.attention, torch.arange(tokens.shape[0], device=tokens.device, dtype=boundaries.dtype)
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        query = F.linear(head.probe[0], weights[0], biases[0]).expand(tokens.shape[0], -1)
        inputs = (query, F.linear(tokens, weights[1], biases[1]), F.linear(tokens, weights[2], biases[2]))
        q, k, v = (part.unflatten(1, (attention.num_heads, -1)) for part in inputs)
        answers = varlen_attention(q, k, v, boundaries, longest, attention.head_dim**-0.5).flatten(1)
        # The end of the last image is taken for the beginning of one more, which no row belongs to.
        firsts = boundaries.clamp(max=tokens.shape[0] - 1)
        pooled = attention.out_proj(answers[firsts])
        pooled = pooled + head.mlp(head.layernorm(pooled))
        image_of_row = torch.searchsorted(boundaries, rows, right=True) - 1
        spread: torch.Tensor = pooled[image_of_row]
        return spread

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """All rows, or the one pooled embedding."""
        features = super().assemble(key, outputs)
        return features[:1] if self.fields == "pooled" else features

    def wrap(self, features: Sequence[torch.Tensor], length: int) -> Any:
        """Features of all fields as the tower returns them for images padded to `length` patches; zeros in the padding."""
        nothing = features[0].new_zeros(length, features[0].shape[1])
        parts = [part for image in features for part in (image, nothing[len(image) :])]
        padded = torch.cat(parts).unflatten(0, (len(features), length))
        fields = {"last_hidden_state": padded[..., : self.width].contiguous()}
        if self.has_head:
            fields["pooler_output"] = padded[:, 0, self.width :].contiguous()
        return self.output_type(**fields)


def _sizes(pixels: Any, mask: Any, spatial_shapes: Any) -> list[tuple[int, int]]:
    """(h, w) of each image, and a check that the mask says the same, from one read of the device.

    Raises:
        InputError: it does not, or shapes do not fit.
    """
    if not isinstance(pixels, torch.Tensor) or not isinstance(mask, torch.Tensor) or pixels.dim() != 3:
        raise InputError("expected pixel_values [images, patches, values] with pixel_attention_mask [images, patches].")
    images, length = pixels.shape[:2]
    shapes = torch.as_tensor(spatial_shapes, device=mask.device)
    if tuple(mask.shape) != (images, length) or tuple(shapes.shape) != (images, 2):
        raise InputError(
            f"pixel_values is {list(pixels.shape)}, pixel_attention_mask {list(mask.shape)}, and spatial_shapes "
            f"{list(shapes.shape)}: expected [images, patches, values], [images, patches], [images, 2]."
        )
    real = shapes.prod(dim=1, keepdim=True)
    agrees = ((torch.arange(length, device=mask.device) < real) == mask.bool()).all(dim=1, keepdim=True)
    sizes = []
    for number, (h, w, same) in enumerate(torch.cat([shapes, agrees & (real <= length)], dim=1).tolist()):
        if not same:
            raise InputError(
                f"image {number} has {h} x {w} patches by spatial_shapes; pixel_attention_mask (of {length}) has others, or not "
                "in front."
            )
        sizes.append((h, w))
    return sizes


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of a model, with the call that the model makes.

    Args:
        model: a whole model, or its tower.
        towers: class names of the tower.
        fields: "all" for what the tower returns; None for what a whole model compares with texts (the pooled embedding), and
            for the last hidden state of a bare tower or of a classifier.
        options: see `Siglip2Table`.
    """
    tower = find_module(model, *towers)
    chosen = fields or ("pooled" if hasattr(model, "get_image_features") else "tokens")
    with undone_on_failure(AttentionSwitch(tower)) as switch:
        table = Siglip2Table(tower, fields=chosen, **options)

    def serve(execute: Execute, pixel_values: Any, pixel_attention_mask: Any, spatial_shapes: Any) -> Any:
        if pixel_attention_mask is None or spatial_shapes is None:
            raise Unserved("no pixel_attention_mask or no spatial_shapes")
        if not isinstance(pixel_values, torch.Tensor) or len(pixel_values) == 0:
            raise Unserved("no images")
        request = {"pixel_values": pixel_values, "pixel_attention_mask": pixel_attention_mask}
        return table.wrap(execute({**request, "spatial_shapes": spatial_shapes}), pixel_values.shape[1])

    call = Call(owner=tower, method="forward", takes=("pixel_values", "pixel_attention_mask", "spatial_shapes"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="SigLIP 2 (NaFlex)",
        model_types=("siglip2", "siglip2_vision_model"),
        classes=("Siglip2VisionModel",),
        binder=bind,
        buffers=("cu_seqlens", "pixel_values", "resize_weights"),
        tokens="h w",
        limits=("Where an image has padding, last_hidden_state holds zeros; the model's own has garbage there.",),
    ),
)
