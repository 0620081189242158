"""`TableEncoder`: requests are read and checked, items chosen, buffers filled and features taken apart, for any table."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime import toys
from tests.runtime.toys import (
    CHANNELS,
    PackedTable,
    TwinKey,
    captured,
    largest_difference,
    manager,
    packed_reference,
    packed_request,
    packed_table,
    tiled_reference,
    tiled_request,
    tiled_table,
    twin_reference,
    twin_request,
    twin_table,
)
from vit_compile.backend.roles import Role
from vit_compile.errors import GridError, InputError, ProtocolError
from vit_compile.runtime.protocol import SupportsDirectFill, SupportsEncoderCudaGraph, SupportsPaddingTrial
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, TablePath
from vit_compile.runtime.table_encoder import ALL_SEGMENTS, TableEncoder

CPU = torch.device("cpu")
MIXED = packed_request([(1, 4, 4), (1, 2, 6), (1, 2, 2)], [(3, 2, 2), (2, 4, 2)])
TWINS: list[TwinKey] = [(1, 4, 4, 1), (2, 2, 2, 0), (1, 2, 6, 3), (3, 2, 2, 0)]


def encoder(table: EncoderTable, dtype: torch.dtype = torch.float32) -> TableEncoder:
    """The protocol object of a table, on the CPU."""
    return TableEncoder(table, device=CPU, dtype=dtype)


def capture_inputs(made: TableEncoder, path: str = "main", *, tokens: int = 16, segments: int = 8, key: int | None = 0) -> Any:
    """Buffers of one graph."""
    axes = () if key is None else (key,)
    return made.prepare_encoder_cudagraph_capture_inputs(tokens, segments, 0, CPU, made.dtype, path, axes)


def test_a_table_has_every_optional_part_of_the_contract() -> None:
    """It is a protocol object that fills its buffers itself and whose padding can be tried out."""
    made = encoder(packed_table())
    assert isinstance(made, SupportsEncoderCudaGraph)
    assert isinstance(made, SupportsDirectFill)
    assert isinstance(made, SupportsPaddingTrial)


# --- requests --------------------------------------------------------------------------------------------------------


def test_sizes_of_a_packed_request() -> None:
    """Patches in, a quarter of them out, frames as segments; images before clips, each in its order."""
    specs = encoder(packed_table()).get_encoder_cudagraph_item_specs(MIXED)
    assert [(spec.input_size, spec.output_tokens, spec.frames) for spec in specs] == [
        (16, 4, 1),
        (12, 3, 1),
        (4, 1, 1),
        (12, 3, 3),
        (16, 4, 2),
    ]
    assert all(spec.tokens_on("main") == spec.output_tokens for spec in specs)


def test_images_come_before_clips_whatever_the_order_of_the_request() -> None:
    """The order of modalities is the table's, not that of the dict."""
    flipped = dict(reversed(MIXED.items()))
    made = encoder(packed_table())
    assert made.get_encoder_cudagraph_item_specs(flipped) == made.get_encoder_cudagraph_item_specs(MIXED)


def test_sizes_on_two_paths() -> None:
    """Tokens of each path and their sum; input sizes are added over paths."""
    specs = encoder(tiled_table()).get_encoder_cudagraph_item_specs(tiled_request([(1, 2), (0, 0)]))
    assert [(spec.input_size, spec.output_tokens, spec.tokens_on("global"), spec.tokens_on("local")) for spec in specs] == [
        (3, 14, 6, 8),
        (1, 6, 6, 0),
    ]


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor, lambda grids: torch.tensor(grids).int()])
def test_sizes_of_any_type(as_type: Any) -> None:
    """Lists, arrays and tensors of grids give the same features."""
    table = packed_table()
    request = packed_request([(1, 4, 4), (1, 2, 6)])
    got = manager(table).execute({**request, "image_grid_thw": as_type(request["image_grid_thw"])})
    assert largest_difference(got, packed_reference(table, request)) < 1e-5


def test_a_request_is_parsed_once() -> None:
    """What was found out is handed on: keys are asked for once a modality and call, sizes and metadata once a key."""

    class Counting(PackedTable):
        calls = 0
        sizes = 0
        metadata = 0

        def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Any]:
            self.calls += 1
            assert inputs.keys() == set(self.modalities[modality].names), "only its own inputs"
            return super().item_keys(modality, inputs)

        def item_size(self, key: Any) -> ItemSize:
            self.sizes += 1
            return super().item_size(key)

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            self.metadata += 1
            return super().item_metadata(key, path)

    table = Counting(toys.PackedTower().eval())
    made = manager(table, packing="greedy")
    made.execute(MIXED)
    assert (table.calls, table.metadata) == (2, 5)
    made.capture()
    sizes = table.sizes
    for _ in range(3):
        made.execute(MIXED)
    assert (table.calls, table.metadata, table.sizes) == (8, 5, sizes)


