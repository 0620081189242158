"""The function that Dynamo calls: which capture serves a call, when one is made, and what happens otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vit_compile
from tests.backend.common import (
    BOUND,
    BUDGETS,
    call,
    compiled,
    compiled_toy,
    dynamic,
    largest_difference,
    packed,
    trace_dynamic,
    wide_rows,
)
from tests.towers import COUNTING_NAME, counting_attention, norm_view_tower, toy_rows, toy_tower
from vit_compile import counters
from vit_compile.backend import runnable as runnable_module
from vit_compile.backend.capture import PiecewiseCapture
from vit_compile.errors import SkipError


def last() -> vit_compile.CallRecord:
    """How the last call was served."""
    record = vit_compile.last_call()
    assert record is not None
    return record


def rows_model() -> nn.Module:
    """Rows without attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()


def rows(count: int) -> torch.Tensor:
    """Seeded rows."""
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def test_exact_padded_and_too_large() -> None:
    """A capture size replays exactly, a smaller one is padded to the next, a larger one runs without a graph."""
    model, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    for count, kind, graph in (
        (8, "exact", "piecewise 8 rows"),
        (9, "padded", "piecewise 16 rows"),
        (16, "exact", "piecewise 16 rows"),
        (17, "padded", "piecewise 32 rows"),
        (32, "exact", "piecewise 32 rows"),
        (33, "uncaptured", None),
        (2, "padded", "piecewise 8 rows"),
    ):
        args = packed([count - 1, 1], bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))
        assert (last().kind, last().graph, last().rows) == (kind, graph, count)
    assert (last().reason, last().captured_now) == (None, False)
    assert counters.skips == {"too-large": 1}


def test_counts_are_exact() -> None:
    """One capture per size on first need; every call is counted once, under one kind."""
    _, ours = compiled_toy()
    with counters.expect(captures=1, padded_replays=1, exact_replays=0, uncaptured_calls=0, skips={}):
        trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    with counters.expect(captures=2, exact_replays=2, padded_replays=3, uncaptured_calls=2, skips={"too-large": 2}):
        for count in (8, 16, 30, 7, 2, 40, 50):
            call(ours, *packed([count - 1, 1], bound=BOUND))


def test_the_record_says_what_was_captured_now() -> None:
    """`captured_now` is set by the call that makes the capture, not by the next one."""
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    assert last().captured_now
    call(ours, *packed([5, 2], bound=BOUND))
    assert not last().captured_now


def test_tokens_are_converted_to_rows_once() -> None:
    """Budgets are output tokens: with merge 2, four patches make one; with patches per row, rows are images."""
    model = rows_model()
    ours = compiled(model, token_budgets=[2, 8], spatial_merge_size=2)
    call(ours, *dynamic([rows(5)]))
    assert last().graph == "full 8 rows"
    call(ours, rows(9))
    assert last().graph == "full 32 rows"
    torch.compiler.reset()
    ours = compiled(model, token_budgets=[32, 64], patches_per_row=16)
    call(ours, *dynamic([rows(2)]))
    assert last().graph == "full 2 rows"
    call(ours, rows(3))
    assert last().graph == "full 4 rows"
    call(ours, rows(5))
    assert last().kind == "uncaptured"


def test_without_budgets_sizes_are_captured_as_seen() -> None:
    """Up to `max_graphs` sizes, each exactly; a further one runs the compiled path, counted, and the held ones replay on."""
    model = rows_model()
    ours = compiled(model, max_graphs=3)
    call(ours, *dynamic([rows(5)]))
    with counters.expect(captures=2, exact_replays=4, padded_replays=0, uncaptured_calls=3, skips={"max-graphs": 3}):
        for count in (7, 9, 11, 12, 5, 7, 11):
            assert largest_difference(call(ours, rows(count)), call(model, rows(count))) <= 1e-6
    assert last().kind == "uncaptured"
    assert "max_graphs=3" in str(last().reason)


