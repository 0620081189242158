"""A plan as two tables and the line to paste."""

from __future__ import annotations

import sys

from rich.markup import escape
from rich.table import Table

from vit_compile.planning.worth import Outcome, Worth
from vit_compile.tools.plan_result import LITTLE, Judged, Plan
from vit_compile.tools.report import console_for

_MIB = 2**20
_NOT_MEASURED = "not measured (run with --measured)"


def print_plan(plan: Plan) -> None:
    """The plan on stdout."""
    console = console_for(sys.stdout)
    for line in _traffic_lines(plan):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_ladders(plan))
    console.print(_graphs(plan))
    for line in _closing_lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def _traffic_lines(plan: Plan) -> list[str]:
    options, geometry = plan.options, plan.tower.geometry
    source = escape(str(options.trace)) if options.trace else f"{options.traffic} (seed {options.seed_used})"
    lines = [
        f"[bold]Traffic[/]: {source}, {plan.requests} requests, {plan.images} images, {plan.tokens / plan.images:.0f} tokens an "
        f"image; fitted to the first {plan.fitted_on} requests, judged on the other {plan.requests - plan.fitted_on}.",
        f"[bold]Tower[/]: {escape(plan.tower.name or 'by its sizes')}, patch {geometry.patch_size}, merge {geometry.merge_size}, "
        f"temporal patch {geometry.temporal_patch_size}.",
    ]
    if plan.too_large:
        lines.append(
            f"[yellow]{plan.too_large} of {plan.images} images have more than {options.max_tokens} tokens: they run eagerly "
            "whatever the ladder.[/]"
        )
    return lines


def _ladders(plan: Plan) -> Table:
    table = Table(header_style="bold", title="Ladders, on requests that they were not fitted to", title_justify="left")
    timed = plan.measured is not None
    table.add_column("ladder")
    columns = ["graphs", "padded share", "greedy packing", "replays", "eager images"]
    for heading in [*columns, *(["ms per request", "bytes", "start-up s"] if timed else [])]:
        table.add_column(heading, justify="right")
    for judged in (plan.fitted, plan.doubled):
        table.add_row(*_ladder_cells(plan, judged))
    return table


def _ladder_cells(plan: Plan, judged: Judged) -> list[str]:
    outcome = judged.by_cost
    cells = [judged.name, str(len(judged.ladder)), _share(outcome), _share(judged.greedy)]
    cells += [str(outcome.replays), str(outcome.eager_items)]
    if judged.nbytes is not None and judged.startup_seconds is not None:
        milliseconds = outcome.cost / (plan.requests - plan.fitted_on)
        cells += [f"{milliseconds:.3f}", _mib(judged.nbytes), f"{judged.startup_seconds:.1f}"]
    return cells


def _share(outcome: Outcome) -> str:
    return "nothing replayed" if outcome.padded_share is None else f"{outcome.padded_share:.1%}"


def _graphs(plan: Plan) -> Table:
    table = Table(header_style="bold", title="Graphs, the most worth first: what it costs to do without", title_justify="left")
    timed = plan.measured is not None
    rows_known = plan.tower.widths is not None
    headings = ["budget", "replays", "added " + ("ms" if timed else "tokens"), "added", "images left eager", "tokens left eager"]
    headings += ["bytes freed", "start-up s saved"] if timed else []
    headings += ["input + output rows (arithmetic)"] if rows_known else []
    for heading in headings:
        table.add_column(heading, justify="right")
    for worth in plan.worth:
        table.add_row(*_worth_cells(plan, worth))
    return table


def _worth_cells(plan: Plan, worth: Worth) -> list[str]:
    added = f"{worth.added_cost:.1f}" if plan.measured is not None else f"{worth.added_cost:.0f}"
    cells = [str(worth.token_budget), str(worth.replays), added, f"{worth.added_share:.2%}", str(worth.added_eager_items)]
    cells += [str(worth.added_eager_tokens)]
    freed, seconds = plan.bytes_without(worth.token_budget), plan.seconds_without(worth.token_budget)
    if freed is not None and seconds is not None:
        cells += [_mib(freed), f"{seconds:.2f}"]
    rows = plan.tower.row_bytes(worth.token_budget)
    return cells if rows is None else [*cells, _mib(rows)]


def _closing_lines(plan: Plan) -> list[str]:
    lines = []
    if not plan.judged_on_images:
        lines.append("[yellow]No graph holds an image of the second half: nothing was replayed, and the ladder is not judged.[/]")
    elif plan.fitted.by_cost.padded_share is None:
        lines.append("[yellow]Nothing was replayed: every image of the second half is cheaper without a graph.[/]")
    if plan.measured is None:
        lines.append(f"Milliseconds, bytes, start-up: {_NOT_MEASURED}.")
    elif plan.extrapolated:
        low, high = plan.measured.token_budgets[0], plan.measured.token_budgets[-1]
        lines.append(f"[yellow]Budgets outside of {low} to {high} tokens were not measured: their numbers are extrapolated.[/]")
    if plan.hardly_worth:
        names = ", ".join(map(str, plan.hardly_worth))
        lines.append(f"Hardly worth a graph, since each adds less than {LITTLE:.1%} when it goes: {names}.")
    if plan.options.save_trace:
        lines.append(f"Trace: {escape(str(plan.options.save_trace))}")
    lines.append("For EncoderConfig:")
    lines.append(plan.config_line)
    return lines


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB"
