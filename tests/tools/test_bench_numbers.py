"""The benchmark's arithmetic: FLOPs, percentiles, ladders, traffic, targets, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vit_compile.errors import OptionError, TraceError
from vit_compile.planning.traffic import Geometry, Picture, write_jsonl
from vit_compile.tools.bench import ladders
from vit_compile.tools.bench.cases import traffic_for
from vit_compile.tools.bench.checking import difference
from vit_compile.tools.bench.flops import formula_for
from vit_compile.tools.bench.peers_eager import dense_arguments
from vit_compile.tools.bench.results import Latencies, Result, Row, read_json, write_json
from vit_compile.tools.bench.settings import BenchSettings
from vit_compile.tools.bench.targets import NOT_THERE, TARGETS, Reached, Rows, Source, Target, print_targets
from vit_compile.tools.bench.towers import TOWERS, Tower, load_tower
from vit_compile.tools.bench.workload import Pixels, item_grids

GEOMETRY = Geometry(patch_size=16, merge_size=2, max_tokens=64)


def tiny(key: str) -> Tower:
    """A small tower on the CPU."""
    return load_tower(key, small=True, weights=None, model=None, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("key", TOWERS)
def test_flops_are_those_that_torch_counts(key: str) -> None:
    """The formula gives exactly what FlopCounterMode counts in an eager forward of one image whose windows are cut off."""
    tower = tiny(key)
    if tower.kind == "packed":
        grid = (1, 10, 12)
        rows = torch.randn(120, tower.row_width)
        arguments: dict[str, Any] = {"hidden_states": rows, "grid_thw": torch.tensor([grid])}
    else:
        grid, side = (1, 4, 6), tower.geometry.patch_size
        arguments = {"pixel_values": torch.randn(1, 3, 4 * side, 6 * side), **dense_arguments(tower)}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tower.module(**arguments)
    assert formula_for(tower)([grid]) == counter.get_total_flops()


def test_flops_of_clips_and_requests_add_up() -> None:
    """A clip is its frames, a request its items."""
    formula = formula_for(tiny("qwen2.5-vl-7b"))
    one = formula([(1, 8, 12)])
    assert formula([(3, 8, 12)]) == 3 * one
    assert formula([(1, 8, 12), (1, 8, 12)]) == 2 * one


def test_percentiles_are_numpys() -> None:
    """Mean, median and P99 of any list."""
    times = list(np.random.default_rng(0).lognormal(size=137))
    found = Latencies.of(times)
    assert (found.mean_ms, found.p50_ms, found.p99_ms) == pytest.approx(
        (np.mean(times), np.median(times), np.percentile(times, 99))
    )
    assert Latencies.of([3.0]) == Latencies(mean_ms=3.0, p50_ms=3.0, p99_ms=3.0)


def test_difference_sees_shapes_and_nan() -> None:
    """The worst item counts; another shape or number of items is infinite, and NaN is never small."""
    want = [torch.ones(2, 3), torch.ones(1, 3)]
    assert difference(want, want) == 0
    assert difference([want[0], want[1] * 1.5], want) == pytest.approx(0.5)
    assert difference(want[:1], want) == float("inf")
    assert difference([want[0], torch.ones(2, 3)], want) == float("inf")
    assert np.isnan(difference([want[0] * float("nan"), want[1] * 2], want))


def test_ladder_is_fitted_to_other_requests() -> None:
    """Measured, fitting and warm-up requests have seeds of their own; budgets are at most as many as asked for."""
    traffic = traffic_for(BenchSettings(requests=30, seed=5), GEOMETRY)
    (case,) = traffic.cases
    assert len(case.requests) == 30
    assert not set(case.requests) & set(traffic.warmup) or case.requests != traffic.fitting[:30]
    assert case.requests != traffic.fitting[:30]
    made = ladders.fitted(traffic, tokens, no_clips, max_graphs=4, max_tokens=None, small=True)
    assert len(made.budgets) <= 4
    assert all(budget % ladders.STEP == 0 for budget in made.budgets)
    assert made.budgets[-1] == ladders.SMALL_MAXIMUM
    powers = ladders.powers_of_two(traffic, tokens, no_clips, max_tokens=None, small=True)
    assert powers.budgets == (16, 32, 64, 128, 256)


def tokens(request: tuple[Picture, ...]) -> list[int]:
    """Of each picture."""
    return [GEOMETRY.tokens(picture) for picture in request]


def no_clips(request: tuple[Picture, ...]) -> list[tuple[int, int, int]]:
    """None."""
    return []


def test_single_cases_have_exact_budgets() -> None:
    """One budget for each case, and room for all images of a request."""
    traffic = traffic_for(BenchSettings(traffic="single:1x224,20x96", requests=3), GEOMETRY)
    assert [case.label for case in traffic.cases] == ["1 x 224", "20 x 96"]
    made = ladders.fitted(traffic, tokens, no_clips, max_graphs=12, max_tokens=None, small=True)
    assert (made.budgets, made.max_items) == ((49, 180), 20)


def test_labels_name_the_size_that_is_measured() -> None:
    """Rounding to whole tokens is not worth a word; a limit of the tower, from either side, is."""
    traffic = traffic_for(BenchSettings(traffic="single:2x336,1x448,1x1024,1x5", requests=1), GEOMETRY)
    assert [case.label for case in traffic.cases] == [
        "2 x 336 (as 256 x 256)", "1 x 448 (as 256 x 256)", "1 x 1024 (as 256 x 256)", "1 x 5 (as 32 x 32)",
    ]  # fmt: skip
    full = traffic_for(BenchSettings(traffic="single:20x336,1x1024", requests=1), Geometry(patch_size=16, merge_size=2))
    assert [case.label for case in full.cases] == ["20 x 336", "1 x 1024"]
    assert [full.cases[0].requests[0][0], GEOMETRY.block] == [Picture(336, 336), 32]


def test_ladders_of_ranks_are_for_their_shares() -> None:
    """Two ranks share 5 images as 3 and 2, and nothing is left out."""
    request = (Picture(64, 64),) * 5
    assert [len(part) for part in ladders.shared([request], tokens, 2)] == [3, 2]
    assert ladders.shared([request[:1]], tokens, 2) == (request[:1],)
    assert ladders.shared([request], tokens, 1) == (request,)


@pytest.mark.parametrize("name", ["rush-hour", "single:8", "single:0x224", "single:"])
def test_unknown_traffic_is_an_error(name: str) -> None:
    """The text names what was given."""
    with pytest.raises(OptionError, match=r"rush-hour|case"):
        traffic_for(BenchSettings(traffic=name), GEOMETRY)


def test_trace_is_halved(tmp_path: Path) -> None:
    """Every second request of a long trace is measured, the others make the ladder; a short one does both."""
    requests = [(Picture(32 * side, 64),) for side in range(1, 21)]
    write_jsonl(tmp_path / "long.jsonl", requests)
    traffic = traffic_for(BenchSettings(trace=tmp_path / "long.jsonl", requests=7), GEOMETRY)
    assert traffic.cases[0].requests == tuple(requests[:14:2])
    assert traffic.fitting == tuple(requests[1::2])
    write_jsonl(tmp_path / "short.jsonl", requests[:3])
    short = traffic_for(BenchSettings(trace=tmp_path / "short.jsonl"), GEOMETRY)
    assert short.cases[0].requests == short.fitting == tuple(requests[:3])
    assert short.fitted_to == "the same requests"
    with pytest.raises(TraceError):
        traffic_for(BenchSettings(trace=tmp_path / "none.jsonl"), GEOMETRY)


def test_inputs_of_a_request(tmp_path: Path) -> None:
    """Images come before clips, each tensor begins its storage, and other numbers have other pixels."""
    tower = tiny("qwen3-vl-8b")
    request = (Picture(64, 64, frames=4), Picture(32, 96))
    pixels = Pixels(tower, [request])
    inputs = pixels.inputs(request, 1)
    assert inputs.grids == ((1, 2, 6), (2, 4, 4))
    assert (inputs.clips, inputs.tokens) == (1, (3, 8))
    assert inputs.image_rows is not None
    assert inputs.clip_rows is not None
    assert (inputs.image_rows.shape, inputs.clip_rows.shape) == ((12, tower.row_width), (32, tower.row_width))
    assert inputs.image_rows.storage_offset() == inputs.clip_rows.storage_offset() == 0
    assert pixels.nbytes(request) == inputs.rows.nbytes
    assert not torch.equal(pixels.inputs(request, 2).rows, inputs.rows)
    assert torch.equal(pixels.inputs(request, 1).rows, inputs.rows)


def test_dense_inputs_are_batched_by_size() -> None:
    """One batch per size; `images` has them in the order of the request, frames of a clip as images."""
    tower = tiny("dinov2-s")
    request = (Picture(28, 28), Picture(28, 42), Picture(28, 28), Picture(28, 42, frames=2))
    inputs = Pixels(tower, [request]).inputs(request, 0)
    assert inputs.grids == item_grids(request, tower)[0]
    assert [batch.positions for batch in inputs.batches] == [(0, 2), (1, 3, 4)]
    assert [tuple(image.shape) for image in inputs.images] == [(3, 28, w) for w in (28, 42, 28, 42, 42)]
    assert torch.equal(inputs.images[2], inputs.batches[0].pixels[1])
    first, second = (batch.pixels.flatten() for batch in inputs.batches)
    assert not torch.equal(first, second[: len(first)])  # no batch begins where another does
    assert inputs.tokens == (5, 7, 5, 7, 7)


def row(peer: str, case: str, times: tuple[float, ...], **more: Any) -> Row:
    """A measured row."""
    latencies = Latencies.of(times)
    return Row(
        peer=peer,
        case=case,
        ours=peer.startswith("vit"),
        requests=len(times),
        requests_wanted=len(times),
        mean_ms=latencies.mean_ms,
        p50_ms=latencies.p50_ms,
        p99_ms=latencies.p99_ms,
        latencies_ms=times,
        **more,
    )


def result(*rows: Row, is_single: bool = False) -> Result:
    """A hand-made result."""
    return Result(
        command="vit-compile bench",
        environment={"device": "NVIDIA H200", "device_type": "cuda", "ranks": 1},
        tower={"name": "Qwen3-VL-8B vision", "key": "qwen3-vl-8b", "small": False, "dtype": "bfloat16"},
        traffic={"name": "chat", "is_single": is_single, "requests": 2, "images": 2, "tokens": 100},
        settings={"traffic": "single:" if is_single else "chat", "trace": None},
        tolerance=0.05,
        rows=rows,
    )


def test_json_round_trip(tmp_path: Path) -> None:
    """What is read is what was written, infinity and NaN included; the file is plain JSON with its schema."""
    made = result(
        row("vit-full", "chat", (1.5, 2.5), budgets=(16, 64), misses={"too-large": 1}, difference=float("inf")),
        Row(peer="compile", case="chat", ours=False, status="unavailable", reason="no"),
    )
    write_json(made, tmp_path / "new" / "a.json")
    assert read_json(tmp_path / "new" / "a.json").as_dict() == made.as_dict()
    assert read_json(tmp_path / "new" / "a.json").rows == list(made.rows)
    content = json.loads((tmp_path / "new" / "a.json").read_text())
    assert (content["kind"], content["schema"], content["note"]) == ("vit-compile bench", 1, "")
    (tmp_path / "b.json").write_text(json.dumps(content | {"schema": 0}))
    with pytest.raises(OptionError, match="schema 0"):
        read_json(tmp_path / "b.json")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(OptionError, match="no result"):
        read_json(tmp_path / "b.json")


def test_failures_are_those_of_this_package() -> None:
    """A peer of ours that broke or differs fails the run; another's is only shown."""
    bad = replace(row("compile", "chat", (1.0,)), within_tolerance=False, difference=1.0)
    assert result(bad).failures == []
    assert len(result(replace(bad, ours=True)).failures) == 1
    assert len(result(replace(bad, ours=True, within_tolerance=None, status="failed")).failures) == 1