def test_without_budgets_layouts_share_a_capture_only_where_they_fit() -> None:
    """Without budgets nothing is padded: another number of segments is another size, another layout is not."""
    model, ours = compiled_toy(token_budgets=None)
    trace_dynamic(ours, *packed([5, 4], bound=BOUND))
    with counters.expect(captures=0, exact_replays=3):
        for lengths in ([5, 4], [4, 5], [9, 0]):
            args = packed(lengths, bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))
    with counters.expect(captures=1, padded_replays=0):
        args = packed([3, 3, 3], bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))


def test_padding_exact_never_pads() -> None:
    """`padding="exact"`: capture sizes replay, everything else is a counted skip that names the sizes."""
    model, ours = compiled_toy(padding="exact")
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    counters.reset()
    with counters.expect(padded_replays=0, exact_replays=2, uncaptured_calls=2, skips={"not-a-budget": 1, "too-large": 1}):
        for lengths in ([5, 3], [10, 6], [5, 4], [40, 1]):
            args = packed(lengths, bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))
    call(ours, *packed([5, 4], bound=BOUND))
    assert "(8, 16, 32)" in str(last().reason)


def test_max_graphs_with_budgets() -> None:
    """Exactly as many graphs as budgets are allowed by their own cap, however the first call was traced."""
    model, ours = compiled_toy(max_graphs=3)
    for count in (8, 16, 32, 8, 16, 32):
        args = packed([count - 2, 2], bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))
    with counters.expect(exact_replays=3, uncaptured_calls=0):
        for count in (8, 16, 32):
            call(ours, *packed([count - 2, 2], bound=BOUND))


def test_a_first_call_above_every_budget_is_not_captured() -> None:
    """Budgets bound what is captured, also while torch.compile has not seen a second size yet."""
    model, ours = compiled_toy()
    args = packed([40, 2], bound=BOUND)
    with counters.expect(captures=0, uncaptured_calls=1):
        assert torch.equal(call(ours, *args), call(model, *args))


def test_max_graph_bytes() -> None:
    """What does not fit the cap is not captured: counted, with the bytes, and right; what fits is."""
    model, ours = compiled_toy(max_graph_bytes=1)
    args = packed([5, 2], bound=BOUND)
    with counters.expect(captures=0, uncaptured_calls=2, skips={"max-graph-bytes": 2}):
        assert torch.equal(trace_dynamic(ours, *args), call(model, *args))
        assert torch.equal(call(ours, *args), call(model, *args))
    assert "max_graph_bytes=1" in str(last().reason)
    torch.compiler.reset()
    model, ours = compiled_toy(max_graph_bytes=1 << 30)
    with counters.expect(captures=1, skips={}):
        trace_dynamic(ours, *args)


def test_max_graph_bytes_holds_for_all_captures_together() -> None:
    """A cap that has room for the small capture but not for both keeps the small one."""
    _, probe = compiled_toy()
    trace_dynamic(probe, *packed([5, 2], bound=BOUND))
    from vit_compile.backend.encoder import encoders

    (small,) = {capture.nbytes for encoder in encoders() for capture in encoder.captures()}
    assert small > 0
    vit_compile.clear()
    torch.compiler.reset()
    model, ours = compiled_toy(max_graph_bytes=small * 2)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    with counters.expect(captures=0, skips={"max-graph-bytes": 1}):
        args = packed([28, 2], bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))
    with counters.expect(captures=0, padded_replays=1):
        call(ours, *packed([5, 2], bound=BOUND))
    assert sum(encoder.nbytes for encoder in encoders()) <= small * 2


class SecondaryOutputs(nn.Module):
    """Attention results, views and a no-op conversion go out beside the features."""

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = counting_attention(x * 2, cu_seqlens, BOUND)
        return attended + 1, attended, attended[:, :4], x.to(torch.float32) * 1, attended.to(torch.float32)


