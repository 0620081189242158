"""The demo: real weights, real photographs at their native sizes, one table and one picture.

The photos go through packed graphs, a handful for all sizes: one by one for the table, then all in one call. After that every
photo looks for its own flips and crops among all of them, with features from the same graphs. With `--mode piecewise` or `none`
they run like any images of `vit-compile run` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from vit_compile.runtime.graphs import median_ms
from vit_compile.stats import counters
from vit_compile.tools.compiling import CompileSettings, Encode, compile_encoder, eager_encoder
from vit_compile.tools.contact_sheet import write_contact_sheet
from vit_compile.tools.demo_photos import demo_photos
from vit_compile.tools.dependencies import require
from vit_compile.tools.encoding import NO_DIFFERENCE, REPEATS, TOLERANCES, Difference, Picture, compare, full_float32
from vit_compile.tools.gallery import Entry, Query, accuracy, gallery_entries, retrieve, without_flips
from vit_compile.tools.images import load_image
from vit_compile.tools.packed import MODES, PackedEncoder, PackedRun
from vit_compile.tools.report import RunReport, added, describe_device
from vit_compile.tools.runs import encode_pictures, progress, read_pictures, write_outputs
from vit_compile.tools.vision_models import VisionModel

MAX_PATCHES = {"cuda": 1024, "cpu": 400}
"""Default cap by device: small enough on a CPU for the whole demo to take less than three minutes on two cores."""

MAX_GRAPHS = 24
"""Room for every size among the photos, where each has a graph of its own."""

STEPS = {"cuda": (0.5, 1, 2, 4, 8), "cpu": (0.5, 1, 2)}
"""Budgets of the packed graphs, in largest photos."""

CLASS_TOKENS = 8
"""Room in a budget for the tokens that a tower adds to an image's patches."""


def run_demo(model: VisionModel, settings: CompileSettings, *, max_patches: int, out: Path | None, out_dir: Path) -> RunReport:
    """Runs the demo.

    Args:
        model: the converted demo model.
        settings: how it is compiled.
        max_patches: the most patches of one image.
        out: a further features file, or None.
        out_dir: folder for `features.safetensors`, `contact_sheet.png` and `run.json`.
    Returns:
        The report, with the retrieval's numbers.
    """
    require("matplotlib", extra="demo")
    photos = demo_photos()
    pictures = read_pictures(
        [str(photo.path) for photo in photos], [photo.name for photo in photos], model, max_patches=max_patches
    )
    before = counters.snapshot()
    with _encoder(model, settings, max_patches) as compiled:
        results = encode_pictures(pictures, model, compiled)
        packed = _all_at_once(pictures, model, compiled) if isinstance(compiled, PackedEncoder) else None
        originals = [(photo.name, load_image(photo.path)) for photo in photos]
        entries = [entry for name, image in originals for entry in gallery_entries(name, image)]
        entry_features, worst = _encode_entries(entries, model, compiled, max_patches=max_patches)
    photo_features = torch.stack([result.pooled for result in results])
    queries = retrieve(originals, photo_features, entries, entry_features)
    among_crops = retrieve(originals, photo_features, *without_flips(entries, entry_features))

    report = RunReport(model, settings, max_patches, results, added(before, counters.snapshot()))
    report.packed = packed
    report.gallery_within_tolerance = worst.within(TOLERANCES[model.dtype])
    report.retrieval = {
        "queries": len(queries),
        "gallery": len(entries),
        **accuracy(queries),
        "top1_among_crops": accuracy(among_crops)["top1"],
        "gallery_relative_difference": worst.worst_token_relative,
        "gallery_within_tolerance": report.gallery_within_tolerance,
        "neighbours": [_neighbours(query) for query in queries],
    }
    report.files["contact sheet"] = str(_draw(report, queries, out_dir))
    write_outputs(report, out=out, out_dir=out_dir)
    return report


def _encoder(model: VisionModel, settings: CompileSettings, max_patches: int) -> AbstractContextManager[Encode]:
    if settings.mode not in MODES:
        return nullcontext(compile_encoder(model, settings))
    largest = max_patches + CLASS_TOKENS
    return PackedEncoder(model, settings, [max(1, int(largest * step)) for step in STEPS[model.device.type]])


def _all_at_once(pictures: Sequence[Picture], model: VisionModel, packed: PackedEncoder) -> PackedRun:
    """All pictures in one call, against eager calls one by one."""
    eager, images = eager_encoder(model), [picture.pixel_values(model) for picture in pictures]
    runs = REPEATS[model.device.type]
    with full_float32():
        before = packed.stats()
        outputs = packed.many(images)
        after = packed.stats()
        worst = NO_DIFFERENCE
        for image, (tokens, _) in zip(images, outputs, strict=True):
            worst = worst.worse(compare(tokens, eager(image)[0]))
        ms = median_ms(lambda: packed.many(images), model.device, runs)
        eager_ms = median_ms(lambda: [eager(image) for image in images], model.device, runs)
    replayed, padding = (after["tokens"][name] - before["tokens"][name] for name in ("replayed", "padding"))
    return PackedRun(
        pictures=len(pictures),
        sizes=len({(picture.grid.width, picture.grid.height) for picture in pictures}),
        graphs=len(after["graphs"]),
        graph_bytes=after["graph_bytes"],
        replays=after["replays"] - before["replays"],
        padded_share=padding / max(1, replayed + padding),
        setup_s=packed.setup_s,
        ms=ms,
        eager_ms=eager_ms,
        worst_token_relative=worst.worst_token_relative,
        within_tolerance=worst.within(TOLERANCES[model.dtype]),
    )


def _encode_entries(
    entries: list[Entry], model: VisionModel, compiled: Encode, *, max_patches: int
) -> tuple[torch.Tensor, Difference]:
    """Pooled features of the gallery, float32 [G, D] on the CPU, and the worst difference from eager."""
    eager, worst, features = eager_encoder(model), NO_DIFFERENCE, []
    with full_float32():
        for entry in progress(entries, "gallery"):
            picture = Picture.of(entry.image, entry.source, entry.transform, model, max_patches=max_patches)
            pixel_values = picture.pixel_values(model)
            tokens, pooled = compiled(pixel_values)
            worst = worst.worse(compare(tokens, eager(pixel_values)[0]))
            features.append(pooled[0].float().cpu())
    return torch.stack(features), worst


def _draw(report: RunReport, queries: list[Query], out_dir: Path) -> Path:
    numbers = report.retrieval or {}
    return write_contact_sheet(
        out_dir / "contact_sheet.png",
        queries,
        title=f"{len(queries)} photos and their nearest neighbours among {numbers['gallery']} flips and crops",
        lines=(
            f"DINOv2 ViT-S/14 at native sizes on {describe_device(report.model.device)}, {_form(report)}. "
            f"Nearest neighbour right: {numbers['top1']:.0%} (among crops alone {numbers['top1_among_crops']:.0%}); "
            f"right among all three: {numbers['precision_at_3']:.0%}.",
            "Under each picture: the photo it was made from, how, and the cosine similarity of the features.",
        ),
    )


def _form(report: RunReport) -> str:
    if report.packed is None:
        return f"through vit_cudagraph, mode {report.settings.mode}"
    return f"{report.packed.sizes} sizes through {report.packed.graphs} packed graphs"


def _neighbours(query: Query) -> dict[str, Any]:
    return {
        "photo": query.name,
        "nearest": [
            {
                "photo": match.entry.source,
                "transform": match.entry.transform,
                "similarity": round(match.similarity, 4),
                "correct": match.correct,
            }
            for match in query.matches
        ],
    }
