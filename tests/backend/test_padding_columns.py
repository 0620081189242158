"""q and k with the columns that keep padding out of dense attention: where they are made, and that they are the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import vit_compile
from tests import towers
from tests.models.test_packed_grid import captured, largest_difference, reference, request_of, table_of
from vit_compile import counters, varlen_attention
from vit_compile.attention import admission, choice, one_segment
from vit_compile.attention.choice import KernelChoices
from vit_compile.attention.problem import VARLEN, WIDE, Problem
from vit_compile.attention.wide import varlen_attention_wide
from vit_compile.backend import passes
from vit_compile.backend.passes import padding_columns
from vit_compile.errors import InputMismatchError, OptionError
from vit_compile.options import DEFAULT_PASSES, PASS_NAMES
from vit_compile.runtime.config import EncoderConfig

NAME = "padding_columns"
ROWS, HEADS, DIM = 12, 2, 8


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass on any device, in any precision."""

    def fits(q: torch.Tensor) -> bool:
        return q.dim() == 3 and q.shape[-1] % 8 == 0

    monkeypatch.setattr(padding_columns, "supports", fits)


def packed(seed: int = 0) -> list[torch.Tensor]:
    """q, k, v as a tower has them: views of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(ROWS, 3, HEADS, DIM, generator=generator).unbind(1))


def boundaries(*ends: int) -> torch.Tensor:
    """Ends of segments."""
    return torch.tensor([0, *ends], dtype=torch.int32)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Elementwise work, as rotary positions are."""
    half = x.shape[-1] // 2
    return x * 0.5 + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * 2.0


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float = 0.3) -> torch.Tensor:
    """A layer's attention, q and k turned and viewed as Hugging Face's towers do."""
    q, k = (rotated(x).transpose(0, 1)[None][0].transpose(0, 1) for x in (q, k))
    return varlen_attention(q, k, v, cu_seqlens, ROWS, scale)


