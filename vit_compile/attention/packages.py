"""Varlen kernels of other packages, where they are installed, behind the signature of `kernels.flash`.

| name | package | import |
|------|---------|--------|
| fa4  | `flash-attn-4` (extra `fa4`) | `flash_attn.cute.flash_attn_varlen_func` |
| fa3  | FlashAttention 3 (Hopper) | `flash_attn_interface.flash_attn_varlen_func` |
| fa2  | `flash-attn` 2 | `flash_attn.flash_attn_varlen_func` |

None is imported before it is asked for: importing `flash_attn.cute` alone takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from vit_compile.attention.kernels import HALF_DTYPES, ready
from vit_compile.errors import first_line

_FUNCTIONS = {
    "fa4": ("flash_attn.cute", "flash_attn_varlen_func"),
    "fa3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "fa2": ("flash_attn", "flash_attn_varlen_func"),
}
_CAPABILITY = {"fa4": (9, 0), "fa3": (9, 0), "fa2": (8, 0)}
MAX_HEAD_DIM = {"fa4": 128, "fa3": 256, "fa2": 256}
"""fa4 takes up to 256 on Hopper, but head dims above 128 were never measured here."""


def why_not(name: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> str | None:
    """Why a package's kernel cannot serve this, or None."""
    if dtype not in HALF_DTYPES:
        return f"half precision only, not {str(dtype).removeprefix('torch.')}"
    if capability < _CAPABILITY[name]:
        return f"needs a device of capability {_CAPABILITY[name][0]}.{_CAPABILITY[name][1]}, not {capability[0]}.{capability[1]}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM[name]:
        return f"head dim {head_dim}: multiples of 8 up to {MAX_HEAD_DIM[name]} only"
    found = _function(name)
    return found if isinstance(found, str) else None


@functools.cache
def _function(name: str) -> Callable[..., Any] | str:
    """A package's function, or why there is none."""
    module, function = _FUNCTIONS[name]
    try:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            return "not installed"
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except Exception as error:  # a package that is half there, or for another CUDA, fails in many ways
        return f"cannot be imported: {type(error).__name__}: {first_line(error)}"
    return found


def runner(name: str) -> Callable[..., torch.Tensor]:
    """The kernel as `run(q, k, v, cu_seqlens, max_seqlen, scale)`; [T,H,D], rows past the last boundary unwritten."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
    ) -> torch.Tensor:
        function = _function(name)
        assert not isinstance(function, str), f"{name}: {function}"
        result = function(
            *(ready(x) for x in (q, k, v)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            causal=False,
        )
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out.contiguous()

    return run
