"""The targets of this project, as functions over the rows of result files: what was reached, or that no file says.

Ratios are of times on the same case in the same file. Where a slow peer served fewer requests, both sides count those only.
Where several files have what a target is about, the newest counts; for set-up and memory the worst of all. Presets are known by
the settings in the file, so a trace that is called like one is none. Towers of full size on a GPU are judged, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from vit_compile.errors import OptionError
from vit_compile.tools.bench.results import OK, Latencies, Result, Row, read_json
from vit_compile.tools.report import console_for

OURS = "vit-full"
RIVALS = ("eager", "compile", "capture-of-eager")
SMALL, LARGE, EIGHT, TWENTY = "1 x 224", "1 x 1024", "8 x 448", "20 x 336"
NOT_THERE = "not in these files"
CPU_NUMBERS, TINY_TOWER = "CPU numbers", "tiny tower"


@dataclass(frozen=True, slots=True)
class Reached:
    """A number that a file gives."""

    value: float
    more: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A result and where it comes from."""

    name: str
    """Of the file."""

    result: Result
    when: float
    """Seconds since 1970: when it was measured."""

    @classmethod
    def read(cls, path: Path) -> Source:
        """A file that `vit-compile bench` wrote. Files of earlier versions have no date inside; theirs is the file's own.

        Raises:
            OptionError: it cannot be read, or is something else.
        """
        result = read_json(path)
        written = result.environment.get("measured_at")
        try:
            when = path.stat().st_mtime if written is None else datetime.fromisoformat(written).timestamp()
        except (OSError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"{path}: measured_at {str(written)[:40]!r}: expected a date and time.") from error
        return cls(str(path), result, when)


Find = Callable[["Rows"], "Reached | None"]


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the list."""

    number: int
    what: str
    limit: float
    at_least: bool
    """False: at most."""

    find: Find
    unit: str = "x"

    @property
    def needed(self) -> str:
        """The limit in words."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"

    def verdict(self, reached: Reached | None) -> str:
        """ "reached", "missed", or that there is nothing to judge."""
        if reached is None:
            return NOT_THERE
        return "reached" if (reached.value >= self.limit if self.at_least else reached.value <= self.limit) else "missed"


