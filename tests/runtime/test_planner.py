"""Plans: which items share a replay of which graph, and why some run eagerly. Plain numbers, no model and no graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import ProtocolError
from vit_compile.runtime.graph_config import AxisKeys, EncoderCudaGraphConfig, EncoderPathConfig
from vit_compile.runtime.graphs import GraphKey
from vit_compile.runtime.item_spec import DEFAULT_PATH, EncoderItemSpec
from vit_compile.runtime.ladders import Ladders
from vit_compile.runtime.planner import EAGER_MARGIN, EagerCost, PlannedBatch, Planner
from vit_compile.runtime.replay_times import ReplayTime
from vit_compile.stats import Skip

LADDER = (4, 8, 16)


def declare(paths: Sequence[str] = (DEFAULT_PATH,), **fields: Any) -> EncoderCudaGraphConfig:
    """A model with these paths."""
    return EncoderCudaGraphConfig(
        modalities=("image",), buffer_keys=("x",), out_hidden_size=8, paths={p: EncoderPathConfig() for p in paths}, **fields
    )


def keys_for(paths: Sequence[str] = (DEFAULT_PATH,), budgets: Sequence[int] = LADDER, axes: AxisKeys = ()) -> list[GraphKey]:
    """Graphs of one combination of axis keys."""
    return [GraphKey(path, budget, axes) for path in paths for budget in budgets]


def planner(
    graphs: Mapping[GraphKey, float | None] | Sequence[GraphKey],
    *,
    declaration: EncoderCudaGraphConfig | None = None,
    ladder: tuple[int, ...] = LADDER,
    max_items: int = 4,
    max_frames: int = 0,
    skips: Mapping[GraphKey, Skip] | None = None,
    by_cost: bool = False,
    look_ahead: bool = False,
    eager: Mapping[str, EagerCost] | None = None,
) -> Planner:
    """A planner over these graphs; without times unless they are given, and then the same for every layout."""
    declaration = declare() if declaration is None else declaration
    known = graphs if isinstance(graphs, Mapping) else dict.fromkeys(graphs)
    return Planner(
        declaration,
        Ladders(dict.fromkeys(declaration.paths, ladder), max_items, max_frames),
        {key: None if ms is None else ReplayTime(ms) for key, ms in known.items()},
        skips or {},
        by_cost=by_cost,
        look_ahead=look_ahead,
        eager=eager,
    )


def item(tokens: int, *, frames: int = 1, kind: Hashable = None) -> EncoderItemSpec:
    """One item of a tower with one path."""
    return EncoderItemSpec(max(tokens, 1), tokens, frames=frames, kind=kind)


def items(*tokens: int) -> list[EncoderItemSpec]:
    """Several."""
    return [item(count) for count in tokens]


def described(plan: Sequence[PlannedBatch]) -> list[tuple[tuple[int, ...], Any]]:
    """Items and choice of each batch, on the only path: a budget, or the code of the reason."""
    return [(batch.indices, one(batch.choices[0])) for batch in plan]


def one(choice: Any) -> Any:
    """A choice in short."""
    return choice.token_budget if isinstance(choice, GraphKey) else choice.code if isinstance(choice, Skip) else None


def kinds_axis(specs: Sequence[EncoderItemSpec], path: str) -> AxisKeys | None:
    """The kind that all items have in common, or None."""
    kinds = {spec.kind for spec in specs}
    return (kinds.pop(),) if len(kinds) == 1 else None


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captured", "tokens", "plan"),
    [
        (LADDER, [3], [((0,), 4)]),
        (LADDER, [4], [((0,), 4)]),
        (LADDER, [5], [((0,), 8)]),
        (LADDER, [16], [((0,), 16)]),
        (LADDER, [17], [((0,), "too-large")]),
        (LADDER, [6, 4, 5], [((0, 1, 2), 16)]),
        (LADDER, [9, 8, 1], [((1, 2), 16), ((0,), 16)]),
        (LADDER, [2, 2, 2, 2, 2], [((0, 1, 2, 3), 8), ((4,), 4)]),
        (LADDER, [40, 3, 20, 2], [((1, 3), 8), ((2,), "too-large"), ((0,), "too-large")]),
        # Graphs that could not be captured are stepped over, and their sizes are packed for what is there.
        ((4, 16), [5], [((0,), 16)]),
        ((8,), [6, 6], [((0,), 8), ((1,), 8)]),
        ((4, 8), [9], [((0,), "too-large")]),
        ((), [5, 3], [((0, 1), "too-large")]),
        ((), [], []),
    ],
)
def test_the_smallest_captured_budget_that_fits(captured: tuple[int, ...], tokens: list[int], plan: list[Any]) -> None:
    """Greedy packing fills the largest captured budget and takes the smallest; what is too large is alone and runs eagerly."""
    assert described(planner(keys_for(budgets=captured)).plan(items(*tokens))) == plan


def test_indices_are_ascending() -> None:
    """Packing sorts by size; a batch keeps the order of the request, in which the rows lie."""
    plan = planner(keys_for()).plan(items(5, 1, 3, 2))
    assert described(plan) == [((0, 1, 2, 3), 16)]
    assert described(planner(keys_for(), max_items=2).plan(items(5, 1, 3, 2))) == [((1, 3), 4), ((0, 2), 8)]


def test_nothing_on_a_path_is_no_choice() -> None:
    """A path without tokens is None for the batch; each path has its own budget and reason."""
    declaration = declare(("global", "local"))
    graphs = [*keys_for(("global",)), *keys_for(("local",), (8,))]
    made = planner(graphs, declaration=declaration)

    def spec(one: int, other: int) -> EncoderItemSpec:
        return EncoderItemSpec(1, one + other, {"global": one, "local": other})

    for specs, want in (
        ([spec(3, 0)], [((0,), (4, None))]),
        ([spec(3, 0), spec(3, 5)], [((0, 1), (8, 8))]),
        ([spec(3, 9)], [((0,), (4, "too-large"))]),
        ([spec(17, 2)], [((0,), ("too-large", 8))]),
        ([spec(17, 9)], [((0,), ("too-large", "too-large"))]),
        ([spec(3, 6), spec(3, 6)], [((0,), (4, 8)), ((1,), (4, 8))]),
    ):
        plan = made.plan(specs)
        assert [(batch.indices, tuple(map(one, batch.choices))) for batch in plan] == want
        for batch in plan:
            members = [specs[i] for i in batch.indices]
            assert batch.tokens == tuple(sum(m.tokens_on(path) for m in members) for path in ("global", "local"))


def test_reasons_say_the_numbers() -> None:
    """The path, the tokens, and the largest budget of the ladder."""
    ((batch,), (other,)) = (planner(keys_for()).plan(items(17)), planner(keys_for(), max_frames=6).plan([item(4, frames=7)]))
    assert str(batch.choices[0]) == "too-large: main: 17 tokens; the largest budget is 16"
    assert str(other.choices[0]) == "too-many-frames: 7 frames; a batch may have 6"


@pytest.mark.parametrize(
    ("max_items", "max_frames", "frames", "plan"),
    [
        (4, 6, [6], [((0,), 4)]),
        (4, 6, [7], [((0,), "too-many-frames")]),
        (4, 6, [4, 3], [((0,), 4), ((1,), 4)]),
        (4, 6, [3, 2, 1], [((0, 1, 2), 8)]),
        # An image is a frame too.
        (4, 2, [1, 1, 1, 1], [((0, 1), 4), ((2, 3), 4)]),
        # Without clips as many segments as items, whoever has them.
        (4, 0, [1, 1, 1, 1], [((0, 1, 2, 3), 8)]),
        (4, 0, [2, 2], [((0, 1), 4)]),
        (4, 0, [3, 2], [((0,), 4), ((1,), 4)]),
        (4, 0, [5], [((0,), "too-many-frames")]),
    ],
)
def test_frames_are_a_limit_like_tokens(max_items: int, max_frames: int, frames: list[int], plan: list[Any]) -> None:
    """Clips share a batch as long as their frames fit; one with more runs eagerly, whatever its tokens."""
    made = planner(keys_for(), max_items=max_items, max_frames=max_frames)
    assert described(made.plan([item(2, frames=count) for count in frames])) == plan
    by_cost = planner(dict.fromkeys(keys_for(), 1.0), max_items=max_items, max_frames=max_frames, by_cost=True)
    for batch in by_cost.plan([item(2, frames=count) for count in frames]):
        total = sum(frames[i] for i in batch.indices)
        assert (one(batch.choices[0]) == "too-many-frames") == (total > (max_frames or max_items))


@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("modalities", [("image", "video"), ("slides",)])
def test_clips_that_are_switched_off(modalities: tuple[str, ...], by_cost: bool) -> None:
    """0 frames and a modality beside images: what has several frames is alone and eager; the others share batches.

    The greedy plan closes a batch at an item that does not fit, as it does everywhere.
    """
    declaration = dataclasses.replace(declare(), modalities=modalities)
    made = planner(dict.fromkeys(keys_for(), 1.0), declaration=declaration, max_items=4, by_cost=by_cost)
    plan = made.plan([item(2, frames=count) for count in (1, 2, 1, 1, 3, 1, 9)])
    batches: list[Any] = [((0, 2, 3, 5), 8)] if by_cost else [((0,), 4), ((2, 3), 4), ((5,), 4)]
    assert sorted(described(plan)) == sorted([*batches, *(((i,), "too-many-frames") for i in (1, 4, 6))])
    texts = sorted(str(batch.choices[0]) for batch in plan if isinstance(batch.choices[0], Skip))
    assert [text.partition(";")[0] for text in texts] == [f"too-many-frames: {count} frames" for count in (2, 3, 9)]
    assert made.predicted_ms([item(2, frames=2)], made.plan([item(2, frames=2)])) > 1


@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("code", ["padding-unsafe", "padding-unproved", "input-mutation", "capture-failed", "out-of-memory"])
def test_items_that_may_see_each_other_run_one_by_one(code: str, by_cost: bool) -> None:
    """A batch whose graph was refused since rows see each other, or may, is taken apart; others stay together."""
    apart = code in ("padding-unsafe", "padding-unproved", "input-mutation")
    skips = {key: Skip(code, "x") for key in keys_for()}
    plan = planner([], skips=skips, by_cost=by_cost).plan(items(2, 3, 1))
    assert sorted(described(plan)) == ([((i,), code) for i in range(3)] if apart else [((0, 1, 2), code)])
    assert sum(batch.tokens[0] for batch in plan) == 6


def test_one_refused_path_takes_a_batch_apart_on_all() -> None:
    """Items of a batch are alone on both paths; on the other one each replays the budget that fits it."""
    declaration = declare(("global", "local"))
    skips = {key: Skip("padding-unsafe", "x") for key in keys_for(("local",))}
    made = planner(keys_for(("global",)), declaration=declaration, skips=skips)
    specs = [EncoderItemSpec(1, 8, {"global": 5, "local": 3}), EncoderItemSpec(1, 3, {"global": 3, "local": 0})]
    plan = made.plan([specs[0], specs[0], specs[1]])
    assert sorted((b.indices, *map(one, b.choices)) for b in plan if b.indices != (2,)) == [
        ((0,), 8, "padding-unsafe"),
        ((1,), 8, "padding-unsafe"),
    ]
    assert [tuple(map(one, b.choices)) for b in plan if b.indices == (2,)] == [(4, None)]
    assert [tuple(map(one, b.choices)) for b in made.plan([specs[1]] * 2)] == [(8, None)], "nothing on the refused path"


# --- axes ------------------------------------------------------------------------------------------------------------

AXES = declare(capture_axes=(("a", "b"),), select_axis_keys=kinds_axis)


def test_a_batch_replays_the_graph_of_its_axis_keys() -> None:
    """The model chooses keys for the items of a batch; only budgets captured for these keys count."""
    graphs = [*keys_for(axes=("a",)), *keys_for(budgets=(16,), axes=("b",))]
    made = planner(graphs, declaration=AXES)
    for kind, budget in (("a", 4), ("b", 16)):
        (batch,) = made.plan([item(2, kind=kind), item(1, kind=kind)])
        assert batch.choices == (GraphKey(DEFAULT_PATH, budget, (kind,)),)


def test_no_key_for_a_batch_is_a_reason() -> None:
    """Where the model finds no key, the batch runs eagerly, whatever is captured."""
    graphs = [*keys_for(axes=("a",)), *keys_for(axes=("b",))]
    for by_cost in (False, True):
        made = planner(dict.fromkeys(graphs, 1.0), declaration=AXES, by_cost=by_cost, max_items=2)
        assert described(made.plan([item(2, kind="a")])) == [((0,), 4)]
    (batch,) = planner(graphs, declaration=AXES).plan([item(2, kind="a"), item(1, kind="b")])
    assert str(batch.choices[0]) == "no-axis-key: main: 2 items, 3 tokens"


def test_cost_packing_puts_apart_what_has_no_common_key() -> None:
    """Eager is the last resort where nothing was measured, so items of different keys get graphs of their own."""
    graphs = dict.fromkeys([*keys_for(axes=("a",)), *keys_for(axes=("b",))], 1.0)
    made = planner(graphs, declaration=AXES, by_cost=True)
    specs = [item(2, kind="a"), item(1, kind="b"), item(2, kind="a"), item(3, kind="b")]
    plan = made.plan(specs)
    assert all(isinstance(choice, GraphKey) for batch in plan for choice in batch.choices)
    assert all(len({specs[i].kind for i in batch.indices}) == 1 for batch in plan)


@pytest.mark.parametrize("keys", [("a", "b"), (), ("c",), (["a"],)])
@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("name", ["select_axis_keys", "axis_keys_of_frames"])
def test_keys_that_were_not_declared_are_an_error(name: str, keys: Any, by_cost: bool) -> None:
    """Another number of keys than there are axes, or a key of none: the error shows both."""
    declaration = declare(capture_axes=(("a", "b"),), **{name: lambda sizes, path: keys})
    made = planner(keys_for(axes=("a",)), declaration=declaration, by_cost=by_cost)
    with pytest.raises(ProtocolError, match=rf"{name} gave .*: expected one key of each of \(\('a', 'b'\),\)"):
        made.plan(items(2))


def few_or_many(frames: int, path: str) -> AxisKeys:
    """A key for up to two frames, and one for more."""
    return ("a",) if frames <= 2 else ("b",)


@pytest.mark.parametrize("by_cost", [False, True])
def test_keys_may_depend_on_frames_alone(by_cost: bool) -> None:
    """All frames of the batch count; the items themselves are not looked at."""
    declaration = declare(capture_axes=(("a", "b"),), axis_keys_of_frames=few_or_many)
    graphs = dict.fromkeys([*keys_for(axes=("a",)), *keys_for(axes=("b",))], 1.0)
    made = planner(graphs, declaration=declaration, by_cost=by_cost, max_frames=6)
    for frames, key in (([1], "a"), ([1, 1], "a"), ([1, 1, 1], "b"), ([2], "a"), ([2, 1], "b"), ([3], "b")):
        (batch,) = made.plan([item(1, frames=count) for count in frames])
        assert isinstance(batch.choices[0], GraphKey)
        assert batch.choices[0].axis_keys == (key,)


def test_the_model_is_asked_with_the_items_and_the_path() -> None:
    """It sees the specs of the batch, and no path on which the batch has nothing."""
    asked = []

    def select(specs: Sequence[EncoderItemSpec], path: str) -> AxisKeys:
        asked.append((tuple(specs), path))
        return ("a",)

    declaration = declare(("x", "y"), capture_axes=(("a",),), select_axis_keys=select)
    specs = [EncoderItemSpec(1, 3, {"x": 3}), EncoderItemSpec(1, 2, {"x": 2})]
    planner(keys_for(("x", "y"), axes=("a",)), declaration=declaration).plan(specs)
    assert asked == [(tuple(specs), "x")]


# --- reasons of captures that failed ---------------------------------------------------------------------------------


def test_why_a_graph_is_missing_is_passed_on() -> None:
    """A batch that would have had a graph gets the reason of its capture: of the smallest budget that would have served."""
    skips = {
        GraphKey(DEFAULT_PATH, 8): Skip("padding-unsafe", "eight"),
        GraphKey(DEFAULT_PATH, 16): Skip("max-graphs", "sixteen"),
    }
    made = planner(keys_for(budgets=(4,)), skips=skips)
    for tokens, reason in ((5, "padding-unsafe"), (8, "padding-unsafe"), (9, "max-graphs"), (17, "too-large"), (4, 4)):
        assert described(made.plan(items(tokens))) == [((0,), reason)]
    assert planner([], skips=skips).plan(items(3))[0].choices == (skips[GraphKey(DEFAULT_PATH, 8)],)


def test_reasons_belong_to_axis_keys() -> None:
    """A graph that is missing for one key says nothing about another."""
    skips = {GraphKey(DEFAULT_PATH, 16, ("b",)): Skip("max-graphs", "b")}
    made = planner(keys_for(axes=("a",)), declaration=AXES, skips=skips)
    assert described(made.plan([item(9, kind="b")])) == [((0,), "max-graphs")]
    assert described(made.plan([item(9, kind="a")])) == [((0,), 16)]
    assert described(made.plan([item(17, kind="b")])) == [((0,), "too-large")]


# --- cost ------------------------------------------------------------------------------------------------------------


def test_eager_is_chosen_where_it_is_cheaper() -> None:
    """Measured times decide: a small batch whose graph is slow runs eagerly and says so, a large one replays."""
    graphs = dict(zip(keys_for(), (5.0 * EAGER_MARGIN, 6.0 * EAGER_MARGIN, 7.0), strict=True))
    made = planner(graphs, by_cost=True, eager={DEFAULT_PATH: EagerCost(1.0, 1.0)})
    assert described(made.plan(items(3))) == [((0,), "eager-cheaper")]
    assert described(made.plan(items(4))) == [((0,), 4)], "no clear gain: the graph"
    assert described(made.plan(items(12))) == [((0,), 16)]
    assert described(made.plan(items(17))) == [((0,), "too-large")], "which is no choice"
    assert str(made.plan(items(3))[0].choices[0]) == "eager-cheaper: main: 3 tokens"


def test_a_larger_graph_is_chosen_where_it_is_faster() -> None:
    """The cheapest graph that fits, which need not be the smallest."""
    graphs = dict(zip(keys_for(), (9.0, 3.0, 5.0), strict=True))
    made = planner(graphs, by_cost=True)
    assert described(made.plan(items(3))) == [((0,), 8)]
    assert described(made.plan(items(9))) == [((0,), 16)]


def test_without_measurements_a_graph_costs_its_tokens() -> None:
    """And eager is the last resort."""
    made = planner(keys_for(), by_cost=True)
    assert described(made.plan(items(3))) == [((0,), 4)]
    assert made.predicted_ms(items(3), made.plan(items(3))) == 4
    assert described(made.plan(items(4, 16))) == [((0,), 4), ((1,), 16)]


def test_eager_cost_is_a_line() -> None:
    """A fixed part and a part for each token; one for each square more or less than those of two equal items."""
    assert EagerCost(2.0, 0.5)(8) == 6.0
    assert [EagerCost(2.0, 0.5, 0.0, 0.25)(8, squares) for squares in (32, 64, 16)] == [6.0, 14.0, 2.0]
    assert EagerCost(2.0, 0.5, 5.0, 0.25)(8, 16) == 5.0
    assert EagerCost(2.0, 0.5, 0.0, 0.25)(8) == 6.0
    assert [EagerCost(2.0, 0.5, 5.0)(tokens) for tokens in (1, 6, 8)] == [5.0, 5.0, 6.0], "launching takes its time"


def price(
    plan: Sequence[PlannedBatch], graphs: Mapping[GraphKey, float], eager: Mapping[str, EagerCost], paths: list[str]
) -> float:
    """What a plan takes, by what it really chose."""
    total = 0.0
    for batch in plan:
        for path, choice, tokens in zip(paths, batch.choices, batch.tokens, strict=True):
            if isinstance(choice, GraphKey):
                total += graphs[choice]
            elif choice is not None:
                total += EAGER_MARGIN * eager[path](tokens)
    return total


AXIS_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "kinds": {"capture_axes": (("a", "b"),), "select_axis_keys": kinds_axis},
    "frames": {"capture_axes": (("a", "b"),), "axis_keys_of_frames": few_or_many},
}


def fits(axis: str, keys: AxisKeys, members: Sequence[EncoderItemSpec]) -> bool:
    """Are these the keys of the batch?"""
    if axis == "none":
        return keys == ()
    if axis == "kinds":
        return {member.kind for member in members} == {*keys}
    return keys == few_or_many(sum(member.frames for member in members), "x")


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Items on one or two paths with one of two kinds, some graphs with times, and what eager costs."""
    paths = draw(st.sampled_from([["x"], ["x", "y"]]))
    axis = draw(st.sampled_from(sorted(AXIS_OPTIONS)))
    ms = st.integers(0, 40).map(lambda quarter: quarter / 4)
    graphs = {
        GraphKey(path, budget, keys): draw(ms)
        for path in paths
        for budget in LADDER
        for keys in ([()] if axis == "none" else [("a",), ("b",)])
        if draw(st.integers(0, 4)) > 0
    }
    specs = []
    for _ in range(draw(st.integers(0, 7))):
        tokens = {path: draw(st.integers(0, 18)) for path in paths}
        frames = draw(st.sampled_from([1, 1, 1, 3, 9]))
        specs.append(EncoderItemSpec(1, sum(tokens.values()), tokens, frames, kind=draw(st.sampled_from("aab"))))
    eager = {path: EagerCost(draw(ms), draw(ms) / 4) for path in paths}
    return {"paths": paths, "axis": axis, "graphs": graphs, "specs": specs, "eager": eager}