def reached(found: list[Result]) -> dict[str, tuple[Reached | None, str]]:
    """Every target by its words."""
    rows = Rows([Source(f"{at}.json", one, at) for at, one in enumerate(found)])
    return {target.what: (value := target.find(rows), target.verdict(value)) for target in TARGETS}


def test_targets_from_rows() -> None:
    """Each target reads its rows; requests that only one of two peers served do not count; graphs above 12 miss."""
    ours: dict[str, Any] = {
        "graphs": 10,
        "budgets": tuple(range(1, 11)),
        "padded_share": 0.08,
        "setup_s": 20.0,
        "startup_s": 21.0,
        "graph_bytes": 120,
        "largest_graph_bytes": 100,
    }
    chat = result(
        row("vit-full", "chat", (1.0, 1.0, 90.0), **ours),
        row("compile", "chat", (1.5, 1.5), startup_s=50.0),
        row("eager", "chat", (6.0, 8.0, 0.0)),
        row("capture-of-eager", "chat", (3.0, 3.0)),
        row("reduce-overhead", "chat", (1000.0, 500.0), startup_s=100.0),
    )
    single = result(
        row("vit-full", "1 x 224", (2.0,), host_beyond_launch_ms=0.2, wall_beyond_replay_ms=0.1),
        row("eager", "1 x 224", (30.0,)),
        row("reduce-overhead", "1 x 224", (3.0,)),
        row("vit-full", "1 x 1024", (10.0,), roofline_ratio=1.4),
        row("reduce-overhead", "1 x 1024", (20.0,)),
        is_single=True,
    )
    found = reached([chat, single])
    expected = {
        "eager / vit-full, 1 x 224": (15.0, "reached"),
        "time / roofline, 1 x 1024": (1.4, "reached"),
        "host time beyond the launch, 1 x 224": (0.2, "missed"),
        "reduce-overhead / vit-full, repeated requests": (1.5, "missed"),
        "reduce-overhead / vit-full, total with start-up, chat": (101.5 / 21.002, "missed"),
        "padded share of chat, at most 12 graphs": (8.0, "reached"),
        "compile / vit-full, mean of chat": (1.5, "missed"),
        "capture-of-eager / vit-full, mean of chat": (3.0, "reached"),
        "best P99 of the others / vit-full, chat": (0.0, "missed"),
        "set-up with 9 budgets, empty cache": (20.0, "reached"),
        "bytes of all graphs / of the largest": (1.2, "reached"),
    }
    for what, (value, verdict) in expected.items():
        got, said = found[what]
        assert got is not None, what
        if not what.startswith("best P99"):
            assert got.value == pytest.approx(value), what
        assert said == verdict, what
    assert found["set-up with 9 budgets, warm cache"] == (None, NOT_THERE)
    assert found["host time beyond the launch, 20 x 336"] == (None, NOT_THERE)
    more = reached([result(row("vit-full", "chat", (1.0,), **{**ours, "graphs": 13}))])
    assert more["padded share of chat, at most 12 graphs"][1] == "missed"


