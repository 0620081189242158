"""Replays are launched before the weights are looked at: what was changed since is noticed all the same, and never served."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import towers
from tests.models.test_packed_grid import captured, largest_difference, request_of, table_of
from vit_compile.models.packed_grid import PackedGridTable
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.stats import counters

BUILD = towers.tiny_qwen3_vl
REQUEST = request_of([(1, 4, 4), (1, 2, 6)])
TOLERANCE = 1e-5


def manager() -> EncoderCudaGraphManager:
    """Captured, its graphs with nothing more to show."""
    made = captured(table_of(BUILD), token_budgets=(48,), packing="greedy", mode="eager")
    for _ in range(3):
        made.execute(REQUEST)
    assert not any(graph.unseen for graph in made._captured.set.graphs.values())
    return made


def tower_of(made: EncoderCudaGraphManager) -> Any:
    """The module behind it."""
    return made.model.encoder_modules()[0]  # type: ignore[attr-defined]


def expected(made: EncoderCudaGraphManager) -> list[torch.Tensor]:
    """Features of an encoder that is made now, of a copy of the tower as it is."""
    tower = copy.deepcopy(tower_of(made)).eval()
    fresh = EncoderCudaGraphManager(PackedGridTable(tower, token_range=(4, 64)), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        return fresh.execute(REQUEST)


def new_object(tower: Any) -> None:
    """Another Parameter in the place of one."""
    layer = tower.blocks[0].mlp.linear_fc1
    layer.weight = nn.Parameter(layer.weight.detach() * 2, requires_grad=False)


def new_memory(tower: Any) -> None:
    """The same Parameter with other memory."""
    weight = tower.blocks[0].mlp.linear_fc1.weight
    weight.data = weight.data * 2


def new_module(tower: Any) -> None:
    """Another layer."""
    old = tower.blocks[1].mlp.linear_fc2
    tower.blocks[1].mlp.linear_fc2 = nn.Linear(old.in_features, old.out_features).requires_grad_(False)


def new_buffer(tower: Any) -> None:
    """A buffer that was not there."""
    tower.blocks[0].mlp.register_buffer("extra", torch.ones(1))


def in_place(tower: Any) -> None:
    """The same memory with other values: graphs read it."""
    tower.blocks[0].mlp.linear_fc1.weight.mul_(2)


CHANGES = {
    "object": (new_object, 1),
    "memory": (new_memory, 1),
    "module": (new_module, 1),
    "buffer": (new_buffer, 1),
    "in place": (in_place, 0),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changes_are_noticed(name: str) -> None:
    """The next call gives the changed tower's features, captured anew where the graphs' memory is not the weights' any more."""
    change, recaptures = CHANGES[name]
    made = manager()
    before = [feature.clone() for feature in made.execute(REQUEST)]
    change(tower_of(made))
    with counters.expect(recaptures=recaptures):
        got = made.execute(REQUEST)
    assert largest_difference(got, expected(made)) <= TOLERANCE
    if name != "buffer":
        assert largest_difference(got, before) > 1e-3, "the change shows"


@torch.no_grad()
def test_what_is_thrown_away_does_not_count() -> None:
    """One call, one hit for each item, however often it was computed; in train mode no hit at all."""
    made = manager()
    hits = made.snapshot()["graph_hits"]
    new_object(tower_of(made))
    made.execute(REQUEST)
    assert made.snapshot()["graph_hits"] == hits + 2
    tower_of(made).train()
    made.execute(REQUEST)
    tower_of(made).eval()
    found = made.snapshot()
    assert found["graph_hits"] == hits + 2
    assert found["miss_reasons"] == {"train-mode": 2}


@torch.no_grad()
def test_memory_is_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is not replayed once the memory that it reads may have gone; whether modules still hold it may wait."""
    made = manager()
    order: list[str] = []
    watch, runner = made._captured.watch, made._server.runner
    assert watch is not None

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("moved", "replaced", "training"):
        monkeypatch.setattr(watch, name, noting(name, getattr(watch, name)))
    monkeypatch.setattr(runner, "run", noting("run", runner.run))
    made.execute(REQUEST)
    assert order == ["training", "moved", "run", "replaced", "training"]
    order.clear()
    new_memory(tower_of(made))
    made.execute(REQUEST)
    assert order[:3] == ["training", "moved", "training"], "nothing ran on what was there"


@torch.no_grad()
def test_an_error_of_what_is_gone_does_not_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that fails on a replaced model says nothing; on the model as it was captured it does."""
    made = manager()
    run, left = made._server.runner.run, [RuntimeError("odd")]

    def raises_once(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return run(*args, **kwargs)

    monkeypatch.setattr(made._server.runner, "run", raises_once)
    new_object(tower_of(made))
    assert largest_difference(made.execute(REQUEST), expected(made)) <= TOLERANCE
    for _ in range(3):
        made.execute(REQUEST)
    left.append(RuntimeError("odd"))
    with pytest.raises(RuntimeError, match="odd"):
        made.execute(REQUEST)


class Scaled(nn.Linear):
    """A user's layer: an adapter with a plain attribute, that also counts its calls."""

    scale, seen = 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) * self.scale


