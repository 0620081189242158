"""What graphs cost on a device, from the statistics of an encoder that captured some, for ladders of other sizes.

Between measured budgets everything is linear. What lies outside is an estimate and marked as one (`covers`): times below the
smallest budget stay at its time, and above the largest they rise as between the last two.

Graphs of an encoder share one pool and are captured largest first, so the largest pays for the pool and, on the way, for what is
compiled for all. Hence its bytes and seconds are not interpolated with those of the others: a ladder's largest graph takes the
bytes of the measured largest in proportion to its tokens, and as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vit_compile.errors import OptionError


@dataclass(frozen=True, slots=True)
class Measured:
    """Times and bytes of captured budgets; all tuples are as long as `token_budgets`."""

    token_budgets: tuple[int, ...]
    """Output tokens, ascending."""
    replay_ms: tuple[float, ...]
    """Of a replay; never falling."""
    eager_ms: tuple[float, ...] | None
    """Of as many tokens eagerly. None: not measured."""
    nbytes: tuple[int, ...]
    """Of all graphs of a budget, buffers included."""
    capture_seconds: tuple[float, ...]
    """Of all graphs of a budget."""

    def covers(self, ladder: Sequence[int]) -> bool:
        """Is every budget between measured ones?"""
        return self.token_budgets[0] <= min(ladder) and max(ladder) <= self.token_budgets[-1]

    def replay(self, tokens: int) -> float:
        """Milliseconds of a replay."""
        return _line(self.token_budgets, self.replay_ms, tokens)

    def eager(self, tokens: int) -> float:
        """Milliseconds of an eager run."""
        assert self.eager_ms is not None, "ask for it only where it was measured"
        return _line(self.token_budgets, self.eager_ms, tokens)

    def bytes_of(self, ladder: Sequence[int]) -> int:
        """Bytes of all graphs of a ladder; 0 for none."""
        if not ladder:
            return 0
        pool = self.nbytes[-1] * max(ladder) / self.token_budgets[-1]
        return round(pool + sum(_line(*self._smaller(self.nbytes), budget) for budget in sorted(ladder)[:-1]))

    def seconds_of(self, ladder: Sequence[int]) -> float:
        """Seconds to capture a ladder; 0 for none."""
        if not ladder:
            return 0.0
        budgets, seconds = self._smaller(self.capture_seconds)
        clamped = [min(budget, budgets[-1]) for budget in sorted(ladder)[:-1]]
        return self.capture_seconds[-1] + sum(_line(budgets, seconds, budget) for budget in clamped)

    def _smaller(self, values: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
        """Budgets and values without the largest; with it where it is the only one."""
        return (self.token_budgets[:-1] or self.token_budgets), (values[:-1] or values)


def from_snapshot(snapshot: object) -> Measured:
    """Reads `EncoderCudaGraphManager.snapshot()`, of an encoder with one path.

    A budget that has several graphs (capture axes) counts with the bytes and seconds of all, and the time of the slowest.

    Raises:
        OptionError: It is no snapshot, holds no graphs or those of several paths, or its graphs were not timed.
    """
    rows = snapshot.get("graphs") if isinstance(snapshot, Mapping) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise OptionError(
            "there are no graphs in what was measured: expected the JSON of `manager.snapshot()` after `capture()`."
        )
    paths = sorted({str(row.get("path")) for row in rows})
    if len(paths) > 1:
        raise OptionError(f"what was measured has graphs of the paths {', '.join(paths)}: leave those of one path in the file.")
    by_budget: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_budget.setdefault(int(_number(row, "token_budget", least=1)), []).append(row)
    budgets = sorted(by_budget)
    graphs = [by_budget[budget] for budget in budgets]
    replay_ms = [max(_number(row, "predicted_ms") for row in group) for group in graphs]
    has_eager = all(row.get("eager_ms") is not None for row in rows)
    return Measured(
        token_budgets=tuple(budgets),
        replay_ms=tuple(accumulate(replay_ms, max)),  # noise may make a larger graph faster
        eager_ms=tuple(max(_number(row, "eager_ms") for row in group) for group in graphs) if has_eager else None,
        nbytes=tuple(sum(int(_number(row, "nbytes")) for row in group) for group in graphs),
        capture_seconds=tuple(sum(_number(row, "capture_seconds") for row in group) for group in graphs),
    )


def _number(row: Mapping[str, Any], name: str, *, least: float = 0) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        advice = ': graphs are timed where `packing="cost"`' if value is None and name == "predicted_ms" else ""
        raise OptionError(f"{name}={value!r} of a measured graph: expected a number of {least} or more{advice}.")
    return value


def _line(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Piecewise linear; flat below the first point, on from the last two above the last, in proportion where there is one."""
    if len(xs) == 1:
        return ys[0] * max(1.0, x / xs[0])
    if x <= xs[0]:
        return ys[0]
    at = next((position for position in range(1, len(xs)) if x <= xs[position]), len(xs) - 1)
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    return max(0.0, ys[at - 1] + slope * (x - xs[at - 1]))
