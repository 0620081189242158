"""CUDA kernels for varlen attention: which one, and what it needs. None of them reads the device from the host.

| kernel    | for                                                   | NaN of one segment in another's rows |
|-----------|-------------------------------------------------------|--------------------------------------|
| flash     | float16, bfloat16; head dim up to 256                 | never (measured)                     |
| efficient | float32; head dim above 256; another "flash" active   | decided by `tests/gpu`               |
| dense     | everything else (float64, old GPUs); O(T^2) memory    | never (by construction)              |

"Another flash": `torch.nn.attention.activate_flash_attention_impl` replaces the operation that `flash` calls, and at
least one replacement (flash-attn-4) lets a NaN cross segments. The replacement is therefore not used here. Inside of an
encoder's graphs another kernel may have been chosen (`choice.py`), the replacement among them.

Shapes: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import current_flash_attention_impl

from vit_compile.attention.fence import Varlen, segments_of_rows, without_nan
from vit_compile.attention.tail import zero_tail_

FLASH_MAX_HEAD_DIM = 256
SDPA_MAX_HEAD_DIM = 128
HALF_DTYPES = (torch.float16, torch.bfloat16)
VECTOR_BYTES = 16  # both kernels load vectors of this width


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    *,
    run: Varlen | None = None,
) -> torch.Tensor:
    """Attention of each segment within itself, on the current CUDA stream; may be captured in a CUDA graph.

    Args:
        q, k, v: [T,H,D] of one dtype, any strides.
        cu_seqlens: int32 [S+1] on the same device, not decreasing, first 0, last at most T. Not checked: that would
            synchronise.
        max_seqlen: at least the longest segment, used as it is. Rows beyond it would be left out.
        scale: factor on the scores.
        run: the kernel, as `admission` hands it out. None: `choose` names one.

    Returns:
        A new contiguous [T,H,D]; rows past the last boundary are zero, or finite with a `run` that makes them so.
    """
    if q.numel() == 0 or max_seqlen <= 0 or cu_seqlens.shape[0] < 2:
        return q.new_zeros(q.shape)
    if run is not None:
        return run(q, k, v, cu_seqlens, max_seqlen, scale)
    kernel = choose(q.dtype, q.shape[2], _capability(q.device.index), flash_usable=flash_usable())
    if kernel == "dense":
        return dense(q, k, v, cu_seqlens, scale)
    run = flash if kernel == "flash" else efficient
    return zero_tail_(run(q, k, v, cu_seqlens, max_seqlen, scale), cu_seqlens)


def choose(dtype: torch.dtype, head_dim: int, capability: tuple[int, int], *, flash_usable: bool) -> str:
    """Name of the kernel for these inputs: "flash", "efficient" or "dense".

    Args:
        dtype: of q, k and v.
        head_dim: D.
        capability: compute capability of the device, (major, minor).
        flash_usable: torch was built with FlashAttention-2 and nothing replaces it.
    """
    if dtype in HALF_DTYPES and head_dim <= FLASH_MAX_HEAD_DIM and capability >= (8, 0) and flash_usable:
        return "flash"
    if dtype == torch.float32 or dtype == torch.float16 or (dtype == torch.bfloat16 and capability >= (8, 0)):
        return "efficient"
    return "dense"


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """FlashAttention-2 as torch carries it; contiguous [T,H,D]; rows past the last boundary are unwritten."""
    head_dim = q.shape[2]
    q, k, v = ready(q), ready(k), ready(v)
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False, False, scale=scale
    )[0]
    return _unpad(out, head_dim)


def efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    """Memory-efficient attention as torch carries it; contiguous [T,H,D]; rows past the last boundary are unwritten."""
    head_dim = q.shape[2]
    q, k, v = (ready(x)[None] for x in (q, k, v))
    no_mask = 0
    out = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, no_mask, False, scale=scale
    )[0]
    return _unpad(out[0], head_dim)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
    """One masked attention over all T rows; any device and dtype; contiguous [T,H,D], zero past the last boundary.

    A mask does not stop a NaN (0 * NaN is NaN). Values that are not finite are therefore taken out before, and every
    row of a segment that had one is NaN afterwards.
    """
    segment = segments_of_rows(cu_seqlens, q.shape[0])  # 1..S inside, S+1 past the last boundary
    k, v, broken = without_nan(k, v, cu_seqlens)
    q_HTD, k_HTD, v_HTD = (x.transpose(0, 1) for x in (q, k, v))
    same_segment = segment[:, None] == segment[None, :]
    out = F.scaled_dot_product_attention(q_HTD[None], k_HTD[None], v_HTD[None], attn_mask=same_segment, scale=scale)
    out = out[0].transpose(0, 1).masked_fill(broken[:, None, None], float("nan"))
    return out.masked_fill((segment > cu_seqlens.shape[0] - 1)[:, None, None], 0).contiguous()


def ready(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where a kernel can load it in whole vectors (also strided), else an aligned copy, padded with zeros."""
    vector = VECTOR_BYTES // x.element_size()
    if x.shape[2] % vector:
        return F.pad(x, (0, vector - x.shape[2] % vector)).contiguous()
    token_stride, head_stride, last_stride = x.stride()
    if last_stride == 1 and token_stride % vector == 0 and head_stride % vector == 0 and x.data_ptr() % VECTOR_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _unpad(out: torch.Tensor, head_dim: int) -> torch.Tensor:
    # A kernel may give its output the memory order of q; the contract is contiguous.
    return (out if out.shape[2] == head_dim else out[..., :head_dim]).contiguous()


def flash_usable() -> bool:
    """Was torch built with FlashAttention-2, and does nothing replace it?"""
    return _flash_built() and current_flash_attention_impl() in (None, "FA2")


@functools.cache
def _flash_built() -> bool:
    return torch.backends.cuda.is_flash_attention_available()


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
