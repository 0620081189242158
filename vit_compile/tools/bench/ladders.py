"""The ladders of the benchmark: fitted for this package's own mode, powers of two for the documented method. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vit_compile.planning import budgets
from vit_compile.planning.balance import longest_first
from vit_compile.planning.traffic import Request
from vit_compile.planning.units import Grid
from vit_compile.tools.bench.cases import Traffic

MAX_ITEMS = 16
STEP = 16
"""Budgets of fitted ladders are multiples of this; not less than `MAX_ITEMS`, so that each item may have a token."""
USUAL_MAXIMUM, SMALL_MAXIMUM = 4096, 256
SMALLEST_POWER, SMALL_SMALLEST_POWER = 64, 16
MAX_FRAMES = 64


@dataclass(frozen=True, slots=True)
class Ladder:
    """Budgets in output tokens, and what one replay may hold."""

    budgets: tuple[int, ...]
    max_items: int
    max_frames: int
    """0: no clips."""


Tokens = Callable[[Request], list[int]]
"""Output tokens of each picture of a request, in order."""
Grids = Callable[[Request], list[Grid]]
"""Grids of its clips."""


def fitted(traffic: Traffic, tokens: Tokens, clips: Grids, *, max_graphs: int, max_tokens: int | None, small: bool) -> Ladder:
    """The ladder that wastes least on `traffic.fitting`; for repeated requests exactly their sizes."""
    sizes = [tokens(request) for request in traffic.fitting]
    frames = _frames(traffic, clips)
    if traffic.is_single:
        cap = max_tokens or max(sum(size) for size in sizes)
        chosen = budgets.explicit(min(sum(size), cap) for size in sizes)
        return Ladder(chosen, min(max(map(len, sizes)), chosen[0]), frames)
    maximum = _maximum(sizes, max_tokens, small=small)
    histogram = budgets.histogram_from_trace(sizes, maximum=maximum, max_items=MAX_ITEMS)
    return Ladder(budgets.fit(histogram, max_graphs, maximum=maximum, multiple_of=STEP), MAX_ITEMS, frames)


def explicit(sizes: tuple[int, ...], traffic: Traffic, clips: Grids) -> Ladder:
    """The user's own."""
    items = max(MAX_ITEMS, _most_items(traffic)) if traffic.is_single else MAX_ITEMS
    return Ladder(budgets.explicit(sizes), min(items, min(sizes)), _frames(traffic, clips))


def powers_of_two(traffic: Traffic, tokens: Tokens, clips: Grids, *, max_tokens: int | None, small: bool) -> Ladder:
    """As the documented method has it: doubling up to the same maximum as the fitted ladder, 16 items."""
    maximum = _maximum([tokens(request) for request in traffic.fitting], max_tokens, small=small)
    chosen = budgets.power_of_two(min(SMALL_SMALLEST_POWER if small else SMALLEST_POWER, maximum), maximum)
    items = max(MAX_ITEMS, _most_items(traffic)) if traffic.is_single else MAX_ITEMS
    return Ladder(chosen, min(items, chosen[0]), _frames(traffic, clips))


def shared(requests: Sequence[Request], tokens: Tokens, ranks: int) -> tuple[Request, ...]:
    """What each rank of a group gets of each request: ladders are for that."""
    if ranks == 1:
        return tuple(requests)
    parts = [tuple(request[index] for index in share) for request in requests for share in longest_first(tokens(request), ranks)]
    return tuple(part for part in parts if part)


def _most_items(traffic: Traffic) -> int:
    return max(map(len, traffic.fitting))


def _maximum(sizes: list[list[int]], max_tokens: int | None, *, small: bool) -> int:
    """At least the largest picture; a whole request where that is not more than usual."""
    if max_tokens is not None:
        return -(-max_tokens // STEP) * STEP
    usual = SMALL_MAXIMUM if small else USUAL_MAXIMUM
    needed = max(max(map(max, sizes)), min(usual, max(map(sum, sizes))))
    return -(-needed // STEP) * STEP


def _frames(traffic: Traffic, clips: Grids) -> int:
    """Segments of one replay: those of the longest request, within reason. 0 without clips."""
    found = [grids for request in traffic.fitting if (grids := clips(request))]
    return min(MAX_FRAMES, max(MAX_ITEMS, *(sum(t for t, _, _ in grids) for grids in found))) if found else 0