@given(situations())
def test_plans_are_legal_and_cost_packing_is_never_dearer(drawn: dict[str, Any]) -> None:
    """Both packers: every item once, limits kept, only graphs that are there and large enough; by its choices, the cost plan
    takes what was predicted, and never more than the greedy plan."""
    paths, graphs, specs, eager = drawn["paths"], drawn["graphs"], drawn["specs"], drawn["eager"]
    declaration = declare(paths, **AXIS_OPTIONS[drawn["axis"]])
    common: dict[str, Any] = {"declaration": declaration, "max_items": 3, "max_frames": 6, "eager": eager}
    made = {by_cost: planner(graphs, by_cost=by_cost, **common) for by_cost in (False, True)}
    plans = {by_cost: made[by_cost].plan(specs) for by_cost in (False, True)}
    for plan in plans.values():
        assert sorted(index for batch in plan for index in batch.indices) == list(range(len(specs)))
        for batch in plan:
            members = [specs[i] for i in batch.indices]
            assert list(batch.indices) == sorted(batch.indices)
            assert len(members) <= 3
            assert len(members) == 1 or sum(m.frames for m in members) <= 6
            assert batch.tokens == tuple(sum(m.tokens_on(path) for m in members) for path in paths)
            for path, choice, tokens in zip(paths, batch.choices, batch.tokens, strict=True):
                assert (choice is None) == (tokens == 0)
                if isinstance(choice, GraphKey):
                    assert choice in graphs
                    assert choice.path == path
                    assert choice.token_budget >= tokens
                    assert fits(drawn["axis"], choice.axis_keys, members)
                    assert sum(m.frames for m in members) <= 6
    cost = price(plans[True], graphs, eager, paths)
    assert cost == pytest.approx(made[True].predicted_ms(specs, plans[True]))
    assert cost <= price(plans[False], graphs, eager, paths) + 1e-9
    assert cost <= made[True].predicted_ms(specs, plans[False]) + 1e-9


