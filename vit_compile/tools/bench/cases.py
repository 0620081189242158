"""What is measured: traffic from a preset or a trace, or single requests that are repeated.

The ladder is fitted to other requests than those that are measured, and warm-up takes others still. Pictures only: pixels
are made in `workload`. Nothing here imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vit_compile.errors import OptionError
from vit_compile.planning.traffic import PRESETS, Geometry, Picture, Request, generate, read_jsonl
from vit_compile.tools.bench.settings import BenchSettings

SINGLE = "single:"
FITTING_REQUESTS = 2000
WARMUP_REQUESTS = 8
SINGLE_WARMUPS = 3
_CASE = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that make one row for each peer."""

    label: str
    """The traffic's name, or "8 x 448"; "1 x 1024 (as 256 x 256)" where the tower's limits change the size."""

    requests: tuple[Request, ...]
    """In the order in which they are measured."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All cases of a run. A peer is set up once for all of them."""

    name: str
    cases: tuple[Case, ...]
    is_single: bool
    """Each case is one request, repeated."""

    fitting: tuple[Request, ...]
    """What ladders are made from."""

    warmup: tuple[Request, ...]
    """Served before anything is timed."""

    fitted_to: str
    """In words."""


def traffic_for(settings: BenchSettings, geometry: Geometry) -> Traffic:
    """The traffic that the settings ask for.

    Raises:
        OptionError: unknown traffic, or a case that is not COUNTxSIDE.
        TraceError: the trace cannot be read.
    """
    if settings.trace is not None:
        return _from_trace(settings.trace, settings.requests)
    if settings.traffic.startswith(SINGLE):
        return _singles(settings.traffic, settings.requests, geometry)
    if settings.traffic not in PRESETS:
        raise OptionError(
            f"traffic {settings.traffic!r}: choose one of {', '.join(PRESETS)}, or {SINGLE}COUNTxSIDE[,COUNTxSIDE] for repeated "
            "requests, or give a file with --trace."
        )

    def drawn(count: int, seed: int) -> tuple[Request, ...]:
        return tuple(generate(settings.traffic, count, seed=seed, geometry=geometry))

    seed = settings.seed
    return Traffic(
        name=settings.traffic,
        cases=(Case(settings.traffic, drawn(settings.requests, seed)),),
        is_single=False,
        fitting=drawn(FITTING_REQUESTS, seed + 1),
        warmup=drawn(WARMUP_REQUESTS, seed + 2),
        fitted_to=f"{FITTING_REQUESTS} other requests, seed {seed + 1}",
    )


def _singles(text: str, requests: int, geometry: Geometry) -> Traffic:
    cases = tuple(_single(part.strip(), requests, geometry) for part in text.removeprefix(SINGLE).split(","))
    first = tuple(case.requests[0] for case in cases)
    return Traffic(
        name=text,
        cases=cases,
        is_single=True,
        fitting=first,
        warmup=tuple(request for request in first for _ in range(SINGLE_WARMUPS)),
        fitted_to="the cases themselves",
    )


def _single(text: str, requests: int, geometry: Geometry) -> Case:
    found = _CASE.fullmatch(text)
    if found is None or not all(map(int, found.groups())):
        raise OptionError(f"case {text!r} of {SINGLE}: expected COUNTxSIDE with a side in pixels, such as 8x448.")
    count, side = map(int, found.groups())
    picture = Picture(side, side)
    return Case(f"{count} x {side}{_measured_as(picture, geometry)}", ((picture,) * count,) * requests)


def _measured_as(picture: Picture, geometry: Geometry) -> str:
    """Names the size that a tower gets where its limits, and not just rounding to whole blocks, change the picture's."""
    _, rows, columns = geometry.grid(picture)
    high, wide = rows * geometry.patch_size, columns * geometry.patch_size
    if 2 * max(abs(high - picture.height), abs(wide - picture.width)) <= geometry.block:
        return ""
    return f" (as {high} x {wide})"


def _from_trace(path: Path, requests: int) -> Traffic:
    """Every second request is measured, the ladder is fitted to the others; a short trace is used for both."""
    read = read_jsonl(path)
    halves = (tuple(read[::2]), tuple(read[1::2])) if len(read) >= 2 * WARMUP_REQUESTS else (tuple(read), tuple(read))
    measured, others = halves
    return Traffic(
        name=path.name,
        cases=(Case(path.stem, measured[:requests]),),
        is_single=False,
        fitting=others,
        warmup=others[:WARMUP_REQUESTS],
        fitted_to="the same requests" if measured is others or measured == others else "every second request of the trace",
    )
