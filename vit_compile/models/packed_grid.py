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
from vit_compile.models.hf_attention import use_attention
from vit_compile.models.vision_metadata import vision_metadata
from vit_compile.runtime.inputs import host_grids
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

    Features are [t * h * w / merge^2, width]; with deepstack levels these follow the last level's in the width.

    Raises:
        ModelError: the tower is not of this kind.
    """

    def __init__(
        self,
        tower: nn.Module,
        *,
        token_range: tuple[int, int] = (64, 4096),
        max_frames_per_video: int = 32,
        segment_capacities: Sequence[int] = (1, 4),
    ) -> None:
        config: Any = getattr(tower, "config", None)
        merge = getattr(config, "spatial_merge_size", None)
        if not isinstance(merge, int):
            raise ModelError(f"{type(tower).__name__} has no config.spatial_merge_size: it is not a packed tower with grids.")
        use_attention(tower)
        self.tower, self.merge = tower, merge
        probe = vision_metadata(tower, [(1, 2 * merge, 2 * merge)])
        self._constants = {name: value for name, value in probe.items() if value is None}
        super().__init__(
            modalities={"image": IMAGE, "video": VIDEO},
            paths=single_path(buffers=self._buffers(config, probe), spatial_merge_size=merge),
            out_hidden_size=_width(config),
            token_range=token_range,
            max_frames_per_video=max_frames_per_video,
            segment_capacities=segment_capacities,
        )

    def _buffers(self, config: Any, probe: Mapping[str, Any]) -> dict[str, Buffer]:
        square = self.merge**2
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        found = {
            "hidden_states": Buffer(role=Role.ROWS, shape=(pixels,)),
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
        if probe.get("grid_thw") is not None:
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
        """The tower with precomputed metadata; deepstack levels side by side."""
        output = self.tower(**values, **self._constants)
        levels = getattr(output, "deepstack_features", None)
        features: torch.Tensor = output.pooler_output
        return torch.cat([features, *levels], dim=1) if levels else features


def _width(config: Any) -> int:
    """Width of a token's features, deepstack levels included."""
    levels = len(getattr(config, "deepstack_visual_indexes", None) or ())
    # Qwen2-VL calls the language model's width `hidden_size`, since its own is `embed_dim`.
    width: int = getattr(config, "out_hidden_size", None) or config.hidden_size
    return width * (1 + levels)
