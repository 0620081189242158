"""The demo's parts: photographs, gallery, retrieval, contact sheet, and the whole on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from typer.testing import CliRunner

from vit_compile.errors import MissingDependencyError
from vit_compile.tools import demo_photos, demo_weights
from vit_compile.tools.cli import app
from vit_compile.tools.dependencies import has
from vit_compile.tools.gallery import FLIPPED, Entry, Match, Query, accuracy, gallery_entries, retrieve, without_flips

needs_photos = pytest.mark.skipif(
    not (has("skimage") and has("sklearn")), reason="needs the photographs in scikit-image and scikit-learn (extra: demo)"
)
needs_matplotlib = pytest.mark.skipif(not has("matplotlib"), reason="needs matplotlib (extra: demo)")


def noise(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    """A random RGB picture."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@needs_photos
def test_photographs() -> None:
    """There are at least twelve photographs of at least eight sizes, each with its own name, and all decode."""
    photos = demo_photos.demo_photos()
    sizes = set()
    for photo in photos:
        with Image.open(photo.path) as image:
            image.load()
            sizes.add(image.size)
    assert len(photos) >= 12
    assert len(sizes) >= 8
    assert len({photo.name for photo in photos}) == len(photos)


@needs_photos
def test_too_few_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without most of the files is a clear error."""
    monkeypatch.setattr(demo_photos, "_PHOTOGRAPHS", (("cat", "skimage/data/chelsea.png"), ("gone", "skimage/data/gone.png")))
    with pytest.raises(MissingDependencyError, match="ship 1 of the demo's photographs"):
        demo_photos.demo_photos()


def test_gallery_entries() -> None:
    """A photo gives a flip, a centre crop and two random crops of its own size, the same ones every time."""
    image = noise(0)
    entries = gallery_entries("cat", image)
    assert [entry.transform.split()[0] for entry in entries] == [FLIPPED, "centre", "crop", "crop"]
    assert {entry.image.size for entry in entries} == {image.size}
    assert entries[0].image.tobytes() == ImageOps.mirror(image).tobytes()
    again = gallery_entries("cat", image)
    assert [entry.image.tobytes() for entry in entries] == [entry.image.tobytes() for entry in again]
    assert entries[2].image.tobytes() != entries[3].image.tobytes()
    assert gallery_entries("dog", image)[2].transform != entries[2].transform


def test_retrieval_is_cosine() -> None:
    """Neighbours come in order of cosine similarity, whatever the lengths of the features; sources are compared."""
    image = noise(0)
    entries = [
        Entry("a", FLIPPED, image),
        Entry("b", FLIPPED, image),
        Entry("a", "crop 50%", image),
        Entry("b", "crop 50%", image),
    ]
    features = torch.tensor([[100.0, 0.0], [0.0, 0.1], [1.0, 1.0], [-1.0, 0.0]])
    (query,) = retrieve([("a", image)], torch.tensor([[2.0, 0.0]]), entries, features)
    assert [match.entry for match in query.matches] == [entries[0], entries[2], entries[1]]
    assert [match.correct for match in query.matches] == [True, True, False]
    assert [match.similarity for match in query.matches] == pytest.approx([1.0, 2**-0.5, 0.0])
    crops, crop_features = without_flips(entries, features)
    assert crops == entries[2:]
    assert torch.equal(crop_features, features[2:])


def test_accuracy() -> None:
    """Top-1 looks at the nearest, top-3 at any of three, precision at all three."""
    entry = Entry("a", FLIPPED, noise(0))

    def query(*correct: bool) -> Query:
        return Query("a", entry.image, tuple(Match(entry, 1.0, value) for value in correct))

    scores = accuracy([query(True, True, False), query(False, True, False), query(False, False, False), query(True, True, True)])
    assert scores == {"top1": 0.5, "top3": 0.75, "precision_at_3": pytest.approx(0.5)}


@needs_matplotlib
@pytest.mark.parametrize("count", [1, 2, 5])
def test_contact_sheet(tmp_path: Path, count: int) -> None:
    """The sheet is a PNG of the announced size, and is not blank."""
    from vit_compile.tools.contact_sheet import sheet_pixels, write_contact_sheet

    photos = [(f"photo {index}", noise(index, 40 + 10 * index, 50)) for index in range(count)]
    entries = [entry for name, image in photos for entry in gallery_entries(name, image)]
    features = torch.randn(len(entries), 8, generator=torch.Generator().manual_seed(0))
    queries = retrieve(photos, features[::4], entries, features)
    path = write_contact_sheet(tmp_path / "new" / "sheet.png", queries, title="A title", lines=("one", "two"))
    with Image.open(path) as sheet:
        sheet.load()
        assert sheet.format == "PNG"
        assert all(abs(got - want) <= 1 for got, want in zip(sheet.size, sheet_pixels(count), strict=True))
        assert len(set(sheet.convert("L").tobytes())) > 50


@needs_photos
@needs_matplotlib
def test_whole_demo(dinov2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo writes features, report and picture; its numbers cover all photos; here with a tiny random model."""
    monkeypatch.setattr(demo_weights, "demo_model_dir", lambda fallback=None: dinov2_dir)
    out = tmp_path / "out"
    arguments = ["run", "--demo", "--compiler", "eager", "--device", "cpu", "--max-tokens", "48", "--out-dir", str(out), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads((out / "run.json").read_text()) == report
    names = [image["name"] for image in report["images"]]
    assert set(load_file(out / "features.safetensors")) == set(names)
    assert len({(image["resized_width_pixels"], image["resized_height_pixels"]) for image in report["images"]}) >= 5
    retrieval = report["retrieval"]
    assert (retrieval["queries"], retrieval["gallery"]) == (len(names), 4 * len(names))
    assert retrieval["gallery_within_tolerance"]
    assert [row["photo"] for row in retrieval["neighbours"]] == names
    assert all(len(row["nearest"]) == 3 for row in retrieval["neighbours"])
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.format == "PNG"
    printed = CliRunner().invoke(app, [*arguments[:-1]])
    assert "Retrieval: " in printed.stdout