def with_layer() -> tuple[EncoderCudaGraphManager, Scaled]:
    """A manager whose tower has one, captured and used."""
    table = table_of(BUILD)
    old = table.tower.blocks[0].mlp.linear_fc1
    layer = Scaled(old.in_features, old.out_features).requires_grad_(False).eval()
    layer.scale, layer.seen = 1.0, 0
    table.tower.blocks[0].mlp.linear_fc1 = layer
    made = captured(table, token_budgets=(48,), packing="greedy", mode="eager")
    for _ in range(3):
        made.execute(REQUEST)
    return made, layer


@torch.no_grad()
def test_own_changes_of_a_run_are_not_replacements() -> None:
    """A layer that counts its calls on itself is not captured anew at every call."""
    made, layer = with_layer()
    seen = layer.seen
    with counters.expect(recaptures=0):
        for _ in range(4):
            made.execute(REQUEST)
    assert layer.seen > seen, "on a CPU a replay is a run"


@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_a_setting_that_changes_in_train_mode_is_not_forgotten(whole: bool) -> None:
    """Switched while the tower, or the layer alone, is in train mode and runs its own code: graphs are made anew afterwards."""
    made, layer = with_layer()
    module = tower_of(made) if whole else layer
    module.train()
    layer.scale = 3.0
    for _ in range(2):
        assert largest_difference(made.execute(REQUEST), expected(made)) <= TOLERANCE
    module.eval()
    with counters.expect(recaptures=1):
        assert largest_difference(made.execute(REQUEST), expected(made)) <= TOLERANCE
    assert made.snapshot()["miss_reasons"] == {"train-mode": 4}


@torch.no_grad()
def test_a_setting_that_somebody_else_changes_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the launch and the end of a call: that call may have either value, the next one has the new."""
    made, layer = with_layer()
    together = made._server.runner._together

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        layer.scale = 3.0
        monkeypatch.undo()
        return together(*args, **kwargs)

    monkeypatch.setattr(made._server.runner, "_together", meanwhile)
    made.execute(REQUEST)
    with counters.expect(recaptures=1):
        assert largest_difference(made.execute(REQUEST), expected(made)) <= TOLERANCE


@torch.no_grad()
def test_nothing_runs_ahead_in_train_mode() -> None:
    """A batch norm's counter moves once for each call: no run is thrown away."""
    made, layer = with_layer()
    layer.add_module("norm", nn.BatchNorm1d(layer.in_features).eval())
    forward = layer.forward

    def normed(x: torch.Tensor) -> torch.Tensor:
        norm: Any = layer.norm
        return forward(norm(x))

    layer.forward = normed  # type: ignore[method-assign]
    for _ in range(3):
        made.execute(REQUEST)
    layer.train()
    norm: Any = layer.norm
    before = int(norm.num_batches_tracked)
    for _ in range(2):
        made.execute(REQUEST)
    assert int(norm.num_batches_tracked) == before + 2


@torch.no_grad()
def test_what_ran_before_an_error_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counts whether or not the replays were launched ahead: those that ran."""
    hits = []
    for ahead in (True, False):
        made = captured(table_of(BUILD), token_budgets=(16,), packing="greedy", mode="eager")
        request = request_of([(1, 4, 8), (1, 8, 8)])
        for _ in range(3):
            made.execute(request)
        made._server._was_changed = not ahead
        replay, left = made._server.runner._replay, [RuntimeError("odd"), None]

        def fails_second(graph: Any, replay: Any = replay, left: Any = left) -> torch.Tensor:
            error = left.pop()
            if error is not None:
                raise error
            return replay(graph)

        monkeypatch.setattr(made._server.runner, "_replay", fails_second)
        before = made.snapshot()["graph_hits"]
        with pytest.raises(RuntimeError, match="odd"):
            made.execute(request)
        hits.append(made.snapshot()["graph_hits"] - before)
    assert hits == [1, 1]
