"""MiniCPM-V 4.6 and 4.7: a packed tower that merges windows of 2 x 2 patches after one of its layers, and a merger behind it.

The tower is entered through its parts. Attention does not mind the order of rows, so they are put into the order of merging
once, at the beginning: every later merge takes four neighbours, which also holds in transformers 5.17, where the tower's own
forward can merge images of one size only. What comes of that is compared with the tower's own forward when it is bound.
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
    find_module,
    find_owner,
    floating_dtype,
    original,
    undone_on_failure,
)
from vit_compile.models.hf_attention import AttentionSwitch
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_grids, host_rows
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

WINDOW = 4
"""Patches that one merge takes, 2 x 2."""


def patch_rows(pixel_values: torch.Tensor) -> torch.Tensor:
    """What the processor makes, [1, 3, p, p * T] with the patches side by side, as the rows that an encoder takes: [T, 3, p, p].

    A view.
    """
    side = pixel_values.shape[2]
    rows: torch.Tensor = pixel_values[0].unflatten(-1, (-1, side))
    return rows.permute(2, 0, 1, 3)


def merge_order(height: int, width: int, levels: int) -> torch.Tensor:
    """Patches in raster order, picked so that `levels` merges in a row take four neighbours each: int64 [h * w].

    Blocks of 2 x 2 blocks of ... patches; the outermost blocks come in raster order.
    """
    scale = 2**levels
    patches = torch.arange(height * width).view(height // scale, *[2] * levels, width // scale, *[2] * levels)
    pairs = [(level, level + levels + 1) for level in range(levels + 1)]
    return patches.permute([axis for pair in pairs for axis in pair]).flatten()


class MiniCPMVTable(EncoderTable):
    """Rows are patches, an item's key is its grid (h, w), and every image or frame is a segment.

    Args:
        tower: a `MiniCPMV4_6VisionModel`, or its like of 4.7, whose attention was switched.
        merger: the model's `merger`; None for a bare tower.
        token_range, segment_capacities: see `EncoderTable`.
        fields: None for features as the language model gets them, [h * w / 16, width]; "all" for the tower's
            `last_hidden_state`, in which they are not merged, as [h * w / 16, 4 * hidden_size]. Without a merger both are
            [h * w / 4, hidden_size].

    Requests have patches as rows, see `patch_rows`, and sizes (h, w).

    Raises:
        ModelError: it is no tower of this kind, or merges otherwise than 2 x 2.
    """

    tower: Any

    def __init__(
        self,
        tower: nn.Module,
        *,
        merger: nn.Module | None = None,
        token_range: tuple[int, int] = (64, 4096),
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
        fields: str | None = None,
    ) -> None:
        self.tower = tower
        self.merger: Any = merger if fields is None else None
        self.levels = 1 + _merges(merger)
        """How often a token was merged."""
        _check_merges(self.tower, merger)
        convolution, data = self.tower.embeddings.patch_embedding, "pixel_values"
        patch = tuple(convolution.weight.shape[1:])
        super().__init__(
            modalities={
                "image": Modality(data={data: "pixel_values"}, per_item=("target_sizes",)),
                "video": Modality(data={data: "pixel_values_videos"}, per_item=("target_sizes_videos",)),
            },
            paths=single_path(
                buffers={
                    "pixel_values": Buffer(role=Role.ROWS, shape=patch),
                    "position_ids": Buffer(role=Role.ROWS, dtype=torch.int64),
                    "order": Buffer(role=Role.INDEX, dtype=torch.int64),
                    "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
                },
                spatial_merge_size=2**self.levels,
            ),
            out_hidden_size=self._width(patch),
            token_range=token_range,
            segment_capacities=segment_capacities,
        )

    @torch.no_grad()
    def _width(self, patch: tuple[int, ...]) -> int:
        """Of the features for a small image, on which the tower's own forward must agree."""
        side = 2**self.levels
        key, weight = (side, 2 * side), next(self.tower.parameters())
        patches = torch.randn(side * 2 * side, *patch, generator=torch.Generator().manual_seed(0))
        values: dict[str, Any] = {name: value.to(weight.device) for name, value in self.item_metadata(key, "main").items()}
        values |= {"pixel_values": patches.to(weight.device, floating_dtype(self.tower)), "max_seqlen": len(patches)}
        navit = values["pixel_values"].permute(1, 2, 0, 3).flatten(2)[None]
        want = original(self.tower, "forward")(navit, target_sizes=torch.tensor([key], device=weight.device))
        raster = merge_order(*key, 1).to(weight.device)
        check_reentry(self.tower, self._run({**values, "order": raster}), want.last_hidden_state)
        self.output_type = type(want)
        return self.forward("main", values).shape[1]

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Sizes in patches."""
        name = self.modalities[modality].per_item[0]
        grids = host_grids(name, [(1, *size) for size in host_rows(name, inputs[name], 2)], spatial_merge_size=2**self.levels)
        return [(h, w) for _, h, w in grids]

    def item_size(self, key: Any) -> ItemSize:
        """Patches, and what is left of them after all merges."""
        h, w = key
        return ItemSize(rows=h * w, tokens=h * w // 4**self.levels)

    def example_key(self, tokens: int) -> Hashable:
        """About square."""
        height = max(1, int(tokens**0.5))
        return (height * 2**self.levels, tokens // height * 2**self.levels)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """Positions in raster order, and the order of merging: of all merges where they are made here, else of the tower's."""
        from transformers.vision_utils import get_vision_nearest_position_ids

        h, w = key
        embeddings = self.tower.embeddings
        # Where the tower is: positions lie on the edges of buckets, and devices round the fractions differently.
        size = torch.tensor([key], device=embeddings.position_embedding.weight.device)
        return {
            "position_ids": get_vision_nearest_position_ids(size, embeddings.num_patches_per_side).cpu(),
            "order": merge_order(h, w, 1 + _merges(self.merger)),
            "cu_seqlens": torch.tensor([0, h * w], dtype=torch.int32),
        }

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower's parts, then the merger's, one merge after another."""
        hidden = self._run(values)[0]
        if self.merger is not None:
            for merge in self.merger.mlp:
                hidden = merge(hidden.reshape(-1, WINDOW * hidden.shape[-1]))
            return hidden
        return hidden.reshape(-1, WINDOW ** (self.levels - 1) * hidden.shape[-1])

    def _run(self, values: Mapping[str, Any]) -> torch.Tensor:
        """`last_hidden_state` [1, T / 4, E], in the order of merging."""
        tower, boundaries, bound = self.tower, values["cu_seqlens"], values["max_seqlen"]
        navit = values["pixel_values"].permute(1, 2, 0, 3).flatten(2)[None]
        hidden = tower.embeddings(navit, position_ids=values["position_ids"])[:, values["order"]]
        for number, layer in enumerate(tower.encoder.layers):
            hidden = layer(hidden, None, cu_seqlens=boundaries, max_seqlen=bound)
            if number == tower.config.insert_layer_id:
                hidden = self._merge_windows(hidden)
                boundaries, bound = boundaries // WINDOW, bound // WINDOW
        merged: torch.Tensor = tower.post_layernorm(hidden)
        return merged

    def _merge_windows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Four neighbours each: windows in order, as of a single image that is two patches wide."""
        rows = hidden.shape[1]
        identity = torch.arange(rows + 1, device=hidden.device)
        # Only its length is looked at. On the meta device it has no values that anybody could read.
        one_image = torch.empty(1, 2, dtype=torch.int64, device="meta")
        merged: torch.Tensor = self.tower.vit_merger(
            hidden,
            one_image,
            window_index=identity[:-1],
            cu_window_seqlens=identity[::WINDOW].to(torch.int32),
            merged_shape=(rows // WINDOW, 1),
        )
        return merged


def _merges(merger: Any) -> int:
    return 0 if merger is None else len(merger.mlp)


def _check_merges(tower: Any, merger: Any) -> None:
    config, name = tower.config, type(tower).__name__
    kernels = [config.window_kernel_size, *([] if merger is None else [merger.merge_kernel_size])]
    if any(tuple(kernel) != (2, 2) for kernel in kernels):
        raise ModelError(f"{name} merges {', '.join(map(str, kernels))} patches: expected 2 x 2.")
    if not 0 <= config.insert_layer_id < len(tower.encoder.layers):
        raise ModelError(f"{name} has insert_layer_id={config.insert_layer_id}, none of its layers: it does not merge windows.")


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of a model, with the call that the model makes.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields, options: see `MiniCPMVTable`.
    """
    tower = find_module(model, *towers)
    merger: Any = None if model is tower else find_owner(model, "merger").merger
    with undone_on_failure(AttentionSwitch(tower)) as switch:
        table = MiniCPMVTable(tower, merger=merger, fields=fields, **options)

    def serve(execute: Execute, pixel_values: torch.Tensor, target_sizes: Any) -> Any:
        side = table.paths["main"].buffers["pixel_values"].shape[-1]
        if pixel_values.dim() != 4 or pixel_values.shape[0] != 1 or pixel_values.shape[2] != side or pixel_values.shape[3] % side:
            raise Unserved(f"pixel_values is {list(pixel_values.shape)}, not [1, 3, {side}, {side} * patches]")
        features = execute({"pixel_values": patch_rows(pixel_values), "target_sizes": target_sizes})
        if not features:
            raise Unserved("no images")
        hidden = torch.cat(features)
        return table.output_type(last_hidden_state=hidden.view(1, -1, table.tower.config.hidden_size))

    call = Call(owner=tower, method="forward", takes=("pixel_values", "target_sizes"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


_LIMITS = (
    "Sides are multiples of 4 patches, as the processor makes them.",
    "`downsample_mode='4x'` is answered by the model's own code.",
    "`encoder_for` takes patches as rows: `minicpm_v.patch_rows` makes them of what the processor returns.",
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="MiniCPM-V 4.6",
        model_types=("minicpmv4_6", "minicpmv4_6_vision"),
        classes=("MiniCPMV4_6VisionModel",),
        binder=bind,
        buffers=("cu_seqlens", "order", "pixel_values", "position_ids"),
        modalities=("image", "video"),
        tokens="h w / 16",
        limits=_LIMITS,
    ),
    Architecture(
        name="MiniCPM-V 4.7",
        model_types=("minicpmv4_7", "minicpmv4_7_vision"),
        classes=("MiniCPMV4_7VisionModel",),
        binder=bind,
        buffers=("cu_seqlens", "order", "pixel_values", "position_ids"),
        modalities=("image", "video"),
        tokens="h w / 16",
        versions=("5.24",),
        limits=_LIMITS,
    ),
)
