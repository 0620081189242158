"""The contract of `vit_compile::varlen_attention`, on the CPU, against an independent float64 loop."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch

from tests.towers import boundaries
from vit_compile.attention import kernels, reference, tail, varlen
from vit_compile.attention.varlen import varlen_attention
from vit_compile.errors import BoundariesError, BoundError, InputMismatchError

HEADS, DIM = 3, 8
SCALE = DIM**-0.5
LAYOUTS = [[7], [1, 1], [5, 9, 2], [0, 6, 0, 0, 3, 0], [4, 4, 4, 4], [0]]


def qkv(rows: int, *, dim: int = DIM, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Seeded q, k and v [rows, HEADS, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, HEADS, dim, generator=generator).to(dtype) for _ in range(3)]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
    """Row by row, head by head, in float64: no code in common with the package."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    ends = cu_seqlens.tolist()
    for segment in range(len(ends) - 1):
        members = range(ends[segment], ends[segment + 1])
        for row in members:
            for head in range(q.shape[1]):
                scores = [math.fsum((q[row, head] * k[other, head]).tolist()) * scale for other in members]
                largest = max(scores)
                weights = [math.exp(score - largest) for score in scores]
                mixed = sum(weight * v[other, head] for weight, other in zip(weights, members, strict=True))
                out[row, head] = mixed / math.fsum(weights)
    return out


@pytest.mark.parametrize("lengths", LAYOUTS)
@pytest.mark.parametrize("padding", [0, 5])
def test_each_segment_attends_within_itself(lengths: list[int], padding: int) -> None:
    """Any layout, empty segments and padding rows included, equals the float64 loop; rows past the end are exactly zero."""
    q, k, v = qkv(sum(lengths) + padding)
    cu_seqlens = boundaries(lengths)
    out = varlen_attention(q, k, v, cu_seqlens, max(lengths), SCALE)
    torch.testing.assert_close(out.double(), expected(q, k, v, cu_seqlens, SCALE), atol=1e-6, rtol=0)
    assert out.is_contiguous()
    assert torch.equal(out[sum(lengths) :], torch.zeros(padding, HEADS, DIM))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    """The output has the dtype of the inputs, and half precision stays within its rounding."""
    q, k, v = qkv(9, dtype=dtype)
    out = varlen_attention(q, k, v, boundaries([4, 5]), 5, SCALE)
    assert out.dtype == dtype
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out.double(), expected(q, k, v, boundaries([4, 5]), SCALE), atol=tolerance, rtol=0)


def test_scale_is_applied() -> None:
    """The scale is the caller's, not D**-0.5."""
    q, k, v = qkv(6)
    out = varlen_attention(q, k, v, boundaries([6]), 6, 1.0)
    torch.testing.assert_close(out.double(), expected(q, k, v, boundaries([6]), 1.0), atol=1e-6, rtol=0)


def test_strided_inputs_give_the_same_bits() -> None:
    """Views of one packed qkv tensor, and of a heads-first one, need no copy by the caller and change no bit."""
    packed = torch.stack(qkv(10), dim=1)  # [T,3,H,D]
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in packed.unbind(1)]
    cu_seqlens = boundaries([3, 7])
    contiguous = varlen_attention(*(x.contiguous() for x in packed.unbind(1)), cu_seqlens, 7, SCALE)
    for inputs in (packed.unbind(1), heads_first):
        out = varlen_attention(*inputs, cu_seqlens, 7, SCALE)
        assert torch.equal(out, contiguous)
        assert out.is_contiguous()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_poison_stays_in_its_segment(poison: float, where: int) -> None:
    """A NaN or Inf in q, k or v of one segment, or past the end, changes no bit of another segment's rows."""
    inputs = qkv(14)
    cu_seqlens = boundaries([4, 5, 3])
    clean = varlen_attention(*inputs, cu_seqlens, 5, SCALE)
    inputs[where][5] = poison
    inputs[where][12:] = poison
    out = varlen_attention(*inputs, cu_seqlens, 5, SCALE)
    assert torch.equal(out[:4], clean[:4])
    assert torch.equal(out[9:], clean[9:])
    assert where == 0 or not out[4:9].isfinite().all()


@pytest.mark.parametrize("lengths", [[3, 4], [0, 5, 0, 1], [6]])
def test_gradients_equal_those_of_dense_attention(lengths: list[int]) -> None:
    """The hand-written gradient equals autograd through one softmax per segment; padding rows get zero."""
    cu_seqlens, rows = boundaries(lengths), sum(lengths) + 2
    ours = [x.requires_grad_() for x in qkv(rows, dtype=torch.float64)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    weight = qkv(rows, dtype=torch.float64, seed=1)[0]
    (varlen_attention(*ours, cu_seqlens, max(lengths), SCALE) * weight).sum().backward()
    ends = cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        q, k, v = (x[start:end].transpose(0, 1) for x in theirs)
        out = torch.softmax(q @ k.transpose(1, 2) * SCALE, -1) @ v
        (out.transpose(0, 1) * weight[start:end]).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=0)
        assert torch.equal(a.grad[rows - 2 :], torch.zeros(2, HEADS, DIM, dtype=torch.float64))


