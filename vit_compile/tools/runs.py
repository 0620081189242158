"""The job behind `vit-compile run`: encode files, compare with eager, write what was asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from vit_compile.errors import ImageError, OptionError
from vit_compile.stats import counters
from vit_compile.tools.compiling import CompileSettings, Encode, compile_encoder, eager_encoder
from vit_compile.tools.encoding import ImageResult, Picture, encode_picture, full_float32, unique_names
from vit_compile.tools.features import write_features
from vit_compile.tools.report import RunReport, added, write_json
from vit_compile.tools.vision_models import VisionModel

T = TypeVar("T")


def run_images(
    paths: Sequence[str],
    model: VisionModel,
    settings: CompileSettings,
    *,
    max_patches: int,
    out: Path | None,
    out_dir: Path | None,
) -> RunReport:
    """Encodes files and reports.

    Args:
        paths: image files, at least one; all are decoded before anything is compiled, so that a bad one costs no time.
        model: the encoder.
        settings: how it is compiled.
        max_patches: the most patches of one image.
        out: features file to write, or None.
        out_dir: folder for `features.safetensors` and `run.json`, or None.
    """
    if not paths:
        raise ImageError("no images given: name at least one file, or use --demo.")
    pictures = read_pictures(paths, unique_names(list(paths)), model, max_patches=max_patches)
    before = counters.snapshot()
    results = encode_pictures(pictures, model, compile_encoder(model, settings))
    report = RunReport(model, settings, max_patches, results, added(before, counters.snapshot()))
    write_outputs(report, out=out, out_dir=out_dir)
    return report


def read_pictures(paths: Sequence[str], names: Sequence[str], model: VisionModel, *, max_patches: int) -> list[Picture]:
    """Reads and resizes files; only the resized pictures are kept."""
    files = list(zip(paths, names, strict=True))
    return [Picture.read(path, name, model, max_patches=max_patches) for path, name in progress(files, "reading")]


def encode_pictures(pictures: Sequence[Picture], model: VisionModel, compiled: Encode) -> list[ImageResult]:
    """Encodes pictures in order and holds each against eager."""
    eager = eager_encoder(model)
    with full_float32():
        return [encode_picture(picture, model, compiled, eager) for picture in progress(pictures, "encoding")]


def write_outputs(report: RunReport, *, out: Path | None, out_dir: Path | None) -> None:
    """Writes the features where asked, and the report into `out_dir`; notes both in `report.files`."""
    features = {result.picture.name: result.pooled for result in report.results}
    for target in (out, out_dir / "features.safetensors" if out_dir is not None else None):
        if target is not None:
            write_features(target, features, report.model, max_patches=report.max_patches)
            report.files["features"] = str(target)
    if out_dir is not None:
        report.files["report"] = str(out_dir / "run.json")
        write_json(report, out_dir / "run.json")


def check_writable(*targets: Path | None) -> None:
    """Refuses output paths that cannot be written, before any work is done."""
    for target in targets:
        if target is None:
            continue
        folder = next(parent for parent in (target, *target.parents) if parent.exists())
        if folder != target and not folder.is_dir():
            raise OptionError(f"cannot write {target}: {folder} is not a folder.")


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a bar on stderr while they are worked through; no bar when stderr is not a terminal."""
    if not sys.stderr.isatty():
        return items
    return track(items, description=what, console=Console(stderr=True), transient=True)
