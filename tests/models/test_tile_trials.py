"""Tiles at capture: every path is tried with whole tiles, and with company where two of them fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vit_compile.models.tiles import Tiles, TileTable
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.manager import EncoderCudaGraphManager

SIZES = {"small": 4, "large": 9}
WIDTH = 8


class Tower(nn.Module):
    """[N, T, WIDTH] -> [N * T, WIDTH]; with `mixes`, what a tile becomes depends on the tiles beside it."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mixes = nn.Linear(WIDTH, WIDTH), mixes

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.layer(tiles))
        if self.mixes:  # by the real neighbour, so that padding behind them changes nothing
            made = made + 0.5 * torch.cat([torch.zeros_like(made[:1]), made[:-1]])
        return made.flatten(0, 1)


def manager(tower: Tower, tiles: int) -> EncoderCudaGraphManager:
    """Budgets of so many tiles on both paths."""
    paths = {
        name: Tiles(forward=lambda **values: tower(*values.values()), shapes={name: (tokens, WIDTH)}, tokens=tokens)
        for name, tokens in SIZES.items()
    }
    table = TileTable(paths, modules=[tower.eval()], width=WIDTH)
    ladders = {name: (tiles * tokens,) for name, tokens in SIZES.items()}
    config = EncoderConfig(path_token_budgets=ladders, max_items_per_batch=4, mode="eager", packing="greedy")
    made = EncoderCudaGraphManager(table, config, device="cpu", dtype=torch.float32)
    made.capture()
    return made


@pytest.mark.parametrize("tiles", [2, 3, 4, 7])
def test_every_path_is_tried(tiles: int) -> None:
    """With room for three tiles or more, a trial has two and padding behind: nothing is left for the first requests to show."""
    found = {key.path: graph.unseen for key, graph in manager(Tower(mixes=False), tiles)._captured.set.graphs.items()}
    assert found == dict.fromkeys(SIZES, set() if tiles > 2 else {"company"})


@pytest.mark.parametrize("tiles", [3, 4])
def test_tiles_that_see_each_other_are_refused(tiles: int) -> None:
    """On both paths, at capture."""
    made = manager(Tower(mixes=True), tiles)
    held = made._captured.set
    assert not held.graphs
    assert {(key.path, skip.code) for key, skip in held.skips.items()} == {(name, "padding-unsafe") for name in SIZES}
