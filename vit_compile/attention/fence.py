"""A fence around kernels that let a NaN cross segments.

Some kernels read rows behind a segment's end and multiply them with zero weights, and 0 x NaN is NaN. The fence takes values
that are not finite out of k and v before the kernel runs, and afterwards makes every row of a segment that had one NaN. For that
segment it is stricter than attention itself, which would leave some numbers finite; others never notice. A row of q is an operand
of its own row's arithmetic only, and is not looked at.

Nothing is read on the host, so it can be captured. Two Triton kernels read k and v once; where Triton cannot run, plain torch
operations do the same.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vit_compile.attention.triton_modules import runnable

Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]


def segments_of_rows(cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [T]: number of the segment that a row lies in, from 1; S + 1 past the last boundary."""
    return torch.searchsorted(cu_seqlens, torch.arange(rows, device=cu_seqlens.device, dtype=torch.int32), right=True)


def without_nan(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v [T,H,D] with zeros for what is not finite, and bool [T]: rows of segments that had such a value."""
    segment = segments_of_rows(cu_seqlens, k.shape[0])
    finite = [torch.isfinite(x) for x in (k, v)]
    broken_rows = ~torch.stack([x.flatten(1).all(1) for x in finite]).all(0)
    broken_segments = torch.zeros(cu_seqlens.shape[0] + 1, device=k.device)
    broken_segments.scatter_reduce_(0, segment, broken_rows.to(broken_segments.dtype), "amax")
    clean_k, clean_v = (x.where(ok, 0) for x, ok in zip((k, v), finite, strict=True))
    return clean_k, clean_v, broken_segments[segment] > 0


def fenced(run: Varlen) -> Varlen:
    """The same kernel behind the fence. Rows past the last boundary are as the kernel leaves them, or NaN."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
    ) -> torch.Tensor:
        made = _triton() if k.is_cuda and k.shape[0] > 0 else None
        if made is not None and cu_seqlens.shape[0] <= made.MOST_SEGMENTS:
            k, v, segments = made.clean(k, v, cu_seqlens)
            out: torch.Tensor = made.spoil(run(q, k, v, cu_seqlens, max_seqlen, scale), segments, cu_seqlens)
            return out
        k, v, broken = without_nan(k, v, cu_seqlens)
        return run(q, k, v, cu_seqlens, max_seqlen, scale).masked_fill(broken[:, None, None], float("nan"))

    return call


@functools.cache
def _triton() -> Any:
    """The module with the Triton kernels, tried once on the current device; None where they do not run."""

    def try_out(module: Any) -> None:
        x = torch.ones(1, 1, 8, device="cuda")
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        module.spoil(x, module.clean(x, x, cu_seqlens)[2], cu_seqlens)

    return runnable("vit_compile.attention.fence_triton", try_out, "the fence around attention kernels is computed")
