"""What no trial at capture could show: the first real batches of a graph are compared with each item alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.runtime import toys
from tests.runtime.toys import HandWritten, PackedTable, captured, largest_difference, packed_request, packed_table
from vit_compile.errors import SkipError
from vit_compile.runtime.capture_inputs import EncoderCudaGraphReplayBuffers

GREEDY: dict[str, Any] = {"packing": "greedy", "token_budgets": (8, 16), "max_items_per_batch": 4}


class Odd(PackedTable):
    """A packed table whose forward does something to the features that made-up metadata of zeros does not show."""

    kind = ""

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        values = dict(values)
        if self.kind == "writes":
            values["positions"].mul_(2)
        features = super().forward(path, values)
        late = (values["positions"].view(-1, 4)[:, :1] > 3).to(features)
        if self.kind == "mean":
            return features + late * features.mean(0)
        if self.kind == "rows":
            return features + late * len(features) / 10
        if self.kind == "segments":
            return features + late * len(values["cu_seqlens"]) / 10
        if self.kind == "neighbours":
            return features + late * features.cumsum(0)
        return features


def odd(kind: str) -> Odd:
    """One of the kinds."""
    table = Odd(packed_table().tower)
    table.kind = kind
    return table


def alone(table: PackedTable, grids: list[toys.Grid]) -> list[torch.Tensor]:
    """Each item through the table's forward with exactly its rows."""
    request, found, start = packed_request(grids), [], 0
    for t, h, w in grids:
        rows = t * h * w
        values = {"pixels": request["pixel_values"][start : start + rows], **table.item_metadata((t, h, w), "main")}
        with torch.no_grad():
            found.append(table.forward("main", {**{k: v.clone() for k, v in values.items()}, "max_seqlen": rows}))
        start += rows
    return found


REQUESTS: list[list[toys.Grid]] = [[(1, 4, 8)], [(1, 4, 4)], [(1, 4, 4), (1, 2, 6)], [(1, 4, 6), (1, 2, 4), (1, 2, 4)]]


@pytest.mark.parametrize("kind", ["mean", "rows", "segments", "neighbours", "writes"])
def test_forwards_that_only_real_metadata_gives_away(kind: str) -> None:
    """Every feature is what its item gives alone, from the first call on; graphs that differ are not used again."""
    table = odd(kind)
    manager = captured(table, **GREEDY)
    assert manager.graphs(), "the trial at capture sees nothing"
    for _ in range(3):
        for grids in REQUESTS:
            assert largest_difference(manager.execute(packed_request(grids)), alone(table, grids)) < 1e-5, grids
    found = manager.snapshot()
    assert found["miss_reasons"]["padding-unsafe"] > 0
    assert {row["code"] for row in found["not_captured"]} == {"padding-unsafe"}
    assert found["graph_hits"] + found["graph_misses"] == found["items"]


@pytest.mark.parametrize("kind", ["mean", "rows", "neighbours"])
def test_without_the_comparison_the_numbers_would_be_wrong(kind: str) -> None:
    """The control: `verify=False` serves wrong features."""
    table = odd(kind)
    manager = captured(table, verify=False, **GREEDY)
    assert max(largest_difference(manager.execute(packed_request(g)), alone(table, g)) for g in REQUESTS) > 1e-2


