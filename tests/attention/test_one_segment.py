"""Dense attention over one segment and a padded tail: further columns of q and k in place of a mask."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.attention.interpreted import check_interpreted
from vit_compile.attention import admission, one_segment
from vit_compile.attention.problem import VARLEN, Problem

HOPPER = (9, 0)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of all rows to all rows, [T,H,D]."""
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), scale=scale).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("end", [1, 13, 20])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_wide_rows_attend_to_the_segment_only(dtype: torch.dtype, end: int, size: float) -> None:
    """Dense attention of wide q and k gives each real row exactly the weights of attention within the segment, whatever the
    padding of q and k holds, and whichever sign and size scores have; padded rows come out finite."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 3, 8) * size for _ in range(3))
    v[end:] = 1e4
    q, k, v = (x.to(dtype) for x in (q, k, v))
    want = dense(q[:end].double(), k[:end].double(), v[:end].double(), 8**-0.5)
    for poison in (0.0, 1e4, float("nan"), float("inf")):
        q[end:] = k[end:] = poison
        wide_q, wide_k = one_segment.widened(q, k, torch.tensor([0, end], dtype=torch.int32))
        assert wide_q.dtype == wide_k.dtype == dtype
        out = dense(wide_q.double(), wide_k.double(), v.double(), 8**-0.5)
        torch.testing.assert_close(out[:end], want, atol=0, rtol=1e-9)
        assert out.isfinite().all()


def test_an_empty_segment_is_finite() -> None:
    """Nothing is real: no row may come out as NaN."""
    q, k, v = torch.randn(3, 5, 2, 8).unbind(0)
    wide_q, wide_k = one_segment.widened(q, k, torch.tensor([0, 0], dtype=torch.int32))
    assert dense(wide_q, wide_k, v, 1.0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_scores_far_below_zero(dtype: torch.dtype, scale: float) -> None:
    """Real scores that are large and negative still get all the weight, at every scale that is served."""
    size = 1e4 if dtype == torch.float16 else 1e17
    q, k, v = (
        torch.full((20, 1, 8), size, dtype=dtype),
        torch.full((20, 1, 8), -size, dtype=dtype),
        torch.randn(20, 1, 8).to(dtype),
    )
    v[13:] = 1e4
    wide_q, wide_k = one_segment.widened(q, k, torch.tensor([0, 13], dtype=torch.int32))
    out = dense(wide_q.float(), wide_k.float(), v.float(), scale)
    torch.testing.assert_close(out[:13], v[:13].float().mean(0).expand(13, 1, 8), atol=1e-2, rtol=0)


def test_a_scale_that_is_too_small_takes_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero, negative and tiny scales would leave padding its weight: the default kernel serves them."""
    asked: list[float] = []
    monkeypatch.setattr(one_segment.kernels, "forward", lambda *args: asked.append(args[-1]))
    q, cu_seqlens = torch.randn(4, 1, 8), torch.tensor([0, 3], dtype=torch.int32)
    for scale in (0.0, -1.0, 1e-9, float("nan")):
        one_segment.cudnn(q, q, q, cu_seqlens, 4, scale)
    assert len(asked) == 4


@pytest.mark.parametrize(("dtype", "copied"), [(torch.float16, True), (torch.bfloat16, False)])
def test_v_is_cleaned_in_float16(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, copied: bool) -> None:
    """Padding that overflows in float16 does not reach real rows: cuDNN gets zeros there, and real rows as they are."""
    got: list[torch.Tensor] = []

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, scale: float) -> tuple[torch.Tensor]:
        got.append(v[0].transpose(0, 1))
        return (v,)

    aten = mock.Mock(_scaled_dot_product_cudnn_attention=stand_in)
    monkeypatch.setattr(one_segment.torch, "ops", mock.Mock(aten=aten))
    q, v = torch.randn(6, 2, 8).to(dtype), torch.randn(6, 2, 8).to(dtype)
    v[4:] = float("inf")
    out = one_segment.cudnn(q, q, v, torch.tensor([0, 4], dtype=torch.int32), 6, 0.5)
    assert torch.equal(got[0][:4], v[:4])
    assert bool(got[0].isfinite().all()) == copied
    assert out.shape == v.shape


@pytest.mark.parametrize(
    ("segments", "dim", "dtype", "capability", "serves"),
    [
        (1, 72, "bfloat16", HOPPER, True),
        (1, 64, "float16", HOPPER, True),
        (4, 72, "bfloat16", HOPPER, False),
        (1, 128, "bfloat16", HOPPER, False),
        (1, 76, "bfloat16", HOPPER, False),
        (1, 72, "float32", HOPPER, False),
        (1, 72, "bfloat16", (8, 0), False),
    ],
)
def test_who_is_served(segments: int, dim: int, dtype: str, capability: tuple[int, int], serves: bool) -> None:
    """Room for one segment, half precision, head dims that are multiples of 8 and leave eight columns of 128."""
    problem = Problem(VARLEN, dtype, (64, 2, dim), segments, 64)
    why = admission.VARLEN_KERNELS["cudnn-one-segment"].why_not(problem, capability)
    assert (why is None) == serves


_PROCESS = """
import torch
from vit_compile.attention import one_segment, one_segment_triton
torch.manual_seed(0)
for rows, heads, dim, end in ((14, 2, 8, 14), (64, 16, 72, 40), (33, 3, 64, 1), (9, 5, 80, 0), (20, 12, 88, 19)):
    cu_seqlens = torch.tensor([0, end], dtype=torch.int32)
    packed = torch.randn(rows, 3, heads, dim)
    packed[end:] = float("nan")
    turned = torch.randn(rows, dim, heads).transpose(1, 2)  # columns apart
    for q, k in ((packed[:, 0], packed[:, 1]), (packed[:, 0].clone(), packed[:, 2]), (turned, packed[:, 1])):
        want = one_segment.widened_in_torch(q, k, cu_seqlens)
        got = one_segment_triton.widen(q, k, cu_seqlens)
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, want, strict=True)), (rows, heads, dim, end)
        v = one_segment_triton.without_tail(k, cu_seqlens)
        assert torch.equal(v, one_segment.without_tail_in_torch(k, cu_seqlens)) and v.is_contiguous()
print("the same")
"""


def test_the_kernel_does_what_plain_torch_does() -> None:
    """In Triton's interpreter: strided inputs, any end, several widths, NaN behind the end."""
    check_interpreted(_PROCESS)
