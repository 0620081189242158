"""Adapters that say `new_metadata`: what they give is theirs to give away, since the encoder keeps it as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from tests import towers
from tests.models import test_kimi, test_paddleocr_vl
from tests.runtime import toys
from vit_compile.models.accelerate import encoder_for
from vit_compile.models.packed_grid import PackedGridTable
from vit_compile.runtime.table import EncoderTable
from vit_compile.runtime.table_encoder import TableEncoder
from vit_compile.runtime.table_items import MetadataCache

KEY = (2, 4, 6)


def packed(build: Callable[[], Any]) -> EncoderTable:
    """The adapter of a bare tower."""
    return PackedGridTable(build())


TABLES: dict[str, Callable[[], EncoderTable]] = {
    **{
        build.__name__: partial(packed, build)
        for build in (towers.tiny_qwen2_vl, towers.tiny_qwen2_5_vl, towers.tiny_qwen3_vl, towers.tiny_glm4v)
    },
    "kimi_k25": lambda: table_of(test_kimi.k25()),
    "paddleocr_vl": lambda: table_of(test_paddleocr_vl.model()),
}


def table_of(model: Any) -> EncoderTable:
    """The adapter of a whole model."""
    encoder = encoder_for(model, mode="eager", token_budgets=(64,)).model
    assert isinstance(encoder, TableEncoder)
    return encoder.table


@pytest.mark.parametrize("name", TABLES)
def test_nobody_else_holds_it(name: str) -> None:
    """Writing into what one call gave changes neither what another gave, nor what later ones give."""
    table = TABLES[name]()
    assert table.new_metadata
    (path,) = table.paths
    first, second = table.item_metadata(KEY, path), table.item_metadata(KEY, path)
    want = {key: value.clone() for key, value in second.items()}
    storages = [value.untyped_storage().data_ptr() for given in (first, second) for value in given.values()]
    assert len(set(storages)) == len(storages)
    for value in first.values():
        value.fill_(7)
    for given in (second, table.item_metadata(KEY, path)):
        assert given.keys() == want.keys()
        assert all(torch.equal(value, want[key]) for key, value in given.items())


class Reusing(toys.PackedTable):
    """Fills the same memory for every item."""

    room = torch.zeros(256, dtype=torch.int64)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        found = dict(super().item_metadata(key, path))
        positions = self.room[: len(found["positions"])].copy_(found["positions"] + key[1])
        return {**found, "positions": positions}


@pytest.mark.parametrize("new", [False, True])
def test_copies_are_kept_of_what_is_not_new(new: bool) -> None:
    """By default an adapter may write again into what it gave; one that says that it does not is taken at its word."""
    table = Reusing(toys.packed_table().tower)
    table.new_metadata = new  # type: ignore[misc]
    (path,) = table.paths
    cache = MetadataCache(table, {path: ("pixels",)}, torch.float32)
    kept = cache((1, 2, 2), path)["positions"]
    cache((1, 4, 4), path)
    assert kept.tolist() == ([4, 5, 6, 7] if new else [2, 3, 4, 5])
