"""The tables of `vit-compile bench` for `docs/benchmarks.md`: every file, and what the targets say to all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from vit_compile.tools.bench.results import OK, Result, Row, read_json
from vit_compile.tools.bench.targets import TARGETS, Reached, Rows, Source, Target, refusal

_TITLES = ("peer", "mean ms", "P50", "P99", "back to back", "x roofline", "host ms", "padded", "start-up s", "graphs", "MiB")
_FIELDS = ("mean_ms", "p50_ms", "p99_ms", "back_to_back_ms", "roofline_ratio", "host_ms")


def bench_tables(files: Sequence[Path], head: Any, line: Any) -> str:
    """Markdown.

    Args:
        files: written by `vit-compile bench`.
        head, line: of a table, from titles and from cells.
    """
    lines: list[str] = []
    for path in files:
        lines += _file(path, read_json(path), head, line)
    towers: dict[str, list[Source]] = {}
    for path in files:
        source = Source.read(path)
        if not refusal(source.result):
            towers.setdefault(source.result.tower["name"], []).append(source)
    for tower, sources in towers.items():
        lines += [f"## Targets, {tower}", "", *_targets(sources, head, line), ""]
    return "\n".join(lines)


def _file(path: Path, result: Result, head: Any, line: Any) -> list[str]:
    machine = result.environment
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}"
    ranks = f" x {machine['ranks']}" if machine["ranks"] > 1 else ""
    lines = [f"## {result.tower['name']}, {result.settings['traffic']}", ""]
    lines += [f"{machine['device']}{ranks}, {versions}. `{result.command}` ([JSON](benchmarks/{path.name}))", ""]
    for case in dict.fromkeys(row.case for row in result.rows):
        lines += [f"**{case}**", "", *head([*_TITLES, "difference: eager, fp32"])]
        lines += [line(_cells(row)) for row in result.rows if row.case == case]
        lines.append("")
    note = json.loads(path.read_text(encoding="utf-8"))["note"]
    return [*lines, *([note, ""] if note else [])]


def _cells(row: Row) -> list[str]:
    if row.status != OK:
        return [row.peer, *["-"] * len(_FIELDS), "-", "-", "-", "-", row.reason[:120]]
    numbers = [_number(getattr(row, name)) for name in _FIELDS]
    padded = "-" if row.padded_share is None else f"{row.padded_share:.1%}"
    graphs = "-" if row.graphs is None else str(row.graphs)
    reserved = "-" if row.reserved_bytes is None else f"{row.reserved_bytes / 2**20:.0f}"
    apart = ", ".join("-" if value is None else f"{value:.4f}" for value in (row.difference, row.difference_fp32))
    return [row.peer, *numbers, padded, _number(row.startup_s), graphs, reserved, apart]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _targets(sources: list[Source], head: Any, line: Any) -> list[str]:
    lines: list[str] = head(["target", "needed", "reached", "verdict"])
    for target in TARGETS:
        rows = Rows(sources)
        reached = target.find(rows)
        sign = ">=" if target.at_least else "<="
        needed = f"{sign} {target.limit:g} {target.unit}"
        lines.append(line([f"{target.number}. {target.what}", needed, _words(target, reached), target.verdict(reached)]))
    return lines


def _words(target: Target, reached: Reached | None) -> str:
    if reached is None:
        return "-"
    number = "" if reached.value == float("inf") else f"{reached.value:.2f} {target.unit}"
    return " ".join(part for part in (number, f"({reached.more})" if reached.more else "") if part)
