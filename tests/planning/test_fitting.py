"""Fitted ladders are the best there are, and histograms count replays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning import budgets, fitting

CHAT = [
    (6, 0.1857), (64, 0.0316), (128, 0.0401), (192, 0.0604), (256, 0.1138), (448, 0.1143), (640, 0.0695), (896, 0.0727),
    (1088, 0.0372), (1196, 0.1331), (1232, 0.0824), (1280, 0.0586),
]  # fmt: skip
"""Sizes of images in chat traffic, as shares."""

COSTS: dict[str, fitting.Cost | None] = {
    "padding": None,
    "affine": lambda tokens: 7 + 3 * tokens,
    "concave": lambda tokens: math.isqrt(100 * tokens),
    "steps": lambda tokens: -(-tokens // 4),
    "constant": lambda _tokens: 1,
}


def total_cost(histogram: dict[int, int], ladder: Iterable[int], cost: fitting.Cost) -> float:
    """Price of a ladder by its definition: each entry pays for the smallest budget that holds it."""
    return sum(weight * cost(min(b for b in ladder if b >= tokens)) for tokens, weight in histogram.items() if weight)


def best_by_trying(histogram: dict[int, int], graphs: int, top: int, step: int, cost: fitting.Cost) -> tuple[float, int]:
    """(least cost, fewest budgets that reach it) over all ladders of multiples that end at `top`."""
    smaller = range(step, top, step)
    ladders = [(*some, top) for count in range(graphs) for some in combinations(smaller, count)]
    return min((total_cost(histogram, ladder, cost), len(ladder)) for ladder in ladders)


@settings(max_examples=300)
@given(
    st.dictionaries(st.integers(1, 14), st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(sorted(COSTS)),
)
def test_no_ladder_is_better(histogram: dict[int, int], graphs: int, step: int, name: str) -> None:
    """Of all ladders of multiples, also those with budgets that no entry hits, none costs less, and no equal one is shorter."""
    top = -(-max(histogram) // step) * step
    cost = COSTS[name] or (lambda tokens: tokens)
    ladder = budgets.fit(histogram, graphs, multiple_of=step, cost=COSTS[name])
    assert (total_cost(histogram, ladder, cost), len(ladder)) == best_by_trying(histogram, graphs, top, step, cost)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[-1] == top
    assert all(budget % step == 0 for budget in ladder)


@settings(max_examples=300)
@given(
    st.dictionaries(st.integers(1, 20), st.integers(1, 9), max_size=7),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(sorted(COSTS)),
)
def test_no_ladder_with_the_maximum_is_better(
    histogram: dict[int, int], graphs: int, step: int, top_steps: int, name: str
) -> None:
    """With a maximum the ladder ends there, and is the best for the entries that are not above it."""
    top = step * top_steps
    cost = COSTS[name] or (lambda tokens: tokens)
    ladder = budgets.fit(histogram, graphs, maximum=top, multiple_of=step, cost=COSTS[name])
    served = {tokens: weight for tokens, weight in histogram.items() if tokens <= top}
    assert (total_cost(served, ladder, cost), len(ladder)) == best_by_trying(served, graphs, top, step, cost)
    assert ladder[-1] == top


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1))
def test_any_cost_that_never_falls_will_do(rises: list[int], histogram: dict[int, int]) -> None:
    """The best ladder is found for every non-decreasing cost, flat parts and jumps included."""

    def cost(tokens: int) -> int:
        return sum(rises[:tokens])

    ladder = budgets.fit(histogram, 3, cost=cost)
    assert (total_cost(histogram, ladder, cost), len(ladder)) == best_by_trying(histogram, 3, max(histogram), 1, cost)


@pytest.mark.parametrize(
    ("histogram", "graphs", "ladder"),
    [
        ({100: 1, 200: 1, 1000: 1}, 1, (1000,)),
        ({100: 1, 200: 1, 1000: 1}, 2, (200, 1000)),
        ({100: 9, 200: 1, 1000: 1}, 2, (100, 1000)),
        ({100: 9, 200: 1, 300: 1}, 2, (100, 300)),
        ({100: 1, 200: 1, 1000: 1}, 9, (100, 200, 1000)),
        ({7: 0.5}, 3, (7,)),
    ],
)
def test_steps_go_where_the_weight_is(histogram: dict[int, float], graphs: int, ladder: tuple[int, ...]) -> None:
    """Few graphs sit at the common sizes; more graphs than sizes are not used."""
    assert budgets.fit(histogram, graphs) == ladder


def test_the_maximum_is_there_without_traffic() -> None:
    """The maximum takes one of the graphs, also where nothing is near it, or where nothing was seen at all."""
    assert budgets.fit({100: 5, 200: 5}, 2, maximum=4096) == (200, 4096)
    assert budgets.fit({100: 5, 200: 5}, 1, maximum=4096) == (4096,)
    assert budgets.fit({}, 3, maximum=4096) == (4096,)


def test_what_is_above_the_maximum_does_not_count() -> None:
    """Entries above the maximum run eagerly whatever the ladder: they move no step."""
    traffic = {100: 1, 200: 1}
    assert budgets.fit(traffic | {300: 1e9, 900: 1e9}, 2, maximum=256) == budgets.fit(traffic, 2, maximum=256)


def test_entries_without_weight_or_tokens_do_not_count() -> None:
    """A size that never occurs needs no budget, and nothing is replayed for 0 tokens."""
    assert budgets.fit({0: 50, 100: 1, 5000: 0}, 4) == (100,)


def test_pairs_add_up() -> None:
    """A histogram may be pairs, and the same tokens may come twice."""
    assert budgets.fit([(100, 1), (300, 1), (200, 0.5), (200, 0.5), (200, 4)], 2) == (200, 300)
    assert budgets.padded_share([(1, 1), (1, 1), (2, 1)], (2,)) == 2 / 6


def test_numpy_numbers_are_taken() -> None:
    """Counts and weights may come from NumPy; budgets are plain ints."""
    ladder = budgets.fit(zip(np.array([3, 9]), np.array([1.0, 2.0], dtype=np.float32), strict=True), np.int64(2))  # type: ignore[arg-type]
    assert ladder == (3, 9)
    assert [type(budget) for budget in ladder] == [int, int]


def test_the_cost_is_asked_for_sizes_that_may_become_budgets() -> None:
    """A measured cost is called with each rounded size once and with nothing else, in ascending order."""
    asked: list[int] = []

    def cost(tokens: int) -> float:
        asked.append(tokens)
        return float(tokens)

    budgets.fit({3: 1, 4: 1, 9: 1, 70: 1}, 2, maximum=64, multiple_of=4, cost=cost)
    assert asked == [4, 12, 64]


def test_fitted_beats_doubling_on_chat_traffic() -> None:
    """With as many graphs or fewer and the same maximum, a fitted ladder pads much less than doubling does."""
    doubled = budgets.power_of_two(64, 1280)
    fitted = budgets.fit(CHAT, len(doubled), maximum=1280)
    assert len(fitted) <= len(doubled)
    assert budgets.padded_share(CHAT, fitted) < 0.5 * budgets.padded_share(CHAT, doubled)


@pytest.mark.parametrize(
    ("ladder", "share"),
    [((10, 20), 0.0), ((20,), 10 / 40), ((20, 0, 20), 10 / 40), ((12,), 2 / 12), ((5,), 0.0), ((40, 16), 26 / 56)],
)
def test_padded_share(ladder: tuple[int, ...], share: float) -> None:
    """Padding over computed tokens; what is above the largest budget, or has a budget of 0, is in neither."""
    assert budgets.padded_share({10: 1, 20: 1}, ladder) == share


@given(st.dictionaries(st.integers(1, 50), st.integers(0, 9), min_size=1), st.lists(st.integers(1, 60), min_size=1))
def test_padded_share_is_a_share(histogram: dict[int, float], ladder: list[int]) -> None:
    """It lies between 0 and 1, is 0 for a budget per size, and another budget never makes it worse below the top."""
    share = budgets.padded_share(histogram, ladder)
    assert 0 <= share < 1
    assert budgets.padded_share(histogram, list(histogram)) == 0
    finer = [*ladder, *[size for size in histogram if size < max(ladder)]]
    assert budgets.padded_share(histogram, finer) <= share


def test_a_trace_is_counted_in_batches() -> None:
    """A replay serves a packed batch, so batch totals are what is counted: request by request, never across."""
    assert budgets.histogram_from_trace([[40, 30], [70], [60, 50]], maximum=100, max_items=4) == {50: 1, 60: 1, 70: 2}
    assert budgets.histogram_from_trace([[10, 10, 10, 10, 10]], maximum=100, max_items=2) == {10: 1, 20: 2}


def test_a_trace_leaves_out_what_runs_eagerly() -> None:
    """Items above the maximum, requests without items and items without tokens make no replay."""
    assert budgets.histogram_from_trace([[500, 20], [], [0], (30,)], maximum=100, max_items=4) == {20: 1, 30: 1}


@given(st.lists(st.lists(st.integers(0, 40), max_size=8), min_size=1, max_size=8), st.integers(1, 5))
def test_a_trace_loses_no_tokens(requests: list[list[int]], max_items: int) -> None:
    """The tokens of the histogram are those of the items that fit, and no replay is above the maximum."""
    counted = budgets.histogram_from_trace(requests, maximum=30, max_items=max_items)
    fitting_tokens = sum(tokens for request in requests for tokens in request if tokens <= 30)
    assert sum(tokens * count for tokens, count in counted.items()) == fitting_tokens
    assert all(0 < tokens <= 30 for tokens in counted)
    assert list(counted) == sorted(counted)


def test_a_trace_goes_straight_into_a_ladder() -> None:
    """What a trace gives is what `fit` takes."""
    trace = budgets.histogram_from_trace([[49], [49, 49], [196]], maximum=256, max_items=8)
    assert budgets.fit(trace, 4, maximum=256) == (49, 98, 196, 256)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: budgets.fit({1: 1}, 0), r"max_graphs=0: expected a positive integer"),
        (lambda: budgets.fit({1: 1}, 1, multiple_of=0), r"multiple_of=0: expected a positive integer"),
        (lambda: budgets.fit({1: 1}, 1, maximum=-5), r"maximum=-5: expected a positive integer"),
        (lambda: budgets.fit({1: 1}, 1, maximum=100, multiple_of=64), r"maximum=100 .*multiple_of=64: use 64 or 128, or another"),
        (lambda: budgets.fit({1: 1}, 1, maximum=10, multiple_of=64), r"maximum=10 .*multiple_of=64: use 64, or another"),
        (lambda: budgets.fit({-3: 1}, 1), r"tokens of the histogram=-3: expected an integer, 0 or more"),
        (lambda: budgets.fit({2.5: 1}, 1), r"tokens of the histogram=2.5"),
        (lambda: budgets.fit({8: -1}, 1), r"weight -1 of 8 tokens: expected a finite number, 0 or more"),
        (lambda: budgets.fit({8: float("nan")}, 1), r"weight nan of 8 tokens"),
        (lambda: budgets.fit({8: "x"}, 1), r"weight 'x' of 8 tokens"),
        (lambda: budgets.fit({8: True}, 1), r"weight True of 8 tokens"),
        (lambda: budgets.fit([8, 9], 1), r"entry 8 of the histogram: expected a pair"),
        (lambda: budgets.fit([(8, 1, 1)], 1), r"entry \(8, 1, 1\) of the histogram: expected a pair"),
        (lambda: budgets.fit("8", 1), r"histogram='8': expected"),
        (lambda: budgets.fit(8, 1), r"histogram=8: expected"),
        (lambda: budgets.fit({}, 1), r"no entry with tokens and weight: give at least one, or a maximum"),
        (lambda: budgets.fit({9: 0}, 1), r"no entry with tokens and weight"),
        (lambda: budgets.fit({8: 1, 9: 1}, 1, cost=lambda t: 10 - t), r"cost\(9\)=1 is below cost\(8\)=2.*running maximum"),
        (lambda: budgets.fit({8: 1}, 1, cost=lambda t: math.inf), r"cost\(8\)=inf: expected a finite number"),
        (lambda: budgets.padded_share({8: 1}, []), r"ladder is empty"),
        (lambda: budgets.padded_share({8: 1}, [-8]), r"budget=-8: expected an integer, 0 or more"),
        (lambda: budgets.padded_share({8: -1}, [8]), r"weight -1 of 8 tokens"),
        (lambda: budgets.histogram_from_trace([], maximum=8, max_items=1), r"requests is empty"),
        (lambda: budgets.histogram_from_trace([[1], 8], maximum=8, max_items=1), r"request 1 is 8: expected a list"),
        (lambda: budgets.histogram_from_trace([[1], [-8]], maximum=8, max_items=1), r"item of request 1=-8: expected an integer"),
        (lambda: budgets.histogram_from_trace([[1]], maximum=0, max_items=1), r"maximum=0: expected a positive integer"),
        (lambda: budgets.histogram_from_trace([[1]], maximum=8, max_items=0), r"max_items=0: expected a positive integer"),
    ],
)
def test_errors_name_the_number_and_the_way_out(call: Callable[[], object], message: str) -> None:
    """What cannot be used is an error that shows it and says what is expected."""
    with pytest.raises(BudgetError, match=message):
        call()


def test_a_thousand_sizes_are_quick() -> None:
    """1300 distinct sizes and 12 graphs are a matter of a fraction of a second, so a server can fit at start-up."""
    histogram = {17 * size: 1.0 + (size * 7919) % 101 for size in range(1, 1301)}
    ladder = budgets.fit(histogram, 12)
    assert len(ladder) == 12
    assert budgets.padded_share(histogram, ladder) < 0.1
