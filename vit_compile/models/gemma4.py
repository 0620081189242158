"""Gemma 4: padded batches of patches, packed.

The processor pads every image to `max_soft_tokens * pooling_kernel_size^2` patches, and that differs between calls. Here the
padding is taken off on the way in, and the real patches of all images and frames lie end to end with attention within each, so
the same graphs serve every amount of padding, and none of it is computed.

The tower's own forward drops the pooled padding by a boolean mask, whose length only the device knows. So its parts are called
one by one: embedder, layers, and the pooler on blocks of patches that become one token each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

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
    owner_of,
    undone_on_failure,
)
from vit_compile.models.hf_attention import AttentionSwitch, packed_segments
from vit_compile.models.merge_blocks import merge_order
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_counts, host_grids
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path


class Gemma4Table(EncoderTable):
    """A Gemma 4 tower: rows are patches, an item's key is its grid (t, h, w), and every frame is a segment.

    Args:
        tower: a `Gemma4VisionModel` whose attention is switched.
        project: `embed_vision`, applied to the tokens; None leaves them as the tower returns them.
        token_range: (smallest, largest) useful budget in output tokens.
        max_frames_per_video: frames of the longest clip.
        segment_capacities: see `EncoderTable`.

    Requests are what the processor makes:
        pixel_values: [images, P, 3 * patch_size^2], with image_position_ids: [images, P, 2], -1 behind an image's patches;
        pixel_values_videos: [frames, P, 3 * patch_size^2], with video_position_ids: [frames, P, 2] and num_frames_per_video;
            or both with a dimension for the clips in front, and no numbers of frames.
    Or the same without padding: pixel_values [T, 3 * patch_size^2] with image_grid_thw (and so for videos), grids in patches.

    Features are [t * h * w / pooling_kernel_size^2, width].

    Raises:
        ModelError: the tower does not pool.
        InputError, GridError (from requests): patches that are not those of a whole image, row after row.
    """

    def __init__(
        self,
        tower: Any,
        *,
        project: nn.Module | None = None,
        token_range: tuple[int, int] = (70, 4480),
        max_frames_per_video: int = 32,
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
    ) -> None:
        config = tower.config
        self.tower, self.project, self.side = tower, project, config.pooling_kernel_size
        if self.side < 2:
            raise ModelError(f"pooling_kernel_size={self.side}: without pooling the tower itself returns its padding.")
        example = self._example()
        self.output_type = type(example)
        channels = 3 * config.patch_size**2
        super().__init__(
            modalities={
                "image": Modality(data={"pixel_values": "pixel_values"}, per_item=("image_grid_thw",)),
                "video": Modality(data={"pixel_values": "pixel_values_videos"}, per_item=("video_grid_thw",)),
            },
            paths=single_path(
                spatial_merge_size=self.side,
                buffers={
                    # The embedder scales pixels in the dtype in which they come: none of the processor's digits may be lost.
                    "pixel_values": Buffer(role=Role.ROWS, shape=(channels,), dtype=torch.float32),
                    "position_ids": Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int64),
                    "block_index": Buffer(role=Role.INDEX, dtype=torch.int64),
                    "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
                },
            ),
            out_hidden_size=self._projected(example.last_hidden_state).shape[-1],
            token_range=token_range,
            max_frames_per_video=max_frames_per_video,
            segment_capacities=segment_capacities,
        )

    @torch.no_grad()
    def _example(self) -> Any:
        """What the tower returns for two tokens, on which its parts must agree."""
        key = (1, self.side, 2 * self.side)
        patches = noise(self.tower, 2 * self.side**2, 3 * self.tower.config.patch_size**2).sigmoid().float()
        values = {name: value.to(patches.device) for name, value in self.item_metadata(key, "main").items()}
        example = original(self.tower, "forward")(patches[None], values["position_ids"][None], return_dict=True)
        if list(example.keys()) != ["last_hidden_state"]:
            raise ModelError(f"{type(self.tower).__name__} returns {list(example.keys())}: expected last_hidden_state alone.")
        if comparable(self.tower):
            got = self._tokens({**values, "pixel_values": patches, "max_seqlen": len(patches)})
            check_reentry(self.tower, got, example.last_hidden_state)
        return example

    def _projected(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.project is None else self.project(inputs_embeds=tokens)

    def prepare_request(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Padded batches without their padding."""
        given = dict(inputs)
        if "image_position_ids" in given and "pixel_values" in given:
            rows, grids = self._unpadded("image_position_ids", given.pop("image_position_ids"), given["pixel_values"])
            given |= {"pixel_values": rows, "image_grid_thw": [(1, h, w) for h, w in grids]}
        if "video_position_ids" in given and "pixel_values_videos" in given:
            positions, pixels = given.pop("video_position_ids"), given["pixel_values_videos"]
            frames = given.pop("num_frames_per_video", None)
            if frames is None and isinstance(positions, torch.Tensor) and positions.dim() == 4:
                frames = [positions.shape[1]] * positions.shape[0]
                positions, pixels = positions.flatten(0, 1), pixels.flatten(0, 1)
            rows, grids = self._unpadded("video_position_ids", positions, pixels)
            given |= {"pixel_values_videos": rows, "video_grid_thw": _clips(grids, host_counts("num_frames_per_video", frames))}
        return given

    def _unpadded(self, name: str, positions: Any, pixels: Any) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """The real patches of all images end to end, and each image's (height, width) in patches."""
        if not isinstance(positions, torch.Tensor) or positions.dim() != 3 or positions.shape[-1] != 2:
            raise InputError(f"{name} is {_what(positions)}: expected a tensor [images, patches, 2].")
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != 3 or pixels.shape[:2] != positions.shape[:2]:
            raise InputError(f"the patches of {name} {list(positions.shape)} are {_what(pixels)}.")
        if positions.shape[1] % self.side**2:
            raise InputError(f"images padded to {positions.shape[1]} patches: that is not a whole number of tokens.")
        grids = _grids(name, positions)
        parts = [image[: h * w] for image, (h, w) in zip(pixels, grids, strict=True)]
        return torch.cat(parts) if parts else pixels.flatten(0, 1), grids

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids (t, h, w)."""
        name = self.modalities[modality].per_item[0]
        grids = host_grids(name, inputs[name], spatial_merge_size=self.side)
        most = self.tower.config.position_embedding_size
        for number, (_, h, w) in enumerate(grids):
            if max(h, w) > most:
                raise InputError(f"grid {number} of {name} is {h} x {w} patches: the tower has positions for {most} on a side.")
        return grids

    def item_size(self, key: Any) -> ItemSize:
        """Patches, pooled tokens, frames."""
        t, h, w = key
        return ItemSize(rows=t * h * w, tokens=t * h * w // self.side**2, frames=t)

    def example_key(self, tokens: int) -> Hashable:
        """About square."""
        height = max(1, int(tokens**0.5))
        return (1, height * self.side, tokens // height * self.side)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """Positions, boundaries of frames, and the order in which patches of one token lie together."""
        t, h, w = key
        return {
            "position_ids": grid_positions(h, w).repeat(t, 1),
            "block_index": merge_order(h, w, self.side, t),
            "cu_seqlens": torch.arange(t + 1, dtype=torch.int32) * (h * w),
        }

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The tower's embedder, layers and pooler, and what is behind it."""
        return self._projected(self._tokens(values))

    def _tokens(self, values: Mapping[str, Any]) -> torch.Tensor:
        """As the tower returns them."""
        tower, positions = self.tower, values["position_ids"][None]
        hidden = tower.patch_embedder(values["pixel_values"][None], positions, _nothing(positions))
        dtype = hidden.dtype
        rotary = tower.encoder.rotary_emb(hidden, positions)
        # Not `encoder.forward`: while it is traced it makes a mask over all rows.
        with packed_segments(values["cu_seqlens"], values["max_seqlen"]):
            for layer in tower.encoder.layers[: tower.config.num_hidden_layers]:
                hidden = layer(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions)
        tokens = self._pooled(hidden[0], values["position_ids"], values["block_index"])
        if tower.config.standardize:
            tokens = (tokens - tower.std_bias.float()) * tower.std_scale.float()
        return tokens.to(dtype)

    def _pooled(self, hidden: torch.Tensor, positions: torch.Tensor, block_index: torch.Tensor) -> torch.Tensor:
        """Every block of patches as an image of its own that becomes one token."""
        blocks, inside = (rows[block_index].unflatten(0, (-1, self.side**2)) for rows in (hidden, positions % self.side))
        tokens, _ = self.tower.pooler(
            hidden_states=blocks, pixel_position_ids=inside, padding_positions=_nothing(inside), output_length=1
        )
        pooled: torch.Tensor = tokens[:, 0]
        return pooled


