"""`vit-compile bench` on tiny towers: every peer computes eager's features, and the command writes what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

pytest.importorskip("matplotlib", reason="the report is drawn with it")

from vit_compile.planning.traffic import Picture, write_jsonl
from vit_compile.runtime.table_items import MetadataCache
from vit_compile.tools.bench import peers, peers_graphs
from vit_compile.tools.bench.checking import difference
from vit_compile.tools.bench.ladders import Ladder
from vit_compile.tools.bench.peer import PeerSpec, Setup
from vit_compile.tools.bench.peers_eager import EagerPacked, make_eager
from vit_compile.tools.bench.results import read_json
from vit_compile.tools.bench.towers import load_tower
from vit_compile.tools.bench.workload import Pixels
from vit_compile.tools.cli import app

MIXED = (Picture(56, 84), Picture(28, 28), Picture(56, 84))
WITH_CLIP = (Picture(56, 56, frames=4), Picture(56, 84))


def setup_for(key: str, requests: tuple[tuple[Picture, ...], ...], *, is_single: bool) -> tuple[Setup, Pixels]:
    """A tiny tower with one budget."""
    tower = load_tower(key, small=True, weights=None, model=None, device=torch.device("cpu"), dtype=torch.float32)
    pixels = Pixels(tower, requests)
    ladder = Ladder((64,), 4, 8 if tower.kind == "packed" else 0)
    warmup = [pixels.inputs(request, 0) for request in requests]
    made = Setup(tower=tower, ladder=ladder, powers=ladder, capacities=(), compiler="eager", is_single=is_single, warmup=warmup)
    return made, pixels


EVERY_PEER = ("eager-hoisted", "compile", "capture-of-eager", "vit-full", "vit-backend-full")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, key) for key in ("qwen2.5-vl-7b", "dinov2-s") for name in EVERY_PEER),
        ("vit-backend-piecewise", "dinov2-s"),
        ("capture-of-eager", "siglip-so400m"),  # its positions have to be asked for
    ],
)
def test_features_are_eagers(name: str, key: str) -> None:
    """Each peer gives eager's features for images of several sizes, in their order, and leaves the tower as it was."""
    requests = (MIXED,) if "backend" in name or key != "qwen2.5-vl-7b" else (MIXED, WITH_CLIP)
    setup, pixels = setup_for(key, requests, is_single="backend" in name)
    spec = peers.PEERS[name]
    reason = spec.refuses(setup)
    if name == "eager-hoisted" and key != "qwen2.5-vl-7b":
        assert reason is not None
        return
    assert reason is None
    eager = make_eager(setup)
    with torch.no_grad():
        want = {at: features(eager, pixels.inputs(request, at)) for at, request in enumerate(requests)}
        peer = spec.make(setup)
        for at, request in enumerate(requests):
            assert difference(features(peer, pixels.inputs(request, at)), want[at]) < 1e-5
        peer.close()
        assert difference(features(eager, pixels.inputs(requests[0], 0)), want[0]) == 0


def features(peer: Any, inputs: Any) -> list[torch.Tensor]:
    """Of one call."""
    found: list[torch.Tensor] = [item.clone() for item in peer.features(peer.call(peer.prepare(inputs)), inputs)]
    assert [len(item) for item in found] == list(inputs.tokens)
    return found


