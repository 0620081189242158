"""Vision encoders at CUDA-graph replay speed, for any mix of image sizes, with the same numbers as eager.

`torch.compile(model, backend="vit_cudagraph", options={...})` needs no import of this package; the names below are for
warming up, watching and building budgets. They are loaded on first use, so that importing the package is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_compile import errors
    from vit_compile.attention.varlen import varlen_attention
    from vit_compile.backend.runnable import clear
    from vit_compile.backend.warmup import WarmupReport, warmup
    from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
    from vit_compile.options import BackendOptions
    from vit_compile.planning import budgets
    from vit_compile.runtime.config import EncoderConfig
    from vit_compile.runtime.manager import EncoderCudaGraphManager
    from vit_compile.runtime.protocol import SupportsEncoderCudaGraph
    from vit_compile.runtime.saved_cache import CacheReport, load_cache, save_cache
    from vit_compile.runtime.table import EncoderTable
    from vit_compile.stats import SKIP_CODES, CallRecord, Skip, counters, last_call

__version__ = "0.1.0"

_HOMES = {
    "AcceleratedModel": "vit_compile.models.accelerate",
    "SKIP_CODES": "vit_compile.stats",
    "BackendOptions": "vit_compile.options",
    "CacheReport": "vit_compile.runtime.saved_cache",
    "CallRecord": "vit_compile.stats",
    "EncoderConfig": "vit_compile.runtime.config",
    "EncoderCudaGraphManager": "vit_compile.runtime.manager",
    "EncoderTable": "vit_compile.runtime.table",
    "Skip": "vit_compile.stats",
    "SupportsEncoderCudaGraph": "vit_compile.runtime.protocol",
    "WarmupReport": "vit_compile.backend.warmup",
    "accelerate": "vit_compile.models.accelerate",
    "budgets": "vit_compile.planning",
    "clear": "vit_compile.backend.runnable",
    "counters": "vit_compile.stats",
    "encoder_for": "vit_compile.models.accelerate",
    "errors": "vit_compile",
    "last_call": "vit_compile.stats",
    "load_cache": "vit_compile.runtime.saved_cache",
    "save_cache": "vit_compile.runtime.saved_cache",
    "varlen_attention": "vit_compile.attention.varlen",
    "warmup": "vit_compile.backend.warmup",
}

__all__ = [
    "SKIP_CODES",
    "AcceleratedModel",
    "BackendOptions",
    "CacheReport",
    "CallRecord",
    "EncoderConfig",
    "EncoderCudaGraphManager",
    "EncoderTable",
    "Skip",
    "SupportsEncoderCudaGraph",
    "WarmupReport",
    "accelerate",
    "budgets",
    "clear",
    "counters",
    "encoder_for",
    "errors",
    "last_call",
    "load_cache",
    "save_cache",
    "varlen_attention",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "budgets"):
        return import_module(f"{_HOMES[name]}.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vit_compile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
