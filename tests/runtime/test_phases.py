"""Where the time of a capture goes."""

from __future__ import annotations

import time

import pytest
import torch

from tests import towers
from tests.models.test_packed_grid import captured, table_of
from vit_compile.runtime.phases import FIRST_RUNS, PHASES, TIMING, TRIALS, Phases


def test_time_is_added_up_by_phase_also_when_it_fails() -> None:
    """Each block's seconds go to its own phase."""
    phases = Phases(torch.device("cpu"))
    for _ in range(2):
        with phases(TRIALS):
            time.sleep(0.01)

    def fails() -> None:
        with phases(TIMING):
            time.sleep(0.005)
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fails()
    assert tuple(phases.seconds) == PHASES
    assert phases.seconds[TRIALS] >= 0.02
    assert phases.seconds[TIMING] >= 0.005
    assert phases.seconds[FIRST_RUNS] == 0


def test_a_capture_says_where_its_time_went() -> None:
    """Phases that ran have time, all of them together no more than the whole, and the next capture adds to them."""
    started = time.perf_counter()
    made = captured(table_of(towers.tiny_qwen3_vl), token_budgets=(48,), packing="cost", mode="eager")
    whole = time.perf_counter() - started
    first = made.snapshot()["phase_seconds"]
    assert min(first[name] for name in (FIRST_RUNS, TRIALS, TIMING)) > 0
    assert sum(first.values()) <= whole
    made.clear()
    made.capture()
    assert made.snapshot()["phase_seconds"][FIRST_RUNS] > first[FIRST_RUNS]
