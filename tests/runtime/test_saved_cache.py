"""`save_cache` and `load_cache`: what travels, who takes it, and what is ignored with a reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vit_compile
from tests.runtime.toys import PackedTable, PackedTower
from vit_compile import _torch_compat as compat
from vit_compile.attention import choice
from vit_compile.attention.choice import Choice
from vit_compile.attention.problem import VARLEN, Problem
from vit_compile.runtime import graphs, known_costs
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.known_costs import Costs, fingerprint
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.replay_times import ReplayTime

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CONFIG = EncoderConfig(mode="eager", token_budgets=(8, 16), max_items_per_batch=2)
KEY = ("H200", Problem(VARLEN, "bfloat16", (64, 16, 72), 4, 64), 2)


class Squares(PackedTable):
    """Its example items are as long as they may be."""

    def example_key(self, tokens: int) -> tuple[int, int, int]:
        return (1, 2, 2 * tokens)


def captured(config: EncoderConfig = CONFIG) -> dict[int, float]:
    """Milliseconds of a replay by budget, of a new encoder."""
    with EncoderCudaGraphManager(PackedTable(PackedTower().eval()), config, device="cpu", dtype=torch.float32) as manager:
        return {graph["token_budget"]: graph["predicted_ms"] for graph in manager.snapshot()["graphs"]}


def saved(folder: Path) -> Path:
    """A cache with one kernel and the times of one encoder."""
    choice.learn({KEY: Choice("fa4", {"fa4": 3.5, "flash": 7.0}, {"fa3": "not installed"})})
    captured()
    path = folder / "start.cache"
    report = vit_compile.save_cache(path)
    assert report.used
    assert (report.kernels, report.encoders) == (1, 1)
    choice.forget()
    known_costs.forget()
    return path


def rewritten(path: Path, member: str, content: str) -> None:
    """The same file with another content of one member."""
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, old in kept.items():
            archive.writestr(name, content if name == member else old)


def nothing_was_loaded() -> bool:
    """Is this process as it was?"""
    return not choice.known() and not known_costs.measured()


def test_kernels_and_times_travel(tmp_path: Path) -> None:
    """What was chosen and measured comes back as it was."""
    path = saved(tmp_path)
    report = vit_compile.load_cache(path)
    assert report.used
    assert (report.kernels, report.encoders) == (1, 1)
    assert choice.known() == {KEY: Choice("fa4", {"fa4": 3.5, "flash": 7.0}, {"fa3": "not installed"})}
    assert "1 attention kernels" in str(report)


def test_loaded_times_are_taken_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder like the saved one measures nothing; one of another ladder measures what is missing."""
    path = saved(tmp_path)
    with zipfile.ZipFile(path) as archive:
        (written,) = json.loads(archive.read("costs.json")).values()
    vit_compile.load_cache(path)
    measured: list[Any] = []
    monkeypatch.setattr(graphs, "least_ms", lambda *args, **kwargs: (1.0, measured.append(args) or 123.0))
    known = {int(re.findall(r"(\d+) tokens", label)[0]): ms for label, (ms, _, _) in written["graphs"].items()}
    assert captured() == known
    assert not measured
    assert captured(replace(CONFIG, token_budgets=(8, 12, 16)))[12] == 123.0
    assert {replay.__self__.key.token_budget for replay, *_ in measured} == {12}
    measured.clear()
    captured(replace(CONFIG, max_items_per_batch=1))
    assert measured, "another room is another encoder"


def test_measured_times_stay_with_their_encoder() -> None:
    """Without a loaded cache a second encoder of the same kind measures for itself."""
    first, second = captured(), captured()
    assert set(first) == set(second)
    assert first != second


