"""Two paths: the four found / not-found rows of the documented dual-path tower, and that the paths stay apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.runtime import toys
from vit_compile.errors import BudgetError, ProtocolError
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graph_config import AxisKeys
from vit_compile.runtime.graphs import EncoderGraph
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.protocol import SupportsDirectFill
from vit_compile.runtime.table_encoder import TableEncoder

TOLERANCE = 1e-5
GLOBAL, LOCAL = toys.GLOBAL_TOKENS, toys.LOCAL_TOKENS


class WrittenOut:
    """A tiled table as a model that writes the contract out: the manager selects items and fills the buffers."""

    METHODS = (
        "get_encoder_cudagraph_budget_range",
        "get_encoder_cudagraph_item_specs",
        "select_encoder_cudagraph_items",
        "prepare_encoder_cudagraph_replay_buffers",
        "encoder_cudagraph_forward",
        "encoder_eager_forward",
        "postprocess_encoder_output",
    )

    def __init__(self, table: toys.TiledTable) -> None:
        self.tower = table.tower
        self._encoder = TableEncoder(table, device=torch.device("cpu"), dtype=torch.float32)
        for name in self.METHODS:
            setattr(self, name, getattr(self._encoder, name))
        declaration = dataclasses.replace(self._encoder.get_encoder_cudagraph_config(), is_reachable=None)
        self.get_encoder_cudagraph_config = lambda: declaration

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, items: int, frames: int, device: torch.device, dtype: torch.dtype, path: str, axis_keys: AxisKeys
    ) -> EncoderCudaGraphCaptureInputs:
        name, rows = ("thumbnails", GLOBAL) if path == "global" else ("tiles", LOCAL)
        return EncoderCudaGraphCaptureInputs({name: torch.zeros(token_budget // rows, *toys.TILE, dtype=dtype, device=device)})


FORMS: dict[str, Callable[[toys.TiledTable], Any]] = {"table": lambda table: table, "written out": WrittenOut}
SINGLE: dict[str, Any] = {"packing": "greedy", "path_token_budgets": {"global": (6, 12), "local": (4, 8, 16)}}


class FailingTable(toys.TiledTable):
    """Cannot be captured on some paths."""

    failing: tuple[str, ...] = ()

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        if path in self.failing:
            raise RuntimeError(f"no capture of {path}")
        return super().forward(path, values)


def without_graphs_on(paths: tuple[str, ...], form: str, **config: Any) -> tuple[EncoderCudaGraphManager, toys.TiledTable]:
    """A manager whose graphs of some paths could not be captured, and which is fine since."""
    made = toys.tiled_table()
    table = FailingTable(made.tower)
    table.failing = paths
    manager = toys.captured(FORMS[form](table), **{"verify": False, **SINGLE, **config})  # no eager runs for comparison
    table.failing = ()
    return manager, table


@contextmanager
def runs(manager: EncoderCudaGraphManager) -> Iterator[list[tuple[str, str, int]]]:
    """Notes ("replay" or "eager", path, budget or rows that came out) of everything that runs."""
    noted: list[tuple[str, str, int]] = []
    real = EncoderGraph.replay
    eager = manager.model.encoder_eager_forward

    def replay(self: EncoderGraph) -> torch.Tensor:
        noted.append(("replay", self.key.path, self.key.token_budget))
        return real(self)

    def eager_forward(mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        output = eager(mm_kwargs, path)
        noted.append(("eager", path, len(output)))
        return output

    with (
        mock.patch.object(EncoderGraph, "replay", replay),
        mock.patch.object(manager.model, "encoder_eager_forward", eager_forward),
    ):
        yield noted


def work(manager: EncoderCudaGraphManager) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Misses by (path, code), and hits by path."""
    snapshot = manager.snapshot()
    hits: dict[str, int] = {}
    for graph in snapshot["graphs"]:
        if graph["items"]:
            hits[graph["path"]] = hits.get(graph["path"], 0) + graph["items"]
    return {(miss["path"], miss["code"]): miss["items"] for miss in snapshot["misses"]}, hits


