"""Whatever the items, budgets, paths, axes and limits: right features in input order, within all caps, counted once.

The references in `toys` encode one item alone, so equality with them also says that an item's features depend on no other
item of the request and on no call before. Caps are looked at where they matter: at every replay, on the buffers and the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.runtime import toys
from vit_compile.runtime.graph_config import EncoderCudaGraphConfig, EncoderPathConfig
from vit_compile.runtime.graphs import EncoderGraph, GraphKey
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.ladders import Ladders
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.planner import EAGER_MARGIN, EagerCost, PlannedBatch, Planner
from vit_compile.runtime.replay_times import ReplayTime
from vit_compile.stats import Skip

TOLERANCE = 1e-5
Reference = Callable[[Any, Mapping[str, Any]], list[torch.Tensor]]


def examples(count: int) -> Any:
    """So many examples, with no limit of time on each: captures vary."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# --- what is observed ------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a manager planned and replayed while it was watched."""

    specs: list[EncoderItemSpec] = field(default_factory=list)
    plans: list[list[PlannedBatch]] = field(default_factory=list)
    replays: list[GraphKey] = field(default_factory=list)
    boundaries: list[list[int]] = field(default_factory=list)
    """Contents of the boundary buffers at each replay of a table that has some."""


@contextmanager
def watched(manager: EncoderCudaGraphManager) -> Any:
    """Notes every plan and every replay."""
    seen = Seen()
    real_plan, real_replay = Planner.plan, EncoderGraph.replay

    def plan(self: Planner, specs: Sequence[EncoderItemSpec]) -> list[PlannedBatch]:
        seen.specs = list(specs)
        seen.plans.append(real_plan(self, specs))
        return seen.plans[-1]

    def replay(self: EncoderGraph) -> torch.Tensor:
        seen.replays.append(self.key)
        if "cu_seqlens" in self.inputs.values:
            seen.boundaries.append(self.inputs.values["cu_seqlens"].tolist())
        return real_replay(self)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Planner, "plan", plan))
        stack.enter_context(mock.patch.object(EncoderGraph, "replay", replay))
        yield seen


def check_caps(manager: EncoderCudaGraphManager, seen: Seen) -> None:
    """Every replay is within its graph's budget, the most items and the most frames; what was planned was replayed; and only what
    fits no graph runs eagerly."""
    (plan,) = seen.plans
    limits, paths = manager.ladders, tuple(manager.declaration.paths)
    most_frames = limits.max_frames or limits.max_items
    assert sorted(index for batch in plan for index in batch.indices) == list(range(len(seen.specs))), "each item once"
    expected = []
    for batch in plan:
        members = [seen.specs[index] for index in batch.indices]
        frames = sum(member.frames for member in members)
        for path, choice, tokens in zip(paths, batch.choices, batch.tokens, strict=True):
            assert tokens == sum(member.tokens_on(path) for member in members)
            assert (choice is None) == (tokens == 0)
            if isinstance(choice, GraphKey):
                expected.append(choice)
                assert choice.path == path
                assert 0 < tokens <= choice.token_budget
                assert choice.token_budget in limits.paths[path]
                assert len(members) <= limits.max_items
                assert frames <= most_frames
                assert limits.max_frames or frames == len(members), "no clips"
            elif isinstance(choice, Skip) and choice.code != "no-axis-key":
                clip = not limits.max_frames and frames > len(members)
                assert tokens > limits.paths[path][-1] or frames > most_frames or clip, f"{choice}, but it fits"
        if len(members) > 1:
            assert len(members) <= limits.max_items, "also eager batches have limits"
            assert frames <= most_frames
    assert seen.replays == expected


def check_counts(manager: EncoderCudaGraphManager, before: dict[str, Any], seen: Seen) -> None:
    """Every item is counted once on each path where it has tokens, as a hit or under one reason; tokens add up as well."""
    after = manager.snapshot()
    hits, misses = after["graph_hits"] - before["graph_hits"], after["graph_misses"] - before["graph_misses"]
    assert hits + misses == sum(spec.tokens_on(path) > 0 for spec in seen.specs for path in manager.declaration.paths)
    assert sum(after["miss_reasons"].values()) == after["graph_misses"]
    assert sum(miss["items"] for miss in after["misses"]) == after["graph_misses"]
    assert after["replays"] - before["replays"] == len(seen.replays)
    assert (after["calls"], after["items"]) == (before["calls"] + 1, before["items"] + len(seen.specs))
    tokens, earlier = after["tokens"], before["tokens"]
    real = tokens["replayed"] + tokens["eager"] - earlier["replayed"] - earlier["eager"]
    assert real == sum(spec.output_tokens for spec in seen.specs)
    assert sum(tokens[kind] - earlier[kind] for kind in ("replayed", "padding")) == sum(key.token_budget for key in seen.replays)


