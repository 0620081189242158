"""What went wrong in real systems (docs: hazards), as far as it concerns the runtime and a CPU can show it.

Every test is named by the hazard's number. 11 and 35's workspace belong to the backend, 23 needs a GPU; 24 and 25 (collectives,
ranks without images) are in `test_data_parallel.py`, as `test_not_inside_a_capture` and the case `one_item` of `test_ranks`.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.runtime import toys
from vit_compile import counters
from vit_compile.errors import BudgetError, GridError, InputError, OptionError, ProtocolError, SkipError
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graphs import EncoderGraph, GraphKey
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.planner import EagerCost
from vit_compile.runtime.replay_times import ReplayTime
from vit_compile.runtime.table import ItemSize

TOLERANCE = 1e-5
NAN = float("nan")
GREEDY: dict[str, Any] = {"packing": "greedy"}


@pytest.fixture
def table() -> toys.PackedTable:
    """A packed tower."""
    return toys.packed_table()


def check(manager: EncoderCudaGraphManager, table: toys.PackedTable, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Features equal the reference, which encodes every item alone."""
    got = manager.execute(request)
    assert toys.largest_difference(got, toys.packed_reference(table, request)) <= TOLERANCE
    return got


def same_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Equal, NaN included."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(got, want, strict=True))


@contextmanager
def replays() -> Iterator[list[EncoderGraph]]:
    """The graphs that are replayed, in order."""
    seen: list[EncoderGraph] = []
    real = EncoderGraph.replay

    def replay(self: EncoderGraph) -> torch.Tensor:
        seen.append(self)
        return real(self)

    with mock.patch.object(EncoderGraph, "replay", replay):
        yield seen


def row_buffers(manager: EncoderCudaGraphManager) -> list[Any]:
    """The data buffers of a table's graphs, each once."""
    found = {
        id(buffer): buffer
        for graph in manager._captured.set.graphs.values()
        for buffer in graph.inputs.state.buffers.shared.buffers.values()
    }
    return list(found.values())


def misses(manager: EncoderCudaGraphManager) -> dict[str, int]:
    """Items by reason."""
    reasons: dict[str, int] = manager.snapshot()["miss_reasons"]
    return reasons


# --- wrong numbers, silently -----------------------------------------------------------------------------------------


def test_hazard_01_stale_boundaries(table: toys.PackedTable) -> None:
    """Layouts of one total, alternating on one graph: each time the attention is that of the layout at hand."""
    table.segment_capacities = ()
    manager = toys.captured(table, token_budgets=(16,), max_items_per_batch=4, **GREEDY)
    layouts: list[tuple[list[toys.Grid], list[toys.Grid]]] = [
        ([(1, 8, 8)], []),
        ([(1, 4, 4), (1, 4, 12)], []),
        ([(1, 4, 12), (1, 4, 4)], []),
        ([(1, 4, 4)] * 4, []),
        ([], [(4, 4, 4)]),
        ([(1, 4, 8)], [(2, 4, 4)]),
        ([], [(2, 4, 8)]),
    ]
    requests = [toys.packed_request(images, clips, seed=7) for images, clips in layouts]
    with replays() as seen:
        for first, second in itertools.permutations(range(len(layouts)), 2):
            check(manager, table, requests[first])
            check(manager, table, requests[second])
    assert {graph.key for graph in seen} == {GraphKey("main", 16, (0,) if manager.declaration.capture_axes else ())}
    assert len(seen) == 2 * len(layouts) * (len(layouts) - 1), "one replay for each call"


def test_hazard_02_baked_max_seqlen() -> None:
    """Bounds cover whatever the graph may hold: short segments first, then one that fills the graph, windows included."""
    packed = toys.packed_table()
    manager = toys.captured(packed, token_budgets=(8, 16), **GREEDY)
    for graph in manager._captured.set.graphs.values():
        assert graph.inputs.values["max_seqlen"] == 4 * graph.key.token_budget
    for grids in ([(1, 2, 2)] * 8, [(1, 8, 8)], [(1, 2, 2)] * 4, [(1, 2, 16)], [(1, 4, 16)]):
        check(manager, packed, toys.packed_request(grids))
    twin = toys.twin_table()
    manager = toys.captured(twin, token_budgets=(8, 16), **GREEDY)
    for graph in manager._captured.set.graphs.values():
        if graph.key.path == "fine":
            assert graph.inputs.values["max_seqlen"] == 4 * graph.key.token_budget
            assert graph.inputs.values["max_window"] == toys.WINDOW
    keys: list[list[toys.TwinKey]]
    for keys in [[(1, 2, 2, 0)] * 6], [[(1, 8, 8, 1)]], [[(4, 2, 2, 0)]], [[(1, 2, 32, 0)]]:
        request = toys.twin_request(keys[0])
        assert toys.largest_difference(manager.execute(request), toys.twin_reference(twin, request)) <= TOLERANCE
    assert misses(manager) == {}


def test_hazard_03_unwritten_rows(table: toys.PackedTable) -> None:
    """NaN in all padding and all outputs between the calls, small -> large -> small: no bit of the real rows changes."""
    manager = toys.captured(table, token_budgets=(4, 16, 64), **GREEDY)
    small, large = toys.packed_request([(1, 4, 4)]), toys.packed_request([(1, 12, 12), (1, 4, 8)], [(2, 4, 4)])
    clean = {id(request): check(manager, table, request) for request in (small, large)}
    for request in (small, large, small, small, large, small):
        for buffer in row_buffers(manager):
            buffer.tensor[buffer.dirty :].fill_(NAN)
        for graph in manager._captured.set.graphs.values():
            graph.output.fill_(NAN)
        assert same_bits(manager.execute(request), clean[id(request)])


def test_hazard_03_stale_rows_become_padding_again(table: toys.PackedTable) -> None:
    """After a large call a small one finds zeros behind its rows, as far as the large one wrote."""
    manager = toys.captured(table, token_budgets=(16,), **GREEDY)
    for buffer in row_buffers(manager):
        assert not bool(buffer.tensor[buffer.dirty :].any()), "the garbage of the trial at capture is still there"
    check(manager, table, toys.packed_request([(1, 8, 8)]))
    check(manager, table, toys.packed_request([(1, 2, 4)]))
    for buffer in row_buffers(manager):
        assert bool(buffer.tensor[:8].any())
        assert not bool(buffer.tensor[8:].any())