def rewritten(function: Callable[..., Any], *args: Any) -> tuple[int, fx.GraphModule, list[Any]]:
    """Sites, the rewritten graph, and what it is called with."""
    found: list[tuple[int, fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, _inputs: Any) -> Any:
        sites = passes.run_pass(gm, NAME).sites
        assert all("example_value" in node.meta for node in gm.graph.nodes if node.op.startswith("call"))

        def call(*given: Any) -> Any:
            found.append((sites, gm, list(given)))
            return gm.forward(*given)

        return call

    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    return found[0]


class Operands(fx.Interpreter):
    """Keeps what the wide operation is called with."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.calls: list[tuple[Any, ...]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.vit_compile.varlen_attention_wide.default:
            self.calls.append(args)
        return super().call_function(target, args, kwargs)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("end", [1, 7, ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_columns_are_those_of_the_kernel(end: int, dtype: torch.dtype) -> None:
    """What the rewritten graph hands to attention has every bit of what `one_segment.widened` makes of q and k."""
    q, k, v = (x.to(dtype) for x in packed())
    sites, gm, given = rewritten(attention, q, k, v, boundaries(end))
    assert sites == 1
    run = Operands(gm)
    (out,) = run.run(*given)
    ((wide_q, wide_k, *_),) = run.calls
    want = one_segment.widened(rotated(q), rotated(k), boundaries(end))
    assert torch.equal(wide_q, want[0])
    assert torch.equal(wide_k, want[1])
    assert torch.equal(out, attention(q, k, v, boundaries(end)))


def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Two layers over the same boundaries."""
    return attention(q, k, attention(q, k, v, cu_seqlens), cu_seqlens)


def of_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Nothing stands between the projections and attention."""
    weight = torch.eye(DIM)
    q, k = (nn.functional.linear(x, weight).transpose(0, 1).transpose(0, 1) for x in (q, k))
    return varlen_attention(q, k, v, cu_seqlens, ROWS, 0.3)


def half_computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """k is as it came."""
    return varlen_attention(rotated(q), k, v, cu_seqlens, ROWS, 0.3)


def turned_round(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """A negative scale: padded keys would have all the weight."""
    return attention(q, k, v, cu_seqlens, -0.3)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("function", "sites", "rows"),
    [(attention, 1, 1), (twice, 2, 1), (of_products, 0, 0), (half_computed, 0, 0), (turned_round, 0, 0)],
)
def test_which_calls_are_rewritten(function: Callable[..., Any], sites: int, rows: int) -> None:
    """Calls whose q and k are computed elementwise; which rows are real is computed once for all layers."""
    q, k, v = packed()
    found, gm, given = rewritten(function, q, k, v, boundaries(4, 9))
    assert found == sites
    assert gm.code.count("vit_compile.real_rows") == rows
    (out,) = gm(*given)
    torch.testing.assert_close(out, function(q, k, v, boundaries(4, 9)), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((4, 2, 72), torch.bfloat16, True),
        ((4, 2, 120), torch.float16, True),
        ((4, 2, 128), torch.bfloat16, False),
        ((4, 2, 76), torch.bfloat16, False),
        ((4, 2, 72), torch.float32, False),
        ((4, 72), torch.bfloat16, False),
    ],
)
def test_for_whom(shape: tuple[int, ...], dtype: torch.dtype, fits: bool) -> None:
    """Half precision, head dims that are multiples of 8 and leave eight columns of 128; never on a CPU."""
    q = torch.zeros(shape, dtype=dtype)
    assert padding_columns.fits(q) == fits
    assert not padding_columns.supports(q)


# --- the operation ----------------------------------------------------------------------------------------------------


def test_the_wide_operation_leaves_the_columns_out() -> None:
    """The features of `varlen_attention`, bit for bit; other widths are refused."""
    q, k, v = packed()
    cu_seqlens = boundaries(5, 9)
    wide = one_segment.widened(q, k, boundaries(9))
    assert torch.equal(varlen_attention_wide(*wide, v, cu_seqlens, ROWS, 0.3), varlen_attention(q, k, v, cu_seqlens, ROWS, 0.3))
    with pytest.raises(InputMismatchError, match="more columns"):
        varlen_attention_wide(q, k, v, cu_seqlens, ROWS, 0.3)


def test_kernels_get_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for a single segment gets q and k with the columns, others without; both are timed and run that way."""
    widths: dict[str, set[int]] = {"plain": set(), "wide": set(), "narrow": set()}

    def noting(name: str) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
            widths[name].add(q.shape[-1])
            return torch.zeros_like(v)

        return run

    def anything(problem: Problem, capability: tuple[int, int]) -> str | None:
        return None

    of_one = {"trusted": True, "finite_tail": True, "one_segment": True, "wide_run": noting("wide")}
    table = {
        "plain": admission.Kernel("plain", noting("plain"), anything, trusted=True),
        "one": admission.Kernel("one", noting("narrow"), anything, **of_one),
    }
    monkeypatch.setattr(admission, "VARLEN_KERNELS", table)
    seconds = iter([3e-6, 3e-6, 1e-6, 1e-6])

    def timer(call: Callable[[], object], device: torch.device, give_up_s: float = 0.0) -> float:
        call()
        return next(seconds)

    choices = KernelChoices("auto", torch.device("cpu"), timer)
    problem = Problem(VARLEN, "float32", (ROWS, HEADS, DIM), 1, ROWS, WIDE)
    with choices.observing():
        assert choices.kernel(problem) is None
    choices.settle()
    assert choices.kernel(problem) == "one"
    assert widths == {"plain": {DIM}, "wide": {DIM + one_segment.EXTRA_COLUMNS}, "narrow": set()}
    q = packed()[0]
    with choices.active():
        run = choice.varlen_kernel(q, boundaries(ROWS), ROWS, wide=True)
        assert run is table["one"].wide_run
        assert choice.varlen_kernel(q, boundaries(ROWS), ROWS) is None, "another problem"


# --- in an encoder ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_encoder_with_the_pass(compiler: str) -> None:
    """Every layer is rewritten, layers share their code as before, and features are the tower's."""
    build = towers.tiny_qwen3_vl
    made = captured(table_of(build), token_budgets=(48,), packing="greedy", mode="compiled", compiler=compiler, passes=PASS_NAMES)
    request = request_of([(1, 8, 12), (1, 4, 6)])
    assert largest_difference(made.execute(request), reference(build, request)) <= 1e-5
    assert counters.pass_sites[NAME] == len(made.model.encoder_modules()[0].blocks)  # type: ignore[attr-defined]
    assert made.snapshot()["miss_reasons"] == {}


def test_passes_of_an_encoder() -> None:
    """The configuration names them, in the order they run; the default leaves this one out until it was measured."""
    assert NAME not in DEFAULT_PASSES
    assert EncoderConfig(passes=[NAME]).passes == (NAME,)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="passes"):
        EncoderConfig(passes=("padding_column",))
    with pytest.raises(OptionError, match="mode"):
        EncoderConfig(mode="eager", passes=(NAME,))
    made = captured(table_of(towers.tiny_qwen3_vl), token_budgets=(48,), mode="compiled", compiler="eager", passes=())
    assert made.is_captured()
    assert vit_compile.counters.pass_sites == {}