def test_copied_outputs_outlive_later_calls() -> None:
    """`outputs="copy"`: everything that a call returned keeps its numbers over 100 more calls (hazard 7)."""
    model = SecondaryOutputs()
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    args = packed([4, 2], seed=1)[:2]
    held, want = call(ours, *args), model(*args)
    for seed in range(100):
        call(ours, *packed([[5, 1], [3, 3], [2, 6], [9, 9]][seed % 4], seed=seed)[:2])
    assert largest_difference(held, want) == 0


def test_copied_outputs_belong_to_the_caller() -> None:
    """Writing into an output changes no later result, and outputs of two calls share no memory."""
    model = SecondaryOutputs()
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    args = packed([4, 2], seed=1)[:2]
    first = call(ours, *args)
    for tensor in first:
        tensor.fill_(1e9)
    second = call(ours, *args)
    assert largest_difference(second, model(*args)) == 0
    assert {t.untyped_storage().data_ptr() for t in first}.isdisjoint({t.untyped_storage().data_ptr() for t in second})


def test_borrowed_outputs_are_right_until_the_next_call() -> None:
    """`outputs="borrow"`: right at once, without a copy: the next call writes over what aliases graph memory."""
    model = SecondaryOutputs()
    ours = compiled(model, mode="piecewise", outputs="borrow", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    for seed in range(6):
        args = packed([[4, 2], [5, 1], [3, 3], [2, 6]][seed % 4], seed=seed)[:2]
        assert largest_difference(call(ours, *args), model(*args)) == 0
    held = call(ours, *packed([4, 2], seed=1)[:2])[1]
    before = held.clone()
    call(ours, *packed([4, 2], seed=2)[:2])
    assert not torch.equal(held, before), "nothing was borrowed"


def test_uncaptured_outputs_belong_to_the_caller() -> None:
    """Without a graph, outputs do not alias inputs more than eager's do."""
    model = SecondaryOutputs()
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=[4])
    trace_dynamic(ours, *packed([5, 2])[:2])
    args = packed([6, 3])[:2]
    held, want = call(ours, *args), model(*args)
    for seed in range(10):
        call(ours, *packed([6, 3], seed=seed)[:2])
    assert last().kind == "uncaptured"
    assert largest_difference(held, want) == 0


def test_a_failed_capture_leaves_everything_else_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size that cannot be captured runs without a graph, counted with the cause; others are captured (hazard 20)."""
    record = PiecewiseCapture.record

    def fails_for_16(self: PiecewiseCapture, args: Any) -> None:
        if self.roles.rows(self.env) == 16:
            raise RuntimeError("the driver said no\nand more")
        record(self, args)

    monkeypatch.setattr(PiecewiseCapture, "record", fails_for_16)
    model, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    with counters.expect(captures=1, padded_replays=2, uncaptured_calls=2, skips={"capture-failed": 2}):
        for count in (7, 12, 20, 12):
            args = packed([count - 2, 2], bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))
    assert last().kind == "uncaptured"
    assert "the driver said no" in str(last().reason)
    assert "16 rows" in str(last().reason)


def test_running_out_of_memory_skips_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory while capturing: that size is skipped with the reason, everything else works (hazard 31)."""
    record = PiecewiseCapture.record

    def fails_for_32(self: PiecewiseCapture, args: Any) -> None:
        if self.roles.rows(self.env) == 32:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        record(self, args)

    monkeypatch.setattr(PiecewiseCapture, "record", fails_for_32)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    with counters.expect(captures=1, padded_replays=1, uncaptured_calls=1, skips={"out-of-memory": 1}):
        for count in (20, 12):
            args = packed([count - 2, 2], bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))


