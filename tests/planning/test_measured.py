"""What was measured is read from an encoder's statistics, and interpolated as it says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import OptionError
from vit_compile.planning.measured import Measured, from_snapshot
from vit_compile.runtime.statistics import EncoderStatistics

KNOWN = Measured(
    token_budgets=(64, 256, 1024, 4096),
    replay_ms=(2.0, 4.0, 18.0, 80.0),
    eager_ms=(22.0, 23.0, 27.0, 90.0),
    nbytes=(1000, 2000, 6000, 500_000),
    capture_seconds=(0.4, 0.5, 0.9, 25.0),
)


def statistics(*graphs: tuple[int, str, int, float, float | None, float | None]) -> dict[str, Any]:
    """The snapshot of an encoder with these graphs: budget, axis key, bytes, seconds, ms, eager ms."""
    counted = EncoderStatistics(log_every=0)
    for budget, axis, nbytes, seconds, ms, eager_ms in graphs:
        counted.captured("main", budget, (axis,), nbytes=nbytes, seconds=seconds)
        if ms is not None:
            counted.calibrated("main", budget, (axis,), ms, eager_ms)
    found: dict[str, Any] = json.loads(json.dumps(counted.snapshot()))
    return found


@given(st.integers(64, 4096))
def test_times_are_linear_between_measured_budgets(tokens: int) -> None:
    """Replays and eager runs agree with NumPy's interpolation, and are exact at measured budgets."""
    assert KNOWN.replay(tokens) == pytest.approx(np.interp(tokens, KNOWN.token_budgets, KNOWN.replay_ms))
    assert KNOWN.eager(tokens) == pytest.approx(np.interp(tokens, KNOWN.token_budgets, (22.0, 23.0, 27.0, 90.0)))
    assert [KNOWN.replay(budget) for budget in KNOWN.token_budgets] == list(KNOWN.replay_ms)


def test_outside_of_what_was_measured() -> None:
    """Below, the smallest time stays; above, the last slope goes on; both are told."""
    assert KNOWN.replay(1) == 2.0
    assert KNOWN.replay(4096 + 3072) == pytest.approx(80 + 62)
    assert KNOWN.covers((64, 4096))
    assert not KNOWN.covers((32, 4096))
    assert not KNOWN.covers((64, 4097))


@given(st.integers(1, 9000), st.integers(0, 500))
def test_no_larger_replay_is_cheaper(tokens: int, more: int) -> None:
    """Times never fall, which fitting relies on."""
    assert KNOWN.replay(tokens) <= KNOWN.replay(tokens + more)


def test_the_largest_graph_pays_for_the_pool() -> None:
    """A ladder's largest graph takes the measured largest's bytes in proportion, the others what small graphs took."""
    assert KNOWN.bytes_of(()) == 0
    assert KNOWN.bytes_of((4096,)) == 500_000
    assert KNOWN.bytes_of((1024,)) == 125_000
    assert KNOWN.bytes_of((64, 256, 1024, 4096)) == 509_000  # as measured
    assert KNOWN.bytes_of((640, 2048)) == 4000 + 250_000
    assert KNOWN.bytes_of((32, 2048)) == 1000 + 250_000
    assert KNOWN.bytes_of((1792, 4096)) == 10_000 + 500_000  # on from 256 and 1024


def test_the_first_graph_takes_the_seconds_of_what_is_compiled() -> None:
    """Whatever its size, the largest takes as long as the measured largest; the others between the small ones."""
    assert KNOWN.seconds_of(()) == 0
    assert KNOWN.seconds_of((512,)) == 25.0
    assert KNOWN.seconds_of((64, 256, 1024, 4096)) == pytest.approx(26.8)  # as measured
    assert KNOWN.seconds_of((640, 2048)) == pytest.approx(25.7)
    assert KNOWN.seconds_of((2000, 2048)) == pytest.approx(25.9)


def test_one_measured_graph_is_scaled() -> None:
    """With a single graph larger ones are in proportion, and smaller ones are taken to be as dear as it."""
    one = from_snapshot(statistics((100, "", 1000, 2.0, 5.0, None)))
    assert [one.replay(tokens) for tokens in (50, 100, 300)] == [5.0, 5.0, 15.0]
    assert one.bytes_of((50, 100)) == 2000
    assert one.seconds_of((50, 100)) == 4.0
    assert one.eager_ms is None


def test_a_snapshot_is_read() -> None:
    """The graphs of a budget count together in bytes and seconds, the slowest in time; noise never makes times fall."""
    snapshot = statistics(
        (4096, "16", 5000, 20.0, 50.0, 60.0),
        (64, "1", 10, 0.5, 1.8, 20.0),
        (64, "16", 20, 0.25, 2.0, 20.0),
        (1024, "1", 100, 0.5, 1.9, 25.0),
    )
    assert from_snapshot(snapshot) == Measured(
        token_budgets=(64, 1024, 4096),
        replay_ms=(2.0, 2.0, 50.0),
        eager_ms=(20.0, 25.0, 60.0),
        nbytes=(30, 100, 5000),
        capture_seconds=(0.75, 0.5, 20.0),
    )


def changed(**fields: object) -> dict[str, Any]:
    """A snapshot of one good graph and one with these fields."""
    snapshot = statistics((64, "", 10, 0.5, 1.0, 2.0), (128, "", 10, 0.5, 1.0, 2.0))
    snapshot["graphs"][1].update(fields)
    return snapshot


@pytest.mark.parametrize(
    ("snapshot", "complaint"),
    [
        ([], "there are no graphs"),
        ({}, "there are no graphs"),
        ({"graphs": {}}, "there are no graphs"),
        ({"graphs": []}, "there are no graphs"),
        ({"graphs": [3]}, "there are no graphs"),
        (changed(path="local"), "paths local, main"),
        (changed(predicted_ms=None), 'predicted_ms=None .*graphs are timed where `packing="cost"`'),
        (changed(token_budget=0), "token_budget=0 .*expected a number of 1 or more"),
        (changed(nbytes=-1), "nbytes=-1"),
        (changed(nbytes="12"), "nbytes='12'"),
        (changed(capture_seconds=True), "capture_seconds=True"),
        (changed(predicted_ms=float("nan")), "predicted_ms=nan"),
    ],
)
def test_what_is_no_snapshot_is_refused(snapshot: object, complaint: str) -> None:
    """A file of another kind, several paths, untimed graphs and impossible numbers are errors that name the field."""
    with pytest.raises(OptionError, match=complaint):
        from_snapshot(snapshot)