def test_gradcheck() -> None:
    """Numerical differentiation agrees with the gradient."""
    inputs = [x[:, :1, :2].clone().requires_grad_() for x in qkv(6, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, boundaries([2, 3]), 3, SCALE), inputs)


def test_poison_stays_in_its_segment_in_the_gradient() -> None:
    """A NaN in one segment changes no bit of another segment's gradient."""
    cu_seqlens = boundaries([4, 5])

    def gradient(inputs: list[torch.Tensor]) -> torch.Tensor:
        leaves = [x.clone().requires_grad_() for x in inputs]
        varlen_attention(*leaves, cu_seqlens, 5, SCALE).sum().backward()
        return leaves[1].grad

    inputs = qkv(9)
    clean = gradient(inputs)
    inputs[0][6] = float("nan")
    assert torch.equal(gradient(inputs)[:4], clean[:4])


def test_second_derivative_is_refused() -> None:
    """A gradient of the gradient is an error, not a silent zero."""
    q, k, v = (x.requires_grad_() for x in qkv(4))
    (grad,) = torch.autograd.grad(varlen_attention(q, k, v, boundaries([4]), 4, SCALE).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_all_sizes(backend: str) -> None:
    """With a dynamic row count, one full graph serves all lengths, and its numbers are the eager ones."""
    graphs = []

    def count(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(gm)
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q * 2, k, v, cu_seqlens, 64, SCALE) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=count, fullgraph=True)
    for lengths in ([5, 3], [10, 20, 6], [33]):
        inputs = qkv(sum(lengths))
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
        cu_seqlens = boundaries(lengths, capacity=4)
        torch.testing.assert_close(compiled(*inputs, cu_seqlens), layer(*inputs, cu_seqlens))
    assert len(graphs) == 1


def test_max_seqlen_may_be_symbolic() -> None:
    """Under `dynamic=True` the bound is a SymInt, and a new bound does not recompile."""
    graphs = []

    def count(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(varlen_attention, backend=count, dynamic=True, fullgraph=True)
    for lengths in ([6, 3, 1, 2], [10, 20, 4, 1], [33, 4, 0, 2]):  # no two sizes of the first call are equal
        inputs = qkv(sum(lengths))
        out = compiled(*inputs, boundaries(lengths), max(lengths), SCALE)
        assert torch.equal(out, varlen_attention(*inputs, boundaries(lengths), max(lengths), SCALE))
    assert len(graphs) == 1


def test_compiled_gradients() -> None:
    """A compiled call stays differentiable, with eager's gradients."""
    torch._dynamo.reset()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q, k, v, boundaries([2, 4]), 4, SCALE).square().sum()

    eager, compiled = ([x.requires_grad_() for x in qkv(7)] for _ in range(2))
    loss(*eager).backward()
    torch.compile(loss, backend="aot_eager")(*compiled).backward()
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    """torch's own checks of schema, autograd registration, fake implementation and AOT dispatch pass."""
    inputs = [x.requires_grad_(grad) for x in torch.stack(qkv(10), dim=1).unbind(1)]
    torch.library.opcheck(torch.ops.vit_compile.varlen_attention.default, (*inputs, boundaries([3, 0, 5]), 5, SCALE))


def test_importing_again_changes_nothing() -> None:
    """A reload leaves the operation registered and usable."""
    operation = torch.ops.vit_compile.varlen_attention.default
    importlib.reload(varlen)
    q, k, v = qkv(4)
    assert operation(q, k, v, boundaries([4]), 4, SCALE).shape == (4, HEADS, DIM)


def test_carries_the_tag_that_compilers_ask_for() -> None:
    """torch.compile treats the operation as compliant."""
    assert torch.Tag.pt2_compliant_tag in torch.ops.vit_compile.varlen_attention.default.tags


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "words"),
    [
        ([1, 4], BoundariesError, "starts at 1"),
        ([0, 3, 2, 4], BoundariesError, "decreases from 3 to 2"),
        ([0, 3, 9], BoundariesError, "ends at 9"),
        ([0, 8], BoundError, "max_seqlen=5 but segment 0 has 8 rows"),
    ],
)
def test_bad_boundaries_are_named(cu_seqlens: list[int], error: type[Exception], words: str) -> None:
    """On the CPU a bad boundary or bound is an error that says which number is wrong."""
    q, k, v = qkv(8)
    with pytest.raises(error, match=words):
        varlen_attention(q, k, v, torch.tensor(cu_seqlens, dtype=torch.int32), 5, SCALE)


