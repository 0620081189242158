"""Tokens, patches, rows and grids convert exactly, or the error names the numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning import units

SIDES = st.integers(1, 12)
MERGES = st.integers(1, 4)


@pytest.mark.parametrize(
    ("tokens", "merge", "patches"),
    [(256, 2, 1024), (1024, 2, 4096), (2209, 2, 8836), (256, 1, 256), (7, 3, 63), (0, 2, 0)],
)
def test_a_token_is_a_square_of_patches(tokens: int, merge: int, patches: int) -> None:
    """A token is made of merge x merge patches; no tokens need no patches."""
    assert units.patches_from_tokens(tokens, spatial_merge_size=merge) == patches


@pytest.mark.parametrize(("patches", "per_row", "rows"), [(1024, 1, 1024), (1024, 256, 4), (729, 729, 1), (0, 256, 0)])
def test_rows_hold_a_fixed_number_of_patches(patches: int, per_row: int, rows: int) -> None:
    """A packed row is a patch, a batch-first row is an image; no patches need no rows."""
    assert units.rows_from_patches(patches, patches_per_row=per_row) == rows


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_rows_are_whole_or_an_error(patches: int, per_row: int) -> None:
    """Rows are what a slow count by subtraction gives; a rest is an error, never rounded."""
    rest, rows = patches, 0
    while rest >= per_row:
        rest, rows = rest - per_row, rows + 1
    if rest:
        with pytest.raises(BudgetError):
            units.rows_from_patches(patches, patches_per_row=per_row)
    else:
        assert units.rows_from_patches(patches, patches_per_row=per_row) == rows


@given(rows=st.integers(0, 200), merge=MERGES, tokens_per_row=st.integers(1, 60))
def test_tokens_to_rows_undoes_rows_to_tokens(rows: int, merge: int, tokens_per_row: int) -> None:
    """Images of a fixed number of tokens: their tokens convert back into as many rows."""
    per_row = tokens_per_row * merge * merge
    assert units.rows_from_tokens(rows * tokens_per_row, spatial_merge_size=merge, patches_per_row=per_row) == rows


@given(SIDES, SIDES, SIDES, MERGES)
def test_grid_counts_agree_with_walking_the_grid(t: int, h: int, w: int, merge: int) -> None:
    """A grid's patches and tokens are as many as the cells and merge blocks met when it is walked."""
    cells = [(f, y, x) for f in range(t) for y in range(h * merge) for x in range(w * merge)]
    blocks = {(f, y // merge, x // merge) for f, y, x in cells}
    grid = (t, h * merge, w * merge)
    assert units.patches_from_grid(grid) == len(cells)
    assert units.tokens_from_grid(grid, spatial_merge_size=merge) == len(blocks)
    assert units.patches_from_tokens(len(blocks), spatial_merge_size=merge) == len(cells)


@pytest.mark.parametrize(
    ("grid", "side"), [((1, 33, 32), "height of 33"), ((4, 32, 5), "width of 5"), ((1, 1, 2), "height of 1")]
)
def test_a_grid_that_does_not_merge_names_the_side(grid: units.Grid, side: str) -> None:
    """A height or width that is not a multiple of the merge size is an error with grid, side and merge size."""
    with pytest.raises(BudgetError) as caught:
        units.tokens_from_grid(grid, spatial_merge_size=2)
    assert str(grid) in str(caught.value)
    assert side in str(caught.value)
    assert "spatial_merge_size=2" in str(caught.value)


def test_frames_are_never_merged() -> None:
    """An odd number of frames is fine at merge size 2: only height and width merge."""
    assert units.tokens_from_grid((3, 4, 4), spatial_merge_size=2) == 12


def test_broken_rows_name_both_numbers_and_the_way_out() -> None:
    """The error for a broken row says how many patches, how many per row, and which counts would do."""
    with pytest.raises(BudgetError, match=r"1000 patches.*patches_per_row=256.*use 768 or 1024, or set patches_per_row"):
        units.rows_from_patches(1000, patches_per_row=256)


def test_too_few_patches_for_one_row_are_told_the_smallest_count() -> None:
    """Below one row there is no smaller count to offer: the error does not propose 0."""
    with pytest.raises(BudgetError, match="use 256 or a multiple of it"):
        units.rows_from_patches(3, patches_per_row=256)


def test_broken_rows_also_name_the_tokens() -> None:
    """Who gave tokens is told about tokens, not only about patches computed from them."""
    with pytest.raises(BudgetError, match=r"100 output tokens, spatial_merge_size=2: 400 patches.*patches_per_row=256"):
        units.rows_from_tokens(100, spatial_merge_size=2, patches_per_row=256)


@pytest.mark.parametrize("bad", [True, False, -1, 1.0, "4", None, np.bool_(True), np.float32(2)])
@pytest.mark.parametrize(
    "call",
    [
        lambda bad: units.patches_from_tokens(bad, spatial_merge_size=2),
        lambda bad: units.rows_from_patches(bad, patches_per_row=1),
        lambda bad: units.patches_from_tokens(4, spatial_merge_size=bad),
        lambda bad: units.rows_from_patches(4, patches_per_row=bad),
        lambda bad: units.rows_from_tokens(4, spatial_merge_size=bad, patches_per_row=1),
        lambda bad: units.rows_from_tokens(4, spatial_merge_size=1, patches_per_row=bad),
        lambda bad: units.tokens_from_grid((1, 4, 4), spatial_merge_size=bad),
        lambda bad: units.tokens_from_grid((1, bad, 4), spatial_merge_size=1),
        lambda bad: units.patches_from_grid((bad, 4, 4)),
    ],
)
def test_only_integers_in_range_are_taken(call: Callable[[object], int], bad: object) -> None:
    """A bool, a float, text, None or a negative number is an error that shows what was given."""
    with pytest.raises(BudgetError) as caught:
        call(bad)
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("name", ["spatial_merge_size", "patches_per_row"])
def test_factors_may_not_be_zero(name: str) -> None:
    """Counts may be 0, factors may not."""
    factors = {"spatial_merge_size": 1, "patches_per_row": 1, name: 0}
    with pytest.raises(BudgetError, match=f"{name}=0: expected a positive integer"):
        units.rows_from_tokens(0, **factors)


@pytest.mark.parametrize("grid", [(1, 2), (1, 2, 3, 4), (), 7, "123", None])
def test_a_grid_is_three_numbers(grid: object) -> None:
    """Anything that is not (t, h, w) is an error that says so."""
    with pytest.raises(BudgetError, match=r"expected \(t, h, w\)"):
        units.patches_from_grid(grid)  # type: ignore[arg-type]


def test_numpy_integers_become_plain_ones() -> None:
    """NumPy integers are taken, and what comes back is a plain int (it is printed, hashed and written to JSON)."""
    grid = np.array([1, 4, 6])
    assert type(units.tokens_from_grid(grid, spatial_merge_size=np.int32(2))) is int  # type: ignore[arg-type]
    assert type(units.patches_from_tokens(np.int64(3), spatial_merge_size=2)) is int  # type: ignore[arg-type]
    assert units.checked_grid(grid) == (1, 4, 6)  # type: ignore[arg-type]
