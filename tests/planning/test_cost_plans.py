"""The plan by predicted time is legal, never dearer than greedy's, and finds what greedy cannot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning import cost_plans
from vit_compile.planning.cost_plans import by_cost, predicted
from vit_compile.planning.packing import Batch, Item, Limits, greedy

Chosen = tuple[int | None, ...]


class Table:
    """Prices as a runtime would have them: a replay by its budget, eager by its tokens, the cheaper of both."""

    def __init__(self, limits: Limits, *, replay: float, per_token: float, eager: float, eager_per_token: float) -> None:
        self.limits = limits
        self.replay, self.per_token, self.eager, self.eager_per_token = replay, per_token, eager, eager_per_token
        self.calls = 0

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, Chosen]:
        self.calls += 1
        total, chosen = 0.0, list[int | None]()
        for ladder, count in zip(self.limits.budgets, tokens, strict=True):
            choices: list[tuple[float, int | None]] = [(self.eager + self.eager_per_token * count, None)]
            if self.limits.max_frames is None or frames <= self.limits.max_frames:
                choices += [(self.replay + self.per_token * budget, budget) for budget in ladder if budget >= count]
            ms, budget = min(choices, key=lambda choice: choice[0]) if count else (0.0, 0)
            total += ms
            chosen.append(budget)
        return total, tuple(chosen)


class Noise:
    """Prices without any pattern, but the same for the same batch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, Chosen]:
        dice = random.Random(f"{self.seed} {tuple(indices)} {tokens} {frames}")
        return dice.choice([0.0, 1.0, dice.uniform(0, 10)]), tuple([None if count else 0 for count in tokens])


