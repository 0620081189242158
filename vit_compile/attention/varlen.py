"""`vit_compile::varlen_attention`: the one attention operation of this package.

Rows of many images lie behind one another in one tensor; `cu_seqlens` says where each segment (an image, a frame, a
window) begins and ends, and a segment attends only within itself.

Guarantees, on every device:
- empty segments are allowed; rows past the last boundary come out as zeros (inside a graph whose padding is finite they may be
  other finite numbers, where a kernel was chosen that computes them);
- a NaN or Inf in one segment, or past the last boundary, never changes another segment's rows (float32 on a GPU: as far
  as `kernels.efficient` keeps it, see there);
- q, k and v may be strided; the output is new and contiguous;
- on CUDA nothing is read on the host, so the operation can be captured in a CUDA graph;
- differentiable once, by recomputation (on CUDA the gradient reads the boundaries on the host).

Importing this module registers the operation with torch; importing it again changes nothing. It is registered through
`torch.library.Library` because that costs half of a `custom_op` per call, and piecewise execution pays it per layer.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import register_autograd, register_fake

from vit_compile.attention import choice, kernels, reference
from vit_compile.errors import InputMismatchError

NAME = "vit_compile::varlen_attention"

_NAMESPACE, _OP_NAME = NAME.split("::")
_BACKWARD_NAME = f"{_OP_NAME}_backward"
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt max_seqlen, float scale"
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """softmax(q k^T * scale) v, each segment within itself.

    Args:
        q, k, v: [T,H,D], one dtype and device, any strides.
        cu_seqlens: int32 [S+1] on the same device: first 0, not decreasing, last at most T.
        max_seqlen: at least the longest segment, in rows. A larger bound costs time, a smaller one loses rows.
        scale: factor on the scores, usually D**-0.5.

    Returns:
        [T,H,D], contiguous, owned by the caller; rows past `cu_seqlens[-1]` are zero.

    Raises:
        InputMismatchError: ranks, shapes, dtypes or devices do not fit.
        BoundariesError, BoundError: bad boundaries or bound; on a CPU only, a GPU would have to synchronise to see it.
    """
    out: torch.Tensor = torch.ops.vit_compile.varlen_attention.default(q, k, v, cu_seqlens, max_seqlen, scale)
    return out


def _check_kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """What can be checked on fake tensors without a guard on a symbolic size."""
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise InputMismatchError(f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: expected [rows, heads, dim].")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise InputMismatchError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one dtype.")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise InputMismatchError(
            f"cu_seqlens is {cu_seqlens.dtype} with {cu_seqlens.dim()} dimensions: expected int32, 1 dimension."
        )
    if not (q.device == k.device == v.device == cu_seqlens.device):
        raise InputMismatchError(
            f"q, k, v and cu_seqlens are on {q.device}, {k.device}, {v.device} and {cu_seqlens.device}: move them to one device."
        )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    _check_kinds(q, k, v, cu_seqlens)
    if q.shape != k.shape or q.shape != v.shape:
        raise InputMismatchError(f"q, k and v are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: expected one shape.")
    if cu_seqlens.shape[0] == 0:
        raise InputMismatchError("cu_seqlens is empty: expected [segments + 1] values, at least the 0.")


def _forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    _check(q, k, v, cu_seqlens)
    return reference.forward(q, k, v, cu_seqlens, max_seqlen, scale)


def _forward_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    _check(q, k, v, cu_seqlens)
    return kernels.forward(q, k, v, cu_seqlens, max_seqlen, scale, run=choice.varlen_kernel(q, cu_seqlens, max_seqlen))


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    _check_kinds(q, k, v, cu_seqlens)
    return q.new_empty(q.shape)


def _backward_fake(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, v, cu_seqlens, max_seqlen, scale = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)
    ctx.max_seqlen, ctx.scale = max_seqlen, scale


def _differentiate(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    operation = torch.ops.vit_compile.varlen_attention_backward.default
    return (*operation(grad_out, *ctx.saved_tensors, ctx.max_seqlen, ctx.scale), None, None, None)


def _setup_no_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    """The gradient has no gradient of its own, so it keeps nothing."""


def _refuse_second_derivative(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(f"{NAME} is differentiable once: the gradient of its gradient is not implemented.")


def _register() -> Any:
    untyped: Any = torch.library  # Library has no annotations
    library = untyped.Library(_NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(f"{_OP_NAME}({_ARGUMENTS}) -> Tensor", tags=tags)
    library.impl(_OP_NAME, _forward_cpu, "CPU")
    library.impl(_OP_NAME, _forward_cuda, "CUDA")
    register_fake(NAME, _forward_fake, lib=library)
    register_autograd(NAME, _differentiate, setup_context=_setup_context, lib=library)

    backward_name = f"{_NAMESPACE}::{_BACKWARD_NAME}"
    library.define(f"{_BACKWARD_NAME}(Tensor grad_out, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", tags=tags)
    for device in ("CPU", "CUDA"):
        library.impl(_BACKWARD_NAME, reference.backward, device)
    register_fake(backward_name, _backward_fake, lib=library)
    register_autograd(backward_name, _refuse_second_derivative, setup_context=_setup_no_context, lib=library)
    return library


# The operation lives as long as this object; a second import of this file finds it registered and leaves it alone.
if not hasattr(torch.ops.vit_compile, _OP_NAME):
    _LIBRARY = _register()
