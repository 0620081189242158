"""`vit-compile plan`: what it prints and returns, and how it fails."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import Result
from typer.testing import CliRunner

from vit_compile.planning import traffic
from vit_compile.planning.traffic import Geometry, Picture
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.tools.cli import app

QWEN3 = Geometry(16, 2, 2)
QUICK = ("--traffic", "chat", "--count", "300")


def call(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan(*arguments: object) -> dict[str, Any]:
    """The JSON of a plan that must succeed."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def mistake(*arguments: object) -> str:
    """The one line that a user's mistake gives."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("vit-compile: ")
    return line


def squares(path: Path, *requests: list[int]) -> Path:
    """A trace of square images, by their sides in blocks of 32 pixels."""
    traffic.write_jsonl(path, [tuple(Picture(32 * side, 32 * side) for side in request) for request in requests])
    return path


@pytest.fixture
def snapshot_file(tmp_path: Path) -> Path:
    """The statistics of an encoder with graphs of 16, 1024 and 4096 tokens: 1 ms + 1 ms in 100 tokens, eager 20 ms more."""
    counted = EncoderStatistics(log_every=0)
    for budget, nbytes, seconds in ((4096, 400_000_000, 20.0), (1024, 1_024_000, 0.5), (16, 16_000, 0.25)):
        counted.captured("main", budget, (), nbytes=nbytes, seconds=seconds)
        counted.calibrated("main", budget, (), 1 + budget / 100, 21 + budget / 100)
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(counted.snapshot()), encoding="utf-8")
    return path


def greedy_share(requests: list[list[int]], ladder: list[int], max_items: int) -> float:
    """Padded share of filling batches smallest first, written out."""
    computed = real = 0
    for request in requests:
        batch: list[int] = []
        for count in [*sorted(request), None]:
            if batch and (count is None or len(batch) == max_items or sum(batch) + count > ladder[-1]):
                fitting = [budget for budget in ladder if budget >= sum(batch)]
                if fitting:
                    computed, real = computed + fitting[0], real + sum(batch)
                batch = []
            batch += [] if count is None else [count]
    return 1 - real / computed


def test_chat_needs_few_graphs(tmp_path: Path) -> None:
    """Twelve graphs up to 4096 tokens waste at most 10 % on requests that they were not fitted to; powers of two 25 % or more."""
    trace = tmp_path / "trace.jsonl"
    found = plan("--traffic", "chat", "--max-graphs", 12, "--max-tokens", 4096, "--save-trace", trace)
    fitted, doubled = found["ladders"]
    assert len(found["token_budgets"]) == 12
    assert found["token_budgets"] == fitted["token_budgets"]
    assert found["padded_share"] == fitted["packing"]["cost"]["padded_share"] <= 0.10
    assert doubled["token_budgets"] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert doubled["packing"]["cost"]["padded_share"] > 0.25
    # The other half, packed anew here: the saved trace is what was judged.
    requests = [[QWEN3.tokens(picture) for picture in request] for request in traffic.read_jsonl(trace)]
    assert len(requests) == 2000
    for ladder in (fitted, doubled):
        share = ladder["packing"]["greedy"]["padded_share"]
        assert share == pytest.approx(greedy_share(requests[1000:], ladder["token_budgets"], 16))
        assert share != pytest.approx(greedy_share(requests[:1000], ladder["token_budgets"], 16))


def test_the_ladder_is_made_from_the_first_half_and_judged_on_the_second(tmp_path: Path) -> None:
    """First images of 4 and 64 tokens, then of 36: the ladder knows the former, the share is the latter's 36 of 64."""
    trace = squares(tmp_path / "t.jsonl", [2], [8], [6], [6])
    found = plan("--trace", trace, "--max-tokens", 64, "--max-items", 4, "--max-graphs", 2)
    assert found["token_budgets"] == [16, 64]
    assert found["padded_share"] == pytest.approx(1 - 36 / 64)
    assert found["traffic"]["fitted_on_requests"] == found["traffic"]["judged_on_requests"] == 2
    assert (found["traffic"]["images"], found["traffic"]["tokens"]) == (4, 4 + 64 + 36 + 36)


def test_json_schema() -> None:
    """--json prints one object with these fields; nothing is made up where nothing was measured."""
    found = plan(*QUICK)
    assert set(found) == {
        "schema", "traffic", "model", "geometry", "max_graphs", "max_tokens", "max_items_per_batch", "max_bytes", "measured",
        "extrapolated", "token_budgets", "config", "padded_share", "ladders", "hardly_worth", "graphs",
    }  # fmt: skip
    assert [ladder["name"] for ladder in found["ladders"]] == ["fitted", "powers of two"]
    for ladder in found["ladders"]:
        assert (ladder["bytes"], ladder["startup_seconds"]) == (None, None)
        assert {outcome["ms"] for outcome in ladder["packing"].values()} == {None}
    for graph in found["graphs"]:
        for name in ("bytes_freed", "startup_seconds_saved", "added_ms_without", "input_and_output_row_bytes"):
            assert graph[name] is None
    assert found["geometry"]["patch_size"] == 16
    assert found["traffic"]["preset"] == "chat"


