"""The job behind `vit-compile plan`: from a trace and a tower's geometry to a ladder, and what each of its graphs is worth.

Nothing runs on a device. A ladder is fitted to the first half of the trace and judged on the second, which it has not seen.
Milliseconds, bytes and seconds are given where they were measured, and not made up where they were not.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from vit_compile.errors import BudgetError, OptionError, TraceError
from vit_compile.planning import budgets, measured, traffic
from vit_compile.planning.measured import Measured
from vit_compile.planning.worth import Costs, Ladder, Packer
from vit_compile.tools.plan_model import Tower
from vit_compile.tools.plan_result import DEFAULT_COUNT, Judged, Plan, PlanOptions

STEP_TOKENS = 16
"""Budgets are multiples of this, or of the largest power of two below it that divides the largest budget."""


def make_plan(options: PlanOptions, tower: Tower) -> Plan:
    """Reads or draws the trace, fits, judges, and writes the trace where that is wanted.

    Raises:
        VitCompileError: A file or number is wrong, or no image of the trace fits the largest budget.
    """
    known = None if options.measured is None else read_measured(options.measured)
    requests = _requests(options, tower)
    tokens = [[tower.geometry.tokens(picture) for picture in request] for request in requests]
    counts = [count for request in tokens for count in request]
    too_large = sum(count > options.max_tokens for count in counts)
    if too_large == len(counts):
        raise BudgetError(
            f"each of the {len(counts)} images of the trace has more than --max-tokens {options.max_tokens} output tokens, "
            f"{min(counts)} at least: raise it, or lower --max-image-tokens."
        )
    half = len(tokens) // 2
    first, second = tokens[:half], tokens[half:]
    if all(count > options.max_tokens for request in first for count in request):
        raise BudgetError(
            f"each image of the first {half} requests, to which the ladder is fitted, has more than --max-tokens "
            f"{options.max_tokens} output tokens, {min(min(request) for request in first)} at least: raise it, or give a longer "
            "or a shuffled trace."
        )
    packer = Packer(options.max_items, _costs(known))
    ladder = _fitted(options, packer, first, known)
    return Plan(
        options=options,
        tower=tower,
        requests=len(requests),
        images=len(counts),
        tokens=sum(counts),
        too_large=too_large,
        fitted_on=half,
        judged_on_images=sum(count <= ladder[-1] for request in second for count in request),
        fitted=_judged("fitted", ladder, packer, second, known),
        doubled=_judged("powers of two", _doubled(options, ladder[-1]), packer, second, known),
        worth=tuple(packer.worth(second, ladder)),
        measured=known,
    )


def read_measured(path: Path) -> Measured:
    """What `manager.snapshot()` wrote as JSON.

    Raises:
        OptionError: The file cannot be read, or is something else.
    """
    try:
        snapshot = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--measured {path}: cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise OptionError(f"--measured {path}: expected the JSON of manager.snapshot().") from error
    try:
        return measured.from_snapshot(snapshot)
    except OptionError as error:
        raise OptionError(f"--measured {path}: {error}") from None


def _requests(options: PlanOptions, tower: Tower) -> Sequence[traffic.Request]:
    if options.trace is not None:
        requests = traffic.read_jsonl(options.trace)
    else:
        assert options.traffic is not None, "checked by PlanOptions"
        count = DEFAULT_COUNT if options.count is None else options.count
        requests = traffic.generate(options.traffic, count, seed=options.seed_used, geometry=tower.geometry)
    if len(requests) < 2:
        raise TraceError("the trace has a single request: a plan needs two, one to fit to and one to judge by.")
    if options.save_trace is not None:
        traffic.write_jsonl(options.save_trace, requests)
    return requests


def _costs(known: Measured | None) -> Costs:
    if known is None:
        return Costs()
    return Costs(known.replay, None if known.eager_ms is None else known.eager)


def _fitted(options: PlanOptions, packer: Packer, requests: Sequence[Sequence[int]], known: Measured | None) -> Ladder:
    """The ladder for these requests, under the cap in bytes where there is one."""
    size = {"maximum": options.max_tokens, "multiple_of": math.gcd(STEP_TOKENS, options.max_tokens)}
    if options.max_bytes is None:
        return packer.fit(requests, options.max_graphs, **size)
    assert known is not None, "checked by PlanOptions"
    return packer.fit_within(requests, options.max_graphs, **size, nbytes=known.bytes_of, max_bytes=options.max_bytes)


def _doubled(options: PlanOptions, maximum: int) -> Ladder:
    """Powers of two up to the maximum, as many as there may be graphs, none below the most items of a replay."""
    lowest = -(-maximum >> (options.max_graphs - 1))  # rounded up
    return budgets.power_of_two(max(options.max_items, lowest), maximum)


def _judged(name: str, ladder: Ladder, packer: Packer, requests: Sequence[Sequence[int]], known: Measured | None) -> Judged:
    return Judged(
        name=name,
        ladder=ladder,
        by_cost=packer.serve(requests, ladder),
        greedy=dataclasses.replace(packer, by_cost=False).serve(requests, ladder),
        nbytes=None if known is None else known.bytes_of(ladder),
        startup_seconds=None if known is None else known.seconds_of(ladder),
    )
