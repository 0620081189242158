"""A result as one table on the terminal for each case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from vit_compile.tools.bench.results import CPU_NOTE, OK, Result, Row
from vit_compile.tools.report import console_for

Cell = Callable[[Row], str]


def number(value: float | None, digits: int = 2) -> str:
    """With so many digits behind the point, fewer where it is large; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def share(value: float | None) -> str:
    """Per cent."""
    return "-" if value is None else f"{value:.1%}"


def mebibytes(value: int | None) -> str:
    """Whole ones."""
    return "-" if value is None else f"{value / 2**20:,.0f}"


def difference(row: Row) -> str:
    """From eager, and from float32 behind a bar."""
    if row.difference is None:
        return "-"
    exact = "" if row.difference_fp32 is None else f" | {row.difference_fp32:.1e}"
    return f"{row.difference:.1e}{exact}" + (" BEYOND TOLERANCE" if row.within_tolerance is False else "")


def misses(row: Row) -> str:
    """Hits and misses."""
    if row.hits is None:
        return "-"
    reasons = ", ".join(f"{count} {code}" for code, count in (row.misses or {}).items())
    return f"{row.hits} / {reasons or 0}"


def served(row: Row) -> str:
    """Requests, and of how many where the time was over before."""
    return str(row.requests) + (f" of {row.requests_wanted}" if row.requests < row.requests_wanted else "")


def start(row: Row) -> str:
    """Seconds until warm, and of setting up with a warm cache."""
    warm = "" if row.warm_setup_s is None else f" ({row.warm_setup_s:.1f} warm)"
    return number(row.startup_s, 1) + warm


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("mean\nms", lambda row: number(row.mean_ms)),
    ("P50\nms", lambda row: number(row.p50_ms)),
    ("P99\nms", lambda row: number(row.p99_ms)),
    ("back to\nback, re-\npeated ms", lambda row: number(row.back_to_back_ms)),
    ("images/s,\nrepeated", lambda row: number(row.images_per_s, 0)),
    ("tokens/s,\nrepeated", lambda row: number(row.tokens_per_s, 0)),
    ("host\nshare", lambda row: share(row.host_share)),
    ("x roof-\nline", lambda row: number(row.roofline_ratio)),
    ("padded\nshare", lambda row: share(row.padded_share)),
    ("hits /\nmisses", misses),
    ("start-\nup s", start),
    ("graphs", lambda row: "-" if row.graphs is None else str(row.graphs)),
    ("MiB\nreserved", lambda row: mebibytes(row.reserved_bytes)),
    ("difference:\neager | fp32", difference),
    ("requests\nserved", served),
)
"""Title, in lines, and cell, in the order of the table; the HTML report has the same."""


def cases_of(result: Result) -> list[str]:
    """Labels, in order."""
    return list(dict.fromkeys(row.case for row in result.rows))


def title(result: Result) -> str:
    """Tower, precision, traffic, device."""
    ranks = result.environment["ranks"]
    device = result.environment["device"] + (f" x {ranks}" if ranks > 1 else "")
    return f"{result.tower['name']}, {result.tower['dtype']} | {result.traffic['name']} | {device}"


def print_result(result: Result) -> None:
    """Tables and notes on stdout."""
    console = console_for(sys.stdout)
    console.print(title(result), style="bold", highlight=False, markup=False)
    if result.is_cpu:
        console.print(CPU_NOTE, style="bold yellow", highlight=False)
    for case in cases_of(result):
        measured = [row for row in result.rows if row.case == case and row.status == OK]
        if measured:
            console.print(_table(measured, case), highlight=False)
    for line in [*graphs(result), *without(result)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for failure in result.failures:
        console.print(f"FAILED: {failure}", style="bold red", highlight=False, markup=False, soft_wrap=True)


def without(result: Result) -> list[str]:
    """One line for each peer that has no numbers, with the reason."""
    found = {row.peer: f"{row.peer}: {row.status}, {row.reason}" for row in result.rows if row.status != OK}
    return list(found.values())


def graphs(result: Result) -> list[str]:
    """One line for each row that tells how it was served."""
    return [f"{row.peer}, {row.case}: {row.reason}" for row in result.rows if row.status == OK and row.reason]


def _table(measured: Sequence[Row], case: str) -> Table:
    # Columns in which nobody has anything are left out: there is no roofline on a CPU, for example.
    columns = [(name, cell) for name, cell in COLUMNS if any(cell(row) != "-" for row in measured)]
    table = Table(title=escape(case), title_justify="left", header_style="bold")
    table.add_column("peer", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in measured:
        table.add_row(row.peer, *(cell(row) for _, cell in columns), style="bold" if row.peer == "vit-full" else None)
    return table
