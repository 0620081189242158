"""Output tokens -> input patches -> rows: the one place where these units are converted.

- A *patch* is one square of pixels that the tower embeds; a *token* is one feature vector that the language model sees. A
  tower merges `spatial_merge_size` x `spatial_merge_size` patches into one token.
- A *row* is one step along dimension 0 of the traced input: a patch in packed towers (`patches_per_row=1`), a whole image
  in batch-first ones (`patches_per_row` = patches per image).
- A *grid* `(t, h, w)` counts patches: `t` frames of `h` x `w`.

Every conversion is exact: what is not a whole number is a `BudgetError`, never rounded. Counts may be 0 (a path or a rank
without items); factors and grid sides may not. What depends on pixels (patch size, class tokens) is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TypeAlias, TypeVar

from vit_compile.errors import BudgetError

Grid: TypeAlias = tuple[int, int, int]
"""`(t, h, w)`: frames, and height and width in patches."""

_Item = TypeVar("_Item")


def patches_from_tokens(tokens: int, *, spatial_merge_size: int) -> int:
    """Input patches that make `tokens` output tokens.

    Args:
        tokens: Output tokens, 0 or more.
        spatial_merge_size: Side, in patches, of the square that becomes one token.

    Raises:
        BudgetError: A number is not an integer or is out of range.
    """
    merge = positive_int("spatial_merge_size", spatial_merge_size)
    return natural_int("tokens", tokens) * merge * merge


def rows_from_patches(patches: int, *, patches_per_row: int) -> int:
    """Rows of the traced input that hold `patches` patches.

    Args:
        patches: Input patches, 0 or more.
        patches_per_row: 1 for packed towers; patches per image for batch-first ones.

    Raises:
        BudgetError: The patches do not make whole rows, or a number is not an integer or is out of range.
    """
    given = natural_int("patches", patches)
    per_row = positive_int("patches_per_row", patches_per_row)
    rows, rest = divmod(given, per_row)
    if rest:
        raise BudgetError(
            f"{given} patches do not make whole rows of patches_per_row={per_row} ({rows} rows and {rest} patches over): "
            f"{_nearest(rows * per_row, per_row)}, or set patches_per_row to what one row of the input holds."
        )
    return rows


def rows_from_tokens(tokens: int, *, spatial_merge_size: int, patches_per_row: int) -> int:
    """Rows of the traced input behind `tokens` output tokens.

    Args:
        tokens: Output tokens, 0 or more.
        spatial_merge_size: Side, in patches, of the square that becomes one token.
        patches_per_row: 1 for packed towers; patches per image for batch-first ones.

    Raises:
        BudgetError: The tokens do not make whole rows, or a number is not an integer or is out of range.
    """
    patches = patches_from_tokens(tokens, spatial_merge_size=spatial_merge_size)
    try:
        return rows_from_patches(patches, patches_per_row=patches_per_row)
    except BudgetError as error:
        raise BudgetError(f"{tokens} output tokens, spatial_merge_size={spatial_merge_size}: {error}") from None


def patches_from_grid(grid: Sequence[int]) -> int:
    """Input patches of one image or clip.

    Args:
        grid: `(t, h, w)` in patches.

    Raises:
        BudgetError: The grid is not three positive integers.
    """
    t, h, w = checked_grid(grid)
    return t * h * w


def tokens_from_grid(grid: Sequence[int], *, spatial_merge_size: int) -> int:
    """Output tokens of one image or clip. Frames are not merged, only height and width.

    Args:
        grid: `(t, h, w)` in patches.
        spatial_merge_size: Side, in patches, of the square that becomes one token.

    Raises:
        BudgetError: The height or width is not a multiple of the merge size, or the grid is not three positive integers.
    """
    t, h, w = checked_grid(grid)
    merge = positive_int("spatial_merge_size", spatial_merge_size)
    for name, side in (("height", h), ("width", w)):
        if side % merge:
            raise BudgetError(
                f"grid {(t, h, w)}: the {name} of {side} patches is not a multiple of spatial_merge_size={merge}: "
                f"{_nearest(side // merge * merge, merge)}, or set spatial_merge_size to what the model merges."
            )
    return t * (h // merge) * (w // merge)


def checked_grid(grid: Sequence[int]) -> Grid:
    """The grid as three plain integers.

    Raises:
        BudgetError: It is not three positive integers.
    """
    try:
        sides = tuple(grid)
    except TypeError:
        sides = ()
    if len(sides) != 3 or isinstance(grid, str | bytes):
        raise BudgetError(f"grid {grid!r}: expected (t, h, w), frames and height and width in patches.")
    t, h, w = (positive_int(f"{name} of grid {sides}", side) for name, side in zip("thw", sides, strict=True))
    return t, h, w


def positive_int(name: str, value: object) -> int:
    """`value` as a plain integer above 0; NumPy integers are taken, `bool` is not.

    Raises:
        BudgetError: It is anything else.
    """
    number = _integer(value)
    if number is None or number <= 0:
        raise BudgetError(f"{name}={value!r}: expected a positive integer.")
    return number


def natural_int(name: str, value: object) -> int:
    """`value` as a plain integer, 0 or more; NumPy integers are taken, `bool` is not.

    Raises:
        BudgetError: It is anything else.
    """
    number = _integer(value)
    if number is None or number < 0:
        raise BudgetError(f"{name}={value!r}: expected an integer, 0 or more.")
    return number


def listed(name: str, values: Iterable[_Item], what: str) -> list[_Item]:
    """The values of a list that has some; text, a dict or a lone value is refused.

    Raises:
        BudgetError: It is not a list, or it is empty.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise BudgetError(f"{name}={values!r}: expected a list of {what}.")
    items = list(values)
    if not items:
        raise BudgetError(f"{name} is empty: give at least one of: {what}.")
    return items


def _integer(value: object) -> int | None:
    # Not operator.index: it also takes bool, and a tensor on a device, which would synchronise.
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _nearest(below: int, step: int) -> str:
    return f"use {below} or {below + step}" if below else f"use {step} or a multiple of it"