def test_limits_are_inclusive() -> None:
    """A target that is met exactly is reached, from either side."""
    target = Target(1, "", 2.0, True, lambda rows: None)
    assert target.verdict(Reached(2.0)) == "reached"
    assert replace(target, at_least=False).verdict(Reached(2.0)) == "reached"
    assert replace(target, at_least=False).verdict(Reached(2.1)) == "missed"


RATIO = "eager / vit-full, mean of chat"


def test_a_trace_is_no_preset() -> None:
    """A trace whose file is called chat.jsonl, or like a repeated request, has rows of that name, and no target takes them."""
    rows = (row("vit-full", "chat", (1.0,), graphs=3, padded_share=0.01), row("eager", "chat", (9.0,)))
    assert reached([result(*rows)])[RATIO][1] == "reached"
    for settings in ({"traffic": "chat", "trace": "chat.jsonl"}, {"traffic": "documents", "trace": None}, {}):
        found = reached([replace(result(*rows), settings=settings)])
        assert {verdict for _, verdict in found.values()} == {NOT_THERE}
    named = (row("vit-full", "1 x 224", (1.0,)), row("eager", "1 x 224", (90.0,)))
    assert reached([result(*named, is_single=True)])["eager / vit-full, 1 x 224"][1] == "reached"
    assert reached([result(*named)])["eager / vit-full, 1 x 224"][1] == NOT_THERE
    shrunk = [replace(one, case="1 x 1024 (as 256 x 256)") for one in named]
    assert reached([result(*shrunk, is_single=True)])["eager / vit-full, 1 x 1024"][1] == NOT_THERE


