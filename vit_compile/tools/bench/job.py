"""A whole run: tower, traffic, ladders, references, then one peer after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vit_compile.planning.traffic import Request
from vit_compile.planning.units import Grid
from vit_compile.tools.bench import ladders, peers
from vit_compile.tools.bench.cases import Traffic, traffic_for
from vit_compile.tools.bench.checking import references
from vit_compile.tools.bench.environment import device_name, environment
from vit_compile.tools.bench.flops import formula_for
from vit_compile.tools.bench.measure import Bench, measure
from vit_compile.tools.bench.peer import Setup
from vit_compile.tools.bench.ranks import Ranks
from vit_compile.tools.bench.results import Result, Row
from vit_compile.tools.bench.settings import BenchSettings
from vit_compile.tools.bench.towers import Tower, load_tower
from vit_compile.tools.bench.workload import Pixels, item_grids

Progress = Callable[[Sequence[Row], Result], None]
"""Called without rows before the first peer, then with the rows of each peer and the result so far: a run that is cut off has
lost one peer, not all of them."""


def run(settings: BenchSettings, ranks: Ranks, *, command: str, progress: Progress = lambda rows, so_far: None) -> Result:
    """Measure everything that the settings ask for. With ranks, every one calls this alike.

    Raises:
        OptionError, TraceError: the settings name something unknown.
        ModelError: the tower cannot be made.
    """
    specs = peers.chosen(settings.peers)
    device = torch.device(settings.device)
    tower = load_tower(
        settings.tower,
        small=settings.small,
        weights=settings.weights,
        model=settings.model,
        device=device,
        dtype=getattr(torch, settings.dtype),
    )
    traffic = traffic_for(settings, tower.geometry)
    with torch.no_grad():
        bench = _bench(settings, ranks, tower, traffic)
    result = Result(
        command=command,
        environment=environment(device, ranks=ranks.size),
        tower=_described(tower),
        traffic=_traffic(bench),
        settings=_plain(settings),
        tolerance=settings.allowed_difference,
        rows=[],
    )
    progress([], result)
    for spec in specs:
        found = measure(bench, spec)
        result = replace(result, rows=[*result.rows, *found])
        progress(found, result)
    return result


def _bench(settings: BenchSettings, ranks: Ranks, tower: Tower, traffic: Traffic) -> Bench:
    measured = [request for case in traffic.cases for request in case.requests]
    pixels = Pixels(tower, [*measured, *traffic.warmup])
    ladder, powers = _ladders(settings, ranks, tower, traffic)
    setup = Setup(
        tower=tower,
        ladder=ladder,
        powers=powers,
        capacities=settings.capacities,
        compiler=settings.compiler,
        is_single=traffic.is_single,
        warmup=[pixels.inputs(request, number) for number, request in enumerate(traffic.warmup)],
        group=ranks.group,
    )
    return Bench(
        settings=settings,
        setup=setup,
        traffic=traffic,
        pixels=pixels,
        references=references(setup, traffic, pixels, settings.check_requests),
        flops=formula_for(tower),
        peak_flops=settings.peak_flops(device_name(tower.device)),
        ranks=ranks,
    )


def _ladders(settings: BenchSettings, ranks: Ranks, tower: Tower, traffic: Traffic) -> tuple[ladders.Ladder, ladders.Ladder]:
    """Fitted, or the user's; and powers of two."""

    def tokens(request: Request) -> list[int]:
        # By picture, in order; a dense tower has an item for each frame of a clip.
        return [sum(tower.tokens(grid) for grid in item_grids((picture,), tower)[0]) for picture in request]

    def clips(request: Request) -> list[Grid]:
        grids, count = item_grids(request, tower)
        return list(grids[len(grids) - count :])

    fitting = replace(traffic, fitting=ladders.shared(traffic.fitting, tokens, ranks.size))
    limits: dict[str, Any] = {"max_tokens": settings.max_tokens, "small": tower.small}
    powers = ladders.powers_of_two(fitting, tokens, clips, **limits)
    if settings.budgets is not None:
        return ladders.explicit(settings.budgets, fitting, clips), powers
    return ladders.fitted(fitting, tokens, clips, max_graphs=settings.max_graphs, **limits), powers


def _described(tower: Tower) -> dict[str, Any]:
    return {
        "name": tower.name,
        "key": tower.key,
        "kind": tower.kind,
        "small": tower.small,
        "dtype": str(tower.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in tower.module.parameters()),
    }


def _traffic(bench: Bench) -> dict[str, Any]:
    traffic, tower = bench.traffic, bench.setup.tower
    grids = [item_grids(request, tower)[0] for case in traffic.cases for request in case.requests]
    return {
        "name": traffic.name,
        "is_single": traffic.is_single,
        "requests": len(grids),
        "images": sum(map(len, grids)),
        "tokens": sum(tower.tokens(grid) for request in grids for grid in request),
        "seed": bench.settings.seed,
        "fitted_to": traffic.fitted_to,
        "ladder": list(bench.setup.ladder.budgets),
        "max_items": bench.setup.ladder.max_items,
    }


def _plain(settings: BenchSettings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
