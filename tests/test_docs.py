"""The documentation says what the code does: options, skips, tests, numbers, links, and an example that runs."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vit_compile
from vit_compile.options import BackendOptions
from vit_compile.runtime.config import EncoderConfig
from vit_compile.stats import SKIP_CODES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def text(path: Path) -> str:
    """A file's text."""
    return path.read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    """Cells of the table rows that start with a code word; its quotes are taken off the first two cells."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [[cells[0].strip("`"), cells[1].strip("`"), *cells[2:]] for cells in lines]


def test_every_skip_has_a_row() -> None:
    """Each code is explained once, with advice, and the page explains no code that does not exist."""
    table = rows(text(ROOT / "docs" / "troubleshooting.md").partition("## Skips")[2])
    assert sorted(cells[0] for cells in table) == sorted(SKIP_CODES)
    assert all(len(cells) == 3 and all(cells) for cells in table)


def test_every_option_has_a_row_with_its_default() -> None:
    """README lists exactly the options, in the order of the dataclass, each with the default that it has."""
    table = rows(text(README).partition("## Options")[2].partition("\n### ")[0])
    fields = dataclasses.fields(BackendOptions)
    assert [cells[0] for cells in table] == [field.name for field in fields]
    assert [ast.literal_eval(cells[1]) for cells in table] == [field.default for field in fields]


def test_the_option_dicts_of_the_readme_are_valid() -> None:
    """Each dict in the table of set-ups passes the checks."""
    dicts = re.findall(r"^\| .*? \| `(\{.*?\})` \|$", text(README), re.MULTILINE)
    assert len(dicts) == 4
    for given in dicts:
        BackendOptions.from_dict(ast.literal_eval(given))


@pytest.mark.timeout(120)
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """README's block about torch.compile runs as it is (but for the compiler, to be quick) and says what its comments say."""
    pytest.importorskip("transformers")
    example = re.findall(r"```python\n(.*?)```", text(README), re.DOTALL)[1]
    assert len([line for line in example.splitlines() if line]) <= 10
    quick = example.replace("options = {", 'options = {"compiler": "eager", ')
    assert quick != example
    names: dict[str, object] = {}
    exec(compile(quick, "README.md", "exec"), names)
    shape, record = names["features"].shape, vit_compile.last_call()  # type: ignore[attr-defined]
    assert record is not None
    assert (shape[0], record.kind, record.rows, record.graph) == (3, "padded", 3, "full 4 rows")
    assert vit_compile.counters.captures == 4  # 8, 4 and 2 images, and the trace for one
    assert vit_compile.counters.skips == {}
    assert "full 4 rows" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_the_hugging_face_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """README's first block has five lines and runs as it is on a tiny model (but for the compiler): the same tokens as without
    it, every image served by a graph, and the model as it was afterwards."""
    pytest.importorskip("transformers")
    from tests.models.whole_models import qwen3_vl_example

    example = re.findall(r"```python\n(.*?)```", text(README), re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line]) == 5
    model, inputs = qwen3_vl_example()
    want = model.generate(**inputs, max_new_tokens=8)
    accelerate = vit_compile.accelerate
    monkeypatch.setattr(
        vit_compile, "accelerate", lambda model: accelerate(model, mode="eager", token_budgets=(16, 64)), raising=False
    )
    names: dict[str, Any] = {"model": model, "inputs": inputs}
    exec(compile(example, "README.md", "exec"), names)
    assert torch.equal(names["tokens"], want)
    assert capsys.readouterr().out.split(maxsplit=1) == ["2", "{}\n"]
    assert "forward" not in vars(model.model.visual)


def engine_blocks() -> list[str]:
    """The Python of docs/engines.md: tower, adapter, use."""
    return re.findall(r"```python\n(.*?)```", text(ROOT / "docs" / "engines.md"), re.DOTALL)


@pytest.mark.timeout(120)
def test_the_adapter_of_the_engine_page_runs() -> None:
    """The page's adapter has at most 40 lines, and its features are those of the page's tower, one image at a time."""
    tower, adapter, use = engine_blocks()
    assert len([line for line in adapter.splitlines() if line.strip()]) <= 40
    quick = use.replace("EncoderConfig()", 'EncoderConfig(mode="eager", packing="greedy")')
    assert quick != use
    names: dict[str, Any] = {}
    for block in (tower, adapter, quick):
        exec(compile(block, "engines.md", "exec"), names)
    start, made = 0, names["adapter"]
    for feature, (t, h, w) in zip(names["features"], names["grids"], strict=True):
        rows = t * h * w
        x = names["pixels"][start : start + rows]
        boundaries = torch.tensor([0, rows], dtype=torch.int32, device=x.device)
        with torch.no_grad():
            want = made.tower(x, torch.arange(rows, device=x.device) % 1024, boundaries, rows)
        assert (feature - want).abs().max() <= 1e-5
        start += rows
    assert names["manager"].snapshot()["graph_hits"] == 3


def test_every_field_of_the_encoder_config_has_a_row_with_its_default() -> None:
    """The engine page lists exactly the fields, in their order, each with the default that it has."""
    table = rows(text(ROOT / "docs" / "engines.md").partition("## Configuration")[2].partition("\n## ")[0])
    fields = dataclasses.fields(EncoderConfig)
    assert [cells[0] for cells in table] == [field.name for field in fields]
    assert [ast.literal_eval(cells[1]) for cells in table] == [field.default for field in fields]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_exist(page: Path) -> None:
    """Every link to a file or a heading leads somewhere."""
    prose = re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", text(file), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, target


def test_tests_named_in_the_docs_exist() -> None:
    """A page that points to a test points to one that is there."""
    there = {n for file in (ROOT / "tests").rglob("test_*.py") for n in re.findall(r"^def (test_\w+)", text(file), re.MULTILINE)}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", text(page))}
    assert named
    assert named <= there, named - there


def test_benchmark_tables_are_those_of_the_files(tmp_path: Path) -> None:
    """Numbers on the pages are read from the result files: making the tables anew changes nothing."""
    files = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
    pages = [README, ROOT / "docs" / "benchmarks.md"]
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(text(page), encoding="utf-8")
    script = ROOT / "scripts" / "benchmark_table.py"
    subprocess.run([sys.executable, str(script), *map(str, files), "--into", *map(str, copies)], check=True)
    for page, copy in zip(pages, copies, strict=True):
        assert text(copy) == text(page), f"{page.name}: run {script.name} with --into"


def test_the_table_of_models_is_the_registry_s() -> None:
    """docs/models.md has a row for every architecture, as the registry has it now; each row names buffers and token counts."""
    from vit_compile.models.registry import architectures

    script = ROOT / "scripts" / "models_table.py"
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() in text(ROOT / "docs" / "models.md"), "run scripts/models_table.py --write"
    assert all(row.buffers and row.tokens for row in architectures())
