"""Statistics of an encoder: totals are the sum of their parts, whatever happens in whatever order, from any thread."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.stats import SKIP_CODES, Skip

Event = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method, arguments, keyword arguments."""

KEYS = st.tuples(st.sampled_from(["main", "local"]), st.sampled_from([64, 128]), st.sampled_from([(), ("wide", (2, 3))]))
COUNT = st.integers(0, 9)
SECONDS = st.integers(0, 100).map(float)  # whole, so that sums are exact in any order
CODES = st.sampled_from(["too-large", "not-captured", "eager-cheaper"])


@st.composite
def events(draw: st.DrawFn) -> Event:
    """One call of any method that changes something."""
    name = draw(st.sampled_from(sorted(SHAPES)))
    return draw(SHAPES[name].map(lambda given: (name, *given)))


SHAPES: dict[str, st.SearchStrategy[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "replay": st.tuples(KEYS, st.fixed_dictionaries({"items": COUNT, "tokens": st.integers(0, 64)})),
    "eager": st.tuples(
        st.tuples(st.sampled_from(["main", "local"]), CODES), st.fixed_dictionaries({"items": COUNT, "tokens": COUNT})
    ),
    "finished": st.tuples(st.tuples(COUNT) | st.tuples(COUNT, SECONDS), st.just({})),
    "captured": st.tuples(KEYS, st.fixed_dictionaries({"nbytes": COUNT, "seconds": SECONDS})),
    "skipped": st.tuples(st.tuples(KEYS, CODES).map(lambda given: (*given[0], Skip(given[1], "why"))), st.just({})),
    "recaptured": st.just(((), {})),
    "cleared": st.just(((), {})),
    "calibrated": st.tuples(st.tuples(KEYS, SECONDS).map(lambda given: (*given[0], given[1], 3 * given[1])), st.just({})),
    "reset": st.just(((), {})),
}


def played(history: list[Event], log_every: int = 0) -> EncoderStatistics:
    """Statistics after these events."""
    statistics = EncoderStatistics(log_every)
    for name, args, kwargs in history:
        getattr(statistics, name)(*args, **kwargs)
    return statistics


def after_last(history: list[Event], name: str) -> list[Event]:
    """Events since the last of a kind; all of them where there is none."""
    places = [place for place, event in enumerate(history) if event[0] == name]
    return history[places[-1] + 1 :] if places else history


def share(part: int, whole: int) -> float:
    """0.0 of nothing."""
    return part / whole if whole else 0.0


def recount(history: list[Event]) -> dict[str, Any]:
    """The snapshot, from the list of events and nothing else."""
    traffic = after_last(history, "reset")
    replays = [(args, kwargs["items"], kwargs["tokens"]) for name, args, kwargs in traffic if name == "replay"]
    eager = [(args, kwargs["items"], kwargs["tokens"]) for name, args, kwargs in traffic if name == "eager"]
    calls = [args for name, args, _ in traffic if name == "finished"]
    hits, misses = sum(items for _, items, _ in replays), sum(items for _, items, _ in eager)
    padding, replayed = sum(key[1] - tokens for key, _, tokens in replays), sum(tokens for _, _, tokens in replays)

    graphs, not_captured = [], []
    now = after_last(history, "cleared")
    for key in {args[:3] for name, args, _ in now if name in ("captured", "skipped")}:
        own = [event for event in now if event[1][:3] == key and event[0] in ("captured", "skipped", "calibrated")]
        last = [event for event in own if event[0] != "calibrated"][-1]
        named = {"path": key[0], "token_budget": key[1], "axis_keys": [str(axis_key) for axis_key in key[2]]}
        if last[0] == "skipped":
            not_captured.append({**named, "code": last[1][3].code, "detail": last[1][3].detail})
            continue
        times = [args[3] for name, args, _ in after_last(own, "captured") if name == "calibrated"]
        mine = [(items, tokens) for replayed_key, items, tokens in replays if replayed_key == key]
        tokens = sum(tokens for _, tokens in mine)
        graphs.append(
            {
                **named,
                "nbytes": last[2]["nbytes"],
                "capture_seconds": last[2]["seconds"],
                "predicted_ms": times[-1] if times else None,
                "eager_ms": 3 * times[-1] if times else None,
                "replays": len(mine),
                "items": sum(items for items, _ in mine),
                "tokens": tokens,
                "padded_share": share(len(mine) * key[1] - tokens, len(mine) * key[1]),
            }
        )
    return {
        "calls": len(calls),
        "items": sum(args[0] for args in calls),
        "seconds": sum(args[1] for args in calls if len(args) > 1),
        "graph_hits": hits,
        "graph_misses": misses,
        "hit_rate": share(hits, hits + misses),
        "miss_reasons": {code: sum(items for args, items, _ in eager if args[1] == code) for code in {a[1] for a, _, _ in eager}},
        "misses": [
            {
                "path": path,
                "code": code,
                "items": sum(items for args, items, _ in eager if args == (path, code)),
                "tokens": sum(tokens for args, _, tokens in eager if args == (path, code)),
            }
            for path, code in {args for args, _, _ in eager}
        ],
        "tokens": {"replayed": replayed, "eager": sum(tokens for _, _, tokens in eager), "padding": padding},
        "padded_share": share(padding, replayed + padding),
        "replays": len(replays),
        "recaptures": sum(name == "recaptured" for name, _, _ in history),
        "capture_seconds": sum(kwargs["seconds"] for name, _, kwargs in history if name == "captured"),
        "graph_bytes": sum(graph["nbytes"] for graph in graphs),
        "graphs": graphs,
        "not_captured": not_captured,
    }


def in_order(snapshot: dict[str, Any]) -> dict[str, Any]:
    """With its lists sorted: their order is not promised."""
    lists = ("graphs", "not_captured", "misses")
    return {key: sorted(value, key=repr) if key in lists else value for key, value in snapshot.items()}


@given(st.lists(events(), max_size=40))
def test_any_history_adds_up(history: list[Event]) -> None:
    """Every number is what a count over the list of events gives; graphs are those whose last word was a capture."""
    assert in_order(played(history).snapshot()) == in_order(recount(history))


@given(st.lists(events(), max_size=40))
def test_hazard_36_reasons_add_up_to_the_misses(history: list[Event]) -> None:
    """Misses by reason, and by path and reason, sum to the misses; an item on a path is a hit or a miss, never both."""
    snapshot = played(history).snapshot()
    assert sum(snapshot["miss_reasons"].values()) == snapshot["graph_misses"]
    assert sum(miss["items"] for miss in snapshot["misses"]) == snapshot["graph_misses"]
    assert sum(miss["tokens"] for miss in snapshot["misses"]) == snapshot["tokens"]["eager"]
    offered = sum(kwargs["items"] for name, _, kwargs in after_last(history, "reset") if name in ("replay", "eager"))
    assert snapshot["graph_hits"] + snapshot["graph_misses"] == offered


def test_hazard_38_padding_is_told_per_budget() -> None:
    """Each graph says which share of its rows was padding, and what a replay costs."""
    statistics = EncoderStatistics(0)
    for budget in (100, 200):
        statistics.captured("main", budget, (), nbytes=8, seconds=1.0)
    statistics.calibrated("main", 200, (), 2.5)
    statistics.replay("main", 200, (), items=1, tokens=50)
    statistics.replay("main", 200, (), items=2, tokens=200)
    small, large = statistics.snapshot()["graphs"]
    assert (small["padded_share"], small["predicted_ms"]) == (0.0, None)
    assert (large["padded_share"], large["predicted_ms"]) == (150 / 400, 2.5)


def test_an_item_counts_once_on_each_path() -> None:
    """Two paths make two hits or misses of one item, which is still one item served."""
    statistics = EncoderStatistics(0)
    statistics.replay("global", 272, (), items=1, tokens=272)
    statistics.eager("local", "too-large", items=1, tokens=900)
    statistics.finished(1)
    snapshot = statistics.snapshot()
    assert (snapshot["items"], snapshot["graph_hits"], snapshot["graph_misses"], snapshot["hit_rate"]) == (1, 1, 1, 0.5)
    assert snapshot["misses"] == [{"path": "local", "code": "too-large", "items": 1, "tokens": 900}]


def test_nothing_yet() -> None:
    """Shares of nothing are 0.0, and every key is there."""
    snapshot = EncoderStatistics(100).snapshot()
    assert snapshot == recount([])
    assert snapshot["hit_rate"] == snapshot["padded_share"] == 0.0


def test_the_documented_summary() -> None:
    """Exactly the documented keys, with the budgets as a list of the caller's own."""
    budgets = (64, 128)
    statistics = EncoderStatistics(0)
    nothing = {"graph_hits": 0, "graph_misses": 0, "hit_rate": 0.0, "num_budgets": 2, "token_budgets": [64, 128]}
    assert statistics.cumulative(budgets) == nothing
    statistics.replay("main", 64, (), items=3, tokens=64)
    statistics.eager("main", "too-large", items=1, tokens=500)
    assert statistics.cumulative(budgets) == {**nothing, "graph_hits": 3, "graph_misses": 1, "hit_rate": 0.75}


@given(st.lists(events(), max_size=20), st.lists(events(), max_size=20))
def test_a_snapshot_is_json_and_a_copy(before: list[Event], later: list[Event]) -> None:
    """It survives JSON as it is; later events do not change it, and changing it changes no statistics."""
    statistics = played(before)
    snapshot = statistics.snapshot()
    text = json.dumps(snapshot)
    assert json.loads(text) == snapshot
    for value in snapshot.values():
        if isinstance(value, dict | list):
            for part in value if isinstance(value, list) else []:
                part.clear()
            value.clear()
    assert json.dumps(statistics.snapshot()) == text
    snapshot = statistics.snapshot()
    for name, args, kwargs in later:
        getattr(statistics, name)(*args, **kwargs)
    assert json.dumps(snapshot) == text


def test_the_docstring_names_every_key() -> None:
    """What a reader of a snapshot may rely on is written down."""
    one = [
        ("captured", ("main", 64, ()), {"nbytes": 1, "seconds": 1.0}),
        ("skipped", ("main", 128, (), Skip("out-of-memory", "")), {}),
        ("eager", ("main", "too-large"), {"items": 1, "tokens": 1}),
    ]
    snapshot = played(one).snapshot()
    assert EncoderStatistics.snapshot.__doc__
    inner = [key for part in ("graphs", "not_captured", "misses") for key in snapshot[part][0]]
    for key in [*snapshot, *snapshot["tokens"], *inner]:
        assert f"`{key}`" in EncoderStatistics.snapshot.__doc__, key


def test_a_graph_captured_again_goes_on_counting() -> None:
    """Clearing drops bytes, times and reasons, not work; the new capture has its own bytes and time."""
    statistics = EncoderStatistics(0)
    statistics.captured("main", 64, (), nbytes=10, seconds=1.0)
    statistics.skipped("main", 128, (), Skip("out-of-memory", "128"))
    statistics.calibrated("main", 64, (), 3.0)
    statistics.replay("main", 64, (), items=1, tokens=60)
    statistics.cleared()
    statistics.replay("main", 64, (), items=1, tokens=60)  # was under way
    cleared = statistics.snapshot()
    assert (cleared["graph_bytes"], cleared["graphs"], cleared["not_captured"]) == (0, [], [])
    assert (cleared["replays"], cleared["graph_hits"], cleared["capture_seconds"]) == (2, 2, 1.0)
    statistics.captured("main", 64, (), nbytes=20, seconds=2.0)
    (graph,) = statistics.snapshot()["graphs"]
    assert (graph["nbytes"], graph["capture_seconds"], graph["predicted_ms"], graph["replays"]) == (20, 2.0, None, 2)
    assert statistics.snapshot()["capture_seconds"] == 3.0


def test_a_graph_is_held_or_it_is_not() -> None:
    """The last word counts: a capture forgets the reason why there was none, and the other way round."""
    statistics = EncoderStatistics(0)
    skip = Skip("out-of-memory", "128 tokens")
    for _ in range(2):
        statistics.skipped("main", 128, ("wide", 2), skip)
        snapshot = statistics.snapshot()
        assert (snapshot["graphs"], snapshot["graph_bytes"]) == ([], 0)
        assert snapshot["not_captured"] == [
            {"path": "main", "token_budget": 128, "axis_keys": ["wide", "2"], "code": skip.code, "detail": skip.detail}
        ]
        statistics.captured("main", 128, ("wide", 2), nbytes=7, seconds=0.0)
        assert (statistics.snapshot()["graph_bytes"], statistics.snapshot()["not_captured"]) == (7, [])


def test_a_time_of_a_graph_that_is_gone_is_dropped() -> None:
    """Another thread may clear while one is measured."""
    statistics = EncoderStatistics(0)
    statistics.calibrated("main", 64, (), 1.0)
    assert statistics.snapshot()["graphs"] == []


def test_wrong_use_is_an_internal_fault() -> None:
    """A reason that is not in the catalogue, more tokens than the budget, a negative interval."""
    statistics = EncoderStatistics(0)
    with pytest.raises(AssertionError, match="typo"):
        statistics.eager("main", "typo", items=1, tokens=1)
    with pytest.raises(AssertionError, match="65 tokens in a replay of 64"):
        statistics.replay("main", 64, (), items=1, tokens=65)
    with pytest.raises(AssertionError, match="-1"):
        EncoderStatistics(-1)
    assert statistics.snapshot() == recount([])
    for code in SKIP_CODES:
        statistics.eager("main", code, items=1, tokens=1)


@given(st.lists(st.integers(0, 25), max_size=30), st.sampled_from([0, 1, 7, 10]))
def test_the_line_is_logged_at_each_crossing(calls: list[int], log_every: int) -> None:
    """Once for a call that reaches or passes a multiple, however many it passes; 0 is never."""
    statistics = EncoderStatistics(log_every)
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("vit_compile")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        total = 0
        for items in calls:
            multiples = [n for n in range(total + 1, total + items + 1) if log_every and n % log_every == 0]
            total += items
            lines.clear()
            statistics.finished(items)
            assert len(lines) == bool(multiples)
            assert all(f"{total} items" in line.getMessage() for line in lines)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_what_the_line_says(caplog: pytest.LogCaptureFixture) -> None:
    """Items, time, hits, misses, rate, padding, tokens and reasons, at INFO; nothing where INFO is off."""
    statistics = EncoderStatistics(4)
    statistics.replay("main", 100, (), items=3, tokens=75)
    statistics.eager("main", "too-large", items=1, tokens=900)
    with caplog.at_level(logging.INFO, logger="vit_compile"):
        statistics.finished(4, 0.25)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("vit_compile", logging.INFO)
    assert record.getMessage() == (
        "encoder: 4 items in 1 calls (0.250 s); 3 hits, 1 misses (hit rate 75.0%); 1 replays, 25.0% padding; "
        "tokens: 75 replayed, 900 eager, 25 padding; misses: too-large 1"
    )
    with caplog.at_level(logging.WARNING, logger="vit_compile"):
        statistics.finished(4)
    assert len(caplog.records) == 1


def test_after_a_reset_the_line_counts_from_zero(caplog: pytest.LogCaptureFixture) -> None:
    """The next multiple is a whole interval away."""
    statistics = EncoderStatistics(10)
    with caplog.at_level(logging.INFO, logger="vit_compile"):
        statistics.finished(9)
        statistics.reset()
        statistics.finished(9)
        assert not caplog.records
        statistics.finished(1)
    assert len(caplog.records) == 1


def test_the_line_is_logged_outside_the_lock() -> None:
    """A handler that waits for another thread's counting does not hang."""
    statistics = EncoderStatistics(1)
    counted = []

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            other = threading.Thread(target=lambda: statistics.replay("main", 64, (), items=1, tokens=1), daemon=True)
            other.start()
            other.join(timeout=10)
            counted.append(not other.is_alive())

    logger, handler = logging.getLogger("vit_compile"), Waits()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        statistics.finished(1)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert counted == [True]


def test_counting_from_many_threads(caplog: pytest.LogCaptureFixture) -> None:
    """8 threads, 1000 rounds each, with snapshots in between: no count is lost, every snapshot adds up, each line comes once."""
    statistics = EncoderStatistics(100)
    statistics.captured("main", 64, (), nbytes=1, seconds=0.0)
    done = threading.Event()
    torn: list[dict[str, Any]] = []

    def watch() -> None:
        while not done.is_set():
            seen = statistics.snapshot()
            agree = [
                sum(seen["miss_reasons"].values()) == seen["graph_misses"],
                seen["tokens"]["replayed"] == 60 * seen["replays"],
                seen["graph_hits"] == 2 * seen["replays"],
            ]
            if not all(agree):
                torn.append(seen)

    def work(number: int) -> None:
        for _ in range(1000):
            statistics.replay("main", 64, (number % 2,), items=2, tokens=60)
            statistics.eager("main", ("too-large", "disabled")[number % 2], items=1, tokens=5)
            statistics.finished(3)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with caplog.at_level(logging.INFO, logger="vit_compile"):
            watcher = threading.Thread(target=watch)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in (watcher, *threads):
                thread.start()
            for thread in threads:
                thread.join()
            done.set()
            watcher.join()
    finally:
        sys.setswitchinterval(interval)
    snapshot = statistics.snapshot()
    assert torn == []
    assert (snapshot["calls"], snapshot["items"], snapshot["replays"]) == (8000, 24000, 8000)
    assert (snapshot["graph_hits"], snapshot["graph_misses"]) == (16000, 8000)
    assert Counter(snapshot["miss_reasons"]) == {"too-large": 4000, "disabled": 4000}
    assert snapshot["tokens"] == {"replayed": 480000, "eager": 40000, "padding": 32000}
    assert len(caplog.records) == 240


def test_a_signal_handler_may_ask_for_a_snapshot() -> None:
    """The lock is re-entrant: what interrupts a thread in the middle of counting does not wait for that thread."""
    statistics = EncoderStatistics(0)
    answers = []

    def interrupted() -> None:
        with statistics._lock:
            answers.append(statistics.snapshot()["calls"])

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert answers == [0]


def test_statistics_need_no_torch() -> None:
    """The module is usable where torch is not imported."""
    code = """
import sys, types
sys.modules["torch"] = None
for name in ("vit_compile", "vit_compile.runtime"):
    package = types.ModuleType(name)
    package.__path__ = [name.replace(".", "/")]
    sys.modules[name] = package
from vit_compile.runtime.statistics import EncoderStatistics
statistics = EncoderStatistics(0)
statistics.finished(3)
print(statistics.snapshot()["items"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "3", done.stderr
