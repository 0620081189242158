"""What eager runs are taken to cost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.test_replay_times import images, planner
from tests.runtime.toys import captured, packed_table
from vit_compile.runtime import capture_work
from vit_compile.runtime.graphs import GraphKey
from vit_compile.runtime.item_spec import DEFAULT_PATH
from vit_compile.runtime.planner import EagerCost
from vit_compile.runtime.replay_times import ReplayTime


def test_a_line_through_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at the smallest and the largest budget; squares cost what they cost the graphs."""
    made = captured(packed_table(), token_budgets=(4, 8, 16), mode="eager", packing="greedy")
    asked: list[int] = []

    def least(call: Any, device: Any, runs: int) -> tuple[float, float]:
        asked.append(len(call.args[0]["pixels"]))
        return 2.0, 3.0 + 0.5 * (asked[-1] // 4)

    monkeypatch.setattr(capture_work, "least_ms", least)
    for number, graph in enumerate(made._captured.set.graphs.values()):
        graph.time = ReplayTime(1.0, 0.125 * number, 8)
    (cost,) = made._captured.work._time_eager(made._captured.set, [DEFAULT_PATH]).values()
    assert asked == [16, 64], "rows of the smallest and of the largest graph"
    assert cost == EagerCost(3.0, 0.5, 2.0, 0.125 * (len(made._captured.set.graphs) - 1))


@pytest.mark.parametrize("tokens", [8192, 12000, 16384])
def test_one_long_image_is_not_sent_to_eager(tokens: int) -> None:
    """Eager runs that are always a tenth slower than the replay of the same batch are never chosen, though they are timed on two
    items of half the length and graphs for one item on a whole one."""
    budget, fixed, per_token, per_square, slower = 16384, 2.0, 0.004, 4e-7, 1.1
    time = ReplayTime(fixed + per_token * budget + per_square * budget**2, per_square, budget**2)
    two_halves = per_square * budget**2 / 2 / budget  # in a line through the origin and the largest budget
    eager = EagerCost(slower * fixed, slower * (per_token + two_halves), 0.0, per_square)
    assert isinstance(planner({budget: time}, eager=eager).plan(images(tokens))[0].choices[0], GraphKey)
    flat = planner({budget: ReplayTime(time.ms)}, eager=eager)
    assert not isinstance(flat.plan(images(tokens))[0].choices[0], GraphKey), "the control: one time for all layouts"