def test_hazard_03_stale_rows_of_a_model_that_writes_the_contract_out() -> None:
    """Its buffers too: zeros behind the rows after a larger call, and what the model's own rule says where it has one."""
    model = toys.HandWritten()
    manager = toys.captured(model, token_budgets=(16,), **GREEDY)
    for count in (16, 3, 9, 1):
        request = toys.written_request([count])
        with replays() as seen:
            got = manager.execute(request)
        assert toys.largest_difference(got, toys.written_reference(model, request)) <= TOLERANCE
        (graph,) = seen
        rows, scale = graph.inputs.values["rows"], graph.inputs.values["scale"]
        assert torch.equal(rows[:count], request["rows"])
        assert not bool(rows[count:].any())
        assert torch.equal(scale, torch.cat([request["scale"], torch.ones(16 - count)]))


def test_hazard_04_boundary_tail(table: toys.PackedTable) -> None:
    """At every replay the boundaries end by repeating the last offset: no segment has a negative length."""
    manager = toys.captured(table, token_budgets=(16, 32), max_items_per_batch=6, **GREEDY)
    with replays() as seen:
        for images, clips in (([(1, 4, 4)], []), ([(1, 2, 2)] * 6, []), ([(1, 8, 8)], [(3, 2, 2)]), ([(1, 2, 4)] * 2, [])):
            before = len(seen)
            request = toys.packed_request(images, clips)
            check(manager, table, request)
            (graph,) = seen[before:]
            lengths = [h * w for t, h, w in (*images, *clips) for _ in range(t)]
            want = [0, *itertools.accumulate(lengths)]
            got = graph.inputs.values["cu_seqlens"].tolist()
            assert got == want + [want[-1]] * (len(got) - len(want))
            assert len(got) > len(want) or graph.key.axis_keys != (0,)


def test_hazard_05_rows_differ_from_the_last_boundary(table: toys.PackedTable) -> None:
    """A request whose rows and sizes disagree, and an adapter whose boundaries do not end at the rows: errors before a replay."""
    manager = toys.captured(table, **GREEDY)
    request = toys.packed_request([(1, 4, 4)])
    with replays() as seen:
        for rows in (15, 17):
            with pytest.raises(InputError, match=f"{rows} rows.*add up to 16"):
                manager.execute({**request, "pixel_values": torch.zeros(rows, toys.CHANNELS)})
        right = table.item_metadata
        for wrong in ([0, 12], [0, 16, 12], [4, 16], [0, 20], [0, 20, 16], []):
            offsets = torch.tensor(wrong, dtype=torch.int32)
            manager.clear()
            broken = toys.packed_table()
            broken.item_metadata = lambda key, path, offsets=offsets: {  # type: ignore[method-assign]
                **right(key, path),
                "cu_seqlens": offsets,
            }
            for made in (toys.captured(broken, **GREEDY), toys.manager(broken, **GREEDY)):
                seen.clear()
                with pytest.raises(ProtocolError, match="boundaries do not decrease from 0 to the 16 rows"):
                    made.execute(request)
                assert seen == []


def test_hazard_06_addresses_are_stable(table: toys.PackedTable) -> None:
    """Buffers and outputs of a graph never move, whatever is called in between; only a new capture makes new ones."""
    manager = toys.captured(table, **GREEDY)

    def addresses() -> list[int]:
        return [
            tensor.data_ptr()
            for graph in manager._captured.set.graphs.values()
            for tensor in (graph.output, *(v for v in graph.inputs.values.values() if isinstance(v, torch.Tensor)))
        ]

    before = addresses()
    for grids in ([(1, 4, 4)], [(1, 20, 20)], [(1, 2, 2)] * 9, [(1, 16, 16)], [(1, 4, 60)]):
        check(manager, table, toys.packed_request(grids))
    assert addresses() == before


@pytest.mark.parametrize("kind", ["packed", "tiled", "twin", "written out"])
def test_hazard_07_held_outputs(kind: str) -> None:
    """Outputs of every kind (plain, a view handed on by `assemble`, through a `.to()` that does nothing) held over 100 calls."""
    make: Callable[[int], dict[str, Any]]
    model: Any
    if kind == "packed":
        model, make = (
            toys.packed_table(),
            lambda seed: toys.packed_request([(1, 4, 4), (1, 2, 6)], [(2, 2, 2)], seed),
        )
    elif kind == "tiled":
        model, make = toys.tiled_table(), lambda seed: toys.tiled_request([(0, 0), (1, 2), (0, 0)], seed)
    elif kind == "twin":
        model, make = toys.twin_table(), lambda seed: toys.twin_request([(2, 2, 4, 1), (1, 4, 4, 0)], seed)
    else:
        model, make = toys.HandWritten(), lambda seed: toys.written_request([3, 2, 5], seed=seed)
        model.postprocess_encoder_output = lambda outputs, specs, mm_kwargs: [
            part.to(torch.float32) for part in outputs["main"].split([spec.output_tokens for spec in specs])
        ]
    manager = toys.captured(model, **GREEDY)
    held = manager.execute(make(0))
    kept = [feature.clone() for feature in held]
    for seed in range(1, 101):
        manager.execute(make(seed))
    assert same_bits(held, kept)
    assert misses(manager) == {}
    assert not same_bits(manager.execute(make(1)), kept), "the calls in between computed the same"


def replace_parameter(table: toys.PackedTable) -> None:
    """A new parameter."""
    table.tower.merge.weight = nn.Parameter(table.tower.merge.weight * 2)


def replace_data(table: toys.PackedTable) -> None:
    """New memory behind a parameter."""
    table.tower.qkv[1].weight.data = table.tower.qkv[1].weight.data * 2


def assign_checkpoint(table: toys.PackedTable) -> None:
    """A checkpoint whose tensors become the parameters."""
    state = {name: value * 1.5 for name, value in table.tower.state_dict().items()}
    table.tower.load_state_dict(state, assign=True)


def replace_layer(table: toys.PackedTable) -> None:
    """As quantisation does it."""
    table.tower.embed = nn.Linear(toys.CHANNELS, toys.WIDTH).eval()


def replace_tower(table: toys.PackedTable) -> None:
    """Another tower altogether."""
    table.tower = toys.PackedTower().eval()


def write_in_place(table: toys.PackedTable) -> None:
    """An optimiser's step, or a checkpoint that is copied."""
    for parameter in table.tower.parameters():
        parameter.mul_(1.5)


