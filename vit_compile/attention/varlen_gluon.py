"""Varlen attention for Hopper in Gluon, beside `varlen_triton`. Importing this file needs Triton with Gluon (3.6 or later).

FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608) with the boundaries, head dims and zeros of `varlen_triton`: the same
contract, the same semantics of infinite and NaN scores, other roundings.

A program takes 128 rows of q. Two warpgroups, the consumers, compute 64 of them each, while a third, the producer, loads blocks
of 128 keys and values with the tensor memory accelerator. What makes it fast:

- the ring: keys and values stand in two places each, which the producer fills while the consumers compute;
- ping-pong: the consumers take turns at the tensor cores, so that one computes exponentials while the other multiplies.

Its third device, a consumer that starts on the scores of a block before the weights of the one before meet their values, was 1 %
slower here, and is left out.

The ring. A place has a barrier `full`, which completes when all bytes have arrived, and a barrier `free`, which completes when
both consumers have let go of what stood there. Each completion flips the phase of a barrier, and a wait for a parity passes when
the phase of that parity is over. Block b stands in place b % STAGES in round b // STAGES: consumers wait for `full` with the
parity of the round, and the producer for `free` with the other one, which a fresh barrier lets pass. Consumers wait for every
`full` that the producer starts, so that nothing is in flight when a program ends. One thread of a consumer arrives for all of
them: Triton lets its four warps meet before.

The last block of a segment comes first. It may be a part of one: what stands in its place behind the end, NaN maybe, belongs to
another segment. Its scores are masked and its values are set to zero before the loop, so that the loop knows nothing of masks.

A program takes a multiprocessor for itself, even one that only writes zeros: there should not be many more slots than segments.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-not-found, import-untyped, unused-ignore]

from vit_compile.attention.gluon_pieces import (
    CONSUMERS,
    KEYS,
    Q_ROWS,
    ROWS,
    clear_half,
    finished,
    load_q,
    masked,
    own_block,
    product_layout,
    shrunk,
    softmax,
    store,
    store_zeros,
    sums,
    tile_layout,
    weighed,
)
from vit_compile.attention.machine_code import note
from vit_compile.attention.triton_kernel import LOG2_E, VECTOR, programs_for, tiles_of

STAGES = gl.constexpr(2)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
"""Of a thread: what the producer does not need goes to the consumers."""
FIRST_TURN, VALUES_CLEARED = gl.constexpr(10), gl.constexpr(12)
"""Named barriers, a turn for each consumer. Triton itself uses the first few of the sixteen."""


class Ring(NamedTuple):
    """Blocks of keys and values in shared memory, [STAGES,KEYS,width] for each part of a head, and barriers [STAGES,1]."""

    k_1: Any
    k_2: Any
    v_1: Any
    v_2: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


@gluon.constexpr_function  # type: ignore[misc, untyped-decorator, unused-ignore]
def _barrier_code(action: str, number: int, threads: int) -> str:
    """Assembly without an operand, and with the result that the language wants of it."""
    return f"{{ bar.{action} {number}, {threads}; mov.b32 $0, 0; }}"


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _named_barrier(ACTION: gl.constexpr, NUMBER: gl.constexpr):  # type: ignore[no-untyped-def]
    """`sync` waits until all threads of both consumers have come, `arrive` comes without waiting."""
    CODE: gl.constexpr = _barrier_code(ACTION, NUMBER, CONSUMERS * 128)
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _scores(q_1, q_2, ring, place, D_2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Starts on the scores [ROWS,KEYS] of one block of keys."""
    zeros = gl.zeros([ROWS, KEYS], gl.float32, product_layout(KEYS))
    score = warpgroup_mma(q_1, ring.k_1.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D_2 > 0:
        score = warpgroup_mma(q_2, ring.k_2.index(place).permute((1, 0)), score, is_async=True)
    return score


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _add_values(weight, ring, place, acc_1, acc_2, D_2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Starts to add the weighed values of one block to both parts of the result."""
    acc_1 = weighed(weight, ring.v_1.index(place), acc_1)
    if D_2 > 0:
        acc_2 = weighed(weight, ring.v_2.index(place), acc_2)
    return acc_1, acc_2


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _clear_values(ring, keys, WHO: gl.constexpr, D_2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Block 0 of the values becomes zero from row `keys` on, half of it by each consumer, before either multiplies with it."""
    mbarrier.wait(ring.v_full.index(0), 0)
    clear_half(ring.v_1.index(0), keys, WHO)
    if D_2 > 0:
        clear_half(ring.v_2.index(0), keys, WHO)
    fence_async_shared()  # tensor cores read through another proxy than threads write through
    _named_barrier("sync", VALUES_CLEARED)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _place(block):  # type: ignore[no-untyped-def]
    """Where in the ring a block stands, and the parity of its round."""
    return block % STAGES, block // STAGES % 2


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _fill(  # type: ignore[no-untyped-def]
    tiles_1, tiles_2, ring_1, ring_2, full, free, block, head, row, D_1: gl.constexpr, D_2: gl.constexpr
):  # fmt: skip
    """Starts to load KEYS rows into the place of a block, as soon as it is free."""
    place, parity = _place(block)
    mbarrier.wait(free.index(place), parity ^ 1)
    mbarrier.expect(full.index(place), 2 * KEYS * (D_1 + D_2))  # bytes; those outside of a tensor come as zeros, and count
    tile_1 = ring_1.index(place).reshape([1, KEYS, D_1])
    tma.async_copy_global_to_shared(tiles_1, [head, row, 0], full.index(place), tile_1)
    if D_2 > 0:
        tile_2 = ring_2.index(place).reshape([1, KEYS, D_2])
        tma.async_copy_global_to_shared(tiles_2, [head, row, D_1], full.index(place), tile_2)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _produce(  # type: ignore[no-untyped-def]
    ring, k_tiles_1, k_tiles_2, v_tiles_1, v_tiles_2, head, last_row, blocks, D_1: gl.constexpr, D_2: gl.constexpr
):  # fmt: skip
    """Keys of block b + 1 before values of block b: the order in which the consumers free the places.

    Blocks count from the end of the segment, whose last one starts at `last_row`.
    """
    _fill(k_tiles_1, k_tiles_2, ring.k_1, ring.k_2, ring.k_full, ring.k_free, 0, head, last_row, D_1, D_2)
    for block in range(1, blocks):
        row = last_row - block * KEYS
        _fill(k_tiles_1, k_tiles_2, ring.k_1, ring.k_2, ring.k_full, ring.k_free, block, head, row, D_1, D_2)
        _fill(v_tiles_1, v_tiles_2, ring.v_1, ring.v_2, ring.v_full, ring.v_free, block - 1, head, row + KEYS, D_1, D_2)
    row = last_row - (blocks - 1) * KEYS
    _fill(v_tiles_1, v_tiles_2, ring.v_1, ring.v_2, ring.v_full, ring.v_free, blocks - 1, head, row, D_1, D_2)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _take_turn(WHO: gl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until the other consumer has started its products: the tensor cores take them in order."""
    _named_barrier("sync", FIRST_TURN + WHO)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _give_turn(more, WHO: gl.constexpr):  # type: ignore[no-untyped-def]
    """The turn goes to the other consumer: from the last to the first only if that one has `more` blocks to come.

    So every arrival has its wait: with n blocks, both barriers complete n - 1 times.
    """
    if WHO == CONSUMERS - 1:
        if more:
            _named_barrier("arrive", FIRST_TURN)
    else:
        _named_barrier("arrive", FIRST_TURN + WHO + 1)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _other_blocks(  # type: ignore[no-untyped-def]
    ring, q_1, q_2, acc_1, acc_2, weight, shrink, top, total, blocks, scale, WHO: gl.constexpr, D_2: gl.constexpr
):  # fmt: skip
    """All blocks but the first: the other consumer's products run while this one computes weights."""
    DTYPE: gl.constexpr = weight.dtype
    for block in range(1, blocks):
        place, parity = _place(block)
        before, before_parity = _place(block - 1)
        acc_1, acc_2 = shrunk(acc_1, acc_2, shrink, D_2)
        mbarrier.wait(ring.v_full.index(before), before_parity)
        _take_turn(WHO)
        sum_1, sum_2 = _add_values(weight, ring, before, acc_1, acc_2, D_2)
        mbarrier.wait(ring.k_full.index(place), parity)
        score = _scores(q_1, q_2, ring, place, D_2)
        _give_turn(block + 1 < blocks, WHO)
        score = warpgroup_mma_wait(0, deps=(score,))
        acc_1, acc_2 = finished(sum_1, sum_2, D_2)
        mbarrier.arrive(ring.v_free.index(before))
        mbarrier.arrive(ring.k_free.index(place))
        weight, shrink, top, total = softmax(score, top, total, scale, DTYPE)
    acc_1, acc_2 = shrunk(acc_1, acc_2, shrink, D_2)
    return acc_1, acc_2, weight, total


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _consume(  # type: ignore[no-untyped-def]
    ring, q, out, q_row, out_row, left, blocks, last_keys, scale,
    WHO: gl.constexpr, DIM: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr,
):  # fmt: skip
    """One consumer: its ROWS rows of q, and of out, against `blocks` blocks of keys, at least one.

    The program has `left` rows, and the first block, the last one of the segment, has `last_keys` keys.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    q_1 = load_q(q, q_row, left, WHO, 0, D_1, DIM)
    q_2 = q_1
    acc_1 = gl.zeros([ROWS, D_1], gl.float32, product_layout(D_1))
    acc_2 = acc_1
    if D_2 > 0:
        q_2 = load_q(q, q_row, left, WHO, D_1, D_2, DIM)
        acc_2 = gl.zeros([ROWS, D_2], gl.float32, product_layout(D_2))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, product_layout(KEYS)))

    mbarrier.wait(ring.k_full.index(0), 0)
    score = warpgroup_mma_wait(0, deps=(_scores(q_1, q_2, ring, 0, D_2),))
    mbarrier.arrive(ring.k_free.index(0))
    if last_keys < KEYS:
        score = masked(score, last_keys)
    weight, shrink, top, total = softmax(score, top, gl.zeros_like(sums(score)), scale, DTYPE)
    if last_keys < KEYS:
        _clear_values(ring, last_keys, WHO, D_2)

    if WHO == CONSUMERS - 1:
        _give_turn(blocks > 1, WHO)  # the first consumer goes first
    acc_1, acc_2, weight, total = _other_blocks(ring, q_1, q_2, acc_1, acc_2, weight, shrink, top, total, blocks, scale, WHO, D_2)
    place, parity = _place(blocks - 1)
    mbarrier.wait(ring.v_full.index(place), parity)
    acc_1, acc_2 = _add_values(weight, ring, place, acc_1, acc_2, D_2)
    acc_1, acc_2 = finished(acc_1, acc_2, D_2)
    total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, acc_1.type.layout))
    store(out, out_row, left, acc_1, total, WHO, 0, DIM)
    if D_2 > 0:
        store(out, out_row, left, acc_2, total, WHO, D_1, DIM)


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _blocks_in_ring(dtype: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], tile_layout(WIDTH, 2))


@gluon.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _barriers(ARRIVALS: gl.constexpr):  # type: ignore[no-untyped-def]
    """One for each place in the ring."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(barriers.index(place), count=ARRIVALS)
    return barriers


# Strides come in units of `VECTOR` elements, so that the compiler knows that 16 bytes can be loaded at once. Nothing about sizes
# is specialised: one compile per dtype, head dim and size of `SLOTS`.
@gluon.jit(  # type: ignore[misc, untyped-decorator, unused-ignore]
    do_not_specialize=["rows", "segments", "heads", "q_row", "q_head"],
    do_not_specialize_on_alignment=["cu_seqlens"],
)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q, out, k_tiles_1, k_tiles_2, v_tiles_1, v_tiles_2, cu_seqlens, rows, segments, scale, heads, q_row, q_head,
    DIM: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, SLOTS: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Keys and values come through the descriptors, [H,T,D] each."""
    head = gl.program_id(1)
    q_row, q_head = q_row * VECTOR, q_head * VECTOR
    out_row = heads * DIM
    first, end, start = own_block(cu_seqlens, segments, SLOTS)
    q += first.to(gl.int64) * q_row + head.to(gl.int64) * q_head
    out += first.to(gl.int64) * out_row + head * DIM
    if start == end:
        store_zeros(out, out_row, rows - first, 0, D_1, DIM)
        if D_2 > 0:
            store_zeros(out, out_row, rows - first, D_1, D_2, DIM)
        return
    blocks = (end - start + KEYS - 1) // KEYS
    last_row = start + (blocks - 1) * KEYS
    last_keys = end - last_row
    left = end - first

    DTYPE: gl.constexpr = out.dtype.element_ty
    k_1 = _blocks_in_ring(DTYPE, D_1)
    v_1 = _blocks_in_ring(DTYPE, D_1)
    k_2 = k_1
    v_2 = v_1
    if D_2 > 0:
        k_2 = _blocks_in_ring(DTYPE, D_2)
        v_2 = _blocks_in_ring(DTYPE, D_2)
    ring = Ring(k_1, k_2, v_1, v_2, _barriers(1), _barriers(CONSUMERS), _barriers(1), _barriers(CONSUMERS))
    fence_async_shared()  # the barriers, for the tensor memory accelerator
    gl.warp_specialize(
        [
            (_consume, (ring, q, out, q_row, out_row, left, blocks, last_keys, scale, 0, DIM, D_1, D_2)),
            (_consume, (ring, q, out, q_row, out_row, left, blocks, last_keys, scale, 1, DIM, D_1, D_2)),
            (_produce, (ring, k_tiles_1, k_tiles_2, v_tiles_1, v_tiles_2, head, last_row, blocks, D_1, D_2)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _descriptor(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, shape, strides, block, tile_layout(block[-1], rank=3))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    parts: tuple[int, int],
    slots: int,
) -> torch.Tensor:
    """See `triton_kernel.attention`; on the current stream, on a device of capability 9.0.

    Args:
        q, k, v: [T,H,*], bfloat16 or float16, the last stride 1, the others multiples of `VECTOR`, 16 byte aligned, T and H at
            least 1. What counts are the columns that v has, a multiple of 8 from 16 to 128: for these there are registers and
            shared memory enough.
        cu_seqlens: int32 [S+1], S at least 1.
        scale: factor on the scores, above 0.
        parts: widths of the two products that a head is cut into, powers of two from 16 on; the second may be 0.
        slots: a power of two, at least S.

    Returns:
        A new contiguous [T,H,D], all of it written; rows past the last boundary are zero.
    """
    rows, heads, dim = v.shape
    segments = cu_seqlens.shape[0] - 1
    out = torch.empty(rows, heads, dim, dtype=v.dtype, device=v.device)
    described = [tile for x in (k, v) for tile in tiles_of(x, dim, KEYS.value, parts, _descriptor)]
    with torch.cuda.device(v.device) if v.is_cuda else nullcontext():
        launched = _attention_kernel[(programs_for(rows, segments, Q_ROWS.value), heads)](
            q,
            out,
            *described,
            cu_seqlens,
            rows,
            segments,
            scale * LOG2_E,
            heads,
            q.stride(0) // VECTOR,
            q.stride(1) // VECTOR,
            DIM=dim,
            D_1=parts[0],
            D_2=parts[1],
            SLOTS=slots,
            VECTOR=VECTOR,
            num_warps=4,
        )
        note(launched)
    return out
