"""Greedy packing is the documented one, with frames as one more dimension; every item is in exactly one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning.packing import Batch, Item, Limits, greedy

GLOBAL = (272, 544, 1088, 2176, 4352, 8704, 13824)
LOCAL = tuple(range(0, 12801, 100))
DUAL = Limits((GLOBAL, LOCAL), max_items=50)


@st.composite
def ladders(draw: st.DrawFn) -> tuple[int, ...]:
    """Ascending budgets, sometimes with the 0 that means "skip this path"."""
    steps = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=5)))
    return (0, *steps) if draw(st.booleans()) else tuple(steps)


@st.composite
def requests(draw: st.DrawFn, *, frames: bool = True) -> tuple[list[Item], Limits]:
    """Items on one to three paths, some of them too large on some path or with too many frames, and limits."""
    paths = draw(st.integers(1, 3))
    limits = Limits(
        budgets=tuple(draw(ladders()) for _ in range(paths)),
        max_items=draw(st.integers(1, 6)),
        max_frames=draw(st.none() | st.integers(1, 8)) if frames else None,
    )
    tokens = st.tuples(*[st.integers(0, 40)] * paths)
    return draw(st.lists(st.builds(Item, tokens, st.integers(1, 10)), max_size=12)), limits


def images(*tokens: int) -> list[Item]:
    """Items of one frame on one path."""
    return [Item((count,)) for count in tokens]


def documented(
    tokens: Sequence[tuple[int, ...]], limits: Limits, *, look_ahead: bool = False
) -> list[tuple[list[int], list[int | None]]]:
    """The documented algorithm, step by step: `(indices, budgets)` of each batch. It knows no frames."""
    paths = range(len(limits.budgets))

    def found(path: int, total: int) -> int | None:
        if total == 0:
            return 0
        fitting = [budget for budget in limits.budgets[path] if budget >= total]
        return min(fitting) if fitting else None

    def parts(batch: list[int], item: int) -> bool:
        apart, together = 0, 0
        for path in paths:
            total = sum(tokens[i][path] for i in batch)
            apart += (found(path, total) or 0) + (found(path, tokens[item][path]) or 0)
            together += found(path, total + tokens[item][path]) or 0
        return apart < together

    batches: list[list[int]] = []
    for item in sorted(range(len(tokens)), key=lambda i: sum(tokens[i])):
        joins = bool(batches) and len(batches[-1]) < limits.max_items
        for path in paths:
            if joins and sum(tokens[i][path] for i in batches[-1]) + tokens[item][path] > max(limits.budgets[path]):
                joins = False
        if joins and look_ahead and parts(batches[-1], item):
            joins = False
        if joins:
            batches[-1].append(item)
        else:
            batches.append([item])
    return [(batch, [found(path, sum(tokens[i][path] for i in batch)) for path in paths]) for batch in batches]


@given(requests(frames=False), st.booleans())
def test_greedy_is_the_documented_algorithm(request_: tuple[list[Item], Limits], look_ahead: bool) -> None:
    """Without a limit on frames, batches, their order and their budgets are those of a literal transcription."""
    items, limits = request_
    plan = greedy(items, limits, look_ahead=look_ahead)
    expected = documented([item.tokens for item in items], limits, look_ahead=look_ahead)
    assert [(list(batch.indices), list(batch.budgets)) for batch in plan] == expected


@given(requests(), st.booleans())
def test_hazard_10_every_item_is_in_one_batch(request_: tuple[list[Item], Limits], look_ahead: bool) -> None:
    """The indices of a plan are a permutation of the caller's, so that outputs can go back to input order."""
    items, limits = request_
    plan = greedy(items, limits, look_ahead=look_ahead)
    assert sorted(index for batch in plan for index in batch.indices) == list(range(len(items)))
    assert all(batch.indices for batch in plan)


