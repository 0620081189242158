"""What the backend must know about each attention operation: its boundaries, its bounds, and what it can promise.

A table without torch and without models. Names are as they appear in a graph: "namespace::operation" for an operator,
the bare name for a function or a higher-order operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_BOUNDARY = re.compile(r"cu_?(seq|window)")
_BOUND = re.compile(r"max_?seq_?len|max_[qk]$|max_length|max_window")


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """One attention operation, as the backend sees it."""

    name: str
    """As in a graph: "namespace::operation", or a function's bare name."""

    boundaries: tuple[str, ...] = ()
    """Arguments that hold cumulative segment boundaries in rows (int32, first 0, last the number of real rows)."""

    bounds: tuple[str, ...] = ()
    """Arguments that bound the longest segment, in rows."""

    full_capture: bool = False
    """May run inside a captured graph: boundaries come from device memory and nothing depends on the host."""

    clears_tail: bool = False
    """Rows past the last boundary come out as zero. False: they are unwritten, and a capture clears them itself."""

    isolates_nan: bool = False
    """A NaN in one segment, or in padding rows, is known never to reach another segment's rows. False also where nobody
    measured. Dense attention isolates the items of a batch but not the rows of one item, so it is False there."""


_FLASH_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_k")
_FLASH_BOUNDS = ("max_seqlen_q", "max_seqlen_k")

_OPS = (
    AttentionOp(
        "vit_compile::varlen_attention",
        ("cu_seqlens",),
        ("max_seqlen",),
        full_capture=True,
        clears_tail=True,
        isolates_nan=True,
    ),
    AttentionOp(
        "vit_compile::varlen_attention_wide",
        ("cu_seqlens",),
        ("max_seqlen",),
        full_capture=True,
        clears_tail=True,
        isolates_nan=True,
    ),
    # Dense attention: the batch dimension is the only boundary.
    AttentionOp("scaled_dot_product_attention", full_capture=True),
    AttentionOp("aten::scaled_dot_product_attention", full_capture=True),
    AttentionOp("flex_attention", full_capture=True),
    AttentionOp("flash_attn::_flash_attn_forward", full_capture=True),
    # torch.nn.attention.varlen. Measured with FlashAttention-2; another implementation can be activated in its place,
    # and with flash-attn-4 a NaN does cross, so nothing is promised.
    AttentionOp("torch_attn::_varlen_attn", ("cu_seq_q", "cu_seq_k"), ("max_q", "max_k"), full_capture=True),
    AttentionOp("torch_attn::_varlen_attn_out", ("cu_seq_q", "cu_seq_k"), ("max_q", "max_k"), full_capture=True),
    # The flash_attn packages. Version 3 has one operation for dense and varlen: there the boundaries are None when dense.
    AttentionOp("flash_attn::_flash_attn_varlen_forward", _FLASH_BOUNDARIES, _FLASH_BOUNDS, full_capture=True),
    AttentionOp("flash_attn_3::_flash_attn_forward", _FLASH_BOUNDARIES, _FLASH_BOUNDS, full_capture=True),
    AttentionOp("flash_attn_3::fwd", _FLASH_BOUNDARIES, _FLASH_BOUNDS, full_capture=True),
    # Their bound is a CPU tensor that is read on the host at each call: a capture would freeze it.
    AttentionOp("vllm::flash_attn_maxseqlen_wrapper", ("cu_seqlens",), ("max_seqlen",)),
    AttentionOp("vllm::fa4_flash_attn_maxseqlen_wrapper", ("cu_seqlens",), ("max_seqlen",)),
    # Its cu_seqlens holds element offsets for q, k, v and the output, not row boundaries, so it is not one here.
    AttentionOp("vllm::flashinfer_wrapper", (), ("max_seqlen",)),
)

DEFAULT_SPLITTING_OPS: dict[str, AttentionOp] = {op.name: op for op in _OPS}
"""The operations at which a graph is split unless told otherwise, by name."""


def describe(name: str) -> AttentionOp | None:
    """The entry for a name, or None. An overload ("...::op.default") and a "higher_order::" prefix make no difference."""
    return DEFAULT_SPLITTING_OPS.get(_plain(name))


def from_schema(name: str, argument_names: Iterable[str]) -> AttentionOp:
    """An entry for an operation that the table does not know, from the names of its arguments.

    Args:
        name: as in a graph.
        argument_names: all arguments in the order of the schema.

    Returns:
        The table's entry where there is one. Else an entry with the arguments that are named like boundaries
        (`cu_seqlens`, `cu_seq_q`, `cu_window_seqlens`, ...) or bounds (`max_seqlen_q`, `max_q`, `max_length_k`, ...), and
        no promises: no full capture, no isolation.
    """
    known = describe(name)
    if known is not None:
        return known
    names = tuple(argument_names)
    return AttentionOp(
        _plain(name),
        boundaries=tuple(argument for argument in names if _BOUNDARY.match(argument)),
        bounds=tuple(argument for argument in names if _BOUND.match(argument)),
    )


def _plain(name: str) -> str:
    name = name.removeprefix("higher_order::")
    return name.split(".")[0] if "::" in name else name
