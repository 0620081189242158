"""The tools' only door to the backend: compile an encoder, and ask how its last call was served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vit_compile._torch_compat import mark_dynamic
from vit_compile.errors import MissingDependencyError
from vit_compile.stats import CallRecord, counters, last_call
from vit_compile.tools.vision_models import VisionModel

MAX_GRAPHS = 16

Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`pixel_values` [N, 3, H, W] -> (tokens [N, L, D], pooled [N, D]); outputs belong to the caller."""

_CALL_COUNTERS = ("exact_replays", "padded_replays", "uncaptured_calls", "plain_calls")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSettings:
    """What the commands let a user choose of the backend's options."""

    mode: str = "auto"
    compiler: str = "inductor"
    max_graphs: int = MAX_GRAPHS
    debug_dir: str | None = None

    def options(self) -> dict[str, Any]:
        """The dict for `torch.compile(options=...)`."""
        options: dict[str, Any] = {"mode": self.mode, "compiler": self.compiler}
        if self.mode != "none":
            options["max_graphs"] = self.max_graphs
        if self.debug_dir is not None:
            options["debug_dir"] = self.debug_dir
        return options


def choose_compiler(compiler: str | None, device: torch.device) -> str:
    """The compiler to use; None means Inductor where it can work, else "aot_eager".

    Raises:
        MissingDependencyError: Inductor is asked for and the host has no compiler for what it generates.
    """
    if compiler not in (None, "inductor"):
        return str(compiler)
    found = host_compiler(device) is not None
    if compiler is None:
        return "inductor" if found else "aot_eager"
    if not found:
        raise MissingDependencyError(
            "--compiler inductor needs a C++ compiler (g++, clang++ or $CXX): install one, or use --compiler aot_eager."
        )
    return "inductor"


def host_compiler(device: torch.device) -> str | None:
    """Path of the host compiler that generated code needs: C++ for the CPU, C (for the kernel launcher) for a GPU."""
    names = ("g++", "clang++") if device.type == "cpu" else ("gcc", "clang", "cc")
    given = os.environ.get("CXX" if device.type == "cpu" else "CC")
    return next((path for name in (given, *names) if name and (path := shutil.which(name))), None)


def choose_device_type() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compile_encoder(model: VisionModel, settings: CompileSettings) -> Encode:
    """Compiles a model's encoder with `vit_cudagraph`.

    Returns:
        A function for one image tensor at a time; heights and widths are traced as symbols where the model takes any size.
    """
    from vit_compile.backend.entry import vit_cudagraph

    compiled = torch.compile(model.encoder, backend=vit_cudagraph, options=settings.options())
    any_size = model.fixed_grid is None

    def encode(pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if any_size:
            mark_dynamic(pixel_values, 2)
            mark_dynamic(pixel_values, 3)
        with torch.no_grad():
            tokens, pooled = compiled(pixel_values)
        return tokens, pooled

    return encode


def eager_encoder(model: VisionModel) -> Encode:
    """The same encoder without any compilation, as the reference."""

    def encode(pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            tokens, pooled = model.encoder(pixel_values)
        return tokens, pooled

    return encode


def calls_served() -> int:
    """How many calls the backend has served in this process."""
    counts = counters.snapshot()
    return sum(count for name in _CALL_COUNTERS if isinstance(count := counts.get(name, 0), int))


def call_since(served_before: int) -> CallRecord:
    """The record of the last call, or a plain one when the backend served none since `served_before`."""
    record = last_call()
    if record is None or calls_served() == served_before:
        return CallRecord("plain", None, None, "the backend was not reached: Dynamo ran the model without it", False)
    return record
