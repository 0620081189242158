"""Predicted times by layout: what a graph's slope is, that it is measured, and which plans follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime import toys
from tests.runtime.toys import captured, packed_table
from vit_compile.runtime import graphs
from vit_compile.runtime.graph_config import EncoderCudaGraphConfig, EncoderPathConfig
from vit_compile.runtime.graphs import EncoderGraph, GraphKey
from vit_compile.runtime.item_spec import DEFAULT_PATH, EncoderItemSpec
from vit_compile.runtime.ladders import Ladders
from vit_compile.runtime.planner import EAGER_MARGIN, EagerCost, PlannedBatch, Planner
from vit_compile.runtime.protocol import KeepsTrialData, SupportsLayoutTiming
from vit_compile.runtime.replay_times import MANY_ITEMS, ReplayTime, candidates, squares_of, through
from vit_compile.runtime.table_encoder import TableEncoder

BASE_MS, TOKEN_MS, SQUARE_MS = 2.0, 0.25, 0.125
"""What replays take here: by themselves, for each token of the budget, and for each square of a segment."""


# --- one graph -------------------------------------------------------------------------------------------------------


def test_a_line_through_what_was_measured() -> None:
    """The measured time at the measured layout, the slope on both sides of it, and nothing below 0."""
    time = ReplayTime(5.0, 0.5, 8)
    assert [time(squares) for squares in (8, 10, 4, 0)] == [5.0, 6.0, 3.0, 1.0]
    assert ReplayTime(5.0, 2.0, 8)(0) == 0.0
    assert {ReplayTime(5.0, squares=8)(squares) for squares in (0, 8, 1000)} == {5.0}


def test_each_frame_is_a_segment() -> None:
    """A clip has the squares of its frames, not those of one long image; a batch's sum does not depend on the order."""
    assert squares_of(12, 1) == 144
    assert squares_of(12, 3) == 3 * 4**2
    assert squares_of(0, 3) == 0
    assert isinstance(squares_of(13, 3), int)


@pytest.mark.parametrize(
    ("few", "many", "slope"),
    [
        (ReplayTime(5.0, 0.0, 32), ReplayTime(3.0, 0.0, 16), 0.125),
        (ReplayTime(5.0, 0.0, 32), ReplayTime(5.0, 0.0, 16), 0.0),
        (ReplayTime(5.0, 0.0, 32), ReplayTime(6.0, 0.0, 16), 0.0),  # noise, or empty segments cost something
        (ReplayTime(5.0, 0.0, 32), ReplayTime(3.0, 0.0, 32), 0.0),
        (ReplayTime(5.0, 0.0, 32), ReplayTime(3.0, 0.0, 64), 0.0),
    ],
)
def test_the_slope_is_what_fewer_squares_save(few: ReplayTime, many: ReplayTime, slope: float) -> None:
    """Never below 0; the time is that of few items, whatever many took."""
    assert through(few, many) == ReplayTime(few.ms, slope, few.squares)


times = st.builds(ReplayTime, st.floats(0, 10), st.just(0.0) | st.floats(0, 0.5), st.integers(0, 500))


@given(st.dictionaries(st.integers(1, 30), times, min_size=1, max_size=6), st.data())
def test_the_fastest_is_among_the_candidates(ladder: dict[int, ReplayTime], data: st.DataObject) -> None:
    """Of all graphs that are large enough, for any squares that fit; and no graph is looked at in vain."""
    steps = sorted(ladder)
    found = candidates(steps, [ladder[step] for step in steps])
    for position, step in enumerate(steps):
        squares = data.draw(st.integers(0, step * step))
        assert {at for at, _ in found[position]} <= set(steps[position:])
        assert min(time(squares) for _, time in found[position]) == min(ladder[at](squares) for at in steps[position:])
        if not any(time.slope for time in ladder.values()):
            assert len(found[position]) == 1


# --- plans -----------------------------------------------------------------------------------------------------------


