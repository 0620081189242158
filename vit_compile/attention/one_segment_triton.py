"""The Triton kernel behind `one_segment.widened`. Importing this file needs Triton.

Shapes: T rows, H heads, D head dim.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from vit_compile.attention.machine_code import note
from vit_compile.attention.one_segment import EXTRA_COLUMNS, in_columns

ROWS_PER_PROGRAM = 8
COLUMNS_PER_PROGRAM = 256


# One compile per dtype, head dim and number of heads.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _widen_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    wide_q,
    wide_k,
    cu_seqlens,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    IN_Q: tl.constexpr,
    IN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    flat = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # columns of all heads, one behind the other
    head = flat // WIDE
    column = flat % WIDE
    real = (row < tl.load(cu_seqlens + 1))[:, None]
    inside = real & ((column < DIM) & (flat < HEADS * WIDE))[None, :]
    far = row.to(tl.int64)[:, None]
    from_q = tl.load(q + far * q_row + (head * q_head + column)[None, :], mask=inside, other=0.0)
    from_k = tl.load(k + far * k_row + (head * k_head + column)[None, :], mask=inside, other=0.0)
    extra = (column >= DIM)[None, :]
    wanted_q = tl.where(extra, IN_Q, from_q)
    wanted_k = tl.where(extra & (real == 0), IN_K, from_k)
    mask = (row < rows)[:, None] & (flat < HEADS * WIDE)[None, :]
    here = far * (HEADS * WIDE) + flat[None, :]
    tl.store(wide_q + here, wanted_q.to(wide_q.dtype.element_ty), mask=mask)
    tl.store(wide_k + here, wanted_k.to(wide_k.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _copy_real_kernel(  # type: ignore[no-untyped-def]
    v, out, cu_seqlens, rows, v_row, v_head, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    flat = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = (row < tl.load(cu_seqlens + 1))[:, None]
    far = row.to(tl.int64)[:, None]
    inside = (flat < HEADS * DIM)[None, :]
    value = tl.load(v + far * v_row + (flat // DIM * v_head + flat % DIM)[None, :], mask=real & inside, other=0.0)
    tl.store(out + far * (HEADS * DIM) + flat[None, :], value, mask=(row < rows)[:, None] & inside)


def without_tail(v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """See `one_segment.without_tail`; on the current stream."""
    if v.stride(2) != 1:
        v = v.contiguous()
    rows, heads, dim = v.shape
    out = torch.empty(rows, heads, dim, dtype=v.dtype, device=v.device)
    grid = (triton.cdiv(rows, ROWS_PER_PROGRAM), triton.cdiv(heads * dim, COLUMNS_PER_PROGRAM))
    launched = _copy_real_kernel[grid](
        v,
        out,
        cu_seqlens,
        rows,
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        DIM=dim,
        ROWS=ROWS_PER_PROGRAM,
        COLUMNS=COLUMNS_PER_PROGRAM,
    )
    note(launched)
    return out


def widen(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `one_segment.widened`; on the current stream."""
    if q.stride(2) != 1 or k.stride(2) != 1:
        q, k = q.contiguous(), k.contiguous()
    rows, heads, dim = q.shape
    wide = dim + EXTRA_COLUMNS
    in_q, in_k = in_columns(q.dtype)
    wide_q, wide_k = (torch.empty(rows, heads, wide, dtype=x.dtype, device=x.device) for x in (q, k))
    grid = (triton.cdiv(rows, ROWS_PER_PROGRAM), triton.cdiv(heads * wide, COLUMNS_PER_PROGRAM))
    launched = _widen_kernel[grid](
        q,
        k,
        wide_q,
        wide_k,
        cu_seqlens,
        rows,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HEADS=heads,
        DIM=dim,
        WIDE=wide,
        IN_Q=in_q,
        IN_K=in_k,
        ROWS=ROWS_PER_PROGRAM,
        COLUMNS=COLUMNS_PER_PROGRAM,
    )
    note(launched)
    return wide_q, wide_k
