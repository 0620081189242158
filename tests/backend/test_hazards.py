"""What went wrong in real systems (docs: hazards), as far as a device without CUDA can show it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vit_compile
from tests.backend.common import (
    BOUND,
    BUDGETS,
    call,
    compiled,
    compiled_toy,
    largest_difference,
    packed,
    trace_dynamic,
    wide_rows,
)
from tests.towers import COUNTING_CALLS, COUNTING_NAME, counting_attention, norm_view_tower, toy_rows, toy_tower
from vit_compile import counters
from vit_compile.backend.encoder import encoders

MODES = ("piecewise", "full", "none")


def all_layouts(total: int, parts: int) -> list[list[int]]:
    """Every way to divide `total` rows into `parts` segments."""
    if parts == 1:
        return [[total]]
    return [[first, *rest] for first in range(total + 1) for rest in all_layouts(total - first, parts - 1)]


@pytest.mark.parametrize("depth", [1, 3])
def test_exact_arithmetic_with_exact_counts(depth: int) -> None:
    """The toy tower, bit for bit, with every count as a formula of depth and budgets (hazards 1, 11, 36)."""
    model, ours = compiled_toy(depth=depth)
    first = packed([5, 2], bound=BOUND)
    with counters.expect(
        graphs_seen=1,
        pieces=depth + 1,
        distinct_pieces=min(depth + 1, 3),
        piece_compiles=min(depth + 1, 3),
        captures=1,
        padded_replays=1,
        attention_calls_outside_graphs=depth,
        skips={},
    ):
        assert torch.equal(trace_dynamic(ours, *first), call(model, *first))
    layouts = [[8, 0], [4, 4], [1, 6], [16, 0], [3, 3, 3], [2, 9], [32, 0], [20, 9], [8, 8, 8, 8], [33, 0], [20, 20]]
    totals = [sum(layout) for layout in layouts]
    with counters.expect(
        graphs_seen=0,
        piece_compiles=0,
        captures=len(BUDGETS) - 1,
        exact_replays=sum(total in BUDGETS for total in totals),
        padded_replays=sum(total not in BUDGETS and total < max(BUDGETS) for total in totals),
        uncaptured_calls=sum(total > max(BUDGETS) for total in totals),
        plain_calls=0,
        attention_calls_outside_graphs=depth * len(layouts),
        skips={"too-large": sum(total > max(BUDGETS) for total in totals)},
    ):
        for seed, lengths in enumerate(layouts):
            args = packed(lengths, bound=BOUND, seed=seed)
            assert torch.equal(call(ours, *args), call(model, *args)), lengths
    COUNTING_CALLS.reset()
    for lengths in layouts:
        call(ours, *packed(lengths, bound=BOUND))
    assert COUNTING_CALLS.calls == depth * len(layouts), "attention ran more or less often than once per layer"


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_every_layout_of_one_total(mode: str) -> None:
    """Equal totals, other layouts, in any order: boundaries are never frozen (hazard 1)."""
    model, ours = compiled_toy(depth=2, mode=mode, token_budgets=None if mode == "none" else BUDGETS)
    trace_dynamic(ours, *packed([2, 2, 3], bound=BOUND))
    layouts = all_layouts(9, 3)
    random.Random(0).shuffle(layouts)
    for lengths in layouts:
        args = packed(lengths, bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args)), lengths


@pytest.mark.parametrize("mode", MODES)
def test_two_layouts_alternating(mode: str) -> None:
    """The same with real attention, in every mode (hazard 1)."""
    model = norm_view_tower(depth=2)
    ours = compiled(model, mode=mode, **({} if mode == "none" else {"token_budgets": BUDGETS}))
    for _ in range(3):
        for lengths in ([6, 4, 2], [2, 4, 6], [1, 10, 1], [12, 0, 0]):
            args = packed(lengths, make=wide_rows)
            assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5, lengths


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_the_bound_is_not_baked_in(mode: str) -> None:
    """Short segments when captured, one long segment later: no row is lost (hazard 2)."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, mode=mode, token_budgets=[32])
    for lengths in ([2, 2, 2, 2, 2], [3, 3, 3, 3], [2] * 8):
        call(ours, *packed(lengths, make=wide_rows))
    for lengths in ([30, 1, 1], [1, 31, 0], [32, 0, 0], [2, 3, 4]):
        args = packed(lengths, make=wide_rows)
        assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5, lengths


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_small_large_small(mode: str) -> None:
    """Nothing of a large call is left in a small one after it (hazard 3)."""
    model = norm_view_tower(depth=2)
    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    small, large = packed([3, 2], make=wide_rows, bound=BOUND), packed([16, 13], make=wide_rows, bound=BOUND)
    first = trace_dynamic(ours, *small)
    for _ in range(3):
        assert largest_difference(call(ours, *large), call(model, *large)) <= 1e-5
        assert torch.equal(call(ours, *small), first)
    same_budget = packed([4, 4], make=wide_rows, bound=BOUND)
    assert largest_difference(call(ours, *same_budget), call(model, *same_budget)) <= 1e-5
    assert torch.equal(call(ours, *small), first)


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_an_image_with_nan_spoils_no_other(mode: str) -> None:
    """One poisoned image among five: the others' features are the same, bit for bit, also in later calls (hazard 39)."""
    model = norm_view_tower(depth=2)
    ours = compiled(model, mode=mode, token_budgets=[32])
    lengths = [5, 4, 6, 3, 7]
    x, cu_seqlens, bound = packed(lengths, make=wide_rows, bound=BOUND)
    clean = trace_dynamic(ours, x, cu_seqlens, bound)
    for value in (float("nan"), float("inf"), 1e30):
        for image in range(5):
            start, end = int(cu_seqlens[image]), int(cu_seqlens[image + 1])
            poisoned = x.clone()
            poisoned[start + 1] = value
            got = call(ours, poisoned, cu_seqlens, bound)
            keep = torch.ones(x.shape[0], dtype=torch.bool)
            keep[start:end] = False
            assert torch.equal(got[keep], clean[keep]), (value, image)
        assert torch.equal(call(ours, x, cu_seqlens, bound), clean), "the padding kept something"
    short = packed([4, 3], make=wide_rows, bound=BOUND)
    assert largest_difference(call(ours, *short), call(model, *short)) <= 1e-5


