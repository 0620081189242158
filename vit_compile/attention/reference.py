"""Varlen attention one segment at a time: the CPU kernel, and the gradient on every device.

Exact isolation by construction: nothing of one segment is ever an operand of another one's arithmetic. Boundaries are
read on the host, which is free on a CPU and a synchronisation on a GPU, so on a GPU only the gradient uses this file.

Shapes: T rows, H heads, D head dim, S segments, L rows of one segment.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from vit_compile.errors import BoundariesError, BoundError


def segment_ranges(cu_seqlens: torch.Tensor, rows: int, max_seqlen: int) -> list[tuple[int, int]]:
    """Half-open row ranges of the segments that are not empty.

    Args:
        cu_seqlens: int32 [S+1], any device (read on the host).
        rows: rows of q, k and v.
        max_seqlen: the caller's bound on the longest segment, in rows.

    Raises:
        BoundariesError: the boundaries do not start at 0, decrease, or go past `rows`.
        BoundError: a segment is longer than `max_seqlen`. A GPU kernel would leave its last rows out without a word.
    """
    boundaries = cu_seqlens.tolist()
    if boundaries[0] != 0:
        raise BoundariesError(f"cu_seqlens starts at {boundaries[0]}: the first boundary must be 0.")
    if boundaries[-1] > rows:
        raise BoundariesError(f"cu_seqlens ends at {boundaries[-1]} but q, k and v have {rows} rows: give at most {rows}.")
    ranges = []
    for i, (start, end) in enumerate(itertools.pairwise(boundaries)):
        if end < start:
            raise BoundariesError(f"cu_seqlens decreases from {start} to {end} at segment {i}: an empty segment repeats a value.")
        if end - start > max_seqlen:
            raise BoundError(f"max_seqlen={max_seqlen} but segment {i} has {end - start} rows: pass at least that.")
        if end > start:
            ranges.append((start, end))
    return ranges


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Attention of each segment within itself; q, k, v [T,H,D] of any strides; a new contiguous [T,H,D], zero past the end."""
    out = q.new_zeros(q.shape)
    for start, end in segment_ranges(cu_seqlens, q.shape[0], max_seqlen):
        q_HLD, k_HLD, v_HLD = (x[start:end].transpose(0, 1) for x in (q, k, v))
        out[start:end] = F.scaled_dot_product_attention(q_HLD[None], k_HLD[None], v_HLD[None], scale=scale)[0].transpose(0, 1)
    return out


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `forward` by recomputation, in float32 or better; rows past the last boundary get zeros.

    Args:
        grad_out: gradient of the output, [T,H,D].
        q, k, v, cu_seqlens, max_seqlen, scale: what `forward` was called with.

    Returns:
        New contiguous tensors [T,H,D] in the dtype of q, k and v.
    """
    grads = (q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape))
    exact = torch.promote_types(q.dtype, torch.float32)
    for start, end in segment_ranges(cu_seqlens, q.shape[0], max_seqlen):
        grad, qs, ks, vs = (x[start:end].transpose(0, 1).to(exact) for x in (grad_out, q, k, v))  # [H,L,D]
        weights = torch.softmax(qs @ ks.transpose(1, 2) * scale, dim=-1)  # [H,L,L]
        grad_weights = grad @ vs.transpose(1, 2)
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
        found = (grad_scores @ ks, grad_scores.transpose(1, 2) @ qs, weights.transpose(1, 2) @ grad)
        for target, value in zip(grads, found, strict=True):
            target[start:end] = value.transpose(0, 1).to(target.dtype)
    return grads
