"""Kimi-K2.5 (images and clips) and Kimi-VL (images, remote code): MoonViT, rows in raster order, attention over a whole clip.

Kimi-K2.5 is entered through the keyword arguments that its tower offers, Kimi-VL through the tower's parts. What comes of
that is compared with the tower's own forward when it is bound.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vit_compile.attention.varlen import varlen_attention
from vit_compile.backend.roles import Role
from vit_compile.errors import GridError, ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import (
    Binding,
    Call,
    Execute,
    Unserved,
    check_reentry,
    find_module,
    find_owner,
    floating_dtype,
    original,
)
from vit_compile.models.hf_attention import ATTENTION_NAME, AttentionSwitch
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.runtime.inputs import host_grids, host_rows
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

TOKEN_RANGE = (64, 4096)
TAPS = 4
"""Of cubic interpolation, along one axis."""


def merge_order(height: int, width: int, merge: int) -> torch.Tensor:
    """Patches of one frame in raster order, picked so that each `merge` x `merge` block lies together: int64 [h * w]."""
    patches = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    return patches.transpose(1, 2).flatten()


class _MoonVitTable(EncoderTable):
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


def _side_limited_example(tokens: int, merge: int, longest: int) -> tuple[int, int, int]:
    """About square, and no side longer than a tower has positions for."""
    height = max(1, min(int(tokens**0.5), longest // merge))
    return (1, height * merge, min(tokens // height, longest // merge) * merge)


# --- Kimi-K2.5 -------------------------------------------------------------------------------------------------------

_FOR_TOWER = ("pixel_values", "position_ids", "interp_indices", "interp_weights", "frame_index", "cu_seqlens", "max_seqlen")


class KimiK25Table(_MoonVitTable):
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

    def __init__(
        self,
        tower: nn.Module,
        *,
        projector: nn.Module | None = None,
        token_range: tuple[int, int] = TOKEN_RANGE,
        segment_capacities: Sequence[int] = (1, 4),
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
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            positions.num_grid_per_side,
            mode=positions.interpolation_mode,
            align_corners=positions.interpolation_align_corners,
        )
        first_of_frame = torch.arange(t) * (h * w)
        offsets = torch.zeros(t * tokens, self.frames, dtype=torch.int64)
        shares = torch.zeros(t * tokens, self.frames)
        offsets[:tokens, :t], shares[:tokens, :t] = first_of_frame, 1 / t
        return {
            "position_ids": vision_utils.get_vision_position_ids(grid, 1),
            "interp_indices": indices,
            "interp_weights": weights,
            "frame_index": get_vision_frame_index(grid),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid, merge_temporal=True),
            "merge_index": (first_of_frame[:, None] + merge_order(h, w, self.merge)).flatten(),
            "frame_offsets": offsets,
            "frame_weights": shares,
        }

    def example_key(self, tokens: int) -> Hashable:
        """An image, about square."""
        return _side_limited_example(tokens, self.merge, tokens * self.merge)

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
    switch = AttentionSwitch(tower)
    try:
        table = KimiK25Table(tower, projector=projector, fields=fields, **options)  # type: ignore[arg-type]
    except BaseException:
        switch.undo()
        raise

    def serve(execute: Execute, pixel_values: torch.Tensor, grid_thw: Any) -> Any:
        if grid_thw is None:
            raise Unserved("no grid_thw")
        grids = host_grids("grid_thw", grid_thw, spatial_merge_size=table.merge)
        if not grids:
            raise Unserved("no images")
        return table.wrap(execute({"pixel_values": pixel_values, "image_grid_thw": grids}), grids)

    call = Call(owner=tower, method="forward", takes=("pixel_values", "grid_thw"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


# --- Kimi-VL ---------------------------------------------------------------------------------------------------------

_PARTS = (
    "merge_kernel_size",
    "patch_embed.proj",
    "patch_embed.pos_emb.weight",
    "patch_embed.pos_emb.interpolation_mode",
    "encoder.rope_2d.get_freqs_cis",
    "encoder.blocks",
    "encoder.final_layernorm",
)
_FUNCTIONS = "VL_VISION_ATTENTION_FUNCTIONS"


def _block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_cu_seqlens: torch.Tensor | None = None,
    k_cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The entry in the tower's dict of attention functions: [T,H,D] each -> [T, H * D]."""
    assert q_cu_seqlens is not None, "blocks of MoonViT always have boundaries"
    # The blocks know no bound on the segments; all rows is one.
    return varlen_attention(q, k, v, q_cu_seqlens, q.shape[0], q.shape[-1] ** -0.5).flatten(1)


