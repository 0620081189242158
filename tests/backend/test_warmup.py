"""`warmup`: every budget captured before traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import vit_compile
from tests import towers
from tests.backend.common import BOUND, BUDGETS, call, compiled, compiled_toy, largest_difference, packed, wide_rows
from tests.towers import COUNTING_NAME, norm_view_tower, toy_tower
from vit_compile import counters, warmup
from vit_compile.backend.runnable import Runnable
from vit_compile.errors import BoundariesError, OptionError, WarmupError


def image_model() -> nn.Module:
    """Images in, one feature row each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.Linear(128, 8)).eval()


@pytest.mark.parametrize("example", [[5, 2], [8], [20, 3], [16, 16], [40, 2], [3, 1, 2, 4]])
def test_every_budget_is_captured(example: list[int]) -> None:
    """One example call of any size prepares all budgets; traffic then traces and captures nothing."""
    model, ours = compiled_toy()
    with counters.expect(captures=len(BUDGETS), graphs_seen=1):
        report = warmup(ours, *packed(example, bound=BOUND), progress=False)
    assert sorted(report.captures) == sorted(f"piecewise {rows} rows" for rows in BUDGETS)
    assert report.nbytes > 0
    assert report.skips == ()
    with counters.expect(captures=0, recaptures=0, graphs_seen=0, padded_replays=3, exact_replays=3, uncaptured_calls=1):
        for lengths in ([8, 0], [5, 1], [9, 7], [10, 3], [30, 2], [12, 12], [30, 3]):
            args = packed(lengths, bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))


def test_traffic_with_other_bounds_finds_the_captures() -> None:
    """Every call has its own longest segment; after warm-up that causes no new trace, compilation or capture."""
    model, ours = compiled_toy()
    warmup(ours, *packed([5, 2]), progress=False)
    with counters.expect(captures=0, graphs_seen=0, piece_compiles=0):
        for lengths in ([3, 3], [9, 4], [20, 3], [16, 16], [30, 2]):
            args = packed(lengths)
            assert torch.equal(call(ours, *args), call(model, *args))


def test_budgets_are_captured_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest budget comes first, so that smaller ones find their memory in the pool (hazard 29)."""
    order: list[int] = []
    prepare = Runnable.prepare

    def watch(self: Runnable, args: Any, env: Any, rows: int) -> Any:
        order.append(rows)
        return prepare(self, args, env, rows)

    monkeypatch.setattr(Runnable, "prepare", watch)
    _, ours = compiled_toy()
    captured: list[int] = []
    capture = Runnable.capture

    def watch_capture(self: Runnable, encoder: Any, target: Any, args: Any, env: Any) -> Any:
        rows = self.roles.rows(target)
        assert rows is not None
        captured.append(rows)
        return capture(self, encoder, target, args, env)

    monkeypatch.setattr(Runnable, "capture", watch_capture)
    warmup(ours, *packed([5, 2], bound=BOUND), progress=False)
    assert order == sorted(BUDGETS, reverse=True)
    assert captured == sorted(BUDGETS, reverse=True)


def test_a_batch_of_one_prepares_every_batch() -> None:
    """An example with one image gives captures for all budgets, although torch.compile treats 1 as a constant."""
    model = image_model()
    ours = compiled(model, token_budgets=[32, 64, 128], patches_per_row=16)
    report = warmup(ours, torch.randn(1, 3, 16, 16), progress=False)
    assert {"full 2 rows", "full 4 rows", "full 8 rows"} <= set(report.captures)
    with counters.expect(captures=0, graphs_seen=0, uncaptured_calls=0):
        for batch in (1, 2, 3, 4, 5, 8):
            x = torch.randn(batch, 3, 16, 16)
            assert largest_difference(call(ours, x), call(model, x)) <= 1e-5


def test_keyword_arguments_and_dataclasses() -> None:
    """The example may be keyword arguments."""
    model = towers.dataclass_tower()
    ours = compiled(model, token_budgets=BUDGETS)
    x, cu_seqlens, bound = packed([5, 2], make=wide_rows, bound=BOUND)
    report = warmup(ours, patches=x, cu_seqlens=cu_seqlens, max_seqlen=bound, progress=False)
    assert len(report.captures) == len(BUDGETS)
    got = call(ours, patches=x, cu_seqlens=cu_seqlens, max_seqlen=bound)
    assert largest_difference(got, call(model, patches=x, cu_seqlens=cu_seqlens, max_seqlen=bound)) <= 1e-5


def test_nested_example_arguments() -> None:
    """Tensors inside lists and dicts are found as well."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = toy_tower(1)

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            return self.tower(batch["x"], batch["boundaries"][0], BOUND)

    model = Nested()
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    x, cu_seqlens, _ = packed([5, 2])
    report = warmup(ours, {"x": x, "boundaries": [cu_seqlens]}, progress=False)
    assert len(report.captures) == len(BUDGETS)
    with counters.expect(captures=0, graphs_seen=0):
        x, cu_seqlens, _ = packed([9, 4])
        batch = {"x": x, "boundaries": [cu_seqlens]}
        assert torch.equal(call(ours, batch), call(model, batch))


