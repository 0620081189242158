"""What eager runs are taken to cost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.toys import captured, packed_table
from vit_compile.runtime import capture_work
from vit_compile.runtime.item_spec import DEFAULT_PATH


def test_a_line_through_two_sizes_and_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at the smallest and the largest budget; all parts of the line are raised, so that a graph is only left for a clear
    gain."""
    made = captured(packed_table(), token_budgets=(4, 8, 16), mode="eager", packing="greedy")
    asked: list[int] = []

    def least(call: Any, device: Any, runs: int) -> tuple[float, float]:
        asked.append(len(call.args[0]["pixels"]))
        return 2.0, 3.0 + 0.5 * (asked[-1] // 4)

    monkeypatch.setattr(capture_work, "least_ms", least)
    (cost,) = made._work._time_eager(made._set, [DEFAULT_PATH]).values()
    assert asked == [16, 64], "rows of the smallest and of the largest graph"
    margin = capture_work.EAGER_MARGIN
    assert margin > 1
    assert (cost.fixed_ms, cost.ms_per_token, cost.least_ms) == pytest.approx((3 * margin, 0.5 * margin, 2 * margin))
