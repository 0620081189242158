"""The command line: what it prints, writes and returns, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from vit_compile.tools import compiling, runs
from vit_compile.tools.cli import app
from vit_compile.tools.encoding import Difference, compare, full_float32, unique_names
from vit_compile.tools.images import load_image, normalize, resize
from vit_compile.tools.vision_models import load_vision_model

EAGER = ("--compiler", "eager", "--device", "cpu", "--max-tokens", "16")


def call(*arguments: str) -> Result:
    """Runs the command line in this process."""
    return CliRunner().invoke(app, list(arguments))


def report_of(*arguments: str) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    result = call("run", *arguments, *EAGER, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def user_error(result: Result) -> str:
    """The one line that a user's mistake gives."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("vit-compile: ")
    return lines[0]


def test_json_schema(image_files: list[str], dinov2_dir: Path) -> None:
    """--json prints one object and nothing else; its fields are these."""
    report = report_of(*image_files, "--model", str(dinov2_dir))
    assert set(report) == {
        "schema", "ok", "model", "preprocessing", "options", "device", "dtype",
        "images", "counters", "files", "packed", "retrieval", "versions",
    }  # fmt: skip
    assert (report["schema"], report["ok"], report["packed"], report["retrieval"]) == (1, True, None, None)
    assert [image["name"] for image in report["images"]] == ["a.png", "b.jpg", "c.png", "a-2.png"]
    for image in report["images"]:
        assert set(image) == {
            "name", "path", "width_pixels", "height_pixels", "resized_width_pixels", "resized_height_pixels", "patches", "tokens",
            "graph", "kind", "reason", "captured", "first_ms", "ms", "eager_ms", "max_abs_difference", "relative_difference",
            "tolerance", "within_tolerance",
        }  # fmt: skip
        assert image["patches"] <= 16
        assert image["tokens"] == image["patches"] + 1
        assert image["within_tolerance"]
        assert image["kind"] in ("exact", "padded", "uncaptured", "plain")


def test_sizes_are_captured_once_and_replayed(image_files: list[str], siglip_dir: Path) -> None:
    """The first image of each size captures, later ones of the size do not, and every timed call replays exactly."""
    report = report_of(image_files[0], image_files[2], image_files[0], "--model", str(siglip_dir))
    assert [image["captured"] for image in report["images"]] == [True, True, False]
    assert {image["kind"] for image in report["images"]} == {"exact"}
    assert report["counters"]["captures"] == 2
    assert report["counters"]["skips"] == {}


def test_mode_none_says_why_there_is_no_graph(image_files: list[str], dinov2_dir: Path) -> None:
    """Without capture the table names the reason."""
    report = report_of(image_files[0], "--model", str(dinov2_dir), "--mode", "none")
    assert report["images"][0]["graph"] is None
    assert report["images"][0]["kind"] == "uncaptured"
    assert "mode-none" in report["images"][0]["reason"]


def test_table(image_files: list[str], dinov2_dir: Path) -> None:
    """Without --json there is one table with every image, and a line that says whether all is well."""
    result = call("run", *image_files, "--model", str(dinov2_dir), *EAGER)
    assert result.exit_code == 0, result.output
    for words in ("a.png", "b.jpg", "c.png", "a-2.png", "300x200 -> 70x42", "exact", "4 of 4 images within"):
        assert words in result.stdout


def test_features_are_the_eager_ones(image_files: list[str], dinov2_dir: Path, tmp_path: Path) -> None:
    """The features file holds, under unique names, what the eager model gives for the same pixels, and says how."""
    out = tmp_path / "new" / "features.safetensors"
    report = report_of(*image_files, "--model", str(dinov2_dir), "--out", str(out))
    assert report["files"]["features"] == str(out)
    features = load_file(out)
    assert set(features) == {"a.png", "b.jpg", "c.png", "a-2.png"}
    model = load_vision_model(str(dinov2_dir), device=torch.device("cpu"), dtype=torch.float32)
    for path, name in zip(image_files, unique_names(image_files), strict=True):
        image = load_image(path)
        grid = model.grid(image.width, image.height, max_patches=16)
        with torch.no_grad():
            _, pooled = model.encoder(normalize(resize(image, grid), model.normalization))
        torch.testing.assert_close(features[name], pooled[0], rtol=1e-4, atol=1e-5)
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["model"] == str(dinov2_dir)
    assert metadata["pooling"] == "pooler_output"
    assert json.loads(metadata["preprocessing"])["max_patches"] == 16


