"""Ladders are sorted, free of repeats and positive, whatever they are made from."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning import budgets

DOCS = Path(__file__).parents[2] / "docs"
POSITIVE = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("low", "high", "ladder"),
    [
        (64, 1024, (64, 128, 256, 512, 1024)),
        (64, 1000, (64, 128, 256, 512, 1000)),
        (272, 13824, (272, 544, 1088, 2176, 4352, 8704, 13824)),
        (100, 101, (100, 101)),
        (5, 5, (5,)),
        (1, 8, (1, 2, 4, 8)),
    ],
)
def test_doubling_ladder(low: int, high: int, ladder: tuple[int, ...]) -> None:
    """It doubles from the minimum and always ends with the maximum, once."""
    assert budgets.power_of_two(low, high) == ladder


@given(POSITIVE, POSITIVE)
def test_doubling_ladder_serves_the_whole_range(a: int, b: int) -> None:
    """It starts at the minimum, ends at the maximum, and no step is more than twice the last, so at most half is padding."""
    low, high = min(a, b), max(a, b)
    ladder = budgets.power_of_two(low, high)
    assert (ladder[0], ladder[-1]) == (low, high)
    steps = list(pairwise(ladder))
    assert all(small < large <= 2 * small for small, large in steps)
    assert all(large == 2 * small for small, large in steps[:-1])


@given(st.lists(POSITIVE, min_size=1))
def test_explicit_ladder_is_the_set_in_order(given_budgets: list[int]) -> None:
    """It holds exactly what was given, each once, ascending."""
    ladder = budgets.explicit(given_budgets)
    assert all(small < large for small, large in pairwise(ladder))
    assert all(b in ladder for b in given_budgets)
    assert all(b in given_budgets for b in ladder)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_grid_ladder_has_a_step_for_every_grid(merged: list[tuple[int, int, int]], merge: int) -> None:
    """Every grid fits one step exactly, and there is no step without a grid."""
    tokens = [t * h * w for t, h, w in merged]
    ladder = budgets.from_grids([(t, h * merge, w * merge) for t, h, w in merged], spatial_merge_size=merge)
    assert all(n in ladder for n in tokens)
    assert all(step in tokens for step in ladder)
    assert list(ladder) == sorted(ladder)


def test_grids_of_equal_size_share_a_step() -> None:
    """Grids are data: a wide, a tall and a two-frame grid with equal token counts need one budget."""
    assert budgets.from_grids([(1, 16, 64), (1, 64, 16), (2, 16, 32)], spatial_merge_size=2) == (256,)


@pytest.mark.parametrize(
    ("sides", "merge", "limit", "ladder"),
    [
        ([32, 64, 94, 128, 188, 256, 312], 2, 256, (256, 1024, 2209, 4096, 8836, 16384)),
        ([64, 32, 64], 2, 256, (256, 1024)),
        ([16, 37], 1, 37, (256, 1369)),
        ([33, 32], 2, 32, (256,)),
    ],
)
def test_square_ladder(sides: list[int], merge: int, limit: int, ladder: tuple[int, ...]) -> None:
    """A side gives (side / merge)^2 tokens; a side above the limit is left out, even one that would not merge."""
    assert budgets.from_square_sides(sides, spatial_merge_size=merge, max_side=limit) == ladder


def test_square_ladder_stops_at_256_patches_by_default() -> None:
    """Without a limit of one's own, 256 is the longest side."""
    assert budgets.from_square_sides([256, 258], spatial_merge_size=2) == (16384,)


def test_batch_ladder() -> None:
    """One step per number of images, in tokens of that many grids."""
    assert budgets.from_batch_sizes([4, 1, 4], (1, 32, 32), spatial_merge_size=2) == (256, 1024)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_batch_ladder_is_a_grid_ladder_of_stacked_images(sizes: list[int]) -> None:
    """n images of one frame have as many tokens as one clip of n frames."""
    stacked = [(n, 6, 4) for n in sizes]
    assert budgets.from_batch_sizes(sizes, (1, 6, 4), spatial_merge_size=2) == budgets.from_grids(stacked, spatial_merge_size=2)