def test_requests_without_items() -> None:
    """No modality, or modalities without items, are no features; their data may be an empty list."""
    made = manager(packed_table())
    assert made.execute({}) == []
    empty = {"pixel_values": torch.zeros(0, CHANNELS), "image_grid_thw": []}
    assert made.execute(empty) == []
    assert made.execute({"pixel_values": [], "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}) == []
    assert made.execute({"pixel_values": torch.empty(0), "image_grid_thw": []}) == []
    assert len(made.execute({**empty, **packed_request([], [(2, 2, 2)])})) == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pixel_values": torch.zeros(31, CHANNELS)}, InputError, "pixel_values has 31 rows, but .* add up to 32"),
        ({"pixel_values": torch.zeros(32, CHANNELS + 1)}, InputError, r"expected \[32, 6\]"),
        ({"pixel_values": torch.zeros(32, CHANNELS, dtype=torch.float64)}, InputError, "loses precision"),
        ({"pixel_values": torch.zeros(32, CHANNELS, device="meta")}, InputError, "on meta"),
        ({"pixel_values": []}, InputError, "pixel_values is list"),
        ({"image_grid_thw": [(1, 4, 4), (1, 2, 6), (1, 2, 3)]}, GridError, r"grid 2 of image_grid_thw is \(1, 2, 3\)"),
        ({"image_grid_thw": []}, InputError, "pixel_values has 32 rows, but .* add up to 0"),
        ({"pixel_values_videos": torch.zeros(27, CHANNELS)}, InputError, "pixel_values_videos has 27 rows"),
        ({"pixel_value": torch.zeros(1)}, InputError, "unknown input 'pixel_value'"),
    ],
)
def test_wrong_requests_are_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """Before any work, whether something is captured or not; the next request is served as if nothing had been."""
    table = packed_table()
    for made in (manager(table), captured(table, token_budgets=(16,), packing="greedy")):
        with pytest.raises(error, match=words):
            made.execute({**MIXED, **change})
        assert made.snapshot()["items"] == 0
        assert largest_difference(made.execute(MIXED), packed_reference(table, MIXED)) < 1e-5


def test_data_of_another_dtype_is_converted_where_that_loses_nothing() -> None:
    """Pixels in bfloat16, or as bytes, for an encoder in float32; a request in float32 for one in bfloat16 is refused."""
    table = packed_table()
    request = packed_request([(1, 4, 4), (1, 2, 6)])
    request["pixel_values"] = request["pixel_values"].bfloat16()
    want = packed_reference(table, {**request, "pixel_values": request["pixel_values"].float()})
    for made in (manager(table), captured(table, token_budgets=(16,), packing="greedy")):
        assert largest_difference(made.execute(request), want) < 1e-5
    half = manager(packed_table(), dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"\.to\(torch.bfloat16\)"):
        half.execute(packed_request([(1, 4, 4)]))


class Sized(PackedTable):
    """A packed table that says wrong sizes."""

    size = ItemSize(rows=16, tokens=4)

    def item_size(self, key: Any) -> ItemSize:
        return self.size


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (ItemSize(rows=16, tokens=4, frames=0), InputError, "sizes must be positive"),
        (ItemSize(rows=0, tokens=0), InputError, "sizes must be positive"),
        (ItemSize(rows=16, tokens=5), ProtocolError, "16 rows and 5 tokens on path 'main'"),
        (ItemSize(rows=16, tokens=-4), ProtocolError, "16 rows and -4 tokens"),
        (ItemSize(rows={"other": 16}, tokens=4), ProtocolError, "given for other; there are main"),
        (ItemSize(rows=12, tokens=3), InputError, "pixel_values has 16 rows, but .* add up to 12"),
    ],
)
def test_wrong_sizes_of_an_item_are_refused(size: ItemSize, error: type[Exception], words: str) -> None:
    """Sizes that are not positive, not those of the path, of a path that is not there, or not those of the data."""
    table = Sized(toys.PackedTower().eval())
    table.size = size
    with pytest.raises(error, match=words):
        manager(table).execute(packed_request([(1, 4, 4)]))


def test_sizes_are_given_by_path_where_there_are_two() -> None:
    """One number for two paths is an error that names them."""

    class OneNumber(toys.TiledTable):
        def item_size(self, key: Any) -> ItemSize:
            return ItemSize(rows=1, tokens=6)

    with pytest.raises(ProtocolError, match=r"by path \(global, local\)"):
        manager(OneNumber(toys.TiledTower().eval())).execute(tiled_request([(0, 0)]))


# --- choosing items --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor])
def test_chosen_items_are_slices_of_the_request(as_type: Any) -> None:
    """Data and sizes of the chosen items in their order; the type of the sizes stays; the request is left alone."""
    request = dict(MIXED)
    for name in ("image_grid_thw", "video_grid_thw"):
        request[name] = as_type(request[name])
    chosen = encoder(packed_table()).select_encoder_cudagraph_items(request, [2, 0, 4])
    assert chosen.keys() == request.keys()
    pixels, clips = request["pixel_values"], request["pixel_values_videos"]
    assert torch.equal(chosen["pixel_values"], torch.cat([pixels[28:32], pixels[0:16]]))
    assert torch.equal(chosen["pixel_values_videos"], clips[12:28])
    assert type(chosen["image_grid_thw"]) is type(request["image_grid_thw"])
    assert [tuple(map(int, grid)) for grid in chosen["image_grid_thw"]] == [(1, 2, 2), (1, 4, 4)]
    assert [tuple(map(int, grid)) for grid in chosen["video_grid_thw"]] == [(2, 4, 2)]


@pytest.mark.parametrize(
    ("indices", "names"),
    [([1], {"pixel_values", "image_grid_thw"}), ([3, 4], {"pixel_values_videos", "video_grid_thw"}), ([], set())],
)
def test_modalities_without_chosen_items_are_left_out(indices: list[int], names: set[str]) -> None:
    """The request of the chosen items is one that the model itself would take, also for none."""
    made = encoder(packed_table())
    chosen = made.select_encoder_cudagraph_items(MIXED, indices)
    assert chosen.keys() == names
    specs = made.get_encoder_cudagraph_item_specs(MIXED)
    assert made.get_encoder_cudagraph_item_specs(chosen) == [specs[i] for i in indices]


