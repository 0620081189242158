"""The public call, `torch.compile(..., backend="vit_cudagraph")`, against the untouched model in eager."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vit_compile
from tests import towers
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
    traced,
    wide_rows,
)
from tests.towers import COUNTING_NAME, boundaries, norm_view_tower, toy_tower
from vit_compile import counters
from vit_compile.backend.entry import _never
from vit_compile.errors import OptionError, SkipError
from vit_compile.options import MODES

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
LAYOUTS = [[5, 3], [4, 4], [3, 4, 5], [20], [2], [16, 16], [7, 0, 9], [40, 4], [1]]


def test_a_fresh_process_needs_no_import() -> None:
    """torch.compile finds the backend by its name in a process that never imports the package."""
    code = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).eval()
assert "vit_compile" not in sys.modules
compiled = torch.compile(model, backend="vit_cudagraph", options={"token_budgets": [4, 8], "compiler": "eager"})
with torch.no_grad():
    for rows in (3, 4, 5, 6, 9):
        x = torch.randn(rows, 4)
        assert torch.allclose(compiled(x), model(x), atol=1e-6), rows
counts = sys.modules["vit_compile"].counters
assert counts.captures > 0 and counts.padded_replays > 0 and counts.uncaptured_calls == 1, counts.snapshot()
print("served")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served"


@pytest.mark.parametrize("compiler", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_compiler_gives_the_models_numbers(mode: str, compiler: str) -> None:
    """A tower whose norms do `view(q.shape)` gives eager's features for every layout, whatever mode and compiler."""
    model = norm_view_tower(depth=2)
    ours = compiled(model, mode=mode, compiler=compiler, **({} if mode == "none" else {"token_budgets": BUDGETS}))
    for seed, lengths in enumerate(LAYOUTS):
        args = packed(lengths, make=wide_rows, seed=seed)
        assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE, lengths
    assert (counters.captures == 0) == (mode == "none")
    assert (counters.padded_replays == 0) == (mode == "none")


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_inductor_gives_the_models_numbers(mode: str) -> None:
    """The same through Inductor, with dynamic rows from the first call on: one trace serves every layout."""
    model = norm_view_tower(depth=2)
    ours = compiled(model, mode=mode, compiler="inductor", token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([6, 7], make=wide_rows, bound=BOUND))
    with counters.expect(graphs_seen=0, piece_compiles=0):
        for seed, lengths in enumerate([[5, 3], [3, 4, 5], [20], [2], [16, 16], [40, 4]]):
            args = packed(lengths, make=wide_rows, bound=BOUND, seed=seed)
            assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE, lengths
    assert counters.padded_replays > 0


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_everything_symbolic_is_survived(compiler: str) -> None:
    """`dynamic=True` makes the bound, and even epsilons, symbolic; the numbers stay right, and AOT's pieces are replayed."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, mode="piecewise", compiler=compiler, token_budgets=BUDGETS, dynamic=True)
    for seed, lengths in enumerate([[5, 3], [3, 4, 5], [20], [16, 16], [40, 4]]):
        args = packed(lengths, make=wide_rows, seed=seed)
        assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE, lengths
    assert compiler == "eager" or counters.exact_replays + counters.padded_replays >= 4


def test_torch_compiles_own_mode_is_taken() -> None:
    """`torch.compile(mode=...)` means the same as `options={"mode": ...}`."""
    model = norm_view_tower(depth=1)
    ours = torch.compile(model, backend="vit_cudagraph", mode="none")
    args = packed([4, 3], make=wide_rows)
    with counters.expect(uncaptured_calls=1, captures=0):
        assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"budgets": [8]}, "token_budgets"),
        ({"mode": "fast"}, "piecewise"),
        ({"token_budgets": []}, "token_budgets"),
        ({"mode": "none", "token_budgets": [8]}, "token_budgets"),
        ({"passes": ["fuse"]}, "patch_embedding_gemm"),
        ({"compiler": "onnx"}, "aot_eager"),
        ({"strict": 1}, "strict"),
    ],
)
def test_option_errors_come_out_of_the_call(options: dict[str, Any], named: str) -> None:
    """A wrong option is an OptionError that names what is allowed, from the first call and from every later one."""
    ours = torch.compile(norm_view_tower(depth=1), backend="vit_cudagraph", options=options)
    for _ in range(2):
        with pytest.raises(OptionError, match=named):
            call(ours, *packed([4, 3], make=wide_rows))


def test_rows_that_do_not_divide_are_an_error_of_the_call() -> None:
    """A budget whose patches do not make whole rows is refused, with both numbers, before anything runs."""
    ours = compiled(nn.Linear(4, 4), token_budgets=[6], patches_per_row=4)
    with pytest.raises(ValueError, match=r"6.*4"):
        call(ours, torch.zeros(2, 4))


def test_an_unknown_mode_of_torch_compile_is_an_error() -> None:
    """Inductor's modes are not this backend's."""
    ours = torch.compile(nn.Linear(4, 4), backend="vit_cudagraph", mode="reduce-overhead")
    with pytest.raises(OptionError, match="reduce-overhead"):
        call(ours, torch.zeros(2, 4))


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_dataclass_outputs_and_keyword_arguments(mode: str) -> None:
    """Keyword-only arguments go in; a dataclass with a tensor, a tuple and a None comes out, of the same type."""
    model = towers.dataclass_tower()
    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    for seed, lengths in enumerate([[5, 3], [3, 4, 5], [2, 9]]):
        x, cu_seqlens, longest = packed(lengths, make=wide_rows, seed=seed)
        got = call(ours, patches=x, cu_seqlens=cu_seqlens, max_seqlen=longest)
        want = call(model, patches=x, cu_seqlens=cu_seqlens, max_seqlen=longest)
        assert type(got) is type(want)
        assert isinstance(got.layers, tuple)
        assert got.pooled is None
        assert largest_difference(got, want) <= TOLERANCE


class ManyOutputs(nn.Module):
    """A tensor, an int, a None, a nested list, the input itself and a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = toy_tower(1)
        self.extra = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> tuple[Any, ...]:
        y = self.tower(x, cu_seqlens, max_seqlen)
        return y, x.shape[0], None, [y * 2, {"half": y[: x.shape[0] // 2]}], x, self.extra


def test_every_kind_of_output() -> None:
    """Integers, None, nested containers, the input itself and a weight come out as in eager."""
    model = ManyOutputs()
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    for seed, lengths in enumerate([[5, 3], [6, 6], [3, 4, 2, 1], [14]]):
        args = packed(lengths, seed=seed)
        got, want = call(ours, *args), call(model, *args)
        assert got[1] == want[1] == sum(lengths)
        assert got[2] is None
        assert got[4] is args[0]
        assert got[5].data_ptr() == model.extra.data_ptr()
        assert largest_difference(got, want) == 0
    assert counters.padded_replays > 0


def test_a_graph_break_makes_two_graphs() -> None:
    """A part that cannot be traced splits the frame: both graphs are served, and the numbers are eager's."""
    model = towers.graph_break_tower()
    ours = compiled(model, mode="auto", token_budgets=BUDGETS)
    x, cu_seqlens, bound = packed([5, 3], make=wide_rows, bound=BOUND)
    with counters.expect(graphs_seen=2, exact_replays=2):
        assert largest_difference(call(ours, x, cu_seqlens, bound), call(model, x, cu_seqlens, bound)) <= TOLERANCE
    for lengths in ([3, 4, 5], [20], [2, 7]):
        args = packed(lengths, make=wide_rows, bound=BOUND)
        assert largest_difference(call(ours, *args), call(model, *args)) <= TOLERANCE
    assert counters.plain_calls == 0
    assert counters.padded_replays > 0


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_captured_host_read_runs_plain(compiler: str) -> None:
    """A graph with a host read inside is not captured: Skip "host-read", and right numbers."""
    model = towers.host_read_tower()
    ours = compiled(model, compiler=compiler, token_budgets=BUDGETS)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for lengths in ([5, 3], [3, 4, 5], [4, 4]):
            args = packed(lengths, make=wide_rows)
            with counters.expect(plain_calls=1, captures=0, skips={"host-read": 1}):
                assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-4
    record = vit_compile.last_call()
    assert record is not None
    assert record.kind == "plain"
    assert record.reason is not None
    assert "item" in record.reason


def test_a_host_read_outside_breaks_the_graph() -> None:
    """By default a host read breaks the graph: the rest is served, and the numbers are eager's."""
    model = towers.host_read_tower()
    ours = compiled(model, token_budgets=BUDGETS)
    for lengths in ([5, 3], [3, 4, 5], [4, 4]):
        args = packed(lengths, make=wide_rows)
        assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-4


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_gradients_are_eagers(compiler: str) -> None:
    """Where gradients are wanted, the plain path runs, is counted, and stays differentiable with eager's gradients."""
    model, ours_model = norm_view_tower(depth=1), norm_view_tower(depth=1)
    ours = compiled(ours_model, compiler=compiler, token_budgets=BUDGETS)
    args = packed([5, 3], make=wide_rows)
    model(*args).square().sum().backward()
    with counters.expect(plain_calls=1, captures=0, skips={"gradients": 1}):
        ours(*args).square().sum().backward()
    for (name, mine), theirs in zip(ours_model.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)
    record = vit_compile.last_call()
    assert record is not None
    assert (record.kind, (record.reason or "").split(":")[0]) == ("plain", "gradients")


def test_gradients_of_the_input_alone() -> None:
    """Frozen weights and an input that requires a gradient: the plain path too."""
    model = norm_view_tower(depth=1).requires_grad_(False)
    ours = compiled(model, token_budgets=BUDGETS)
    x, cu_seqlens, longest = packed([5, 3], make=wide_rows)
    grads = []
    for function in (model, ours):
        leaf = x.clone().requires_grad_()
        function(leaf, cu_seqlens, longest).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-4, rtol=1e-4)
    assert counters.skips == {"gradients": 1}


def test_frozen_weights_are_captured_with_gradients_on() -> None:
    """Nothing requires a gradient, so nothing is lost by a replay, with or without no_grad."""
    model = norm_view_tower(depth=1).requires_grad_(False)
    ours = compiled(model, token_budgets=BUDGETS)
    args = packed([5, 3], make=wide_rows)
    with counters.expect(exact_replays=1, plain_calls=0):
        assert largest_difference(ours(*args), model(*args)) <= TOLERANCE


def test_gradients_then_none_then_gradients() -> None:
    """Switching between training and inference serves each as it should, without spoiling the other."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, token_budgets=BUDGETS)
    args = packed([5, 3], make=wide_rows)
    for _ in range(2):
        with counters.expect(plain_calls=1, exact_replays=1):
            assert ours(*args).requires_grad
            got = call(ours, *args)
        assert not got.requires_grad
        assert largest_difference(got, call(model, *args)) <= TOLERANCE


class DropoutTower(nn.Module):
    """A toy tower behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.dropout = toy_tower(1), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return self.tower(self.dropout(x), cu_seqlens, max_seqlen)


def test_dropout_in_train_mode_is_not_frozen() -> None:
    """Train mode under no_grad: Skip "rng", every call draws anew, and a seed gives eager's numbers."""
    model = DropoutTower().train()
    ours = compiled(model, splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    args = packed([5, 3])
    with counters.expect(plain_calls=2, captures=0, skips={"rng": 2}):
        assert not torch.equal(call(ours, *args), call(ours, *args))
    torch.manual_seed(3)
    want = call(model, *args)
    torch.manual_seed(3)
    assert torch.equal(call(ours, *args), want)
    model.eval()
    with counters.expect(plain_calls=0, exact_replays=1):
        assert torch.equal(call(ours, *args), call(model, *args))


def test_random_numbers_in_eval_mode_are_not_frozen() -> None:
    """A graph that draws noise itself is not captured either."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    ours = compiled(noisy, token_budgets=BUDGETS)
    x = torch.zeros(8, 4)
    with counters.expect(captures=0, skips={"rng": 2}):
        assert not torch.equal(call(ours, x), call(ours, x))


def test_attention_dropout_in_train_mode_is_not_frozen() -> None:
    """The attention call between two pieces draws random numbers: that is found as well."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x + 1, x, x, dropout_p=0.5)

    ours = compiled(attend, mode="full", token_budgets=BUDGETS)
    x = torch.randn(8, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    outputs = [call(ours, x) for _ in range(2)]
    assert not torch.equal(*outputs)
    assert counters.captures == 0
    assert set(counters.skips) == {"rng"}


def test_writing_into_an_input_is_kept() -> None:
    """A graph that writes into its input runs plain: the caller's tensor changes as in eager."""

    def writes(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        x.mul_(2)
        return towers.counting_attention(x, cu_seqlens, max_seqlen)

    ours = compiled(writes, splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    for lengths in ([5, 3], [3, 4, 5]):
        x, cu_seqlens, longest = packed(lengths)
        eager = x.clone()
        want = writes(eager, cu_seqlens, longest)
        with counters.expect(plain_calls=1, skips={"input-mutation": 1}):
            assert torch.equal(call(ours, x, cu_seqlens, longest), want)
        assert torch.equal(x, eager)


def test_writing_into_an_input_through_a_view_from_an_earlier_piece_is_kept() -> None:
    """A view made before attention and written to after it is still the caller's tensor."""

    def writes(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        view = x.view(x.shape[0], 2, 4)
        attended = towers.counting_attention(x + 1, cu_seqlens, max_seqlen)
        view.add_(1)
        return attended + view.flatten(1)

    ours = compiled(writes, splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    for lengths in ([5, 3], [3, 4, 5], [5, 3]):
        x, cu_seqlens, longest = packed(lengths)
        eager = x.clone()
        want = writes(eager, cu_seqlens, longest)
        assert torch.equal(call(ours, x, cu_seqlens, longest), want), lengths
        assert torch.equal(x, eager), lengths


def test_writing_between_pieces_is_fine() -> None:
    """In-place arithmetic on values that the graph made itself is captured, and repeated replays stay right."""

    def residual(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        hidden = x * 2
        attended = towers.counting_attention(hidden, cu_seqlens, max_seqlen)
        attended.mul_(3).add_(1)
        hidden += attended
        return towers.counting_attention(hidden, cu_seqlens, max_seqlen) + attended

    ours = compiled(residual, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    for seed in range(12):
        args = packed([[5, 3], [3, 4, 5], [2, 2], [16, 1]][seed % 4], seed=seed)
        assert torch.equal(call(ours, *args), residual(*args)), seed
    assert counters.plain_calls == 0
    assert counters.padded_replays > 0


def test_running_statistics_are_kept() -> None:
    """A batch norm in train mode updates its buffers: the plain path does that as eager does."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = compiled(models[1], token_budgets=BUDGETS)
    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        assert largest_difference(call(ours, x), call(models[0], x)) <= TOLERANCE
    assert largest_difference(list(models[1].buffers()), list(models[0].buffers())) <= TOLERANCE
    assert counters.captures == 0
    assert set(counters.skips) == {"input-mutation"}


def test_a_float_that_follows_the_size_is_right() -> None:
    """A Python float computed from the row count crosses a piece border: whatever path serves it, numbers are right."""

    def scaled(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        scale = x.shape[0] ** 0.5
        return towers.counting_attention(x * 2, cu_seqlens, max_seqlen) * scale

    ours = compiled(scaled, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    for lengths in ([5, 3], [3, 4, 5], [6, 4], [9]):
        args = packed(lengths)
        torch.testing.assert_close(call(ours, *args), scaled(*args), atol=0, rtol=1e-6)


def test_autocast_is_eagers() -> None:
    """Under autocast the features have eager's dtype and numbers."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, mode="piecewise", token_budgets=BUDGETS)
    for lengths in ([5, 3], [3, 4, 5], [6, 4]):
        args = packed(lengths, make=wide_rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-2
    assert counters.padded_replays > 0


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_tiny_batches(rows: int) -> None:
    """No rows, one row and two rows work, alone and after others were seen."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    for first in (rows, 5):
        torch.compiler.reset()
        ours = compiled(model, token_budgets=BUDGETS)
        for count in (first, 3, rows):
            x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
            assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE


def test_no_rows_in_a_packed_tower() -> None:
    """A packed tower without any patch, with and without empty segments, gives an empty output."""
    model, ours = compiled_toy()
    for lengths in ([], [0], [0, 0, 0], [4, 4], [3, 5, 4], []):
        args = packed(lengths, bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args)), lengths


def test_strict_raises_instead_of_falling_back() -> None:
    """`strict=True` turns the skip into an error that carries its code, at every call; replays are unaffected."""
    model, ours = compiled_toy(strict=True)
    trace_dynamic(ours, *packed([5, 3], bound=BOUND))
    for _ in range(2):
        with pytest.raises(SkipError, match="too-large"):
            call(ours, *packed([40, 2], bound=BOUND))
        args = packed([6, 6], bound=BOUND)
        assert torch.equal(call(ours, *args), call(model, *args))


def test_strict_does_not_break_captures() -> None:
    """Under `strict` a skip of the whole graph is an error too."""
    ours = compiled(DropoutTower().train(), strict=True, splitting_ops=[COUNTING_NAME])
    with pytest.raises(SkipError, match="rng"):
        call(ours, *packed([5, 3]))


def test_an_unmatched_splitting_op_is_reported() -> None:
    """A name that matches nothing is a counted skip that lists the custom operations of the graph."""
    model = toy_tower(1)
    ours = compiled(model, splitting_ops=[COUNTING_NAME, "my::attention"], token_budgets=BUDGETS)
    args = packed([5, 3])
    with counters.expect(exact_replays=1, skips={"splitting-op-unmatched": 1}):
        assert torch.equal(call(ours, *args), call(model, *args))
    torch.compiler.reset()
    strict = compiled(model, splitting_ops=[COUNTING_NAME, "my::attention"], strict=True)
    with pytest.raises(SkipError, match=r"my::attention.*counting_attention"):
        call(strict, *args)


def test_full_mode_says_which_op_forbids_it() -> None:
    """An op that may plan on the host cannot be inside one graph: piecewise instead, and the skip names the op."""
    model = toy_tower(2)
    ours = compiled(model, mode="full", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    args = packed([5, 3])
    with counters.expect(skips={"attention-forbids-full": 1}, attention_calls_outside_graphs=2):
        assert torch.equal(call(ours, *args), call(model, *args))
    strict = compiled(model, mode="full", splitting_ops=[COUNTING_NAME], strict=True)
    torch.compiler.reset()
    with pytest.raises(SkipError, match=COUNTING_NAME):
        call(strict, *args)


def test_auto_mode_chooses_by_the_ops() -> None:
    """ "auto" is full where every attention op allows it, else piecewise, without a skip."""
    args = packed([5, 3], make=wide_rows)
    call(compiled(norm_view_tower(depth=1), token_budgets=BUDGETS), *args)
    record = vit_compile.last_call()
    assert record is not None
    assert (record.graph or "").startswith("full")
    _, ours = compiled_toy(mode="auto")
    call(ours, *packed([5, 3]))
    record = vit_compile.last_call()
    assert record is not None
    assert (record.graph or "").startswith("piecewise")
    assert counters.skips == {}


def test_a_model_without_attention_is_one_graph() -> None:
    """Nothing to split at: one piece, one graph, no attention outside."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    ours = compiled(model, token_budgets=BUDGETS)
    with counters.expect(pieces=1, distinct_pieces=1, attention_calls_outside_graphs=0, captures=1):
        call(ours, *dynamic([torch.randn(8, 4)]))


def test_functions_are_compiled_too() -> None:
    """A plain function without any weight is served like a module."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    ours = compiled(function, token_budgets=BUDGETS)
    for rows in (5, 8, 9, 33):
        x = torch.randn(rows, 4)
        assert torch.equal(call(ours, x), function(x))
    assert counters.padded_replays > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: torch.randint(0, 255, (rows, 6), dtype=torch.uint8),
        lambda rows: torch.randn(6, rows).t(),
        lambda rows: torch.randn(rows, 12)[:, ::2],
        lambda rows: torch.randn(rows, 6, dtype=torch.float64),
    ],
    ids=["uint8", "transposed", "strided", "float64"],
)
def test_layouts_and_dtypes_of_the_rows(make: Any) -> None:
    """Strides and dtypes of the input are kept, not assumed."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.double() * 2 + 1

    ours = compiled(function, token_budgets=BUDGETS)
    for rows in (5, 8, 9, 31):
        x = make(rows)
        got = call(ours, x)
        assert torch.equal(got, function(x))
    assert counters.padded_replays > 0


def test_an_expanded_input_is_served_without_a_graph() -> None:
    """Elements that share memory cannot have a buffer: Skip "input-layout", right numbers."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    ours = compiled(function, token_budgets=BUDGETS)
    x = torch.randn(8, 1).expand(8, 6)
    with counters.expect(captures=0, skips={"input-layout": 1}):
        assert torch.equal(call(ours, x), function(x))


def test_two_inputs_that_are_one_tensor() -> None:
    """The same tensor given twice is right, before and after it was given once."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 - y

    ours = compiled(function, token_budgets=BUDGETS)
    for rows in (5, 8, 11):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        for args in ((x, y), (x, x), (y, x)):
            assert torch.equal(call(ours, *args), function(*args))


def test_boundaries_with_a_fixed_capacity() -> None:
    """Boundaries that repeat their last value up to a fixed capacity make one trace for every number of segments."""
    model, ours = compiled_toy()
    trace_dynamic(ours, *packed([5, 2], capacity=6, bound=BOUND))
    with counters.expect(graphs_seen=0):
        for seed, lengths in enumerate([[5, 3], [1] * 6, [20], [4, 4, 4], [0, 8]]):
            args = packed(lengths, capacity=6, bound=BOUND, seed=seed)
            assert torch.equal(call(ours, *args), call(model, *args)), lengths
    assert boundaries([5, 3], 6).tolist() == [0, 5, 8, 8, 8, 8, 8]


def test_a_number_on_the_host_is_not_frozen_into_a_graph() -> None:
    """A host tensor among device tensors rules captures out: a kernel takes its value once, at the recording."""
    found = traced(lambda x, s: x * s, torch.ones(6, 4), torch.tensor(2.0))
    assert _never(found.program) is None
    for arg in found.program.tensor_args:
        spec = found.program.specs[arg]
        if spec.shape:
            found.program.specs[arg] = dataclasses.replace(spec, device=torch.device("cuda", 0))
    skip = _never(found.program)
    assert skip is not None
    assert skip.code == "host-device-copy"