def test_row_buffers_follow_the_budget_and_boundaries_their_own_capacity() -> None:
    """Many segments in few rows make no large row buffer (hazard 16), and few segments no large capacity (hazard 17)."""
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([1, 1, 1, 1, 1, 1], bound=BOUND))
    (capture,) = [capture for encoder in encoders() for capture in encoder.captures()]
    shapes = {buffer.name: tuple(buffer.tensor.shape) for buffer in capture.inputs.buffers}
    assert shapes == {"L_x_": (8, 8), "L_cu_seqlens_": (9,)}


REPLACEMENTS: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "load_state_dict(assign=True)": lambda model, other: model.load_state_dict(other.state_dict(), assign=True),
    "param.data =": lambda model, other: [setattr(p, "data", q.data.clone()) for p, q in _pairs(model, other)],
    "setattr": lambda model, other: [
        setattr(a, "weight", nn.Parameter(b.weight.detach().clone())) for a, b in _layers(model, other)
    ],
}
IN_PLACE: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "load_state_dict": lambda model, other: model.load_state_dict(other.state_dict()),
    "copy_": lambda model, other: [p.copy_(q) for p, q in _pairs(model, other)],
    "mul_": lambda model, other: [p.mul_(-1) for p in model.parameters()],
}


def _pairs(model: nn.Module, other: nn.Module) -> list[tuple[Any, Any]]:
    return list(zip(model.parameters(), other.parameters(), strict=True))


def _layers(model: Any, other: Any) -> list[tuple[Any, Any]]:
    return list(zip(model.layers, other.layers, strict=True))


def reference(model: nn.Module, depth: int) -> nn.Module:
    """A fresh, untouched tower with the model's current weights."""
    fresh = toy_tower(depth)
    fresh.load_state_dict(model.state_dict())
    return fresh