@pytest.mark.parametrize(
    ("change", "recaptures"),
    [
        (replace_parameter, 1),
        (replace_data, 1),
        (assign_checkpoint, 1),
        (replace_layer, 1),
        (replace_tower, 1),
        (write_in_place, 0),
    ],
)
def test_hazard_08_weights_replaced(change: Callable[[toys.PackedTable], None], recaptures: int, table: toys.PackedTable) -> None:
    """Replaced weights: every graph is made anew, once, and features are the new weights'; written in place they just work."""
    manager = toys.captured(table, token_budgets=(8, 16), **GREEDY)
    requests = [toys.packed_request(grids) for grids in ([(1, 4, 4)], [(1, 8, 8)])]
    before = [check(manager, table, request) for request in requests]
    graphs = list(manager._captured.set.graphs.values())
    with torch.no_grad():
        change(table)
    with counters.expect(recaptures=recaptures, captures=recaptures * len(graphs)):
        for request, stale in zip(requests, before, strict=True):
            assert toys.largest_difference(check(manager, table, request), stale) > 1e-3, "the new weights make no difference"
    assert manager.snapshot()["recaptures"] == recaptures
    assert any(new is old for new in manager._captured.set.graphs.values() for old in graphs) == (recaptures == 0)
    assert misses(manager) == {}


def test_hazard_08_a_new_layer_that_is_still_in_train_mode(table: toys.PackedTable) -> None:
    """New layers are in train mode: until `eval()` everything runs eagerly, with that reason; then graphs are made anew."""
    manager = toys.captured(table, token_budgets=(8, 16), **GREEDY)
    request = toys.packed_request([(1, 4, 4)])
    graphs = len(manager.graphs())
    table.tower.embed = nn.Linear(toys.CHANNELS, toys.WIDTH)
    with counters.expect(captures=0):
        check(manager, table, request)
        check(manager, table, request)
    assert misses(manager) == {"train-mode": 2}
    table.tower.eval()
    with counters.expect(captures=graphs):
        check(manager, table, request)
        check(manager, table, request)
    assert misses(manager) == {"train-mode": 2}
    assert manager.snapshot()["recaptures"] == 1
    table.tower.embed = nn.Linear(toys.CHANNELS, toys.WIDTH)
    check(manager, table, request)
    manager.clear()
    table.tower.eval()
    check(manager, table, request)
    assert not manager.is_captured(), "who clears does not want graphs"


class NormalisedTable(toys.PackedTable):
    """Normalises in front of the tower and behind it."""

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        return super().forward(path, {**values, "pixels": values["pixels"] * 3 - 1})

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        features = super().assemble(key, outputs)
        return torch.cat([features / (features.norm(dim=-1, keepdim=True) + 1), features.new_ones(1, toys.WIDTH)])


def test_hazard_09_what_lies_around_the_graph_is_not_skipped(table: toys.PackedTable) -> None:
    """Parity of the public call, replayed and eager: what the adapter does in front and behind is part of it."""
    normalised = NormalisedTable(table.tower)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6), (1, 20, 20)], [(2, 2, 2)])
    shifted = {name: value * 3 - 1 if isinstance(value, torch.Tensor) else value for name, value in request.items()}
    want = [
        torch.cat([features / (features.norm(dim=-1, keepdim=True) + 1), torch.ones(1, toys.WIDTH)])
        for features in toys.packed_reference(table, shifted)
    ]
    for manager in (toys.captured(normalised), toys.captured(normalised, **GREEDY), toys.manager(normalised)):
        assert toys.largest_difference(manager.execute(request), want) <= TOLERANCE


@pytest.mark.parametrize("packing", ["greedy", "cost"])
def test_hazard_10_input_order(packing: str, table: toys.PackedTable) -> None:
    """Every order of five images of five sizes comes back as it was given, over several batches."""
    manager = toys.captured(table, token_budgets=(8, 16), packing=packing, verify=False)
    grids: list[toys.Grid] = [(1, 2, 2), (1, 8, 8), (1, 4, 4), (1, 20, 20), (1, 2, 6)]
    whole = toys.packed_request(grids)
    parts = whole["pixel_values"].split([t * h * w for t, h, w in grids])
    want = toys.packed_reference(table, whole)
    for order in list(itertools.permutations(range(5)))[::7]:
        got = manager.execute({"pixel_values": torch.cat([parts[i] for i in order]), "image_grid_thw": [grids[i] for i in order]})
        assert toys.largest_difference(got, [want[i] for i in order]) <= TOLERANCE


class DroppingTable(toys.PackedTable):
    """Dropout in front of the tower."""

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        pixels = nn.functional.dropout(values["pixels"], 0.5, training=self.tower.training)
        return super().forward(path, {**values, "pixels": pixels})


def test_hazard_12_train_mode_and_gradients(table: toys.PackedTable) -> None:
    """Dropout in train mode is drawn anew for each call, not frozen in a graph, and counted as such; gradients are not kept."""
    dropping = DroppingTable(table.tower)
    request = toys.packed_request([(1, 8, 8)])
    request["pixel_values"].requires_grad_()
    dropping.tower.train()
    manager = toys.captured(dropping)
    assert not manager.is_captured()
    dropping.tower.eval()
    manager.capture()
    (steady,) = check(manager, table, request)
    dropping.tower.train()
    drawn = [manager.execute(request)[0] for _ in range(4)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([steady, *drawn], 2))
    dropping.tower.eval()
    assert torch.equal(manager.execute(request)[0], steady)
    assert misses(manager) == {"train-mode": 4}
    assert not any(feature.requires_grad for feature in drawn)