def test_bad_tensors_are_named() -> None:
    """Wrong ranks, dtypes and shapes are errors that say what is expected."""
    q, k, v = qkv(8)
    cu_seqlens = boundaries([8])
    with pytest.raises(InputMismatchError, match="expected int32"):
        varlen_attention(q, k, v, cu_seqlens.long(), 8, SCALE)
    with pytest.raises(InputMismatchError, match="one dtype"):
        varlen_attention(q, k.half(), v, cu_seqlens, 8, SCALE)
    with pytest.raises(InputMismatchError, match=r"expected \[rows, heads, dim\]"):
        varlen_attention(q[None], k[None], v[None], cu_seqlens, 8, SCALE)
    with pytest.raises(InputMismatchError, match="expected one shape"):
        varlen_attention(q, k[:4], v, cu_seqlens, 8, SCALE)
    with pytest.raises(InputMismatchError, match="cu_seqlens is empty"):
        varlen_attention(q, k, v, cu_seqlens[:0], 8, SCALE)


# --- parts of the CUDA path that need no GPU --------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LAYOUTS)
def test_dense_kernel(lengths: list[int]) -> None:
    """The masked fallback keeps the whole contract: numbers, zero tail, contiguous output."""
    q, k, v = qkv(sum(lengths) + 4)
    q[sum(lengths) :] = float("nan")
    out = kernels.dense(q, k, v, boundaries(lengths), SCALE)
    clean = [x[: sum(lengths)] for x in (q, k, v)]
    torch.testing.assert_close(out[: sum(lengths)].double(), expected(*clean, boundaries(lengths), SCALE), atol=1e-6, rtol=0)
    assert torch.equal(out[sum(lengths) :], torch.zeros(4, HEADS, DIM))
    assert out.is_contiguous()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_dense_kernel_isolates(poison: float) -> None:
    """The masked fallback keeps a NaN or Inf in its own segment, and shows it there."""
    inputs = qkv(12)
    clean = kernels.dense(*inputs, boundaries([4, 5, 3]), SCALE)
    inputs[2][5] = poison
    out = kernels.dense(*inputs, boundaries([4, 5, 3]), SCALE)
    assert torch.equal(out[:4], clean[:4])
    assert torch.equal(out[9:], clean[9:])
    assert out[4:9].isnan().all()


def test_tail_is_zeroed_whatever_it_holds() -> None:
    """Rows past the last boundary become zero even from NaN; rows before it are not touched."""
    out = torch.full((6, 2, 3), float("nan"))
    out[:4] = 1
    assert tail.zero_tail_(out, boundaries([1, 3])) is out
    assert torch.equal(out, torch.cat([torch.ones(4, 2, 3), torch.zeros(2, 2, 3)]))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "flash_usable", "kernel"),
    [
        (torch.bfloat16, 72, (9, 0), True, "flash"),
        (torch.float16, 255, (8, 0), True, "flash"),
        (torch.bfloat16, 264, (9, 0), True, "efficient"),
        (torch.bfloat16, 64, (9, 0), False, "efficient"),
        (torch.float32, 64, (9, 0), True, "efficient"),
        (torch.float16, 64, (7, 5), True, "efficient"),
        (torch.bfloat16, 64, (7, 5), True, "dense"),
        (torch.float64, 64, (9, 0), True, "dense"),
    ],
)
def test_choice_of_kernel(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], flash_usable: bool, kernel: str
) -> None:
    """Each kernel gets only what it can do, and FlashAttention-2 whatever it can."""
    assert kernels.choose(dtype, head_dim, capability, flash_usable=flash_usable) == kernel


def test_kernels_get_loads_they_can_vectorise() -> None:
    """Aligned views pass as they are; an odd head dim is padded, and a misaligned or scattered view is copied."""
    packed = torch.randn(10, 3, 2, 16)
    view = packed[:, 1]
    assert kernels.ready(view) is view
    for x, dim in ((packed[:, 0, :, 1:9], 8), (packed[..., 0, :].transpose(1, 2), 4), (packed[:, 0, :, :13], 16)):
        ready = kernels.ready(x)
        assert ready.shape[2] == dim
        assert ready.is_contiguous()
        assert ready.data_ptr() % kernels.VECTOR_BYTES == 0
        assert torch.equal(ready[..., : x.shape[2]], x)
        assert not ready[..., x.shape[2] :].any()


def test_empty_segments_are_skipped() -> None:
    """Empty segments cost nothing: only ranges with rows are visited."""
    assert reference.segment_ranges(boundaries([0, 2, 0, 3, 0]), 5, 3) == [(0, 2), (2, 5)]