@pytest.mark.parametrize("name", REPLACEMENTS)
@torch.no_grad()
def test_replaced_weights_are_noticed(name: str) -> None:
    """After weights were replaced, features are the new weights', and every capture is made anew once, counted (hazard 8)."""
    model, ours = compiled_toy(depth=2)
    calls = [packed(lengths, bound=BOUND) for lengths in ([5, 2], [9, 4])]
    for args in calls:
        trace_dynamic(ours, *args)
    for seed in (1, 2):
        old = [call(model, *args) for args in calls]
        REPLACEMENTS[name](model, toy_tower(2, seed=seed))
        before = counters.captures
        for args, stale in zip(calls, old, strict=True):
            want = call(reference(model, 2), *args)
            assert not torch.equal(want, stale), "the new weights make no difference"
            assert torch.equal(call(ours, *args), want)
        assert counters.captures == before + len(calls), "captures of the old weights were kept"
        assert counters.recaptures >= 1
        with counters.expect(captures=0, recaptures=0, padded_replays=2):
            for args in calls:
                call(ours, *args)


@pytest.mark.parametrize("name", IN_PLACE)
@torch.no_grad()
def test_weights_updated_in_place_just_work(name: str) -> None:
    """In-place updates are seen by the next replay, without any new capture or trace (hazard 8)."""
    model, ours = compiled_toy(depth=2)
    args = packed([5, 2], bound=BOUND)
    trace_dynamic(ours, *args)
    stale = call(model, *args)
    IN_PLACE[name](model, toy_tower(2, seed=1))
    want = call(reference(model, 2), *args)
    assert not torch.equal(want, stale)
    with counters.expect(captures=0, recaptures=0, graphs_seen=0, padded_replays=1):
        assert torch.equal(call(ours, *args), want)


@pytest.mark.parametrize("there_and_back", [False, True])
def test_another_dtype(there_and_back: bool) -> None:
    """`.to(dtype)` after captures: features of the new dtype, right for every size (hazard 8)."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, token_budgets=BUDGETS)
    layouts = ([5, 2], [9, 4], [8, 0])
    for lengths in layouts:
        trace_dynamic(ours, *packed(lengths, make=wide_rows, bound=BOUND))
    dtypes = [torch.float64, torch.float32] if there_and_back else [torch.float64]
    for dtype in dtypes:
        model.to(dtype)
        for lengths in layouts:
            x, cu_seqlens, bound = packed(lengths, make=wide_rows, bound=BOUND)
            got = call(ours, x.to(dtype), cu_seqlens, bound)
            assert got.dtype == dtype
            assert largest_difference(got, call(model, x.to(dtype), cu_seqlens, bound)) <= 1e-5


def test_replaced_weights_during_warmup() -> None:
    """A warm-up after weights were replaced captures every budget anew."""
    model, ours = compiled_toy(depth=2)
    args = packed([5, 2], bound=BOUND)
    vit_compile.warmup(ours, *args, progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    with counters.expect(captures=len(BUDGETS), graphs_seen=0):
        vit_compile.warmup(ours, *args, progress=False)
    with counters.expect(captures=0):
        for lengths in ([5, 2], [9, 4], [20, 3]):
            args = packed(lengths, bound=BOUND)
            assert torch.equal(call(ours, *args), call(model, *args))


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_eight_threads(mode: str) -> None:
    """Eight threads with different sizes, one compiled model: each gets its own right features (hazard 21)."""
    model = norm_view_tower(depth=2)
    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    vit_compile.warmup(ours, *packed([5, 2], make=wide_rows, bound=BOUND), progress=False)
    layouts = [[5, 2], [4, 4], [9, 3, 1], [16, 0], [20, 4], [32, 0], [40, 2], [1, 1]]
    calls = [packed(lengths, make=wide_rows, bound=BOUND, seed=seed) for seed, lengths in enumerate(layouts)]
    wants = [call(model, *args) for args in calls]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(first: int) -> None:
        try:
            start.wait()
            for step in range(24):
                index = (first + step * 3) % len(calls)
                got = call(ours, *calls[index])
                if largest_difference(got, wants[index]) > 1e-5:
                    failures.append(f"wrong features for {layouts[index]}")
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    with counters.expect(captures=0, graphs_seen=0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert counters.exact_replays + counters.padded_replays + counters.uncaptured_calls >= 8 * 24


def test_eight_threads_capture_each_size_once() -> None:
    """Lazy capture under contention: every size once, every call right."""
    model, ours = compiled_toy(depth=2)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    vit_compile.clear()
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for lengths in ([5, 2], [9, 4], [20, 3]):
            args = packed(lengths, bound=BOUND, seed=seed)
            if not torch.equal(call(ours, *args), call(model, *args)):
                failures.append(str(lengths))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    with counters.expect(captures=3):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_copied_outputs_of_threads_do_not_mix() -> None:
    """An output held by one thread is not written by another's call (hazards 7, 21)."""
    model, ours = compiled_toy(depth=1)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    failures: list[int] = []

    def work(seed: int) -> None:
        args = packed([4, 3], bound=BOUND, seed=seed)
        want = call(model, *args)
        held = [call(ours, *args) for _ in range(20)]
        failures.extend(seed for got in held if not torch.equal(got, want))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("first", ["inference_mode", "no_grad"])