def test_chosen_items_on_two_paths() -> None:
    """Items without rows on a path leave none there, and the next item's are still found."""
    request = tiled_request([(1, 2), (0, 0), (2, 1), (1, 1)])
    chosen = encoder(tiled_table()).select_encoder_cudagraph_items(request, [1, 3])
    assert torch.equal(chosen["pixel_values"], request["pixel_values"][[1, 3]])
    assert torch.equal(chosen["images_crop"], request["images_crop"][4:5])
    assert chosen["crops"] == [(0, 0), (1, 1)]


def test_items_of_two_modalities_in_one_eager_batch_keep_their_features() -> None:
    """A clip that is smaller than an image comes after it all the same: eager batches keep the order of the request."""
    table = packed_table()
    for images, clips in (([(1, 4, 4)], [(1, 2, 2)]), ([(1, 2, 4), (1, 4, 4), (1, 2, 2)], [(1, 2, 4), (2, 2, 2), (1, 2, 2)])):
        request = packed_request(images, clips)
        assert largest_difference(manager(table).execute(request), packed_reference(table, request)) < 1e-5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [packed_table, tiled_table, twin_table], ids=lambda make: make.__name__)
def test_features_of_any_request(make: Any, seed: int) -> None:
    """Random requests, captured and not, give every item the features it has alone, in the order of the request."""
    dice = random.Random(seed)
    table = make()
    served = manager(table), captured(table, token_budgets=(8, 24), packing="greedy")
    for _ in range(3):
        if make is packed_table:
            grids = [(1, 2 * dice.randint(1, 3), 2 * dice.randint(1, 4)) for _ in range(dice.randint(0, 4))]
            clips = [(dice.randint(1, 4), 2, 2 * dice.randint(1, 2)) for _ in range(dice.randint(0, 3))]
            request, reference = packed_request(grids, clips, seed), packed_reference
        elif make is tiled_table:
            crops = [dice.choice([(0, 0), (1, 1), (1, 3), (2, 2)]) for _ in range(dice.randint(0, 5))]
            request, reference = tiled_request(crops, seed), tiled_reference  # type: ignore[assignment]
        else:
            keys = [(dice.randint(1, 3), 2, 2 * dice.randint(1, 3), dice.randint(0, 2)) for _ in range(dice.randint(0, 5))]
            request, reference = twin_request(keys, seed), twin_reference  # type: ignore[assignment]
        for made in served:
            assert largest_difference(made.execute(request), reference(table, request)) < 1e-5
    assert served[0].snapshot()["graph_hits"] == 0
    assert set(served[1].snapshot()["miss_reasons"]) <= {"too-large"}


# --- filling ---------------------------------------------------------------------------------------------------------