def test_generators_and_numpy_integers_are_taken() -> None:
    """Any iterable of integers will do, and the ladder holds plain ints."""
    ladder = budgets.explicit(n for n in np.array([9, 3]))
    assert ladder == (3, 9)
    assert [type(n) for n in ladder] == [int, int]


def test_an_inverted_range_names_both_ends() -> None:
    """A minimum above the maximum is an error with both numbers, not an empty ladder."""
    with pytest.raises(BudgetError, match="minimum=128 is above maximum=64"):
        budgets.power_of_two(128, 64)


def test_no_side_left_is_an_error() -> None:
    """When the limit drops every side, the error says which was the smallest and what the limit is."""
    with pytest.raises(BudgetError, match=r"smallest is 64 and max_side=32.*raise max_side"):
        budgets.from_square_sides([94, 64], spatial_merge_size=2, max_side=32)


def test_a_kept_side_must_merge() -> None:
    """A side within the limit that is not a multiple of the merge size is an error with the sides that would do."""
    with pytest.raises(BudgetError, match=r"\(1, 33, 33\).*33 patches.*spatial_merge_size=2.*use 32 or 34"):
        budgets.from_square_sides([32, 33], spatial_merge_size=2)


LADDERS: list[Callable[[Iterable[object]], tuple[int, ...]]] = [
    lambda values: budgets.explicit(values),  # type: ignore[arg-type]
    lambda values: budgets.from_square_sides(values, spatial_merge_size=1),  # type: ignore[arg-type]
    lambda values: budgets.from_batch_sizes(values, (1, 4, 4), spatial_merge_size=1),  # type: ignore[arg-type]
    lambda values: budgets.from_grids([(1, v, 4) for v in values], spatial_merge_size=1),  # type: ignore[misc]
]


@pytest.mark.parametrize("bad", [0, -4, True, 2.0, "8", None])
@pytest.mark.parametrize("ladder", LADDERS)
def test_every_number_is_a_positive_integer(ladder: Callable[[Iterable[object]], tuple[int, ...]], bad: object) -> None:
    """One bad number among good ones is an error that shows it."""
    with pytest.raises(BudgetError) as caught:
        ladder([4, bad])
    assert repr(bad) in str(caught.value)
    assert "expected a positive integer" in str(caught.value)


@pytest.mark.parametrize(("low", "high"), [(0, 8), (-1, 8), (8, 0), (True, 8), (1, True), (1.0, 8), (1, None)])
def test_the_ends_of_a_range_are_positive_integers(low: object, high: object) -> None:
    """Both ends of the doubling ladder are checked, before they are compared."""
    with pytest.raises(BudgetError, match="expected a positive integer"):
        budgets.power_of_two(low, high)  # type: ignore[arg-type]


@pytest.mark.parametrize("ladder", LADDERS)
def test_an_empty_ladder_is_an_error(ladder: Callable[[Iterable[object]], tuple[int, ...]]) -> None:
    """No ladder is empty: nothing to capture is said with token_budgets=None, not with an empty list."""
    with pytest.raises(BudgetError, match="is empty"):
        ladder([])


@pytest.mark.parametrize("bad", [64, "64", b"64", None, {64: 1}])
@pytest.mark.parametrize("ladder", LADDERS[:3])
def test_a_list_is_expected(ladder: Callable[[object], tuple[int, ...]], bad: object) -> None:
    """A lone number, text or a dict in place of a list is an error that shows it."""
    with pytest.raises(BudgetError, match="expected a list"):
        ladder(bad)


def test_the_examples_in_the_docs_run() -> None:
    """Every example in docs/budgets.md gives what is printed under it."""
    result = doctest.testfile(str(DOCS / "budgets.md"), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
