"""Vision encoders at CUDA-graph replay speed, for any mix of image sizes, with the same numbers as eager.

`torch.compile(model, backend="vit_cudagraph", options={...})` needs no import of this package; the names below are for
warming up, watching and building budgets.
"""

from vit_compile import errors
from vit_compile.attention import varlen as _varlen
from vit_compile.backend.runnable import clear
from vit_compile.backend.warmup import WarmupReport, warmup
from vit_compile.options import BackendOptions
from vit_compile.planning import budgets
from vit_compile.stats import SKIP_CODES, CallRecord, Skip, counters, last_call

__version__ = "0.1.0"
__all__ = [
    "SKIP_CODES",
    "BackendOptions",
    "CallRecord",
    "Skip",
    "WarmupReport",
    "budgets",
    "clear",
    "counters",
    "errors",
    "last_call",
    "warmup",
]

del _varlen  # imported so that the op exists
