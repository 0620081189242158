"""What the tests of all architectures share: models beside their accelerated twins, and comparisons of whole outputs.

The reference is always the untouched model with eager attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from vit_compile.models.accelerate import AcceleratedModel, accelerate
from vit_compile.runtime.graphs import EncoderGraph
from vit_compile.runtime.manager import EncoderCudaGraphManager

TOLERANCE = 1e-5
"""Of features in float32, for towers whose features are about 1."""
CLEARLY_WRONG = 1e-2


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model in eval mode with weights large enough that a wrong position or boundary shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def eager_copy(model: Any) -> Any:
    """An untouched copy that uses eager attention everywhere: the independent reference."""
    reference = copy.deepcopy(model)
    for module in reference.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"
    return reference


@contextmanager
def accelerated(model: nn.Module, **options: Any) -> Iterator[AcceleratedModel]:
    """The model accelerated, captured as it is written (no compiler), greedy, closed afterwards."""
    with accelerate(model, **{"mode": "eager", "packing": "greedy", **options}) as handle, torch.no_grad():
        handle.capture()
        assert handle.stats()["not_captured"] == []
        assert set(handle.manager.declaration.buffer_keys) <= set(handle.architecture.buffers), "its row names other buffers"
        yield handle


def difference(got: Any, want: Any, where: str = "output") -> float:
    """Largest absolute difference over everything that an output holds; types, fields, shapes and dtypes must be equal."""
    assert type(got) is type(want), f"{where}: {type(got).__name__}, not {type(want).__name__}"
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape, f"{where}: {list(got.shape)}, not {list(want.shape)}"
        assert (got.dtype, got.device) == (want.dtype, want.device), where
        return float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    if isinstance(want, Mapping):
        assert list(got.keys()) == list(want.keys()), f"{where}: {list(got)}, not {list(want)}"
        return max((difference(got[name], want[name], f"{where}.{name}") for name in want), default=0.0)
    if isinstance(want, list | tuple):
        assert len(got) == len(want), where
        return max((difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(got, want, strict=True))), default=0.0)
    assert got == want, f"{where}: {got!r}, not {want!r}"
    return 0.0


def served(handle: AcceleratedModel) -> tuple[int, dict[str, int], dict[str, int]]:
    """Hits, misses by reason, and calls that the model's own code answered."""
    stats = handle.stats()
    return stats["graph_hits"], stats["miss_reasons"], stats["own_calls"]


def counts(made: EncoderCudaGraphManager) -> tuple[int, dict[str, int]]:
    """Hits, and misses by reason."""
    snapshot = made.snapshot()
    return snapshot["graph_hits"], snapshot["miss_reasons"]


@contextmanager
def runs(made: EncoderCudaGraphManager) -> Iterator[list[tuple[str, str]]]:
    """Notes ("replay" or "eager", path) of everything that runs."""
    noted: list[tuple[str, str]] = []
    replay, eager = EncoderGraph.replay, made.model.encoder_eager_forward

    def noted_replay(self: EncoderGraph) -> torch.Tensor:
        noted.append(("replay", self.key.path))
        return replay(self)

    def noted_eager(mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        noted.append(("eager", path))
        return eager(mm_kwargs, path)

    with (
        mock.patch.object(EncoderGraph, "replay", noted_replay),
        mock.patch.object(made.model, "encoder_eager_forward", noted_eager),
    ):
        yield noted


# --- negative controls -----------------------------------------------------------------------------------------------

Spoil = Callable[[dict[str, Any]], dict[str, Any]]
"""Values of a forward -> other values for some of them."""


class SpoiledMetadata:
    """Before a table's class: some of the metadata is replaced just before the forward."""

    spoil: Spoil

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        return super().forward(path, {**values, **self.spoil(dict(values))})  # type: ignore[misc,no-any-return]


def one_segment(values: dict[str, Any]) -> dict[str, Any]:
    """All rows attend to each other."""
    boundaries = values["cu_seqlens"].clone()
    boundaries[1:] = boundaries[-1]
    return {"cu_seqlens": boundaries}


def no_positions(values: dict[str, Any]) -> dict[str, Any]:
    """Every patch is in the corner."""
    return {"position_ids": torch.zeros_like(values["position_ids"])}


def raster_order(values: dict[str, Any]) -> dict[str, Any]:
    """Neighbours in a row are merged."""
    return {"merge_index": torch.arange(len(values["merge_index"]))}


def as_it_is(values: dict[str, Any]) -> dict[str, Any]:
    """The control of the controls."""
    return {}