@pytest.mark.parametrize("name", ["capture-of-eager", "vit-full"])
def test_repeated_requests_compute_no_metadata(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/bench.md has it: the manager keeps metadata by grid and layout, so only new sizes pay for it."""
    made: list[Any] = []

    def counting(self: MetadataCache, key: Any, path: str) -> Any:
        made.append(key)
        return compute(self, key, path)

    compute = MetadataCache._made
    monkeypatch.setattr(MetadataCache, "_made", counting)
    setup, pixels = setup_for("qwen3-vl-8b", (MIXED,), is_single=True)
    new = (Picture(96, 96),)
    with torch.no_grad():
        peer = peers.PEERS[name].make(setup)
        peer.call(peer.prepare(pixels.inputs(MIXED, 0)))
        assert made
        made.clear()
        peer.call(peer.prepare(pixels.inputs(MIXED, 1)))
        assert made == []
        peer.call(peer.prepare(pixels.inputs(new, 0)))
        assert made
        peer.close()


def test_the_documented_method_has_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the peer for it take FlashAttention as it is; those of ours what is fastest."""
    asked: list[Any] = []
    monkeypatch.setattr(peers_graphs, "_managed", lambda setup, ladder, capacities, **options: asked.append(options))
    for make in (peers_graphs.make_capture_of_eager, peers_graphs.make_full):
        make(mock.Mock())
    assert asked[0]["attention"] == "default"
    assert "attention" not in asked[1]


def test_peers_that_cannot_run_say_why() -> None:
    """Recordings need a GPU, the backend's peers repeated requests."""
    setup, _ = setup_for("dinov2-s", (MIXED,), is_single=False)
    refusals = {name: spec.refuses(setup) for name, spec in peers.PEERS.items()}
    assert {name for name, reason in refusals.items() if reason} == {
        "eager-hoisted", "reduce-overhead", "vit-backend-full", "vit-backend-piecewise",
    }  # fmt: skip
    assert "GPU" in str(refusals["reduce-overhead"])


def bench(*arguments: str) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(app, ["bench", *arguments])


QUICK = ("--device", "cpu", "--compiler", "eager", "--seconds", "2", "--cache", "shared")


def test_command_from_end_to_end(tmp_path: Path) -> None:
    """Three requests of chat: table, JSON, PNG and HTML, each honest about the CPU; every peer has a row."""
    named = "eager,eager-hoisted,reduce-overhead,capture-of-eager,vit-full"  # without torch.compile's own peer: it takes long
    done = bench(
        "--tower", "qwen3-vl-8b", "--small", "--requests", "3", "--max-graphs", "2", "--capacities", "none", "--peers", named,
        *QUICK, "--out-dir", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "say nothing about a GPU" in done.stdout
    assert "reduce-overhead: unavailable" in done.stdout
    base = tmp_path / "qwen3-vl-8b-small-chat"
    result = read_json(base.with_suffix(".json"))
    assert [row.peer for row in result.rows] == named.split(",")
    measured = {row.peer: row for row in result.rows if row.status == "ok"}
    assert set(measured) == {"eager", "eager-hoisted", "capture-of-eager", "vit-full"}
    for row in measured.values():
        assert (row.requests, len(row.latencies_ms), row.checked_requests) == (3, 3, 3)
        assert row.within_tolerance
        assert row.mean_ms is not None
        assert row.mean_ms > 0
        assert row.host_share is not None
        assert 0 < row.host_share <= 1
    ours = measured["vit-full"]
    assert (ours.hits, ours.misses, ours.graphs) == (ours.images, {}, 2)
    assert ours.phase_seconds is not None
    assert ours.phase_seconds["first runs"] > 0
    assert ours.kernels == {}, "nothing is chosen on a CPU"
    assert measured["eager"].phase_seconds is None
    assert result.environment["device_type"] == "cpu"
    assert base.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "measured_at" in result.environment
    page = base.with_suffix(".html").read_text()
    assert "<th>back to back, repeated ms</th><th>images/s, repeated</th><th>tokens/s, repeated</th>" in page
    assert "data:image/png;base64," in page
    assert "say nothing about a GPU" in page
    assert 'src="http' not in page


@pytest.mark.slow
def test_trace_is_replayed(tmp_path: Path) -> None:
    """A trace file names the case; images of all its requests are counted."""
    write_jsonl(tmp_path / "mine.jsonl", [MIXED, MIXED[:1]])
    done = bench(
        "--tower", "dinov2-s", "--small", "--trace", str(tmp_path / "mine.jsonl"), "--peers", "eager,capture-of-eager",
        *QUICK, "--out-dir", str(tmp_path), "--name", "traced",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = read_json(tmp_path / "traced.json")
    assert [(row.peer, row.case, row.requests, row.images) for row in result.rows] == [
        ("eager", "mine", 2, 4),
        ("capture-of-eager", "mine", 2, 4),
    ]


@pytest.mark.slow
def test_single_cases_and_targets(tmp_path: Path) -> None:
    """A row for each case; host time beyond the launch is measured; --targets reads the file and says what is missing."""
    done = bench(
        "--tower", "dinov2-s", "--small", "--traffic", "single:1x56,3x84", "--requests", "3", "--peers",
        "capture-of-eager,vit-backend-full", *QUICK, "--out-dir", str(tmp_path), "--name", "single",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = read_json(tmp_path / "single.json").rows
    assert [(row.peer, row.case) for row in rows] == [
        ("capture-of-eager", "1 x 56"),
        ("capture-of-eager", "3 x 84"),
        ("vit-backend-full", "1 x 56"),
        ("vit-backend-full", "3 x 84"),
    ]
    assert rows[2].reason.startswith("exact: full")
    assert rows[0].host_beyond_launch_ms is not None
    assert rows[0].wall_beyond_replay_ms is not None
    assert rows[2].wall_beyond_replay_ms is None
    targets = bench("--targets", str(tmp_path / "single.json"))
    assert targets.exit_code == 0, targets.output
    assert "not in these files" in targets.stdout
    assert "CPU numbers" in targets.stdout


@pytest.mark.slow
def test_model_folder(tmp_path: Path, dinov2_dir: Path) -> None:
    """--model takes a folder, here of a dense tower."""
    done = bench(
        "--model", str(dinov2_dir), "--traffic", "single:2x56", "--requests", "3", "--peers", "eager,capture-of-eager",
        *QUICK, "--out-dir", str(tmp_path), "--name", "m",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert all(row.within_tolerance for row in read_json(tmp_path / "m.json").rows)


class Wrong(EagerPacked):
    """Eager, but for one value of the first item."""

    def features(self, output: Any, inputs: Any) -> list[torch.Tensor]:
        found = [item.clone() for item in super().features(output, inputs)]
        found[0][0] += 1
        return found


def broken(setup: Setup) -> Wrong:
    """Cannot be set up."""
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(("make", "ours"), [(lambda setup: Wrong(setup.tower), True), (broken, True), (broken, False)])
def test_wrong_numbers_fail_the_run(
    make: Callable[[Setup], Any], ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of this package with other features, or that breaks, is exit code 1, in words; another's is only shown."""
    spec = PeerSpec(name="wrong", summary="", make=make, ours=ours)
    monkeypatch.setitem(peers.PEERS, "wrong", spec)
    done = bench("--tower", "qwen3-vl-8b", "--small", "--requests", "3", "--peers", "wrong", *QUICK, "--out-dir", str(tmp_path))
    assert done.exit_code == (1 if ours else 0), done.output
    assert ("FAILED: wrong, chat" in done.stdout) == ours
    content = json.loads((tmp_path / "qwen3-vl-8b-small-chat.json").read_text())
    assert bool(content["failures"]) == ours


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--peers", "egaer"), "eager"),
        (("--tower", "qwen"), "Known are"),
        (("--traffic", "rush"), "rush"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--budgets", "a"), "--budgets"),
        (("--budgets", ","), "--budgets"),
        (("--capacities", ""), "--capacities"),
        (("--dtype", "int8"), "dtype"),
        (("--targets",), "result file"),
        (("file.json",), "--targets"),
        (("--targets", "nowhere.json"), "nowhere.json"),
        (("--model", "nowhere"), "nowhere"),
        (("--peers", ""), "--peers"),
        (("--peers", ","), "--peers"),
        (("--trace", "t.jsonl", "--traffic", "chat"), "--traffic chat would do nothing with --trace"),
        (("--model", "nowhere", "--tower", "dinov2-s"), "--tower dinov2-s would do nothing with --model"),
        (("--targets", "nowhere.json", "--seed", "2"), "--seed would do nothing with --targets"),
        (("--targets", "nowhere.json", "--out-dir", "x"), "--out-dir would do nothing with --targets"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    """Exit code 2, one line on stderr that names what was wrong, and nothing is written."""
    quick = () if "--targets" in arguments or "file.json" in arguments else (*QUICK, "--out-dir", str(tmp_path / "out"))
    done = bench(*arguments, *quick)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert text in line
    assert not (tmp_path / "out").exists()


def refuse(setup: Setup) -> Any:
    """Must not be reached."""
    pytest.fail("a peer was set up")


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/x", "taken"])
def test_places_that_cannot_be_written_are_found_first(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and exit code 2 before a peer runs: a file, /proc, a folder where a file should go."""
    monkeypatch.setitem(peers.PEERS, "eager", PeerSpec(name="eager", summary="", make=refuse))
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "qwen3-vl-8b-small-single-1x56.html").mkdir(parents=True)
    done = bench(
        "--tower", "qwen3-vl-8b", "--small", "--traffic", "single:1x56", "--peers", "eager", *QUICK,
        "--out-dir", str(tmp_path / where),
    )  # fmt: skip
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert "cannot write" in line
    assert not list(tmp_path.rglob("*.json"))


def test_half_precision_knows_the_float32_reference() -> None:
    """In bfloat16 eager's own distance from float32 is told, and no reference has NaN."""
    from vit_compile.tools.bench.cases import Case, Traffic
    from vit_compile.tools.bench.checking import references

    setup, _ = setup_for("qwen3-vl-8b", (MIXED,), is_single=False)
    half = load_tower("qwen3-vl-8b", small=True, weights=None, model=None, device=torch.device("cpu"), dtype=torch.bfloat16)
    pixels = Pixels(half, [MIXED])
    traffic = Traffic("t", (Case("t", (MIXED, MIXED)),), False, (MIXED,), (MIXED,), "")
    with torch.no_grad():
        found = references(replace(setup, tower=half), traffic, pixels, 2)
    assert list(found) == [("t", 0), ("t", 1)]
    one = found["t", 0]
    assert one.fp32 is not None
    assert 0 < difference(one.eager, one.fp32) < 0.05
    assert next(half.module.parameters()).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_share_a_request(tmp_path: Path) -> None:
    """torchrun with two processes: the same features as eager, each rank its share, one set of files."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vit_compile.tools.cli",
        "bench", "--tower", "dinov2-s", "--small", "--traffic", "single:5x56", "--requests", "3",
        "--peers", "eager,capture-of-eager,vit-full,compile", *QUICK, "--out-dir", str(tmp_path), "--name", "group",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        written, told = running.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # the ranks too, which would wait for each other
        raise
    assert running.returncode == 0, told[-2000:]
    result = read_json(tmp_path / "group.json")
    assert result.environment["ranks"] == 2
    rows = {row.peer: row for row in result.rows}
    assert rows["vit-full"].within_tolerance
    assert (rows["vit-full"].images, rows["vit-full"].hits, rows["vit-full"].budgets) == (15, 9, (34, 51))
    assert rows["compile"].status == "unavailable"
    assert written.count("group.json") == 1