def check(manager: EncoderCudaGraphManager, table: toys.TiledTable, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Features equal the reference."""
    got = manager.execute(request)
    assert toys.largest_difference(got, toys.tiled_reference(table, request)) <= TOLERANCE
    return got


# --- the four rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_both_found_both_replay(form: str) -> None:
    """A graph for the thumbnails and one for the tiles: both replay, each the smallest that fits, chosen independently."""
    manager, table = without_graphs_on((), form)
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(1, 1), (1, 2)]))
    assert noted == [("replay", "global", 12), ("replay", "local", 16)]
    assert work(manager) == ({}, {"global": 2, "local": 2})


@pytest.mark.parametrize("form", FORMS)
def test_global_found_without_tiles_skips_the_local_path(form: str) -> None:
    """No image has tiles: the thumbnails replay, the other path does not run at all, and is counted nowhere."""
    manager, table = without_graphs_on((), form)
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(0, 0), (0, 0)]))
    assert noted == [("replay", "global", 12)]
    assert work(manager) == ({}, {"global": 2})


@pytest.mark.parametrize("form", FORMS)
def test_global_not_found_runs_eagerly_beside_a_replayed_local_path(form: str) -> None:
    """Only the thumbnails have no graph: they run eagerly and the tiles replay, in one batch."""
    manager, table = without_graphs_on(("global",), form)
    assert {key.path for key in manager._captured.set.graphs} == {"local"}
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(1, 1), (1, 2)]))
    assert noted == [("eager", "global", 2 * GLOBAL), ("replay", "local", 16)]
    assert work(manager) == ({("global", "capture-failed"): 2}, {"local": 2})


@pytest.mark.parametrize("form", FORMS)
def test_neither_found_runs_both_eagerly(form: str) -> None:
    """No graph on either path: one eager run on each, for the whole batch."""
    manager, table = without_graphs_on(("global", "local"), form)
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(1, 1), (1, 2)]))
    assert noted == [("eager", "global", 2 * GLOBAL), ("eager", "local", 3 * LOCAL)]
    assert work(manager) == ({("global", "capture-failed"): 2, ("local", "capture-failed"): 2}, {})


@pytest.mark.parametrize("form", FORMS)
def test_global_found_runs_beside_an_eager_local_path(form: str) -> None:
    """An image with more tiles than any graph takes: its tiles run eagerly, its thumbnail replays."""
    manager, table = without_graphs_on((), form)
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(3, 3)]))
    assert noted == [("replay", "global", 6), ("eager", "local", 9 * LOCAL)]
    assert work(manager) == ({("local", "too-large"): 1}, {"global": 1})


@pytest.mark.parametrize("form", FORMS)
def test_neither_found_without_tiles(form: str) -> None:
    """No graph and no tiles: an eager run of the thumbnails, and nothing on the other path."""
    manager, table = without_graphs_on(("global", "local"), form)
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(0, 0)]))
    assert noted == [("eager", "global", GLOBAL)]
    assert work(manager) == ({("global", "capture-failed"): 1}, {})


@pytest.mark.parametrize(
    ("key", "ran", "misses", "hits"),
    [
        ((1, 4, 4, 2), [("replay", "fine", 4), ("replay", "coarse", 4)], {}, {"fine": 1, "coarse": 1}),
        ((1, 4, 4, 0), [("replay", "fine", 4)], {}, {"fine": 1}),
        ((1, 8, 8, 2), [("eager", "fine", 16), ("replay", "coarse", 4)], {("fine", "too-large"): 1}, {"coarse": 1}),
        (
            (1, 8, 8, 5),
            [("eager", "fine", 16), ("eager", "coarse", 10)],
            {("fine", "too-large"): 1, ("coarse", "too-large"): 1},
            {},
        ),
    ],
)
def test_the_four_rows_by_size(
    key: toys.TwinKey, ran: list[tuple[str, str, int]], misses: dict[tuple[str, str], int], hits: dict[str, int]
) -> None:
    """The same rows where sizes decide: tokens of either path above or within its own ladder, or none."""
    table = toys.twin_table()
    manager = toys.captured(table, packing="greedy", path_token_budgets={"fine": (4, 8), "coarse": (4, 8)}, verify=False)
    request = toys.twin_request([key])
    with runs(manager) as noted:
        got = manager.execute(request)
    assert toys.largest_difference(got, toys.twin_reference(table, request)) <= TOLERANCE
    assert noted == ran
    assert work(manager) == (misses, hits)


@pytest.mark.parametrize("form", FORMS)
def test_one_image_with_tiles_among_images_without(form: str) -> None:
    """A batch of both kinds: a hit on the second path counts only images that have something there."""
    manager, table = without_graphs_on((), form)
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request([(0, 0), (2, 1)]))
    assert noted == [("replay", "global", 12), ("replay", "local", 8)]
    assert work(manager) == ({}, {"global": 2, "local": 1})


# --- memory ----------------------------------------------------------------------------------------------------------


def graph_memory(manager: EncoderCudaGraphManager) -> set[int]:
    """Storages of all graphs: outputs and buffers."""
    graphs = manager._captured.set.graphs.values()
    tensors = [graph.output for graph in graphs]
    tensors += [v for graph in graphs for v in graph.inputs.values.values() if isinstance(v, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("crops", [[(0, 0)], [(0, 0), (0, 0)], [(0, 0), (1, 2)]])
def test_features_without_tiles_are_no_graph_memory(crops: list[tuple[int, int]], form: str) -> None:
    """`assemble` hands the thumbnail's tokens on as a view of the path's output, which no replay writes again."""
    manager, table = without_graphs_on((), form)
    request = toys.tiled_request(crops)
    got = check(manager, table, request)
    storages = [feature.untyped_storage().data_ptr() for feature in got]
    assert not graph_memory(manager).intersection(storages)
    kept = [feature.clone() for feature in got]
    for number in range(1, len(got)):
        got[number].add_(1)
        assert torch.equal(got[0], kept[0]), "items overlap"
        got[number].copy_(kept[number])
    for seed in range(1, 4):
        manager.execute(toys.tiled_request(crops, seed=seed * 10))
    assert toys.largest_difference(got, toys.tiled_reference(table, request)) <= TOLERANCE


def test_a_lent_feature_without_tiles_is_graph_memory() -> None:
    """The control for the test above: with `outputs="borrow"` the same feature is a view of a graph's output."""
    manager, _ = without_graphs_on((), "table", outputs="borrow")
    (feature,) = manager.execute(toys.tiled_request([(0, 0)]))
    assert feature.untyped_storage().data_ptr() in graph_memory(manager)


@pytest.mark.parametrize("outputs", ["copy", "borrow"])
def test_the_first_paths_output_survives_the_second_paths_replay(outputs: str) -> None:
    """Graphs share a pool, so a replay may write over another graph's output: the first path's is put aside before."""
    manager, table = without_graphs_on((), "table", outputs=outputs)
    real = EncoderGraph.replay

    def replay(self: EncoderGraph) -> torch.Tensor:
        for graph in manager._captured.set.graphs.values():
            if graph is not self:
                graph.output.fill_(float("nan"))
        return real(self)

    with mock.patch.object(EncoderGraph, "replay", replay):
        check(manager, table, toys.tiled_request([(1, 2), (0, 0)]))


@pytest.mark.parametrize("form", FORMS)
def test_each_path_reads_its_own_buffers(form: str) -> None:
    """A forward gets the buffers of its path alone, and garbage in the other path's changes nothing."""
    manager, table = without_graphs_on((), form)
    buffers = {graph.path: set(graph.buffers) for graph in manager.graphs()}
    assert buffers == {"global": {"thumbnails"}, "local": {"tiles"}}
    real = EncoderGraph.replay

    def replay(self: EncoderGraph) -> torch.Tensor:
        for graph in manager._captured.set.graphs.values():
            if graph.key.path != self.key.path:
                for value in graph.inputs.values.values():
                    value.fill_(float("nan"))
        return real(self)

    with mock.patch.object(EncoderGraph, "replay", replay):
        check(manager, table, toys.tiled_request([(1, 2), (1, 1)]))


# --- ladders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_budget_of_zero_is_never_captured_or_replayed(form: str) -> None:
    """0 is on the ladder of the path that may be empty, and stands for "skip": no graph, no replay, no count."""
    table = toys.tiled_table()
    manager = toys.manager(
        FORMS[form](table), packing="greedy", path_token_budgets={"global": (6, 12), "local": (0, 4, 8)}, max_items_per_batch=2
    )
    assert manager.ladders.paths == {"global": (6, 12), "local": (0, 4, 8)}
    assert manager.get_num_graphs_to_capture() == 4
    manager.capture()
    assert sorted(graph.token_budget for graph in manager.graphs()) == [4, 6, 8, 12]
    with runs(manager) as noted:
        for crops in ([(0, 0)], [(0, 0)] * 5, [(0, 0), (1, 2)], [(1, 1), (0, 0), (0, 0), (0, 0)]):
            check(manager, table, toys.tiled_request(crops))
    assert noted
    assert all(budget > 0 for _, _, budget in noted)


def test_a_zero_where_every_item_has_tokens_is_an_error() -> None:
    """The path with a thumbnail for every image cannot be skipped: the error shows the ladder."""
    with pytest.raises(BudgetError, match=r"\(0, 6\) has a 0, and every item"):
        toys.manager(toys.tiled_table(), path_token_budgets={"global": (0, 6)})


def test_the_documented_ladders() -> None:
    """DeepSeek-OCR: 272 tokens for a thumbnail and 100 for a tile, doubling to the common maximum, which both end with."""
    table = toys.tiled_table(token_range=(272, 13824))
    table.paths = {
        "global": table.paths["global"],
        "local": type(table.paths["local"])(
            buffers=table.paths["local"].buffers, tokens_per_row=LOCAL, min_token_budget=100, allow_zero_tokens=True
        ),
    }
    manager = EncoderCudaGraphManager(table, EncoderConfig(max_items_per_batch=16), device="cpu", dtype=torch.float32)
    assert manager.ladders.paths == {
        "global": (272, 544, 1088, 2176, 4352, 8704, 13824),
        "local": (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824),
    }
    assert manager.get_num_graphs_to_capture() == 7 + 9


def test_packing_obeys_both_ladders_at_once() -> None:
    """Images are sorted by the sum over both paths, and a batch is closed where either path is full."""
    table = toys.tiled_table()
    manager = toys.captured(
        table, packing="greedy", verify=False, path_token_budgets={"global": (12, 24), "local": (8, 16)}, max_items_per_batch=8
    )
    crops = [(2, 2), (0, 0), (1, 2), (1, 1), (0, 0), (0, 0), (0, 0), (0, 0)]
    with runs(manager) as noted:
        check(manager, table, toys.tiled_request(crops))
    # Sorted: five thumbnails (6 each), 6 + 4, 6 + 8, 6 + 16. The global path is full after four images; 6 + 4 and 6 + 8 join
    # the fifth, and 16 more tokens of tiles would not fit beside them.
    assert noted == [
        ("replay", "global", 24),
        ("replay", "global", 24),
        ("replay", "local", 16),
        ("replay", "global", 12),
        ("replay", "local", 16),
    ]


def test_the_written_out_form_is_not_filled_directly() -> None:
    """The second form of these tests goes the other way through the manager: it has no fill of its own."""
    table = toys.tiled_table()
    encoder = TableEncoder(table, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(encoder, SupportsDirectFill)
    assert not isinstance(WrittenOut(table), SupportsDirectFill)


def test_a_missing_buffer_of_a_path_is_named() -> None:
    """A model that gives another path's buffers breaks the contract, and the error names the buffer."""
    table = toys.tiled_table()
    model = WrittenOut(table)
    manager = toys.manager(model, **SINGLE)
    model.prepare_encoder_cudagraph_capture_inputs = (  # type: ignore[method-assign]
        lambda *args: EncoderCudaGraphCaptureInputs({"thumbnails": torch.zeros(1, *toys.TILE)})
    )
    with pytest.raises(ProtocolError, match="no tensor for the buffer 'tiles'"):
        manager.capture()


def test_sequences_of_requests_with_and_without_tiles() -> None:
    """Alternating requests: nothing of the last one's tiles is left in the next one's features."""
    manager, table = without_graphs_on((), "table")
    requests = [toys.tiled_request(crops, seed) for seed, crops in enumerate(([(2, 2)], [(0, 0)], [(1, 1)], [(0, 0), (1, 2)]))]
    first = [check(manager, table, request) for request in requests]
    for order in ([3, 1, 0, 2], [2, 0, 3, 1]):
        for index in order:
            again: Sequence[torch.Tensor] = check(manager, table, requests[index])
            assert all(torch.equal(a, b) for a, b in zip(again, first[index], strict=True))