def test_the_line_goes_into_the_configuration() -> None:
    """The recommended arguments make an EncoderConfig with the ladder; the table's last line is the same."""
    found = plan(*QUICK)
    config = eval(f"EncoderConfig({found['config']})", {"EncoderConfig": EncoderConfig})
    assert config.token_budgets == tuple(found["token_budgets"])
    assert config.max_items_per_batch == 16 <= config.token_budgets[0]
    result = call(*QUICK)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == found["config"]
    assert "not measured (run with --measured)" in result.stdout
    assert "\u2502 powers of two \u2502" in result.stdout


def test_graphs_are_listed_by_worth(tmp_path: Path) -> None:
    """By hand: images of 16, 64 and 256 tokens, 8, 4 and 1 of them in each half, one by one over (16, 64, 256).

    Without 16: 8 x 48 tokens more; without 64: 4 x 192; without 256 one image is left eager. All of them: 640 tokens.
    """
    half = [[4]] * 8 + [[8]] * 4 + [[16]]
    trace = squares(tmp_path / "t.jsonl", *half, *half)
    found = plan("--trace", trace, "--max-tokens", 256, "--max-graphs", 3)
    rows = [
        (g["token_budget"], g["replays"], g["added_tokens_without"], g["added_eager_images_without"]) for g in found["graphs"]
    ]
    assert rows == [(256, 1, 0, 1), (64, 4, 768, 0), (16, 8, 384, 0)]
    assert [g["added_eager_tokens_without"] for g in found["graphs"]] == [256, 0, 0]
    assert [g["added_share_without"] for g in found["graphs"]] == pytest.approx([0, 768 / 640, 384 / 640])
    assert found["hardly_worth"] == []


def test_graphs_that_nothing_needs_are_named(tmp_path: Path) -> None:
    """A largest budget above all traffic is hardly worth its graph, and the tables say so."""
    trace = squares(tmp_path / "t.jsonl", *[[4]] * 10)
    arguments = ("--trace", trace, "--max-tokens", 4096, "--max-graphs", 2)
    assert plan(*arguments)["hardly_worth"] == [4096]
    assert "Hardly worth a graph, since each adds less than 0.5% when it goes: 4096." in call(*arguments).stdout


def test_images_above_the_maximum_are_counted(tmp_path: Path) -> None:
    """They run eagerly whatever the ladder: told in both outputs, and no part of the padded share."""
    trace = squares(tmp_path / "t.jsonl", [4], [4, 20], [4], [20, 4])
    arguments = ("--trace", trace, "--max-tokens", 256, "--max-graphs", 2)
    found = plan(*arguments)
    assert found["traffic"]["images_above_max_tokens"] == 2
    assert found["padded_share"] == 0
    assert found["ladders"][0]["packing"]["cost"]["eager_images"] == 1
    assert found["ladders"][0]["packing"]["cost"]["eager_tokens"] == 400
    assert "2 of 6 images have more than 256 tokens" in call(*arguments).stdout


def test_a_half_without_an_image_that_fits(tmp_path: Path) -> None:
    """Judged by nothing: no padded share, no verdict on graphs, said in words. Fitted to nothing: an error."""
    arguments = ("--max-tokens", 256, "--max-graphs", 2)
    second = squares(tmp_path / "second.jsonl", [4], [20])
    found = plan("--trace", second, *arguments)
    assert (found["padded_share"], found["hardly_worth"], found["traffic"]["judged_on_images"]) == (None, [], 0)
    text = call("--trace", second, *arguments).stdout
    assert "nothing was replayed, and the ladder is not judged" in text
    assert "nothing replayed" in text
    assert "0.0%" not in text
    assert "Hardly worth" not in text
    line = mistake("--trace", squares(tmp_path / "first.jsonl", [20], [4]), *arguments)
    assert "each image of the first 1 requests" in line
    assert "400 at least" in line


def test_images_that_lose_their_graph_are_named(tmp_path: Path) -> None:
    """Images of 36 tokens in a graph of 64: without it nothing is gained by their padding, and their tokens are told."""
    found = plan(
        "--trace", squares(tmp_path / "t.jsonl", [2], [8], [6], [6]), "--max-tokens", 64, "--max-items", 4, "--max-graphs", 2
    )
    largest = next(graph for graph in found["graphs"] if graph["token_budget"] == 64)
    assert largest["added_tokens_without"] == 0
    assert (largest["added_eager_images_without"], largest["added_eager_tokens_without"]) == (2, 72)


