"""A run as one table for people and one JSON object for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vit_compile.errors import OptionError
from vit_compile.tools.compiling import CompileSettings
from vit_compile.tools.encoding import ImageResult
from vit_compile.tools.features import preprocessing
from vit_compile.tools.packed import PackedRun
from vit_compile.tools.vision_models import VisionModel

SCHEMA = 1
_PLAIN_OUTPUT_COLUMNS = 160


@dataclass(slots=True)
class RunReport:
    """Everything a run found out."""

    model: VisionModel
    settings: CompileSettings
    max_patches: int
    results: Sequence[ImageResult]
    counters: Mapping[str, int | dict[str, int]]
    """What this run added to the backend's counters."""

    files: dict[str, str] = field(default_factory=dict)
    """What was written, by kind."""

    retrieval: dict[str, Any] | None = None
    """The demo's numbers."""

    gallery_within_tolerance: bool = True

    packed: PackedRun | None = None
    """All images in one call, where the run was packed."""

    @property
    def ok(self) -> bool:
        """Is every image within tolerance of eager?"""
        packed = self.packed is None or self.packed.within_tolerance
        return packed and self.gallery_within_tolerance and all(result.within_tolerance for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "model": {"name": self.model.name, "family": self.model.family, "pooling": self.model.encoder.pooling},
            "preprocessing": preprocessing(self.model, max_patches=self.max_patches),
            "options": self.settings.options(),
            "packed": None if self.packed is None else dataclasses.asdict(self.packed),
            "device": describe_device(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "images": [_image_dict(result) for result in self.results],
            "counters": dict(self.counters),
            "files": dict(self.files),
            "retrieval": self.retrieval,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }

    def as_json(self) -> str:
        """One JSON object, indented; numbers that JSON lacks (infinity, NaN) become null."""
        return json.dumps(_finite(self.as_dict()), indent=2, allow_nan=False)


def added(
    before: Mapping[str, int | dict[str, int]], after: Mapping[str, int | dict[str, int]]
) -> dict[str, int | dict[str, int]]:
    """The difference of two counter snapshots; only skips that happened are listed."""
    result: dict[str, int | dict[str, int]] = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, dict):
            past = earlier if isinstance(earlier, dict) else {}
            result[name] = {code: count - past.get(code, 0) for code, count in value.items() if count != past.get(code, 0)}
        else:
            result[name] = value - (earlier if isinstance(earlier, int) else 0)
    return result


def print_report(report: RunReport) -> None:
    """The run as one table and a few lines on stdout."""
    console = console_for(sys.stdout)
    model = report.model
    console.print(
        f"[bold]{model.family}[/] from {model.name}: {describe_device(model.device)}, {str(model.dtype).removeprefix('torch.')}, "
        f"mode {report.settings.mode}, compiler {report.settings.compiler}",
        highlight=False,
    )
    console.print(_table(report.results))
    outside = [result.picture.name for result in report.results if not result.within_tolerance]
    tolerance = report.results[0].tolerance if report.results else 0.0
    if outside:
        console.print(f"[bold red]{len(outside)} of {len(report.results)} images differ from eager by more than {tolerance:g}[/]")
    else:
        console.print(
            f"{len(report.results)} of {len(report.results)} images within {tolerance:g} of eager (worst token, relative)."
        )
    if report.packed is not None:
        console.print(_packed_line(report.packed), highlight=False)
    if report.retrieval is not None:
        console.print(_retrieval_line(report.retrieval), highlight=False)
    console.print(_counter_line(report.counters), highlight=False)
    for kind, path in report.files.items():
        console.print(f"{kind}: {path}", highlight=False, soft_wrap=True)