def real_entries(name: str, values: Mapping[str, Any], replay: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The front of a filled buffer, as long as the unpadded value."""
    return torch.as_tensor(values[name][: len(replay[name])])


@pytest.mark.parametrize("indices", [[0], [0, 1, 2, 3], [1, 2], [3, 2], [2, 1, 0]], ids=str)
@pytest.mark.parametrize("path", ["fine", "coarse"])
def test_replay_values_are_what_a_fill_puts_in_front(path: str, indices: list[int]) -> None:
    """The two ways into the buffers agree for every role: through a selected request without padding, and directly."""
    made = encoder(twin_table())
    request = twin_request(TWINS)
    inputs = capture_inputs(made, path, tokens=32, segments=8)
    assert made.fill_encoder_cudagraph_buffers(inputs.state, request, [0, 2], path)  # a batch before
    assert made.fill_encoder_cudagraph_buffers(inputs.state, request, indices, path)
    chosen = made.select_encoder_cudagraph_items(request, indices)
    replay = made.prepare_encoder_cudagraph_replay_buffers(chosen, path, (ALL_SEGMENTS,)).values
    assert replay.keys() == made.table.paths[path].buffers.keys()
    for name, value in replay.items():
        front = real_entries(name, inputs.values, replay)
        assert front.dtype == value.dtype, name
        assert torch.equal(front, value), name
        assert len(value) > 0, name


@pytest.mark.parametrize("indices", [[0], [0, 1, 2, 3, 4], [4, 3, 0], [1, 2]], ids=str)
def test_replay_values_of_images_and_clips(indices: list[int]) -> None:
    """Also where the rows come from two inputs, in any order of items: that of the batch, not of the modalities."""
    made = encoder(packed_table())
    inputs = capture_inputs(made)
    assert made.fill_encoder_cudagraph_buffers(inputs.state, MIXED, indices, "main")
    chosen = made.select_encoder_cudagraph_items(MIXED, indices)
    replay = made.prepare_encoder_cudagraph_replay_buffers(chosen, "main", (0,)).values
    assert all(torch.equal(real_entries(name, inputs.values, replay), value) for name, value in replay.items())
    everything = torch.cat([MIXED["pixel_values"], MIXED["pixel_values_videos"]]).split([16, 12, 4, 12, 16])
    assert torch.equal(replay["pixels"], torch.cat([everything[i] for i in indices]))


def test_a_fill_without_room_for_the_segments_is_refused() -> None:
    """False, and the buffers hold what they held: the batch runs eagerly."""
    made = encoder(packed_table())
    inputs = capture_inputs(made, segments=2)
    assert made.fill_encoder_cudagraph_buffers(inputs.state, MIXED, [1, 2], "main")
    before = {name: value.clone() for name, value in inputs.values.items() if isinstance(value, torch.Tensor)}
    assert not made.fill_encoder_cudagraph_buffers(inputs.state, MIXED, [0, 1, 2], "main")
    assert not made.fill_encoder_cudagraph_buffers(inputs.state, MIXED, [3], "main")
    assert all(torch.equal(inputs.values[name], value) for name, value in before.items())


def test_a_batch_with_more_segments_than_a_graph_has_runs_eagerly() -> None:
    """Where an item has more segments than its frames say, the numbers are right and the reason is counted."""

    class Halves(PackedTable):
        """Every frame is two segments."""

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            t, h, w = key
            return {**super().item_metadata(key, path), "cu_seqlens": torch.arange(2 * t + 1, dtype=torch.int32) * (h * w // 2)}

    table = Halves(toys.PackedTower().eval())
    made = captured(table, token_budgets=(16,), max_frames_per_batch=4, packing="greedy")
    request = packed_request([(1, 4, 4)] * 3)
    with torch.no_grad():
        halves = [table.tower.alone(part, (2, 2, 4)) for part in request["pixel_values"].split(16)]
    assert largest_difference(made.execute(request), halves) < 1e-5
    assert made.snapshot()["miss_reasons"] == {"too-many-segments": 3}


@pytest.mark.parametrize(
    ("make", "path", "tokens", "real", "rows"),
    [
        (packed_table, "main", 8, 8, 32),
        (packed_table, "main", 3, 3, 12),
        (packed_table, "main", 99, 16, 64),
        (tiled_table, "global", 6, 6, 1),
        (tiled_table, "global", 11, 6, 1),
        (tiled_table, "global", 1, 6, 1),
        (tiled_table, "local", 9, 8, 2),
        (twin_table, "fine", 5, 5, 20),
        (twin_table, "coarse", 1, 2, 1),
    ],
)
def test_a_trial_has_whole_items(make: Any, path: str, tokens: int, real: int, rows: int) -> None:
    """At most so many tokens, in whole tiles, but at least one; the same data for a number, whatever the garbage."""
    made = encoder(make())
    inputs = capture_inputs(made, path, key=None if make is tiled_table else 0)
    data = inputs.values[next(iter(made.table.paths[path].buffers))]
    seen = []
    for kind in (None, "small", "large", "nan", None):
        assert made.fill_encoder_cudagraph_trial(inputs.state, path, tokens, kind) == real
        assert bool((data[:rows] != 0).all())
        seen.append(data.clone())
        behind = data[rows:]
        if behind.numel():
            assert bool(behind.isnan().any()) == (kind == "nan")
            assert bool((behind != 0).any()) == (kind is not None)
    assert all(torch.equal(one[:rows], seen[0][:rows]) for one in seen)
    made.fill_encoder_cudagraph_trial(inputs.state, path, tokens, None, seed=1)
    assert not torch.equal(data[:rows], seen[0][:rows])


class ScaledTags(toys.TwinTable):
    """The coarse path has metadata too, and there is none for items without tags."""

    def __init__(self, tower: toys.TwinTower) -> None:
        super().__init__(tower)
        coarse = self.paths["coarse"]
        buffers = {**coarse.buffers, "scale": Buffer(role=Role.ROWS, shape=(1,))}
        self.paths = {**self.paths, "coarse": dataclasses.replace(coarse, buffers=buffers)}

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        if path == "fine":
            return super().item_metadata(key, path)
        assert key[3] > 0, "asked for an item that is not on the path"
        return {"scale": torch.arange(1.0, key[3] + 1)[:, None]}

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        if path == "coarse":
            values = {"tags": values["tags"] * values["scale"]}
        return super().forward(path, values)


def test_metadata_is_asked_only_for_items_on_the_path() -> None:
    """Items that have nothing on a path leave no trace in its buffers, captured or not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = ScaledTags(toys.TwinTower().eval())
    request = twin_request(TWINS)
    scales = torch.tensor([float(n + 1) for *_, tags in TWINS for n in range(tags)])
    want = twin_reference(table, {**request, "tag_values": request["tag_values"] * scales[:, None]})
    for made in (manager(table), captured(table, token_budgets=(8, 16), packing="greedy")):
        assert largest_difference(made.execute(request), want) < 1e-5
    assert made.snapshot()["miss_reasons"] == {}


# --- data buffers ----------------------------------------------------------------------------------------------------


def test_data_buffers_are_shared_and_go_with_the_last_graph() -> None:
    """Budgets of a path share their pixels; nothing else keeps these alive, and new graphs make new ones."""
    made = encoder(packed_table())
    large, small = capture_inputs(made, tokens=16), capture_inputs(made, tokens=8)
    tensor = large.state.buffers.shared.buffers["pixels"].tensor
    assert small.values["pixels"].data_ptr() == large.values["pixels"].data_ptr() == tensor.data_ptr()
    assert large.nbytes - small.nbytes >= tensor.nbytes, "counted once, for the first"
    kept = weakref.ref(tensor)
    del tensor, large
    gc.collect()
    assert kept() is not None
    assert made.fill_encoder_cudagraph_buffers(small.state, MIXED, [0], "main")
    another = capture_inputs(made, tokens=4)
    assert another.values["pixels"].data_ptr() == small.values["pixels"].data_ptr()
    del another
    gc.collect()
    another = capture_inputs(made, tokens=4)
    assert another.values["pixels"].data_ptr() == small.values["pixels"].data_ptr(), "whichever graph is left"
    del small, another
    gc.collect()
    assert kept() is None
    assert capture_inputs(made, tokens=8).state.buffers.own_rows


def test_a_larger_graph_later_makes_larger_buffers() -> None:
    """Graphs of any order of sizes are right; those that came before keep what they have."""
    made = encoder(packed_table())
    small, large = capture_inputs(made, tokens=8), capture_inputs(made, tokens=16)
    assert large.values["pixels"].data_ptr() != small.values["pixels"].data_ptr()
    assert capture_inputs(made, tokens=12).values["pixels"].data_ptr() == large.values["pixels"].data_ptr()
    assert [len(inputs.values["pixels"]) for inputs in (small, large)] == [32, 64]


def test_paths_have_data_buffers_of_their_own() -> None:
    """Thumbnails and tiles lie apart, as one batch has both."""
    made = encoder(tiled_table())
    one, other = capture_inputs(made, "global", tokens=12, key=None), capture_inputs(made, "local", tokens=12, key=None)
    assert (one.values.keys(), other.values.keys()) == ({"thumbnails"}, {"tiles"})
    assert one.values["thumbnails"].data_ptr() != other.values["tiles"].data_ptr()
    assert (len(one.values["thumbnails"]), len(other.values["tiles"])) == (2, 3)


def test_clear_gives_the_buffers_back() -> None:
    """After `clear()` neither manager nor encoder keeps a buffer, and the next capture works on new ones."""
    table = packed_table()
    made = captured(table, token_budgets=(8, 16), packing="greedy")
    graphs = list(made._captured.set.graphs.values())
    kept = [weakref.ref(graph.inputs.state.buffers.block) for graph in graphs]
    kept += [weakref.ref(b.tensor) for b in graphs[0].inputs.state.buffers.shared.buffers.values()]
    del graphs
    made.execute(MIXED)
    made.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    made.capture()
    assert largest_difference(made.execute(MIXED), packed_reference(table, MIXED)) < 1e-5


# --- metadata --------------------------------------------------------------------------------------------------------


def int32(*values: int) -> torch.Tensor:
    """Boundaries."""
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cu_seqlens", torch.tensor([0, 2**32 + 16]), "from 0 to the 16 rows"),
        ("cu_seqlens", None, r"has no 'cu_seqlens'"),
        ("cu_seqlens", [0, 16], "'cu_seqlens' is list: expected a CPU tensor"),
        ("cu_seqlens", int32(0, 16)[None], r"\[1, 2\] on cpu"),
        ("cu_seqlens", torch.tensor(16), r"\[\] on cpu"),
        ("cu_seqlens", torch.empty(2, dtype=torch.int32, device="meta"), "on meta"),
        ("cu_seqlens", int32(), "boundaries do not decrease from 0 to the 16 rows"),
        ("cu_seqlens", int32(0), "from 0 to the 16 rows"),
        ("cu_seqlens", int32(0, 12), "from 0 to the 16 rows"),
        ("cu_seqlens", int32(0, 20), "from 0 to the 16 rows"),
        ("cu_seqlens", int32(4, 16), "from 0 to the 16 rows"),
        ("cu_seqlens", int32(0, 12, 8, 16), "boundaries do not decrease"),
        ("cu_windows", int32(0, 9, 16), "'cu_windows' has a segment of 9 rows; longest=8"),
        ("cu_windows", int32(0, 16), "has a segment of 16 rows"),
        ("order", torch.arange(16), "'order' has 16 entries: expected 16 rows / 4"),
        ("order", torch.arange(3), "'order' has 3 entries"),
        ("order", torch.tensor([0, 1, 2, 4]), "'order' indexes outside of the item's 4 entries"),
        ("order", torch.tensor([0, 1, 2, -1]), "indexes outside"),
        ("back", torch.zeros(4, 2, dtype=torch.int64), r"'back' is \[4, 2\]"),
        ("frame_scale", torch.ones(1, 2), r"'frame_scale' is \[1, 2\]"),
    ],
)
def test_wrong_metadata_is_refused(name: str, value: Any, words: str) -> None:
    """Metadata that is missing, no CPU tensor, of another shape or length, or points elsewhere would mix images silently."""

    class Wrong(toys.TwinTable):
        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            found = {**super().item_metadata(key, path), name: value}
            return {key: value for key, value in found.items() if value is not None}

    table = Wrong(toys.TwinTower().eval())
    request = twin_request([(1, 4, 4, 0)])
    for made in (manager(table), captured(table, token_budgets=(16,), packing="greedy")):
        with pytest.raises(ProtocolError, match=words):
            made.execute(request)