def test_one_graph() -> None:
    """A single graph is the maximum; both ladders are the same, and without it all images are eager."""
    found = plan(*QUICK, "--max-graphs", 1, "--max-tokens", 2048)
    assert [ladder["token_budgets"] for ladder in found["ladders"]] == [[2048], [2048]]
    assert found["config"] == "token_budgets=(2048,), max_items_per_batch=16"
    (graph,) = found["graphs"]
    served = found["traffic"]["images"]
    assert 0 < graph["added_eager_images_without"] < served


@pytest.mark.parametrize(("most", "step"), [(1000, 8), (999, 1), (1024, 16)])
def test_budgets_follow_the_maximum(most: int, step: int) -> None:
    """Any maximum works: budgets are multiples of 16, or of the power of two that divides the maximum."""
    found = plan(*QUICK, "--max-tokens", most, "--max-items", 5)
    assert found["token_budgets"][-1] == most
    assert all(budget % step == 0 for budget in found["token_budgets"])
    assert found["token_budgets"][0] >= 5


# --- measured


def test_measured_numbers_are_real(snapshot_file: Path) -> None:
    """By arithmetic from the file: milliseconds of the replays, bytes and seconds of the ladder, all in both outputs."""
    found = plan(*QUICK, "--measured", snapshot_file, "--max-graphs", 6)
    fitted = found["ladders"][0]
    ladder = found["token_budgets"]
    outcome = fitted["packing"]["cost"]
    assert outcome["eager_images"] == 0
    assert outcome["ms"] == pytest.approx(outcome["replays"] + outcome["computed_tokens"] / 100)
    assert outcome["ms"] <= fitted["packing"]["greedy"]["ms"]
    assert fitted["bytes"] == pytest.approx(400_000_000 + sum(1000 * budget for budget in ladder[:-1]), rel=1e-6)
    seconds = [0.25 + 0.25 * (min(budget, 1024) - 16) / 1008 for budget in ladder[:-1]]
    assert fitted["startup_seconds"] == pytest.approx(20 + sum(seconds))
    assert found["extrapolated"] is False
    added = [graph["added_ms_without"] for graph in found["graphs"]]
    assert added == sorted(added, reverse=True)
    freed = {graph["token_budget"]: graph["bytes_freed"] for graph in found["graphs"]}
    assert freed[ladder[0]] == pytest.approx(1000 * ladder[0], abs=1)
    text = call(*QUICK, "--measured", snapshot_file, "--max-graphs", 6).stdout
    assert f"{outcome['ms'] / 150:.3f}" in text
    assert f"{fitted['bytes'] / 2**20:.1f} MiB" in text
    assert "not measured" not in text


def test_a_fixed_cost_of_replays_changes_the_plan(snapshot_file: Path) -> None:
    """Where each replay costs a millisecond, fewer are made than where tokens alone count."""
    assert (
        plan(*QUICK, "--measured", snapshot_file)["ladders"][0]["packing"]["cost"]["replays"]
        < plan(*QUICK)["ladders"][0]["packing"]["cost"]["replays"]
    )


def test_a_cap_in_bytes_is_kept(snapshot_file: Path) -> None:
    """The ladder fits under --max-bytes, by a lower maximum too; both ladders end there; a cap too small is an error."""
    free = plan(*QUICK, "--measured", snapshot_file)
    found = plan(*QUICK, "--measured", snapshot_file, "--max-bytes", 200_000_000)
    assert free["ladders"][0]["bytes"] > 400_000_000
    assert found["ladders"][0]["bytes"] <= 200_000_000
    assert found["token_budgets"][-1] < 4096
    assert found["ladders"][1]["token_budgets"][-1] == found["token_budgets"][-1]
    line = mistake(*QUICK, "--measured", snapshot_file, "--max-bytes", 1000)
    assert "max_bytes=1000: the graph of" in line


def test_what_lies_outside_is_marked(snapshot_file: Path) -> None:
    """Budgets above the measured ones are extrapolated, and both outputs say it."""
    arguments = (*QUICK, "--measured", snapshot_file, "--max-tokens", 8192)
    assert plan(*arguments)["extrapolated"] is True
    assert "Budgets outside of 16 to 4096 tokens were not measured: their numbers are extrapolated." in call(*arguments).stdout


# --- models