def test_out_dir_holds_everything(image_files: list[str], dinov2_dir: Path, tmp_path: Path) -> None:
    """--out-dir gets the features and the same report that --json prints."""
    report = report_of(image_files[0], "--model", str(dinov2_dir), "--out-dir", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == report
    assert set(load_file(tmp_path / "out" / "features.safetensors")) == {"a.png"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions(image_files: list[str], dinov2_dir: Path, dtype: str) -> None:
    """Lower precisions run and are compared under their own tolerance."""
    report = report_of(image_files[0], "--model", str(dinov2_dir), "--dtype", dtype)
    assert report["dtype"] == dtype
    assert report["images"][0]["tolerance"] > 2e-4


def test_wrong_results_make_the_exit_code_one(
    image_files: list[str], dinov2_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiled model that gives other numbers is marked, reported, and fails the command."""

    def wrong(model: Any, settings: Any) -> compiling.Encode:
        eager = compiling.eager_encoder(model)

        def encode(pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, pooled = eager(pixel_values)
            tokens[:, -1] *= 1.01
            return tokens, pooled

        return encode

    monkeypatch.setattr(runs, "compile_encoder", wrong)
    result = call("run", image_files[0], "--model", str(dinov2_dir), *EAGER)
    assert result.exit_code == 1, result.output
    assert "BEYOND TOLERANCE" in result.stdout
    assert "1 of 1 images differ from eager" in result.stdout
    result = call("run", image_files[0], "--model", str(dinov2_dir), *EAGER, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["ok"], report["images"][0]["within_tolerance"]) == (False, False)
    assert report["images"][0]["kind"] == "plain"
    assert "not reached" in report["images"][0]["reason"]


def test_no_images() -> None:
    """An empty list of images is a mistake with advice."""
    assert "no images given" in user_error(call("run", "--model", "anything"))


def test_no_model(image_files: list[str]) -> None:
    """So is a missing model."""
    assert "no model given" in user_error(call("run", image_files[0]))


def test_demo_takes_no_images(image_files: list[str]) -> None:
    """The demo brings its own images and model."""
    assert "--demo brings" in user_error(call("run", image_files[0], "--demo"))
    assert "--demo brings" in user_error(call("run", "--demo", "--model", "x"))
    assert "--demo brings" in user_error(call("inspect", "--demo", "--model", "x"))


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"", "is empty"), (b"some text\n", "is not an image")])
def test_bad_images(image_files: list[str], dinov2_dir: Path, tmp_path: Path, content: bytes | None, message: str) -> None:
    """One bad image stops the run before anything is compiled, with its name in one line."""
    bad = tmp_path / "bad.png"
    if content is not None:
        bad.write_bytes(content)
    line = user_error(call("run", image_files[0], str(bad), "--model", str(dinov2_dir), *EAGER))
    assert str(bad) in line
    assert message in line


def test_bad_model(image_files: list[str], tmp_path: Path) -> None:
    """An unknown model folder is one line, too."""
    line = user_error(call("run", image_files[0], "--model", str(tmp_path / "no model"), *EAGER))
    assert "no such model folder" in line


def test_output_that_cannot_be_written(image_files: list[str], dinov2_dir: Path) -> None:
    """A path below a file is refused before any work."""
    line = user_error(
        call("run", image_files[0], "--model", str(dinov2_dir), *EAGER, "--out", f"{image_files[0]}/features.safetensors")
    )
    assert "is not a folder" in line


def test_missing_compiler_is_told(image_files: list[str], dinov2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor without a C++ compiler is a line with advice; without the option the command chooses what works."""
    monkeypatch.setattr(compiling, "host_compiler", lambda device: None)
    arguments = ("run", image_files[0], "--model", str(dinov2_dir), "--device", "cpu", "--max-tokens", "4")
    assert "needs a C++ compiler" in user_error(call(*arguments, "--compiler", "inductor"))
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["options"]["compiler"] == "aot_eager"


def test_inspect_prints_the_page(dinov2_dir: Path, tmp_path: Path) -> None:
    """`inspect` prints the backend's page, and keeps the dumps where it is told to."""
    out = tmp_path / "dumps"
    result = call(
        "inspect", "--model", str(dinov2_dir), "--compiler", "eager", "--device", "cpu", "--size", "28x42", "--out-dir", str(out)
    )
    assert result.exit_code == 0, result.output
    assert (out / "index.md").is_file()
    assert "All stages" in result.stdout


@pytest.mark.parametrize(
    ("size", "message"), [("28", "expected height and width"), ("28x30", "multiples of the patch"), ("0x14", "multiples")]
)
def test_inspect_refuses_other_sizes(dinov2_dir: Path, size: str, message: str) -> None:
    """Sizes are HxW in whole patches."""
    arguments = ("inspect", "--model", str(dinov2_dir), "--compiler", "eager", "--device", "cpu", "--size", size)
    assert message in user_error(call(*arguments))


def test_help_is_quick() -> None:
    """The command line is parsed without importing transformers, matplotlib or the ONNX reader."""
    code = (
        "import sys; from typer.testing import CliRunner; from vit_compile.tools.cli import app; "
        "assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0; "
        "sys.exit(', '.join({'transformers', 'matplotlib', 'onnx'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unique_names() -> None:
    """A repeated file name gets a number that no other file has."""
    assert unique_names(["x/a.png", "y/a.png", "a-2.png", "z/a.png"]) == ["a.png", "a-2.png", "a-2-2.png", "a-3.png"]


def test_full_float32_changes_one_flag_only() -> None:
    """TF32 convolutions are off inside and as before outside; cuDNN stays on."""
    before = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark)
    with full_float32():
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark) == (
            False,
            *before[1:],
        )
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark) == before


def test_one_wrong_token_is_seen() -> None:
    """The relative difference is the worst token's, not the mean's; NaN and another shape never pass."""
    reference = torch.ones(1, 1000, 8)
    wrong = reference.clone()
    wrong[0, 3] *= 1.5
    assert compare(wrong, reference) == Difference(0.5, pytest.approx(0.5))  # type: ignore[arg-type]
    wrong[0, 3, 0] = float("nan")
    assert not compare(wrong, reference).within(1e9)
    assert not compare(reference, reference).worse(compare(wrong, reference)).within(1e9)
    assert not compare(wrong, reference).worse(compare(reference, reference)).within(1e9)
    assert not compare(reference[:, :10], reference).within(1e9)