def check(manager: EncoderCudaGraphManager, model: Any, reference: Reference, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """One call: features, order, caps and counts."""
    before = manager.snapshot()
    with watched(manager) as seen:
        got = manager.execute(request)
    assert toys.largest_difference(got, reference(model, request)) <= TOLERANCE
    if seen.plans:
        check_caps(manager, seen)
        check_counts(manager, before, seen)
    for offsets in seen.boundaries:
        assert offsets == sorted(offsets), "boundaries never decrease"
        assert offsets[0] == 0
    return got


def check_all(manager: EncoderCudaGraphManager, model: Any, reference: Reference, requests: Sequence[Mapping[str, Any]]) -> None:
    """All requests, twice in turn: what came in between must not change a bit, as the same graphs do the same work."""
    first = [check(manager, model, reference, request) for request in requests]
    again = [check(manager, model, reference, request) for request in reversed(requests)]
    for one, other in zip(first, reversed(again), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "a call before left something behind"


# --- what is drawn ---------------------------------------------------------------------------------------------------

PACKINGS = [
    {"packing": "greedy"},
    {"packing": "greedy", "look_ahead": True},
    {"packing": "cost"},
]


def ladders(largest: int, smallest: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Ladders of one to four budgets."""
    return st.lists(st.integers(smallest, largest), min_size=1, max_size=4, unique=True).map(lambda sizes: tuple(sorted(sizes)))


@st.composite
def common_config(draw: st.DrawFn, largest: int = 40) -> dict[str, Any]:
    """A valid configuration with one common ladder."""
    budgets = draw(ladders(largest))
    return {
        "token_budgets": budgets,
        "max_items_per_batch": draw(st.integers(1, min(6, budgets[0])) | st.none()),
        "verify": draw(st.booleans()),
        **draw(st.sampled_from(PACKINGS)),
    }


SIDES = st.integers(1, 4).map(lambda blocks: 2 * blocks)
IMAGES = st.tuples(st.just(1), SIDES, SIDES) | st.sampled_from([(1, 2, 2), (1, 2, 60), (1, 60, 2), (1, 14, 14)])
"""Small ones, thin ones, and one of 49 tokens, which is above every drawn budget."""
CLIPS = st.tuples(st.integers(1, 6), st.sampled_from([2, 4]), st.sampled_from([2, 4])) | st.just((9, 4, 6))
CAPACITIES = st.sampled_from([(), (1,), (1, 4), (2, 3, 5)])
SEEDS = st.integers(0, 1000)


@st.composite
def packed_requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Two requests of images, clips or both."""
    return [
        toys.packed_request(draw(st.lists(IMAGES, max_size=6)), draw(st.lists(CLIPS, max_size=4)), seed=draw(SEEDS))
        for _ in range(2)
    ]


CROPS = st.sampled_from([(0, 0), (0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (1, 5), (4, 4)])
TWINS = st.tuples(st.integers(1, 4), st.sampled_from([2, 4]), st.sampled_from([2, 4, 6]), st.integers(0, 4)) | st.sampled_from(
    [(1, 2, 2, 0), (1, 2, 2, 20), (1, 14, 14, 1), (7, 2, 2, 0)]
)


# --- the properties --------------------------------------------------------------------------------------------------


@examples(50)
@given(
    config=common_config(),
    frames=st.none() | st.integers(0, 12),
    capacities=CAPACITIES,
    requests=packed_requests(),
)
def test_packed_towers(
    config: dict[str, Any], frames: int | None, capacities: Sequence[int], requests: list[dict[str, Any]]
) -> None:
    """Images and clips of any shape in a packed tower: features, order, caps, counts, and nothing left from call to call."""
    table = toys.packed_table(segment_capacities=capacities)
    manager = toys.captured(table, max_frames_per_batch=frames, **config)
    check_all(manager, table, toys.packed_reference, requests)


@examples(40)
@given(
    packing=st.sampled_from(PACKINGS),
    wide=ladders(40),
    narrow=ladders(40),
    items=st.integers(1, 6),
    crops=st.lists(st.lists(CROPS, max_size=7), min_size=2, max_size=2),
    seed=SEEDS,
)
def test_two_paths(
    packing: dict[str, Any],
    wide: tuple[int, ...],
    narrow: tuple[int, ...],
    items: int,
    crops: list[list[tuple[int, int]]],
    seed: int,
) -> None:
    """A thumbnail and tiles, with ladders of their own, some too small for a single item, and the same demands."""
    assume(items <= wide[0])
    table = toys.tiled_table()
    manager = toys.captured(table, path_token_budgets={"global": wide, "local": narrow}, max_items_per_batch=items, **packing)
    check_all(manager, table, toys.tiled_reference, [toys.tiled_request(of, seed + number) for number, of in enumerate(crops)])


@examples(40)
@given(
    config=common_config(),
    coarse=st.none() | ladders(24),
    capacities=CAPACITIES,
    keys=st.lists(st.lists(TWINS, max_size=6), min_size=2, max_size=2),
    seed=SEEDS,
)
def test_two_paths_and_an_axis(
    config: dict[str, Any],
    coarse: tuple[int, ...] | None,
    capacities: Sequence[int],
    keys: list[list[toys.TwinKey]],
    seed: int,
) -> None:
    """Two paths, a segment axis on one of them, windows, indices and per-frame values, all together."""
    assume(coarse is not None or max(config["token_budgets"]) >= toys.TAG_TOKENS)  # where the inferred ladder begins
    table = toys.twin_table(segment_capacities=capacities)
    own = {} if coarse is None else {"path_token_budgets": {"coarse": coarse}}
    manager = toys.captured(table, **config, **own)
    check_all(manager, table, toys.twin_reference, [toys.twin_request(of, seed + number) for number, of in enumerate(keys)])


@examples(40)
@given(
    config=common_config(),
    widths=st.sampled_from([(4, 8), (8, 4), (4,)]),
    counts=st.lists(
        st.tuples(st.sampled_from([4, 8]), st.lists(st.integers(1, 12) | st.just(50), max_size=7)), min_size=2, max_size=3
    ),
    seed=SEEDS,
)
def test_models_that_write_the_contract_out(
    config: dict[str, Any], widths: tuple[int, ...], counts: list[tuple[int, list[int]]], seed: int
) -> None:
    """A capture axis of the model's own, with batches that fit no key, and buffers that the manager pads."""
    model = toys.HandWritten(axes=(widths,))
    model.select_axis_keys = lambda specs, path: (  # type: ignore[method-assign]
        (specs[0].kind,) if specs[0].kind in widths else None
    )
    manager = toys.captured(model, **config)
    requests = [toys.written_request(of, width, seed + number) for number, (width, of) in enumerate(counts)]
    check_all(manager, model, toys.written_reference, requests)
    fitting = all(width in widths for width, of in counts if of)
    assert fitting or manager.snapshot()["miss_reasons"]["no-axis-key"] > 0


@examples(15)
@given(config=common_config(), requests=packed_requests(), frames=st.none() | st.integers(0, 12))
def test_without_graphs(config: dict[str, Any], requests: list[dict[str, Any]], frames: int | None) -> None:
    """Before `capture()` the same demands hold, with every item eager for that reason."""
    table = toys.packed_table()
    manager = toys.manager(table, max_frames_per_batch=frames, **config)
    before = [manager.execute(request) for request in requests]
    for got, request in zip(before, requests, strict=True):
        assert toys.largest_difference(got, toys.packed_reference(table, request)) <= TOLERANCE
    items = sum(map(len, before))
    assert manager.snapshot()["miss_reasons"] == ({"not-captured": items} if items else {})
    assert manager.snapshot()["graph_hits"] == 0


@examples(20)
@given(config=common_config(), grids=st.lists(IMAGES, min_size=1, max_size=6), chosen=st.integers(0, 5), seed=SEEDS)
def test_an_items_features_do_not_depend_on_its_neighbours(
    config: dict[str, Any], grids: list[toys.Grid], chosen: int, seed: int
) -> None:
    """An image alone, among others, and among others in another order has the same features."""
    table = toys.packed_table()
    manager = toys.captured(table, **config)
    chosen %= len(grids)
    request = toys.packed_request(grids, seed=seed)
    parts = request["pixel_values"].split([t * h * w for t, h, w in grids])
    together = manager.execute(request)
    alone = manager.execute({"pixel_values": parts[chosen], "image_grid_thw": [grids[chosen]]})
    turned = manager.execute({"pixel_values": torch.cat(parts[::-1]), "image_grid_thw": grids[::-1]})
    for got in (alone[0], turned[len(grids) - 1 - chosen]):
        assert toys.largest_difference([got], [together[chosen]]) <= TOLERANCE


# --- plans -----------------------------------------------------------------------------------------------------------


@st.composite
def priced(draw: st.DrawFn) -> tuple[Any, ...]:
    """A declaration, ladders, graphs with made-up times (some missing), times of eager runs (or none), and items."""
    names = ("main", "side")[: draw(st.integers(1, 2))]
    paths = {name: EncoderPathConfig(allow_zero_tokens=name == "side") for name in names}
    axis: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"select_axis_keys": lambda specs, path: ("few" if len(specs) < 3 else "many",)},
                {"axis_keys_of_frames": lambda frames, path: ("few" if frames < 4 else "many",)},
            ]
        )
    )
    declaration = EncoderCudaGraphConfig(
        modalities=("image",),
        buffer_keys=("x",),
        out_hidden_size=1,
        paths=paths,
        capture_axes=(("few", "many"),) if axis else (),
        **axis,
    )
    steps = {name: draw(ladders(40)) for name in names}
    ms, slopes = st.floats(0.01, 10), st.just(0.0) | st.floats(0, 0.1)
    graphs: dict[GraphKey, ReplayTime] = {
        GraphKey(name, step, axes): ReplayTime(draw(ms), draw(slopes), step * step // 2)
        for name in names
        for step in steps[name]
        for axes in ((("few",), ("many",)) if axis else ((),))
        if draw(st.integers(0, 4))
    }
    eager = {name: EagerCost(draw(ms), draw(st.floats(0, 1))) for name in names} if draw(st.booleans()) else {}
    items = [
        EncoderItemSpec(
            1,
            tokens + side,
            {"main": tokens, "side": side} if len(names) > 1 else None,
            draw(st.integers(1, 5)),
        )
        for tokens, side in draw(
            st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50) if len(names) > 1 else st.just(0)), max_size=9)
        )
    ]
    return declaration, Ladders(steps, draw(st.integers(1, 5)), draw(st.integers(0, 8))), graphs, eager, items


