"""The packed towers of Hugging Face as a table: Qwen2-VL, Qwen2.5-VL, Qwen3-VL(-MoE), Qwen3.5(-MoE), GLM-4.xV(-MoE), GLM-OCR.

The tower is re-entered through the keyword arguments that it offers for precomputed metadata; none of its code is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, Call, Execute, Unserved, find_module, floating_dtype, original, undone_on_failure
from vit_compile.models.hf_attention import AttentionSwitch, use_attention
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.models.vision_metadata import vision_metadata
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_grids, host_rows
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

IMAGE = Modality(data={"hidden_states": "pixel_values"}, per_item=("image_grid_thw",))
VIDEO = Modality(data={"hidden_states": "pixel_values_videos"}, per_item=("video_grid_thw",))


class PackedGridTable(EncoderTable):
    """A packed tower: rows are patches, an item's key is its grid (t, h, w), and every frame is a segment.

    Args:
        tower: the vision tower, for example `model.model.visual`. Its attention is switched (see `use_attention`).
        token_range: (smallest, largest) useful budget in output tokens.
        max_frames_per_video: frames, after temporal merging, of the longest clip.
        segment_capacities: see `EncoderTable`.
        fields: what a token's columns hold. None: what the language model gets, `pooler_output` and behind it the deepstack
            levels. "all": every field that the tower returns, as `outputs` lays them out.
        switch: the tower's attention was switched already; None switches it by `use_attention`.

    Features are [t * h * w / merge^2, width].

    Raises:
        ModelError: the tower is not of this kind.
    """

    new_metadata = True

    def __init__(
        self,
        tower: nn.Module,
        *,
        token_range: tuple[int, int] = (64, 4096),
        max_frames_per_video: int = 32,
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
        fields: str | None = None,
        switch: AttentionSwitch | None = None,
    ) -> None:
        config: Any = getattr(tower, "config", None)
        merge = getattr(config, "spatial_merge_size", None)
        if not isinstance(merge, int):
            raise ModelError(f"{type(tower).__name__} has no config.spatial_merge_size: it is not a packed tower with grids.")
        if switch is None:
            use_attention(tower)
        self.tower, self.merge = tower, merge
        probe = vision_metadata(tower, [(1, 2 * merge, 2 * merge)])
        self._constants = {name: value for name, value in probe.items() if value is None}
        self.reads_grid = "grid_thw" not in self._constants
        """The tower looks up grids itself, one for each frame (GLM-4.xV)."""
        self.outputs = self._outputs(config, fields)
        super().__init__(
            modalities={"image": IMAGE, "video": VIDEO},
            paths=single_path(buffers=self._buffers(config, probe), spatial_merge_size=merge),
            out_hidden_size=self.outputs.width,
            token_range=token_range,
            max_frames_per_video=max_frames_per_video,
            segment_capacities=segment_capacities,
        )

    @torch.no_grad()
    def _outputs(self, config: Any, fields: str | None) -> TowerOutputs:
        """Found out on a single token, by a run of the tower."""
        values = vision_metadata(self.tower, [(1, self.merge, self.merge)])
        weight = next(self.tower.parameters())
        patches = torch.zeros(self.merge**2, _channels(config), dtype=floating_dtype(self.tower), device=weight.device)
        values = {name: value.to(weight.device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        example = self._run({"hidden_states": patches, **values})
        if fields == "all":
            return TowerOutputs(example, units=1)
        chosen = [name for name in ("pooler_output", "deepstack_features") if example.get(name) is not None]
        return TowerOutputs(example, units=1, fields=chosen)

    def _buffers(self, config: Any, probe: Mapping[str, Any]) -> dict[str, Buffer]:
        square = self.merge**2
        found = {
            "hidden_states": Buffer(role=Role.ROWS, shape=(_channels(config),)),
            "position_ids": Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int64),
            "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
        }
        for name in ("interp_indices", "interp_weights"):
            if name in probe:
                found[name] = Buffer(role=Role.ROWS, shape=tuple(probe[name].shape[1:]), dtype=probe[name].dtype)
        if "window_index" in probe:
            longest = probe["max_window_seqlen"]
            side = int((longest // square) ** 0.5)
            # A grid of a x b tokens has ceil(a / side) * ceil(b / side) windows, which is at most a * b / side + 1.
            found["window_index"] = Buffer(role=Role.INDEX, dtype=torch.int64, rows_per_entry=square)
            found["cu_window_seqlens"] = Buffer(
                role=Role.BOUNDARIES,
                dtype=torch.int32,
                capacity=lambda rows, segments: -(-rows // (square * side)) + segments,
                bound="max_window_seqlen",
                longest=longest,
            )
        if self.reads_grid:
            found["grid_thw"] = Buffer(role=Role.PER_SEGMENT, shape=(3,), dtype=torch.int64, pad=1)
        return found

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids. Towers that read their grid (GLM) get one row per frame, as their own `get_video_features` makes them."""
        name = self.modalities[modality].per_item[0]
        return host_grids(name, inputs[name], spatial_merge_size=self.merge)

    def item_size(self, key: Any) -> ItemSize:
        """Patches, merged patches, frames."""
        t, h, w = key
        return ItemSize(rows=t * h * w, tokens=t * h * w // self.merge**2, frames=t)

    def example_key(self, tokens: int) -> Hashable:
        """About square."""
        height = max(1, int(tokens**0.5))
        return (1, height * self.merge, tokens // height * self.merge)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """What the tower would compute from the grid."""
        return {name: value for name, value in vision_metadata(self.tower, [key]).items() if isinstance(value, torch.Tensor)}

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower with precomputed metadata; fields side by side."""
        return self.outputs.join(self._run(values))

    def _run(self, values: Mapping[str, Any]) -> Any:
        return original(self.tower, "forward")(**{**self._constants, **values})


def _channels(config: Any) -> int:
    """Values in a row of `pixel_values`."""
    channels: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return channels


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of a model, by its class, with the call that the model makes.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields, options: see `PackedGridTable`.
    """
    tower = find_module(model, *towers)
    with undone_on_failure(AttentionSwitch(tower)) as switch:
        table = PackedGridTable(tower, fields=fields, switch=switch, **options)

    def serve(execute: Execute, hidden_states: torch.Tensor, grid_thw: Any) -> Any:
        grids = host_rows("grid_thw", grid_thw, 3)
        if not grids:
            raise Unserved("no images")
        if table.reads_grid and any(t != 1 for t, _, _ in grids):
            raise Unserved("a clip in one row: this tower takes a row for each frame")
        return table.outputs.wrap(torch.cat(execute({"pixel_values": hidden_states, "image_grid_thw": grids})))

    call = Call(owner=tower, method="forward", takes=("hidden_states", "grid_thw"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


_ALWAYS = ("hidden_states", "position_ids", "cu_seqlens")
_WINDOWS = ("window_index", "cu_window_seqlens")
_INTERPOLATED = ("interp_indices", "interp_weights")
_SAMPLED = ("grid_thw",)


def _row(name: str, model_types: tuple[str, ...], tower: str, more: tuple[str, ...] = ()) -> Architecture:
    return Architecture(
        name=name,
        model_types=model_types,
        classes=(tower,),
        binder=bind,
        modalities=("image", "video"),
        buffers=(*_ALWAYS, *more),
        tokens="t h w / 4",
    )


ROWS: tuple[Architecture, ...] = (
    _row("Qwen2-VL", ("qwen2_vl", "qwen2_vl_vision"), "Qwen2VisionTransformerPretrainedModel"),
    _row("Qwen2.5-VL", ("qwen2_5_vl", "qwen2_5_vl_vision"), "Qwen2_5_VisionTransformerPretrainedModel", _WINDOWS),
    _row("Qwen3-VL", ("qwen3_vl", "qwen3_vl_vision"), "Qwen3VLVisionModel", _INTERPOLATED),
    _row("Qwen3-VL-MoE", ("qwen3_vl_moe", "qwen3_vl_moe_vision"), "Qwen3VLMoeVisionModel", _INTERPOLATED),
    # Qwen3.6 has the classes and the model types of Qwen3.5.
    _row("Qwen3.5, Qwen3.6", ("qwen3_5", "qwen3_5_vision"), "Qwen3_5VisionModel", _INTERPOLATED),
    _row("Qwen3.5-MoE, Qwen3.6-MoE", ("qwen3_5_moe", "qwen3_5_moe_vision"), "Qwen3_5MoeVisionModel", _INTERPOLATED),
    _row("GLM-4.1V", ("glm4v", "glm4v_vision"), "Glm4vVisionModel", _SAMPLED),
    _row("GLM-4.5V", ("glm4v_moe", "glm4v_moe_vision"), "Glm4vMoeVisionModel", _SAMPLED),
    # Its tower is GLM-4.1V's.
    _row("GLM-4.6V", ("glm46v",), "Glm4vVisionModel", _SAMPLED),
    _row("GLM-OCR", ("glm_ocr", "glm_ocr_vision"), "GlmOcrVisionModel"),
)