@pytest.mark.parametrize("key", ["format", "vit_compile", "torch", "cuda", "triton", "python", "machine", "device"])
def test_a_foreign_cache_is_ignored(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other software or another device: the reason names what differs, nothing is loaded, and the log says so."""
    path = saved(tmp_path)
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    rewritten(path, "manifest.json", json.dumps({**manifest, key: "elsewhere"}))
    report = vit_compile.load_cache(path)
    assert not report.used
    assert f"for {key} 'elsewhere'" in str(report.reason)
    assert nothing_was_loaded()
    assert "is not used" in caplog.text


@pytest.mark.parametrize("member", ["manifest.json", "attention.json", "costs.json"])
@pytest.mark.parametrize("content", ["{", "[]", "7", '{"a": 1}', '[{"a": 1}]', "null"])
def test_a_damaged_cache_is_ignored(tmp_path: Path, member: str, content: str) -> None:
    """Whatever a member holds instead: no exception, nothing half loaded."""
    path = saved(tmp_path)
    rewritten(path, member, content)
    report = vit_compile.load_cache(path)
    if report.used:  # an empty list of kernels is a list of kernels
        assert (member, content) == ("attention.json", "[]")
    else:
        assert report.reason
        assert nothing_was_loaded()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "1e300", '"5"', "true", "null", "[1]"])
def test_times_that_are_none(tmp_path: Path, value: str) -> None:
    """A plan made with them would send everything to eager: such a file is damaged."""
    path = saved(tmp_path)
    for time in ("[VALUE, 0.0, 32]", "[1.5, VALUE, 32]", "[1.5, 0.0, VALUE]", "[1.5, VALUE]", "VALUE"):
        rewritten(
            path,
            "costs.json",
            '{"abc": {"graphs": {"main 8 tokens": TIME}, "eager": {}}}'.replace("TIME", time.replace("VALUE", value)),
        )
        assert "damaged" in str(vit_compile.load_cache(path).reason)
    rewritten(path, "costs.json", '{"abc": {"graphs": {}, "eager": {"main": [0.1, 0.2, VALUE]}}}'.replace("VALUE", value))
    assert "damaged" in str(vit_compile.load_cache(path).reason)
    assert nothing_was_loaded()


def test_a_flipped_byte_anywhere(tmp_path: Path) -> None:
    """Never an exception."""
    path = saved(tmp_path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        report = vit_compile.load_cache(path)
        assert report.used or report.reason
        choice.forget()
        known_costs.forget()


def test_own_measurements_stay(tmp_path: Path) -> None:
    """A cache that is loaded late changes nothing of what this process measured, and will save."""
    path = saved(tmp_path)
    captured()
    (before,) = known_costs.measured().values()
    vit_compile.load_cache(path)
    (after,) = known_costs.measured().values()
    assert before == after


def test_the_file_is_as_readable_as_any(tmp_path: Path) -> None:
    """Its mode follows the umask."""
    plain = tmp_path / "plain"
    plain.write_text("")
    assert saved(tmp_path).stat().st_mode == plain.stat().st_mode


def test_files_that_are_no_caches(tmp_path: Path) -> None:
    """Missing, empty, cut off, or something else."""
    path = saved(tmp_path)
    whole = path.read_bytes()
    for content, reason in ((b"", "damaged"), (whole[: len(whole) // 2], "damaged"), (b"hello", "damaged")):
        path.write_bytes(content)
        assert reason in str(vit_compile.load_cache(path).reason)
    assert "no such file" in str(vit_compile.load_cache(tmp_path / "nothing").reason)
    assert "cannot be read" in str(vit_compile.load_cache(tmp_path).reason)
    assert nothing_was_loaded()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced at once or not at all, and no part of it stays behind."""
    path = saved(tmp_path)
    before = path.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="no space"):
        vit_compile.save_cache(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_fingerprints() -> None:
    """Equal for equal encoders; whatever changes a graph's time makes another one."""

    def made(width: int = 4, dtype: torch.dtype = torch.float32, room: tuple[int, int] = (2, 2), **config: Any) -> str:
        return fingerprint([nn.Linear(width, 4)], replace(CONFIG, **config), CPU, dtype, room)

    def headed(heads: int) -> str:
        layer = nn.MultiheadAttention(8, heads)
        return fingerprint([layer], CONFIG, CPU, torch.float32, (2, 2))

    assert headed(2) != headed(4), "no weight shows the number of heads"
    others = [
        made(width=8),
        made(dtype=torch.bfloat16),
        made(room=(2, 4)),
        made(attention="flash"),
        made(isolate=False),
        made(mode="compiled"),
        made(mode="compiled", compiler="aot_eager"),
    ]
    assert made() == made()
    assert len({made(), *others}) == len(others) + 1
    assert made(token_budgets=(8,), packing="greedy") == made(), "the ladder is in the graphs' own names"


def test_costs_are_written_and_read() -> None:
    """Costs survive JSON."""
    graphs = {"image 8 tokens": ReplayTime(1.5, 1 / 3, 32), "image 16 tokens": ReplayTime(2.0)}
    costs = Costs(graphs, {"image": (0.5, 0.001, 2.0, 1e-6)})
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


def test_times_by_layout_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process predicts what this one measured: a slope and the squares that belong to it come back in the graphs."""
    config = replace(CONFIG, token_budgets=(32,), max_items_per_batch=4, max_frames_per_batch=0)
    milliseconds = iter((3.0, 5.0))  # of many items, then of few
    monkeypatch.setattr(graphs, "least_ms", lambda *args, **kwargs: (0.0, next(milliseconds)))

    def times() -> list[ReplayTime | None]:
        table = Squares(PackedTower().eval(), segment_capacities=())
        with EncoderCudaGraphManager(table, config, device="cpu", dtype=torch.float32) as manager:
            return [graph.time for graph in manager._captured.set.graphs.values()]

    measured = times()
    assert measured == [ReplayTime(5.0, 2.0 / (2 * 16**2 - 4 * 8**2), 2 * 16**2)]
    vit_compile.save_cache(tmp_path / "start.cache")
    known_costs.forget()
    assert vit_compile.load_cache(tmp_path / "start.cache").used
    assert times() == measured, "and nothing was measured: there are no more milliseconds"


_PROCESS = """
import sys
import torch
from torch import nn
import vit_compile
from torch._dynamo.utils import counters
if sys.argv[1] == "load":
    report = vit_compile.load_cache(sys.argv[2])
    assert report.used and report.pieces == 1, report
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
function = torch.compile(model, backend="vit_cudagraph", options={"token_budgets": [8]})
with torch.no_grad():
    x = torch.randn(8, 8)
    torch.testing.assert_close(function(x), model(x))
if sys.argv[1] == "save":
    report = vit_compile.save_cache(sys.argv[2])
    assert report.pieces == 1, report
print("hits", counters["aot_autograd"]["autograd_cache_hit"], "misses", counters["aot_autograd"]["autograd_cache_miss"])
"""


def run_process(verb: str, path: Path, cache: Path) -> str:
    """A process of its own with a compiler cache of its own; what it printed."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, verb, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_the_bytes_of_pieces_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece comes back once, byte for byte; one that torch cannot read is not counted."""
    monkeypatch.setattr(compat, "compiled_artifacts", lambda: [b"one", b"two", b"one"])
    path = tmp_path / "start.cache"
    assert vit_compile.save_cache(path).pieces == 2
    taken: list[bytes] = []
    monkeypatch.setattr(compat, "load_artifacts", lambda piece: taken.append(piece) or piece == b"one")
    assert vit_compile.load_cache(path).pieces == 1
    assert sorted(taken) == [b"one", b"two"]


@pytest.mark.slow
def test_compiled_pieces_travel(tmp_path: Path) -> None:
    """Another process with an empty compiler cache compiles nothing that was saved."""
    path = tmp_path / "start.cache"
    assert run_process("save", path, tmp_path / "first") == "hits 0 misses 1"
    assert run_process("load", path, tmp_path / "second") == "hits 1 misses 0"
