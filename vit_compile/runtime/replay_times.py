"""What a replay takes, by its layout: attention costs in proportion to the squares of its segments' lengths.

Everything else in a graph is the same work for every batch. So a graph is timed with two layouts: few long items that fill it,
and short ones (many, or one that fills half where there is no room for many). A line through the two predicts the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW_ITEMS = 2
"""Items of the layout whose time is a graph's own (`predicted_ms`)."""
MANY_ITEMS = 16
"""Most items of the other layout."""
LEAST_MANY_ITEMS = 4
"""With fewer the two layouts are too alike for a line through them."""
MOST_OF_LAYOUT = 0.95
"""Share of a graph's time that its layout can make up, whatever the noise of measuring says."""


def squares_of(tokens: int, frames: int) -> int:
    """Of one item: each of its frames is a segment of `tokens / frames` output tokens. A whole number, so that the squares of a
    batch are the same bits in whatever order its items are added."""
    return tokens * tokens // frames


@dataclass(frozen=True, slots=True)
class ReplayTime:
    """Predicted milliseconds of a graph's replay, by the squares of a batch."""

    ms: float
    """Measured."""

    slope: float = 0.0
    """Milliseconds for each square more; 0: one time for all layouts."""

    squares: int = 0
    """Of the layout that was measured."""

    def __call__(self, squares: int) -> float:
        """Milliseconds of a replay with so many squares; never below 0."""
        return max(0.0, self.line(squares))

    def line(self, squares: int) -> float:
        """The same, also below 0."""
        return self.ms + self.slope * (squares - self.squares)


def through(few: ReplayTime, short: ReplayTime) -> ReplayTime:
    """The time of few long items, with a slope where short ones, which have fewer squares, take less."""
    saved, squares = few.ms - short.ms, few.squares - short.squares
    slope = saved / squares if saved > 0 and squares > 0 else 0.0
    return ReplayTime(few.ms, min(slope, MOST_OF_LAYOUT * few.ms / max(few.squares, 1)), few.squares)


def candidates(steps: Sequence[int], times: Sequence[ReplayTime]) -> list[list[tuple[int, ReplayTime]]]:
    """For each budget: those from it on, with their times, that are the fastest for some batch that fits into it.

    Most often that is the budget itself: noise in measurements and other kernels make exceptions. What another beats with no
    squares and with as many as fit, it beats everywhere between.

    Args:
        steps: budgets, ascending.
        times: of a replay of each.
    """
    found = []
    for first, step in enumerate(steps):
        ends = sorted((time.line(0), time.line(step * step), at) for at, time in enumerate(times[first:], first))
        kept, least = [], math.inf
        for _, at_most, at in ends:
            if at_most < least:
                kept.append(at)
                least = at_most
        found.append([(steps[at], times[at]) for at in sorted(kept)])
    return found
