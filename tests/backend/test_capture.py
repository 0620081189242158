"""Captured runnables on a device without CUDA: the same objects and buffers, called instead of replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backend.common import BOUND, BUDGETS, Traced, call, compiled, dynamic, packed, trace_dynamic, traced
from tests.towers import COUNTING_CALLS, COUNTING_NAME, counting_attention, toy_tower
from vit_compile.backend.capture import FullCapture, PiecewiseCapture, _ResultBuffers
from vit_compile.backend.encoder import encoders
from vit_compile.backend.padding import padded_env
from vit_compile.backend.proof import real_outputs
from vit_compile.stats import Skip

DEPTH = 3


def made(kind: Any, rows: int = 32) -> tuple[Traced, Any]:
    """A traced toy tower and a recorded capture of it."""
    found = traced(toy_tower(DEPTH), *dynamic(packed([5, 3, 3], bound=BOUND)))
    args = found.args(*packed([8, 4], bound=BOUND))
    target = padded_env(found.program, found.roles, found.table.read(args), rows, pad_segments=True)
    assert not isinstance(target, Skip)
    capture = kind(found.program, found.roles, target, None, {})
    capture.record(args)
    return found, capture


@pytest.mark.parametrize("kind", [FullCapture, PiecewiseCapture])
def test_replays_give_the_models_numbers(kind: Any) -> None:
    """One capture serves every smaller call, small after large and back, bit for bit (hazard 3)."""
    found, capture = made(kind)
    model = toy_tower(DEPTH)
    for seed, lengths in enumerate([[8, 4], [16, 16], [2, 1], [16, 16], [3, 3, 3], [0, 5], [1, 1, 1, 1], [32]]):
        inputs = packed([*lengths, 0] if len(lengths) == 1 else lengths, bound=BOUND, seed=seed)
        args = found.args(*inputs)
        env = found.table.read(args)
        (got,) = real_outputs(found.program, capture.replay(args, env), env)
        assert torch.equal(got, call(model, *inputs)), lengths


@pytest.mark.parametrize("kind", [FullCapture, PiecewiseCapture])
def test_equal_totals_with_other_layouts(kind: Any) -> None:
    """Boundaries are data of each replay: two layouts of the same total, alternating, are each right (hazard 1)."""
    found, capture = made(kind)
    model = toy_tower(DEPTH)
    for _ in range(3):
        for lengths in ([10, 2], [2, 10], [4, 4, 4], [12, 0]):
            inputs = packed(lengths, bound=BOUND)
            args = found.args(*inputs)
            env = found.table.read(args)
            (got,) = real_outputs(found.program, capture.replay(args, env), env)
            assert torch.equal(got, call(model, *inputs)), lengths


def test_piecewise_attention_sees_real_rows_and_the_callers_bound() -> None:
    """Between pieces attention gets the unpadded rows and boundaries, and exactly the bound that the caller gave."""
    seen: list[tuple[int, int, int]] = []

    def spy(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        seen.append((x.shape[0], cu_seqlens.shape[0], max_seqlen))
        return counting_attention(x, cu_seqlens, max_seqlen)

    found, capture = made(PiecewiseCapture)
    for step in found.program.attention_steps:
        call_ = step.attention
        assert call_ is not None
        step.attention = type(call_)(
            call_.op, spy, call_.args, call_.kwargs, call_.boundaries, call_.bounds, call_.query_rows, call_.results
        )
    args = found.args(*packed([7, 4], bound=BOUND))
    capture.replay(args, found.table.read(args))
    assert seen == [(11, 3, BOUND)] * DEPTH


def test_full_attention_gets_a_bound_for_every_layout() -> None:
    """Inside one graph the bound is fixed: it covers the capture's rows, however short the traced segments were (hazard 2)."""
    found, capture = made(FullCapture)
    for step in found.program.attention_steps:
        assert step.attention is not None
        (bound,) = step.attention.bounds
        assert bound.literal == BOUND
        assert bound.covering(capture.env, 32) == 32
        assert bound.covering(capture.env, 200) == BOUND
        assert bound.real(capture.env) == BOUND


