"""Longest-first balance: every item once, close to the best, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning.balance import longest_first

SIZES = st.lists(st.integers(1, 100), max_size=40)
RANKS = st.integers(1, 9)


def fullest(shares: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Work of the rank that has the most."""
    return max(sum(sizes[index] for index in share) for share in shares)


@pytest.mark.parametrize(
    ("sizes", "ranks", "shares"),
    [
        ([], 2, [[], []]),
        ([5], 2, [[0], []]),
        ([5, 5, 5], 2, [[0, 2], [1]]),
        ([1, 2, 3, 4], 2, [[0, 3], [1, 2]]),
        ([3, 3, 2, 2, 2], 2, [[0, 2, 4], [1, 3]]),
        ([1, 1, 9], 3, [[2], [0], [1]]),
        ([4, 7], 1, [[0, 1]]),
    ],
)
def test_shares(sizes: list[int], ranks: int, shares: list[list[int]]) -> None:
    """The largest goes first, to the rank with the least; ties go to the earlier item and to the lower rank."""
    assert longest_first(sizes, ranks) == shares


@given(SIZES, RANKS)
def test_every_item_has_one_rank(sizes: list[int], ranks: int) -> None:
    """Each index is in exactly one share; there is a share for every rank, and each is in ascending order."""
    shares = longest_first(sizes, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_near_the_best(sizes: list[int], ranks: int) -> None:
    """The fullest rank has at most 4/3 - 1/(3 ranks) of what it has in the best of all assignments."""
    best = min(
        fullest([[i for i, chosen in enumerate(choice) if chosen == rank] for rank in range(ranks)], sizes)
        for choice in product(range(ranks), repeat=len(sizes))
    )
    assert 3 * ranks * fullest(longest_first(sizes, ranks), sizes) <= (4 * ranks - 1) * best


@given(SIZES, RANKS)
def test_no_rank_is_idle_while_another_has_two(sizes: list[int], ranks: int) -> None:
    """A rank stays without items only if there are fewer items than ranks."""
    assert sum(1 for share in longest_first(sizes, ranks) if share) == min(ranks, len(sizes))


@given(SIZES, RANKS)
def test_the_answer_depends_on_the_numbers_alone(sizes: list[int], ranks: int) -> None:
    """Ranks compute it apart and must agree: any sequence of equal sizes gives equal shares, and the input is left alone."""
    given_sizes = list(sizes)
    assert longest_first(sizes, ranks) == longest_first(tuple(sizes), ranks)
    assert sizes == given_sizes


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0])
def test_there_is_at_least_one_rank(ranks: int) -> None:
    """A number of ranks that is not a positive integer is an error that shows it."""
    with pytest.raises(BudgetError, match="ranks"):
        longest_first([1], ranks)
