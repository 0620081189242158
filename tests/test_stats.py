"""Counters, skips and call records: plain values that say exactly what happened."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from vit_compile import stats
from vit_compile.errors import CounterError, OptionError, SkipError
from vit_compile.stats import COUNTS, SKIP_CODES, CallRecord, Counters, Skip, record_call, report_skip


def test_counts_start_at_zero_and_add_up() -> None:
    """Every counter is an attribute; `add` takes an amount."""
    counters = Counters()
    assert all(getattr(counters, name) == 0 for name in COUNTS)
    counters.add("captures")
    counters.add("captures", 2)
    assert counters.captures == 3
    assert counters.pieces == 0


def test_unknown_counters_are_errors() -> None:
    """Reading an unknown name says which there are; adding to one is an internal fault."""
    counters = Counters()
    with pytest.raises(AttributeError, match="captures"):
        _ = counters.capture
    with pytest.raises(AssertionError, match="capture"):
        counters.add("capture")


def test_skips_are_counted_by_code() -> None:
    """A copy, without codes that never happened."""
    counters = Counters()
    counters.add_skip("rng")
    counters.add_skip("rng")
    skips = counters.skips
    skips["rng"] = 99
    assert counters.skips == {"rng": 2}


def test_snapshot_is_a_copy_of_everything() -> None:
    """All counts by name, skips by code."""
    counters = Counters()
    counters.add("pieces", 4)
    counters.add_skip("rng")
    counters.add_sites("fold", 2)
    counters.add_sites("fold", 3)
    snapshot = counters.snapshot()
    assert set(snapshot) == {*COUNTS, "skips", "pass_sites"}
    assert snapshot["pieces"] == 4
    assert snapshot["skips"] == {"rng": 1}
    assert snapshot["pass_sites"] == counters.pass_sites == {"fold": 5}
    counters.add("pieces")
    counters.add_sites("fold", 1)
    assert snapshot["pieces"] == 4
    assert snapshot["pass_sites"] == {"fold": 5}


def test_reset() -> None:
    """Everything is zero again."""
    counters = Counters()
    counters.add("pieces")
    counters.add_skip("rng")
    counters.add_sites("fold", 1)
    counters.reset()
    assert counters.pieces == 0
    assert counters.pass_sites == {}
    assert counters.skips == {}


def test_expect_passes_on_exact_changes() -> None:
    """Changes, not totals; what is not named is not looked at."""
    counters = Counters()
    counters.add("captures", 5)
    with counters.expect(captures=1, pieces=0):
        counters.add("captures")
        counters.add("exact_replays", 7)
        counters.add_skip("rng")


def test_expect_names_every_wrong_counter() -> None:
    """The error lists what was promised and what happened."""
    counters = Counters()
    with pytest.raises(CounterError, match=r"captures: expected \+1, got \+2; pieces: expected \+3, got \+0"):  # noqa: SIM117
        with counters.expect(captures=1, pieces=3, graphs_seen=0):
            counters.add("captures", 2)


@pytest.mark.parametrize(
    ("expected", "happens", "message"),
    [
        ({}, ["rng"], r"skip rng: expected \+0, got \+1"),
        ({"rng": 2}, ["rng"], r"skip rng: expected \+2, got \+1"),
        ({"rng": 1}, ["gradients"], r"skip gradients: expected \+0, got \+1; skip rng: expected \+1, got \+0"),
    ],
)
def test_expect_looks_at_all_skips(expected: dict[str, int], happens: list[str], message: str) -> None:
    """With `skips`, codes that are not named must not change."""
    counters = Counters()
    counters.add_skip("rng")
    with pytest.raises(CounterError, match=message), counters.expect(skips=expected):  # noqa: PT012
        for code in happens:
            counters.add_skip(code)


def test_expect_without_skips_ignores_them() -> None:
    """None means not looked at; an exact dict passes."""
    counters = Counters()
    with counters.expect(captures=0):
        counters.add_skip("rng")
    with counters.expect(skips={"rng": 1}):
        counters.add_skip("rng")


def test_expect_of_an_unknown_counter_is_an_option_error() -> None:
    """Before the block runs."""
    with pytest.raises(OptionError, match="captures"), Counters().expect(captured=1):
        pytest.fail("the block ran")


def test_expect_lets_the_blocks_own_error_through() -> None:
    """A failure inside the block is not hidden behind a counter."""
    with pytest.raises(ZeroDivisionError), Counters().expect(captures=1):
        _ = 1 // 0


def test_counting_from_many_threads() -> None:
    """No count is lost."""
    counters = Counters()

    def work() -> None:
        for _ in range(2000):
            counters.add("exact_replays")
            counters.add_skip("too-large")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.exact_replays == 16000
    assert counters.skips == {"too-large": 16000}


def test_skips_have_a_code_of_the_catalogue() -> None:
    """An unknown code is an internal fault; text is code and detail."""
    assert str(Skip("rng", "dropout at x")) == "rng: dropout at x"
    with pytest.raises(AssertionError, match="typo"):
        Skip("typo", "")
    assert Skip("rng", "a") == Skip("rng", "a")
    assert all(text and not text.endswith(".") for text in SKIP_CODES.values())


def test_a_skip_is_logged_once_per_code_and_always_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of a code is a warning with the reason's explanation; later ones are only counted."""
    monkeypatch.setattr(stats, "_logged", set())
    monkeypatch.setattr(stats, "counters", Counters())
    with caplog.at_level(logging.WARNING, logger="vit_compile"):
        for code in ("rng", "rng", "too-large", "rng"):
            report_skip(Skip(code, "here"), strict=False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "rng: here" in caplog.records[0].getMessage()
    assert SKIP_CODES["rng"] in caplog.records[0].getMessage()
    assert stats.counters.skips == {"rng": 3, "too-large": 1}


def test_strict_raises_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error carries code, detail and explanation; it is counted too."""
    monkeypatch.setattr(stats, "counters", Counters())
    with pytest.raises(SkipError, match=r"rng: dropout.*strict=True"):
        report_skip(Skip("rng", "dropout"), strict=True)
    assert stats.counters.skips == {"rng": 1}


def test_the_last_call_is_the_threads_own() -> None:
    """Each thread sees its own last call; a new thread has none."""
    mine = CallRecord("exact", 8, "full 8 rows", None, True)
    record_call(mine)
    seen: list[CallRecord | None] = []

    def other() -> None:
        seen.append(stats.last_call())
        record_call(CallRecord("plain", None, None, "rng: x", False))
        seen.append(stats.last_call())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1].kind == "plain"
    assert stats.last_call() is mine


def test_stats_need_no_torch() -> None:
    """The module is usable where torch is not imported."""
    code = """
import sys, types
sys.modules["torch"] = None
package = types.ModuleType("vit_compile")
package.__path__ = ["vit_compile"]
sys.modules["vit_compile"] = package
from vit_compile.stats import counters
counters.add("captures")
print(counters.captures)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "1", done.stderr
