"""Ten thousand random calls: features stay right, memory stays flat, counts stay consistent, caches stay bounded."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime import toys
from vit_compile.errors import InputError
from vit_compile.runtime import planner as planner_module
from vit_compile.runtime import table_encoder as encoder_module
from vit_compile.runtime import table_items as items_module
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.table_buffers import Layouts

CALLS = 10_000
WARM_UP = 2_000
POOL = 200
TRACED = 400
"""Calls during which every allocation of Python is traced, which makes them several times slower."""
KEPT_BYTES = 4 << 20
"""Most growth of the process after the warm-up. One feature that is kept per call would be more (7,600 x 600 bytes); what the
C library's allocator holds back is less (none was seen)."""


class SmallTower(toys.PackedTower):
    """One layer of attention, to be quick."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = self.qkv[:1]


def small_table(**kwargs: Any) -> toys.PackedTable:
    """A seeded one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return toys.PackedTable(SmallTower().eval(), **kwargs)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def traced_bytes() -> int:
    """What Python has allocated since tracing began, and still holds."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def live_tensors() -> list[torch.Tensor]:
    """Tensors that Python knows of."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def pool(rng: random.Random) -> list[dict[str, Any]]:
    """Requests of up to three images and clips, a few of them above the largest budget or with too many frames."""
    images: list[toys.Grid] = [(1, 2, 2), (1, 2, 4), (1, 4, 4), (1, 2, 6), (1, 6, 6)]
    clips: list[toys.Grid] = [(2, 2, 2), (3, 2, 2), (7, 2, 2)]
    made = []
    for seed in range(POOL):
        chosen = [rng.choices(images, k=rng.randint(0, 3)), rng.choices(clips, k=rng.randint(0, 1))]
        made.append(toys.packed_request(*chosen, seed=seed))
    return made


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_ten_thousand_calls() -> None:
    """Random requests, empty and bad ones among them: a tenth is compared with the reference, everything is counted."""
    rng = random.Random(0)
    others = live_tensors()  # of earlier tests: held, so that none of them is collected between the two counts
    table = small_table()
    manager = toys.captured(
        table, token_budgets=(2, 4, 8), max_items_per_batch=2, max_frames_per_batch=6, packing="greedy", log_every=0
    )
    requests = pool(rng)
    wants = [toys.packed_reference(table, request) for request in requests]
    bad = {"pixel_values": torch.zeros(5, toys.CHANNELS), "image_grid_thw": [(1, 2, 2)]}
    calls = items = tokens = wrong = 0
    resident = tensors = 0
    for step in range(CALLS):
        if step == WARM_UP:
            tensors, resident = len(live_tensors()) - len(others), resident_bytes()
        if step == CALLS - TRACED:
            growth, left = resident_bytes() - resident, len(live_tensors()) - len(others)
            tracemalloc.start()
            traced = 0
        if step == CALLS - TRACED // 2:
            traced = traced_bytes()
        if step % 50 == 0:
            with pytest.raises(InputError):
                manager.execute(bad)
        index = rng.randrange(POOL)
        got = manager.execute(requests[index])
        calls += bool(wants[index])
        items += len(wants[index])
        tokens += sum(map(len, wants[index]))
        if step % 10 == 0:
            wrong += toys.largest_difference(got, wants[index]) > 1e-5
        del got
    kept = traced_bytes() - traced
    tracemalloc.stop()

    assert wrong == 0
    assert left == tensors, "tensors are kept"
    assert growth < KEPT_BYTES, "the process grows"
    # A tensor's Python object and its entry in a list are more; what the interpreter pools for itself (and stops growing, seen
    # over 2,000 calls) is less.
    assert kept < TRACED // 2 * 100, "something is kept for each call"
    snapshot = manager.snapshot()
    assert (snapshot["calls"], snapshot["items"]) == (calls, items)
    assert snapshot["graph_hits"] + snapshot["graph_misses"] == items
    assert sum(snapshot["miss_reasons"].values()) == snapshot["graph_misses"]
    assert set(snapshot["miss_reasons"]) == {"too-large", "too-many-frames"}
    assert snapshot["tokens"]["replayed"] + snapshot["tokens"]["eager"] == tokens
    assert snapshot["replays"] == sum(graph["replays"] for graph in snapshot["graphs"])
    replayed = sum(graph["replays"] * graph["token_budget"] for graph in snapshot["graphs"])
    assert snapshot["tokens"]["replayed"] + snapshot["tokens"]["padding"] == replayed
    check_caches(manager, distinct=len({layout(request) for request in requests}))


def layout(request: dict[str, Any]) -> tuple[Any, ...]:
    """What plans depend on."""
    return tuple(request.get("image_grid_thw", ())), tuple(request.get("video_grid_thw", ()))


def check_caches(manager: EncoderCudaGraphManager, distinct: int) -> None:
    """No more plans than layouts, no more sizes than grids, and no more metadata blocks than batches of them."""
    planner, encoder = manager._captured.planner, manager.model
    assert planner is not None
    assert isinstance(encoder, encoder_module.TableEncoder)
    assert len(planner._plans) <= distinct
    assert encoder._spec.cache_info().currsize <= 8
    assert len(encoder._metadata._kept) <= 8
    assert len(encoder._layouts._blocks) <= 3 * distinct
    assert encoder._layouts._nbytes == sum(block.nbytes for block in encoder._layouts._blocks.values())


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More layouts than the caches hold: they stay at their bounds, and features stay right."""
    monkeypatch.setattr(planner_module, "_CACHED_PLANS", 16)
    monkeypatch.setattr(encoder_module, "CACHED_KEYS", 4)
    monkeypatch.setattr(items_module, "CACHED_KEYS", 4)
    monkeypatch.setattr(items_module, "CACHED_METADATA_BYTES", 1500)
    rng = random.Random(1)
    table = small_table()
    manager = toys.captured(table, token_budgets=(4, 16), max_items_per_batch=4, packing="greedy", verify=False)
    planner, encoder = manager._captured.planner, manager.model
    assert planner is not None
    assert isinstance(encoder, encoder_module.TableEncoder)
    encoder._layouts = Layouts(6000)
    manager.clear()  # graphs hold the cache that they were made with
    manager.capture()
    planner = manager._captured.planner
    assert planner is not None
    largest = 0
    for seed in range(300):
        grids = [(1, 2, 2 * rng.randint(1, 9)) for _ in range(rng.randint(1, 5))]
        request = toys.packed_request(grids, seed=seed)
        assert toys.largest_difference(manager.execute(request), toys.packed_reference(table, request)) <= 1e-5
        assert len(planner._plans) <= 16
        assert encoder._spec.cache_info().currsize <= 4
        assert len(encoder._metadata._kept) <= 4
        assert encoder._metadata.nbytes <= 1500
        assert encoder._layouts._nbytes <= 6000
        largest = max(largest, encoder._layouts._nbytes)
    assert largest > 3000, "the cache was never near its bound"
    assert encoder._metadata.nbytes == sum(
        value.nbytes for metadata in encoder._metadata._kept.values() for value in metadata.values()
    )
