"""The tables of `vit-compile bench` for `docs/benchmarks.md`: every file, and what the targets say to all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.markdown import conditions, head, line, milliseconds
from vit_compile.tools.bench.results import OK, Row, read_json
from vit_compile.tools.bench.targets import TARGETS, Rows, Source, refusal, words

_SUMMARY = ("eager", "compile", "reduce-overhead", "capture-of-eager", "vit-full")
_TITLES = ("peer", "mean ms", "P50", "P99", "back to back", "x roofline", "host ms", "padded", "start-up s", "graphs", "MiB")
_FIELDS = ("mean_ms", "p50_ms", "p99_ms", "back_to_back_ms", "roofline_ratio", "host_ms")


def bench_tables(files: Sequence[Path]) -> str:
    """Markdown of files that `vit-compile bench` wrote."""
    lines: list[str] = []
    towers: dict[str, list[Source]] = {}
    for path in files:
        lines += _file(path)
        source = Source.read(path)
        if not refusal(source.result):
            towers.setdefault(source.result.tower["name"], []).append(source)
    for tower, sources in towers.items():
        lines += [f"## Targets, {tower}", "", *_targets(sources), ""]
    return "\n".join(lines)


def bench_summary(files: Sequence[Path]) -> str:
    """Mean milliseconds of every peer that some file has, by tower and case; of how many requests, where time was over first."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for path in files:
        result = read_json(path)
        if refusal(result):
            continue
        ranks = result.environment["ranks"]
        tower = result.tower["name"].removesuffix(", random weights") + (f", {ranks} GPUs" if ranks > 1 else "")
        for row in result.rows:
            if row.status != OK:
                continue
            part = row.requests < row.requests_wanted and not result.traffic["is_single"]
            text = milliseconds(row.mean_ms) + (f" ({row.requests} of {row.requests_wanted})" if part else "")
            if row.peer in rows.setdefault((tower, row.case), {}):
                raise SystemExit(f"{path.name}: {tower}, {row.case}, {row.peer} is in another file already.")
            rows[tower, row.case][row.peer] = text
    peers = [name for name in _SUMMARY if any(name in found for found in rows.values())]
    lines = head(["tower", "images", *peers])
    for (tower, case), found in rows.items():
        lines.append(line([tower, case, *[found.get(peer, "-") for peer in peers]]))
    return "\n".join(lines)


def _file(path: Path) -> list[str]:
    content, result = json.loads(path.read_text(encoding="utf-8")), read_json(path)
    ranks = content["environment"]["ranks"]
    lines = [f"## {result.tower['name']}, {result.settings['traffic']}{f', {ranks} ranks' if ranks > 1 else ''}", ""]
    lines += [f"{conditions(content)} ([JSON](benchmarks/{path.name}))", ""]
    for case in dict.fromkeys(row.case for row in result.rows):
        lines += [f"**{case}**", "", *head([*_TITLES, "difference: eager, fp32"])]
        lines += [line(_cells(row)) for row in result.rows if row.case == case]
        lines.append("")
    return [*lines, *([content["note"], ""] if content["note"] else [])]


def _cells(row: Row) -> list[str]:
    if row.status != OK:
        return [row.peer, *["-"] * (len(_TITLES) - 1), row.reason[:120]]
    numbers = [milliseconds(getattr(row, name)) for name in _FIELDS]
    padded = "-" if row.padded_share is None else f"{row.padded_share:.1%}"
    graphs = "-" if row.graphs is None else str(row.graphs)
    reserved = "-" if row.reserved_bytes is None else f"{row.reserved_bytes / 2**20:.0f}"
    apart = ", ".join("-" if value is None else f"{value:.4f}" for value in (row.difference, row.difference_fp32))
    return [row.peer, *numbers, padded, milliseconds(row.startup_s), graphs, reserved, apart]


def _targets(sources: list[Source]) -> list[str]:
    lines = head(["target", "needed", "reached", "verdict"])
    for target in TARGETS:
        reached = target.find(Rows(sources))
        lines.append(line([f"{target.number}. {target.what}", target.needed, words(target, reached), target.verdict(reached)]))
    return lines