@pytest.mark.parametrize("grids", [[(1, 4, 4), (1, 2, 6)], [(1, 20, 20), (1, 4, 4)]])
def test_hazard_13_strides_and_layouts(grids: list[toys.Grid], table: toys.PackedTable) -> None:
    """Pixels of any strides, expanded ones included, are what their values say, replayed and eager."""
    manager = toys.captured(table, **GREEDY)
    request = toys.packed_request(grids)
    pixels = request["pixel_values"]
    rows = len(pixels)
    for strided in (
        pixels.T.contiguous().T,
        torch.stack([pixels, pixels * 0], dim=1)[:, 0],
        pixels[:1].expand(rows, -1),
        pixels[:, :1].expand(-1, toys.CHANNELS),
        torch.zeros(()).expand(rows, toys.CHANNELS),
    ):
        given = {**request, "pixel_values": strided}
        assert not strided.is_contiguous()
        check(manager, table, given)


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_hazard_14_items_above_the_smallest_budget(table: toys.PackedTable) -> None:
    """More items than tokens of the smallest budget: an error with both numbers, when the manager is made; never zero tokens."""
    with pytest.raises(BudgetError, match=r"max_items_per_batch=9 is above 8 tokens.*8 // 9 = 0 tokens.*9 or more.*8 or less"):
        toys.manager(table, token_budgets=(8, 16), max_items_per_batch=9)
    for items in range(1, 9):
        manager = toys.captured(table, token_budgets=(8, 16), max_items_per_batch=items, verify=False, **GREEDY)
        check(manager, table, toys.packed_request([(1, 2, 2)] * 17))
        assert manager.snapshot()["replays"] == -(-17 // items)
    assert toys.manager(table, token_budgets=(3, 64)).ladders.max_items == 3, "an inferred number follows the ladder"


def test_hazard_15_frames_limit_a_batch(table: toys.PackedTable) -> None:
    """Clips of many small frames: no batch has more frames than the buffers have room for, a clip that alone has runs eagerly."""
    manager = toys.captured(table, token_budgets=(64,), max_items_per_batch=4, max_frames_per_batch=6, **GREEDY)
    with replays() as seen:
        check(manager, table, toys.packed_request([(1, 2, 2)], [(3, 2, 2), (4, 2, 2), (6, 2, 2), (7, 2, 2), (40, 2, 2)]))
    assert misses(manager) == {"too-many-frames": 2}
    assert len(seen) == 3, "1 + 3 frames, then 4, then 6"
    for graph in seen:
        assert graph.inputs.values["cu_seqlens"].shape[0] <= 7


def test_hazard_15_more_segments_than_room_runs_eagerly() -> None:
    """An adapter that says fewer frames than it has segments: the batch runs eagerly, right, and with its reason."""

    class Understated(toys.PackedTable):
        def item_size(self, key: Any) -> ItemSize:
            size = super().item_size(key)
            return ItemSize(rows=size.rows, tokens=size.tokens, frames=1)

    table = Understated(toys.packed_table().tower)
    manager = toys.captured(table, max_items_per_batch=2, max_frames_per_batch=2, **GREEDY)
    request = toys.packed_request([(1, 4, 4)], [(5, 2, 2)])
    first = check(manager, table, request)
    assert misses(manager) == {"too-many-segments": 2}
    check(manager, table, toys.packed_request([(1, 4, 4)]))
    assert same_bits(manager.execute(request), first)
    strict = toys.captured(table, max_items_per_batch=2, max_frames_per_batch=2, strict=True, **GREEDY)
    with pytest.raises(SkipError, match="too-many-segments"):
        strict.execute(request)


def test_hazard_16_rows_follow_the_budget(table: toys.PackedTable) -> None:
    """Many frames make boundaries of as many segments, but never of more than there are rows, and not one row more."""
    shapes = {}
    table.segment_capacities = (1, 4)
    for frames in (0, 8, 20, 1000):
        manager = toys.manager(table, token_budgets=(8,), max_items_per_batch=4, max_frames_per_batch=frames)
        manager.capture()
        shapes[frames] = [graph.buffers for graph in manager.graphs() if graph.axis_keys == (0,)]
    rows = {"pixels": (32, toys.CHANNELS), "positions": (32,)}
    assert shapes == {
        0: [],  # four images are four segments, which the capacity of 4 serves
        8: [{**rows, "cu_seqlens": (9,)}],
        20: [{**rows, "cu_seqlens": (21,)}],
        1000: [{**rows, "cu_seqlens": (33,)}],  # a segment has a row at least
    }


def test_hazard_17_tight_boundaries(table: toys.PackedTable) -> None:
    """A batch takes the graph with the tightest room for its segments, not the loosest."""
    table.segment_capacities = (1, 16)
    manager = toys.captured(table, token_budgets=(32,), max_items_per_batch=8, max_frames_per_batch=32, **GREEDY)
    for images, clips, room in (
        ([(1, 4, 4)], [], 1),
        ([(1, 4, 4)] * 2, [], 16),
        ([(1, 2, 2)] * 8, [], 16),
        ([], [(4, 2, 2)], 16),
        ([], [(16, 2, 2)], 16),
        ([], [(20, 2, 2)], 32),
    ):
        with replays() as seen:
            check(manager, table, toys.packed_request(images, clips))
        assert [len(graph.inputs.values["cu_seqlens"]) for graph in seen] == [room + 1]


def test_hazard_18_nothing_compiles_after_capture(table: toys.PackedTable) -> None:
    """All tracing and compiling happens in `capture()`: later calls of new sizes and layouts cause none."""
    config = EncoderConfig(compiler="eager", packing="greedy", token_budgets=(4, 8, 16), max_items_per_batch=4)
    manager = EncoderCudaGraphManager(table, config, device="cpu", dtype=torch.float32)
    with torch.compiler.set_stance("default"):
        manager.capture()
    with torch.compiler.set_stance("fail_on_recompile"), counters.expect(graphs_seen=0, piece_compiles=0):
        for images, clips in (([(1, 4, 4)], []), ([(1, 2, 2)] * 4, []), ([(1, 2, 14)], []), ([(1, 4, 4)], [(5, 2, 2)])):
            check(manager, table, toys.packed_request(images, clips))
    assert misses(manager) == {}


class HostReads(TorchFunctionMode):
    """Counts what reads a tensor on the host."""

    NAMES = ("item", "tolist", "numpy", "cpu", "nonzero", "__int__", "__float__", "__bool__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.NAMES:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["packed", "tiled", "written out"])
def test_hazard_19_host_reads(model: str) -> None:
    """Around a replay of a layout that was seen, no tensor is read on the host; grids in a tensor are read once."""
    made, request = {
        "packed": (toys.packed_table(), toys.packed_request([(1, 4, 4), (1, 2, 6), (1, 8, 8)], [(2, 2, 2)])),
        "tiled": (toys.tiled_table(), toys.tiled_request([(1, 2), (0, 0), (2, 2)])),
        "written out": (toys.HandWritten(), toys.written_request([3, 2, 9])),
    }[model]
    manager = toys.captured(made, **GREEDY)
    manager.execute(request)
    with mock.patch.object(EncoderGraph, "replay", lambda self: self.output):  # the CPU's attention reads its boundaries
        with HostReads() as reads:
            manager.execute(request)
        assert not reads.seen
        if model == "packed":
            given = {**request, "image_grid_thw": torch.tensor(request["image_grid_thw"])}
            with HostReads() as reads:
                manager.execute(given)
            assert reads.seen == {"tolist": 1}
    with HostReads() as reads:
        assert torch.ones(1).item() == int(torch.ones(1)) == 1
    assert reads.seen, "the counter sees nothing"


def test_hazard_20_a_failed_capture(table: toys.PackedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that cannot be captured runs on the eager path with its reason; the others replay, and the process goes on."""
    real = table.tower.forward
    broken = {4 * 16}

    def forward(pixels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if len(pixels) in broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        return real(pixels, **kwargs)

    monkeypatch.setattr(table.tower, "forward", forward)
    manager = toys.captured(table, token_budgets=(4, 16), **GREEDY)
    broken.clear()
    assert {key.token_budget for key in manager._captured.set.graphs} == {4}
    request = toys.packed_request([(1, 8, 8), (1, 2, 2), (1, 2, 4)])
    check(manager, table, request)
    assert misses(manager) == {"capture-failed": 1}
    details = {skip["detail"] for skip in manager.snapshot()["not_captured"]}
    assert all("operation not permitted when stream is capturing" in detail for detail in details)
    manager.clear()
    manager.capture()
    check(manager, table, request)
    assert manager.snapshot()["not_captured"] == []
    assert misses(manager) == {"capture-failed": 1}


def test_hazard_21_two_threads_on_one_graph(table: toys.PackedTable) -> None:
    """Eight threads replay one graph with data of their own, and hold all features: nobody gets another's."""
    table.segment_capacities = ()
    manager = toys.captured(table, token_budgets=(16,), **GREEDY)
    requests = [toys.packed_request([(1, 4, 4), (1, 4, 8)], seed=3 * seed) for seed in range(8)]
    wants = [check(manager, table, request) for request in requests]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(own: int) -> None:
        try:
            start.wait()
            held = [manager.execute(requests[own]) for _ in range(25)]
            failures.extend(f"thread {own}" for got in held if not same_bits(got, wants[own]))
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
    with replays() as seen:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len({id(graph) for graph in seen}) == 1
    assert manager.snapshot()["replays"] == 8 * 26


def test_hazard_22_a_new_capture_inside_inference_mode(table: toys.PackedTable) -> None:
    """Weights are replaced and the capture that follows happens in inference mode: later calls without it still work."""
    manager = toys.captured(table, **GREEDY)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6)])
    with torch.inference_mode():
        check(manager, table, request)
    table.tower.merge.weight = nn.Parameter(table.tower.merge.weight.detach().clone() * 2)
    with torch.inference_mode():
        check(manager, table, request)
    assert manager.snapshot()["recaptures"] == 1
    for grids in ([(1, 4, 4), (1, 2, 6)], [(1, 2, 2)], [(1, 8, 8)]):
        for feature in check(manager, table, toys.packed_request(grids)):
            feature.mul_(2)
    assert not any(graph.output.is_inference() for graph in manager._captured.set.graphs.values())