def test_a_failed_capture_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that failed is remembered: later calls do not pay for another attempt."""
    attempts = []

    def fails(self: PiecewiseCapture, args: Any) -> None:
        attempts.append(self.roles.rows(self.env))
        raise RuntimeError("no")

    monkeypatch.setattr(PiecewiseCapture, "record", fails)
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    for _ in range(3):
        call(ours, *packed([5, 2], bound=BOUND))
    assert attempts == [8]
    assert counters.skips == {"capture-failed": 4}


def test_bounds_do_not_select_a_capture() -> None:
    """Calls that differ in their longest segment alone share a capture, in both modes (hazard 2)."""
    for mode, make, model in (("piecewise", toy_rows, toy_tower(1)), ("full", wide_rows, norm_view_tower(1))):
        torch.compiler.reset()
        ours = compiled(model, mode=mode, splitting_ops=[COUNTING_NAME] if mode == "piecewise" else [], token_budgets=[16])
        for lengths in ([5, 4], [6, 4], [7, 4]):
            call(ours, *packed(lengths, make=make))
        with counters.expect(captures=0, graphs_seen=0, padded_replays=4):
            for lengths in ([5, 5], [8, 2], [2, 3], [9, 2]):
                args = packed(lengths, make=make)
                assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5, lengths


def test_strict_raises_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `strict` a failed capture is an error with its code."""

    def fails(self: PiecewiseCapture, args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(PiecewiseCapture, "record", fails)
    _, ours = compiled_toy(strict=True)
    with pytest.raises(SkipError, match="capture-failed"):
        trace_dynamic(ours, *packed([5, 2], bound=BOUND))


def test_clear_forgets_captures_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `clear()` sizes are captured anew, also those that had failed; compiled code stays."""
    record = PiecewiseCapture.record
    broken = [True]

    def fails_once(self: PiecewiseCapture, args: Any) -> None:
        if broken[0]:
            raise RuntimeError("no")
        record(self, args)

    monkeypatch.setattr(PiecewiseCapture, "record", fails_once)
    model, ours = compiled_toy()
    args = packed([5, 2], bound=BOUND)
    trace_dynamic(ours, *args)
    assert counters.captures == 0
    broken[0] = False
    vit_compile.clear()
    with counters.expect(captures=1, graphs_seen=0, piece_compiles=0, padded_replays=1):
        assert torch.equal(call(ours, *args), call(model, *args))
    vit_compile.clear()
    with counters.expect(captures=1, graphs_seen=0, piece_compiles=0, padded_replays=1):
        assert torch.equal(call(ours, *args), call(model, *args))


def test_a_capture_with_room_for_more_segments_serves_fewer() -> None:
    """Boundary capacities are few: six segments make a capture that then serves two, without another one."""
    model, ours = compiled_toy()
    trace_dynamic(ours, *packed([1, 1, 1, 1, 1, 1], bound=BOUND))
    with counters.expect(captures=0, padded_replays=3):
        for lengths in ([3, 4], [1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]):
            args = packed(lengths, bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))
    with counters.expect(captures=1):
        args = packed([1] * 5 + [0] * 8, bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))


def test_another_ratio_runs_without_a_graph() -> None:
    """Inputs that were in proportion when traced and no longer are: right, and the skip says so."""

    def model(x: torch.Tensor, merged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, merged + 1

    ours = compiled(model, token_budgets=[8, 16])
    call(ours, *dynamic([rows(12), rows(3)]))
    with counters.expect(padded_replays=1, uncaptured_calls=1, skips={"row-scale-changed": 1}):
        for counts in ((16 - 4, 3), (12, 5)):
            args = [rows(count) for count in counts]
            assert largest_difference(call(ours, *args), model(*args)) == 0


def test_a_budget_that_the_graph_forbids_is_a_skip() -> None:
    """The traced graph needs multiples of four; a budget that is none is never captured, and the numbers are right."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 4, 4) * 2

    ours = compiled(model, token_budgets=[10, 16])
    call(ours, *dynamic([rows(12)]))
    with counters.expect(captures=0, uncaptured_calls=1, skips={"guard-forbids-size": 1}):
        assert largest_difference(call(ours, rows(8)), model(rows(8))) == 0
    assert "10 rows" in str(last().reason)


def test_the_plan_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are remembered per size, and forgotten together when there are too many; nothing else changes."""
    monkeypatch.setattr(runnable_module, "_PLAN_CACHE", 4)
    model, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    for count in range(3, 40):
        args = packed([count - 2, 2], bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))


def test_dense_attention_rows_behind_a_leading_one_are_padded_piecewise() -> None:
    """One packed image as [1, T, C]: attention between the graphs sees the real rows only, so padding is safe."""
    linear = rows_model()[0]

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y)
        return y.transpose(1, 2).flatten(2) * 2

    ours = compiled(model, mode="piecewise", token_budgets=BUDGETS)
    x = rows(11)[None]
    torch._dynamo.mark_dynamic(x, 1)
    call(ours, x)
    for count in (8, 5, 13, 30):
        x = rows(count)[None]
        assert largest_difference(call(ours, x), call(model, x)) <= 1e-6
    assert counters.padded_replays == 4


def test_dense_attention_over_rows_is_not_padded_full() -> None:
    """Inside one graph the same attention would see the padding: exact sizes only, and right numbers."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x[None, None]
        return F.scaled_dot_product_attention(y * 2, y, y)[0, 0] + 1

    ours = compiled(model, mode="full", token_budgets=BUDGETS)
    call(ours, *dynamic([rows(11)]))
    for count in (8, 5, 13, 32):
        assert largest_difference(call(ours, rows(count)), call(model, rows(count))) <= 1e-6
    assert counters.padded_replays == 0
    assert counters.exact_replays == 2


def test_batch_first_towers_pad_images() -> None:
    """Dense attention within each image: rows are images, and padding adds images that nobody looks at."""
    model = norm_view_tower(1)

    def images(x: torch.Tensor) -> torch.Tensor:
        y = model.embed(x)
        q = y.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2) + y

    for mode in ("piecewise", "full"):
        torch.compiler.reset()
        counters.reset()
        ours = compiled(images, mode=mode, token_budgets=[12, 24, 48], patches_per_row=6)
        for count in (1, 2, 3, 4, 5, 8, 9):
            x = torch.randn(count, 6, 12, generator=torch.Generator().manual_seed(count))
            assert largest_difference(call(ours, x), call(images, x)) <= 1e-5, count
        assert counters.padded_replays >= 1
        assert counters.skips == {"too-large": 1}


