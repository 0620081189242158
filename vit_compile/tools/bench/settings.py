"""What `vit-compile bench` measures and how: one frozen record, checked in one place. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vit_compile.errors import OptionError
from vit_compile.options import COMPILERS, check_choice, positive_int, positive_ints
from vit_compile.runtime.config import SEGMENT_CAPACITIES

DTYPES = ("float32", "bfloat16", "float16")
CACHES = ("fresh", "shared")
DEFAULT_TOWER = "qwen3-vl-8b"
DEFAULT_TRAFFIC = "chat"

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""Largest relative difference of an image's features from eager's (norm over norm) that counts as rounding. Random weights are
the worst case: torch.compile alone was seen to cost 0.03 in bfloat16 on 32 layers."""

H200_PEAK_TFLOPS = 790.0
"""Dense bfloat16 or float16 on one H200, as large matrix products reach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """One run of the benchmark."""

    tower: str = DEFAULT_TOWER
    """A name from `towers.TOWERS`; ignored where `model` is given."""

    small: bool = False
    """A tiny tower of the same architecture, for a CPU."""

    weights: Path | None = None
    """Folder of a checkpoint for the named tower. None: random weights."""

    model: str | None = None
    """Folder of any model that `accelerate` serves as a packed or as a dense tower."""

    traffic: str = DEFAULT_TRAFFIC
    """A preset of `planning.traffic.PRESETS`, or "single:1x224,8x448": one request, repeated, for each case."""

    trace: Path | None = None
    """A JSONL file of requests, instead of `traffic`."""

    requests: int = 150
    """Measured requests of each case."""

    seed: int = 2
    """Of the measured requests. The ladder is fitted to requests of the next seed, warm-up requests have the one after it."""

    peers: tuple[str, ...] | None = None
    """Names from `peers.PEERS`. None: all."""

    budgets: tuple[int, ...] | None = None
    """Ladder of `vit-full`, in output tokens. None: fitted."""

    max_graphs: int = 12
    """Most budgets on a fitted ladder. A budget has a graph for each segment capacity that it can have."""

    max_tokens: int | None = None
    """Largest budget, in output tokens. None: what the traffic needs, at most 4096 unless one image is larger."""

    capacities: tuple[int, ...] = SEGMENT_CAPACITIES
    """Segment capacities of `vit-full` beside the largest number of segments."""

    dtype: str = "bfloat16"
    device: str = "cuda"
    compiler: str = "inductor"
    """What compiles, for every peer that compiles."""

    seconds: float = 60.0
    """Most seconds of timing per peer and case; a peer that is slower serves fewer requests, and says so."""

    check_requests: int = 8
    """Requests of each case whose features are compared with eager's."""

    tolerance: float | None = None
    """See `TOLERANCES`, which holds where this is None."""

    peak_tflops: float | None = None
    """Of the device, for the roofline. None: known for an H200 in half precision, else there is no roofline."""

    cache: str = "fresh"
    """"fresh": every peer starts with an empty Inductor cache of its own; "shared": with whatever is in the user's."""

    warm_start: bool = False
    """Set the compiled peers up a second time, to see what a warm cache is worth."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("compiler", self.compiler, COMPILERS)
        check_choice("cache", self.cache, CACHES)
        for name in ("requests", "max_graphs", "check_requests"):
            object.__setattr__(self, name, positive_int(name, getattr(self, name)))
        if self.max_tokens is not None:
            object.__setattr__(self, "max_tokens", positive_int("max_tokens", self.max_tokens))
        if self.budgets is not None:
            object.__setattr__(self, "budgets", positive_ints("budgets", self.budgets))
        object.__setattr__(self, "capacities", positive_ints("capacities", self.capacities))
        for name in ("seconds", "tolerance", "peak_tflops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name}={value!r}: expected a number above 0.")
        if self.model is not None and (self.small or self.weights is not None):
            raise OptionError("--model brings its own size and weights: leave out --small and --weights.")

    @property
    def allowed_difference(self) -> float:
        """The tolerance that holds."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance

    def peak_flops(self, device_name: str) -> float | None:
        """FLOP/s of the roofline on this device, or None."""
        if self.peak_tflops is not None:
            return self.peak_tflops * 1e12
        return H200_PEAK_TFLOPS * 1e12 if "H200" in device_name and self.dtype != "float32" else None