@pytest.mark.parametrize("packing", ["greedy", "cost"])
def test_hazard_26_larger_than_every_budget(packing: str, table: toys.PackedTable) -> None:
    """Alone it runs eagerly; among small images it alone does, and they replay."""
    manager = toys.captured(table, token_budgets=(8, 16), packing=packing)
    check(manager, table, toys.packed_request([(1, 20, 20)]))
    assert misses(manager) == {"too-large": 1}
    assert manager.snapshot()["graph_hits"] == 0
    for place in range(4):
        grids: list[toys.Grid] = [(1, 2, 2), (1, 4, 4), (1, 8, 8)]
        grids.insert(place, (1, 20, 20))
        check(manager, table, toys.packed_request(grids))
    assert misses(manager) == {"too-large": 5}
    assert manager.snapshot()["graph_hits"] == 4 * 3


def test_hazard_27_a_path_without_tokens() -> None:
    """No image has tiles: nothing runs on that path, and the output, a view in `assemble`, is no graph memory."""
    table = toys.tiled_table()
    manager = toys.captured(table, **GREEDY)
    request = toys.tiled_request([(0, 0), (0, 0)])
    with replays() as seen:
        held = manager.execute(request)
    assert {graph.key.path for graph in seen} == {"global"}
    memory = {graph.output.untyped_storage().data_ptr() for graph in manager._captured.set.graphs.values()}
    assert not memory.intersection(feature.untyped_storage().data_ptr() for feature in held)
    manager.execute(toys.tiled_request([(0, 0), (0, 0)], seed=5))
    assert toys.largest_difference(held, toys.tiled_reference(table, request)) <= TOLERANCE


# --- memory and time -------------------------------------------------------------------------------------------------


def test_hazard_28_no_recording_per_size(table: toys.PackedTable) -> None:
    """Sixty sizes make no graph beyond the ladder, and caps in number and bytes hold, with their reasons."""
    table.segment_capacities = ()
    manager = toys.captured(table, token_budgets=(8, 16, 32), verify=False, **GREEDY)
    with counters.expect(captures=0):
        for width in range(1, 61):
            check(manager, table, toys.packed_request([(1, 2, 2 * width)]))
    assert len(manager.graphs()) == 3
    few = toys.captured(table, token_budgets=(8, 16, 32), max_graphs=3, **GREEDY)
    assert len(few.graphs()) == 3
    by_bytes = toys.captured(table, token_budgets=(8, 16, 32), max_graph_bytes=manager.graphs()[0].nbytes + 1, **GREEDY)
    assert by_bytes.snapshot()["graph_bytes"] <= manager.graphs()[0].nbytes + 1
    assert [graph.token_budget for graph in by_bytes.graphs()] == [32]
    assert {skip["code"] for skip in by_bytes.snapshot()["not_captured"]} == {"max-graph-bytes"}
    check(by_bytes, table, toys.packed_request([(1, 2, 2), (1, 4, 4)]))


def test_hazard_28_the_most_graphs() -> None:
    """`max_graphs` counts paths, budgets and axis keys together: the largest are kept, the rest run eagerly with the reason."""
    table = toys.tiled_table()
    manager = toys.captured(table, max_graphs=4, token_budgets=(6, 12, 24, 48), **GREEDY)
    assert [(graph.path, graph.token_budget) for graph in manager.graphs()] == [("global", size) for size in (48, 24, 12, 6)]
    request = toys.tiled_request([(1, 2), (0, 0)])
    assert toys.largest_difference(manager.execute(request), toys.tiled_reference(table, request)) <= TOLERANCE
    assert misses(manager) == {"max-graphs": 1}


