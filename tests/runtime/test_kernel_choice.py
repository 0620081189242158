"""Attention kernels of an encoder's graphs: when they are chosen, and what the recording sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.toys import PackedTable, PackedTower
from vit_compile.attention import choice
from vit_compile.attention.choice import KernelChoices
from vit_compile.backend.cuda import Recorder
from vit_compile.runtime import graphs
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graphs import EncoderGraph
from vit_compile.runtime.manager import EncoderCudaGraphManager


class StandIn:
    """A recorder without a device: it runs what it is asked to record, once."""

    device = torch.device("cpu")
    choose_kernels, observe = Recorder.choose_kernels, Recorder.observe

    def __init__(self, kernels: KernelChoices) -> None:
        self.kernels = kernels

    def session(self) -> Any:
        """Nothing to switch to."""
        return contextlib.nullcontext()

    def record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        """Something that counts as a graph, and the result."""
        return object(), function()


def test_graphs_are_recorded_with_the_chosen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One observed run with the default, then the choice, then warm-ups and the recording with the chosen kernel."""
    monkeypatch.setattr(graphs, "reserved_bytes", lambda device: 0)
    log: list[str | None] = []
    q, cu_seqlens = torch.zeros(8, 2, 8), torch.tensor([0, 4, 8], dtype=torch.int32)

    def timer(call: Callable[[], object], device: torch.device, give_up_s: float = 0.0) -> float:
        log.append("timed")
        return 1e-6

    def forward(values: Any, path: str) -> torch.Tensor:
        run = choice.varlen_kernel(q, cu_seqlens, 4)
        log.append(None if run is None else "chosen")
        return torch.zeros(8, 3)

    choice.forget()
    kernels = KernelChoices("dense", torch.device("cpu"), timer)
    inputs = EncoderCudaGraphCaptureInputs({}, output_tokens=8)
    made = EncoderGraph(graphs.GraphKey("image", 8), forward, inputs, 3, StandIn(kernels))  # type: ignore[arg-type]
    made.record()
    assert log == [None, "chosen", "chosen", "chosen"], "observed, two warm-ups, recorded"
    assert [row["kernel"] for row in kernels.rows()] == ["dense"]
    log.clear()
    made.record()
    assert log == [None, "chosen", "chosen", "chosen"]
    choice.forget()


@pytest.mark.parametrize("attention", ["auto", "default", "fa4"])
def test_without_cuda_nothing_is_chosen(attention: str) -> None:
    """On a CPU the option has no effect, and the snapshot says that nothing was chosen."""
    config = EncoderConfig(mode="eager", attention=attention, token_budgets=(16,), max_items_per_batch=2)
    with EncoderCudaGraphManager(PackedTable(PackedTower().eval()), config, device="cpu", dtype=torch.float32) as manager:
        assert manager.is_captured()
        assert manager.snapshot()["attention"] == []
