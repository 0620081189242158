"""The contract of `vit_compile::varlen_attention` on a GPU: flash (half precision), efficient (float32), dense (float64)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.towers import boundaries
from vit_compile.attention import kernels, reference
from vit_compile.attention.varlen import varlen_attention

HEADS = 4
LENGTHS = [300, 0, 200, 1, 200]
END = sum(LENGTHS)
ROWS = 1024
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
HEAD_DIMS = [64, 72, 80]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-12}


def qkv(dim: int, dtype: torch.dtype, rows: int = ROWS, seed: int = 0) -> list[torch.Tensor]:
    """Seeded q, k and v [rows, HEADS, dim] on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, HEADS, dim, generator=generator).to("cuda", dtype) for _ in range(3)]


def cu(lengths: list[int], capacity: int | None = None) -> torch.Tensor:
    """Boundaries on the GPU."""
    return boundaries(lengths, capacity).cuda()


def expected(inputs: list[torch.Tensor], cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
    """The CPU kernel in float64, which tests/attention checks against a plain loop."""
    return reference.forward(*(x.double().cpu() for x in inputs), cu_seqlens.cpu(), inputs[0].shape[0], scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [*HEAD_DIMS, 13, 128, 256, 264])
def test_parity(dim: int, dtype: torch.dtype) -> None:
    """Every dtype and head dim, odd and large ones included, agrees with float64 within its rounding."""
    inputs = qkv(dim, dtype)
    out = varlen_attention(*inputs, cu(LENGTHS), 300, dim**-0.5)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double().cpu(), expected(inputs, cu(LENGTHS), dim**-0.5), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_kernel_alone(dim: int, dtype: torch.dtype) -> None:
    """Flash, efficient and dense give the same answer to the same question, so that each is really exercised."""
    inputs = qkv(dim, dtype)
    want = expected(inputs, cu(LENGTHS), dim**-0.5)[:END]
    runs = [kernels.efficient, lambda q, k, v, c, _, s: kernels.dense(q, k, v, c, s)]
    runs += [kernels.flash] if dtype == torch.bfloat16 else []
    for run in runs:
        out = run(*inputs, cu(LENGTHS), 300, dim**-0.5)[:END]
        torch.testing.assert_close(out.double().cpu(), want, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_tail_is_zero(dim: int, dtype: torch.dtype, poison_allocator: Callable[[], None]) -> None:
    """Rows past the last boundary are exactly zero although the memory held NaN and the inputs hold NaN there."""
    inputs = qkv(dim, dtype)
    for x in inputs:
        x[END:] = float("nan")
    poison_allocator()
    out = varlen_attention(*inputs, cu(LENGTHS), 300, dim**-0.5)
    assert not out[END:].any()
    assert out[:END].isfinite().all()


def poisoned(inputs: list[torch.Tensor], poison: float) -> list[torch.Tensor]:
    """Copies with one bad row in the third segment (300..500), and a bad tail."""
    copies = [x.clone() for x in inputs]
    for x in copies:
        x[400] = poison
        x[END:] = poison
    return copies


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_poison_stays_in_its_segment(dim: int, dtype: torch.dtype, poison: float) -> None:
    """A NaN or Inf in one segment, or past the end, changes no bit of the other segments, in each kernel."""
    inputs = qkv(dim, dtype)
    clean = varlen_attention(*inputs, cu(LENGTHS), 300, dim**-0.5)
    out = varlen_attention(*poisoned(inputs, poison), cu(LENGTHS), 300, dim**-0.5)
    assert torch.equal(out[:300], clean[:300])
    assert torch.equal(out[500:], clean[500:])
    assert not out[300:500].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_strided_inputs_give_the_same_bits(dim: int, dtype: torch.dtype) -> None:
    """Views of a packed [T,3,H,D] tensor, heads-first tensors and misaligned views change no bit."""
    inputs = qkv(dim, dtype)
    contiguous = varlen_attention(*inputs, cu(LENGTHS), 300, dim**-0.5)
    packed = torch.stack(inputs, dim=1).unbind(1)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    misaligned = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in inputs]
    for views in (packed, heads_first, misaligned):
        out = varlen_attention(*views, cu(LENGTHS), 300, dim**-0.5)
        assert torch.equal(out, contiguous)
        assert out.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_segment_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """A looser bound, more boundaries, or other neighbours change no bit of a segment in half precision."""
    inputs = qkv(64, dtype)
    out = varlen_attention(*inputs, cu(LENGTHS), 300, 0.125)
    loose = varlen_attention(*inputs, cu(LENGTHS, capacity=40), ROWS, 0.125)
    alone = varlen_attention(*(x[300:500] for x in inputs), cu([200]), 200, 0.125)
    if dtype in kernels.HALF_DTYPES:
        assert torch.equal(out, loose)
        assert torch.equal(out[300:500], alone)
    else:
        torch.testing.assert_close(out, loose, atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(out[300:500], alone, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_capture(dim: int, dtype: torch.dtype, poison_allocator: Callable[[], None]) -> None:
    """Captured once, the operation follows boundaries that change in place, and clears each new tail."""
    inputs, cu_seqlens = qkv(dim, dtype), cu(LENGTHS, capacity=8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        varlen_attention(*inputs, cu_seqlens, ROWS, dim**-0.5)
    torch.cuda.current_stream().wait_stream(stream)
    poison_allocator()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_attention(*inputs, cu_seqlens, ROWS, dim**-0.5)
    for lengths in (LENGTHS, [1000, 24], [10], [7] * 8, []):
        cu_seqlens.copy_(boundaries(lengths, capacity=8))
        graph.replay()
        want = expected(inputs, cu_seqlens, dim**-0.5)
        torch.testing.assert_close(out.double().cpu(), want, atol=TOLERANCE[dtype], rtol=0)
        assert not out[sum(lengths) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_synchronisation(dtype: torch.dtype) -> None:
    """The forward never waits for the device."""
    inputs, cu_seqlens = qkv(72, dtype), cu(LENGTHS)
    varlen_attention(*inputs, cu_seqlens, 300, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        varlen_attention(*inputs, cu_seqlens, 300, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_do(dtype: torch.dtype) -> None:
    """No rows, no segments, or only empty segments give zeros instead of a launch error."""
    q, k, v = qkv(64, dtype)
    assert varlen_attention(q[:0], k[:0], v[:0], cu([0]), 1, 0.1).shape == (0, HEADS, 64)
    for cu_seqlens, bound in ((cu([]), 1), (cu([0, 0]), 1), (cu([0, 0]), 0)):
        assert not varlen_attention(q, k, v, cu_seqlens, bound, 0.1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype) -> None:
    """Gradients equal those of the CPU in float64 within rounding, and are zero past the end."""
    ours = [x.requires_grad_() for x in qkv(64, dtype)]
    theirs = [x.detach().double().cpu().requires_grad_() for x in ours]
    varlen_attention(*ours, cu(LENGTHS), 300, 0.125).square().sum().backward()
    varlen_attention(*theirs, boundaries(LENGTHS), 300, 0.125).square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.double().cpu(), b.grad, atol=5 * TOLERANCE[dtype], rtol=2e-2)
        assert not a.grad[END:].any()


def test_compiles() -> None:
    """One graph of Inductor for all lengths, with eager's numbers."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q * 2, k, v, cu_seqlens, ROWS, 0.125) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (200, 333, 1024):
        inputs = qkv(64, torch.bfloat16, rows)
        cu_seqlens = cu([100, rows - 150], capacity=3)
        torch.testing.assert_close(compiled(*inputs, cu_seqlens), layer(*inputs, cu_seqlens), atol=2e-2, rtol=0)
