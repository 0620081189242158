"""Zero the rows past the last boundary, without reading the boundary on the host.

Varlen kernels leave those rows unwritten, and whatever the allocator had there would reach real rows of a later layer.
A Triton kernel touches only rows that must be cleared; where Triton cannot run, three torch operations do the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

Launcher = Callable[[torch.Tensor, torch.Tensor], None]


def zero_tail_(out: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Set rows `cu_seqlens[-1]:` of `out` to zero, in place, whatever they hold.

    Args:
        out: contiguous [T,H,D].
        cu_seqlens: int32 [S+1] on the same device, S >= 0.

    Returns:
        `out` itself. No synchronisation; may be captured in a CUDA graph once it has run.
    """
    launcher = _triton_launcher() if out.is_cuda else None
    if launcher is not None:
        try:
            launcher(out, cu_seqlens)
        except Exception as error:  # no C compiler, or a driver that Triton does not know: slower, but the same result
            _give_up_on_triton(error)
        else:
            return out
    return zero_tail_in_torch_(out, cu_seqlens)


def zero_tail_in_torch_(out: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`zero_tail_` in plain torch: any device, reads and writes all of `out`."""
    return out.masked_fill_(~real_rows(out, cu_seqlens), 0)


def real_rows(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """bool [T,1,1] on the device of `cu_seqlens`: is a row of `x` [T,H,D] before the last boundary?"""
    return (torch.arange(x.shape[0], device=cu_seqlens.device) < cu_seqlens[-1])[:, None, None]


_triton_works = True


def _give_up_on_triton(error: Exception) -> None:
    if torch.cuda.is_current_stream_capturing():  # the capture is broken already: its owner must hear of it
        raise error
    global _triton_works
    _triton_works = False
    log.warning("Triton cannot run here (%s): rows past the last boundary are cleared by plain torch, which is slower.", error)


@functools.cache
def _import_launcher() -> Launcher | None:
    try:
        from vit_compile.attention.tail_triton import zero_tail
    except ImportError:
        return None
    return zero_tail


def _triton_launcher() -> Launcher | None:
    return _import_launcher() if _triton_works else None