class Flat:
    """Every batch costs the same, whatever is in it."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.calls = 0

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, Chosen]:
        self.calls += 1
        return self.ms, tuple([None if count else 0 for count in tokens])


@st.composite
def requests(draw: st.DrawFn, *, most: int = 12) -> tuple[list[Item], Limits]:
    """Items on one to three paths, some of them too large on some path or with too many frames, and limits."""
    paths = draw(st.integers(1, 3))
    ladder = st.sets(st.integers(1, 60), min_size=1, max_size=5).map(lambda steps: tuple(sorted(steps)))
    limits = Limits(
        budgets=tuple(draw(ladder) for _ in range(paths)),
        max_items=draw(st.integers(1, 6)),
        max_frames=draw(st.none() | st.integers(1, 8)),
    )
    tokens = st.tuples(*[st.integers(0, 40)] * paths)
    return draw(st.lists(st.builds(Item, tokens, st.integers(1, 10)), max_size=most)), limits


def tables(limits: Limits) -> st.SearchStrategy[Table]:
    """Plausible prices: replays have a small fixed cost, eager a larger one."""
    numbers = {
        "replay": st.floats(0, 2),
        "per_token": st.floats(0, 0.1),
        "eager": st.floats(0, 4),
        "eager_per_token": st.floats(0, 0.1),
    }
    return st.fixed_dictionaries(numbers).map(lambda given_numbers: Table(limits, **given_numbers))


@st.composite
def priced_requests(draw: st.DrawFn, *, most: int = 12) -> tuple[list[Item], Limits, Table | Noise | Flat]:
    """A request with prices: plausible, without pattern, or all equal."""
    items, limits = draw(requests(most=most))
    prices = draw(tables(limits) | st.builds(Noise, st.integers(0, 2**32)) | st.builds(Flat, st.sampled_from([0.0, 0.1])))
    return items, limits, prices


def images(*tokens: int) -> list[Item]:
    """Items of one frame on one path."""
    return [Item((count,)) for count in tokens]


def is_legal(members: Sequence[Item], limits: Limits) -> bool:
    """Whether the items may share a batch; one item always may."""
    if len(members) == 1:
        return True
    totals = [sum(counts) for counts in zip(*[item.tokens for item in members], strict=True)]
    frames = sum(item.frames for item in members)
    return (
        len(members) <= limits.max_items
        and all(total <= ladder[-1] for total, ladder in zip(totals, limits.budgets, strict=True))
        and (limits.max_frames is None or frames <= limits.max_frames)
    )


def cheapest_cut(items: Sequence[Item], limits: Limits, prices: Table | Noise | Flat) -> float:
    """Least time over all ways to cut the sorted items into legal runs, one after the other."""
    order = sorted(range(len(items)), key=lambda i: sum(items[i].tokens))
    times = []
    for pattern in range(2 ** max(0, len(items) - 1)):
        cuts = [0, *[at + 1 for at in range(len(items) - 1) if pattern >> at & 1], len(items)]
        runs = [order[begin:end] for begin, end in pairwise(cuts)]
        if all(is_legal([items[i] for i in run], limits) for run in runs):
            times.append(
                sum(
                    prices.batch(
                        tuple(run),
                        tuple(sum(counts) for counts in zip(*[items[i].tokens for i in run], strict=True)),
                        sum(items[i].frames for i in run),
                    )[0]
                    for run in runs
                )
            )
    return min(times)


def check_plan(plan: Sequence[Batch], items: Sequence[Item], limits: Limits, prices: Table | Noise | Flat) -> None:
    """Every item once, every batch legal and with the budgets of its price, batches in the order of their first items."""
    assert sorted(index for batch in plan for index in batch.indices) == list(range(len(items)))
    rank = {index: place for place, index in enumerate(sorted(range(len(items)), key=lambda i: sum(items[i].tokens)))}
    for batch in plan:
        members = [items[i] for i in batch.indices]
        assert is_legal(members, limits)
        totals = tuple(sum(counts) for counts in zip(*[item.tokens for item in members], strict=True))
        assert batch.budgets == prices.batch(batch.indices, totals, sum(item.frames for item in members))[1]
        assert [rank[i] for i in batch.indices] == sorted(rank[i] for i in batch.indices)
    assert [rank[batch.indices[0]] for batch in plan] == sorted(rank[batch.indices[0]] for batch in plan)


@given(priced_requests())
def test_hazard_15_a_plan_by_cost_keeps_every_limit(request_: tuple[list[Item], Limits, Table | Noise | Flat]) -> None:
    """However prices tempt, a batch of several exceeds no budget, no number of items and no number of frames."""
    items, limits, prices = request_
    check_plan(by_cost(items, limits, prices), items, limits, prices)


@given(priced_requests())
def test_a_plan_by_cost_is_never_dearer_than_greedy(request_: tuple[list[Item], Limits, Table | Noise | Flat]) -> None:
    """Not by a bit, with and without look-ahead, whatever the prices."""
    items, limits, prices = request_
    cost = predicted(by_cost(items, limits, prices), items, prices)
    assert cost <= predicted(greedy(items, limits), items, prices)
    assert cost <= predicted(greedy(items, limits, look_ahead=True), items, prices)


@given(priced_requests(most=7).filter(lambda request_: bool(request_[0])))
def test_a_plan_by_cost_is_as_good_as_the_best_cut(request_: tuple[list[Item], Limits, Table | Noise | Flat]) -> None:
    """No way to cut the sorted items into legal runs is cheaper, by exhaustion."""
    items, limits, prices = request_
    assert predicted(by_cost(items, limits, prices), items, prices) <= cheapest_cut(items, limits, prices) + 1e-9


@given(priced_requests())
def test_a_plan_by_cost_is_reproducible(request_: tuple[list[Item], Limits, Table | Noise | Flat]) -> None:
    """The same request gets the same plan."""
    items, limits, prices = request_
    assert by_cost(items, limits, prices) == by_cost(items, limits, prices)


@given(requests())
def test_equal_times_go_to_fewer_batches_then_to_greedy(request_: tuple[list[Item], Limits]) -> None:
    """Where nothing costs anything, a plan has no more batches than greedy's, and with as many it is greedy's."""
    items, limits = request_
    plan, plain = by_cost(items, limits, Flat(0.0)), greedy(items, limits)
    assert len(plan) <= len(plain)
    if len(plan) == len(plain):
        assert [batch.indices for batch in plan] == [batch.indices for batch in plain]


class ByCount:
    """A batch costs what its number of items says."""

    def __init__(self, *ms: float) -> None:
        self.ms = ms

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, Chosen]:
        return self.ms[len(indices) - 1], tuple([None if count else 0 for count in tokens])


def test_equal_times_go_to_fewer_batches_of_any_kind() -> None:
    """Bins that need one batch less than greedy win where time does not decide."""
    assert len(greedy(images(80, 20, 60, 40), Limits(((100,),), 8))) == 3
    assert len(by_cost(images(80, 20, 60, 40), Limits(((100,),), 8), Flat(0.0))) == 2


@pytest.mark.parametrize(
    ("ms", "lengths"),
    [
        ((5, 0, 5, 5), [2, 2]),  # only pairs are free, though one budget would hold all four
        ((1, 2, 9, 9), [2, 2]),  # four alone, or one pair, take as long as two pairs
        ((1, 2, 3, 9), [1, 3]),
        ((1, 9, 9, 9), [1, 1, 1, 1]),
        ((1, 9, 3, 4, 9, 9), [3, 3]),  # not 1 + 1 + 4, which is met first
    ],
)
def test_any_cut_may_be_the_best(ms: tuple[float, ...], lengths: list[int]) -> None:
    """Runs of every length compete in a request of ordinary size, and of equal times fewer runs win."""
    plan = by_cost(images(*[10] * len(ms)), Limits(((64,),), 8), ByCount(*ms))
    assert sorted(len(batch.indices) for batch in plan) == lengths


def test_a_large_request_looks_at_runs_that_just_fill_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten items of one token, graphs of 2, 3 and 1000: 3 + 3 + 2 + 2 is best, and found without pricing every run.

    An item that no batch may hold is a run of one, here a clip with too many frames at the front.
    """
    monkeypatch.setattr(cost_plans, "MAX_RUNS", 0)
    monkeypatch.setattr(cost_plans, "MAX_BINNED_ITEMS", 0)
    limits = Limits(((2, 3, 1000),), max_items=10, max_frames=20)
    prices = Table(limits, replay=0.5, per_token=1.0, eager=1e6, eager_per_token=0)
    plan = by_cost([Item((1,), frames=21), *images(*[1] * 10)], limits, prices)
    assert plan[0] == Batch((0,), (None,))
    assert sorted(batch.budgets for batch in plan[1:]) == [(2,), (2,), (3,), (3,)]