@given(requests(), st.booleans())
def test_a_batch_of_several_keeps_every_limit(request_: tuple[list[Item], Limits], look_ahead: bool) -> None:
    """Only an item alone exceeds the largest budget of a path or the most frames; the most items hold always."""
    items, limits = request_
    for batch in greedy(items, limits, look_ahead=look_ahead):
        assert len(batch.indices) <= limits.max_items
        if len(batch.indices) > 1:
            for path, ladder in enumerate(limits.budgets):
                assert sum(items[i].tokens[path] for i in batch.indices) <= ladder[-1]
            if limits.max_frames is not None:
                assert sum(items[i].frames for i in batch.indices) <= limits.max_frames


@given(requests(), st.booleans())
def test_a_budget_is_the_smallest_that_fits(request_: tuple[list[Item], Limits], look_ahead: bool) -> None:
    """No budget of the path lies between a batch's total and its budget; eager only where none is left or frames exceed."""
    items, limits = request_
    for batch in greedy(items, limits, look_ahead=look_ahead):
        frames = sum(items[i].frames for i in batch.indices)
        for path, budget in enumerate(batch.budgets):
            total = sum(items[i].tokens[path] for i in batch.indices)
            if budget is None:
                too_many = limits.max_frames is not None and frames > limits.max_frames
                assert total > 0
                assert total > limits.budgets[path][-1] or too_many
                assert len(batch.indices) == 1
            elif budget > 0:
                assert budget in limits.budgets[path]
                assert 0 < total <= budget
                assert not any(total <= smaller < budget for smaller in limits.budgets[path])


@given(requests(), st.booleans())
def test_hazard_36_each_item_and_path_has_one_outcome(request_: tuple[list[Item], Limits], look_ahead: bool) -> None:
    """Replayed, eager and skipped add up to items x paths, and a path is skipped exactly where the batch has no tokens on it."""
    items, limits = request_
    outcomes: Counter[str] = Counter()
    for batch in greedy(items, limits, look_ahead=look_ahead):
        assert len(batch.budgets) == len(limits.budgets)
        for path, budget in enumerate(batch.budgets):
            outcomes["eager" if budget is None else "skip" if budget == 0 else "replay"] += len(batch.indices)
            assert (budget == 0) == (sum(items[i].tokens[path] for i in batch.indices) == 0)
    assert outcomes.total() == len(items) * len(limits.budgets)


@given(requests())
def test_a_leading_zero_changes_nothing(request_: tuple[list[Item], Limits]) -> None:
    """0 means "skip this path", which is said of a path without tokens whether or not the ladder shows it."""
    items, limits = request_
    bare = Limits(tuple(tuple(b for b in ladder if b) for ladder in limits.budgets), limits.max_items, limits.max_frames)
    shown = Limits(tuple((0, *ladder) for ladder in bare.budgets), limits.max_items, limits.max_frames)
    assert greedy(items, bare) == greedy(items, shown)


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        ([(272, 400)], [((0,), (272, 400))]),
        ([(272, 0)], [((0,), (272, 0))]),
        ([(272, 0)] * 3, [((0, 1, 2), (1088, 0))]),
        ([(272, 900), (272, 0), (272, 400)], [((1, 2, 0), (1088, 1300))]),
        ([(272, 250), (272, 100)], [((1, 0), (544, 400))]),
        ([(272, 4000)] * 4, [((0, 1, 2), (1088, 12000)), ((3,), (272, 4000))]),
        ([(272, 0)] * 51, [(tuple(range(50)), (13824, 0)), ((50,), (272, 0))]),
        ([(14000, 300)], [((0,), (None, 300))]),
        ([(14000, 0)], [((0,), (None, 0))]),
        ([(272, 12900)], [((0,), (272, None))]),
        ([(14000, 12900)], [((0,), (None, None))]),
        ([(272, 12900), (272, 200)], [((1,), (272, 200)), ((0,), (272, None))]),
    ],
)
def test_two_paths_of_deepseek_ocr(
    tokens: list[tuple[int, int]], plan: list[tuple[tuple[int, ...], tuple[int | None, ...]]]
) -> None:
    """Both totals limit a batch, the sum sorts, and each path finds its budget, or none, by itself."""
    assert greedy([Item(pair) for pair in tokens], DUAL) == [Batch(*batch) for batch in plan]