def test_the_rows_behind_the_real_ones_are_zero() -> None:
    """After any replay, rows of attention results past the real ones are zero, whatever earlier calls left (hazards 3, 40)."""
    found, capture = made(PiecewiseCapture)
    for lengths in ([16, 16], [3, 2], [9, 9], [1, 1]):
        args = found.args(*packed(lengths, bound=BOUND))
        capture.replay(args, found.table.read(args))
        for buffer in capture.results.buffers.values():
            assert not bool(buffer[sum(lengths) :].any()), lengths


def test_results_that_a_piece_writes_into_stay_finite() -> None:
    """A piece that works in place on an attention result does not make the padding grow from replay to replay (hazard 40)."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        y = counting_attention(x * 1, cu_seqlens, BOUND)
        y = y.mul_(4).add_(1)
        return counting_attention(y, cu_seqlens, BOUND) + y

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    for seed in range(200):
        args = packed([3, 2], seed=seed)[:2]
        assert torch.equal(call(ours, *args), model(*args))
    captures = [capture for encoder in encoders() for capture in encoder.captures()]
    assert captures
    for capture in captures:
        assert isinstance(capture, PiecewiseCapture)
        for buffer in capture.results.buffers.values():
            assert bool(buffer.isfinite().all())


def test_result_buffers_are_shared_once_released() -> None:
    """A layer's result buffer serves later layers: memory does not grow with depth."""
    found, capture = made(PiecewiseCapture)
    distinct = {id(buffer) for buffer in capture.results.buffers.values()}
    assert len(capture.results.buffers) == DEPTH
    assert len(distinct) == 1
    assert capture.results.nbytes == 32 * 8 * 4
    assert found.program.n_slots > DEPTH


def test_result_buffers_that_are_still_read_are_not_shared() -> None:
    """Results that a later piece reads keep their own memory (secondary outputs, deepstack)."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for _ in range(3):
            x = counting_attention(x * 2 - 1, cu_seqlens, BOUND)
            results.append(x)
        return (*results, results[0] + results[2])

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    for seed in range(5):
        args = packed([4, 3], seed=seed)[:2]
        assert all(torch.equal(a, b) for a, b in zip(call(ours, *args), model(*args), strict=True))


def test_views_of_results_outlive_the_result() -> None:
    """A later piece may still read a view of a result that no piece names any more: its memory is not handed on."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        view = counting_attention(x * 2, cu_seqlens, BOUND).view(-1, 2, 4)
        y = counting_attention(view.flatten(1) + 1, cu_seqlens, BOUND)
        y = counting_attention(y - 3, cu_seqlens, BOUND)
        return y + view.flatten(1)

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    for seed in range(5):
        args = packed([4, 3], seed=seed)[:2]
        assert torch.equal(call(ours, *args), model(*args))


def test_result_buffers_store_and_clean() -> None:
    """Storing a smaller result zeroes what the larger one left, in every dimension."""
    buffers = _ResultBuffers(frozenset())
    example = torch.ones(6, 4)
    taken = buffers.take(0, example)
    assert torch.equal(taken, example)
    assert taken.data_ptr() != example.data_ptr()
    buffers.store(0, torch.full((2, 3), 7.0))
    want = torch.zeros(6, 4)
    want[:2, :3] = 7
    assert torch.equal(taken, want)
    buffers.store(0, torch.full((5, 4), 2.0))
    assert torch.equal(taken[:5], torch.full((5, 4), 2.0))
    assert not bool(taken[5:].any())
    buffers.give_back(0)
    assert buffers.take(1, example) is taken
    assert buffers.take(2, example) is not taken
    assert buffers.nbytes == 2 * example.nbytes


def test_labels_and_bytes() -> None:
    """A capture says its mode and rows, and counts its buffers."""
    for kind, mode in ((FullCapture, "full"), (PiecewiseCapture, "piecewise")):
        _, capture = made(kind, rows=16)
        assert capture.label == f"{mode} 16 rows"
        assert capture.nbytes >= capture.inputs.nbytes > 0


@pytest.mark.parametrize("kind", [FullCapture, PiecewiseCapture])
def test_attention_calls_per_replay(kind: Any) -> None:
    """One attention call per layer and replay, in both modes, on a device without graphs."""
    found, capture = made(kind)
    args = found.args(*packed([7, 4], bound=BOUND))
    COUNTING_CALLS.reset()
    capture.replay(args, found.table.read(args))
    assert COUNTING_CALLS.calls == DEPTH