def test_legal_metadata_is_taken() -> None:
    """Empty segments, other integer dtypes and more values than there are buffers are no errors."""

    class Odd(toys.TwinTable):
        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            found = super().item_metadata(key, path)
            return {**found, "cu_windows": int32(0, 8, 8, 16).long(), "order": found["order"].int(), "unused": torch.ones(3)}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = Odd(toys.TwinTower().eval())
    request = twin_request([(1, 4, 4, 0)])
    assert largest_difference(manager(table).execute(request), twin_reference(table, request)) < 1e-5


# --- the segment axis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacities", [(), (1,), (4,), (1, 4), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("frames", [0, 6])
def test_every_number_of_segments_has_the_tightest_graph(capacities: tuple[int, ...], most: int, frames: int) -> None:
    """For every batch that may come there is a graph, with the least declared room, and no graph is there for nobody."""
    made = encoder(packed_table(segment_capacities=capacities))
    declared = made.get_encoder_cudagraph_config()
    assert declared.is_reachable is not None
    limit, used = frames or most, set()
    keys = [(key,) for key in declared.capture_axes[0]] if capacities else [()]
    reachable = {key for key in keys if declared.is_reachable("main", 16, key, most, frames)}
    for segments in range(1, limit + 1):
        key = () if declared.axis_keys_of_frames is None else declared.axis_keys_of_frames(segments, "main")
        used.add(key)
        assert key in reachable
        inputs = made.prepare_encoder_cudagraph_capture_inputs(64, most, frames, CPU, torch.float32, "main", key)
        tightest = min((capacity for capacity in capacities if capacity >= segments), default=limit)
        assert len(inputs.values["cu_seqlens"]) - 1 == min(tightest, limit)
    assert used == reachable