def test_the_example_is_not_changed() -> None:
    """Neither values nor marks are left on the caller's tensors."""
    model, ours = compiled_toy()
    args = packed([5, 2], bound=BOUND)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    warmup(ours, *args, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))
    assert not any(hasattr(a, "_dynamo_weak_dynamic_indices") or hasattr(a, "_dynamo_dynamic_indices") for a in args)
    assert torch.equal(call(ours, *args), call(model, *args))


def test_warmup_twice_does_nothing_new() -> None:
    """The second time everything is there already, and the report says the same."""
    _, ours = compiled_toy()
    args = packed([5, 2], bound=BOUND)
    first = warmup(ours, *args, progress=False)
    with counters.expect(captures=0, graphs_seen=0):
        second = warmup(ours, *args, progress=False)
    assert sorted(first.captures) == sorted(second.captures)
    assert first.nbytes == second.nbytes


def test_without_budgets_the_examples_size_is_captured() -> None:
    """The report lists that one."""
    _, ours = compiled_toy(token_budgets=None)
    report = warmup(ours, *packed([5, 4], bound=BOUND), progress=False)
    assert len(report.captures) == 1
    assert "9 rows" in report.captures[0]


def test_mode_none_compiles_and_captures_nothing() -> None:
    """Warm-up of `mode="none"` is the compilation."""
    _, ours = compiled_toy(mode="none", token_budgets=None)
    with counters.expect(captures=0, piece_compiles=3):
        report = warmup(ours, *packed([5, 4], bound=BOUND), progress=False)
    assert report.captures == ()


@pytest.mark.parametrize("inference", [False, True])
def test_traffic_under_the_same_mode_finds_the_captures(inference: bool) -> None:
    """Warm-up runs without gradients, under inference_mode where the caller is."""
    model, ours = compiled_toy()
    mode = torch.inference_mode if inference else torch.no_grad
    with mode():
        warmup(ours, *packed([5, 2], bound=BOUND), progress=False)
        with counters.expect(captures=0, graphs_seen=0, padded_replays=1):
            args = packed([9, 4], bound=BOUND)
            assert torch.equal(ours(*args), model(*args))


def test_gradients_are_off_during_warmup() -> None:
    """A model whose weights require gradients is captured by warm-up called with gradients on."""
    ours = compiled(norm_view_tower(depth=1), token_budgets=BUDGETS)
    assert torch.is_grad_enabled()
    with counters.expect(plain_calls=0, captures=len(BUDGETS)):
        warmup(ours, *packed([5, 2], make=wide_rows, bound=BOUND), progress=False)
    assert torch.is_grad_enabled()


def test_something_that_is_not_compiled_is_an_error() -> None:
    """An uncompiled model, and one compiled with another backend, are refused."""
    model = toy_tower(1)
    for function in (model, torch.compile(model, backend="eager")):
        with pytest.raises(WarmupError, match="vit_cudagraph"):
            warmup(function, *packed([5, 2], bound=BOUND), progress=False)


def test_a_graph_that_goes_plain_is_an_error() -> None:
    """Nothing can be captured of a model in train mode with dropout: the error points at the reason."""
    ours = compiled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), token_budgets=BUDGETS)
    with pytest.raises(WarmupError, match="last_call"):
        warmup(ours, torch.randn(5, 4), progress=False)
    record = vit_compile.last_call()
    assert record is not None
    assert "rng" in str(record.reason)


def test_errors_of_the_call_come_through() -> None:
    """Options and inputs are checked in warm-up as in any call."""
    with pytest.raises(OptionError):
        warmup(torch.compile(toy_tower(1), backend="vit_cudagraph", options={"modus": "full"}), *packed([5, 2]), progress=False)
    _, ours = compiled_toy()
    x, _, _ = packed([5, 2])
    with pytest.raises(BoundariesError):
        warmup(ours, x, torch.tensor([0, 5, 6], dtype=torch.int32), BOUND, progress=False)
    # The failed call leaves nothing behind: a later warm-up and call work.
    assert len(warmup(ours, *packed([5, 2], bound=BOUND), progress=False).captures) == len(BUDGETS)


