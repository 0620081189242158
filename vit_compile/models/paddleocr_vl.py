"""PaddleOCR-VL: packed patches of native sizes in raster order; the projector outside of the tower merges 2 x 2 of them.

The tower is re-entered through the keyword arguments that it offers for precomputed metadata. Its projector goes image by
image, with sizes read on the host; here one index puts the patches of all images into merge order, and its layers run once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import (
    Binding,
    Call,
    Execute,
    Unserved,
    check_reentry,
    comparable,
    find_module,
    find_owner,
    noise,
    original,
    undone_on_failure,
)
from vit_compile.models.boundaries import cu_seqlens
from vit_compile.models.hf_attention import AttentionSwitch
from vit_compile.models.interpolation import indices_and_weights
from vit_compile.models.merge_blocks import merge_order, position_ids
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_grids
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

SMALLEST, LARGEST = 64, 4096
"""Useful budgets, in tokens of 2 x 2 patches: the processor makes images of 188 to 3009 tokens."""


class PaddleOCRTable(EncoderTable):
    """Rows are patches in raster order, an item's key is its grid (t, h, w), and every frame is a segment.

    Args:
        tower: the `PaddleOCRVisionModel`, whose attention has been switched.
        projector: the `PaddleOCRProjector`. None: the tower alone, whose tokens are patches.
        fields: None: what the language model gets (of a tower alone: `last_hidden_state`). "all": both outputs.
        token_range: (smallest, largest) useful budget in output tokens.
        segment_capacities: see `EncoderTable`.

    A request has `pixel_values` [T, 3, patch, patch] and `image_grid_thw`. Features are [t * h * w / 4, width], of a tower
    alone [t * h * w, width].

    Raises:
        ModelError: the tower is not of this kind.
    """

    new_metadata = True

    def __init__(
        self,
        tower: nn.Module,
        projector: nn.Module | None = None,
        *,
        fields: str | None = None,
        token_range: tuple[int, int] | None = None,
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
    ) -> None:
        self.tower, self.projector = tower, projector
        self.merge = 1 if projector is None else _merge_of(projector)
        self._fields = ["last_hidden_state"] if projector is None or fields == "all" else []
        if projector is not None:
            self._fields.append("pooler_output")
        self._patch = tuple(self._embeddings.patch_embedding.weight.shape[1:])
        self.outputs = self._outputs()
        taps = self._tower_metadata((1, 1, 1))["interp_indices"].shape[1]
        buffers = {
            "pixel_values": Buffer(role=Role.ROWS, shape=self._patch),
            "position_ids": Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int64),
            "interp_indices": Buffer(role=Role.ROWS, shape=(taps,), dtype=torch.int64),
            "interp_weights": Buffer(role=Role.ROWS, shape=(taps,), dtype=torch.float32),
            "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
        }
        if projector is not None:
            buffers["merge_index"] = Buffer(role=Role.INDEX, dtype=torch.int64)
        patches = 1 if projector is not None else 4
        super().__init__(
            modalities={"image": Modality(data={"pixel_values": "pixel_values"}, per_item=("image_grid_thw",))},
            paths=single_path(buffers=buffers, spatial_merge_size=self.merge),
            out_hidden_size=self.outputs.width,
            token_range=token_range or (SMALLEST * patches, LARGEST * patches),
            segment_capacities=segment_capacities,
        )

    @property
    def _embeddings(self) -> Any:
        return find_module(self.tower, "PaddleOCRVisionEmbeddings")

    @torch.no_grad()
    def _outputs(self) -> TowerOutputs:
        """Found out on two tokens, on which the tower's own forward and the projector's must agree."""
        key = (1, self.merge, 2 * self.merge)
        pixels = noise(self.tower, 2 * self.merge**2, *self._patch)
        values = {name: value.to(pixels.device) for name, value in self.item_metadata(key, "main").items()}
        got = self._run({**values, "pixel_values": pixels, "max_seqlen": len(pixels)})
        if comparable(self.tower):
            grid = torch.tensor([key], device=pixels.device)
            want = original(self.tower, "forward")(pixels[None], grid_thw=grid, return_dict=True).last_hidden_state
            check_reentry(self.tower, got.last_hidden_state, want)
            if self.projector is not None:
                check_reentry(self.projector, got.pooler_output, self.projector(want, grid))
        return TowerOutputs(got, units=2, fields=self._fields)

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids (t, h, w)."""
        return host_grids("image_grid_thw", inputs["image_grid_thw"], spatial_merge_size=self.merge)

    def item_size(self, key: Any) -> ItemSize:
        """Patches, merged patches, frames."""
        t, h, w = key
        return ItemSize(rows=t * h * w, tokens=t * h * w // self.merge**2, frames=t)

    def example_key(self, tokens: int) -> Hashable:
        """About square, and wider than high where there is room for that."""
        height = max(1, int((tokens * 0.75) ** 0.5))
        return (1, height * self.merge, tokens // height * self.merge)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """What the tower would compute from the grid, and the order in which the projector takes the patches."""
        found = self._tower_metadata(key)
        if self.projector is not None:
            t, h, w = key
            found["merge_index"] = merge_order(h, w, self.merge, t)
        return found

    def _tower_metadata(self, key: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        from transformers import vision_utils

        embeddings = self._embeddings
        indices, weights = indices_and_weights(
            vision_utils,
            key,
            side=embeddings.num_grid_per_side,
            mode=embeddings.interpolation_mode,
            align_corners=embeddings.interpolation_align_corners,
            merge=1,
        )
        return {
            "position_ids": position_ids(vision_utils, [key], 1),
            "interp_indices": indices,
            "interp_weights": weights,
            "cu_seqlens": cu_seqlens(vision_utils, [key]),
        }

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower and the projector; fields side by side."""
        return self.outputs.join(self._run(values))

    def _run(self, values: Mapping[str, Any]) -> Any:
        rest = dict(values)
        pixels, merge_index = rest.pop("pixel_values"), rest.pop("merge_index", None)
        # No layer looks at the mask, but its making would take rows * width^2 bytes in transformers 5.17 under a trace or a
        # capture; a mask of four dimensions is taken for a finished one.
        found = original(self.tower, "forward")(
            pixels[None], grid_thw=None, attention_mask=pixels[:1, :1, :1, :1], return_dict=True, **rest
        )
        if self.projector is not None:
            found.pooler_output = _project(self.projector, found.last_hidden_state, merge_index)
        return found


def _merge_of(projector: Any) -> int:
    """Side of the square that becomes one token."""
    high, wide = projector.merge_kernel_size
    if high != wide:
        raise ModelError(f"the projector merges {high} x {wide} patches: only squares are supported.")
    return int(high)


def _project(projector: Any, features: torch.Tensor, merge_index: torch.Tensor) -> torch.Tensor:
    """The projector's layers on all images at once: [T, E] in raster order -> [T / merge^2, D]."""
    merged = projector.pre_norm(features)[merge_index].reshape(-1, projector.linear_1.in_features)
    projected: torch.Tensor = projector.linear_2(projector.act(projector.linear_1(merged)))
    return projected


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of a model with its projector and `get_image_features`, or a tower alone with its `forward`.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields, options: see `PaddleOCRTable`.
    """
    tower = find_module(model, *towers)
    whole = None if tower is model else find_owner(model, "projector")
    projector: Any = None if whole is None else whole.projector
    with undone_on_failure(AttentionSwitch(tower)) as switch:
        table = PaddleOCRTable(tower, projector, fields=fields, **options)

    def encode(execute: Execute, pixel_values: torch.Tensor, image_grid_thw: Any) -> tuple[Any, list[int]]:
        """Outputs of all images together, and the tokens of each."""
        if image_grid_thw is None:
            raise Unserved("no image_grid_thw")
        grids = host_grids("image_grid_thw", image_grid_thw, spatial_merge_size=table.merge)
        if not grids:
            raise Unserved("no images")
        features = execute({"pixel_values": pixel_values, "image_grid_thw": grids})
        return table.outputs.wrap(torch.cat(features)), [len(feature) for feature in features]

    def features_of_images(execute: Execute, pixel_values: torch.Tensor, image_grid_thw: Any) -> Any:
        found, sizes = encode(execute, pixel_values, image_grid_thw)
        found.pooler_output = torch.split(found.pooler_output, sizes)
        return found

    def tower_alone(execute: Execute, pixel_values: torch.Tensor, grid_thw: Any) -> Any:
        if not isinstance(pixel_values, torch.Tensor) or pixel_values.dim() != 5:
            raise Unserved("pixel_values are not [batch, patches, channels, height, width]")
        return encode(execute, pixel_values.flatten(0, 1), grid_thw)[0]

    if whole is not None:
        takes: tuple[str, ...] = ("pixel_values", "image_grid_thw")
        call = Call(owner=whole, method="get_image_features", takes=takes, serve=features_of_images)
    else:
        call = Call(owner=tower, method="forward", takes=("pixel_values", "grid_thw"), serve=tower_alone)
    return Binding(table=table, calls=(call,), switch=switch)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="PaddleOCR-VL",
        model_types=("paddleocr_vl", "paddleocr_vl_vision"),
        classes=("PaddleOCRVisionModel",),
        binder=bind,
        buffers=("cu_seqlens", "interp_indices", "interp_weights", "merge_index", "pixel_values", "position_ids"),
        tokens="t h w / 4",
    ),
)
