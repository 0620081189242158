"""Bad input is an error of the catalogue before any work, and nothing captured is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backend.common import BOUND, BUDGETS, call, compiled, compiled_toy, packed, trace_dynamic
from tests.towers import COUNTING_NAME, counting_attention, toy_rows
from vit_compile import counters
from vit_compile.backend.checks import check_boundaries, device_of
from vit_compile.errors import BoundariesError, BoundError, InputMismatchError


def cu(*offsets: int) -> torch.Tensor:
    """int32 boundaries."""
    return torch.tensor(offsets, dtype=torch.int32)


BAD: dict[str, tuple[torch.Tensor, str]] = {
    "decreases": (cu(0, 6, 4, 8), "decreases from 6 to 4 at position 2"),
    "padded with zeros": (cu(0, 5, 8, 0), "decreases from 8 to 0"),
    "does not start at 0": (cu(1, 5, 6, 8), "starts at 1"),
    "ends early": (cu(0, 5, 6, 7), "ends at 7, but there are 8 rows"),
    "ends late": (cu(0, 5, 6, 9), "ends at 9, but there are 8 rows"),
    "negative": (cu(0, -1, 6, 8), "decreases from 0 to -1"),
}


@pytest.mark.parametrize("checks", ["host", "full"])
@pytest.mark.parametrize("mode", ["piecewise", "none"])
@pytest.mark.parametrize("case", BAD)
def test_bad_boundaries_are_an_error(case: str, mode: str, checks: str) -> None:
    """Boundaries that decrease, do not start at 0 or do not end at the rows are refused with the numbers, in every mode."""
    model, ours = compiled_toy(mode=mode, token_budgets=None if mode == "none" else BUDGETS, checks=checks)
    good = packed([5, 1, 2], bound=BOUND)
    trace_dynamic(ours, *good)
    boundaries, message = BAD[case]
    for _ in range(2):
        with pytest.raises(BoundariesError, match=message):
            call(ours, good[0], boundaries, BOUND)
    assert torch.equal(call(ours, *good), call(model, *good))


def test_bad_boundaries_before_anything_was_captured() -> None:
    """The check comes before the first capture too: the bad call captures nothing, the next good one is right."""
    model, ours = compiled_toy()
    with counters.expect(captures=0), pytest.raises(BoundariesError):
        call(ours, toy_rows(8), cu(0, 6, 4, 8), BOUND)
    good = packed([5, 1, 2], bound=BOUND)
    with counters.expect(captures=1):
        assert torch.equal(call(ours, *good), call(model, *good))


def test_a_bound_below_the_longest_segment_is_an_error() -> None:
    """Attention kernels skip rows silently; here the call is refused with both numbers (hazard 2)."""
    model, ours = compiled_toy()
    for lengths in ([5, 3], [6, 3], [7, 4]):  # until the bound is a symbol
        args = packed(lengths)
        assert torch.equal(call(ours, *args), call(model, *args))
    x, boundaries, _ = packed([3, 7, 2])
    with pytest.raises(BoundError, match=r"max_seqlen is 6.*7 rows"):
        call(ours, x, boundaries, 6)
    assert torch.equal(call(ours, x, boundaries, 7), call(model, x, boundaries, 7))


def test_a_literal_bound_is_checked_too() -> None:
    """A bound that is part of the model is compared with each call's longest segment."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x * 2, cu_seqlens, 6) + 1

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2])[:2])
    with pytest.raises(BoundError, match=r"max_seqlen is 6.*7 rows"):
        call(ours, *packed([7, 2])[:2])
    args = packed([6, 6])[:2]
    assert torch.equal(call(ours, *args), model(*args))


def test_each_boundary_input_is_checked_against_its_own_bound() -> None:
    """Windowed and full attention: a long window is refused, a long segment is fine."""

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        return counting_attention(counting_attention(x * 2, windows, 4), cu_seqlens, BOUND)

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    x = toy_rows(9)
    trace_dynamic(ours, x, cu(0, 4, 9), cu(0, 4, 8, 9))
    assert torch.equal(call(ours, x, cu(0, 0, 9), cu(0, 3, 6, 9)), model(x, cu(0, 0, 9), cu(0, 3, 6, 9)))
    with pytest.raises(BoundError, match="windows"):
        call(ours, x, cu(0, 4, 9), cu(0, 5, 8, 9))
    with pytest.raises(BoundariesError, match="windows"):
        call(ours, x, cu(0, 4, 9), cu(0, 4, 7, 8))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, b: (x.double(), b),
        lambda x, b: (x.half(), b),
        lambda x, b: (x, b.long()),
        lambda x, b: (x[None], b),
        lambda x, b: (x.to("meta"), b),
        lambda x, b: (x[:, :1], b),
        lambda x, b: (x[:, :4], b),
    ],
    ids=["float64", "float16", "int64 boundaries", "another rank", "another device", "one channel", "four channels"],
)
def test_mismatched_inputs_are_an_error_where_guards_are_skipped(spoil: Any) -> None:
    """With Dynamo's guards skipped, a tensor of another dtype, rank, device or fixed size is refused, and nothing is lost."""
    # Dynamo's own option, which servers use: it never reaches the backend.
    model, ours = compiled_toy(guard_filter_fn=torch.compiler.skip_all_guards_unsafe)
    x, boundaries, bound = packed([5, 1, 3], bound=BOUND)
    trace_dynamic(ours, x, boundaries, bound)
    for _ in range(2):
        with pytest.raises(InputMismatchError, match="traced"):
            call(ours, *spoil(x, boundaries), bound)
    with counters.expect(captures=0, padded_replays=1):
        assert torch.equal(call(ours, x, boundaries, bound), call(model, x, boundaries, bound))


def test_nothing_captured_is_lost_after_errors() -> None:
    """After every kind of error the held captures replay: no new trace, no new capture."""
    model, ours = compiled_toy()
    good = [packed(lengths, bound=BOUND) for lengths in ([5, 2], [9, 4], [20, 3])]
    for args in good:
        trace_dynamic(ours, *args)
    with pytest.raises(BoundariesError):
        call(ours, toy_rows(8), cu(0, 6, 8, 4), BOUND)
    with pytest.raises(BoundariesError):
        call(ours, toy_rows(8), cu(0, 6, 7), BOUND)
    with counters.expect(captures=0, recaptures=0, graphs_seen=0, padded_replays=len(good), exact_replays=0):
        for args in good:
            assert torch.equal(call(ours, *args), call(model, *args))


def test_good_boundaries() -> None:
    """Empty segments, one segment, repeated ends and no rows are all legal."""
    for offsets, rows in (([0, 8], 8), ([0, 0, 3, 3, 8, 8, 8], 8), ([0], 0), ([0, 0], 0)):
        check_boundaries(offsets, rows)


def test_boundaries_without_values() -> None:
    """An empty tensor has no first offset."""
    with pytest.raises(BoundariesError, match="nothing"):
        check_boundaries([], 0)


def test_device_of_a_call() -> None:
    """The CPU unless a tensor is elsewhere."""
    assert device_of([1, torch.zeros(2)]) == torch.device("cpu")
    assert device_of([]) == torch.device("cpu")
    assert device_of([torch.zeros(2), torch.zeros(2, device="meta")]) == torch.device("meta")