def test_frames_are_segments() -> None:
    """Clips count by their frames when a graph is chosen."""
    made = captured(packed_table(segment_capacities=(2, 5)), token_budgets=(16,), max_frames_per_batch=8, packing="greedy")
    image, short, long = (1, 2, 2), (3, 2, 2), (4, 2, 2)
    for images, clips, key in (
        ([image], [], "2"),
        ([image] * 3, [], "5"),
        ([], [short], "5"),
        ([image], [long], "5"),
        ([], [short, long], "0"),
        ([image, image], [long], "0"),
    ):
        made._statistics.reset()
        made.execute(packed_request(images, clips))
        assert {graph["axis_keys"][0]: graph["replays"] for graph in made.snapshot()["graphs"] if graph["replays"]} == {key: 1}


def test_paths_without_boundaries_have_no_tight_graphs() -> None:
    """On such a path one graph serves any number of items, also where another path has the axis."""
    table = twin_table()
    made = captured(table, token_budgets=(16,), packing="greedy")
    found = {(key.path, key.token_budget, key.axis_keys) for key in made._captured.set.graphs}
    assert {axes for path, _, axes in found if path == "coarse"} == {(0,)}
    assert {axes for path, _, axes in found if path == "fine"} == {(1,), (3,), (0,)}
    for keys in ([TWINS[0]], TWINS[:3], TWINS):
        request = twin_request(keys)
        assert largest_difference(made.execute(request), twin_reference(table, request)) < 1e-5
    assert made.snapshot()["miss_reasons"] == {}


@pytest.mark.parametrize(
    ("options", "graphs", "items"),
    [
        ({"max_items_per_batch": 1, "max_frames_per_batch": 0}, [(1,)], 1),
        ({"max_items_per_batch": 3, "max_frames_per_batch": 0}, [(1,), (16,)], 3),
        ({"max_items_per_batch": 16, "max_frames_per_batch": 0}, [(1,), (16,)], 8),
    ],
)
def test_small_limits_still_replay(options: dict[str, Any], graphs: list[Any], items: int) -> None:
    """Where a batch may have no more items than a tight graph has room for, that graph is captured and used."""
    table = packed_table(segment_capacities=(1, 16))
    made = captured(table, token_budgets=(16,), packing="greedy", **options)
    assert [key.axis_keys for key in made._captured.set.graphs] == graphs
    request = packed_request([(1, 2, 4)] * items)
    assert largest_difference(made.execute(request), packed_reference(table, request)) < 1e-5
    assert made.snapshot()["graph_hits"] == items


def test_budgets_below_one_tile_are_not_captured() -> None:
    """A graph without a single row serves nobody; what is too large for it runs eagerly."""
    table = tiled_table()
    made = captured(table, token_budgets=(4,), packing="greedy")
    assert [(key.path, key.token_budget) for key in made._captured.set.graphs] == [("local", 4)]
    assert made.snapshot()["not_captured"] == [], "it was not even tried"
    request = tiled_request([(1, 1), (0, 0)])
    assert largest_difference(made.execute(request), tiled_reference(table, request)) < 1e-5
    assert made.snapshot()["miss_reasons"] == {"too-large": 2}
    assert made.snapshot()["graph_hits"] == 1


# --- features --------------------------------------------------------------------------------------------------------


def test_features_of_the_chosen_items_are_taken_apart() -> None:
    """Items of the whole request by their numbers: the tokens of each path go to whom they belong, empty paths are None."""
    table = tiled_table()
    made = encoder(table)
    request = tiled_request([(1, 2), (0, 0), (2, 1)])
    specs = made.get_encoder_cudagraph_item_specs(request)
    want = tiled_reference(table, request)
    with torch.no_grad():
        for indices in ([0, 1, 2], [2, 1], [1], [0]):
            chosen = made.select_encoder_cudagraph_items(request, indices)
            members = [specs[i] for i in indices]
            outputs = {
                path: made.encoder_eager_forward(chosen, path) if any(m.tokens_on(path) for m in members) else None
                for path in table.paths
            }
            direct = made.postprocess_encoder_items(outputs, members, request, indices)
            selected = made.postprocess_encoder_output(outputs, members, chosen)
            for got in (direct, selected):
                assert largest_difference(got, [want[i] for i in indices]) < 1e-5


