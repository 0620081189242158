"""Varlen attention in Triton, behind `triton_kernel`. Importing this file needs Triton.

Online softmax over blocks of keys, as in FlashAttention (Dao et al., 2022, arXiv:2205.14135), with three things that the graphs
of a vision encoder need:

- a program finds its segment in the boundaries, so that neither a loose bound on the longest segment nor empty segments cost
  more than the search;
- a head dim such as 72 is two products, 64 and 16 wide, in place of one of 96 or 128;
- rows behind the last boundary are set to zero, by programs that are left over.

From Hopper on (capability 9.0) whole blocks of keys and values can be loaded by the tensor memory accelerator, which takes fewer
instructions and registers than pointers do.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, import-untyped, unused-ignore]

from vit_compile.attention.machine_code import note
from vit_compile.attention.triton_kernel import LOG2_E, VECTOR, programs_for, tiles_of


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _own_block(cu_seqlens, segments, SLOTS: tl.constexpr, Q_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row of this program's block, end of its segment, start of its segment.

    A program without one has start and end equal; its first row is one behind all segments, or behind all rows.
    """
    slot = tl.arange(0, SLOTS)
    inside = slot < segments
    starts = tl.load(cu_seqlens + slot, mask=inside, other=0)
    ends = tl.load(cu_seqlens + slot + 1, mask=inside, other=0)
    blocks = (ends - starts + Q_ROWS - 1) // Q_ROWS
    upto = tl.cumsum(blocks, axis=0)
    program = tl.program_id(0)
    mine = (program < upto) & (program >= upto - blocks)
    start = tl.sum(tl.where(mine, starts, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    before = tl.sum(tl.where(mine, upto - blocks, 0), axis=0)
    last = tl.max(ends, axis=0)
    used = tl.sum(blocks, axis=0)
    first = tl.where(program < used, start + (program - before) * Q_ROWS, last + (program - used) * Q_ROWS)
    return first, end, start


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _keys_seen(  # type: ignore[no-untyped-def]
    q_1, q_2, keys_1, keys_2, values_1, values_2, acc_1, acc_2, top, total, real, scale, D_2: tl.constexpr, PARTLY: tl.constexpr
):  # fmt: skip
    """One block of keys: the new accumulators, maxima and sums. With PARTLY, only the keys that are `real` count."""
    score = tl.dot(q_1, tl.trans(keys_1))
    if D_2 > 0:
        score = tl.dot(q_2, tl.trans(keys_2), score)
    if PARTLY:
        score = tl.where(real[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a block in which every score is -inf
    weight = tl.math.exp2(score * scale - shift[:, None])
    shrink = tl.math.exp2(top - shift)
    total = total * shrink + tl.sum(weight, axis=1)
    acc_1 = acc_1 * shrink[:, None]
    weight = weight.to(values_1.dtype)
    acc_1 = tl.dot(weight, values_1, acc_1)
    if D_2 > 0:
        acc_2 = acc_2 * shrink[:, None]
        acc_2 = tl.dot(weight, values_2, acc_2)
    return acc_1, acc_2, new_top, total


# Strides come in units of `VECTOR` elements, so that the compiler knows that 16 bytes can be loaded at once. Nothing about sizes
# is specialised: one compile per dtype, head dim, kind of block and size of `SLOTS`.
@triton.jit(  # type: ignore[misc, untyped-decorator, unused-ignore]
    do_not_specialize=["rows", "segments", "heads", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head"],
    do_not_specialize_on_alignment=["cu_seqlens"],
)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, k_tiles_1, k_tiles_2, v_tiles_1, v_tiles_2,
    cu_seqlens, rows, segments, scale, heads, q_row, q_head, k_row, k_head, v_row, v_head,
    DIM: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, SLOTS: tl.constexpr,
    Q_ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """With TILES, whole blocks of keys and values come through the descriptors, [H,T,D] each, else through pointers."""
    head_number = tl.program_id(1)
    head = head_number.to(tl.int64)
    q_row, q_head = q_row * VECTOR, q_head * VECTOR
    k_row, k_head = k_row * VECTOR, k_head * VECTOR
    v_row, v_head = v_row * VECTOR, v_head * VECTOR
    out_row = heads * DIM
    first, end, start = _own_block(cu_seqlens, segments, SLOTS, Q_ROWS)
    row = tl.arange(0, Q_ROWS)
    column_1 = tl.arange(0, D_1)
    column_2 = D_1 + tl.arange(0, D_2 if D_2 > 0 else D_1)
    within = (column_2 < DIM)[None, :]
    here = out + first.to(tl.int64) * out_row + head * DIM
    if start == end:
        if first < rows:
            behind = (first + row < rows)[:, None]
            tl.store(here + row[:, None] * out_row + column_1[None, :], 0.0, mask=behind)
            if D_2 > 0:
                tl.store(here + row[:, None] * out_row + column_2[None, :], 0.0, mask=behind & within)
        return
    wanted = (first + row < end)[:, None]
    q += first.to(tl.int64) * q_row + head * q_head
    k += start.to(tl.int64) * k_row + head * k_head
    v += start.to(tl.int64) * v_row + head * v_head
    q_1 = tl.load(q + row[:, None] * q_row + column_1[None, :], mask=wanted, other=0.0)
    q_2 = q_1
    acc_1 = tl.zeros([Q_ROWS, D_1], dtype=tl.float32)
    acc_2 = acc_1
    if D_2 > 0:
        q_2 = tl.load(q + row[:, None] * q_row + column_2[None, :], mask=wanted & within, other=0.0)
        acc_2 = tl.zeros([Q_ROWS, D_2], dtype=tl.float32)
    top = tl.full([Q_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([Q_ROWS], dtype=tl.float32)
    key = tl.arange(0, KEYS)
    whole = (end - start) // KEYS
    if TILES:
        for number in tl.range(0, whole, num_stages=STAGES):
            at = start + number * KEYS
            keys_1 = k_tiles_1.load([head_number, at, 0]).reshape(KEYS, D_1)
            values_1 = v_tiles_1.load([head_number, at, 0]).reshape(KEYS, D_1)
            keys_2 = keys_1
            values_2 = values_1
            if D_2 > 0:
                keys_2 = k_tiles_2.load([head_number, at, D_1]).reshape(KEYS, D_2)
                values_2 = v_tiles_2.load([head_number, at, D_1]).reshape(KEYS, D_2)
            acc_1, acc_2, top, total = _keys_seen(
                q_1, q_2, keys_1, keys_2, values_1, values_2, acc_1, acc_2, top, total, key, scale, D_2, False
            )
    else:
        k_1 = k + key[:, None] * k_row + column_1[None, :]
        v_1 = v + key[:, None] * v_row + column_1[None, :]
        k_2 = k + key[:, None] * k_row + column_2[None, :]
        v_2 = v + key[:, None] * v_row + column_2[None, :]
        for _ in tl.range(0, whole, num_stages=STAGES):
            keys_1 = tl.load(k_1)
            values_1 = tl.load(v_1)
            keys_2 = keys_1
            values_2 = values_1
            if D_2 > 0:
                keys_2 = tl.load(k_2, mask=within, other=0.0)
                values_2 = tl.load(v_2, mask=within, other=0.0)
            acc_1, acc_2, top, total = _keys_seen(
                q_1, q_2, keys_1, keys_2, values_1, values_2, acc_1, acc_2, top, total, key, scale, D_2, False
            )
            k_1 += KEYS * k_row
            v_1 += KEYS * v_row
            k_2 += KEYS * k_row
            v_2 += KEYS * v_row
    rest = end - start - whole * KEYS
    if rest > 0:  # through pointers: what stands behind the segment, NaN maybe, is not for it
        real = key < rest
        k += whole.to(tl.int64) * KEYS * k_row
        v += whole.to(tl.int64) * KEYS * v_row
        keys_1 = tl.load(k + key[:, None] * k_row + column_1[None, :], mask=real[:, None], other=0.0)
        values_1 = tl.load(v + key[:, None] * v_row + column_1[None, :], mask=real[:, None], other=0.0)
        keys_2 = keys_1
        values_2 = values_1
        if D_2 > 0:
            there = within & real[:, None]
            keys_2 = tl.load(k + key[:, None] * k_row + column_2[None, :], mask=there, other=0.0)
            values_2 = tl.load(v + key[:, None] * v_row + column_2[None, :], mask=there, other=0.0)
        acc_1, acc_2, top, total = _keys_seen(
            q_1, q_2, keys_1, keys_2, values_1, values_2, acc_1, acc_2, top, total, real, scale, D_2, True
        )
    acc_1 = acc_1 / total[:, None]
    tl.store(here + row[:, None] * out_row + column_1[None, :], acc_1.to(out.dtype.element_ty), mask=wanted)
    if D_2 > 0:
        acc_2 = acc_2 / total[:, None]
        tl.store(here + row[:, None] * out_row + column_2[None, :], acc_2.to(out.dtype.element_ty), mask=wanted & within)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    parts: tuple[int, int],
    slots: int,
    q_rows: int,
    keys: int,
    warps: int,
    stages: int,
    tiles: bool = False,
) -> torch.Tensor:
    """See `triton_kernel.attention`; on the current stream.

    Args:
        q, k, v: [T,H,*], the last stride 1, the others multiples of `VECTOR`, T and H at least 1. What counts are the columns
            that v has.
        cu_seqlens: int32 [S+1], S at least 1.
        scale: factor on the scores.
        parts: widths of the two products that a head is cut into, powers of two from 16 on; the second may be 0.
        slots: a power of two, at least S.
        q_rows, keys: rows of q of one program, and keys that it takes at a time.
        warps, stages: of a program, and of its pipeline.
        tiles: load whole blocks of keys with the tensor memory accelerator, which devices have from capability 9.0 on.

    Returns:
        A new contiguous [T,H,D], all of it written; rows past the last boundary are zero.
    """
    rows, heads, dim = v.shape
    segments = cu_seqlens.shape[0] - 1
    out = torch.empty(rows, heads, dim, dtype=v.dtype, device=v.device)
    strides = [stride // VECTOR for x in (q, k, v) for stride in x.stride()[:2]]
    described = [tile for x in (k, v) for tile in tiles_of(x, dim, keys, parts, TensorDescriptor)] if tiles else [None] * 4
    with torch.cuda.device(v.device) if v.is_cuda else nullcontext():
        launched = _attention_kernel[(programs_for(rows, segments, q_rows), heads)](
            q,
            k,
            v,
            out,
            *described,
            cu_seqlens,
            rows,
            segments,
            scale * LOG2_E,
            heads,
            *strides,
            DIM=dim,
            D_1=parts[0],
            D_2=parts[1],
            SLOTS=slots,
            Q_ROWS=q_rows,
            KEYS=keys,
            STAGES=stages,
            VECTOR=VECTOR,
            TILES=tiles,
            num_warps=warps,
            num_stages=stages,
        )
        note(launched)
    return out