def test_a_model_s_configuration_is_enough(tmp_path: Path) -> None:
    """Qwen3-VL's sizes come from config.json alone; rows in bytes are patches and tokens with their widths."""
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096}
    transformers.Qwen3VLConfig(vision_config=vision).save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    found = plan(*QUICK, "--model", tmp_path)
    assert found["model"] == str(tmp_path)
    assert found["geometry"] == {
        "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "min_tokens": 1, "max_tokens": 16384, "extra_tokens": 0,
    }  # fmt: skip
    assert found["token_budgets"] == plan(*QUICK)["token_budgets"]
    for graph in found["graphs"]:
        inputs, outputs = 4 * 3 * 2 * 16 * 16, 4096 * (1 + 3)  # values of a token's four patches; of a token on four levels
        assert graph["input_and_output_row_bytes"] == graph["token_budget"] * 2 * (inputs + outputs)
    assert "input + output rows (arithmetic)" in call(*QUICK, "--model", tmp_path).stdout


def test_dense_towers_do_not_merge(dinov2_dir: Path) -> None:
    """A tower without merging and frames has a token a patch; class tokens are given by hand."""
    found = plan(*QUICK, "--model", dinov2_dir, "--extra-tokens", 1)
    assert found["geometry"]["patch_size"] == 14
    assert (found["geometry"]["merge_size"], found["geometry"]["temporal_patch_size"]) == (1, 1)
    assert found["geometry"]["extra_tokens"] == 1
    smallest = found["graphs"][0]
    assert smallest["input_and_output_row_bytes"] == smallest["token_budget"] * 4 * (3 * 14 * 14 + 32)  # float32


def test_a_model_with_another_rule_is_refused(tmp_path: Path) -> None:
    """A model that merges tokens in a way that its configuration does not state as a merge size is not guessed."""
    transformers.LlavaConfig().save_pretrained(tmp_path)
    line = mistake(*QUICK, "--model", tmp_path)
    assert "(llava) has no spatial_merge_size" in line
    assert "give --patch-size and --merge-size instead" in line


def test_sizes_by_hand() -> None:
    """--patch-size alone is a dense tower; with --merge-size the images of a preset in pixels have fewer tokens."""
    fixed = ("--traffic", "fixed", "--count", "50")
    dense, merged = plan(*fixed, "--patch-size", 16), plan(*fixed, "--patch-size", 16, "--merge-size", 2)
    assert dense["traffic"]["images"] == merged["traffic"]["images"]
    wanted = {(336, 1): 441, (384, 1): 576, (336, 2): 100, (384, 2): 144}  # 336 / 32 = 10.5 rounds to 10
    for found, merge in ((dense, 1), (merged, 2)):
        requests = traffic.generate("fixed", 50, seed=0, geometry=Geometry(16, merge))
        assert found["traffic"]["tokens"] == sum(wanted[picture.height, merge] for request in requests for picture in request)


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--traffic caht", "'caht' is not a preset: choose one of chat, catalogue"),
        ("", "give either --traffic with a preset"),
        ("--traffic chat --trace t.jsonl", "and not both"),
        ("--trace absent.jsonl", "absent.jsonl cannot be read (No such file or directory)"),
        ("--trace t.jsonl --seed 1", "--seed would do nothing with --trace"),
        ("--trace t.jsonl --count 0", "--count would do nothing with --trace"),
        ("--trace t.jsonl --save-trace u.jsonl", "--save-trace would do nothing with --trace"),
        ("--traffic chat --max-bytes 5", "--max-bytes needs --measured"),
        ("--traffic chat --count 0", "count=0"),
        ("--traffic chat --count 1", "a single request"),
        ("--traffic chat --count 50 --max-tokens 8", "max_items=16 is above the largest budget of 8"),
        ("--traffic fixed --count 50 --max-tokens 64", "each of the"),
        ("--traffic chat --merge-size 2", "--merge-size needs --patch-size"),
        ("--traffic chat --model . --patch-size 14", "--patch-size contradicts --model"),
        ("--traffic chat --model .", "it has no config.json"),
        ("--traffic chat --patch-size 0", "patch_size=0"),
        ("--traffic chat --measured absent.json", "--measured absent.json: cannot be read"),
        ("--traffic chat --measured t.jsonl", "--measured t.jsonl: there are no graphs"),
        ("--traffic chat --count 50 --save-trace absent/t.jsonl", "cannot be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, complaint: str) -> None:
    """Every mistake ends with exit code 2 and one line on stderr that says what is wrong."""
    monkeypatch.chdir(tmp_path)
    squares(Path("t.jsonl"), [4])
    assert complaint in mistake(*shlex.split(arguments))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    """An empty file, and a broken line, are errors that name the file and the line."""
    path = tmp_path / "t.jsonl"
    path.touch()
    assert "t.jsonl is empty" in mistake("--trace", path)
    path.write_text('{"images": [{"height": 32, "width": 32}]}\n{"images": []}\n', encoding="utf-8")
    assert "t.jsonl, line 2: images: expected a list of at least one picture" in mistake("--trace", path)