@pytest.mark.parametrize(
    ("tokens", "max_items", "plan"),
    [
        ([], 4, []),
        ([64], 4, [((0,), (64,))]),
        ([65], 4, [((0,), (128,))]),
        ([40, 24, 40, 24], 4, [((1, 3, 0, 2), (128,))]),
        ([40, 24, 40, 25], 4, [((1, 3, 0), (128,)), ((2,), (64,))]),
        ([10, 10, 10], 2, [((0, 1), (64,)), ((2,), (64,))]),
        ([0, 0], 4, [((0, 1), (0,))]),
        ([0, 128, 0], 4, [((0, 2, 1), (128,))]),
    ],
)
def test_one_path(tokens: list[int], max_items: int, plan: list[tuple[tuple[int, ...], tuple[int | None, ...]]]) -> None:
    """Smallest first, equal ones in the given order; full to the brim fits; no tokens cost nothing but a place."""
    assert greedy(images(*tokens), Limits(((64, 128),), max_items)) == [Batch(*batch) for batch in plan]


def test_hazard_14_more_items_than_tokens_in_the_smallest_budget() -> None:
    """Budgets are found by tokens alone: more items than the smallest budget has tokens are no special case."""
    limits = Limits(((4, 128),), max_items=100)
    assert greedy(images(*[1] * 100), limits) == [Batch(tuple(range(100)), (128,))]
    assert greedy(images(*[0] * 150), limits) == [Batch(tuple(range(100)), (0,)), Batch(tuple(range(100, 150)), (0,))]


def test_hazard_15_frames_are_a_packing_dimension() -> None:
    """Clips that fit by tokens are parted where the buffers would not hold their frames."""
    clips = [Item((10,), frames=8) for _ in range(5)]
    assert greedy(clips, Limits(((64,),), 8, max_frames=16)) == [
        Batch((0, 1), (64,)),
        Batch((2, 3), (64,)),
        Batch((4,), (64,)),
    ]
    assert greedy(clips, Limits(((64,),), 8)) == [Batch((0, 1, 2, 3, 4), (64,))]


def test_hazard_15_a_clip_with_too_many_frames_is_alone_and_eager() -> None:
    """No budget helps where boundary buffers are too short; a path without tokens is skipped all the same."""
    items = [Item((10, 0), frames=17), Item((5, 4)), Item((20, 20), frames=17), Item((6, 6))]
    assert greedy(items, Limits(((64,), (64,)), 8, max_frames=16)) == [
        Batch((1,), (64, 64)),  # closed, since the long clip is next
        Batch((0,), (None, 0)),
        Batch((3,), (64, 64)),
        Batch((2,), (None, None)),
    ]


def test_hazard_26_an_oversized_item_is_eager_and_the_rest_are_not() -> None:
    """One image above the largest budget gets a batch of its own without a budget."""
    assert greedy(images(10, 500, 20, 30), Limits(((64,),), 8)) == [Batch((0, 2, 3), (64,)), Batch((1,), (None,))]


def test_hazard_26_an_item_oversized_on_one_path_stays_alone() -> None:
    """It may come early in order, since sums sort; what follows does not join it, even with nothing on that path."""
    limits = Limits(((10,), (100,)), 8)
    assert greedy([Item((0, 60)), Item((12, 0)), Item((0, 30))], limits) == [
        Batch((1,), (None, 0)),
        Batch((2, 0), (0, 100)),
    ]


@pytest.mark.parametrize(
    ("ladder", "tokens", "plain", "ahead"),
    [
        ((100, 1000), [60, 70], [(0, 1)], [(0,), (1,)]),
        ((100, 1000), [60, 40], [(1, 0)], [(1, 0)]),
        ((100, 1000), [70, 60, 20], [(2, 1, 0)], [(2, 1), (0,)]),
        ((100, 200), [60, 70], [(0, 1)], [(0, 1)]),  # 100 + 100 is not less than 200
        ((100, 201), [60, 70], [(0, 1)], [(0,), (1,)]),
        ((100, 1000), [0, 60], [(0, 1)], [(0, 1)]),
    ],
)
def test_look_ahead_parts_where_two_small_graphs_beat_a_large_one(
    ladder: tuple[int, ...], tokens: list[int], plain: list[tuple[int, ...]], ahead: list[tuple[int, ...]]
) -> None:
    """A batch is closed early only where that makes the sum of budgets strictly less."""
    limits = Limits((ladder,), 8)
    assert [batch.indices for batch in greedy(images(*tokens), limits)] == plain
    assert [batch.indices for batch in greedy(images(*tokens), limits, look_ahead=True)] == ahead