def test_inference_mode_and_no_grad_in_both_orders(first: str, mode: str) -> None:
    """Static buffers made under one mode are written under the other without an error (hazard 22)."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    modes = [torch.inference_mode, torch.no_grad]
    for context in (modes if first == "inference_mode" else modes[::-1]) * 2:
        for lengths in ([5, 2], [8, 1], [20, 9]):
            with context():
                args = packed(lengths, make=wide_rows, bound=BOUND)
                got = ours(*args)
                assert largest_difference(got, model(*args)) <= 1e-5
                got += 1  # the caller's own tensor
    assert counters.padded_replays > 0


def test_inputs_made_under_inference_mode() -> None:
    """Inference tensors as inputs of a no_grad call, and the other way round."""
    model, ours = compiled_toy()
    with torch.inference_mode():
        inference = packed([5, 2], bound=BOUND)
    normal = packed([5, 2], bound=BOUND)
    want = call(model, *normal)
    for args in (inference, normal, inference):
        assert torch.equal(call(ours, *args), want)
        with torch.inference_mode():
            assert torch.equal(ours(*args), want)


def test_weights_made_under_inference_mode() -> None:
    """A model built under inference_mode is captured and right."""
    with torch.inference_mode():
        model = norm_view_tower(depth=1)
    ours = compiled(model, token_budgets=BUDGETS)
    for lengths in ([5, 2], [9, 4]):
        args = packed(lengths, make=wide_rows, bound=BOUND)
        assert largest_difference(trace_dynamic(ours, *args), call(model, *args)) <= 1e-5


def test_order_is_the_callers() -> None:
    """Rows come back in the order in which they went in, whatever the sizes (hazard 10)."""
    model, ours = compiled_toy(depth=1)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    lengths = [7, 1, 5, 2, 9]
    x, cu_seqlens, bound = packed(lengths, bound=BOUND)
    together = call(ours, x, cu_seqlens, bound)
    parts = [call(ours, *packed_part(x, cu_seqlens, i), bound) for i in range(len(lengths))]
    assert torch.equal(together, torch.cat(parts))
    assert torch.equal(together, call(model, x, cu_seqlens, bound))


def packed_part(x: torch.Tensor, cu_seqlens: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Segment `i` alone."""
    start, end = int(cu_seqlens[i]), int(cu_seqlens[i + 1])
    return x[start:end], torch.tensor([0, end - start], dtype=torch.int32)


