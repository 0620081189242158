"""Padding is tried out: what mixes rows is found, what does not is let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vit_compile
from tests import towers
from tests.backend.common import (
    BOUND,
    BUDGETS,
    Traced,
    call,
    compiled,
    compiled_toy,
    dynamic,
    largest_difference,
    packed,
    trace_dynamic,
    traced,
    wide_rows,
)
from tests.towers import COUNTING_NAME, counting_attention, row_mixing_tower, toy_tower
from vit_compile import counters
from vit_compile.backend.capture import FullCapture
from vit_compile.backend.padding import padded_env, trim
from vit_compile.backend.proof import bits_equal, prove_count, prove_garbage, real_outputs, smaller_call
from vit_compile.errors import SkipError
from vit_compile.stats import Skip

TOLERANCE = 1e-5


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("kind", towers.ROW_MIXERS)
def test_row_mixing_towers_are_never_padded(kind: str, mode: str) -> None:
    """A tower whose rows depend on all rows or their number: padding is found unsafe, and every size is right afterwards."""
    model = row_mixing_tower(kind)
    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
    for seed, lengths in enumerate([[3, 2], [5, 3], [16], [9], [20, 12], [40], [2, 2]]):
        args = packed(lengths, make=wide_rows, bound=BOUND, seed=seed)
        assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE, lengths
    assert counters.padded_replays == 0
    assert counters.skips.get("padding-unsafe", 0) > 0
    # 8, 16 and 32 rows are capture sizes: they need no padding and still replay.
    assert counters.exact_replays == 3


@pytest.mark.parametrize("kind", ["mean", "softmax"])
def test_the_reason_names_the_piece_or_the_output(kind: str) -> None:
    """The skip says where real rows first changed."""
    ours = compiled(row_mixing_tower(kind), mode="full", token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
    record = vit_compile.last_call()
    assert record is not None
    assert record.reason is not None
    assert record.reason.startswith("padding-unsafe")
    assert kind in record.reason or "submod_0" in record.reason


@pytest.mark.parametrize("kind", towers.ROW_MIXERS)
def test_strict_raises_where_padding_is_unsafe(kind: str) -> None:
    """`strict=True` refuses instead of running without a graph, at this and at every later call."""
    ours = compiled(row_mixing_tower(kind), token_budgets=BUDGETS, strict=True)
    for _ in range(2):
        with pytest.raises(SkipError, match="padding-unsafe"):
            trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))


def test_padding_that_was_seen_unsafe_stays_off_after_warmup() -> None:
    """`warmup` finds it out before traffic; exact sizes are captured all the same."""
    model = row_mixing_tower("mean")
    ours = compiled(model, token_budgets=BUDGETS)
    report = vit_compile.warmup(ours, *packed([5, 3], make=wide_rows, bound=BOUND), progress=False)
    assert "padding-unsafe" in {skip.code for skip in report.skips}
    for lengths in ([5, 2], [4, 4], [10], [16], [32]):
        args = packed(lengths, make=wide_rows, bound=BOUND)
        assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE, lengths
    assert counters.padded_replays == 0


Mixer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MIXERS: dict[str, Mixer] = {
    "sum": lambda x, cu: x + x.sum(0),
    "max": lambda x, cu: x + x.amax(0),
    "min": lambda x, cu: x - x.amin(0),
    "cumsum from the end": lambda x, cu: x.flip(0).cumsum(0).flip(0),
    "last row": lambda x, cu: x + x[-1],
    "mean square": lambda x, cu: x * x.square().mean(),
    "layer norm over rows": lambda x, cu: (x - x.mean(0)) / (x.std(0) + 1),
    "count": lambda x, cu: x * x.shape[0],
    "positions from the count": lambda x, cu: x + torch.arange(x.shape[0])[:, None] / x.shape[0],
    "count of segments": lambda x, cu: x * cu.shape[0],
    "matrix of all rows": lambda x, cu: x @ (x.T @ x),
    "sort": lambda x, cu: x.sort(0).values,
    "roll": lambda x, cu: x.roll(1, 0),
}


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("name", MIXERS)
def test_every_way_to_mix_rows_gives_right_numbers(name: str, mode: str) -> None:
    """Whatever makes a row depend on others, on their number or on that of the segments: results are eager's."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        x = MIXERS[name](x * 2 + 1, cu_seqlens)
        heads = x.unflatten(1, (2, -1))
        out = towers.varlen_attention(heads, heads, heads, cu_seqlens, BOUND, 0.1)
        return out.flatten(1) + MIXERS[name](x, cu_seqlens)

    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    for start in ([2, 2, 2, 1], [5, 2]):
        trace_dynamic(ours, *packed(start, make=wide_rows)[:2])
        for seed, lengths in enumerate([[3, 2], [5, 3], [9], [2, 2, 2, 2, 2], [20, 10], [1, 1, 3], [4, 1, 1, 1]]):
            args = packed(lengths, make=wide_rows, seed=seed)[:2]
            want = call(model, *args)
            assert largest_difference(call(ours, *args), want) <= 1e-5 * max(1.0, float(want.abs().max())), lengths
        torch.compiler.reset()


