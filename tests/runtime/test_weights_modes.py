"""Train mode of modules that keep it in other places than most."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import towers
from tests.models.test_packed_grid import largest_difference, reference, request_of
from vit_compile.models.accelerate import encoder_for
from vit_compile.runtime.weights import WeightWatch

REQUEST = request_of([(1, 4, 4), (1, 2, 6)])


class Asks(nn.Module):
    """`training` is a property."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.layer.training

    @training.setter
    def training(self, value: bool) -> None:
        pass


def test_train_mode_may_be_a_property() -> None:
    """It is asked for, each time."""
    module = nn.Sequential(Asks(), nn.Linear(2, 2)).eval()
    asking: Any = module[0]
    watch = WeightWatch([module])
    assert not watch.training()
    asking.layer.train()
    assert watch.training()
    asking.layer.eval()
    assert not watch.training()
    module[1].train()
    assert watch.training()


@torch.no_grad()
def test_a_tower_with_a_compiled_layer_is_served() -> None:
    """A layer that `torch.compile` has wrapped is a module without an attribute of its own for train mode."""
    tower: Any = towers.tiny_qwen3_vl().eval()
    want = reference(lambda *args, **options: tower, REQUEST)
    tower.blocks[0] = torch.compile(tower.blocks[0], backend="eager")
    encoder = encoder_for(tower, token_budgets=(48,), mode="eager", packing="greedy")
    encoder.capture()
    for _ in range(4):
        assert largest_difference(encoder.execute(REQUEST), want) < 1e-5
    assert encoder.snapshot()["miss_reasons"] == {}
    tower.blocks[0].train()
    assert largest_difference(encoder.execute(REQUEST), want) < 1e-5
    assert set(encoder.snapshot()["miss_reasons"]) == {"train-mode"}