def test_what_was_not_captured_is_in_the_report() -> None:
    """A cap on bytes: nothing captured, one skip for each budget, with its code."""
    _, ours = compiled_toy(max_graph_bytes=1)
    report = warmup(ours, *packed([5, 2], bound=BOUND), progress=False)
    assert report.captures == ()
    assert report.nbytes == 0
    assert [skip.code for skip in report.skips] == ["max-graph-bytes"] * len(BUDGETS)


def test_a_cap_on_graphs_keeps_the_largest() -> None:
    """Captures are the budgets from the top; the rest is reported."""
    _, ours = compiled_toy(token_budgets=[8, 16, 32], max_graphs=3)
    assert len(warmup(ours, *packed([5, 2], bound=BOUND), progress=False).captures) == 3


def test_several_graphs_of_one_model() -> None:
    """A model with a graph break: every budget of the graph that sees the example, and right numbers from all."""
    model = towers.graph_break_tower()
    ours = compiled(model, token_budgets=BUDGETS)
    report = warmup(ours, *packed([5, 2], make=wide_rows, bound=BOUND), progress=False)
    assert len(report.captures) > len(BUDGETS)
    for lengths in ([9, 4], [5, 2], [20, 9]):
        args = packed(lengths, make=wide_rows, bound=BOUND)
        assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5


def test_no_progress_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """`progress=False` writes nothing to stderr or stdout."""
    _, ours = compiled_toy()
    capfd.readouterr()
    warmup(ours, *packed([5, 2], bound=BOUND), progress=False)
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar says what is going on, on stderr only."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way of being told that this is a terminal
    _, ours = compiled_toy()
    capfd.readouterr()
    warmup(ours, *packed([5, 2], bound=BOUND), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "captur" in err


def test_no_listener_is_left_behind() -> None:
    """After a warm-up, ordinary calls are not recorded (they would keep their inputs alive)."""
    import weakref

    _, ours = compiled_toy()
    warmup(ours, *packed([5, 2], bound=BOUND), progress=False)
    x, cu_seqlens, bound = packed([4, 3], bound=BOUND)
    call(ours, x, cu_seqlens, bound)
    watched = weakref.ref(x)
    del x
    assert watched() is None


@pytest.mark.parametrize("images", [1, 3])
def test_a_budget_of_one_image_is_captured_too(images: int) -> None:
    """A batch of one is a trace of its own: whatever the example, its budget is ready, and nothing is skipped for it."""
    tower = towers.tiny_dinov2(depth=2)
    side = tower.config.image_size
    patches = (side // tower.config.patch_size) ** 2
    ours = compiled(tower, token_budgets=[patches, 2 * patches, 4 * patches], patches_per_row=patches, strict=True)
    with torch.no_grad():
        report = vit_compile.warmup(ours, torch.randn(images, 3, side, side), progress=False)
        assert len(report.captures) == 3
        assert not report.skips
        with counters.expect(captures=0, graphs_seen=0, exact_replays=2, padded_replays=1, skips={}):
            for count in (1, 2, 3):
                x = torch.randn(count, 3, side, side)
                got, want = ours(x), tower(x)
                assert (got.last_hidden_state - want.last_hidden_state).abs().max() <= 1e-5


def test_a_model_in_train_mode_does_not_learn_from_the_example() -> None:
    """Running statistics are the user's: warm-up refuses before it runs anything."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WarmupError, match="eval"):
        vit_compile.warmup(compiled(model, token_budgets=[8]), torch.randn(8, 4), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_warmup_after_a_call_of_the_same_size_captures_every_budget() -> None:
    """An earlier call leaves a static trace that would serve the example: the budgets are captured all the same."""
    tower = towers.norm_view_tower(depth=2, channels=16, heads=2).eval()
    ours = compiled(tower, token_budgets=[16, 32])
    call(ours, *packed([20], make=wide_rows, bound=256))
    report = warmup(ours, *packed([20], make=wide_rows, bound=256), progress=False)
    assert {"full 16 rows", "full 32 rows"} <= set(report.captures)
    with counters.expect(captures=0, padded_replays=1, skips={}):
        args = packed([9, 4], make=wide_rows, bound=256)
        assert largest_difference(call(ours, *args), call(tower, *args)) <= 1e-5


def test_a_warmup_of_a_model_that_fixes_its_size_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Where no other size is possible, the static trace has to do, and nothing is printed about the attempt."""
    model = nn.Sequential(nn.Linear(12, 4), nn.Flatten(0), nn.Linear(80, 3))
    ours = compiled(model, token_budgets=[16, 32])
    call(ours, wide_rows(20))
    capfd.readouterr()
    assert warmup(ours, wide_rows(20), progress=False).captures
    assert capfd.readouterr().err == ""
