"""`vit_compile::varlen_attention_wide`: varlen attention whose q and k bring the columns of `one_segment` along.

A pass (`backend/passes/padding_columns.py`) makes them where q and k are computed anyway, so that a graph with room for one
segment needs no kernel of its own for them. Every other kernel leaves the columns out, by a view.

Importing this module registers the operations with torch; importing it again changes nothing.

Shapes: T rows, H heads, D head dim, S segments, E = `one_segment.EXTRA_COLUMNS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import register_fake

from vit_compile.attention import choice, kernels, one_segment, reference
from vit_compile.attention.tail import real_rows
from vit_compile.errors import InputMismatchError

NAME = "vit_compile::varlen_attention_wide"
ROWS_NAME = "vit_compile::real_rows"
"""`tail.real_rows` as an operation, once for all layers of a graph."""

_NAMESPACE, _OP_NAME = NAME.split("::")
_ROWS_OP_NAME = ROWS_NAME.split("::")[1]


def varlen_attention_wide(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """`varlen_attention` of the first D columns of q and k; no gradient.

    Args:
        q, k: [T,H,D+E]; the last E columns as `one_segment.widened` makes them for boundaries of one segment.
        v: [T,H,D].
        cu_seqlens, max_seqlen, scale: see `varlen_attention`; the scale is above `one_segment.LEAST_SCALE`.

    Returns:
        [T,H,D], as `varlen_attention` gives it.
    """
    out: torch.Tensor = torch.ops.vit_compile.varlen_attention_wide.default(q, k, v, cu_seqlens, max_seqlen, scale)
    return out


def _narrow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dim = v.shape[-1]
    if q.shape != k.shape or q.shape[:-1] != v.shape[:-1] or q.shape[-1] != dim + one_segment.EXTRA_COLUMNS:
        raise InputMismatchError(
            f"q, k and v are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: expected {one_segment.EXTRA_COLUMNS} "
            "more columns in q and k than in v."
        )
    return q[..., :dim], k[..., :dim]


def _forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    return reference.forward(*_narrow(q, k, v), v, cu_seqlens, max_seqlen, scale)


def _forward_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    narrow_q, narrow_k = _narrow(q, k, v)
    run = choice.varlen_kernel(narrow_q, cu_seqlens, max_seqlen, wide=True)
    if run is None:
        return kernels.forward(narrow_q, narrow_k, v, cu_seqlens, max_seqlen, scale)
    return run(q, k, v, cu_seqlens, max_seqlen, scale)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    return v.new_empty(v.shape)


def _real_rows_fake(like: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return like.new_empty((like.shape[0], 1, 1), dtype=torch.bool)


def _register() -> Any:
    untyped: Any = torch.library  # Library has no annotations
    library = untyped.Library(_NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag,)
    arguments = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt max_seqlen, float scale"
    library.define(f"{_OP_NAME}({arguments}) -> Tensor", tags=tags)
    library.impl(_OP_NAME, _forward_cpu, "CPU")
    library.impl(_OP_NAME, _forward_cuda, "CUDA")
    register_fake(NAME, _forward_fake, lib=library)
    library.define(f"{_ROWS_OP_NAME}(Tensor like, Tensor cu_seqlens) -> Tensor", tags=tags)
    for device in ("CPU", "CUDA"):
        library.impl(_ROWS_OP_NAME, real_rows, device)
    register_fake(ROWS_NAME, _real_rows_fake, lib=library)
    return library


# The operations live as long as this object; a second import of this file finds them registered and leaves them alone.
if not hasattr(torch.ops.vit_compile, _OP_NAME):
    _LIBRARY = _register()