def write_json(report: RunReport, path: Path) -> Path:
    """Writes `as_json()`; the folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.as_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}.") from error
    return path


def console_for(stream: Any) -> Console:
    """A console that does not squeeze tables into 80 columns when its output goes to a file."""
    return Console(file=stream, width=None if stream.isatty() else _PLAIN_OUTPUT_COLUMNS)


def describe_device(device: torch.device) -> str:
    """ "cpu", or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def graph_words(result: ImageResult) -> str:
    """How the timed calls were served, in words for the table."""
    call = result.call
    if call.kind in ("exact", "padded"):
        return call.kind + (", captured first" if result.captured else "")
    return f"no graph: {call.reason}" if call.reason else "no graph"


def _table(results: Sequence[ImageResult]) -> Table:
    table = Table(header_style="bold")
    table.add_column("image", overflow="fold")
    table.add_column("pixels")
    table.add_column("tokens", justify="right")
    table.add_column("graph")
    table.add_column("replay", overflow="fold")
    table.add_column("ms", justify="right")
    table.add_column("eager ms", justify="right")
    table.add_column("max abs", justify="right")
    table.add_column("relative", justify="right")
    for result in results:
        picture, difference = result.picture, result.difference
        table.add_row(
            picture.name,
            f"{picture.width_pixels}x{picture.height_pixels} -> {picture.grid.width}x{picture.grid.height}",
            str(result.tokens),
            result.call.graph or "-",
            graph_words(result),
            f"{result.ms:.2f}",
            f"{result.eager_ms:.2f}",
            f"{difference.largest_absolute:.1e}",
            f"{difference.worst_token_relative:.1e}" + ("" if result.within_tolerance else " BEYOND TOLERANCE"),
            style=None if result.within_tolerance else "red",
        )
    return table


def _counter_line(counters: Mapping[str, int | dict[str, int]]) -> str:
    words = [f"{value} {name.replace('_', ' ')}" for name, value in counters.items() if isinstance(value, int) and value]
    skips = counters.get("skips")
    if isinstance(skips, dict) and skips:
        words.append("skips: " + ", ".join(f"{code} {count}" for code, count in sorted(skips.items())))
    return ("Backend: " + ", ".join(words)) if words else "Backend: not reached."


def _packed_line(run: PackedRun) -> str:
    return (
        f"Packed: {run.pictures} images of {run.sizes} sizes in one call, {run.replays} replays, {run.padded_share:.0%} padding: "
        f"{run.ms:.1f} ms, eager one by one {run.eager_ms:.1f} ms; {run.graphs} graphs, ready in {run.setup_s:.1f} s; "
        f"largest relative difference from eager {run.worst_token_relative:.1e}."
    )


def _retrieval_line(numbers: Mapping[str, Any]) -> str:
    return (
        f"Retrieval: {numbers['queries']} photos among {numbers['gallery']} flips and crops: top-1 {numbers['top1']:.1%}, "
        f"top-3 {numbers['top3']:.1%}, right among all three {numbers['precision_at_3']:.1%}, "
        f"top-1 among crops alone {numbers['top1_among_crops']:.1%}; "
        f"the gallery's largest relative difference from eager is {numbers['gallery_relative_difference']:.1e}."
    )


def _image_dict(result: ImageResult) -> dict[str, Any]:
    picture = result.picture
    return {
        "name": picture.name,
        "path": picture.path,
        "width_pixels": picture.width_pixels,
        "height_pixels": picture.height_pixels,
        "resized_width_pixels": picture.grid.width,
        "resized_height_pixels": picture.grid.height,
        "patches": picture.grid.patches,
        "tokens": result.tokens,
        "graph": result.call.graph,
        "kind": result.call.kind,
        "reason": result.call.reason,
        "captured": result.captured,
        "first_ms": round(result.first_ms, 3),
        "ms": round(result.ms, 3),
        "eager_ms": round(result.eager_ms, 3),
        "max_abs_difference": result.difference.largest_absolute,
        "relative_difference": result.difference.worst_token_relative,
        "tolerance": result.tolerance,
        "within_tolerance": result.within_tolerance,
    }


def _finite(value: Any) -> Any:
    """A copy of nested plain values in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
