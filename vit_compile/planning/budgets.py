"""Ladders: the capture sizes of an encoder, in output tokens.

Every function returns a sorted tuple of distinct positive integers, ready for `token_budgets`. All of them describe the same
thing: a graph's shape depends on its row count alone, and grids are data that it reads. So two grids with the same number of
tokens share one budget, and a ladder made from grids serves every other grid that fits.

Nothing here looks at a model or a device. Ladders that follow traffic are made in `fitting`, and reached from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vit_compile.errors import BudgetError
from vit_compile.planning import units
from vit_compile.planning.fitting import fit, histogram_from_trace, padded_share

__all__ = [
    "DEFAULT_MAX_SIDE",
    "explicit",
    "fit",
    "from_batch_sizes",
    "from_grids",
    "from_square_sides",
    "histogram_from_trace",
    "padded_share",
    "power_of_two",
]

DEFAULT_MAX_SIDE = 256
"""Longest side, in patches, of a square that is worth a graph of its own: 256 x 256 is about 3 GiB of activations."""


def power_of_two(minimum: int, maximum: int) -> tuple[int, ...]:
    """Doubles from `minimum` while below `maximum`, and always ends with `maximum`.

    Args:
        minimum: Smallest budget, in output tokens. It need not be a power of two.
        maximum: Largest budget, in output tokens.

    Raises:
        BudgetError: A number is not a positive integer, or `minimum` is above `maximum`.
    """
    low = units.positive_int("minimum", minimum)
    high = units.positive_int("maximum", maximum)
    if low > high:
        raise BudgetError(f"minimum={low} is above maximum={high}: give the smaller number of tokens first.")
    ladder = [high]
    while low < high:
        ladder.append(low)
        low *= 2
    return tuple(sorted(ladder))


def explicit(budgets: Iterable[int]) -> tuple[int, ...]:
    """The given budgets, sorted and without repeats.

    Args:
        budgets: Output tokens, in any order.

    Raises:
        BudgetError: There are none, or one is not a positive integer.
    """
    return _ladder(units.positive_int("budget", budget) for budget in units.listed("budgets", budgets, "output-token counts"))


def from_grids(grids: Iterable[Sequence[int]], *, spatial_merge_size: int) -> tuple[int, ...]:
    """One budget per distinct token count of the given grids.

    Args:
        grids: `(t, h, w)` in patches, one for each image or clip that should fit exactly.
        spatial_merge_size: Side, in patches, of the square that becomes one token.

    Raises:
        BudgetError: There are none, or a grid is not three positive integers, or its height or width does not merge evenly.
    """
    return _ladder(
        units.tokens_from_grid(grid, spatial_merge_size=spatial_merge_size)
        for grid in units.listed("grids", grids, "grids (t, h, w)")
    )


def from_square_sides(sides: Iterable[int], *, spatial_merge_size: int, max_side: int = DEFAULT_MAX_SIDE) -> tuple[int, ...]:
    """One budget per square image of side x side patches.

    Args:
        sides: Sides in patches, in any order. A side above `max_side` gets no budget; it is not an error.
        spatial_merge_size: Side, in patches, of the square that becomes one token.
        max_side: Longest side, in patches, that gets a budget.

    Raises:
        BudgetError: No side is left, or a kept side does not merge evenly, or a number is not a positive integer.
    """
    limit = units.positive_int("max_side", max_side)
    given = [units.positive_int("side", side) for side in units.listed("sides", sides, "sides in patches")]
    kept = [side for side in given if side <= limit]
    if not kept:
        raise BudgetError(
            f"no side is left: the smallest is {min(given)} and max_side={limit}: add a smaller one or raise max_side."
        )
    return _ladder(units.tokens_from_grid((1, side, side), spatial_merge_size=spatial_merge_size) for side in kept)


def from_batch_sizes(batch_sizes: Iterable[int], grid: Sequence[int], *, spatial_merge_size: int) -> tuple[int, ...]:
    """One budget per number of images that all have the same grid.

    Args:
        batch_sizes: Images per replay, in any order.
        grid: `(t, h, w)` in patches of each image.
        spatial_merge_size: Side, in patches, of the square that becomes one token.

    Raises:
        BudgetError: There are no batch sizes, one is not a positive integer, or the grid is invalid or does not merge evenly.
    """
    tokens = units.tokens_from_grid(grid, spatial_merge_size=spatial_merge_size)
    return _ladder(
        units.positive_int("batch size", size) * tokens for size in units.listed("batch_sizes", batch_sizes, "image counts")
    )


def _ladder(tokens: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(tokens)))
