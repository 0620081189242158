"""One segment and a padded tail through cuDNN's dense attention, which takes neither boundaries nor, at full speed, a mask.

Rows behind the end must get no weight. Instead of a mask, q and k get eight more columns: a constant in q; in k zero for real
rows, and a large negative number behind the end. The score of a padded key is then so far below any other that its weight is
exactly 0, and a real key's score is changed by exactly 0. What is behind the end in v must be finite, since 0 x NaN is NaN; in q
and k it is replaced. Measured on an H200 (bfloat16, 16 heads of 72, 4096 rows): 199 us, FlashAttention-2 350 us, cuDNN with the
mask as a bias 328 us; without any padding cuDNN needs 204 us.

Shapes: T rows, H heads, D head dim.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from vit_compile.attention import kernels

log = logging.getLogger(__name__)

EXTRA_COLUMNS = 8
"""cuDNN takes head dims that are multiples of 8."""
IN_Q, IN_K = 1.0e4, -3.0e4
"""Both within float16; eight products of them are -2.4e9, times the scale."""


def cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Attention within the one segment; contiguous [T,H,D]; rows past its end are finite where v is."""
    if not scale > 0:  # padded keys would get all the weight
        return kernels.dense(q, k, v, cu_seqlens, scale)
    return cudnn_of_wide(*widened(q, k, cu_seqlens), v, cu_seqlens, max_seqlen, scale)


def cudnn_of_wide(
    wide_q: torch.Tensor, wide_k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """The same on q and k [T,H,D+8] as `widened` makes them; the scale is positive."""
    operands = [x.transpose(0, 1)[None] for x in (*map(kernels.ready, (wide_q, wide_k)), kernels.ready(v))]
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
    real = (torch.arange(q.shape[0], device=q.device) < cu_seqlens[1])[:, None, None]
    extra = (*q.shape[:2], EXTRA_COLUMNS)
    wide_q = torch.cat([q.where(real, 0), q.new_full(extra, IN_Q)], dim=2)
    return wide_q, torch.cat([k.where(real, 0), k.new_full(extra, IN_K).masked_fill(real, 0)], dim=2)


@functools.cache
def _triton() -> Any:
    """The module with the Triton kernel, tried once on the current device; None where it does not run."""
    try:
        from vit_compile.attention import one_segment_triton

        x = torch.ones(1, 1, 8, device="cuda")
        one_segment_triton.widen(x, x, torch.tensor([0, 1], dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # no Triton, no C compiler, or a driver that Triton does not know: slower, but the same result
        log.warning("Triton cannot run here (%s): single segments are prepared by plain torch, which is slower.", error)
        return None
    return one_segment_triton