def test_hazard_29_rows_are_shared_largest_first(table: toys.PackedTable) -> None:
    """Largest first, and the rows of all graphs of a path are one buffer, counted once: bytes grow with metadata only."""
    table.segment_capacities = ()
    manager = toys.captured(table, token_budgets=(8, 16, 32, 64), **GREEDY)
    graphs = manager.graphs()
    assert [graph.token_budget for graph in graphs] == [64, 32, 16, 8]
    storages = {g.inputs.values["pixels"].untyped_storage().data_ptr() for g in manager._captured.set.graphs.values()}
    assert len(storages) == 1
    pixels = 64 * 4 * toys.CHANNELS * 4
    assert graphs[0].nbytes >= pixels
    assert sum(graph.nbytes for graph in graphs[1:]) < pixels
    assert manager.snapshot()["graph_bytes"] == sum(graph.nbytes for graph in graphs)


@pytest.mark.parametrize("end", ["clear", "del", "recapture"])
def test_hazard_30_memory_goes_with_the_graphs(end: str, table: toys.PackedTable) -> None:
    """Buffers and outputs die with `clear()`, with the manager, and when graphs are made anew."""
    manager = toys.captured(table, **GREEDY)
    check(manager, table, toys.packed_request([(1, 4, 4)]))
    old = [weakref.ref(graph.output) for graph in manager._captured.set.graphs.values()]
    old += [weakref.ref(buffer.tensor) for buffer in row_buffers(manager)]
    old += [weakref.ref(graph.inputs.state.buffers.block) for graph in manager._captured.set.graphs.values()]
    if end == "clear":
        manager.clear()
    elif end == "del":
        del manager
    else:
        table.tower.merge.weight = nn.Parameter(table.tower.merge.weight.detach().clone())
        check(manager, table, toys.packed_request([(1, 4, 4)]))
    gc.collect()
    assert [reference for reference in old if reference() is not None] == []


def test_hazard_31_one_budget_out_of_memory(table: toys.PackedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """That budget is left out with the reason, what it had is given back, and everything else works."""
    real, lost = EncoderGraph.record, []

    def record(self: EncoderGraph, args: Sequence[Any] = ()) -> None:
        if self.key.token_budget == 64:
            lost.append(weakref.ref(self.inputs.values["pixels"]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        real(self, args)

    monkeypatch.setattr(EncoderGraph, "record", record)
    manager = toys.captured(table, token_budgets=(16, 64), **GREEDY)
    gc.collect()
    assert lost
    assert all(reference() is None for reference in lost)
    assert {key.token_budget for key in manager._captured.set.graphs} == {16}
    assert {(skip["token_budget"], skip["code"]) for skip in manager.snapshot()["not_captured"]} == {(64, "out-of-memory")}
    check(manager, table, toys.packed_request([(1, 16, 16), (1, 4, 4), (1, 8, 8)]))
    assert misses(manager) == {"out-of-memory": 1}
    assert manager.snapshot()["graph_hits"] == 2


def test_hazard_32_plans_by_measured_cost(table: toys.PackedTable) -> None:
    """Serial replays that lose to one eager batch are not made, and an eager run that loses is not either."""
    table.segment_capacities = ()
    manager = toys.captured(table, token_budgets=(8, 64), max_items_per_batch=8, packing="cost")
    request = toys.packed_request([(1, 4, 8)] * 6)
    small, large = GraphKey("main", 8), GraphKey("main", 64)
    for small_ms, large_ms, eager, expected in (
        (1.0, 5.5, EagerCost(9.0, 0.0), [large]),  # one large replay beats six small ones
        (1.0, 9.0, EagerCost(9.0, 0.0), [small] * 6),
        (1.0, 9.0, EagerCost(2.0, 0.05), []),  # 2 + 48 * 0.05 = 4.4
        (1.0, 9.0, None, [small] * 6),  # never measured: the last resort
    ):
        graphs = manager._captured.set.graphs
        graphs[small].time, graphs[large].time = ReplayTime(small_ms), ReplayTime(large_ms)
        manager._captured.planner = manager._captured.new_planner(None if eager is None else {"main": eager})
        before = misses(manager).get("eager-cheaper", 0)
        with replays() as seen:
            check(manager, table, request)
        assert [graph.key for graph in seen] == expected
        assert misses(manager).get("eager-cheaper", 0) - before == (0 if expected else 6)


@pytest.mark.parametrize("capacities", [(), (1,), (1, 4), (2, 3, 9), (5,)])
@pytest.mark.parametrize(("items", "frames"), [(1, 0), (1, 1), (3, 2), (3, 5), (4, 12)])
def test_hazard_33_graphs_that_no_input_can_reach(
    items: int, frames: int, capacities: tuple[int, ...], table: toys.PackedTable
) -> None:
    """Every captured graph is chosen by some legal batch, and every legal batch finds its graph: both by brute force."""
    table.segment_capacities = capacities
    manager = toys.captured(
        table, token_budgets=(4, 12), max_items_per_batch=items, max_frames_per_batch=frames, verify=False, **GREEDY
    )
    planner = manager._captured.planner
    assert planner is not None
    most = frames or items
    kinds = [EncoderItemSpec(4 * tokens, tokens, None, count) for tokens in (1, 4, 12) for count in range(1, tokens + 1)]
    needed = set()
    for size in range(1, items + 1):
        for batch in itertools.combinations_with_replacement(kinds, size):
            tokens, segments = sum(spec.output_tokens for spec in batch), sum(spec.frames for spec in batch)
            if tokens <= 12 and segments <= most and (frames or segments == size):
                axes = planner.axis_keys(batch, "main", segments)
                assert axes is not None
                needed.add(GraphKey("main", 4 if tokens <= 4 else 12, axes))
    # A small graph with room for more segments than it has tokens is the one exception: frames are not tied to tokens.
    assert needed <= set(manager._captured.set.graphs)
    assert all(key.axis_keys and key.token_budget == 4 for key in set(manager._captured.set.graphs) - needed)
    assert manager.get_num_graphs_to_capture() == len(manager._captured.set.graphs)


def test_hazard_33_budgets_below_one_tile() -> None:
    """A budget in which not even one tile fits makes no graph."""
    table = toys.tiled_table()
    manager = toys.captured(table, path_token_budgets={"global": (4, 12), "local": (2, 3, 8)}, **GREEDY)
    assert [(graph.path, graph.token_budget) for graph in manager.graphs()] == [("global", 12), ("local", 8)]
    assert manager.get_num_graphs_to_capture() == 2
    assert manager.snapshot()["not_captured"] == []
    request = toys.tiled_request([(1, 1), (0, 0)])
    assert toys.largest_difference(manager.execute(request), toys.tiled_reference(table, request)) <= TOLERANCE
    assert misses(manager) == {}


class CountingTable(toys.PackedTable):
    """Counts what an adapter is asked."""

    def __init__(self, tower: toys.PackedTower) -> None:
        super().__init__(tower)
        self.asked: Counter[tuple[str, Hashable]] = Counter()

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        self.asked["item_keys", modality] += 1
        return super().item_keys(modality, inputs)

    def item_size(self, key: Any) -> ItemSize:
        self.asked["item_size", key] += 1
        return super().item_size(key)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        self.asked["item_metadata", key] += 1
        return super().item_metadata(key, path)


@pytest.mark.parametrize("captured", [True, False])
def test_hazard_34_metadata_once(captured: bool, table: toys.PackedTable) -> None:
    """Sizes are parsed once per call and modality, over several batches, replayed or eager; metadata is made once per key."""
    counting = CountingTable(table.tower)
    manager = (toys.captured if captured else toys.manager)(counting, token_budgets=(8, 16), **GREEDY)
    images: list[toys.Grid] = [(1, 4, 4), (1, 20, 20), (1, 8, 8), (1, 4, 4), (1, 2, 2)]
    clips: list[toys.Grid] = [(2, 2, 2), (4, 2, 2), (9, 4, 4)]
    calls = 4
    for seed in range(calls):
        check(manager, table, toys.packed_request(images, clips, seed))
    assert counting.asked["item_keys", "image"] == counting.asked["item_keys", "video"] == calls
    keys = set(images + clips)
    assert {key for name, key in counting.asked if name == "item_metadata"} == keys
    assert all(counting.asked["item_metadata", key] == 1 for key in keys)
    assert all(counting.asked["item_size", key] <= 2 for key in keys), "once for the sizes, once to check the metadata"


def test_hazard_34_one_copy_of_metadata_for_a_layout(table: toys.PackedTable) -> None:
    """The buffers' metadata is one block: one copy where the layout is another than the last, none where it is the same."""
    manager = toys.captured(table, token_budgets=(16,), **GREEDY)
    first, second = toys.packed_request([(1, 4, 4), (1, 2, 6)]), toys.packed_request([(1, 2, 6), (1, 4, 4)])
    copied: list[int] = []
    real = torch.Tensor.copy_

    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dtype == torch.uint8:
            copied.append(self.nbytes)
        return real(self, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "copy_", copy_):
        counts = []
        for request in (first, first, second, second, first):
            copied.clear()
            check(manager, table, request)
            counts.append(len(copied))
    assert counts == [1, 0, 1, 0, 1]


def test_hazard_35_clearing_one_manager_while_another_replays(table: toys.PackedTable) -> None:
    """Two managers of one tower: one is captured and cleared over and over, the other serves right features meanwhile."""
    serving, other = toys.captured(table, **GREEDY), toys.manager(table, token_budgets=(8,), verify=False, **GREEDY)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6)])
    want = check(serving, table, request)
    stop, failures = threading.Event(), []

    def serve() -> None:
        try:
            while not stop.is_set():
                if not same_bits(serving.execute(request), want):
                    failures.append("wrong features")
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(20):
        other.capture()
        check(other, table, request)
        other.clear()
    stop.set()
    thread.join()
    assert failures == []
    assert misses(serving) == {}


