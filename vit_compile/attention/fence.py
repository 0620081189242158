"""A fence around kernels that let a NaN cross segments.

Some kernels read rows behind a segment's end and multiply them with zero weights, and 0 x NaN is NaN. The fence takes values
that are not finite out before the kernel runs, and afterwards makes every row of a segment that had one NaN: what the segment
would have become, for itself and for nobody else. Plain torch operations without a read on the host, so it can be captured.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]


def segments_of_rows(cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [T]: number of the segment that a row lies in, from 1; S + 1 past the last boundary."""
    return torch.searchsorted(cu_seqlens, torch.arange(rows, device=cu_seqlens.device, dtype=torch.int32), right=True)


def without_nan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [T,H,D] with zeros for what is not finite, and bool [T]: rows of segments that had such a value."""
    segment = segments_of_rows(cu_seqlens, q.shape[0])
    finite = [torch.isfinite(x) for x in (q, k, v)]
    broken_rows = ~torch.stack([x.flatten(1).all(1) for x in finite]).all(0)
    broken_segments = torch.zeros(cu_seqlens.shape[0] + 1, device=q.device)
    broken_segments.scatter_reduce_(0, segment, broken_rows.to(broken_segments.dtype), "amax")
    clean_q, clean_k, clean_v = (x.where(ok, 0) for x, ok in zip((q, k, v), finite, strict=True))
    return clean_q, clean_k, clean_v, broken_segments[segment] > 0


def fenced(run: Varlen) -> Varlen:
    """The same kernel behind the fence. Rows past the last boundary are as the kernel leaves them."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
    ) -> torch.Tensor:
        q, k, v, broken = without_nan(q, k, v, cu_seqlens)
        return run(q, k, v, cu_seqlens, max_seqlen, scale).masked_fill(broken[:, None, None], float("nan"))

    return call