@given(st.data())
def test_runs_that_fill_a_budget_are_enough_for_steps(data: st.DataObject) -> None:
    """Where only replays are worth it, a price is a step per budget, and a large request loses nothing by its short cut."""
    limits = Limits(data.draw(st.sets(st.integers(1, 60), min_size=1, max_size=5).map(lambda s: (tuple(sorted(s)),))), 6)
    items = images(*data.draw(st.lists(st.integers(0, limits.budgets[0][-1]), max_size=12)))
    prices = Table(limits, replay=data.draw(st.floats(0, 2)), per_token=data.draw(st.floats(0, 1)), eager=1e6, eager_per_token=0)
    every = predicted(by_cost(items, limits, prices), items, prices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_plans, "MAX_RUNS", 0)
        assert predicted(by_cost(items, limits, prices), items, prices) == pytest.approx(every)


def test_hazard_32_one_eager_batch_beats_serial_replays() -> None:
    """Eager is a choice like any other: three replays of one image each lose to one eager batch of three."""
    items = images(100, 100, 100)
    limits = Limits(((100, 1000),), 8)
    prices = Table(limits, replay=2.0, per_token=0.02, eager=1.0, eager_per_token=0.01)
    assert by_cost(items, limits, prices) == [Batch((0, 1, 2), (None,))]
    assert predicted(by_cost(items, limits, prices), items, prices) == pytest.approx(4.0)


def test_hazard_32_serial_replays_win_where_they_are_faster() -> None:
    """A half-empty large graph loses to small ones, which greedy does not see."""
    items = images(100, 100, 100)
    limits = Limits(((100, 1000),), 8)
    prices = Table(limits, replay=0.1, per_token=0.01, eager=20.0, eager_per_token=0.01)
    assert by_cost(items, limits, prices) == [Batch((0,), (100,)), Batch((1,), (100,)), Batch((2,), (100,))]
    assert [batch.indices for batch in greedy(items, limits)] == [(0, 1, 2)]


def test_bins_put_small_items_beside_large_ones() -> None:
    """Runs of 20, 40, 60 and 80 need three batches of at most 100; pairs of a large and a small one need two."""
    items, limits = images(80, 20, 60, 40), Limits(((50, 100),), 8)
    prices = Table(limits, replay=1.0, per_token=0.01, eager=9.0, eager_per_token=0)
    assert by_cost(items, limits, prices) == [Batch((1, 0), (100,)), Batch((3, 2), (100,))]


def test_bins_are_filled_by_best_fit() -> None:
    """4 goes where it leaves no room (9 + 7 + 4), so that both of 3 fit beside 14; first fit would need a third batch."""
    plan = by_cost(images(9, 3, 4, 7, 14, 3), Limits(((20,),), 9), Flat(1.0))
    assert [batch.indices for batch in plan] == [(1, 5, 4), (2, 3, 0)]


def test_bins_may_be_smaller_than_the_largest_budget() -> None:
    """Bins are tried at the smaller budgets too: here the largest graph would be slow."""
    items, limits = images(80, 20, 60, 40), Limits(((50, 100, 10_000),), 8)
    prices = Table(limits, replay=1.0, per_token=0.01, eager=9.0, eager_per_token=0)
    assert by_cost(items, limits, prices) == [Batch((1, 0), (100,)), Batch((3, 2), (100,))]