def test_the_number_of_segments_is_part_of_the_proof() -> None:
    """A result that depends on how many segments there are is found, also when the first call fills the capacity exactly."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x * 2, cu_seqlens, BOUND) * cu_seqlens.shape[0]

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([2, 2, 2, 1])[:2])  # four segments: the smallest capacity, so none is padded
    for lengths in ([2, 2, 2, 2], [4, 3], [1, 2, 4]):
        args = packed(lengths)[:2]
        assert torch.equal(call(ours, *args), model(*args)), lengths


def test_padding_is_not_trusted_where_it_was_not_tried() -> None:
    """Rows in multiples of five: a size that no trial could cover is not padded to on faith."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        y = counting_attention(x + x.sum(0), cu_seqlens, BOUND)  # reads the padding, which happens to be zero
        return y.view(-1, 5, y.shape[1]).flatten(0, 1)

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=(25, 50))
    trace_dynamic(ours, *packed([15, 5])[:2])
    args = packed([15, 5])[:2]
    assert torch.equal(call(ours, *args), model(*args))
    assert counters.padded_replays == 0, "padding that changes real rows was used"


def plain_tower(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Rows stay apart."""
    return counting_attention(x * 2, cu_seqlens, BOUND) + 1


def mixing_tower(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Reads the padding, which is zero unless something poisons it: only garbage shows it."""
    return counting_attention(x + x.sum(0), cu_seqlens, BOUND)


def counting_tower(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Depends on the number of rows alone: no garbage shows it."""
    return counting_attention(x * x.shape[0], cu_seqlens, BOUND)


def trial(model: Callable[..., Any], lengths: list[int], rows: int = 16) -> tuple[Traced, FullCapture, list[Any], Any]:
    """A traced model, an unrecorded capture of `rows` rows, and a call."""
    found = traced(model, *dynamic(packed([5, 3, 3])[:2]))
    args = found.args(*packed(lengths)[:2])
    env = found.table.read(args)
    target = padded_env(found.program, found.roles, env, rows, pad_segments=True)
    assert not isinstance(target, Skip)
    return found, FullCapture(found.program, found.roles, target, None, {}), args, env


def garbage(model: Callable[..., Any], nan: bool = True) -> Skip | None:
    """The garbage trial of a model, run straight through its pieces."""
    found, capture, args, env = trial(model, [5, 4])
    skip = prove_garbage(found.program, found.roles, capture, args, env, nan=nan)
    buffers = [b.tensor for b in capture.inputs.buffers if b.tensor.dim() == 2]
    assert not any(bool(tensor[9:].any()) for tensor in buffers), "the trial leaves clean buffers"
    return skip


def test_the_garbage_trial_passes_a_tower_that_keeps_rows_apart() -> None:
    """No false alarm, NaN included."""
    assert garbage(plain_tower) is None


def test_the_garbage_trial_finds_a_reader_of_padding() -> None:
    """Zeros in the padding hide it; garbage does not, and the first piece that is touched is named."""
    skip = garbage(mixing_tower, nan=False)
    assert skip is not None
    assert skip.code == "padding-unsafe"
    assert "submod_0" in skip.detail


def test_the_garbage_trial_finds_a_bad_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture itself adds (a stale buffer, a wrong slice) counts: the trial looks at the replay's own outputs."""
    found, capture, args, env = trial(plain_tower, [5, 4])

    def leaky(substituted: list[Any], *_: Any) -> list[Any]:
        (out,) = found.program.run(substituted, capture.env, covering_bounds=True)
        x = next(b.tensor for b in capture.inputs.buffers if b.tensor.dim() == 2)
        return [out + x[-1]]

    monkeypatch.setattr(capture, "replay_filled", leaky)
    skip = prove_garbage(found.program, found.roles, capture, args, env, nan=False)
    assert skip is not None
    assert skip.code == "padding-unsafe"


def test_one_flipped_bit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is bitwise: the smallest difference of one real number fails the trial."""
    found, capture, args, env = trial(plain_tower, [5, 4])
    calls = []

    def off_by_one_bit(substituted: list[Any], *_: Any) -> list[Any]:
        (out,) = found.program.run(substituted, capture.env, covering_bounds=True)
        calls.append(out)
        if len(calls) == 2:
            out[3, 1] = torch.nextafter(out[3, 1], torch.tensor(1e9))
        return [out]

    monkeypatch.setattr(capture, "replay_filled", off_by_one_bit)
    assert prove_garbage(found.program, found.roles, capture, args, env, nan=False) is not None


def test_the_count_trial_finds_what_depends_on_the_count() -> None:
    """A factor that is the row count changes when the call is padded; the detail has both numbers of rows."""
    found, _, args, env = trial(counting_tower, [5, 4])
    skip = prove_count(found.program, found.roles, args, env, FullCapture)
    assert skip is not None
    assert skip.code == "padding-unsafe"
    assert "9" in skip.detail


def test_the_count_trial_passes_a_tower_that_keeps_rows_apart() -> None:
    """No false alarm."""
    found, _, args, env = trial(plain_tower, [5, 4])
    assert prove_count(found.program, found.roles, args, env, FullCapture) is None


@pytest.mark.parametrize("factor", [1e-2, 1e-3, 1e-4])
def test_small_dependence_on_the_count_is_found_in_float32(factor: float) -> None:
    """Numbers above the rounding of another kernel that follow the row count are not let through."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x * (1 + factor * x.shape[0]), cu_seqlens, BOUND)

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    args = packed([5, 4])[:2]
    got, want = call(ours, *args), model(*args)
    assert float((got - want).norm() / want.norm()) <= 1e-5


def test_smaller_calls_respect_the_traced_guards() -> None:
    """Half of the capture's rows, rounded to what the graph allows; None where nothing smaller is allowed."""

    def merged(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x * 2, cu_seqlens, BOUND).view(-1, 4, x.shape[1])

    found = traced(merged, *dynamic(packed([8, 4, 12])[:2]))
    args = found.args(*packed([16, 8])[:2])
    made = smaller_call(args, found.program, found.roles, found.table.read(args), 24)
    assert made is not None
    rows = found.roles.rows(made[1])
    assert rows is not None
    assert 0 < rows < 24
    assert rows % 4 == 0
    args = found.args(*packed([4, 4])[:2])
    assert smaller_call(args, found.program, found.roles, found.table.read(args), 4) is None


def test_trim_takes_the_front_and_copies_nothing() -> None:
    """Real rows in front, in every dimension, as a view."""
    value = torch.arange(24.0).view(4, 6)
    front = trim(value, (2, 5))
    assert torch.equal(front, value[:2, :5])
    assert front.data_ptr() == value.data_ptr()
    assert trim(value, (4, 6)) is value


def test_bits() -> None:
    """NaN equals itself, zeros of different sign differ, dtypes and shapes must agree, empty tensors are equal."""
    nan = torch.tensor([float("nan"), 1.0])
    assert bits_equal(nan, nan.clone())
    assert not bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bits_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not bits_equal(torch.zeros(2), torch.zeros(3))
    assert bits_equal(torch.zeros(0, 4), torch.zeros(0, 4))
    assert bits_equal(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous())
    assert bits_equal(torch.tensor([True]), torch.tensor([True]))


def test_real_outputs_skips_what_is_no_tensor() -> None:
    """Only tensors are compared, each cut to its real rows."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, int, None]:
        return counting_attention(x, cu_seqlens, BOUND) + 1, x.shape[0], None

    found, capture, args, env = trial(model, [5, 4])
    values = found.program.run(capture.inputs.substitute(args), capture.env)
    (only,) = real_outputs(found.program, values, env)
    assert only.shape[0] == 9


@pytest.mark.parametrize("garbage_value", [float("nan"), 1e30])
def test_poisoned_padding_never_reaches_outputs(garbage_value: float) -> None:
    """With garbage in every padding row of every buffer, right before a replay, the outputs are unchanged, bit for bit."""
    model, ours = compiled_toy()
    args = packed([5, 4], bound=BOUND)
    trace_dynamic(ours, *args)
    from vit_compile.backend.encoder import encoders

    captures = [capture for encoder in encoders() for capture in encoder.captures()]
    assert captures
    for capture in captures:
        for buffer in capture.inputs.buffers:
            if buffer.tensor.dtype.is_floating_point:
                buffer.tensor[sum([5, 4]) :] = garbage_value
    assert torch.equal(call(ours, *args), call(model, *args))
    assert counters.padded_replays == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 5))
def test_any_layout_is_eagers_bit_for_bit(lengths: list[int], seed: int) -> None:
    """Random layouts of one compiled toy tower, in any order, give the untouched tower's bits."""
    model, ours = _property_tower()
    args = packed(lengths, bound=BOUND, seed=seed)
    assert torch.equal(call(ours, *args), call(model, *args))


_towers: list[Any] = []


def _property_tower() -> Any:
    """One compiled tower for all examples."""
    if not _towers:
        model, ours = compiled_toy()
        trace_dynamic(ours, *packed([5, 4], bound=BOUND))
        _towers.append((model, ours))
    return _towers[0]


def test_proofs_happen_once_per_capture() -> None:
    """Trials cost attention calls at capture time only: a replay runs attention once per layer."""
    depth = 2
    model = toy_tower(depth)
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 4], bound=BOUND))
    towers.COUNTING_CALLS.reset()
    for _ in range(5):
        call(ours, *packed([5, 4], bound=BOUND))
    assert towers.COUNTING_CALLS.calls == 5 * depth
