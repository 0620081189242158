"""Small encoders for the runtime's tests, each with an independent reference that encodes one item alone.

`packed_table`: patches end to end, attention within each frame, positions as metadata, merge 2, images and clips.
`tiled_table`: two paths (a thumbnail and tiles, which may be missing), assembled like DeepSeek-OCR with newlines and a separator.
`twin_table`: two paths, every role of buffer (windows over shuffled blocks, a scale for each frame), and a segment axis.
`HandWritten`: the contract written out, with a capture axis over row widths and buffers that the manager fills.

Shapes: T patches, C channels, W width of features.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vit_compile.attention.varlen import varlen_attention
from vit_compile.backend.roles import Role
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs, EncoderCudaGraphReplayBuffers
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graph_config import AxisKeys, EncoderCudaGraphConfig
from vit_compile.runtime.inputs import host_grids, host_rows
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, TablePath, single_path

CHANNELS, WIDTH, HEADS = 6, 8, 2
Grid = tuple[int, int, int]


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- packed ----------------------------------------------------------------------------------------------------------


class PackedTower(nn.Module):
    """Patches [T,C] and positions [T] to merged features [T/4,W]: embedding, attention within segments twice, merger."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.merge = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = self.embed(pixels) + torch.sin(positions.to(pixels.dtype) / 3)[:, None]
        for layer in self.qkv:
            q, k, v = layer(x).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
            x = x + varlen_attention(q, k, v, cu_seqlens, max_seqlen, 0.7).flatten(1)
        return self.merge(x.view(-1, 4 * WIDTH))

    def alone(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """One item by itself, in plain torch: the reference."""
        t, h, w = grid
        x = self.embed(pixels) + torch.sin(torch.arange(t * h * w).to(pixels) / 3)[:, None]
        for layer in self.qkv:
            q, k, v = (part.view(t, h * w, HEADS, WIDTH // HEADS).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
            scores = (q @ k.transpose(-1, -2) * 0.7).softmax(-1)
            x = x + (scores @ v).transpose(1, 2).reshape(t * h * w, WIDTH)
        return self.merge(x.view(-1, 4 * WIDTH))


class PackedTable(EncoderTable):
    """`PackedTower` as a table."""

    def __init__(self, tower: PackedTower, token_range: tuple[int, int] = (4, 64), **kwargs: Any) -> None:
        self.tower = tower
        super().__init__(
            modalities={
                "image": Modality(data={"pixels": "pixel_values"}, per_item=("image_grid_thw",)),
                "video": Modality(data={"pixels": "pixel_values_videos"}, per_item=("video_grid_thw",)),
            },
            paths=single_path(
                buffers={
                    "pixels": Buffer(role=Role.ROWS, shape=(CHANNELS,)),
                    "positions": Buffer(role=Role.ROWS, dtype=torch.int64),
                    "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
                },
                spatial_merge_size=2,
            ),
            out_hidden_size=WIDTH,
            token_range=token_range,
            max_frames_per_video=4,
            **kwargs,
        )

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        name = self.modalities[modality].per_item[0]
        return host_grids(name, inputs[name], spatial_merge_size=2)

    def item_size(self, key: Any) -> ItemSize:
        t, h, w = key
        return ItemSize(rows=t * h * w, tokens=t * h * w // 4, frames=t)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        t, h, w = key
        return {"positions": torch.arange(t * h * w), "cu_seqlens": torch.arange(t + 1, dtype=torch.int32) * h * w}

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        features: torch.Tensor = self.tower(**values)
        return features


def packed_table(**kwargs: Any) -> PackedTable:
    """A seeded one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PackedTable(PackedTower().eval(), **kwargs)


def packed_request(images: Sequence[Grid], clips: Sequence[Grid] = (), seed: int = 0) -> dict[str, Any]:
    """A request with these grids; a modality without items is left out."""
    request: dict[str, Any] = {}
    for data, name, grids in (
        ("pixel_values", "image_grid_thw", images),
        ("pixel_values_videos", "video_grid_thw", clips),
    ):
        if grids:
            request |= {data: seeded(sum(t * h * w for t, h, w in grids), CHANNELS, seed=seed), name: list(grids)}
        seed += 1
    return request


@torch.no_grad()
def packed_reference(table: PackedTable, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every item alone, images first."""
    found = []
    for data, name in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        start = 0
        for t, h, w in request.get(name, []):
            found.append(table.tower.alone(request[data][start : start + t * h * w], (t, h, w)))
            start += t * h * w
    return found


# --- two paths -------------------------------------------------------------------------------------------------------

GLOBAL_TOKENS, LOCAL_TOKENS, TILE = 6, 4, (3, 4, 4)


class TiledTower(nn.Module):
    """A thumbnail [N,3,4,4] to 6 tokens, a tile [N,3,4,4] to 4; a newline and a separator as weights."""

    def __init__(self) -> None:
        super().__init__()
        self.thumbnail = nn.Linear(48, GLOBAL_TOKENS * WIDTH)
        self.tile = nn.Linear(48, LOCAL_TOKENS * WIDTH)
        self.newline = nn.Parameter(torch.randn(WIDTH))
        self.separator = nn.Parameter(torch.randn(WIDTH))

    def forward(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        layer = self.thumbnail if path == "global" else self.tile
        return torch.tanh(layer(pixels.flatten(1))).view(-1, WIDTH)


class TiledTable(EncoderTable):
    """`TiledTower` as a table: the key of an item is its (rows, columns) of tiles, (0, 0) for none."""

    def __init__(self, tower: TiledTower, token_range: tuple[int, int] = (GLOBAL_TOKENS, 48), **kwargs: Any) -> None:
        self.tower = tower
        super().__init__(
            modalities={"image": Modality(data={"thumbnails": "pixel_values", "tiles": "images_crop"}, per_item=("crops",))},
            paths={
                "global": TablePath(buffers={"thumbnails": Buffer(role=Role.ROWS, shape=TILE)}, tokens_per_row=GLOBAL_TOKENS),
                "local": TablePath(
                    buffers={"tiles": Buffer(role=Role.ROWS, shape=TILE)},
                    tokens_per_row=LOCAL_TOKENS,
                    min_token_budget=LOCAL_TOKENS,
                    allow_zero_tokens=True,
                ),
            },
            out_hidden_size=WIDTH,
            token_range=token_range,
            **kwargs,
        )

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        return host_rows("crops", inputs["crops"], 2)

    def item_size(self, key: Any) -> ItemSize:
        tiles = key[0] * key[1]
        return ItemSize(rows={"global": 1, "local": tiles}, tokens={"global": GLOBAL_TOKENS, "local": tiles * LOCAL_TOKENS})

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        features: torch.Tensor = self.tower(next(iter(values.values())), path)
        return features

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        thumbnail, tiles = outputs["global"], outputs["local"]
        assert thumbnail is not None
        if tiles is None:
            return thumbnail  # a view on purpose: the manager has to copy it
        lines = [torch.cat([line, self.tower.newline[None]]) for line in tiles.chunk(key[0])]
        return torch.cat([*lines, thumbnail, self.tower.separator[None]])


def tiled_table(**kwargs: Any) -> TiledTable:
    """A seeded one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TiledTable(TiledTower().eval(), **kwargs)


def tiled_request(crops: Sequence[tuple[int, int]], seed: int = 0) -> dict[str, Any]:
    """A request whose images have these tiles."""
    tiles = sum(a * b for a, b in crops)
    return {
        "pixel_values": seeded(len(crops), *TILE, seed=seed),
        "images_crop": seeded(tiles, *TILE, seed=seed + 1),
        "crops": list(crops),
    }


@torch.no_grad()
def tiled_reference(table: TiledTable, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every image alone."""
    found, start, tower = [], 0, table.tower
    for number, (rows, columns) in enumerate(request["crops"]):
        thumbnail = tower(request["pixel_values"][number : number + 1], "global")
        lines = []
        for _ in range(rows):
            lines += [tower(request["images_crop"][start : start + columns], "local"), tower.newline[None]]
            start += columns
        found.append(torch.cat([*lines, thumbnail, tower.separator[None]]) if rows * columns else thumbnail)
    return found


# --- two paths, windows and a segment axis ---------------------------------------------------------------------------

WINDOW, TAGS, TAG_TOKENS = 8, 5, 2
TwinKey = tuple[int, int, int, int]


class TwinTower(nn.Module):
    """Path "fine": patches [T,C] in blocks of 4, attention in windows over shuffled blocks, then within frames; merged by 4.

    Path "coarse": tags [N,5] to 2 tokens each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.merge = nn.Linear(4 * WIDTH, WIDTH)
        self.tag = nn.Linear(TAGS, TAG_TOKENS * WIDTH)

    def forward(
        self,
        pixels: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        frame_scale: torch.Tensor,
        order: torch.Tensor,
        back: torch.Tensor,
        cu_windows: torch.Tensor,
        max_window: int,
    ) -> torch.Tensor:
        frame = torch.searchsorted(cu_seqlens[1:], torch.arange(len(pixels), device=pixels.device), right=True)
        x = self.embed(pixels) * frame_scale[frame][:, None]
        x = x.view(-1, 4, WIDTH)[order].view(-1, WIDTH)
        x = x + self.attend(0, x, cu_windows, max_window)
        x = x.view(-1, 4, WIDTH)[back].view(-1, WIDTH)
        x = x + self.attend(1, x, cu_seqlens, max_seqlen)
        return self.merge(x.view(-1, 4 * WIDTH))

    def attend(self, layer: int, x: torch.Tensor, boundaries: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = self.qkv[layer](x).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        return varlen_attention(q, k, v, boundaries, longest, 0.7).flatten(1)

    def alone(self, pixels: torch.Tensor, frames: int) -> torch.Tensor:
        """One item's fine tokens by itself, in plain torch: the reference."""
        found = []
        for number, one in enumerate(pixels.chunk(frames)):
            blocks = (self.embed(one) / (number + 1)).view(-1, 4, WIDTH).flip(0)
            x = torch.cat([part + self.mix(0, part) for part in blocks.reshape(-1, WIDTH).split(WINDOW)])
            x = x.view(-1, 4, WIDTH).flip(0).reshape(-1, WIDTH)
            found.append(self.merge((x + self.mix(1, x)).view(-1, 4 * WIDTH)))
        return torch.cat(found)

    def mix(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Attention of everything to everything."""
        q, k, v = (part.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for part in self.qkv[layer](x).chunk(3, dim=-1))
        return ((q @ k.transpose(-1, -2) * 0.7).softmax(-1) @ v).transpose(0, 1).flatten(1)


class TwinTable(EncoderTable):
    """`TwinTower` as a table, with every role: the key of an item is (t, h, w, tags), with 0 tags for none."""

    def __init__(self, tower: TwinTower, token_range: tuple[int, int] = (4, 32), **kwargs: Any) -> None:
        self.tower = tower
        super().__init__(
            modalities={"video": Modality(data={"pixels": "pixel_values", "tags": "tag_values"}, per_item=("grids", "tags"))},
            paths={
                "fine": TablePath(
                    buffers={
                        "pixels": Buffer(role=Role.ROWS, shape=(CHANNELS,)),
                        "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
                        "frame_scale": Buffer(role=Role.PER_SEGMENT, pad=1),
                        "order": Buffer(role=Role.INDEX, dtype=torch.int64, rows_per_entry=4),
                        "back": Buffer(role=Role.INDEX, dtype=torch.int64, rows_per_entry=4),
                        "cu_windows": Buffer(
                            role=Role.BOUNDARIES,
                            dtype=torch.int32,
                            bound="max_window",
                            longest=WINDOW,
                            capacity=lambda rows, segments: rows // WINDOW + segments,
                        ),
                    },
                    spatial_merge_size=2,
                ),
                "coarse": TablePath(
                    buffers={"tags": Buffer(role=Role.ROWS, shape=(TAGS,))},
                    tokens_per_row=TAG_TOKENS,
                    min_token_budget=TAG_TOKENS,
                    allow_zero_tokens=True,
                ),
            },
            out_hidden_size=WIDTH,
            token_range=token_range,
            **{"segment_capacities": (1, 3), "max_frames_per_video": 4, **kwargs},
        )

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        tags = host_rows("tags", inputs["tags"], 1)
        return [(*grid, *tag) for grid, tag in zip(host_grids("grids", inputs["grids"], spatial_merge_size=2), tags, strict=True)]

    def item_size(self, key: Any) -> ItemSize:
        t, h, w, tags = key
        patches = t * h * w
        return ItemSize(
            rows={"fine": patches, "coarse": tags}, tokens={"fine": patches // 4, "coarse": tags * TAG_TOKENS}, frames=t
        )

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        t, h, w, _ = key
        frame = h * w
        order = torch.cat([torch.arange(frame // 4).flip(0) + number * frame // 4 for number in range(t)])
        windows = [number * frame + end for number in range(t) for end in (*range(WINDOW, frame, WINDOW), frame)]
        return {
            "cu_seqlens": torch.arange(t + 1, dtype=torch.int32) * frame,
            "frame_scale": 1 / torch.arange(1, t + 1),
            "order": order,
            "back": order.argsort(),
            "cu_windows": torch.tensor([0, *windows], dtype=torch.int32),
        }

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        features: torch.Tensor = (
            self.tower(**values) if path == "fine" else torch.tanh(self.tower.tag(values["tags"])).view(-1, WIDTH)
        )
        return features

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        fine, coarse = outputs["fine"], outputs["coarse"]
        assert fine is not None
        return fine if coarse is None else torch.cat([coarse, fine])


def twin_table(**kwargs: Any) -> TwinTable:
    """A seeded one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TwinTable(TwinTower().eval(), **kwargs)


def twin_request(keys: Sequence[TwinKey], seed: int = 0) -> dict[str, Any]:
    """A request with these items."""
    return {
        "pixel_values": seeded(sum(t * h * w for t, h, w, _ in keys), CHANNELS, seed=seed),
        "tag_values": seeded(sum(key[3] for key in keys), TAGS, seed=seed + 1),
        "grids": [key[:3] for key in keys],
        "tags": [key[3:] for key in keys],
    }


@torch.no_grad()
def twin_reference(table: TwinTable, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every item alone."""
    found, tower = [], table.tower
    pixels = request["pixel_values"].split([t * h * w for t, h, w in request["grids"]])
    tags = request["tag_values"].split([count for (count,) in request["tags"]])
    for (t, _, _), patches, own in zip(request["grids"], pixels, tags, strict=True):
        found.append(torch.cat([torch.tanh(tower.tag(own)).view(-1, WIDTH), tower.alone(patches, t)]))
    return found


# --- the contract written out ----------------------------------------------------------------------------------------

ROW_WIDTHS = (4, 8)


def ones_behind(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """A padding rule of a model's own."""
    buffer.fill_(1)
    buffer[: len(values)].copy_(values)


class HandWritten(nn.Module):
    """Rows of one of two widths (the capture axis); an item is `counts[i]` rows, each a token. No table, no direct fill."""

    def __init__(self, axes: tuple[AxisKeys, ...] = (ROW_WIDTHS,)) -> None:
        super().__init__()
        self.weights = nn.Parameter(seeded(max(ROW_WIDTHS), WIDTH, seed=5))
        self.axes = axes
        self.calls: list[str] = []
        self.eval()

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=("image",),
            buffer_keys=("rows", "scale"),
            out_hidden_size=WIDTH,
            padding_logics={"scale": ones_behind},
            capture_axes=self.axes,
            select_axis_keys=self.select_axis_keys,
        )

    def select_axis_keys(self, specs: Sequence[EncoderItemSpec], path: str) -> AxisKeys | None:
        kinds = {spec.kind for spec in specs}
        return (kinds.pop(),) if len(kinds) == 1 else None

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        return 2, 32

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Mapping[str, Any]) -> Sequence[EncoderItemSpec]:
        width = mm_kwargs["rows"].shape[1]
        return [EncoderItemSpec(count, count, kind=width) for count in mm_kwargs["counts"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: Mapping[str, Any], indices: Sequence[int]) -> Mapping[str, Any]:
        parts = {name: mm_kwargs[name].split(list(mm_kwargs["counts"])) for name in ("rows", "scale")}
        return {
            **{name: torch.cat([parts[name][i] for i in indices]) for name in parts},
            "counts": [mm_kwargs["counts"][i] for i in indices],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str,
        axis_keys: AxisKeys,
    ) -> EncoderCudaGraphCaptureInputs:
        rows = torch.zeros(token_budget, int(axis_keys[0]), device=device, dtype=dtype)  # type: ignore[call-overload]
        return EncoderCudaGraphCaptureInputs({"rows": rows, "scale": torch.ones(token_budget, device=device, dtype=dtype)})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Mapping[str, Any], path: str, axis_keys: AxisKeys
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({name: mm_kwargs[name] for name in ("rows", "scale")})

    def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
        rows = values["rows"]
        return torch.tanh(rows @ self.weights[: rows.shape[1]]) * values["scale"][:, None]

    def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        self.calls.append("eager")
        return self.encoder_cudagraph_forward(mm_kwargs, path)

    def postprocess_encoder_output(
        self, outputs: Mapping[str, torch.Tensor | None], specs: Sequence[EncoderItemSpec], mm_kwargs: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        output = outputs["main"]
        assert output is not None
        return output.split([spec.output_tokens for spec in specs])


def written_request(counts: Sequence[int], width: int = 4, seed: int = 0) -> dict[str, Any]:
    """Items of so many rows."""
    total = sum(counts)
    return {"rows": seeded(total, width, seed=seed), "scale": seeded(total, seed=seed + 1), "counts": list(counts)}


@torch.no_grad()
def written_reference(model: HandWritten, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Every item alone."""
    rows, scale = request["rows"], request["scale"]
    whole = torch.tanh(rows @ model.weights[: rows.shape[1]]) * scale[:, None]
    return [part.clone() for part in whole.split(request["counts"])]


# --- managers --------------------------------------------------------------------------------------------------------


def manager(model: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, **config: Any) -> EncoderCudaGraphManager:
    """A manager that runs the forward as it is; `capture()` is up to the test."""
    return EncoderCudaGraphManager(model, EncoderConfig(**{"mode": "eager", **config}), device=device, dtype=dtype)


def captured(model: Any, **config: Any) -> EncoderCudaGraphManager:
    """The same, captured."""
    made = manager(model, **config)
    made.capture()
    return made


def largest_difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Over all items; shapes and order must match."""
    assert [tuple(g.shape) for g in got] == [tuple(w.shape) for w in want]
    return max((float((g - w).abs().max()) if g.numel() else 0.0 for g, w in zip(got, want, strict=True)), default=0.0)