def test_a_large_request_gets_bins_of_the_largest_budget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bins of a smaller budget would find is given up for speed; bins of the largest still work."""
    monkeypatch.setattr(cost_plans, "MAX_BINNED_ITEMS", 3)
    items, limits = images(80, 20, 60, 40), Limits(((50, 100, 10_000),), 8)
    prices = Table(limits, replay=1.0, per_token=0.01, eager=9.0, eager_per_token=0)
    assert len(by_cost(items, limits, prices)) == 3
    assert len(by_cost(items, Limits(((100,),), 8), Flat(1.0))) == 2


@pytest.mark.parametrize(
    ("limits", "tokens", "frames", "best"),
    [
        (Limits(((100,), (100,)), 8), [(80, 1), (60, 2), (40, 3), (20, 4)], [1] * 4, [(3, 0), (2, 1)]),
        (Limits(((9999,), (100,)), 8), [(1, 80), (2, 60), (3, 40), (4, 20)], [1] * 4, [(3, 0), (2, 1)]),
        (Limits(((9999,), (100,)), 8, 16), [(1, 80), (2, 60), (3, 40), (4, 20)], [15, 1, 2, 2], None),
    ],
)
def test_bins_follow_any_path(
    limits: Limits, tokens: list[tuple[int, int]], frames: list[int], best: list[tuple[int, ...]] | None
) -> None:
    """Bins are sized on each path in turn, and keep the limits of the others and of frames."""
    items = [Item(pair, count) for pair, count in zip(tokens, frames, strict=True)]
    plan = by_cost(items, limits, Flat(1.0))
    check_plan(plan, items, limits, Flat(1.0))
    assert [batch.indices for batch in plan] == best if best else len(plan) == 3


def test_hazard_15_bins_are_filled_up_to_the_most_frames() -> None:
    """Where frames are scarce and tokens are not, bins pair long clips with short ones; runs would need three batches."""
    items = [Item((4,), 80), Item((3,), 60), Item((2,), 40), Item((1,), 20)]
    plan = by_cost(items, Limits(((64,),), 8, 100), Flat(1.0))
    assert [batch.indices for batch in plan] == [(3, 0), (2, 1)]


def test_hazard_26_an_oversized_item_is_alone_among_small_ones() -> None:
    """An item above the largest budget runs eagerly by itself, even where one batch would be cheapest."""
    plan = by_cost(images(10, 500, 20, 30), Limits(((64,),), 8), Flat(1.0))
    assert [batch.indices for batch in plan] == [(0, 2, 3), (1,)]


def test_no_items_cost_nothing() -> None:
    """There is no plan, no question about prices, and no time."""
    prices = Flat(1.0)
    assert by_cost([], Limits(((8,),), 4), prices) == []
    assert predicted([], [], prices) == 0.0
    assert prices.calls == 0


def test_one_item_asks_for_one_price() -> None:
    """The commonest request is answered at once."""
    prices = Flat(1.0)
    assert by_cost(images(5), Limits(((8,),), 4), prices) == [Batch((0,), (None,))]
    assert prices.calls == 1


def test_the_number_of_prices_stays_small() -> None:
    """Equal items need no bins, twenty items cost some hundred questions, and a thousand do not cost a million."""
    dice = random.Random(0)
    limits = Limits((tuple(64 * step for step in range(1, 13)),), 256)

    def asked(items: list[Item]) -> int:
        prices = Table(limits, replay=0.5, per_token=0.001, eager=3.0, eager_per_token=0.001)
        plan = by_cost(items, limits, prices)
        calls = prices.calls
        check_plan(plan, items, limits, prices)
        assert predicted(plan, items, prices) <= predicted(greedy(items, limits), items, prices)
        return calls

    assert asked(images(*[10] * 20)) == 20 * 21 // 2 + 1  # every run, and greedy's plan
    assert asked(images(*[dice.randint(1, 30) for _ in range(20)])) <= 20 * 21 // 2 + 20 * 14
    assert asked(images(*[dice.randint(1, 30) for _ in range(1000)])) <= 1000 * 16


@pytest.mark.parametrize("ms", [float("inf"), float("nan")])
def test_a_price_that_is_no_number_never_breaks_a_limit(ms: float) -> None:
    """A table with a hole in it costs time, not buffer space: the plan is legal all the same."""
    items, limits = images(30, 20, 40, 80, 10), Limits(((64,),), 2)
    check_plan(by_cost(items, limits, Flat(ms)), items, limits, Flat(ms))


def test_predicted_is_the_sum_of_the_prices() -> None:
    """Totals per path and frames are those of the batch's items, and prices add up."""
    asked: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    class Recorder:
        def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, Chosen]:
            asked.append((tuple(indices), tokens, frames))
            return float(len(indices)), (None, None)

    items = [Item((1, 10)), Item((2, 20), 4), Item((3, 30))]
    plan = [Batch((2, 0), (8, 64)), Batch((1,), (8, 64))]
    assert predicted(plan, items, Recorder()) == 3.0
    assert asked == [((2, 0), (4, 40), 2), ((1,), (2, 20), 4)]


def test_the_number_of_paths_is_checked() -> None:
    """By cost or greedy: an item has one token count per ladder."""
    with pytest.raises(BudgetError, match="item 0"):
        by_cost(images(5), Limits(((8,), (8,)), 4), Flat(1.0))
