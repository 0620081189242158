"""Pixtral towers (in LLaVA form, in Mistral 3, alone): images of native sizes, which the processor pads and the tower packs.

The tower crops and packs in its forward, image by image. Here that happens before (`pack`), and the tower is re-entered behind
it, by its own submodules. Mistral 3's projector merges patches image by image; one index does that for all images at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import InputError, ModelError
from vit_compile.models import dense_table
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import (
    Binding,
    Call,
    Execute,
    Unserved,
    check_reentry,
    exact_convolutions,
    find_module,
    find_owner,
    floating_dtype,
    original,
    plain_layer,
    undone_on_failure,
)
from vit_compile.models.hf_attention import AttentionSwitch, packed_segments
from vit_compile.models.merge_blocks import merge_order
from vit_compile.models.output_layout import OutputLayout
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_grids, host_rows
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

SMALLEST = 64
"""Smallest useful budget in output tokens."""


def pack(pixel_values: torch.Tensor, image_sizes: Sequence[Sequence[int]], patch_size: int) -> torch.Tensor:
    """Padded images as patches: each image's own ones in raster order, one image after another.

    Args:
        pixel_values: [N, C, H, W], each image in the upper left corner.
        image_sizes: (height, width) in pixels of each image; what is beyond whole patches is dropped, as the tower does.
        patch_size: side of a patch in pixels.

    Returns:
        [T, C * patch_size^2], the dtype and device of `pixel_values`.

    Raises:
        InputError: the number of sizes is not that of the images, or an image is smaller than a patch or larger than
            `pixel_values`.
    """
    count, channels, height, width = pixel_values.shape
    if len(image_sizes) != count:
        raise InputError(f"image_sizes has {len(image_sizes)} rows for {count} images in pixel_values.")
    images = []
    for image, size in zip(pixel_values, image_sizes, strict=True):
        h, w = (side // patch_size for side in size)
        if min(h, w) < 1 or h * patch_size > height or w * patch_size > width:
            raise InputError(
                f"an image of {tuple(size)} pixels: expected at least a patch of {patch_size}, and no more than there is in "
                f"pixel_values {list(pixel_values.shape)}."
            )
        images.append(image[:, : h * patch_size, : w * patch_size])
    packed = dense_table.pack(images, patch_size, channels=channels, dtype=pixel_values.dtype, device=pixel_values.device)
    rows: torch.Tensor = packed["patches"]
    return rows


class PixtralTable(EncoderTable):
    """Rows are patches in raster order, an item's key is its grid (h, w), and every image is a segment.

    Args:
        tower: the `PixtralVisionModel`; the attention of its layers has been switched.
        projector: what comes behind it, `LlavaMultiModalProjector` or `Mistral3MultiModalProjector`. None: the tower alone.
        projected: numbers of the hidden states that the projector gets, side by side; 0 is the embedding, d the last layer's.
        kept: numbers of the hidden states that are outputs.
        token_range: (smallest, largest) useful budget in output tokens. None: up to one image of the configured size.
        segment_capacities: see `EncoderTable`.

    A request is what the processor makes: `pixel_values` [N, 3, H, W], padded, and `image_sizes` in pixels; or `pixel_values`
    as `pack` returns them. Features are [h * w / merge^2, width] with the projector's merge size (1 in LLaVA form): the
    projected features, and behind them the hidden states.

    Raises:
        ModelError: the tower is not of this kind.
    """

    def __init__(
        self,
        tower: nn.Module,
        projector: nn.Module | None = None,
        *,
        projected: Sequence[int] = (),
        kept: Sequence[int] = (),
        token_range: tuple[int, int] | None = None,
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
    ) -> None:
        from transformers.utils.output_capturing import capture_outputs

        config: Any = tower.config
        if not isinstance(config.patch_size, int):
            raise ModelError(f"patch_size={config.patch_size!r}: only square patches are supported.")
        plain_layer(tower.patch_conv, nn.Conv2d)
        self.tower, self.projector = tower, projector
        self.patch_size, self.depth = config.patch_size, config.num_hidden_layers
        merger: Any = getattr(projector, "patch_merger", None)
        self._has_merger = merger is not None
        self.merge: int = merger.spatial_merge_size if self._has_merger else 1
        self._projected, self._kept = tuple(projected), tuple(kept)
        # As the tower's own forward is: hidden states come from hooks, which Dynamo can trace within this decorator only.
        self._transform = capture_outputs(_transform)
        self.layout = OutputLayout(self.alone(_example(tower, self.patch_size * self.merge)), units=2)
        conv: Any = tower.patch_conv
        buffers = {
            "patches": Buffer(role=Role.ROWS, shape=(conv.weight[0].numel(),)),
            "position_ids": Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int64),
            "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
        }
        if self._has_merger:
            buffers["merge_index"] = Buffer(role=Role.INDEX, dtype=torch.int64)
        super().__init__(
            modalities={"image": Modality(data={"patches": "pixel_values"}, per_item=("image_sizes",))},
            paths=single_path(buffers=buffers, spatial_merge_size=self.merge),
            out_hidden_size=self.layout.width,
            token_range=token_range or _token_range(config.image_size, self.patch_size * self.merge),
            segment_capacities=segment_capacities,
        )

    @torch.no_grad()
    def alone(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs by name, rows first, of one image [C, H, W] on the tower's device and in its dtype, without padding."""
        side, (height, width) = self.patch_size, image.shape[1:]
        patches = pack(image[None], [(height, width)], side)
        metadata = self.item_metadata((height // side, width // side), "main")
        values = {name: value.to(image.device) for name, value in metadata.items()}
        return self._run({"patches": patches, "max_seqlen": len(patches), **values})

    def prepare_request(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Padded images become rows."""
        pixels, sizes = inputs.get("pixel_values"), inputs.get("image_sizes")
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != 4 or sizes is None:
            return inputs
        sizes = host_rows("image_sizes", sizes, 2)
        return {**inputs, "pixel_values": pack(pixels, sizes, self.patch_size), "image_sizes": sizes}

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids (h, w) in patches."""
        sizes = host_rows("image_sizes", inputs["image_sizes"], 2)
        grids = [(1, height // self.patch_size, width // self.patch_size) for height, width in sizes]
        return [(h, w) for _, h, w in host_grids("image_sizes (in patches)", grids, spatial_merge_size=self.merge)]

    def item_size(self, key: Any) -> ItemSize:
        """Patches, and merged patches."""
        h, w = key
        return ItemSize(rows=h * w, tokens=h * w // self.merge**2)

    def example_key(self, tokens: int) -> Hashable:
        """About square, and wider than high where there is room for that."""
        height = max(1, int((tokens * 0.75) ** 0.5))
        return (height * self.merge, tokens // height * self.merge)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """Rows and columns of the patches, and the order in which Mistral 3 merges them."""
        h, w = key
        found = {
            "position_ids": torch.cartesian_prod(torch.arange(h), torch.arange(w)),
            "cu_seqlens": torch.tensor([0, h * w], dtype=torch.int32),
        }
        if self._has_merger:
            found["merge_index"] = merge_order(h, w, self.merge)
        return found

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower behind its packing, and the projector; outputs side by side."""
        return self.layout.join(self._run(values))

    def _run(self, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Outputs by name, rows first."""
        inner = dict(values)
        merge_index = inner.pop("merge_index", None)
        collect = any(number != self.depth for number in (*self._projected, *self._kept))
        found = self._transform(self.tower, **inner, output_hidden_states=collect, output_attentions=False, return_dict=True)
        states = dict(enumerate(found.hidden_states)) if collect else {}
        states[self.depth] = found.last_hidden_state
        outputs = {}
        if self.projector is not None:
            features = torch.cat([states[number][0] for number in self._projected], dim=-1)
            outputs["pooler_output"] = _project(self.projector, features, merge_index)
        return outputs | {_name(number): states[number][0] for number in self._kept}

    def split(self, features: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Features of any number of images as (projected [tokens, D], hidden states [1, T, E] by number). New memory."""
        found = self.layout.split(features)
        return found.get("pooler_output"), {number: found[_name(number)][None] for number in self._kept}


def _name(state: int) -> str:
    return f"hidden_states.{state}"


def _token_range(image_size: Any, side: int) -> tuple[int, int]:
    """From `SMALLEST` to one image of full size."""
    height, width = image_size if isinstance(image_size, list | tuple) else (image_size, image_size)
    tokens = max(1, height // side) * max(1, width // side)
    return min(SMALLEST, tokens), tokens


def _transform(
    tower: Any, patches: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, **flags: Any
) -> Any:
    """What the tower does behind its packing. `flags` are those of `capture_outputs`."""
    if type(tower.patch_conv) is not nn.Conv2d:  # since: all that can be asked under a trace
        plain_layer(tower.patch_conv, nn.Conv2d)
    embedded = tower.ln_pre(F.linear(patches, tower.patch_conv.weight.flatten(1))[None])
    positions = tower.patch_positional_embedding(embedded, position_ids)
    with packed_segments(cu_seqlens, max_seqlen):
        return tower.transformer(embedded, attention_mask=None, position_embeddings=positions)


def _project(projector: Any, features: torch.Tensor, merge_index: torch.Tensor | None) -> torch.Tensor:
    """The projector on all images at once: [T, E] in raster order -> [T / merge^2, D]."""
    if merge_index is not None:
        merger = projector.patch_merger
        squares = projector.norm(features)[merge_index].unflatten(0, (-1, merger.spatial_merge_size**2))
        merged = merger.merging_layer(squares.transpose(1, 2).flatten(1))  # channels first, as an unfolded image has them
        projected: torch.Tensor = projector.linear_2(projector.act(projector.linear_1(merged)))
    else:
        projected = projector(features)
    return projected


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of a model with its projector and `get_image_features`, or a tower alone with its `forward`.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields: None for projected features (of a tower alone: `last_hidden_state`); "all" for everything that the call returns.
        options: see `PixtralTable`.

    Raises:
        ModelError: the model's own configuration cannot work with this tower.
    """
    tower: Any = find_module(model, *towers)
    # Only the layers' attention, and not the tower's: by that it decides on a mask in its own forward, which without one keeps
    # images together in transformers 5.17.
    with undone_on_failure(AttentionSwitch(*(layer.attention for layer in tower.transformer.layers))) as switch:
        if tower is model:
            table, call = _tower_alone(tower, options)
        else:
            table, call = _whole_model(find_owner(model, "multi_modal_projector"), tower, fields, options)
    return Binding(table=table, calls=(call,), switch=switch)


def _tower_alone(tower: Any, options: Mapping[str, Any]) -> tuple[PixtralTable, Call]:
    depth = tower.config.num_hidden_layers
    table = PixtralTable(tower, kept=(depth,), **options)
    image = _example(tower, table.patch_size)
    returned = _own(tower, "forward", image)
    kind: Any = type(returned)
    check_reentry(tower, table.alone(image)[_name(depth)], returned.last_hidden_state[0])

    def serve(execute: Execute, pixel_values: Any, image_sizes: Any) -> Any:
        if image_sizes is None and isinstance(pixel_values, torch.Tensor):
            image_sizes = [pixel_values.shape[-2:]] * len(pixel_values)
        features = _encoded(execute, pixel_values, image_sizes)
        return kind(last_hidden_state=table.split(torch.cat(features))[1][depth])

    return table, Call(owner=tower, method="forward", takes=("pixel_values", "image_sizes"), serve=serve)


def _whole_model(owner: Any, tower: Any, fields: str | None, options: Mapping[str, Any]) -> tuple[PixtralTable, Call]:
    depth, config = tower.config.num_hidden_layers, owner.config
    strategy = getattr(config, "vision_feature_select_strategy", "full")
    if strategy != "full":
        raise ModelError(f"vision_feature_select_strategy={strategy!r} drops a class token, which this tower does not have.")
    projected = _numbers(config.vision_feature_layer, depth)
    if not projected:
        raise ModelError(f"vision_feature_layer={config.vision_feature_layer!r}: the tower has {depth} layers.")
    image = _example(tower, tower.config.patch_size * getattr(config, "spatial_merge_size", 1))
    returned = _own(owner, "get_image_features", image)
    kind: Any = type(returned)
    collected = [state is not None for state in returned.hidden_states]
    kept = {depth, *(number for number, is_there in enumerate(collected) if is_there)} if fields == "all" else ()
    table = PixtralTable(tower, owner.multi_modal_projector, projected=projected, kept=sorted(kept), **options)
    check_reentry(tower, table.alone(image)["pooler_output"], returned.pooler_output[0])

    def serve(execute: Execute, **given: Any) -> Any:
        strategy = given.pop("vision_feature_select_strategy", None) or getattr(config, "vision_feature_select_strategy", "full")
        if strategy != "full":
            raise Unserved("a class token is to be dropped")
        layer = given.pop("vision_feature_layer")
        if _numbers(config.vision_feature_layer if layer is None else layer, depth) != projected:
            raise Unserved(f"vision_feature_layer={layer!r}")
        features = _encoded(execute, **given)
        pooled, states = table.split(torch.cat(features))
        assert pooled is not None, "there is a projector"
        # Put together as the model does it: what is a field, and what merely an attribute, depends on the version.
        output = kind(last_hidden_state=states[depth])
        output["hidden_states"] = tuple(states[number] if is_there else None for number, is_there in enumerate(collected))
        output.pooler_output = torch.split(pooled, [len(feature) for feature in features])
        return output

    takes = ["pixel_values", "image_sizes", "vision_feature_layer"]
    if hasattr(config, "vision_feature_select_strategy"):
        takes.append("vision_feature_select_strategy")
    return table, Call(owner=owner, method="get_image_features", takes=tuple(takes), serve=serve)


def _numbers(layers: Any, depth: int) -> tuple[int, ...]:
    """Hidden states by number, counted from the embedding's; empty if one of them is none of the tower's."""
    chosen = layers if isinstance(layers, list | tuple) else [layers]
    if not all(-depth - 1 <= layer <= depth for layer in chosen):
        return ()
    return tuple(layer % (depth + 1) for layer in chosen)


def _example(tower: Any, side: int) -> torch.Tensor:
    """An image [C, side, 2 * side], made up without random numbers: two tokens (with one, Mistral 3 loses a dimension)."""
    weight = tower.patch_conv.weight
    shape = (weight.shape[1], side, 2 * side)
    return torch.arange(torch.Size(shape).numel()).reshape(shape).sin().to(weight.device, floating_dtype(tower))


@torch.no_grad()
def _own(owner: nn.Module, method: str, image: torch.Tensor) -> Any:
    """What the model's own code returns for one image [C, H, W]."""
    with exact_convolutions():
        return original(owner, method)(image[None], image_sizes=[list(image.shape[1:])], return_dict=True)


def _encoded(execute: Execute, pixel_values: Any, image_sizes: Any) -> list[torch.Tensor]:
    """Features of padded images, in the forms that the model takes."""
    if image_sizes is None:
        raise Unserved("no image_sizes")
    if not isinstance(pixel_values, torch.Tensor) or pixel_values.dim() != 4:
        raise Unserved("pixel_values are not [images, channels, height, width]")
    sizes = host_rows("image_sizes", image_sizes, 2)
    if not sizes:
        raise Unserved("no images")
    return execute({"pixel_values": pixel_values, "image_sizes": sizes})


ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="Pixtral",
        model_types=("llava", "pixtral"),
        classes=("PixtralVisionModel",),
        binder=bind,
        buffers=("cu_seqlens", "patches", "position_ids"),
        tokens="h w",
        limits=("transformers 5.17 returns the hidden states of every layer from get_image_features, and so does accelerate.",),
    ),
    Architecture(
        name="Mistral 3",
        model_types=("mistral3",),
        classes=("PixtralVisionModel",),
        binder=bind,
        buffers=("cu_seqlens", "merge_index", "patches", "position_ids"),
        tokens="h w / 4",
        limits=(
            "transformers 5.17 returns the hidden states of every layer from get_image_features, and so does accelerate.",
            "Images whose sides are no multiples of 2 patches are left to the model's own code.",
        ),
    ),
)
