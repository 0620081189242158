"""Which items share one replay: the records of packing, and the greedy packer.

An item is counted in output tokens per path (a path is one set of graphs with a ladder of its own; most towers have one) and
in frames (attention segments, for which buffers have room). A plan puts every item into exactly one batch, and a batch of
several items never exceeds the largest budget of any path, the most items or the most frames. An item that alone exceeds one
of them gets a batch to itself, without a budget: it runs eagerly, the rest do not.

Order: packers sort, so results come out in plan order. `Batch.indices` leads back to the caller's order.

Nothing here knows what a batch costs: see `cost_plans`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from vit_compile.errors import BudgetError
from vit_compile.planning import units

Group: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""`(indices, tokens per path, frames)`: items for one batch, with their totals."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image or clip, as packers see it.

    Raises:
        BudgetError: A number is not an integer, tokens are negative, or there is not a single frame.
    """

    tokens: tuple[int, ...]
    """Output tokens on each path, in path order. 0: the item has nothing on that path."""
    frames: int = 1
    """Attention segments: 1 for an image, the number of frames for a clip."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple([units.natural_int("tokens", tokens) for tokens in self.tokens]))
        object.__setattr__(self, "frames", units.positive_int("frames", self.frames))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may hold.

    Raises:
        BudgetError: A ladder is empty or not strictly ascending, there is no ladder, or a number is out of range.
    """

    budgets: tuple[tuple[int, ...], ...]
    """The ladder of each path, in output tokens, ascending. A leading 0 ("skip this path") is allowed and changes nothing."""
    max_items: int
    """Most items of a batch."""
    max_frames: int | None = None
    """Most frames of a batch. `None`: frames are not limited."""

    def __post_init__(self) -> None:
        given = units.listed("budgets", self.budgets, "ladders, one per path")
        ladders = []
        for path, budgets in enumerate(given):
            name = f"budgets of path {path}"
            ladder = tuple([units.natural_int(name, budget) for budget in units.listed(name, budgets, "output-token counts")])
            if any(low >= high for low, high in pairwise(ladder)):
                raise BudgetError(f"{name}={ladder}: expected ascending numbers, each once.")
            ladders.append(ladder)
        object.__setattr__(self, "budgets", tuple(ladders))
        object.__setattr__(self, "max_items", units.positive_int("max_items", self.max_items))
        if self.max_frames is not None:
            if self.max_frames == 0:
                raise BudgetError("max_frames=0: no item could be replayed; give None where frames are not limited.")
            object.__setattr__(self, "max_frames", units.positive_int("max_frames", self.max_frames))


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that run together, and how."""

    indices: tuple[int, ...]
    """Positions of the items in what the packer was given, in the order in which they are laid out."""
    budgets: tuple[int | None, ...]
    """Per path: the budget to replay; 0: no item has anything on that path, skip it; `None`: run that path eagerly."""


def greedy(items: Sequence[Item], limits: Limits, *, look_ahead: bool = False) -> list[Batch]:
    """Smallest first, each batch as full as it gets, then the smallest budget that holds it.

    Items are sorted by their tokens summed over paths (equal ones keep their order) and walked: an item joins the open batch
    unless that would exceed the most items, the *largest* budget of any path, or the most frames; then the batch is closed,
    and the item begins a new one. A closed batch takes, on each path by itself, the *smallest* budget that is not below its
    total. A path whose largest budget is too small gets `None`, which only happens to an item alone; an item with more
    frames than fit gets `None` wherever it has tokens.

    Args:
        items: Images or clips, in the caller's order.
        limits: What a batch may hold.
        look_ahead: Also close the batch before an item that may join it where two small graphs beat a large one: where the
            budgets that the batch and the item would take apart, summed over paths, are less than those of the batch with
            the item. Equal sums join. The decision is made once per item, in walking order, and looks at budgets alone.

    Returns:
        Batches in walking order; none for no items.

    Raises:
        BudgetError: An item has another number of paths than there are ladders.
    """
    lineup = Lineup(items, limits)
    groups = lineup.groups(lineup.greedy_ends(look_ahead=look_ahead))
    return [Batch(indices, lineup.smallest_budgets(tokens, frames)) for indices, tokens, frames in groups]


class Lineup:
    """Items in packing order with their running totals, so that the size of any run of neighbours is a subtraction.

    Dimensions are the paths, in order, and then frames; all are limited in the same way. Positions count along the order.
    """

    __slots__ = ("caps", "ladders", "max_items", "order", "sizes", "sums")

    order: tuple[int, ...]
    """Index of the item at each position, smallest total first."""
    sizes: list[tuple[int, ...]]
    """Per position: tokens on each path, then frames."""
    sums: list[list[int]]
    """Per dimension: the totals of all positions before 0, 1, ..., count."""
    caps: tuple[int, ...]
    """Per dimension: the most that a batch of several items may hold."""
    ladders: tuple[tuple[int, ...], ...]
    """Per path: its budgets."""
    max_items: int
    """Most items of a batch."""

    def __init__(self, items: Sequence[Item], limits: Limits) -> None:
        paths = len(limits.budgets)
        totals = []
        for index, item in enumerate(items):
            if len(item.tokens) != paths:
                raise BudgetError(
                    f"item {index} has tokens={item.tokens}, and there are {paths} ladders: give one token count per path."
                )
            totals.append(sum(item.tokens))
        self.order = tuple(sorted(range(len(totals)), key=totals.__getitem__))
        self.sizes = [(*items[index].tokens, items[index].frames) for index in self.order]
        self.sums = [[0, *accumulate(size[dim] for size in self.sizes)] for dim in range(paths + 1)]
        max_frames = self.sums[-1][-1] if limits.max_frames is None else limits.max_frames
        self.caps = (*[ladder[-1] for ladder in limits.budgets], max_frames)
        self.ladders = limits.budgets
        self.max_items = limits.max_items

    def reach(self, start: int) -> int:
        """End of the longest run from `start` that one batch may hold; one item is always allowed."""
        end = min(start + self.max_items, len(self.order))
        for sums, cap in zip(self.sums, self.caps, strict=True):
            end = bisect_right(sums, sums[start] + cap, start + 1, end + 1) - 1
        return max(end, start + 1)

    def group(self, start: int, end: int) -> Group:
        """The items from `start` to before `end`, with their totals."""
        totals = tuple([sums[end] - sums[start] for sums in self.sums])
        return self.order[start:end], totals[:-1], totals[-1]

    def groups(self, ends: Sequence[int]) -> list[Group]:
        """The runs that end, one after the other, at `ends`."""
        return [self.group(start, end) for start, end in pairwise((0, *ends))]

    def smallest_budgets(self, tokens: tuple[int, ...], frames: int) -> tuple[int | None, ...]:
        """Per path the smallest budget that holds the tokens, 0 where there are none, `None` where none fits."""
        if frames > self.caps[-1]:
            return tuple([None if count else 0 for count in tokens])
        budgets: list[int | None] = []
        for ladder, count in zip(self.ladders, tokens, strict=True):
            at = bisect_left(ladder, count)
            budgets.append(0 if count == 0 else ladder[at] if at < len(ladder) else None)
        return tuple(budgets)

    def greedy_ends(self, *, look_ahead: bool = False) -> list[int]:
        """Where the batches of `greedy` end."""
        ends: list[int] = []
        start, count = 0, len(self.order)
        while start < count:
            end = self.reach(start)
            start = self._first_parting(start, end) if look_ahead else end
            ends.append(start)
        return ends

    def _first_parting(self, start: int, end: int) -> int:
        """First position in a run that fits before which two graphs are smaller than one; `end` where there is none."""
        together = self._budget_sum(start, start + 1) if end - start > 1 else 0
        for position in range(start + 1, end):
            before, together = together, self._budget_sum(start, position + 1)
            if before + self._budget_sum(position, position + 1) < together:
                return position
        return end

    def _budget_sum(self, start: int, end: int) -> int:
        _, tokens, frames = self.group(start, end)
        # A run that fits has a budget, or nothing to do, on every path.
        return sum(budget or 0 for budget in self.smallest_budgets(tokens, frames))