def test_a_good_graph_is_compared_only_until_it_has_shown_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A use, one with padding, one with several items; then never again."""
    table = packed_table()
    manager = captured(table, token_budgets=(16,), max_items_per_batch=4, packing="greedy", strict=True)
    eager = []
    run = manager.model.encoder_eager_forward
    monkeypatch.setattr(manager.model, "encoder_eager_forward", lambda request, path: (eager.append(1), run(request, path))[1])
    for grids, runs in (
        ([(1, 8, 8)], 1),  # full, alone: on the graph for one segment
        ([(1, 8, 8)], 0),
        ([(1, 4, 4)], 1),  # padding
        ([(1, 2, 4)], 0),
        ([(1, 4, 4), (1, 4, 4)], 2),  # the graph for 16 segments: padding and company at once
        ([(1, 2, 4), (1, 4, 4), (1, 2, 2)], 0),
    ):
        eager.clear()
        request = packed_request(grids)
        assert largest_difference(manager.execute(request), toys.packed_reference(table, request)) < 1e-5
        assert len(eager) == runs, grids
    assert manager.snapshot()["graph_misses"] == 0


def test_strict_raises_where_the_first_use_shows_a_difference() -> None:
    """Under `strict` it is an error, and the next call of that size too, since there is no graph for it any more."""
    manager = captured(odd("mean"), strict=True, **GREEDY)
    for _ in range(2):
        with pytest.raises(SkipError, match="padding-unsafe"):
            manager.execute(packed_request([(1, 4, 4)]))


def test_replay_values_that_are_too_short_are_noticed() -> None:
    """A hand-written model that hands over fewer rows than its items have is caught, and its items come out right."""

    class Short(HandWritten):
        def prepare_encoder_cudagraph_replay_buffers(
            self, mm_kwargs: Mapping[str, Any], path: str, axis_keys: Any
        ) -> EncoderCudaGraphReplayBuffers:
            return EncoderCudaGraphReplayBuffers({name: mm_kwargs[name][:-1] for name in ("rows", "scale")})

    model = Short()
    manager = captured(model, packing="greedy")
    for counts in ([3], [2, 1], [4]):
        request = toys.written_request(counts)
        assert largest_difference(manager.execute(request), toys.written_reference(model, request)) < 1e-5
    assert manager.snapshot()["graph_hits"] == 0


def test_what_cannot_run_eagerly_is_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """An eager path that fails says nothing about the graph: it is used, and the log says why it was not compared."""

    class NoEager(HandWritten):
        def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
            raise RuntimeError("no eager path here")

    model = NoEager()
    manager = captured(model, packing="greedy")
    request = toys.written_request([3])
    assert largest_difference(manager.execute(request), toys.written_reference(model, request)) < 1e-5
    assert "no eager path here" in caplog.text
    assert manager.snapshot()["graph_hits"] == 1


def test_items_behind_a_refusal_in_the_same_call_run_alone() -> None:
    """The first of three batches refuses the graph: the items of the others see nobody either."""
    table = odd("neighbours")
    table.segment_capacities = (1,)
    grids: list[toys.Grid] = [(1, 4, 4)] * 6
    manager = captured(table, token_budgets=(8,), max_items_per_batch=2, packing="greedy")
    for _ in range(2):
        assert largest_difference(manager.execute(packed_request(grids)), alone(table, grids)) < 1e-5
    # In the second call each item has the graph for one segment to itself, which is right.
    assert manager.snapshot()["miss_reasons"] == {"padding-unsafe": 6}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_first_image_shows_nothing(value: float) -> None:
    """It neither gets a good graph refused nor lets a bad one pass: the next batch is compared."""
    good, bad = packed_table(), odd("rows")
    request = packed_request([(1, 4, 4)])
    broken = {**request, "pixel_values": torch.full_like(request["pixel_values"], value)}
    for table, hits in ((good, 2), (bad, 1)):
        manager = captured(table, **GREEDY)
        assert not bool(manager.execute(broken)[0].isfinite().all())
        assert largest_difference(manager.execute(request), alone(table, [(1, 4, 4)])) < 1e-5
        assert manager.snapshot()["graph_hits"] == hits


def test_features_of_zeros_show_nothing() -> None:
    """A black image before a forward without bias: the next batch is compared."""

    class Counting(HandWritten):
        def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
            return super().encoder_cudagraph_forward(values, path) * (1 + len(values["rows"]))

    model = Counting()
    manager = captured(model, packing="greedy")
    black = {**toys.written_request([3]), "rows": torch.zeros(3, 4)}
    manager.execute(black)
    request = toys.written_request([3])
    want = [4 * feature for feature in toys.written_reference(model, request)]
    assert largest_difference(manager.execute(request), want) < 1e-5


@pytest.mark.parametrize(
    ("failures", "error"), [(1, torch.OutOfMemoryError("full")), (5, torch.OutOfMemoryError("full")), (2, RuntimeError("no"))]
)
def test_an_eager_run_that_fails_for_once_is_made_up_for(
    failures: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that does not suffice is no reason to trust a graph, nor is any other error at first."""
    table = odd("rows")
    manager = captured(table, **GREEDY)
    run, left = manager.model.encoder_eager_forward, [error] * failures

    def failing(request: Mapping[str, Any], path: str) -> torch.Tensor:
        if left:
            raise left.pop()
        return run(request, path)

    monkeypatch.setattr(manager.model, "encoder_eager_forward", failing)
    for _ in range(failures):
        manager.execute(packed_request([(1, 4, 4)]))
    assert largest_difference(manager.execute(packed_request([(1, 4, 4)])), alone(table, [(1, 4, 4)])) < 1e-5


def test_graphs_that_move_to_a_new_pool_are_still_compared() -> None:
    """A byte cap makes the held graphs be recorded again: what they have not shown stays to be shown."""

    class Seeing(HandWritten):
        def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
            return super().encoder_cudagraph_forward(values, path).cumsum(0)

    for cap in (700, 900, 1100, 1300):
        model = Seeing(axes=((4,),))
        manager = captured(model, packing="greedy", token_budgets=(8, 16, 32), max_items_per_batch=4, max_graph_bytes=cap)
        assert manager.graphs()
        request = toys.written_request([3, 4])
        want = [feature.cumsum(0) for feature in toys.written_reference(model, request)]
        assert largest_difference(manager.execute(request), want) < 1e-5, cap


def test_a_trial_with_one_example_leaves_company_to_be_shown() -> None:
    """No example is small enough for two: the first batch of several items is compared."""

    class OneExample(Odd):
        def example_key(self, tokens: int) -> Any:
            return (1, 2, 2 * tokens) if tokens >= 4 else None

    table = OneExample(packed_table().tower, segment_capacities=(1, 16))
    table.kind = "neighbours"
    manager = captured(table, token_budgets=(8,), max_items_per_batch=4, packing="greedy")
    assert {graph.key.axis_keys: graph.unseen for graph in manager._captured.set.graphs.values()} == {
        (1,): set(),
        (16,): {"company"},
    }
    grids: list[toys.Grid] = [(1, 4, 4), (1, 4, 4)]
    assert largest_difference(manager.execute(packed_request(grids)), alone(table, grids)) < 1e-5


def test_an_eager_path_in_a_wider_dtype_refuses_no_good_graph() -> None:
    """The comparison is made in the graph's dtype: bfloat16 features beside float32 ones differ by rounding alone."""

    class Wide(HandWritten):
        def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
            wide = {name: mm_kwargs[name].float() for name in ("rows", "scale")}
            return torch.tanh(wide["rows"] @ self.weights.float()[:4]) * wide["scale"][:, None]

    manager = captured(Wide().to(torch.bfloat16), packing="greedy", dtype=torch.bfloat16)
    request = toys.written_request([3, 1])
    request |= {name: request[name].to(torch.bfloat16) for name in ("rows", "scale")}
    manager.execute(request)
    assert manager.snapshot()["graph_hits"] == 2
