"""Kimi-K2.5: images and clips, through the keyword arguments that its tower offers.

What comes of that is compared with the tower's own forward when it is bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import GridError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import (
    Binding,
    Call,
    Execute,
    Unserved,
    check_reentry,
    find_module,
    find_owner,
    original,
    undone_on_failure,
)
from vit_compile.models.boundaries import cu_seqlens
from vit_compile.models.hf_attention import AttentionSwitch
from vit_compile.models.interpolation import indices_and_weights
from vit_compile.models.merge_blocks import merge_order, position_ids
from vit_compile.models.moonvit import TAPS, TOKEN_RANGE, MoonVitTable, side_limited_example
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_grids
from vit_compile.runtime.table import Buffer, Modality, single_path

_FOR_TOWER = ("pixel_values", "position_ids", "interp_indices", "interp_weights", "frame_index", "cu_seqlens", "max_seqlen")


class KimiK25Table(MoonVitTable):
    """The tower of Kimi-K2.5. A clip of t frames takes t * h * w / 4 tokens of a budget and has h * w / 4 features: the mean
    over its frames stands in the first of its tokens, and zeros behind.

    Args:
        tower: a `Kimi_K25VisionModel` whose attention was switched.
        projector: the model's `mm_projector`; None for a bare tower, whose features are [h * w / 4, 4 * hidden_size].
        token_range, segment_capacities: see `EncoderTable`.
        fields: None for features as the language model gets them, "all" for every field of the tower, laid out by `outputs`
            with the tokens of all frames.

    Raises:
        ModelError: it is no tower of this kind.
        GridError (from requests): also for clips with more frames than the tower has positions for.
    """

    new_metadata = True

    def __init__(
        self,
        tower: nn.Module,
        *,
        projector: nn.Module | None = None,
        token_range: tuple[int, int] = TOKEN_RANGE,
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
        fields: str | None = None,
    ) -> None:
        self.tower = tower
        self.projector: Any = projector if fields is None else None
        self.merge = self._merge_size()
        self.frames: int = self._positions.num_frames
        self._all = fields == "all"
        patch = tuple(self.tower.patch_embed.proj.weight.shape[1:])
        self.outputs = self._outputs(patch)
        data = "pixel_values"
        super().__init__(
            modalities={
                "image": Modality(data={data: "pixel_values"}, per_item=("image_grid_thw",)),
                "video": Modality(data={data: "pixel_values_videos"}, per_item=("video_grid_thw",)),
            },
            paths=single_path(buffers=self._buffers(patch), spatial_merge_size=self.merge),
            out_hidden_size=self.outputs.width,
            token_range=token_range,
            segment_capacities=segment_capacities,
        )

    def _buffers(self, patch: tuple[int, ...]) -> dict[str, Buffer]:
        taps, square = TAPS**2, self.merge**2
        return {
            "pixel_values": Buffer(role=Role.ROWS, shape=patch),
            "position_ids": Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int64),
            "interp_indices": Buffer(role=Role.ROWS, shape=(taps,), dtype=torch.int64),
            "interp_weights": Buffer(role=Role.ROWS, shape=(taps,), dtype=torch.float32),
            "frame_index": Buffer(role=Role.ROWS, dtype=torch.int64),
            "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
            "merge_index": Buffer(role=Role.INDEX, dtype=torch.int64),
            "frame_offsets": Buffer(role=Role.ROWS, shape=(self.frames,), dtype=torch.int64, rows_per_entry=square),
            "frame_weights": Buffer(role=Role.ROWS, shape=(self.frames,), dtype=torch.float32, rows_per_entry=square),
        }

    @torch.no_grad()
    def _outputs(self, patch: tuple[int, ...]) -> TowerOutputs:
        """Found out on a small clip, on which the tower's own forward must agree."""
        key = (min(2, self.frames), self.merge, 2 * self.merge)
        values = self._example(key, patch)
        grid = torch.tensor([key], device=values["pixel_values"].device)
        want = original(self.tower, "forward")(values["pixel_values"], grid_thw=grid)
        got = self._run(values)
        check_reentry(self.tower, got.last_hidden_state, want.last_hidden_state)
        check_reentry(self.tower, got.pooler_output[: len(want.pooler_output)], want.pooler_output)
        example = got if self._all else self._features(got.pooler_output)
        return TowerOutputs(example, units=len(got.pooler_output))

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids."""
        name = self.modalities[modality].per_item[0]
        grids = host_grids(name, inputs[name], spatial_merge_size=self.merge)
        for index, grid in enumerate(grids):
            if grid[0] > self.frames:
                raise GridError(f"grid {index} of {name} is {grid}: the tower has positions for {self.frames} frames.")
        return grids

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """What the tower would compute from the grid, the order of merging, and for each merged patch its frames."""
        from transformers import vision_utils
        from transformers.models.kimi_k25.modeling_kimi_k25 import get_vision_frame_index

        t, h, w = key
        grid, positions, tokens = torch.tensor([key]), self._positions, h * w // self.merge**2
        indices, weights = indices_and_weights(
            vision_utils,
            key,
            side=positions.num_grid_per_side,
            mode=positions.interpolation_mode,
            align_corners=positions.interpolation_align_corners,
            merge=1,
        )
        first_of_frame = torch.arange(t) * (h * w)
        offsets = torch.zeros(t * tokens, self.frames, dtype=torch.int64)
        shares = torch.zeros(t * tokens, self.frames)
        offsets[:tokens, :t], shares[:tokens, :t] = first_of_frame, 1 / t
        return {
            "position_ids": position_ids(vision_utils, [key], 1),
            "interp_indices": indices,
            "interp_weights": weights,
            "frame_index": get_vision_frame_index(grid),
            "cu_seqlens": cu_seqlens(vision_utils, [key], merge_temporal=True),
            "merge_index": merge_order(h, w, self.merge, t),
            "frame_offsets": offsets,
            "frame_weights": shares,
        }

    def example_key(self, tokens: int) -> Hashable:
        """An image, about square."""
        return side_limited_example(tokens, self.merge, tokens * self.merge)

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower with precomputed metadata, then the mean over frames, then the projector."""
        output = self._run(values)
        return self.outputs.join(output if self._all else self._features(output.pooler_output))

    def _features(self, merged: torch.Tensor) -> torch.Tensor:
        return merged.flatten(1) if self.projector is None else self.projector(merged).squeeze(1)

    def _run(self, values: Mapping[str, Any]) -> Any:
        given = {name: values[name] for name in _FOR_TOWER}
        output = original(self.tower, "forward")(grid_thw=None, temporal_merge_index=self._no_merge(values), **given)
        hidden = output.last_hidden_state
        return type(output)(last_hidden_state=hidden, pooler_output=self._merged(hidden, values))

    def _merged(self, hidden: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """Blocks of patches, [tokens, merge^2, E], each the mean over its frames: one after another in float32, as the tower
        adds them, so that no order of additions is left to chance."""
        patches = values["merge_index"].view(-1, self.merge**2)
        total: torch.Tensor | None = None
        for frame in range(self.frames):
            of_frame = hidden[patches + values["frame_offsets"][:, frame, None]].float()
            share = of_frame * values["frame_weights"][:, frame, None, None]
            total = share if total is None else total + share
        assert total is not None, "a tower has positions for a frame"
        return total.to(hidden.dtype)

    def _no_merge(self, values: Mapping[str, Any]) -> Any:
        """A merge of the tower's own that costs little and is not used: its layout has no fixed shape, and it adds up atomically.

        transformers 5.24 takes (destination of each patch, its weight, number of merged patches), 5.17 an index
        [merged patches, frames, merge^2].
        """
        index = values["merge_index"]
        if hasattr(self.tower, "temporal_merge"):
            return index, torch.ones_like(index, dtype=torch.float32), index.shape[0] // self.merge**2
        return index[:1].view(1, 1, 1)

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Features of a clip: those of one frame."""
        features = super().assemble(key, outputs)
        return features if self._all else features[: features.shape[0] // key[0]]

    def wrap(self, features: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int]]) -> Any:
        """What the tower returns for a call with these grids; for `fields="all"`."""
        output = self.outputs.wrap(torch.cat(list(features)))
        if any(t > 1 for t, _, _ in grids):
            clips = output.pooler_output.split([len(item) for item in features])
            output.pooler_output = torch.cat([clip[: len(clip) // t] for clip, (t, _, _) in zip(clips, grids, strict=True)])
        return output


def bind_k25(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of Kimi-K2.5, with the call that the model makes.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields, options: see `KimiK25Table`.
    """
    tower = find_module(model, *towers)
    projector = None if model is tower else find_owner(model, "mm_projector").mm_projector
    with undone_on_failure(AttentionSwitch(tower)) as switch:
        table = KimiK25Table(tower, projector=projector, fields=fields, **options)  # type: ignore[arg-type]

    def serve(execute: Execute, pixel_values: torch.Tensor, grid_thw: Any) -> Any:
        if grid_thw is None:
            raise Unserved("no grid_thw")
        grids = host_grids("grid_thw", grid_thw, spatial_merge_size=table.merge)
        if not grids:
            raise Unserved("no images")
        return table.wrap(execute({"pixel_values": pixel_values, "image_grid_thw": grids}), grids)

    call = Call(owner=tower, method="forward", takes=("pixel_values", "grid_thw"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="Kimi-K2.5",
        model_types=("kimi_k25", "kimi_k25_vision"),
        classes=("Kimi_K25VisionModel",),
        binder=bind_k25,
        buffers=(
            "cu_seqlens",
            "frame_index",
            "frame_offsets",
            "frame_weights",
            "interp_indices",
            "interp_weights",
            "merge_index",
            "pixel_values",
            "position_ids",
        ),
        modalities=("image", "video"),
        tokens="h w / 4",
        limits=(
            "A clip of t frames takes t h w / 4 tokens of a budget.",
            "Clips have at most as many frames as the tower has temporal positions (4).",
            "transformers 5.17 cannot split the features of clips itself: there `get_video_features` fails with and without "
            "an encoder, and `encoder_for` works.",
        ),
    ),
)