class BlockAttentionSwitch:
    """The blocks of a MoonViT on `varlen_attention`, through the dict of functions that its own module looks up.

    Raises:
        ModelError: there is no such dict.
    """

    def __init__(self, tower: nn.Module) -> None:
        self._before: list[tuple[Any, str]] = []
        for block in tower.encoder.blocks:  # type: ignore[union-attr]
            functions = getattr(sys.modules[type(block).__module__], _FUNCTIONS, None)
            if not isinstance(functions, dict) or not hasattr(block, "attn_implementation"):
                raise ModelError(f"{type(tower).__name__} does not look its attention up in {_FUNCTIONS}.")
            functions.setdefault(ATTENTION_NAME, _block_attention)
            self._before.append((block, block.attn_implementation))
        for block, _ in self._before:
            block.attn_implementation = ATTENTION_NAME

    def undo(self) -> None:
        """Give every block the name that it had."""
        for block, name in self._before:
            block.attn_implementation = name
        self._before = []


class KimiVLTable(_MoonVitTable):
    """The tower of Kimi-VL: keys are (1, h, w), features [h * w / 4, width].

    Args:
        tower: a `MoonVitPretrainedModel` whose attention was switched.
        projector: the model's `multi_modal_projector`; None for merged patches side by side, width 4 * hidden_size.
        token_range, segment_capacities: see `EncoderTable`.

    Raises:
        ModelError: it is no tower of this kind.
        GridError (from requests): also for sides that are longer than the tower's rotary positions.
    """

    def __init__(
        self,
        tower: nn.Module,
        *,
        projector: nn.Module | None = None,
        token_range: tuple[int, int] = TOKEN_RANGE,
        segment_capacities: Sequence[int] = (1, 4),
    ) -> None:
        self.tower = tower
        self.projector: Any = projector
        self.merge = self._merge_size()
        rope = self.tower.encoder.rope_2d
        self._limits = tuple(int(getattr(rope, side, sys.maxsize)) for side in ("max_height", "max_width"))
        patch = tuple(self.tower.patch_embed.proj.weight.shape[1:])
        probe = self.item_metadata((1, self.merge, self.merge), "main")
        super().__init__(
            modalities={"image": Modality(data={"pixel_values": "pixel_values"}, per_item=("image_grid_hws",))},
            paths=single_path(
                buffers={
                    "pixel_values": Buffer(role=Role.ROWS, shape=patch),
                    **{
                        name: Buffer(role=Role.ROWS, shape=tuple(probe[name].shape[1:]), dtype=probe[name].dtype)
                        for name in ("interp_indices", "interp_weights", "rope_freqs_cis")
                    },
                    "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32),
                    "merge_index": Buffer(role=Role.INDEX, dtype=torch.int64),
                },
                spatial_merge_size=self.merge,
            ),
            out_hidden_size=self._width(patch),
            token_range=token_range,
            segment_capacities=segment_capacities,
        )

    @torch.no_grad()
    def _width(self, patch: tuple[int, ...]) -> int:
        """Of the features for a small image, on which the tower's own forward must agree."""
        key = (1, self.merge, 2 * self.merge)
        values = self._example(key, patch)
        (want,) = original(self.tower, "forward")(
            values["pixel_values"], torch.tensor([key[1:]], device=values["pixel_values"].device)
        )
        merged = self._merged(values)
        check_reentry(self.tower, merged, want)
        return self._features(merged).shape[1]

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids of one frame."""
        name = self.modalities[modality].per_item[0]
        rows = [(1, *sides) for sides in host_rows(name, inputs[name], 2)]
        for index, (_, h, w) in enumerate(grids := host_grids(name, rows, spatial_merge_size=self.merge)):
            if h > self._limits[0] or w > self._limits[1]:
                raise GridError(f"grid {index} of {name} is {(h, w)}: the tower has positions for {self._limits}.")
        return grids

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """Taps of interpolated positions, rotary factors, and the order of merging."""
        _, h, w = key
        table = self._positions.weight
        rows, row_weights = _axis_taps(table.shape[0], h, self._positions.interpolation_mode)
        columns, column_weights = _axis_taps(table.shape[1], w, self._positions.interpolation_mode)
        # On the tower's device: it keeps what it computes there.
        freqs_cis = self.tower.encoder.rope_2d.get_freqs_cis(grid_hws=torch.tensor([(h, w)], device=table.device))
        return {
            "interp_indices": (rows[:, None, :, None] * table.shape[1] + columns[None, :, None, :]).reshape(h * w, -1),
            "interp_weights": (row_weights[:, None, :, None] * column_weights[None, :, None, :]).reshape(h * w, -1),
            "rope_freqs_cis": freqs_cis.detach().cpu(),
            "cu_seqlens": torch.tensor([0, h * w], dtype=torch.int32),
            "merge_index": merge_order(h, w, self.merge),
        }

    def example_key(self, tokens: int) -> Hashable:
        """About square."""
        return _side_limited_example(tokens, self.merge, min(self._limits))

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower's parts with precomputed metadata, then the projector."""
        return self._features(self._merged(values))

    def _features(self, merged: torch.Tensor) -> torch.Tensor:
        return merged.flatten(1) if self.projector is None else self.projector([merged])

    def _merged(self, values: Mapping[str, Any]) -> torch.Tensor:
        """Blocks of patches, [tokens, merge^2, E]."""
        hidden = self.tower.patch_embed.proj(values["pixel_values"]).flatten(1)
        # Taken from the table at each call, in float32 as `interpolate` computes: new values in place of the old ones count.
        positions = F.embedding_bag(
            values["interp_indices"],
            self._positions.weight.flatten(0, 1).float(),
            per_sample_weights=values["interp_weights"],
            mode="sum",
        )
        hidden = hidden + positions.to(hidden.dtype)
        for block in self.tower.encoder.blocks:
            hidden = block(hidden, values["cu_seqlens"], rope_freqs_cis=values["rope_freqs_cis"])
        hidden = self.tower.encoder.final_layernorm(hidden)
        merged: torch.Tensor = hidden[values["merge_index"]].view(-1, self.merge**2, hidden.shape[-1])
        return merged