@pytest.mark.parametrize(("second", "parted"), [((60, 300), False), ((60, 400), True)])
def test_look_ahead_sums_over_paths(second: tuple[int, int], parted: bool) -> None:
    """What one path gains by parting can be less than what another loses."""
    # Apart: 2 x (300 + 60). Together: 400 on the first path, and the larger budget on the second.
    items = [Item((200, 30)), Item((200, 31))]
    plan = greedy(items, Limits(((300, 400), second), 8), look_ahead=True)
    assert [batch.indices for batch in plan] == ([(0,), (1,)] if parted else [(0, 1)])


def test_look_ahead_is_off_by_default() -> None:
    """The documented algorithm does not look ahead."""
    items = images(60, 70)
    limits = Limits(((100, 1000),), 8)
    assert greedy(items, limits) == greedy(items, limits, look_ahead=False) != greedy(items, limits, look_ahead=True)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2, 3)])
def test_items_have_one_count_per_path(tokens: tuple[int, ...]) -> None:
    """Another number of paths is an error that names the item, its tokens and the number of ladders."""
    with pytest.raises(BudgetError, match=r"item 1 has tokens=\(.*\), and there are 2 ladders"):
        greedy([Item((1, 1)), Item(tokens)], Limits(((8,), (8,)), 4))


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ((), "budgets is empty"),
        (8, "budgets=8: expected a list"),
        ((8, 16), "budgets of path 0=8: expected a list"),
        (((8,), ()), "budgets of path 1 is empty"),
        (((8, 4),), r"budgets of path 0=\(8, 4\): expected ascending"),
        (((4, 8), (8, 8)), r"budgets of path 1=\(8, 8\): expected ascending"),
        (((-1, 8),), "budgets of path 0=-1: expected an integer, 0 or more"),
        (((8.0,),), "budgets of path 0=8.0: expected an integer"),
    ],
)
def test_ladders_are_ascending(budgets: object, text: str) -> None:
    """A missing, empty, unsorted, repeated or negative ladder is an error that says which and what it holds."""
    with pytest.raises(BudgetError, match=text):
        Limits(budgets, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8", None])
def test_a_batch_holds_at_least_one_item(bad: object) -> None:
    """The most items are a positive integer."""
    with pytest.raises(BudgetError, match=f"max_items={bad!r}: expected a positive integer"):
        Limits(((8,),), bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bad", "text"), [(0, "give None where frames are not limited"), (-1, "positive"), (1.5, "positive")])
def test_a_limit_on_frames_leaves_room_for_one(bad: object, text: str) -> None:
    """0 frames would send every image to eager without a word; None is how frames are left unlimited."""
    with pytest.raises(BudgetError, match=text):
        Limits(((8,),), 4, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "frames", "text"),
    [((-1,), 1, "tokens=-1"), ((1.0,), 1, "tokens=1.0"), ((1,), 0, "frames=0"), ((1,), True, "frames=True")],
)
def test_items_are_counted_in_integers(tokens: tuple[int, ...], frames: int, text: str) -> None:
    """Tokens are 0 or more, frames 1 or more; a float or a bool is neither."""
    with pytest.raises(BudgetError, match=text):
        Item(tokens, frames)


def test_numpy_integers_become_plain_ones() -> None:
    """Counts may come from arrays; what a plan holds is printed, hashed and compared as plain ints."""
    items = [Item(tuple(np.array([3, 0])), np.int64(2))]  # type: ignore[arg-type]
    limits = Limits((np.array([4, 8]), [8]), np.int32(4), np.int32(2))  # type: ignore[arg-type]
    (batch,) = greedy(items, limits)
    assert batch == Batch((0,), (4, 0))
    assert {type(n) for n in (*items[0].tokens, items[0].frames, *limits.budgets[0], *batch.budgets)} == {int}