def test_none_mode_counts_no_skips() -> None:
    """`mode="none"` was asked for, so nothing is a fallback."""
    model = toy_tower(2)
    ours = compiled(model, mode="none", splitting_ops=[COUNTING_NAME])
    args = packed([5, 2], bound=BOUND)
    with counters.expect(uncaptured_calls=1, attention_calls_outside_graphs=2, captures=0, skips={}):
        assert torch.equal(trace_dynamic(ours, *args), call(model, *args))


def test_calls_with_other_weights_of_one_class() -> None:
    """Two models of one class compiled apart keep their own weights and captures."""
    models = [toy_tower(2, seed=seed) for seed in (0, 1)]
    ours = [compiled(m, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS) for m in models]
    args = packed([5, 2], bound=BOUND)
    for _ in range(3):
        for model, function in zip(models, ours, strict=True):
            assert torch.equal(trace_dynamic(function, *args), call(model, *args))
    assert not torch.equal(call(models[0], *args), call(models[1], *args))


def test_a_caller_may_change_its_inputs_afterwards() -> None:
    """Inputs are copied: writing into them after a call changes neither its outputs nor later ones."""
    model, ours = compiled_toy()
    args = packed([5, 2], bound=BOUND)
    got = trace_dynamic(ours, *args)
    want = call(model, *args)
    args[0].fill_(3)
    assert torch.equal(got, want)
    assert torch.equal(call(ours, *args), call(model, *args))
    assert toy_rows(7).shape == args[0].shape


@pytest.mark.parametrize("outputs", ["copy", "borrow"])
def test_inputs_are_never_changed(outputs: str) -> None:
    """Capturing, proving and replaying leave the caller's tensors alone."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, outputs=outputs, token_budgets=BUDGETS)
    for lengths in ([5, 2], [8], [9, 4], [40, 1]):
        args = packed(lengths, make=wide_rows, bound=BOUND)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        trace_dynamic(ours, *args)
        assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))
