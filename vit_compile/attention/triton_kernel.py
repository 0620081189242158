"""The project's own varlen attention (`varlen_triton.py`, `varlen_gluon.py`): which calls it takes, and how a head and its rows
are cut up.

torch's FlashAttention-2 pads a head dim of 72 to 96, launches a block for every part of every slot up to the bound on the longest
segment, and leaves the rows behind the last one to another kernel. Microseconds of one call inside a graph on an H200 (bfloat16,
16 heads of 72, q, k and v strided; FlashAttention-2 with the tightest bound, and with the loose one that a graph has; both kinds
of block):

| rows, slots | FlashAttention-2, tight / loose | 64 / 128 rows a block | hopper |
| --- | ---: | ---: | ---: |
| 1 x 196, 1 | 12.4 / 12.4 | 8.1 / 10.6 | 8.3 |
| 1 x 784, 1 | 28.5 / 28.2 | 21.6 / 25.5 | 15.7 |
| 1 x 4096, 16 | 369 / 372 | 273 / 206 | 174 |
| 8 x 784, 8 | 139 / 155 | 108 / 103 | 98 |
| 8 x 784, 640 | 241 / 774 | 125 / 150 | 212 |
| 20 x 400, 20 | 113 / 140 | 85 / 86 | 99 |

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vit_compile.attention import kernels
from vit_compile.attention.fence import Varlen
from vit_compile.attention.problem import Problem

log = logging.getLogger(__name__)
T = TypeVar("T")

BLOCKS: dict[str, dict[str, int]] = {
    "triton-64": {"q_rows": 64, "keys": 64, "warps": 4, "stages": 2},
    "triton-128": {"q_rows": 128, "keys": 64, "warps": 4, "stages": 3},
}
"""Two of many ways to cut the work that were timed on fifteen shapes: for many or short segments, and for long ones. The same two
are the best where descriptors load the keys."""
WIDE_FROM, OF_WIDE = 96, {"triton-128": {"warps": 8, "stages": 2}}
"""From so many columns on, the accumulators of 128 rows do not fit into the registers of four warps."""
SLOTS = (64, 1024, 4096)
"""Room for segments that there is code for: few sizes, since each is a compile."""
LEAST_SCALE = 1e-6
"""The largest score is found before it is scaled, so that the scale must be above 0, in float32 too."""
LEAST_WIDTH, LARGEST_HEAD_DIM = 16, 128
CAPABILITY, OF_TILES = (8, 0), (9, 0)
"""Capabilities of a device that runs the kernel, and of one that loads blocks of keys by descriptors."""
LOG2_E = 1.4426950408889634
VECTOR = 8
"""Elements in 16 bytes: a head is a multiple of them."""
HOPPER, HOPPER_CAPABILITY = "hopper", (9, 0)
"""The kernel for Hopper (`varlen_gluon.py`), and the one capability that has its instructions."""
LEAST_ROWS = {"triton-128": 1024, HOPPER: 512}
"""With fewer rows "triton-64" was the fastest of the three wherever they were timed: up to 261 rows against "hopper", which wins
from 784 on, and up to 784 against "triton-128" (head dims 64 to 80, H200, docs/benchmarks/attention-kernels.json). Large blocks
leave multiprocessors idle."""
HOPPER_SLOTS = 64
"""Room for segments there: a program takes a multiprocessor for itself, also one that finds nothing to do."""


def parts_of(head_dim: int) -> tuple[int, int]:
    """Widths of the two products for a head: the largest power of two within it, and one for what is left, or 0."""
    first = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first
    return first, max(LEAST_WIDTH, 1 << (rest - 1).bit_length()) if rest else 0


def slots_for(segments: int) -> int:
    """The least of `SLOTS` with room for so many segments."""
    return next(size for size in SLOTS if size >= segments)


def programs_for(rows: int, segments: int, q_rows: int) -> int:
    """Programs for each head: every segment may end with a part of a block, and so may the rows behind the last one."""
    return -(-rows // q_rows) + min(segments, rows) + 1


def tiles_of(x: torch.Tensor, dim: int, keys: int, parts: tuple[int, int], descriptor: Callable[..., T]) -> list[T | None]:
    """How the tensor memory accelerator finds blocks of x [T,H,*]: one descriptor for each part of a head.

    Columns from `dim` on are outside, and come as zeros.

    Args:
        dim, keys: columns that count, and rows of a block.
        parts: see `parts_of`; None for one that is 0.
        descriptor: makes one of a tensor, its shape [H,T,D], strides, and a block's shape.
    """
    rows, heads, _ = x.shape
    shape, strides = [heads, rows, dim], [x.stride(1), x.stride(0), 1]
    return [descriptor(x, shape, strides, [1, keys, width]) if width else None for width in parts]


def why_not(problem: Problem, capability: tuple[int, int]) -> str | None:
    """Why a varlen problem is not for these kernels, or None."""
    if problem.torch_dtype not in kernels.HALF_DTYPES or capability < CAPABILITY:
        return f"{problem.dtype} on a device of capability {capability[0]}.{capability[1]}"
    head_dim = problem.head_dim
    if head_dim % VECTOR or not LEAST_WIDTH <= head_dim <= LARGEST_HEAD_DIM:
        return f"head dim {head_dim}"
    if problem.segments > SLOTS[-1]:
        return f"room for {problem.segments} segments"
    return None if _triton() is not None else "Triton is not installed"


def runner(name: str) -> Varlen:
    """The kernel with one of `BLOCKS`."""
    return functools.partial(attention, name=name)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    *,
    name: str,
) -> torch.Tensor:
    """Attention of each segment within itself; a new contiguous [T,H,D], zero behind the last boundary.

    q and k may have further columns (those of `one_segment`): what counts are the D columns that v has. A segment reads
    nothing of another one. `max_seqlen` plays no part.
    """
    if not _takes(scale, cu_seqlens, SLOTS[-1]):
        return _other(q, k, v, cu_seqlens, max_seqlen, scale)
    tiles = v.is_cuda and torch.cuda.get_device_capability(v.device) >= OF_TILES
    blocks = BLOCKS[name] | (OF_WIDE.get(name, {}) if sum(parts_of(v.shape[2])) >= WIDE_FROM else {})
    slots = slots_for(cu_seqlens.shape[0] - 1)
    return _called(_triton(), q, k, v, cu_seqlens, scale, described=tiles, slots=slots, tiles=tiles, **blocks)


def hopper_why_not(problem: Problem, capability: tuple[int, int]) -> str | None:
    """Why a varlen problem is not for the kernel for Hopper, or None."""
    if capability != HOPPER_CAPABILITY:
        return f"a device of capability {capability[0]}.{capability[1]}"
    if problem.segments > HOPPER_SLOTS:
        return f"room for {problem.segments} segments"
    return why_not(problem, capability) or (None if _gluon() is not None else "Triton has no Gluon that fits")


def hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """As `attention`, by the kernel for Hopper, for up to `HOPPER_SLOTS` segments."""
    if not _takes(scale, cu_seqlens, HOPPER_SLOTS):
        return _other(q, k, v, cu_seqlens, max_seqlen, scale)
    return _called(_gluon(), q, k, v, cu_seqlens, scale, described=True, slots=HOPPER_SLOTS)


def _takes(scale: float, cu_seqlens: torch.Tensor, room: int) -> bool:
    """Is the scale one under which the largest score is the largest scaled one, and is there room for the segments?"""
    return scale > LEAST_SCALE and cu_seqlens.shape[0] - 1 <= room


def _called(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    described: bool,
    **how: Any,
) -> torch.Tensor:
    """A module's `attention` on operands as it takes them; `described`: descriptors are made of k and v."""
    q, k, v = map(kernels.ready, (q, k, v))
    k, v = map(_describable, (k, v)) if described else (k, v)
    made: torch.Tensor = module.attention(q, k, v, cu_seqlens.contiguous(), scale, parts=parts_of(v.shape[2]), **how)
    return made


def _other(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """What torch has, for calls that are not for the own kernels."""
    return kernels.forward(q[..., : v.shape[2]], k[..., : v.shape[2]], v, cu_seqlens, max_seqlen, scale)


def _describable(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, or a copy where its rows or heads are one and the same in memory, which a descriptor need not take."""
    return x if all(x.stride()[:2]) else x.clone(memory_format=torch.contiguous_format)


def _triton() -> Any:
    """The module with the kernel, None without Triton. Whether it runs here is seen when it is tried (`admission.probe`)."""
    return _module("vit_compile.attention.varlen_triton")


def _gluon() -> Any:
    """The module with the kernel for Hopper, None without a Triton that has Gluon."""
    return _module("vit_compile.attention.varlen_gluon")


@functools.cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except Exception as error:  # a Triton that does not fit this machine: slower kernels, but the same result
        log.warning("%s cannot be imported here (%s): its attention kernel is not used.", name, error)
        return None
