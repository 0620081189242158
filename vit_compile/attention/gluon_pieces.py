"""Pieces of the kernel for Hopper in `varlen_gluon.py` that know nothing of its ring: layouts, blocks of rows, softmax.

Importing this file needs Triton with Gluon (3.6 or later). Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vit_compile.attention.triton_kernel import VECTOR

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)
"""Rows of q of one consumer: the height of a product of one warpgroup."""
Q_ROWS = gl.constexpr(128)
"""Rows of q of a program."""
KEYS = gl.constexpr(128)
"""Keys and values of a block."""


@gluon.constexpr_function  # type: ignore[misc, untyped-decorator, unused-ignore]
def _row_layout(width: int) -> Any:
    """16 bytes a thread, whole rows of so many columns, four warps."""
    per_row = width // VECTOR
    return gl.BlockedLayout([1, VECTOR], [32 // per_row, per_row], [4, 1], [1, 0])


@gluon.constexpr_function  # type: ignore[misc, untyped-decorator, unused-ignore]
def tile_layout(width: int, rank: int) -> Any:
    """Rows of so many 16-bit elements as the tensor cores read them: the widest swizzle that fits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * width, 128), element_bitwidth=16, rank=rank)


@gluon.constexpr_function  # type: ignore[misc, untyped-decorator, unused-ignore]
def product_layout(columns: int) -> Any:
    """A result [ROWS,columns] of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function  # type: ignore[misc, untyped-decorator, unused-ignore]
def _slots_layout(slots: int) -> Any:
    """Few slots: all of them in each warp, so that warps do not exchange sums. Many: spread, neighbours to neighbours."""
    return gl.BlockedLayout([slots // 32 if 32 <= slots <= 64 else 1], [32], [4], [0])


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _exp2(x):  # type: ignore[no-untyped-def]
    """2 to the power of x. Results below the normal numbers become zero: anything else takes two more instructions."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _sum_of(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def own_block(cu_seqlens, segments, SLOTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """First row of this program's block, end of its segment, start of its segment: as in `varlen_triton`."""
    slot = gl.arange(0, SLOTS, _slots_layout(SLOTS))
    inside = slot < segments
    starts = gl.load(cu_seqlens + slot, mask=inside, other=0)
    ends = gl.load(cu_seqlens + slot + 1, mask=inside, other=0)
    blocks = (ends - starts + Q_ROWS - 1) // Q_ROWS
    upto = gl.associative_scan(blocks, 0, _sum_of)
    program = gl.program_id(0)
    mine = (program < upto) & (program >= upto - blocks)
    start = gl.sum(gl.where(mine, starts, 0), axis=0)
    end = gl.sum(gl.where(mine, ends, 0), axis=0)
    before = gl.sum(gl.where(mine, upto - blocks, 0), axis=0)
    last = gl.max(ends, axis=0)
    used = gl.sum(blocks, axis=0)
    first = gl.where(program < used, start + (program - before) * Q_ROWS, last + (program - used) * Q_ROWS)
    return first, end, start


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _rows_at(  # type: ignore[no-untyped-def]
    pointer, stride, left, FIRST: gl.constexpr, COUNT: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr,
    DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pointers [COUNT,WIDTH] from row FIRST and column COLUMN on, and whether there are that row, of `left`, and that column."""
    row = FIRST + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    column = COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return pointer + row[:, None] * stride + column[None, :], (row < left)[:, None] & (column < DIM)[None, :]


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def store_zeros(out, out_row, left, COLUMN: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for as many of the program's rows as are `left`."""
    LAYOUT: gl.constexpr = _row_layout(WIDTH)
    at, there = _rows_at(out, out_row, left, 0, Q_ROWS, COLUMN, WIDTH, DIM, LAYOUT)
    gl.store(at, gl.zeros([Q_ROWS, WIDTH], out.dtype.element_ty, LAYOUT), mask=there)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def load_q(  # type: ignore[no-untyped-def]
    q, q_row, left, WHO: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """This consumer's rows of q, as an operand in registers."""
    at, there = _rows_at(q, q_row, left, WHO * ROWS, ROWS, COLUMN, WIDTH, DIM, _row_layout(WIDTH))
    return gl.convert_layout(gl.load(at, mask=there, other=0.0), gl.DotOperandLayout(0, product_layout(KEYS), 2))


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def store(  # type: ignore[no-untyped-def]
    out, out_row, left, acc, total, WHO: gl.constexpr, COLUMN: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """One part of the result, from where it was computed: four bytes a thread, which takes no more room or barriers."""
    LAYOUT: gl.constexpr = acc.type.layout
    at, there = _rows_at(out, out_row, left, WHO * ROWS, ROWS, COLUMN, acc.shape[1], DIM, LAYOUT)
    acc = _scaled(acc, 1.0 / total)
    gl.store(at, acc.to(out.dtype.element_ty), mask=there)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _scaled(acc, factor):  # type: ignore[no-untyped-def]
    """Every row of acc times its factor, [ROWS] in the layout of another product: the same threads, so that nothing moves."""
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def weighed(weight, values, acc):  # type: ignore[no-untyped-def]
    """Starts to add the weighed values to one part of the result."""
    operand = gl.convert_layout(weight, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(operand, values, acc, is_async=True)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def finished(acc_1, acc_2, D_2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for all products that were started."""
    if D_2 > 0:
        acc_1, acc_2 = warpgroup_mma_wait(0, deps=(acc_1, acc_2))
    else:
        acc_1 = warpgroup_mma_wait(0, deps=(acc_1,))
    return acc_1, acc_2


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def shrunk(acc_1, acc_2, shrink, D_2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Both parts of the result, of which every row is scaled down to a new maximum."""
    acc_1 = _scaled(acc_1, shrink)
    if D_2 > 0:
        acc_2 = _scaled(acc_2, shrink)
    return acc_1, acc_2


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def sums(weight):  # type: ignore[no-untyped-def]
    """Sums of each thread alone, [ROWS,4] for the four threads of a row: these are summed once, at the end."""
    return gl.sum(gl.sum(gl.reshape(weight, [ROWS, KEYS // 8, 4, 2]), axis=3), axis=1)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def softmax(score, top, total, scale, DTYPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """One block of the online softmax in base 2: weights, factor on what was summed before, new maxima and sums."""
    new_top = gl.maximum(top, gl.max(score, axis=1) * scale)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a block in which every score is -inf
    shrink = _exp2(top - shift)
    weight = _exp2(score * scale - shift[:, None])
    total = _scaled(total, shrink) + sums(weight)
    return weight.to(DTYPE), shrink, new_top, total


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def masked(score, keys):  # type: ignore[no-untyped-def]
    """-inf from key number `keys` on."""
    LAYOUT: gl.constexpr = score.type.layout
    real = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT)) < keys
    return gl.where(real[None, :], score, float("-inf"))


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def clear_half(values, keys, WHO: gl.constexpr):  # type: ignore[no-untyped-def]
    """This consumer's half of a block of values [KEYS,width] becomes zero from row `keys` on: zero times NaN is NaN."""
    COUNT: gl.constexpr = KEYS // CONSUMERS
    LAYOUT: gl.constexpr = _row_layout(values.shape[1])
    half = values.slice(WHO * COUNT, COUNT)
    real = WHO * COUNT + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT)) < keys
    half.store(gl.where(real[:, None], half.load(LAYOUT), 0.0))