@examples(60)
@given(case=priced())
def test_a_cost_plan_is_never_predicted_slower_than_a_greedy_one(case: tuple[Any, ...]) -> None:
    """Whatever graphs take, and whatever eager runs take: with any prices, and with look-ahead or without."""
    declaration, limits, graphs, eager, items = case

    def planner(**how: bool) -> Planner:
        return Planner(declaration, limits, graphs, {}, eager=eager, **{"by_cost": False, "look_ahead": False, **how})

    judge = planner(by_cost=True)
    best = judge.predicted_ms(items, judge.plan(items))
    for look_ahead in (False, True):
        greedy = planner(look_ahead=look_ahead).plan(items)
        assert best <= judge.predicted_ms(items, greedy) * (1 + 1e-9)
    assert sorted(index for batch in judge.plan(items) for index in batch.indices) == list(range(len(items)))


@examples(60)
@given(case=priced())
def test_the_predicted_time_is_that_of_what_is_chosen(case: tuple[Any, ...]) -> None:
    """The sum over the graphs that a cost plan replays and the eager runs that it makes, computed here from their times."""
    declaration, limits, graphs, eager, items = case
    planner = Planner(declaration, limits, graphs, {}, by_cost=True, look_ahead=False, eager=eager)
    total, paths = 0.0, tuple(declaration.paths)
    for batch in planner.plan(items):
        for path, choice, tokens in zip(paths, batch.choices, batch.tokens, strict=True):
            if isinstance(choice, GraphKey):
                assert tokens <= choice.token_budget
                counts = [(items[i].tokens_on(path), items[i].frames) for i in batch.indices]
                time = graphs[choice]
                squares = sum(count**2 // frames for count, frames in counts) - time.squares
                total += max(0.0, time.ms + time.slope * squares)
            elif isinstance(choice, Skip):
                own = eager.get(path)
                total += tokens * 1e6 if own is None else EAGER_MARGIN * (own.fixed_ms + own.ms_per_token * tokens)
    assert math.isclose(planner.predicted_ms(items, planner.plan(items)), total, rel_tol=1e-9, abs_tol=1e-9)


@examples(30)
@given(case=priced())
def test_equal_items_get_equal_plans(case: tuple[Any, ...]) -> None:
    """Plans are kept by the items' sizes: the same sizes again, or in another planner, are planned alike."""
    declaration, limits, graphs, eager, items = case
    planners = [Planner(declaration, limits, graphs, {}, by_cost=True, look_ahead=False, eager=eager) for _ in range(2)]
    plans = [planners[0].plan(items), planners[0].plan(list(items)), planners[1].plan(items)]
    assert plans[0] == plans[1] == plans[2]
