"""`debug_dir`: every stage as a readable file, and one page that says what happened."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.backend.common import BOUND, BUDGETS, call, compiled, compiled_toy, packed, trace_dynamic, wide_rows
from tests.towers import COUNTING_NAME, graph_break_tower, norm_view_tower, toy_tower


def files(folder: Path) -> list[str]:
    """All files below a folder, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def index(folder: Path) -> str:
    """The page."""
    return (folder / "index.md").read_text()


@pytest.mark.default_passes
def test_every_stage_has_a_file(tmp_path: Path) -> None:
    """Traced graph, the graph after each pass, the split, every distinct piece, the bytecode, the page."""
    _, ours = compiled_toy(debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    found = files(tmp_path)
    assert "index.md" in found
    assert {"graph_0/traced.py", "graph_0/after_patch_embedding_gemm.py", "graph_0/split.py"} <= set(found)
    pieces = [name for name in found if name.startswith("graph_0/pieces/")]
    assert len(pieces) == 3
    for name in found:
        if name.endswith(".py"):
            ast.parse((tmp_path / name).read_text())


def test_bytecode_is_decompiled(tmp_path: Path) -> None:
    """Dynamo's bytecode is readable Python that calls the compiled graph."""
    pytest.importorskip("depyf")
    _, ours = compiled_toy(debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    (name,) = [name for name in files(tmp_path) if "bytecode_" in name]
    text = (tmp_path / name).read_text()
    assert "def " in text
    assert "__compiled_fn" in text


def test_generated_code_is_copied(tmp_path: Path) -> None:
    """What Inductor generated for each distinct piece is kept under the piece's hash, also with a warm cache."""
    for run in ("cold", "warm"):
        torch.compiler.reset()
        folder = tmp_path / run
        ours = compiled(norm_view_tower(1), compiler="inductor", mode="piecewise", token_budgets=BUDGETS, debug_dir=folder)
        trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
        pieces = {Path(name).stem for name in files(folder) if name.startswith("graph_0/pieces/")}
        generated = {Path(name).stem.rsplit("_", 1)[0] for name in files(folder) if name.startswith("graph_0/generated/")}
        assert len(pieces) == 2
        assert generated == pieces, run


def test_the_page_says_what_happened(tmp_path: Path) -> None:
    """Mode, budgets in both units, pieces and who shares them, attention, roles, captures, skips, calls, counters."""
    _, ours = compiled_toy(debug_dir=tmp_path, spatial_merge_size=2, token_budgets=[2, 4, 8])
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    for lengths in ([8, 4], [5, 3], [40, 2]):
        call(ours, *packed(lengths, bound=BOUND))
    page = index(tmp_path)
    assert "piecewise (asked: piecewise)" in page
    assert "2 tokens = 8 rows" in page
    assert "8 tokens = 32 rows" in page
    assert "4 pieces (3 distinct) + 3 attention calls" in page
    for piece in (tmp_path / "graph_0" / "pieces").iterdir():
        assert piece.stem in page
    assert COUNTING_NAME in page
    for role in ("| rows |", "| boundaries |"):
        assert role in page
    assert "piecewise 8 rows: " in page
    assert "piecewise 16 rows: " in page
    assert "bytes" in page
    assert "too-large: 42 rows" in page
    assert "padded" in page
    assert "| captures | 2 |" in page
    assert "max_seqlen" in page or str(BOUND) in page


def test_pieces_that_share_code_are_listed_together(tmp_path: Path) -> None:
    """The middle layers stand in one line, and in the head of the piece's file."""
    ours = compiled(toy_tower(5), mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS, debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    heads = [path.read_text().splitlines()[0] for path in (tmp_path / "graph_0" / "pieces").iterdir()]
    assert sorted(head.count("submod_") for head in heads) == [1, 1, 4]
    shared = next(head for head in heads if head.count("submod_") == 4).split("used by ")[1]
    assert f"| {shared} |" in index(tmp_path)


def test_unsafe_padding_is_on_the_page(tmp_path: Path) -> None:
    """Padding that is off says why."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum(0)

    ours = compiled(model, token_budgets=BUDGETS, debug_dir=tmp_path)
    trace_dynamic(ours, torch.randn(5, 4))
    page = index(tmp_path)
    assert "padding: off" in page
    assert "padding-unsafe" in page


def test_plain_graphs_are_on_the_page(tmp_path: Path) -> None:
    """A graph that is not captured has its reason there."""
    ours = compiled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), token_budgets=BUDGETS, debug_dir=tmp_path)
    call(ours, torch.randn(5, 4))
    page = index(tmp_path)
    assert "plain" in page
    assert "rng" in page


def test_several_graphs_have_a_folder_each(tmp_path: Path) -> None:
    """A graph break, and a second trace, add folders; the page has a section for each."""
    ours = compiled(graph_break_tower(), token_budgets=BUDGETS, debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
    assert {"graph_0", "graph_1"} <= {path.name for path in tmp_path.iterdir()}
    assert all(f"## graph_{i}" in index(tmp_path) for i in (0, 1))


def test_unmatched_ops_are_on_the_page(tmp_path: Path) -> None:
    """A splitting op that matched nothing is a skip of the page."""
    _, ours = compiled_toy(splitting_ops=[COUNTING_NAME, "my::attention"], debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    assert "splitting-op-unmatched: 'my::attention'" in index(tmp_path)


def test_no_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `debug_dir` not a file appears in the working directory."""
    monkeypatch.chdir(tmp_path)
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    assert files(tmp_path) == []


def test_two_folders_do_not_mix(tmp_path: Path) -> None:
    """Each compiled model writes into its own."""
    for name in ("one", "two"):
        _, ours = compiled_toy(debug_dir=tmp_path / name)
        trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    assert len([f for f in files(tmp_path / "one") if f.endswith("traced.py")]) == 1
    assert len([f for f in files(tmp_path / "two") if f.endswith("traced.py")]) == 1


def test_nested_and_new_folders_are_made(tmp_path: Path) -> None:
    """The folder need not exist."""
    _, ours = compiled_toy(debug_dir=str(tmp_path / "a" / "b"))
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    assert (tmp_path / "a" / "b" / "index.md").exists()


def test_dumping_changes_no_numbers(tmp_path: Path) -> None:
    """With and without a folder the outputs are the same bits, from several threads too."""
    model, ours = compiled_toy(debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    failures: list[str] = []

    def work(seed: int) -> None:
        for lengths in ([5, 2], [9, 4], [20, 2], [40, 2]):
            args = packed(lengths, bound=BOUND, seed=seed)
            if not torch.equal(call(ours, *args), call(model, *args)):
                failures.append(str(lengths))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
