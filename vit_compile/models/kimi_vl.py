"""Kimi-VL (remote code): images, through the tower's parts.

What comes of that is compared with the tower's own forward when it is bound.
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
    check_reentry,
    find_module,
    find_owner,
    original,
    undone_on_failure,
)
from vit_compile.models.hf_attention import ATTENTION_NAME
from vit_compile.models.merge_blocks import merge_order
from vit_compile.models.moonvit import TAPS, TOKEN_RANGE, MoonVitTable, side_limited_example
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_grids, host_rows
from vit_compile.runtime.table import Buffer, Modality, single_path

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


class KimiVLTable(MoonVitTable):
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
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
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
        return side_limited_example(tokens, self.merge, min(self._limits))

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
    with undone_on_failure(BlockAttentionSwitch(tower)) as switch:
        table = KimiVLTable(tower, projector=projector, **options)  # type: ignore[arg-type]

    def serve(execute: Execute, pixel_values: torch.Tensor, grid_hws: Any) -> Any:
        features = execute({"pixel_values": pixel_values, "image_grid_hws": grid_hws})
        return [feature.unflatten(1, (table.merge**2, -1)) for feature in features]

    call = Call(owner=tower, method="forward", takes=("pixel_values", "grid_hws"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


ROWS: tuple[Architecture, ...] = (
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
