"""The picture of a result: for each case a bar per peer (P50, mean, P99) and the distribution of its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_compile.tools.bench.results import CPU_NOTE, OK, Result, Row
from vit_compile.tools.bench.table import cases_of, title

COLORS = {
    "eager": "#7f7f7f",
    "eager-hoisted": "#bcbd22",
    "compile": "#ff7f0e",
    "reduce-overhead": "#d62728",
    "capture-of-eager": "#9467bd",
    "vit-backend-piecewise": "#17becf",
    "vit-backend-full": "#2ca02c",
    "vit-full": "#1f77b4",
}
_OTHER = "#8c564b"
_FADED = 0.4
_DPI = 120


def picture(result: Result, path: Path) -> None:
    """Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {case: [row for row in result.rows if row.case == case and row.status == OK] for case in cases_of(result)}
    rows = {case: measured for case, measured in rows.items() if measured}
    heights = [1.5 + 0.42 * len(measured) for measured in rows.values()] or [1.5]
    figure = Figure(figsize=(13.5, sum(heights) + 1.3), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_heading(result), fontsize=12)
    if not rows:
        figure.text(0.5, 0.4, "no peer was measured", ha="center")
    else:
        axes = figure.subplots(len(rows), 2, squeeze=False, gridspec_kw={"height_ratios": heights, "width_ratios": (1.1, 1)})
        for (case, measured), (left, right) in zip(rows.items(), axes, strict=True):
            _bars(left, measured, case)
            _distributions(right, measured, case)
    figure.savefig(path)


def _heading(result: Result) -> str:
    traffic = result.traffic
    lines = [title(result), f"{traffic['requests']} requests, {traffic['images']} images, {traffic['tokens']:,} output tokens"]
    return "\n".join([*lines, *([CPU_NOTE] if result.is_cpu else [])])


def _bars(axis: Any, rows: Sequence[Row], case: str) -> None:
    """Two bars for each peer, the first peer on top."""
    places = np.arange(len(rows))[::-1]
    for place, row in zip(places, rows, strict=True):
        color = COLORS.get(row.peer, _OTHER)
        for offset, value, alpha, name in ((0.19, row.mean_ms, 1.0, "mean"), (-0.19, row.p99_ms, _FADED, "P99")):
            axis.barh(place + offset, value, height=0.36, color=color, alpha=alpha)
            where = (value or 0, place + offset)
            axis.annotate(f"{name} {_short(value)}", where, (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(places, [row.peer + _served(row) for row in rows])
    axis.set_xlim(0, max(row.p99_ms or 0 for row in rows) * 1.22)  # room for the numbers
    axis.set_xlabel("ms per request (wall time; less is better)")
    axis.set_title(f"{case}: mean and P99", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _distributions(axis: Any, rows: Sequence[Row], case: str) -> None:
    """Share of the requests that were served within a time."""
    for row in rows:
        times = np.sort(np.asarray(row.latencies_ms))
        shares = np.arange(1, len(times) + 1) / len(times)
        width = 2.4 if row.peer == "vit-full" else 1.4
        color = COLORS.get(row.peer, _OTHER)
        axis.step(np.append(times[:1], times), np.append(0, shares), where="post", label=row.peer, color=color, linewidth=width)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(_minor_labels(axis))
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("ms per request, log scale")
    axis.set_ylabel("share of requests")
    axis.set_title(f"{case}: latency distribution", loc="left", fontsize=10)
    axis.grid(which="major", color="#e5e5e5")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _minor_labels(axis: Any) -> Any:
    """Numbers between the powers of ten where the axis spans few of them."""
    low, high = axis.get_xlim()
    few = high / low < 50
    return lambda value, _: f"{value:g}" if few and f"{value:.0e}"[0] in "235" else ""


def _served(row: Row) -> str:
    return f"\n({row.requests} of {row.requests_wanted} requests)" if row.requests < row.requests_wanted else ""


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