class Rows:
    """Rows of one tower on one kind of device, from one or more files. One target's: it keeps which files were taken."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = sorted(sources, key=lambda source: -source.when)
        self._taken: dict[str, None] = {}

    def pair(self, case: str, ours: str, theirs: str) -> tuple[Row, Row] | None:
        """Two peers on a case, from the newest file that has both. Case "chat" is the preset."""
        pairs: list[tuple[str, Row, Row]] = []
        for source in self._sources:
            if _has_case(source.result, case):
                found = {row.peer: row for row in source.result.rows if row.case == case and row.status == OK}
                pairs += [(source.name, found[ours], found[theirs])] if ours in found and theirs in found else []
        if not pairs:
            return None
        name, mine, other = pairs[0]
        self.took(name, of=len(pairs), rule="newest")
        return mine, other

    def took(self, name: str, *, of: int, rule: str) -> None:
        """Remember a file, where there was a choice."""
        if of > 1:
            self._taken[f"{name}, {rule} of {of} files"] = None

    @property
    def taken(self) -> str:
        """Which files were taken where several would do; else nothing."""
        return "; ".join(self._taken)

    def one(self, case: str, peer: str = OURS) -> Row | None:
        """A peer on a case."""
        found = self.pair(case, peer, peer)
        return None if found is None else found[0]

    def worst(self, peer: str, value: Callable[[Row], float | None]) -> tuple[Row, float] | None:
        """The largest value of a peer, over all cases of all files; None values do not count."""
        mine = [(source.name, row) for source in self._sources for row in source.result.rows if row.peer == peer]
        found = [(name, row, number) for name, row in mine if row.status == OK and (number := value(row)) is not None]
        if not found:
            return None
        name, row, number = max(found, key=lambda one: one[2])
        self.took(name, of=len({one[0] for one in found}), rule="worst")
        return row, number

    def single_cases(self) -> list[str]:
        """Labels of the repeated requests."""
        results = [source.result for source in self._sources if _is_single(source.result)]
        return list(dict.fromkeys(row.case for result in results for row in result.rows))


def _has_case(result: Result, case: str) -> bool:
    """Could the file's row of this name be the case? A trace's could not: it has the name of its file."""
    preset = result.settings.get("traffic") == case and result.settings.get("trace") is None
    return _is_single(result) or (preset and not result.traffic["is_single"])


def _is_single(result: Result) -> bool:
    return bool(result.traffic["is_single"]) and result.settings.get("trace") is None


def median_ratio(case: str, rival: str) -> Find:
    """Their median over ours."""

    def find(rows: Rows) -> Reached | None:
        pair = rows.pair(case, OURS, rival)
        if pair is None or not pair[0].p50_ms or pair[1].p50_ms is None:
            return None
        return Reached(pair[1].p50_ms / pair[0].p50_ms, f"{pair[1].p50_ms:.2f} / {pair[0].p50_ms:.2f} ms")

    return find


def common(pair: tuple[Row, Row]) -> tuple[Sequence[float], Sequence[float]]:
    """Latencies of the requests that both served."""
    count = min(len(row.latencies_ms) for row in pair)
    return pair[0].latencies_ms[:count], pair[1].latencies_ms[:count]


def mean_ratio(case: str, rival: str) -> Find:
    """Their mean over ours."""

    def find(rows: Rows) -> Reached | None:
        pair = rows.pair(case, OURS, rival)
        if pair is None:
            return None
        ours, theirs = common(pair)
        return Reached(sum(theirs) / sum(ours), f"{len(ours)} requests")

    return find


def p99_ratio(case: str) -> Find:
    """The best P99 of the rivals over ours. All of them must be there."""

    def find(rows: Rows) -> Reached | None:
        found: dict[str, float] = {}
        for rival in RIVALS:
            pair = rows.pair(case, OURS, rival)
            if pair is None:
                return None
            ours, theirs = common(pair)
            found[rival] = Latencies.of(theirs).p99_ms / Latencies.of(ours).p99_ms
        best = min(found, key=lambda rival: found[rival])
        return Reached(found[best], f"against {best}")

    return find


def repeated_reduce_overhead(rows: Rows) -> Reached | None:
    """The smallest ratio over all repeated requests."""
    found = {case: median_ratio(case, "reduce-overhead")(rows) for case in rows.single_cases()}
    there = {case: reached.value for case, reached in found.items() if reached is not None}
    if not there:
        return None
    worst = min(there, key=lambda case: there[case])
    return Reached(there[worst], f"at {worst}; " + ", ".join(f"{case}: {value:.2f}" for case, value in there.items()))


def total_of_reduce_overhead(rows: Rows) -> Reached | None:
    """Start-up and the requests that both served."""
    pair = rows.pair("chat", OURS, "reduce-overhead")
    if pair is None:
        return None
    ours, theirs = ((row.startup_s or 0.0) + sum(times) / 1e3 for row, times in zip(pair, common(pair), strict=True))
    return Reached(theirs / ours, f"{theirs:.1f} s / {ours:.1f} s, {len(common(pair)[0])} requests")


def roofline(case: str) -> Find:
    """Mean time over that of the needed FLOPs."""

    def find(rows: Rows) -> Reached | None:
        row = rows.one(case)
        return None if row is None or row.roofline_ratio is None else Reached(row.roofline_ratio)

    return find


def host(case: str) -> Find:
    """Host time of a call beyond the launch of its graphs; and how much longer than for the bare replay a caller waits."""

    def find(rows: Rows) -> Reached | None:
        row = rows.one(case)
        if row is None or row.host_beyond_launch_ms is None:
            return None
        waits = row.wall_beyond_replay_ms
        return Reached(row.host_beyond_launch_ms, "" if waits is None else f"a caller waits {waits:.2f} ms longer")

    return find


def padding(rows: Rows) -> Reached | None:
    """Padded share in per cent; with more than 12 graphs the target is not met, whatever the share."""
    row = rows.one("chat")
    if row is None or row.padded_share is None or row.graphs is None:
        return None
    text = f"{row.padded_share:.1%} with {len(row.budgets or ())} budgets, {row.graphs} graphs"
    return Reached(100 * row.padded_share if row.graphs <= MOST_GRAPHS else float("inf"), text)


def startup(name: str) -> Find:
    """Longest set-up of ours with nine budgets or more."""

    def find(rows: Rows) -> Reached | None:
        def value(row: Row) -> float | None:
            seconds: float | None = getattr(row, name)
            return seconds if len(row.budgets or ()) >= BUDGETS else None

        worst = rows.worst(OURS, value)
        if worst is None:
            return None
        row, seconds = worst
        return Reached(seconds, f"{len(row.budgets or ())} budgets, {row.graphs} graphs")

    return find


def memory(rows: Rows) -> Reached | None:
    """All graphs over the largest."""

    def value(row: Row) -> float | None:
        return row.graph_bytes / row.largest_graph_bytes if row.graph_bytes and row.largest_graph_bytes else None

    worst = rows.worst(OURS, value)
    return None if worst is None else Reached(worst[1])


MOST_GRAPHS, BUDGETS = 12, 9

TARGETS = (
    Target(1, f"capture-of-eager / vit-full, {SMALL}", 2.0, True, median_ratio(SMALL, "capture-of-eager")),
    Target(1, f"capture-of-eager / vit-full, {LARGE}", 2.0, True, median_ratio(LARGE, "capture-of-eager")),
    Target(2, "reduce-overhead / vit-full, repeated requests", 1.7, True, repeated_reduce_overhead),
    Target(2, "reduce-overhead / vit-full, total with start-up, chat", 5.0, True, total_of_reduce_overhead),
    Target(3, f"eager / vit-full, {SMALL}", 15.0, True, median_ratio(SMALL, "eager")),
    Target(3, f"eager / vit-full, {LARGE}", 2.1, True, median_ratio(LARGE, "eager")),
    Target(4, f"time / roofline, {LARGE}", 1.6, False, roofline(LARGE)),
    Target(4, f"time / roofline, {EIGHT}", 1.6, False, roofline(EIGHT)),
    Target(5, f"host time beyond the launch, {SMALL}", 0.15, False, host(SMALL), "ms"),
    Target(5, f"host time beyond the launch, {TWENTY}", 0.5, False, host(TWENTY), "ms"),
    Target(6, f"padded share of chat, at most {MOST_GRAPHS} graphs", 10.0, False, padding, "%"),
    Target(6, "capture-of-eager / vit-full, mean of chat", 2.2, True, mean_ratio("chat", "capture-of-eager")),
    Target(6, "compile / vit-full, mean of chat", 1.7, True, mean_ratio("chat", "compile")),
    Target(6, "eager / vit-full, mean of chat", 5.0, True, mean_ratio("chat", "eager")),
    Target(6, "best P99 of the others / vit-full, chat", 1.5, True, p99_ratio("chat")),
    Target(7, f"set-up with {BUDGETS} budgets, empty cache", 30.0, False, startup("setup_s"), "s"),
    Target(7, f"set-up with {BUDGETS} budgets, warm cache", 10.0, False, startup("warm_setup_s"), "s"),
    Target(8, "bytes of all graphs / of the largest", 1.25, False, memory),
)


def print_targets(sources: Sequence[Source]) -> None:
    """One table for each tower, precision and device."""
    groups: dict[tuple[str, ...], list[Source]] = {}
    for source in sources:
        result = source.result
        ranks = result.environment["ranks"]
        device = result.environment["device"] + (f" x {ranks}" if ranks > 1 else "")
        kind = ("small" if result.tower["small"] else "full", result.environment["device_type"])
        groups.setdefault((result.tower["name"], result.tower["dtype"], device, *kind), []).append(source)
    console = console_for(sys.stdout)
    for (tower, dtype, device, *_), found in groups.items():
        console.print(_table(f"{tower}, {dtype}, {device}", found), highlight=False)


def refusal(result: Result) -> str:
    """Why targets are not judged by a file; empty where they are."""
    reasons = [TINY_TOWER] if result.tower["small"] else []
    reasons += [CPU_NUMBERS] if result.environment["device_type"] != "cuda" else []
    return ", ".join(reasons)


def _table(title: str, sources: Sequence[Source]) -> Table:
    refused = refusal(sources[0].result)
    note = " (CPU numbers: they say nothing about a GPU)" if CPU_NUMBERS in refused else ""
    table = Table(title=escape(title + note), title_justify="left", header_style="bold")
    for name in ("target", "what", "needed", "reached", "verdict"):
        table.add_column(name, overflow="fold")
    for target in TARGETS:
        rows = Rows(sources)
        reached = target.find(rows)
        verdict = target.verdict(reached) if reached is None or not refused else refused
        color = {"reached": "green", "missed": "red"}.get(verdict, "dim")
        found = escape(words(target, reached, rows.taken))
        table.add_row(str(target.number), target.what, target.needed, found, f"[{color}]{verdict}[/]")
    return table


def words(target: Target, reached: Reached | None, taken: str = "") -> str:
    """What was reached, and which files were taken where there was a choice."""
    if reached is None:
        return "-"
    number = "" if reached.value == float("inf") else f"{reached.value:.2f} {target.unit}"
    more = "; ".join(part for part in (reached.more, taken) if part)
    return " ".join(part for part in (number, f"({more})" if more else "") if part)
