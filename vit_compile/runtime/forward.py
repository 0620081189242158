"""The forward that graphs are made of: the model's own, or the same through `torch.compile`, traced once for all budgets."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from vit_compile import _torch_compat as compat
from vit_compile.backend.entry import vit_cudagraph
from vit_compile.runtime.protocol import SupportsEncoderCudaGraph

Forward = Callable[[Mapping[str, Any], str], torch.Tensor]


def eager_forward(model: SupportsEncoderCudaGraph) -> Forward:
    """The model's fixed-shape forward as it is written."""
    return model.encoder_cudagraph_forward


def compiled_forward(
    model: SupportsEncoderCudaGraph, buffer_keys: Collection[str], compiler: str, passes: Sequence[str] | None = None
) -> Forward:
    """The same through the backend `vit_cudagraph`, without captures of its own: the manager captures the whole.

    Rows of buffers and integers among the values are traced as symbols, so that one compilation serves every budget and every
    capacity. (A dimension of size 1 is a constant to torch.compile, and gets a trace of its own.)
    """

    def forward(values: Mapping[str, Any], path: str) -> torch.Tensor:
        return model.encoder_cudagraph_forward(values, path)

    # Dynamo counts recompilations by code object, and this one would be shared by all managers of a process.
    forward.__code__ = forward.__code__.replace(co_name="encoder_forward")
    options: dict[str, Any] = {"mode": "none", "compiler": compiler, "checks": "padded"}
    options |= {} if passes is None else {"passes": passes}
    # The function and not its name: two threads that look a name up for the first time break each other in torch.
    compiled = torch.compile(forward, backend=vit_cudagraph, options=options)

    def call(values: Mapping[str, Any], path: str) -> torch.Tensor:
        marked = {name: _marked(value) if name in buffer_keys else value for name, value in values.items()}
        names = [name for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]
        pattern = rf"L\['values'\]\['({'|'.join(map(re.escape, names))})'\]" if names else r"$^"
        with compat.symbolic_ints(pattern):
            output: torch.Tensor = compiled(marked, path)
        return output

    return call


def _marked(value: Any) -> Any:
    """An alias whose rows are traced as a symbol."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] < 2:
        return value
    alias = value.detach()
    compat.mark_dynamic(alias, 0)
    return alias