def test_a_single_path_hands_on_views() -> None:
    """Without an `assemble` of the adapter's nothing is copied: the manager knows what has to be."""
    made = encoder(packed_table())
    request = packed_request([(1, 4, 4), (1, 2, 6)])
    specs = made.get_encoder_cudagraph_item_specs(request)
    output = torch.randn(7, 8)
    got = made.postprocess_encoder_items({"main": output}, specs, request, [0, 1])
    assert [part.data_ptr() for part in got] == [output.data_ptr(), output[4:].data_ptr()]
    assert [tuple(part.shape) for part in got] == [(4, 8), (3, 8)]


def test_compiled_forwards_give_the_same_features() -> None:
    """Through `torch.compile` as well: every role, two paths, several budgets and segment numbers."""
    table = twin_table(segment_capacities=(2,))
    made = captured(table, token_budgets=(8, 16), packing="greedy", mode="compiled", compiler="eager")
    for keys in (TWINS, TWINS[:1], [TWINS[1], TWINS[3]]):
        request = twin_request(keys)
        assert largest_difference(made.execute(request), twin_reference(table, request)) < 1e-5
    assert made.snapshot()["miss_reasons"] == {}


def test_metadata_is_the_encoders_once_it_is_given() -> None:
    """An adapter that writes into its own tensors later changes nothing that is kept."""
    mine = {}

    class Keeping(PackedTable):
        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            mine[key] = dict(super().item_metadata(key, path))
            return mine[key]

    keeping = Keeping(packed_table().tower)
    made = captured(keeping, token_budgets=(4, 16), packing="greedy")
    request = packed_request([(1, 2, 4)])
    want = packed_reference(keeping, request)
    assert largest_difference(made.execute(request), want) < 1e-5
    mine[1, 2, 4]["positions"].zero_()
    made.execute(packed_request([(1, 4, 4)]))
    assert largest_difference(made.execute(packed_request([(1, 2, 4), (1, 2, 2)]))[:1], want) < 1e-5


def test_metadata_that_would_lose_precision_is_an_error() -> None:
    """Interpolation weights in float32 and a bfloat16 encoder: the buffer needs a dtype of its own."""

    class Weighted(PackedTable):
        def __init__(self, dtype: torch.dtype | None) -> None:
            super().__init__(packed_table().tower.to(torch.bfloat16))
            path = self.paths["main"]
            self.paths = {
                "main": dataclasses.replace(path, buffers={**path.buffers, "weights": Buffer(role=Role.ROWS, dtype=dtype)})
            }

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            return {**super().item_metadata(key, path), "weights": torch.rand(key[0] * key[1] * key[2])}

    fine, lossy = (TableEncoder(Weighted(dtype), device=CPU, dtype=torch.bfloat16) for dtype in (torch.float32, None))
    assert fine._metadata((1, 2, 2), "main")["weights"].dtype == torch.float32
    with pytest.raises(ProtocolError, match="its buffer torch"):
        lossy._metadata((1, 2, 2), "main")


@pytest.mark.parametrize(
    ("dtype", "given", "fits"),
    [
        (torch.int32, torch.tensor(2**31 - 1), True),
        (torch.int32, torch.tensor(-(2**31)), True),
        (torch.int32, torch.tensor(2**31), False),
        (torch.int32, torch.tensor(2**40), False),
        (torch.uint8, torch.tensor(-1), False),
        (torch.int8, torch.tensor(255, dtype=torch.uint8), False),
        (torch.uint64, torch.tensor(-1), False),
        (torch.int64, torch.tensor(2**40), True),
        (torch.bfloat16, torch.tensor(256), True),
        (torch.bfloat16, torch.tensor(257), False),
        (torch.int8, torch.tensor(True), True),
    ],
)
def test_integers_that_the_buffer_cannot_hold_are_an_error(dtype: torch.dtype, given: torch.Tensor, fits: bool) -> None:
    """They would wrap around, or be rounded; what fits is taken, whatever its dtype, captured or not."""

    class Numbered(PackedTable):
        def __init__(self) -> None:
            super().__init__(packed_table().tower)
            path = self.paths["main"]
            more = Buffer(role=Role.ROWS, dtype=dtype)
            self.paths = {"main": dataclasses.replace(path, buffers={**path.buffers, "more": more})}

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            return {**super().item_metadata(key, path), "more": given.repeat(key[0] * key[1] * key[2])}

        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            more = values["more"].double()
            return super().forward(path, {k: v for k, v in values.items() if k != "more"}) + more.view(-1, 4)[:, :1].float()

    request = packed_request([(1, 4, 4), (1, 2, 2)])
    table = Numbered()
    for made in (manager(table), captured(table, token_budgets=(16,), packing="greedy")):
        if fits:
            want = [feature + given.float() for feature in packed_reference(table, request)]
            got = made.execute(request)
            assert all(torch.allclose(g, w) for g, w in zip(got, want, strict=True))
        else:
            with pytest.raises(ProtocolError, match=f"metadata 'more' has values that {dtype}, the dtype of its buffer, cannot"):
                made.execute(request)


class Keyed(PackedTable):
    """Keys are changed by a test."""

    change: Any = staticmethod(lambda key: key)

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Any]:
        return [self.change(key) for key in super().item_keys(modality, inputs)]