# --- being told nothing ----------------------------------------------------------------------------------------------


def test_hazard_36_counts_and_reasons() -> None:
    """One count per item and path: hits and misses make up everything that was asked for, reasons make up the misses."""
    table = toys.twin_table()
    manager = toys.captured(table, path_token_budgets={"fine": (4, 8), "coarse": (4, 8)}, **GREEDY)
    expected: Counter[str] = Counter()
    asked = 0
    requests: list[list[toys.TwinKey]] = [
        [(1, 4, 4, 0), (1, 2, 2, 2)],
        [(1, 8, 8, 2), (1, 2, 2, 0)],
        [(1, 8, 8, 7)],
        [(9, 2, 2, 1), (1, 4, 4, 1), (1, 4, 4, 5)],
    ]
    for keys in requests:
        manager.execute(toys.twin_request(keys))
        asked += sum(1 + (key[3] > 0) for key in keys)
        for t, h, w, tags in keys:
            many = t > manager.ladders.max_frames
            expected["too-many-frames"] += many * (1 + (tags > 0))
            expected["too-large"] += (not many) * ((t * h * w // 4 > 8) + (tags * toys.TAG_TOKENS > 8))
    snapshot = manager.snapshot()
    assert snapshot["miss_reasons"] == {code: count for code, count in expected.items() if count}
    assert snapshot["graph_misses"] == expected.total()
    assert snapshot["graph_hits"] + snapshot["graph_misses"] == asked
    assert sum(graph["items"] for graph in snapshot["graphs"]) == snapshot["graph_hits"]
    assert sum(graph["replays"] for graph in snapshot["graphs"]) == snapshot["replays"]
    stats = manager.get_cumulative_stats()
    assert (stats["graph_hits"], stats["graph_misses"]) == (snapshot["graph_hits"], snapshot["graph_misses"])
    assert stats["hit_rate"] == snapshot["graph_hits"] / asked


class MeanTable(toys.PackedTable):
    """A tower for which padding is not safe: it looks at all rows of the graph."""

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        return super().forward(path, values) + values["pixels"].mean()


def test_hazard_37_every_flag_acts(table: toys.PackedTable, caplog: pytest.LogCaptureFixture) -> None:
    """What an option says is seen in what happens; one that cannot act is an error or a logged line."""
    for wrong in ({"look_ahead": True, "packing": "cost"}, {"mode": "eager", "compiler": "aot_eager"}):
        with pytest.raises(OptionError):
            toys.manager(table, **wrong)
    with pytest.raises(OptionError, match="packng"):
        EncoderConfig.from_dict({"packng": "greedy"})
    with pytest.raises(OptionError, match="path_token_budgets names the path 'mian'"):
        toys.manager(table, path_token_budgets={"mian": (8,)})
    images = toys.packed_table()
    images.modalities = {"image": images.modalities["image"]}
    with caplog.at_level(logging.WARNING, logger="vit_compile"):
        toys.manager(images, max_frames_per_batch=8)
    assert "max_frames_per_batch=8 has no effect" in caplog.text

    table.segment_capacities = ()
    request = toys.packed_request([(1, 2, 2)] * 4 + [(1, 4, 18)])  # tokens 1, 1, 1, 1, 18
    plans = []
    for look_ahead in (False, True):
        manager = toys.captured(table, token_budgets=(8, 20, 32), look_ahead=look_ahead, verify=False, **GREEDY)
        with replays() as seen:
            check(manager, table, request)
        plans.append([graph.key.token_budget for graph in seen])
    assert plans == [[32], [8, 20]]

    mean = MeanTable(table.tower)
    trusted = toys.captured(mean, token_budgets=(8,), verify=False, **GREEDY)
    verified = toys.captured(mean, token_budgets=(8,), verify=True, **GREEDY)
    assert trusted.is_captured()
    assert not verified.is_captured()
    assert {skip["code"] for skip in verified.snapshot()["not_captured"]} == {"padding-unsafe"}
    one = toys.packed_request([(1, 4, 4)])
    (want,) = toys.packed_reference(table, one)
    assert toys.largest_difference(verified.execute(one), [want + one["pixel_values"].mean()]) <= TOLERANCE
    assert misses(verified) == {"padding-unsafe": 1}


def test_hazard_38_padding_is_reported(table: toys.PackedTable) -> None:
    """Padded share in total and per graph, and the time that each replay was measured to take."""
    table.segment_capacities = ()
    manager = toys.captured(table, token_budgets=(8, 16), packing="cost", max_items_per_batch=1)
    for width in (5, 3, 8):
        check(manager, table, toys.packed_request([(1, 2, 2 * width)]))
    snapshot = manager.snapshot()
    replayed = sum(graph["replays"] * graph["token_budget"] for graph in snapshot["graphs"])
    assert snapshot["tokens"] == {"replayed": 16, "eager": 0, "padding": replayed - 16}
    assert snapshot["padded_share"] == (replayed - 16) / replayed
    for graph in snapshot["graphs"]:
        rows = graph["replays"] * graph["token_budget"]
        assert graph["padded_share"] == ((rows - graph["tokens"]) / rows if rows else 0.0)
        assert graph["predicted_ms"] > 0
    measured = {graph.token_budget: graph.predicted_ms for graph in manager.graphs()}
    planner = manager._captured.planner
    assert planner is not None
    spec = EncoderItemSpec(20, 5)
    assert planner.predicted_ms([spec], planner.plan([spec])) == min(ms for ms in measured.values() if ms is not None)


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("packing", ["greedy", "cost", "eager"])
def test_hazard_39_one_poisoned_image_among_five(packing: str, value: float, table: toys.PackedTable) -> None:
    """Through the public call: the other four have the same bits as before, and so has everybody in the next call."""
    manager = toys.manager(table) if packing == "eager" else toys.captured(table, packing=packing)
    grids: list[toys.Grid] = [(1, 4, 4), (1, 2, 6), (1, 8, 8), (1, 2, 2), (1, 4, 6)]
    request = toys.packed_request(grids)
    clean = check(manager, table, request)
    starts = [0, *itertools.accumulate(t * h * w for t, h, w in grids)]
    for image in range(5):
        pixels = request["pixel_values"].clone()
        pixels[starts[image] + 1] = value
        got = manager.execute({**request, "pixel_values": pixels})
        others = [number for number in range(5) if number != image]
        assert same_bits([got[number] for number in others], [clean[number] for number in others])
        assert not torch.equal(got[image], clean[image])
        check(manager, table, toys.packed_request([(1, 2, 2)]))
        assert same_bits(manager.execute(request), clean), "the padding kept something"


def test_hazard_39_on_both_paths() -> None:
    """The same with windows, frames and a second path: NaN in one item's patches, or in its tags, stays with that item."""
    table = toys.twin_table()
    manager = toys.captured(table, token_budgets=(16, 64), max_items_per_batch=5, **GREEDY)
    keys: list[toys.TwinKey] = [(1, 4, 4, 1), (3, 2, 4, 0), (1, 2, 2, 2), (2, 2, 2, 3), (1, 6, 4, 0)]
    request = toys.twin_request(keys)
    clean = manager.execute(request)
    rows = {
        "pixel_values": [0, *itertools.accumulate(t * h * w for t, h, w, _ in keys)],
        "tag_values": [0, *itertools.accumulate(key[3] for key in keys)],
    }
    for name, starts in rows.items():
        for item in range(5):
            if starts[item] == starts[item + 1]:
                continue
            poisoned = request[name].clone()
            poisoned[starts[item]] = NAN
            got = manager.execute({**request, name: poisoned})
            others = [number for number in range(5) if number != item]
            assert same_bits([got[number] for number in others], [clean[number] for number in others])
            assert bool(got[item].isnan().any())
    assert same_bits(manager.execute(request), clean)


class GarbageTower(toys.PackedTower):
    """Attention that leaves rows past the last boundary as NaN, as kernels from a poisoned allocator do."""

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x = self.embed(pixels) + torch.sin(positions.to(pixels.dtype) / 3)[:, None]
        for layer in self.qkv:
            q, k, v = layer(x).view(-1, 3, toys.HEADS, toys.WIDTH // toys.HEADS).unbind(1)
            mixed = toys.varlen_attention(q, k, v, cu_seqlens, max_seqlen, 0.7).flatten(1)
            mixed[int(cu_seqlens[-1]) :] = NAN
            x = x + mixed
        return self.merge(x.view(-1, 4 * toys.WIDTH))


def test_hazard_40_rows_past_the_last_boundary(table: toys.PackedTable) -> None:
    """They come out finite with our attention; with one that leaves NaN there, no real row of this or a later call has any."""
    manager = toys.captured(table, token_budgets=(16,), **GREEDY)
    garbage = GarbageTower().eval()
    garbage.load_state_dict(table.tower.state_dict())
    spoiled = toys.captured(toys.PackedTable(garbage), token_budgets=(16,), **GREEDY)
    assert spoiled.is_captured()
    for grids in ([(1, 2, 2)], [(1, 8, 8)], [(1, 2, 2), (1, 4, 4)], [(1, 2, 2)]):
        request = toys.packed_request(grids)
        with replays() as seen:
            check(manager, table, request)
        assert all(bool(graph.output.isfinite().all()) for graph in seen)
        with replays() as seen:
            check(spoiled, table, request)
        full = sum(h * w for _, h, w in grids) == 64
        assert full or any(bool(graph.output.isnan().any()) for graph in seen), "the garbage tower leaves no garbage"


def test_bad_grids_are_named_before_any_replay(table: toys.PackedTable) -> None:
    """The host sizes are checked first, so that no buffer is written with a wrong layout (hazards 5, 13)."""
    manager = toys.captured(table)
    with replays() as seen, pytest.raises(GridError, match=r"grid 1 of image_grid_thw is \(1, 3, 4\)"):
        manager.execute({"pixel_values": torch.zeros(28, toys.CHANNELS), "image_grid_thw": [(1, 4, 4), (1, 3, 4)]})
    assert seen == []
