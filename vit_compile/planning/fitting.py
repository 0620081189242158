"""Fitted ladders: the budgets that waste least on the traffic that was seen.

A *histogram* says how often a replay has so many output tokens, as `{tokens: weight}` or as pairs; weights may be counts or
shares, and those of repeated token counts add up. `fit` makes the best ladder for it, `histogram_from_trace` makes one from
recorded requests, and `padded_share` says how much of the work a ladder wastes. Nothing is replayed for 0 tokens, so such
entries count nowhere.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vit_compile.errors import BudgetError
from vit_compile.planning.packing import Item, Limits, greedy
from vit_compile.planning.units import listed, natural_int, positive_int

Histogram: TypeAlias = Mapping[int, float] | Iterable[tuple[int, float]]
"""Output tokens of a replay -> weight (0 or more)."""

Cost: TypeAlias = Callable[[int], float]
"""What one replay of a budget costs, in any unit; it never falls as the budget grows."""


def fit(
    histogram: Histogram, max_graphs: int, *, maximum: int | None = None, multiple_of: int = 1, cost: Cost | None = None
) -> tuple[int, ...]:
    """The ladder of at most `max_graphs` budgets that costs least on a histogram.

    Minimises the sum of weight x cost(smallest budget that holds the tokens), exactly but for the rounding of floats. Among
    equally good ladders it is one of the shortest. 1300 distinct sizes and 12 graphs take a few hundredths of a second.

    Only the token counts themselves, rounded up to `multiple_of`, need to be tried as budgets. Take any ladder and lower each
    budget to the largest rounded count among the entries that it serves; drop a budget that serves none. Every entry still
    fits where it was, and as the cost never falls with size, no entry has become dearer: some best ladder has this form.

    Args:
        histogram: Output tokens of a replay -> weight.
        max_graphs: Most budgets.
        maximum: Largest budget, in output tokens; always on the ladder, also where no entry needs it. Entries above it run
            eagerly whatever the ladder, and are left out. None: the ladder ends at the largest entry.
        multiple_of: Every budget is a multiple of this number of tokens, `maximum` included.
        cost: What a replay of a budget costs, such as a measured time. It is called once for each size that may become a
            budget. None: the budget itself, so that padding is what is minimised.

    Returns:
        Budgets in output tokens, ascending. Entries without weight are not covered.

    Raises:
        BudgetError: A number is out of range, no entry has weight and there is no maximum, the maximum is not a multiple, or
            the cost falls.
    """
    most = positive_int("max_graphs", max_graphs)
    step = positive_int("multiple_of", multiple_of)
    top = None if maximum is None else _checked_maximum(maximum, step)
    weights: dict[int, float] = {} if top is None else {top: 0.0}
    for tokens, weight in _read(histogram).items():
        if top is None or tokens <= top:
            size = -(-tokens // step) * step
            weights[size] = weights.get(size, 0.0) + weight
    if not weights:
        raise BudgetError("the histogram has no entry with tokens and weight: give at least one, or a maximum.")
    sizes = sorted(weights)
    chosen = _cheapest(np.array([weights[size] for size in sizes]), np.array(_costs(sizes, cost)), min(most, len(sizes)))
    return tuple(sizes[at] for at in chosen)


def histogram_from_trace(requests: Iterable[Iterable[int]], *, maximum: int, max_items: int) -> dict[int, float]:
    """How often a replay has so many tokens when recorded requests are packed one by one.

    A replay serves a packed batch and not an item, so the histogram counts batch totals. Batches above `maximum` are left
    out: they run eagerly.

    Args:
        requests: For each request the output tokens of its items, 0 or more each; a request may have no items.
        maximum: Largest budget, in output tokens.
        max_items: Most items of a batch.

    Returns:
        Output tokens of a replay -> number of replays, ascending.

    Raises:
        BudgetError: A number is out of range, or there are no requests, or one is not a list.
    """
    largest = positive_int("maximum", maximum)
    limits = Limits(budgets=((largest,),), max_items=positive_int("max_items", max_items))
    replays: dict[int, float] = {}
    for number, request in enumerate(listed("requests", requests, "requests, each a list of output-token counts")):
        for total in _batch_totals(number, request, limits):
            if 0 < total <= largest:
                replays[total] = replays.get(total, 0.0) + 1.0
    return dict(sorted(replays.items()))


def padded_share(histogram: Histogram, ladder: Iterable[int]) -> float:
    """Padding tokens / computed tokens of all replays, between 0 and 1.

    Entries above the largest budget run eagerly, without padding, and are left out: compare ladders with the same maximum.

    Args:
        histogram: Output tokens of a replay -> weight.
        ladder: Budgets in output tokens, in any order. A 0 (skip this path) is taken, and serves nothing.

    Raises:
        BudgetError: The ladder is empty, or a number is out of range.
    """
    budgets = sorted({natural_int("budget", budget) for budget in listed("ladder", ladder, "output-token counts")})
    computed = padding = 0.0
    for tokens, weight in _read(histogram).items():
        at = bisect_left(budgets, tokens)
        if at < len(budgets):
            computed += weight * budgets[at]
            padding += weight * (budgets[at] - tokens)
    return padding / computed if computed else 0.0


def _cheapest(weights: npt.NDArray[Any], costs: npt.NDArray[Any], most: int) -> list[int]:
    """Positions of the best budgets, ascending, the last position always among them. O(n^2 x most) time, O(n x most) memory."""
    count = len(costs)
    weight_below = np.concatenate(([0.0], np.cumsum(weights)))
    # least[k, i]: least cost of the first i sizes with k budgets, the largest of them being the i-th size; before[k, i]: how
    # many sizes the k - 1 smaller budgets serve in it.
    least = np.full((most + 1, count + 1), np.inf)
    least[0, 0] = 0.0
    before = np.zeros((most + 1, count + 1), dtype=np.int64)
    for i in range(1, count + 1):
        split_at = least[:-1, :i] + (weight_below[i] - weight_below[:i]) * costs[i - 1]
        before[1:, i] = split_at.argmin(axis=1)
        least[1:, i] = split_at.min(axis=1)
    chosen, served = [], count
    for k in range(int(least[:, count].argmin()), 0, -1):
        chosen.append(served - 1)
        served = int(before[k, served])
    return chosen[::-1]


def _costs(sizes: list[int], cost: Cost | None) -> list[float]:
    if cost is None:
        return [float(size) for size in sizes]
    costs: list[float] = []
    for at, size in enumerate(sizes):
        value = cost(size)
        if not _is_finite(value):
            raise BudgetError(f"cost({size})={value!r}: expected a finite number.")
        if at and value < costs[-1]:
            raise BudgetError(
                f"cost({size})={value!r} is below cost({sizes[at - 1]})={costs[-1]!r}, and a larger replay may not be cheaper: "
                "take the running maximum of what was measured."
            )
        costs.append(float(value))
    return costs


def _checked_maximum(maximum: int, step: int) -> int:
    top = positive_int("maximum", maximum)
    if top % step:
        below = top // step * step
        use = f"{below} or {below + step}" if below else f"{step}"
        raise BudgetError(f"maximum={top} is not a multiple of multiple_of={step}: use {use}, or another multiple_of.")
    return top


def _read(histogram: Histogram) -> dict[int, float]:
    """Entries with tokens and weight, each token count once."""
    if isinstance(histogram, str | bytes) or not isinstance(histogram, Iterable):
        raise BudgetError(f"histogram={histogram!r}: expected {{output tokens: weight}}, or pairs of them.")
    weights: dict[int, float] = {}
    for entry in histogram.items() if isinstance(histogram, Mapping) else histogram:
        try:
            tokens, weight = entry
        except (TypeError, ValueError):
            raise BudgetError(f"entry {entry!r} of the histogram: expected a pair, output tokens and weight.") from None
        size = natural_int("tokens of the histogram", tokens)
        if not _is_finite(weight) or weight < 0:
            raise BudgetError(f"weight {weight!r} of {size} tokens: expected a finite number, 0 or more.")
        if size and weight:
            weights[size] = weights.get(size, 0.0) + float(weight)
    return weights


def _batch_totals(number: int, request: Iterable[int], limits: Limits) -> list[int]:
    if isinstance(request, str | bytes | Mapping) or not isinstance(request, Iterable):
        raise BudgetError(f"request {number} is {request!r}: expected a list of output-token counts.")
    tokens = [natural_int(f"item of request {number}", item) for item in request]
    batches = greedy([Item((count,)) for count in tokens], limits)
    return [sum(tokens[at] for at in batch.indices) for batch in batches]


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