def grid_positions(height: int, width: int) -> torch.Tensor:
    """(x, y) of every patch of an image, row after row: int64 [height * width, 2]."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([x, y], dim=-1).flatten(0, 1)


def _nothing(positions: torch.Tensor) -> torch.Tensor:
    """No patch is padding: False for each of [..., 2]."""
    return torch.zeros(positions.shape[:-1], dtype=torch.bool, device=positions.device)


def _grids(name: str, positions: torch.Tensor) -> list[tuple[int, int]]:
    """(height, width) of each image, from one read of the device.

    Raises:
        InputError: an image's positions are not a whole grid, row after row, with -1 behind.
    """
    sizes = positions.amax(dim=1) + 1
    width, height = sizes[:, :1], sizes[:, 1:]
    number = torch.arange(positions.shape[1], device=positions.device)
    x, y = number % width.clamp(min=1), number.div(width.clamp(min=1), rounding_mode="floor")
    expected = torch.where((number < height * width)[..., None], torch.stack([x, y], dim=-1), -1)
    whole = (positions == expected).flatten(1).all(dim=1, keepdim=True) & (height * width <= len(number))
    grids = []
    for index, (h, w, is_whole) in enumerate(torch.cat([height, width, whole], dim=1).tolist()):
        if h * w < 1:
            raise InputError(f"image {index} of {name} has nothing but padding.")
        if not is_whole:
            raise InputError(f"image {index} of {name} is no grid of patches, row after row, with -1 behind.")
        grids.append((h, w))
    return grids


def _clips(grids: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Frames of equal size as clips.

    Raises:
        InputError: frames of one clip differ, or the numbers do not add up.
    """
    if sum(counts) != len(grids):
        raise InputError(f"num_frames_per_video adds up to {sum(counts)}, and there are {len(grids)} frames.")
    clips, start = [], 0
    for number, count in enumerate(counts):
        frames = set(grids[start : start + count])
        if len(frames) > 1:
            raise InputError(f"clip {number} has frames of {len(frames)} sizes.")
        ((h, w),) = frames
        clips.append((count, h, w))
        start += count
    return clips


