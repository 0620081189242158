"""The Triton kernel behind `tail.zero_tail_`. Importing this file needs Triton; `tail` falls back where there is none."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from vit_compile.attention.machine_code import note

ROWS_PER_PROGRAM = 64
ELEMENTS_PER_STORE = 2048


# Nothing about sizes or alignment is specialised: one compile per dtype, so that no new size compiles inside a capture.
@triton.jit(  # type: ignore[misc, untyped-decorator, unused-ignore]
    do_not_specialize=["last", "rows", "row_elements"], do_not_specialize_on_alignment=["cu_seqlens"]
)
def _zero_tail_kernel(out, cu_seqlens, last, rows, row_elements, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first_row = tl.program_id(0) * ROWS
    begin_row = tl.maximum(first_row, tl.load(cu_seqlens + last))
    end_row = tl.minimum(first_row + ROWS, rows)
    begin = begin_row.to(tl.int64) * row_elements
    end = end_row.to(tl.int64) * row_elements
    zeros = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for start in range(begin, end, BLOCK):  # nothing to do where begin >= end
        offsets = start + tl.arange(0, BLOCK)
        tl.store(out + offsets, zeros, mask=offsets < end)


def zero_tail(out: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Set rows `cu_seqlens[-1]:` of the contiguous CUDA tensor `out` [T,H,D] to zero, on the current stream."""
    rows = out.shape[0]
    if rows == 0 or out.numel() == 0:
        return
    with torch.cuda.device(out.device):
        launched = _zero_tail_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
            out,
            cu_seqlens,
            cu_seqlens.shape[0] - 1,
            rows,
            out.numel() // rows,
            ROWS=ROWS_PER_PROGRAM,
            BLOCK=ELEMENTS_PER_STORE,
        )
        note(launched)