def planner(ladder: dict[int, ReplayTime], *, max_items: int = 8, max_frames: int = 0, eager: EagerCost | None = None) -> Planner:
    """Over graphs with these times, on one path."""
    declaration = EncoderCudaGraphConfig(
        modalities=("image",), buffer_keys=("x",), out_hidden_size=8, paths={DEFAULT_PATH: EncoderPathConfig()}
    )
    return Planner(
        declaration,
        Ladders({DEFAULT_PATH: tuple(sorted(ladder))}, max_items, max_frames),
        {GraphKey(DEFAULT_PATH, step): time for step, time in ladder.items()},
        {},
        by_cost=True,
        look_ahead=False,
        eager=None if eager is None else {DEFAULT_PATH: eager},
    )


def images(*tokens: int) -> list[EncoderItemSpec]:
    """Items of one frame."""
    return [EncoderItemSpec(count, count) for count in tokens]


def chosen(plan: Sequence[PlannedBatch]) -> list[tuple[int, int]]:
    """Items and budget of each replay."""
    return sorted((len(batch.indices), batch.choices[0].token_budget) for batch in plan)  # type: ignore[union-attr]


def partitions(items: list[Any]) -> Iterator[list[list[Any]]]:
    """All ways to put the items into batches."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for others in range(len(rest) + 1):
        for companions in itertools.combinations(range(len(rest)), others):
            left = [item for at, item in enumerate(rest) if at not in companions]
            for batches in partitions(left):
                yield [[first, *[rest[at] for at in companions]], *batches]


def least_time(specs: list[EncoderItemSpec], ladder: dict[int, ReplayTime], most: int, eager: EagerCost) -> float:
    """Of all partitions into legal batches, each by its fastest graph or eagerly; written without the planner's parts."""

    def of_batch(batch: list[EncoderItemSpec]) -> float:
        tokens = sum(spec.output_tokens for spec in batch)
        squares = sum(spec.output_tokens**2 // spec.frames for spec in batch)
        fits = sum(spec.frames for spec in batch) <= most
        if len(batch) > 1 and (tokens > max(ladder) or not fits):
            return float("inf")
        replays = [max(0.0, t.ms + t.slope * (squares - t.squares)) for step, t in ladder.items() if step >= tokens and fits]
        by_layout = any(time.slope > 0 for time in ladder.values())
        further = eager.ms_per_square * (squares - tokens**2 // 2) if by_layout else 0.0
        run = max(0.0, eager.fixed_ms + eager.ms_per_token * tokens + further)
        return min([EAGER_MARGIN * run, *replays])

    return min(sum(map(of_batch, batches)) for batches in partitions(specs))


LARGE = ReplayTime(10.0, 7.5 / 98304, 2 * 256**2)
"""Of a graph for 512 tokens: 10 ms with two items of 256, 2.5 ms with eight of 64."""


def test_many_small_items_share_a_replay_and_few_large_ones_do_not() -> None:
    """Equal totals, other squares: the large graph is fast for one and slow for the other, and the plans say so."""
    ladder = {256: ReplayTime(4.0), 512: LARGE}
    made = planner(ladder)
    small, long = images(*[64] * 8), images(256, 256)
    assert chosen(made.plan(small)) == [(8, 512)]
    assert chosen(made.plan(long)) == [(1, 256), (1, 256)]
    assert made.predicted_ms(small, made.plan(small)) == pytest.approx(2.5)
    assert made.predicted_ms(long, made.plan(long)) == 8.0
    as_one_number = planner({256: ReplayTime(4.0), 512: ReplayTime(10.0)})
    assert chosen(as_one_number.plan(small)) == [(4, 256), (4, 256)], "without the slope the case shows nothing"


def test_prices_are_not_those_of_another_layout() -> None:
    """Batches of equal tokens and frames are priced one after the other by the same planner."""
    made = planner({512: LARGE}, max_items=2)
    for specs in (images(256, 256), images(384, 128), images(256, 256)):
        squares = sum(spec.output_tokens**2 for spec in specs)
        (batch,) = made.plan(specs)
        assert made.predicted_ms(specs, [batch]) == LARGE(squares)


@pytest.mark.parametrize("frames", [1, 2, 4, 8])
def test_a_clip_is_priced_by_its_frames(frames: int) -> None:
    """The same tokens in more segments take less."""
    clip = EncoderItemSpec(512, 512, frames=frames)
    made = planner({512: LARGE}, max_frames=8)
    assert made.predicted_ms([clip], made.plan([clip])) == pytest.approx(10 + LARGE.slope * (512**2 / frames - 2 * 256**2))


@pytest.mark.parametrize("slow", [True, False])
def test_a_larger_graph_may_be_the_faster_one_for_a_layout(slow: bool) -> None:
    """Which of two graphs is faster depends on the squares of the batch."""
    ladder = {8: ReplayTime(1.0, 0.5, 0), 16: ReplayTime(5.0)}
    made = planner(ladder, max_frames=8)
    clip = EncoderItemSpec(8, 8, frames=1 if slow else 8)
    assert chosen(made.plan([clip])) == [(1, 16 if slow else 8)]
    assert made.predicted_ms([clip], made.plan([clip])) == 5.0
    with_eager = planner(ladder, max_frames=8, eager=EagerCost(4.9 / EAGER_MARGIN, 0.0))
    assert isinstance(with_eager.plan([clip])[0].choices[0], GraphKey) is False


def test_paths_have_squares_of_their_own() -> None:
    """On each path those of the tokens there; a path whose graphs have no slope has one time."""
    paths = {name: EncoderPathConfig(allow_zero_tokens=True) for name in ("x", "y", "z")}
    declaration = EncoderCudaGraphConfig(modalities=("image",), buffer_keys=("x",), out_hidden_size=8, paths=paths)
    ladder = {
        GraphKey("x", 8): ReplayTime(1.0, 0.5, 0),
        GraphKey("y", 8): ReplayTime(2.0),
        GraphKey("z", 8): ReplayTime(0.0, 0.25, 0),
    }
    made = Planner(declaration, Ladders(dict.fromkeys(paths, (8,)), 4, 0), ladder, {}, by_cost=True, look_ahead=False)
    specs = [EncoderItemSpec(1, 6, {"x": 2, "y": 3, "z": 1}), EncoderItemSpec(1, 4, {"x": 4})]
    (batch,) = made.plan(specs)
    assert made.predicted_ms(specs, [batch]) == (1 + 0.5 * (4 + 16)) + 2 + 0.25 * 1


@st.composite
def situations(draw: st.DrawFn, equal: bool) -> tuple[Any, ...]:
    """A few items, a ladder with times by layout, limits, and what eager costs."""
    ladder = draw(st.dictionaries(st.sampled_from((4, 8, 12, 16, 24)), times, min_size=1, max_size=4))
    frames = st.sampled_from((1, 1, 2, 4))
    if equal:
        specs = [EncoderItemSpec(1, draw(st.integers(1, 8)), frames=draw(frames))] * draw(st.integers(1, 6))
    else:
        specs = [EncoderItemSpec(1, draw(st.integers(1, 12)), frames=draw(frames)) for _ in range(draw(st.integers(1, 5)))]
    eager = EagerCost(draw(st.floats(0, 20)), draw(st.floats(0, 1)), 0.0, draw(st.sampled_from((0.0, 0.01, 0.25))))
    return specs, ladder, draw(st.integers(4, 8)), eager


@given(situations(equal=True))
def test_of_equal_items_the_plan_is_the_best_of_all_partitions(case: tuple[Any, ...]) -> None:
    """By brute force over all ways to share replays."""
    specs, ladder, most, eager = case
    made = planner(ladder, max_items=6, max_frames=most, eager=eager)
    assert made.predicted_ms(specs, made.plan(specs)) == pytest.approx(least_time(specs, ladder, most, eager), abs=1e-9)


@given(situations(equal=False))
def test_no_plan_is_predicted_below_the_best_of_all_partitions(case: tuple[Any, ...]) -> None:
    """Of other items the best is not always found; what is predicted is what some partition takes, never less."""
    specs, ladder, most, eager = case
    made = planner(ladder, max_items=6, max_frames=most, eager=eager)
    assert made.predicted_ms(specs, made.plan(specs)) >= least_time(specs, ladder, most, eager) - 1e-9


# --- measured --------------------------------------------------------------------------------------------------------


class Example(toys.PackedTable):
    """The packed table with items of exactly the tokens that it is asked for."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(packed_table().tower, **{"segment_capacities": (), **kwargs})

    def example_key(self, tokens: int) -> Hashable | None:
        return (1, 2, 2 * tokens)


def lengths(graph: EncoderGraph) -> list[int]:
    """Of the segments in a graph's buffers, in tokens."""
    return [rows // 4 for rows in graph.inputs.values["cu_seqlens"].diff().tolist() if rows]


def milliseconds(budget: int, segments: Sequence[int]) -> float:
    """What a replay takes here."""
    return BASE_MS + TOKEN_MS * budget + SQUARE_MS * sum(length**2 for length in segments)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Replays take what `milliseconds` says of the layout in the buffers; (budget, lengths of segments) of each that is timed."""
    seen = []

    def least_ms(replay: Any, device: torch.device) -> tuple[float, float]:
        graph = replay.__self__
        seen.append((graph.key.token_budget, lengths(graph)))
        return 0.0, milliseconds(*seen[-1])

    monkeypatch.setattr(graphs, "least_ms", least_ms)
    return seen


def test_the_slope_of_a_graph_is_measured(timed: list[tuple[int, list[int]]]) -> None:
    """With two layouts of the whole budget; the line is right for every other one, and the graph's own time is that of few."""
    made = captured(Example(), token_budgets=(16, 64), max_items_per_batch=8, max_frames_per_batch=8)
    assert timed == [(64, [8] * 8), (64, [32] * 2), (16, [2] * 8), (16, [8] * 2)]
    for key, graph in made._captured.set.graphs.items():
        budget = key.token_budget
        assert graph.time is not None
        assert graph.time.slope == pytest.approx(SQUARE_MS)
        for segments in ([budget], [budget // 4] * 4, [1] * 8, [5, 3, 1]):
            assert graph.time(sum(n * n for n in segments)) == pytest.approx(milliseconds(budget, segments))
        assert graph.predicted_ms == milliseconds(budget, [budget // 2] * 2)
        assert lengths(graph) == [budget // 2] * 2, "eager runs are timed on few items"
    assert {row["predicted_ms"] for row in made.snapshot()["graphs"]} == {milliseconds(b, [b // 2] * 2) for b in (16, 64)}


def test_what_was_measured_reaches_the_plans(timed: list[tuple[int, list[int]]]) -> None:
    """Images and clips through a captured encoder: the predicted time is that of the layout in the buffers."""
    made = captured(Example(), token_budgets=(16, 64), max_items_per_batch=8, max_frames_per_batch=8)
    assert made._captured.planner is not None
    for grids, clips in (([(1, 4, 4)] * 4, []), ([(1, 2, 32)], []), ([], [(4, 2, 8)]), ([(1, 4, 4)], [(2, 4, 4), (2, 2, 2)])):
        made.execute(toys.packed_request(grids, clips))
        specs = made.model.get_encoder_cudagraph_item_specs(toys.packed_request(grids, clips))
        (batch,) = plan = made._captured.planner.plan(specs)
        graph = made._captured.set.graphs[batch.choices[0]]
        want = milliseconds(graph.key.token_budget, lengths(graph))
        assert made._captured.planner.predicted_ms(specs, plan) == pytest.approx(want)
        assert sum(lengths(graph)) == sum(spec.output_tokens for spec in specs), "it is the graph that was replayed"


@pytest.mark.parametrize(
    ("segments", "short"),
    [
        (1, [32]),
        (2, [32]),
        (3, [32]),
        (4, [16] * 4),
        (MANY_ITEMS, [64 // MANY_ITEMS] * MANY_ITEMS),
        (2 * MANY_ITEMS, [64 // MANY_ITEMS] * MANY_ITEMS),
    ],
)
def test_many_items_are_as_many_as_there_is_room_for(timed: list[tuple[int, list[int]]], segments: int, short: list[int]) -> None:
    """Up to 16; where there is room for less than four, one item that fills half."""
    made = captured(Example(), token_budgets=(64,), max_items_per_batch=segments, max_frames_per_batch=0)
    few = min(segments, 2)
    assert timed == [(64, short), (64, [64 // few] * few)]
    (graph,) = made._captured.set.graphs.values()
    assert graph.time is not None
    assert graph.time.slope == pytest.approx(SQUARE_MS, rel=0.05)


@pytest.mark.parametrize("error", [ValueError("odd"), torch.OutOfMemoryError("none left")])
def test_an_example_that_fails_costs_a_layout_and_nothing_else(error: Exception, timed: list[tuple[int, list[int]]]) -> None:
    """Where many items cannot be made the graph is there all the same, and timed with what can."""

    class Fails(Example):
        def example_key(self, tokens: int) -> Hashable | None:
            if tokens not in (32, 64):
                raise error
            return super().example_key(tokens)

    made = captured(Fails(), token_budgets=(64,), max_items_per_batch=8, max_frames_per_batch=0, verify=False)
    (graph,) = made._captured.set.graphs.values()
    assert timed == [(64, [32]), (64, [32, 32])]
    assert graph.predicted_ms == milliseconds(64, [32, 32])


def test_noise_makes_no_replay_free() -> None:
    """A layout can make up nearly all of a graph's time, and no more: no batch is predicted to take nothing."""
    made = through(ReplayTime(3.0, 0.0, 32), ReplayTime(0.1, 0.0, 16))
    assert 0 < made(0) <= 0.2
    assert made(32) == 3.0


def test_capacities_are_measured_each(timed: list[tuple[int, list[int]]]) -> None:
    """Graphs of one budget for 1, 4 and all segments."""
    made = captured(Example(segment_capacities=(1, 4)), token_budgets=(64,), max_items_per_batch=8, max_frames_per_batch=0)
    slopes = {key.axis_keys: graph.time.slope for key, graph in made._captured.set.graphs.items() if graph.time is not None}
    assert slopes == dict.fromkeys([(1,), (4,), (0,)], pytest.approx(SQUARE_MS, rel=0.05))
    assert sorted(len(found) for _, found in timed) == [1, 1, 2, 2, 4, 8]


def test_where_many_items_are_slower_there_is_no_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of few items stays."""
    monkeypatch.setattr(graphs, "least_ms", lambda replay, device: (0.0, 1.0 + len(lengths(replay.__self__))))
    made = captured(Example(), token_budgets=(64,), max_items_per_batch=8, max_frames_per_batch=0)
    (graph,) = made._captured.set.graphs.values()
    assert graph.time == ReplayTime(3.0, 0.0, 2 * 32**2)


@pytest.mark.parametrize("make", [packed_table, toys.tiled_table, toys.twin_table, toys.HandWritten])
def test_without_examples_or_boundaries_a_graph_has_one_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed twice; nothing but a time is known."""
    calls = []
    monkeypatch.setattr(graphs, "least_ms", lambda replay, device: (0.0, calls.append(replay) or 7.0))
    made = captured(make())
    assert {graph.time for graph in made._captured.set.graphs.values()} == {ReplayTime(7.0)}
    assert len(calls) == len(made._captured.set.graphs)


def test_a_path_without_boundaries_has_one_time() -> None:
    """Also where a table gives examples: what tiles cost does not depend on whose they are."""

    class Tiles(toys.TiledTable):
        def example_key(self, tokens: int) -> Hashable | None:
            return (1, tokens // toys.LOCAL_TOKENS) if tokens >= toys.GLOBAL_TOKENS else None

    made = TableEncoder(Tiles(toys.tiled_table().tower), device=torch.device("cpu"), dtype=torch.float32)
    for path in ("global", "local"):
        inputs = made.prepare_encoder_cudagraph_capture_inputs(24, 8, 0, made.device, made.dtype, path, ())
        assert made.fill_encoder_cudagraph_trial(inputs.state, path, 24, None) > 0
        assert made.fill_encoder_cudagraph_layout(inputs.state, path, 24, 1, 2) == 0


def test_the_squares_of_a_layout_count_frames() -> None:
    """Examples may be clips: as many as their frames leave room for."""

    class Clips(Example):
        def example_key(self, tokens: int) -> Hashable | None:
            return (2, 2, tokens)

    made = TableEncoder(Clips(), device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(made, SupportsLayoutTiming)
    assert isinstance(made, KeepsTrialData)
    inputs = made.prepare_encoder_cudagraph_capture_inputs(64, 8, 8, made.device, made.dtype, "main", (0,))
    assert made.fill_encoder_cudagraph_layout(inputs.state, "main", 64, 3, 16) == 8 * 8**2
    assert inputs.values["cu_seqlens"].diff().tolist() == [32] * 8
    assert made.fill_encoder_cudagraph_layout(inputs.state, "main", 64, 5, 16) == 0, "four clips of two frames fit"
