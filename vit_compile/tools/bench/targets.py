"""The targets of this project, as functions over the rows of result files: what was reached, or that no file says.

Ratios are of times on the same case in the same file. Where a slow peer served fewer requests, both sides count those only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from vit_compile.tools.bench.results import OK, Latencies, Result, Row
from vit_compile.tools.report import console_for

OURS = "vit-full"
RIVALS = ("eager", "compile", "capture-of-eager")
SMALL, LARGE, EIGHT, TWENTY = "1 x 224", "1 x 1024", "8 x 448", "20 x 336"
NOT_THERE = "not in these files"


@dataclass(frozen=True, slots=True)
class Reached:
    """A number that a file gives."""

    value: float
    more: str = ""


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

    def verdict(self, reached: Reached | None) -> str:
        """ "reached", "missed", or that there is nothing to judge."""
        if reached is None:
            return NOT_THERE
        return "reached" if (reached.value >= self.limit if self.at_least else reached.value <= self.limit) else "missed"


class Rows:
    """Rows of one tower on one kind of device, from one or more files."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._results = list(results)

    def pair(self, case: str, ours: str, theirs: str) -> tuple[Row, Row] | None:
        """Two peers on a case, from one file. Case "chat" means traffic of that name."""
        for result in self._results:
            found = {row.peer: row for row in result.rows if row.case == case and row.status == OK}
            if ours in found and theirs in found:
                return found[ours], found[theirs]
        return None

    def one(self, case: str, peer: str = OURS) -> Row | None:
        """A peer on a case."""
        found = self.pair(case, peer, peer)
        return None if found is None else found[0]

    def all(self, peer: str) -> list[Row]:
        """A peer on every case."""
        return [row for result in self._results for row in result.rows if row.peer == peer and row.status == OK]

    def single_cases(self) -> list[str]:
        """Labels of the repeated requests."""
        results = [result for result in self._results if result.traffic["is_single"]]
        return list(dict.fromkeys(row.case for result in results for row in result.rows))


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
    """Host time of a call beyond the launch of its graphs."""

    def find(rows: Rows) -> Reached | None:
        row = rows.one(case)
        return None if row is None or row.host_beyond_launch_ms is None else Reached(row.host_beyond_launch_ms)

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
        found = [row for row in rows.all(OURS) if len(row.budgets or ()) >= BUDGETS and getattr(row, name) is not None]
        if not found:
            return None
        worst = max(found, key=lambda row: getattr(row, name))
        return Reached(getattr(worst, name), f"{len(worst.budgets or ())} budgets, {worst.graphs} graphs")

    return find


def memory(rows: Rows) -> Reached | None:
    """All graphs over the largest."""
    found = [row for row in rows.all(OURS) if row.graph_bytes and row.largest_graph_bytes]
    if not found:
        return None
    ratios = [(row.graph_bytes or 0) / (row.largest_graph_bytes or 1) for row in found]
    return Reached(max(ratios))


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


def print_targets(results: Sequence[Result]) -> None:
    """One table for each tower and device."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.tower["name"], result.environment["device"]), []).append(result)
    console = console_for(sys.stdout)
    for (tower, device), found in groups.items():
        console.print(_table(f"{tower}, {device}", found), highlight=False)


def _table(title: str, results: Sequence[Result]) -> Table:
    rows = Rows(results)
    note = " (CPU: says nothing about a GPU)" if any(result.is_cpu for result in results) else ""
    table = Table(title=title + note, title_justify="left", header_style="bold")
    for name in ("target", "what", "needed", "reached", "verdict"):
        table.add_column(name, overflow="fold")
    for target in TARGETS:
        reached = target.find(rows)
        verdict = target.verdict(reached)
        sign = ">=" if target.at_least else "<="
        color = {"reached": "green", "missed": "red"}.get(verdict, "dim")
        needed = f"{sign} {target.limit:g} {target.unit}"
        table.add_row(str(target.number), target.what, needed, _words(target, reached), f"[{color}]{verdict}[/]")
    return table


def _words(target: Target, reached: Reached | None) -> str:
    if reached is None:
        return "-"
    number = "" if reached.value == float("inf") else f"{reached.value:.2f} {target.unit}"
    return " ".join(part for part in (number, f"({reached.more})" if reached.more else "") if part)