@given(st.lists(st.integers(1, 20), max_size=8), st.sets(st.sampled_from(LADDER)))
def test_greedy_takes_the_smallest_captured_budget(tokens: list[int], captured: set[int]) -> None:
    """Of every batch, with the budgets that there are; and nothing runs eagerly that has a graph."""
    for batch in planner(keys_for(budgets=sorted(captured))).plan(items(*tokens)):
        total = sum(tokens[i] for i in batch.indices)
        fitting = [budget for budget in captured if budget >= total]
        assert one(batch.choices[0]) == (min(fitting) if fitting else "too-large")


def test_look_ahead_closes_batches_earlier() -> None:
    """Greedy packing with its look-ahead: two small graphs where one large one would be more."""
    specs = items(4, 8)
    assert described(planner(keys_for()).plan(specs)) == [((0, 1), 16)]
    assert described(planner(keys_for(), look_ahead=True).plan(specs)) == [((0,), 4), ((1,), 8)]


# --- plans are kept --------------------------------------------------------------------------------------------------


def test_plans_are_kept_by_the_sizes() -> None:
    """Equal sizes get the same plan without asking the model again; other sizes, kinds or orders get another."""
    asked = []

    def select(specs: Sequence[EncoderItemSpec], path: str) -> AxisKeys | None:
        asked.append(path)
        return kinds_axis(specs, path)

    declaration = declare(capture_axes=(("a", "b"),), select_axis_keys=select)
    made = planner([*keys_for(axes=("a",)), *keys_for(axes=("b",))], declaration=declaration)
    first = made.plan([item(2, kind="a"), item(5, kind="a")])
    count = len(asked)
    assert made.plan((item(2, kind="a"), item(5, kind="a"))) is first
    assert len(asked) == count
    for other in ([item(5, kind="a"), item(2, kind="a")], [item(2, kind="b"), item(5, kind="b")], [item(2, kind="a")]):
        assert made.plan(other) is not first
    assert described(first) == [((0, 1), 8)], "nobody changed it"


