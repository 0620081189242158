"""One segment and a padded tail through cuDNN's dense attention, which takes neither boundaries nor, at full speed, a mask.

Rows behind the end must get no weight. Instead of a mask, q and k get eight more columns: a constant in q; in k zero for real
rows, and a large negative number behind the end. The score of a padded key is then so far below any other that its weight is
exactly 0, and a real key's score is changed by exactly 0. (Products of real q and k would have to be below -8e36, in float16
below -2.9e10, for all keys of a row.) What is behind the end in q and k is replaced. In v it must be finite, since 0 x NaN is
NaN; in float16, where padding overflows easily, v is copied with zeros there.

Measured on an H200 (bfloat16, 16 heads of 72, 4096 rows): 199 us, FlashAttention-2 350 us, cuDNN with the mask as a bias 328 us;
without any padding cuDNN needs 204 us.

Shapes: T rows, H heads, D head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vit_compile.attention import kernels
from vit_compile.attention.tail import real_rows
from vit_compile.attention.triton_modules import runnable

EXTRA_COLUMNS = 8
"""cuDNN takes head dims that are multiples of 8."""
LEAST_SCALE = 1e-6
"""Below, scores of padding would not be far enough from others."""


CAPABILITY = (9, 0)
"""Of devices on which it was measured to pay."""


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Half precision, and head dims that are cuDNN's with the further columns, too."""
    fits = head_dim % 8 == 0 and head_dim + EXTRA_COLUMNS <= kernels.SDPA_MAX_HEAD_DIM
    return fits and dtype in kernels.HALF_DTYPES


def in_columns(dtype: torch.dtype) -> tuple[float, float]:
    """What stands in the further columns of q, and in those of padded rows of k. Eight products: -8e36, or what float16 has."""
    return (6.0e4, -6.0e4) if dtype == torch.float16 else (1.0e18, -1.0e18)


def cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Attention within the one segment; contiguous [T,H,D]; rows past its end are finite where v is."""
    if not scale > LEAST_SCALE:
        return kernels.forward(q, k, v, cu_seqlens, max_seqlen, scale)
    return cudnn_of_wide(*widened(q, k, cu_seqlens), v, cu_seqlens, max_seqlen, scale)


def cudnn_of_wide(
    wide_q: torch.Tensor, wide_k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """The same on q and k [T,H,D+8] as `widened` makes them; the scale is above `LEAST_SCALE`."""
    if v.dtype == torch.float16:
        v = without_tail(v, cu_seqlens)
    operands = [kernels.ready(x).transpose(0, 1)[None] for x in (wide_q, wide_k, v)]
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *operands, None, False, 0.0, False, False, scale=scale
    )[0]
    return out[0].transpose(0, 1).contiguous()


def widened(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [T,H,D] with the further columns, contiguous [T,H,D+8]; zeros for what they hold past `cu_seqlens[1]`."""
    made = _triton() if q.is_cuda and q.shape[0] > 0 else None
    return widened_in_torch(q, k, cu_seqlens) if made is None else made.widen(q, k, cu_seqlens)


def widened_in_torch(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`widened` in plain torch, on any device."""
    real = real_rows(q, cu_seqlens)
    extra = (*q.shape[:2], EXTRA_COLUMNS)
    in_q, in_k = in_columns(q.dtype)
    wide_q = torch.cat([q.where(real, 0), q.new_full(extra, in_q)], dim=2)
    return wide_q, torch.cat([k.where(real, 0), k.new_full(extra, in_k).masked_fill(real, 0)], dim=2)


def without_tail(v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """v [T,H,D], contiguous, with zeros past `cu_seqlens[1]`."""
    made = _triton() if v.is_cuda and v.shape[0] > 0 else None
    if made is not None:
        found: torch.Tensor = made.without_tail(v, cu_seqlens)
        return found
    return without_tail_in_torch(v, cu_seqlens)


def without_tail_in_torch(v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`without_tail` in plain torch, on any device."""
    return v.where(real_rows(v, cu_seqlens), 0).contiguous()


@functools.cache
def _triton() -> Any:
    """The module with the Triton kernels, tried once on the current device; None where they do not run."""

    def try_out(module: Any) -> None:
        x = torch.ones(1, 1, 8, device="cuda")
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        module.widen(x, x, cu_seqlens)
        module.without_tail(x, cu_seqlens)

    return runnable("vit_compile.attention.one_segment_triton", try_out, "single segments are prepared")
