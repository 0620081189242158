"""The Triton kernels behind `fence.fenced`. Importing this file needs Triton; `fence` falls back where there is none.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from vit_compile.attention.machine_code import note

ROWS_PER_PROGRAM = 16
MOST_SEGMENTS = 1024
"""Boundaries are compared with every row at once; above this the plain operations are used."""


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _segments(cu_seqlens, boundaries, row, BOUNDARIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of the segment of each row, from 1; `boundaries` past the last one."""
    numbers = tl.arange(0, BOUNDARIES)
    ends = tl.load(cu_seqlens + numbers, mask=numbers < boundaries, other=2147483647)
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)


# Nothing about sizes is specialised: one compile per dtype, head dim and power of two of boundaries.
@triton.jit(do_not_specialize=["rows", "boundaries"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _clean_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    clean_k,
    clean_v,
    broken,
    cu_seqlens,
    rows,
    boundaries,
    k_row,
    k_head,
    v_row,
    v_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDARIES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_DIM)
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    bad = tl.zeros([ROWS], dtype=tl.int32)
    far = row.to(tl.int64)
    for head in range(HEADS):
        here = far[:, None] * (HEADS * DIM) + head * DIM + column[None, :]
        from_k = tl.load(k + far[:, None] * k_row + head * k_head + column[None, :], mask=mask, other=0.0)
        from_v = tl.load(v + far[:, None] * v_row + head * v_head + column[None, :], mask=mask, other=0.0)
        good_k = tl.abs(from_k.to(tl.float32)) < float("inf")  # neither Inf nor NaN
        good_v = tl.abs(from_v.to(tl.float32)) < float("inf")
        tl.store(clean_k + here, tl.where(good_k, from_k, 0.0).to(clean_k.dtype.element_ty), mask=mask)
        tl.store(clean_v + here, tl.where(good_v, from_v, 0.0).to(clean_v.dtype.element_ty), mask=mask)
        bad += tl.sum(((good_k & good_v) == 0).to(tl.int32), axis=1)
    segment = _segments(cu_seqlens, boundaries, row, BOUNDARIES)
    tl.atomic_max(broken + segment, tl.full([ROWS], 1, tl.int32), mask=(bad > 0) & (row < rows))


@triton.jit(do_not_specialize=["rows", "boundaries"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _spoil_kernel(  # type: ignore[no-untyped-def]
    out,
    broken,
    cu_seqlens,
    rows,
    boundaries,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDARIES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    segment = _segments(cu_seqlens, boundaries, row, BOUNDARIES)
    bad = tl.load(broken + segment, mask=row < rows, other=0) > 0
    column = tl.arange(0, PADDED_DIM)
    mask = (bad & (row < rows))[:, None] & (column < DIM)[None, :]
    nothing = tl.full([ROWS, PADDED_DIM], float("nan"), tl.float32).to(out.dtype.element_ty)
    for head in range(HEADS):  # nothing is stored where no row is bad
        tl.store(out + row.to(tl.int64)[:, None] * (HEADS * DIM) + head * DIM + column[None, :], nothing, mask=mask)


def clean(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v [T,H,D] with zeros for what is not finite, contiguous, and int32 [S+2]: is a segment (from 1) broken?"""
    rows, heads, dim = k.shape
    clean_k, clean_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    broken = torch.zeros(cu_seqlens.shape[0] + 1, dtype=torch.int32, device=k.device)
    launched = _clean_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        k,
        v,
        clean_k,
        clean_v,
        broken,
        cu_seqlens,
        rows,
        cu_seqlens.shape[0],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        ROWS=ROWS_PER_PROGRAM,
        BOUNDARIES=triton.next_power_of_2(cu_seqlens.shape[0]),
    )
    note(launched)
    return clean_k, clean_v, broken


def spoil(out: torch.Tensor, broken: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """NaN into the rows of broken segments of the contiguous `out` [T,H,D], in place."""
    rows, heads, dim = out.shape
    launched = _spoil_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        out,
        broken,
        cu_seqlens,
        rows,
        cu_seqlens.shape[0],
        HEADS=heads,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        ROWS=ROWS_PER_PROGRAM,
        BOUNDARIES=triton.next_power_of_2(cu_seqlens.shape[0]),
    )
    note(launched)
    return out