def _what(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def bind(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """The tower of a model, with the call that the model makes for images and for the frames of videos.

    Args:
        model: a whole model, or its tower.
        towers: class names of the tower.
        fields: "all" for what the tower returns; None for what the language model gets, where there is one.
        options: see `Gemma4Table`.
    """
    tower = find_module(model, *towers)
    owner: Any = owner_of(model, ["embed_vision"])
    if fields == "all":  # the tower is called with frames and does not know whose they are
        options.setdefault("max_frames_per_video", 1)
    with undone_on_failure(AttentionSwitch(tower)) as switch:
        table = Gemma4Table(tower, project=owner.embed_vision if owner is not None and fields is None else None, **options)

    def serve(execute: Execute, pixel_values: Any, pixel_position_ids: Any) -> Any:
        if not isinstance(pixel_values, torch.Tensor) or len(pixel_values) == 0:
            raise Unserved("no images")
        features = execute({"pixel_values": pixel_values, "image_position_ids": pixel_position_ids})
        return table.output_type(last_hidden_state=torch.cat(features))

    call = Call(owner=tower, method="forward", takes=("pixel_values", "pixel_position_ids"), serve=serve)
    return Binding(table=table, calls=(call,), switch=switch)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="Gemma 4",
        model_types=("gemma4", "gemma4_vision"),
        classes=("Gemma4VisionModel",),
        binder=bind,
        buffers=("block_index", "cu_seqlens", "pixel_values", "position_ids"),
        modalities=("image", "video"),
        tokens="t h w / 9",
        limits=(
            "Images are packed without their padding, so the same graphs serve every max_soft_tokens.",
            "Frames of a clip have one size; positions that are not a whole grid, row after row, go to the model.",
        ),
    ),
)