@pytest.mark.parametrize("change", [list, lambda key: {"t": key[0]}, lambda key: (key[0], [key[1]], key[2])])
def test_keys_are_hashable(change: Any) -> None:
    """Lists and dicts are an error of the adapter's, which shows the key."""
    table = Keyed(toys.PackedTower().eval())
    table.change = change
    for made in (manager(table), captured(table, token_budgets=(16,), packing="greedy")):
        with pytest.raises(ProtocolError, match=r"item key .*unhashable.*keys must be hashable"):
            made.execute(packed_request([(1, 4, 4)]))


@pytest.mark.parametrize(
    "as_type", [iter, lambda grids: (g for g in grids), lambda grids: dict.fromkeys(grids), lambda g: map(tuple, g)]
)
@pytest.mark.parametrize("captures", [False, True])
def test_sizes_that_can_be_read_once(as_type: Any, captures: bool) -> None:
    """Generators and other iterables of grids serve, also where a part of the request runs eagerly by its own sizes."""
    table = packed_table()
    made = manager(table, token_budgets=(8, 16), packing="greedy")
    if captures:
        made.capture()
    request = packed_request([(1, 4, 4), (1, 10, 10), (1, 2, 6)])
    got = made.execute({**request, "image_grid_thw": as_type(request["image_grid_thw"])})
    assert largest_difference(got, packed_reference(table, request)) < 1e-5


class OneForBoth(EncoderTable):
    """One data buffer on two paths; a key is (rows on the first, rows on the second)."""

    def __init__(self) -> None:
        self.first, self.second = toys.nn.Linear(CHANNELS, toys.WIDTH).eval(), toys.nn.Linear(CHANNELS, toys.WIDTH).eval()
        rows = {"pixels": Buffer(role=Role.ROWS, shape=(CHANNELS,))}
        super().__init__(
            modalities={"image": Modality(data={"pixels": "pixel_values"}, per_item=("counts",))},
            paths={"first": TablePath(buffers=rows), "second": TablePath(buffers=dict(rows))},
            out_hidden_size=toys.WIDTH,
            token_range=(4, 16),
        )

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Any]:
        return [tuple(key) for key in inputs["counts"]]

    def item_size(self, key: Any) -> ItemSize:
        rows = {"first": key[0], "second": key[1]}
        return ItemSize(rows=rows, tokens=rows)

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        features: torch.Tensor = (self.first if path == "first" else self.second)(values["pixels"])
        return features

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        return torch.cat([part for part in outputs.values() if part is not None])


def test_a_buffer_on_two_paths_has_the_same_rows_on_both() -> None:
    """Equal rows serve both paths; others are an error that names the item, in every order of the paths."""
    table = OneForBoth()
    request = {"pixel_values": toys.seeded(28, CHANNELS), "counts": [(3, 3), (5, 5), (20, 20)]}
    with torch.no_grad():
        parts = request["pixel_values"].split([3, 5, 20])
        want = [torch.cat([table.first(part), table.second(part)]) for part in parts]
    for made in (manager(table), captured(table, packing="greedy")):
        assert largest_difference(made.execute(request), want) < 1e-5
        for odd in ((3, 5), (5, 3), (0, 5), (5, 0)):
            with pytest.raises(ProtocolError, match=f"item \\({odd[0]}, {odd[1]}\\) has another number of rows"):
                made.execute({"pixel_values": toys.seeded(5, CHANNELS), "counts": [odd]})


def test_tokens_on_a_path_for_which_there_is_no_data() -> None:
    """Clips bring tags alone, so an item of them that says that it has fine tokens is an error; without those it is served."""
    table = tiled_table()
    table.modalities = {
        "image": table.modalities["image"],
        "tile": Modality(data={"tiles": "more_tiles"}, per_item=("more_crops",)),
    }

    class Both(toys.TiledTable):
        thumbnail = 1

        def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Any]:
            return [(modality, *key) for key in inputs["crops" if modality == "image" else "more_crops"]]

        def item_size(self, key: Any) -> ItemSize:
            modality, rows, columns = key
            count = 1 if modality == "image" else self.thumbnail
            return ItemSize(
                rows={"global": count, "local": rows * columns}, tokens={"global": 6 * count, "local": 4 * rows * columns}
            )

        def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
            return torch.cat([part for part in outputs.values() if part is not None])

    both = Both(table.tower)
    both.modalities = table.modalities
    tiles = toys.seeded(2, *toys.TILE)
    with pytest.raises(ProtocolError, match="has tokens on path 'global', for which tile brings no data"):
        manager(both).execute({"more_tiles": tiles, "more_crops": [(1, 2)]})
    both.thumbnail = 0
    made = manager(both)
    with torch.no_grad():
        want = [both.tower(tiles, "local")]
    assert largest_difference(made.execute({"more_tiles": tiles, "more_crops": [(1, 2)]}), want) < 1e-5


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_per_segment_metadata_has_an_entry_for_each_segment(entries: int) -> None:
    """One too few or too many would move those of the items behind."""

    class Odd(PackedTable):
        def __init__(self) -> None:
            super().__init__(packed_table().tower)
            path = self.paths["main"]
            segment = Buffer(role=Role.PER_SEGMENT, dtype=torch.int64)
            self.paths = {"main": dataclasses.replace(path, buffers={**path.buffers, "sizes": segment})}

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            return {**super().item_metadata(key, path), "sizes": torch.zeros(entries, dtype=torch.int64)}

    with pytest.raises(ProtocolError, match=f"'sizes' has {entries} entries: expected one for each of 2 segments"):
        TableEncoder(Odd(), device=CPU, dtype=torch.float32)._metadata((2, 2, 2), "main")