def test_the_newest_file_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the arguments, and the table names it; of set-up times the longest counts."""
    monkeypatch.setenv("COLUMNS", "250")
    budgets = tuple(range(1, 10))
    old, new = (
        Source(
            name, result(row("vit-full", "chat", (1.0,), budgets=budgets, setup_s=setup), row("eager", "chat", (eager,))), when
        )
        for name, eager, setup, when in (("old[1].json", 9.0, 29.0, 1.0), ("new.json", 4.0, 28.0, 2.0))
    )
    for sources in ([old, new], [new, old]):
        print_targets(sources)
        lines = capsys.readouterr().out.splitlines()
        (ratio,) = [line for line in lines if f"\u2502 {RATIO}" in line]
        assert "4.00 x" in ratio
        assert "new.json, newest of 2" in ratio
        assert "missed" in ratio
        (setup,) = [line for line in lines if "empty cache" in line]
        assert "29.00 s" in setup
        assert "old[1].json, worst of 2" in setup
    print_targets([old])
    assert "of 2" not in capsys.readouterr().out


def test_only_full_towers_on_a_gpu_are_judged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their numbers shown, and why they are no verdict."""
    monkeypatch.setenv("COLUMNS", "250")
    full = result(row("vit-full", "chat", (1.0,)), row("eager", "chat", (9.0,)))
    cpu = {**full.environment, "device_type": "cpu", "device": "CPU"}
    tiny = {**full.tower, "small": True}
    for made, verdict in (
        (full, "reached"),
        (replace(full, environment=cpu), "CPU numbers"),
        (replace(full, tower=tiny), "tiny tower"),
        (replace(full, tower=tiny, environment=cpu), "tiny tower, CPU numbers"),
    ):
        print_targets([Source("a.json", made, 0.0)])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if f"\u2502 {RATIO}" in line]
        assert "9.00 x" in line
        assert line.rstrip(" \u2502").endswith(verdict)