@pytest.mark.parametrize("axis", ["none", "frames"])
def test_prices_are_kept_by_sizes(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where items differ in nothing but sizes, a batch of equal totals is priced once, and the prices kept are bounded."""
    graphs = [*keys_for(axes=("a",)), *keys_for(axes=("b",))] if axis == "frames" else keys_for()
    made = planner(dict.fromkeys(graphs, 1.0), declaration=declare(**AXIS_OPTIONS[axis]), by_cost=True, max_items=8)
    made.plan(items(1, 2, 3, 4))
    held = dict(made._priced)
    made.plan(items(4, 3, 2, 1))
    assert made._priced == held
    assert held
    monkeypatch.setattr("vit_compile.runtime.planner._CACHED_PRICES", 8)
    for start in range(1, 12):
        made.plan(items(start, start + 1, start + 2))
        assert len(made._priced) <= max(8, len(held))


def test_items_that_differ_on_a_path_have_other_plans() -> None:
    """Equal sums over paths are not equal sizes."""
    declaration = declare(("x", "y"))
    made = planner([*keys_for(("x", "y"))], declaration=declaration)
    plans = [made.plan([EncoderItemSpec(6, 6, tokens)]) for tokens in ({"x": 6}, {"y": 6}, {"x": 3, "y": 3})]
    assert [tuple(map(one, plan[0].choices)) for plan in plans] == [(8, None), (None, 8), (4, 4)]


def test_kept_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic that never repeats does not fill the memory."""
    monkeypatch.setattr("vit_compile.runtime.planner._CACHED_PLANS", 8)
    made = planner(keys_for())
    for tokens in range(1, 30):
        made.plan(items(tokens))
        assert len(made._plans) <= 8