def test_what_lies_outside_the_graph_is_not_skipped() -> None:
    """Normalisation in front and behind, in the caller's forward, stays part of the public call (hazard 9)."""

    class Public(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = torch.compile(
                toy_tower(1),
                backend="vit_cudagraph",
                options={"compiler": "eager", "splitting_ops": [COUNTING_NAME], "token_budgets": BUDGETS},
            )

        def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
            y = self.tower(x * 3, cu_seqlens, max_seqlen)
            return y / (y.norm(dim=-1, keepdim=True) + 1)

    public = Public()
    for lengths in ([5, 2], [9, 4], [3, 3]):
        x, cu_seqlens, bound = packed(lengths, bound=BOUND)
        y = call(toy_tower(1), x * 3, cu_seqlens, bound)
        want = y / (y.norm(dim=-1, keepdim=True) + 1)
        assert largest_difference(call(public, x, cu_seqlens, bound), want) <= 1e-6


def test_sizes_have_a_ladder_not_a_recording_each() -> None:
    """Thirty sizes cause as many captures as there are budgets (hazard 28)."""
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    with counters.expect(captures=len(BUDGETS) - 1, graphs_seen=0):
        for total in range(3, 33):
            call(ours, *packed([total - 1, 1], bound=BOUND))


def test_reasons_add_up() -> None:
    """Every call has one kind; skips of calls without a graph are as many as those calls (hazard 36)."""
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    counters.reset()
    calls = 0
    for total in range(3, 50, 3):
        call(ours, *packed([total - 1, 1], bound=BOUND))
        calls += 1
    served = counters.exact_replays + counters.padded_replays + counters.uncaptured_calls + counters.plain_calls
    assert served == calls
    assert sum(counters.skips.values()) == counters.uncaptured_calls + counters.plain_calls


def test_addresses_are_stable() -> None:
    """Static inputs and results of a capture never move, whatever is called in between (hazard 6)."""
    _, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))

    def addresses() -> dict[str, list[int]]:
        return {
            capture.label: [b.tensor.data_ptr() for b in capture.inputs.buffers]
            + [b.data_ptr() for b in capture.results.buffers.values()]
            for encoder in encoders()
            for capture in encoder.captures()
        }

    before = addresses()
    for total in (7, 12, 30, 8, 40, 3):
        call(ours, *packed([total - 1, 1], bound=BOUND))
    after = addresses()
    assert {label: after[label] for label in before} == before


def test_a_tower_called_from_a_compiled_caller() -> None:
    """The compiled tower inside another compiled function is right."""
    model = toy_tower(1)
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)

    @torch.compile(backend="eager")
    def caller(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return ours(x * 2, cu_seqlens, BOUND) - 1

    for lengths in ([5, 2], [9, 4]):
        x, cu_seqlens, bound = packed(lengths, bound=BOUND)
        assert torch.equal(call(caller, x, cu_seqlens), call(model, x * 2, cu_seqlens, bound) - 1)


def test_deep_copies_are_independent() -> None:
    """A deep copy of a model, compiled as well, has its own weights and captures."""
    import copy

    model, ours = compiled_toy(depth=1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.neg_()
    twins = compiled(twin, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    args = packed([5, 2], bound=BOUND)
    for _ in range(2):
        assert torch.equal(call(ours, *args), call(model, *args))
        assert torch.equal(call(twins, *args), call(twin, *args))


def test_attention_that_leaves_garbage_behind() -> None:
    """An op that leaves rows past the last boundary as NaN harms neither padding nor later layers (hazards 3, 40)."""
    model = GarbageTower()
    ours = compiled(model, mode="piecewise", splitting_ops=["vit_compile_test::garbage_attention"], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    for lengths in ([3, 2], [16, 13], [3, 2], [8, 0], [4, 2]):
        x, cu_seqlens, _ = packed(lengths)
        assert torch.equal(call(ours, x, cu_seqlens), call(model, x, cu_seqlens)), lengths
    assert counters.padded_replays >= 4
    for encoder in encoders():
        for capture in encoder.captures():
            assert all(bool(buffer.isfinite().all()) for buffer in capture.results.buffers.values())


@torch.library.custom_op("vit_compile_test::garbage_attention", mutates_args=())
def garbage_attention(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`counting_attention` that leaves what is past the last boundary unwritten (here: NaN)."""
    out = counting_attention(x, cu_seqlens, 1 << 20)
    out[int(cu_seqlens[-1]) :] = float("nan")
    return out


@garbage_attention.register_fake
def _(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class GarbageTower(nn.Module):
    """Two layers with an attention op that leaves garbage."""

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.remainder(garbage_attention(x * 2, cu_seqlens) + 1, 64)
        return x


def test_the_garbage_op_is_what_it_says() -> None:
    """The op of the test above is exact inside and NaN behind."""
    x, cu_seqlens, _ = packed([3, 2])
    wide = torch.cat([x, toy_rows(4)])
    out = garbage_attention(wide, cu_seqlens)
    assert torch.equal(out[:5], counting_attention(x, cu_seqlens, BOUND))
    assert bool(out[5:].isnan().all())