def with_row(**fields: Any) -> dict[str, Any]:
    """The change that gives the file's only row other fields."""
    content = result(row("vit-full", "chat", (1.0,))).as_dict()
    return {"rows": [{**content["rows"][0], **fields}]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tower": {}}, "tower has no name"),
        ({"tower": [1]}, "tower: expected an object"),
        ({"environment": {"device": 5}}, "device of environment: expected text"),
        ({"traffic": {"name": "chat", "is_single": "no"}}, "is_single of traffic: expected true or false"),
        ({"settings": None}, "settings: expected an object"),
        ({"rows": 5}, "rows: expected a list"),
        ({"rows": [5]}, "a row: expected an object"),
        (with_row(latencies_ms=[]), "latencies_ms must have milliseconds above 0"),
        (with_row(latencies_ms=[1.0, 0.0]), "latencies_ms must have milliseconds above 0"),
        (with_row(latencies_ms=["1"]), "latencies_ms: expected a list of numbers"),
        (with_row(p50_ms="hello"), "p50_ms: expected a number, found 'hello'"),
        (with_row(mean_ms=None), "mean_ms must have milliseconds"),
        (with_row(graph_bytes=10**30), "graph_bytes: expected a whole number"),
        (with_row(budgets=["a"]), "budgets: expected a list of whole numbers"),
        (with_row(phase_seconds={"trials": "1"}), "phase_seconds: expected an object of numbers"),
        (with_row(kernels={"64 x 2 x 8, 1 segments": 1}), "kernels: expected an object of texts"),
        (with_row(peer=None), "peer: expected text"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """One line that names the file and what is wrong with it."""
    content = result(row("vit-full", "chat", (1.0,))).as_dict()
    (tmp_path / "a.json").write_text(json.dumps(content | change))
    with pytest.raises(OptionError) as raised:
        Source.read(tmp_path / "a.json")
    assert complaint in str(raised.value)
    assert "a.json" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "null", "\x00", '{"kind": "vit-compile bench", "schema": 1}'])
def test_files_that_are_no_results_are_refused(text: str, tmp_path: Path) -> None:
    """Deeply nested, empty, or something else."""
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(OptionError, match="is no result of vit-compile bench"):
        Source.read(tmp_path / "a.json")


def test_a_trace_may_be_called_nan(tmp_path: Path) -> None:
    """Only numbers are read from the words for infinity and NaN. The date in a file counts, else the file's own."""
    made = result(row("eager", "nan", (1.0,), difference=float("inf")))
    write_json(made, tmp_path / "a.json")
    source = Source.read(tmp_path / "a.json")
    assert source.result.rows == list(made.rows)
    assert source.when == (tmp_path / "a.json").stat().st_mtime
    write_json(replace(made, environment={**made.environment, "measured_at": "1970-01-02T00:00:00+00:00"}), tmp_path / "b.json")
    assert Source.read(tmp_path / "b.json").when == 86400
    write_json(replace(made, environment={**made.environment, "measured_at": 5}), tmp_path / "c.json")
    with pytest.raises(OptionError, match="measured_at"):
        Source.read(tmp_path / "c.json")