def _axis_taps(source: int, target: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `source` positions along one axis make up each of `target` interpolated ones, and their weights.

    Interpolation is linear in the values and separable: interpolating each unit vector shows its weights.

    Returns:
        int64 and float32 [target, taps].
    """
    unit = torch.eye(source).view(1, source, source, 1)
    weights = F.interpolate(unit, size=(target, 1), mode=mode)[0, :, :, 0].T
    taps = weights.abs().topk(min(TAPS, source), dim=1).indices
    return taps, weights.gather(1, taps)


def bind_vl(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of Kimi-VL, with the call that the model makes.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields: None for features as the language model gets them, "all" for what the tower returns.
        options: see `KimiVLTable`.

    Raises:
        ModelError: the tower does not have the published structure.
    """
    tower = find_module(model, *towers)
    try:
        operator.attrgetter(*_PARTS)(tower)
    except AttributeError as error:
        raise ModelError(f"{type(tower).__name__} does not have the structure of the published MoonViT: {error}.") from error
    whole = model is not tower and fields is None
    projector = find_owner(model, "multi_modal_projector").multi_modal_projector if whole else None
    switch = BlockAttentionSwitch(tower)
    try:
        table = KimiVLTable(tower, projector=projector, **options)  # type: ignore[arg-type]
    except BaseException:
        switch.undo()
        raise

    def serve(execute: Execute, pixel_values: torch.Tensor, grid_hws: Any) -> Any:
        features = execute({"pixel_values": pixel_values, "image_grid_hws": grid_hws})
        return [feature.unflatten(1, (table.merge**2, -1)) for feature in features]

    call = Call(owner=tower, method="forward", takes=("pixel_values", "grid_hws"), serve=serve)
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
    Architecture(
        name="Kimi-VL",
        model_types=("kimi_vl", "moonvit"),
        classes=("MoonVitPretrainedModel",),
        binder=bind_vl,
        buffers=("cu_seqlens", "interp_indices", "interp_weights", "merge_index", "pixel_values", "rope_freqs_cis"),
        tokens="h w / 4",
        remote_code=True,
    ),
)
