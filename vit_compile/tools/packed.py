"""The tools' door to packed encoders: images at their native sizes through the graphs of an accelerated tower."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from vit_compile.models.accelerate import accelerate
from vit_compile.stats import CallRecord, counters, record_call
from vit_compile.tools.compiling import CompileSettings
from vit_compile.tools.vision_models import VisionModel

MODES = ("auto", "full")
"""Modes in which there is a packed form: a whole forward per graph."""


class PackedEncoder:
    """An `Encode` for single images, and `many` for lists of them. A context manager that gives the graphs back.

    Args:
        model: of an architecture with a packed form (docs/models.md).
        settings: its compiler is used, and `mode` must be one of `MODES`.
        token_budgets: sizes of the graphs, in tokens.

    Raises:
        ModelError: the tower has no packed form.
    """

    def __init__(self, model: VisionModel, settings: CompileSettings, token_budgets: Sequence[int]) -> None:
        assert settings.mode in MODES, "other modes capture between attentions, or not at all"
        self.token_budgets = tuple(token_budgets)
        self._encoder, started = model.encoder, time.perf_counter()
        self._handle = accelerate(model.encoder.tower, token_budgets=self.token_budgets, compiler=settings.compiler)
        self._handle.capture()
        self.setup_s = time.perf_counter() - started

    def __call__(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, 3, H, W] -> (tokens [1, L, D], pooled [1, D]); leaves a record for `last_call`."""
        before = self._replays()
        ((tokens, pooled),) = self.many([pixel_values])
        record = self._record(tokens.shape[1], before)
        counters.add({"exact": "exact_replays", "padded": "padded_replays"}.get(record.kind, "uncaptured_calls"))
        record_call(record)
        return tokens, pooled

    def many(self, images: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[1, 3, H, W] each, of any sizes, in one call -> (tokens, pooled) of each."""
        with torch.no_grad():
            outputs = self._handle.encode([image[0] for image in images])
            return [self._encoder.of_output(output) for output in outputs]

    def stats(self) -> dict[str, Any]:
        """See `AcceleratedModel.stats`."""
        return self._handle.stats()

    def _replays(self) -> dict[int, int]:
        """By budget."""
        found = dict.fromkeys(self.token_budgets, 0)
        for graph in self._handle.stats()["graphs"]:
            found[graph["token_budget"]] += graph["replays"]
        return found

    def _record(self, tokens: int, before: dict[int, int]) -> CallRecord:
        after = self._replays()
        served = [budget for budget in after if after[budget] > before[budget]]
        if len(served) != 1:
            return CallRecord("uncaptured", tokens, None, "no graph was replayed, see the encoder's statistics", False)
        return CallRecord("exact" if served[0] == tokens else "padded", tokens, f"packed {served[0]} tokens", None, False)

    def __enter__(self) -> Self:
        """Itself; the graphs are captured already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the handle."""
        self._handle.close()


@dataclass(frozen=True, slots=True)
class PackedRun:
    """All pictures of a run in one call, beside eager one by one."""

    pictures: int
    sizes: int
    graphs: int
    graph_bytes: int
    replays: int
    """Of the one call."""

    padded_share: float
    setup_s: float
    ms: float
    eager_ms: float
    worst_token_relative: float
    """Largest difference of a token from eager, in that one call."""

    within_tolerance: bool
