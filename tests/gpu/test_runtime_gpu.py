"""The manager on a real GPU: what only recording and replaying CUDA graphs can show.

Items are grids (t, h, w); the reference is the untouched tower with its own attention, one item at a time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import vit_compile
from tests import towers
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.manager import EncoderCudaGraphManager

pytest.importorskip("transformers")
from vit_compile.models.packed_grid import PackedGridTable

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
WORKSPACE = 40 << 20
Grid = tuple[int, int, int]
REQUESTS: list[tuple[list[Grid], list[Grid]]] = [
    ([(1, 8, 8)], []),
    ([(1, 4, 4), (1, 6, 8)], []),
    ([(1, 6, 8), (1, 4, 4)], []),
    ([(1, 2, 30)], [(3, 4, 6)]),
    ([(1, 20, 20), (1, 2, 2), (1, 4, 4), (1, 2, 2), (1, 6, 6)], []),
    ([], [(2, 8, 8), (4, 2, 2)]),
    ([(1, 40, 40), (1, 4, 4)], []),
]
"""The last one has an image above the largest budget."""


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Exact float32 products, and nothing left of other tests."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()
    vit_compile.clear()
    vit_compile.counters.reset()
    yield
    torch.compiler.reset()
    gc.collect()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the wanted; inf for NaN."""
    value = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return value if value == value else float("inf")


def tower(build: Callable[..., Any], attn: str, dtype: torch.dtype) -> Any:
    """On the GPU; parameters only in `dtype`, as `from_pretrained` leaves rotary tables."""
    made = build(attn).cuda()
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made


def managed(
    build: Callable[..., Any] = towers.tiny_qwen3_vl,
    dtype: torch.dtype = torch.float32,
    capacities: Sequence[int] = (1, 4),
    **config: Any,
) -> tuple[EncoderCudaGraphManager, Any, Any]:
    """A captured manager, the table under it, and an untouched twin of its tower."""
    sizes: dict[str, Any] = {"token_range": (16, 128), "max_frames_per_video": 4, "segment_capacities": capacities}
    table = PackedGridTable(tower(build, "sdpa", dtype), **sizes)
    settings = {"mode": "eager", "packing": "greedy", "max_items_per_batch": 8, **config}
    manager = EncoderCudaGraphManager(table, EncoderConfig(**settings), device="cuda", dtype=dtype)
    manager.capture()
    return manager, table, tower(build, "eager", dtype)


def request(
    images: Sequence[Grid], clips: Sequence[Grid] = (), dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Any]:
    """Pixels on the device, grids on the host."""
    made: dict[str, Any] = {}
    for data, name, grids in (("pixel_values", "image_grid_thw", images), ("pixel_values_videos", "video_grid_thw", clips)):
        if grids:
            rows = sum(t * h * w for t, h, w in grids)
            made |= {data: towers.pixels(rows, seed).to("cuda", dtype), name: list(grids)}
        seed += 1
    return made


@torch.no_grad()
def reference(twin: Any, made: dict[str, Any]) -> list[torch.Tensor]:
    """Every item alone through the untouched tower."""
    found = []
    for data, name in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        start = 0
        for t, h, w in made.get(name, []):
            output = twin(made[data][start : start + t * h * w], grid_thw=torch.tensor([[t, h, w]], device="cuda"))
            levels = getattr(output, "deepstack_features", None) or []
            found.append(torch.cat([output.pooler_output, *levels], dim=1))
            start += t * h * w
    return found


def worst(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest relative difference of an item."""
    assert [g.shape for g in got] == [w.shape for w in want]
    return max(relative(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [towers.tiny_qwen2_5_vl, towers.tiny_qwen3_vl])
def test_every_request_equals_the_tower(build: Callable[..., Any], dtype: torch.dtype, mode: str) -> None:
    """Images, clips, both, thin and oversized ones: the tower's own numbers, in input order, mostly from graphs."""
    manager, _, twin = managed(build, dtype, mode=mode)
    assert not manager.snapshot()["not_captured"]
    for seed in range(3):
        for images, clips in REQUESTS:
            made = request(images, clips, dtype, seed)
            assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[dtype], (images, clips)
    counts = manager.snapshot()
    assert counts["miss_reasons"] == {"too-large": 3}
    assert counts["graph_hits"] + 3 == counts["items"]


def test_cost_packing_is_calibrated_and_right() -> None:
    """Every graph has a measured time, and plans chosen by it give the same features."""
    manager, _, twin = managed(packing="cost")
    assert all(graph.predicted_ms is not None and graph.predicted_ms > 0 for graph in manager.graphs())
    for images, clips in REQUESTS:
        made = request(images, clips)
        assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hazard_03_small_large_small_on_a_poisoned_pool(dtype: torch.dtype, poison_allocator: Callable[[], None]) -> None:
    """Leftovers of larger calls and NaN in fresh memory never reach real rows."""
    poison_allocator()
    manager, _, twin = managed(dtype=dtype)
    for grids in ([(1, 2, 4)], [(1, 20, 20)], [(1, 2, 4)], [(1, 8, 8), (1, 4, 4)], [(1, 2, 2)], [(1, 20, 20)], [(1, 2, 4)]):
        made = request(grids, dtype=dtype)
        poison_allocator()
        assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[dtype], grids


def test_hazard_39_a_broken_image_stays_alone() -> None:
    """NaN in one of five images changes no bit of the other four, in this call and later ones."""
    manager, _, _ = managed(dtype=torch.bfloat16)
    grids: list[Grid] = [(1, 4, 4), (1, 4, 6), (1, 6, 6), (1, 2, 8), (1, 4, 4)]
    made = request(grids, dtype=torch.bfloat16)
    clean = manager.execute(made)
    broken = dict(made, pixel_values=made["pixel_values"].clone())
    broken["pixel_values"][40:76] = float("nan")
    got = manager.execute(broken)
    assert bool(got[2].isnan().all())
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(got, clean, strict=True)) if i != 2)
    assert all(torch.equal(a, b) for a, b in zip(manager.execute(made), clean, strict=True))


def test_hazard_07_copied_features_survive_later_calls() -> None:
    """Features held over 100 more calls do not change."""
    manager, _, _ = managed()
    held = manager.execute(request([(1, 8, 8), (1, 4, 4)]))
    kept = [feature.clone() for feature in held]
    for seed in range(100):
        manager.execute(request(*REQUESTS[seed % len(REQUESTS)], seed=seed + 1))
    assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True))


def test_borrowed_features_are_graph_memory() -> None:
    """With "borrow", one replay's features are views that the next replay of the graph overwrites."""
    manager, _, twin = managed(outputs="borrow")
    first, second = request([(1, 8, 8)]), request([(1, 8, 8)], seed=1)
    a = manager.execute(first)[0]
    assert relative(a, reference(twin, first)[0]) < TOLERANCE[torch.float32]
    b = manager.execute(second)[0]
    assert a.data_ptr() == b.data_ptr()
    assert relative(b, reference(twin, second)[0]) < TOLERANCE[torch.float32]


def test_hazard_34_no_synchronisation() -> None:
    """With pixels on the device and sizes on the host nothing waits for the device, also for layouts that are new."""
    manager, _, _ = managed(dtype=torch.bfloat16)
    calls = [request(images, clips, torch.bfloat16) for images, clips in REQUESTS[:-1]]
    manager.execute(calls[0])  # metadata of the first grid: lazily built tables of transformers
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for made in calls * 3:
            manager.execute(made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert manager.snapshot()["graph_misses"] == 0


def test_pixels_on_the_host_may_be_overwritten_after_the_call() -> None:
    """Pinned or not, what the caller writes into its pixels after `execute` returns changes nothing."""
    manager, _, twin = managed()
    for pinned in (False, True):
        made = request([(1, 16, 16), (1, 4, 4)])
        want = reference(twin, made)
        pixels = made["pixel_values"].cpu()
        pixels = pixels.pin_memory() if pinned else pixels
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # the copy is queued behind this
        got = manager.execute({**made, "pixel_values": pixels})
        pixels.fill_(float("nan"))
        assert worst(got, want) < TOLERANCE[torch.float32], pinned


def test_hazard_21_eight_threads() -> None:
    """Eight threads, each with a stream and requests of its own, get their own numbers."""
    manager, _, twin = managed(packing="cost")
    work = [request(*REQUESTS[index % len(REQUESTS)], seed=index) for index in range(8)]
    wanted = [reference(twin, made) for made in work]
    torch.cuda.synchronize()
    found: list[float] = [0.0] * 8
    errors: list[BaseException] = []

    def body(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(40):
                    torch.zeros(1000, pin_memory=True)
                    found[index] = max(found[index], worst(manager.execute(work[index]), wanted[index]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert max(found) < TOLERANCE[torch.float32]
    counts = manager.snapshot()
    assert counts["graph_hits"] + counts["graph_misses"] == counts["items"]


def test_hazard_21_two_streams_are_ordered() -> None:
    """A replay on one stream waits for the one before on another, since both write the same buffers."""
    manager, _, twin = managed()
    calls = [request([(1, 8, 8)], seed=seed) for seed in range(2)]
    wanted = [reference(twin, made) for made in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for turn in range(50):
        with torch.cuda.stream(streams[turn % 2]):
            if turn % 2 == 0:
                torch.cuda._sleep(100_000)
            results.append(manager.execute(calls[turn % 2]))
    torch.cuda.synchronize()
    assert max(worst(out, wanted[turn % 2]) for turn, out in enumerate(results)) < TOLERANCE[torch.float32]


def test_hazard_20_capture_while_another_thread_uses_the_device() -> None:
    """Pinned copies and allocations of another thread do not break a capture."""
    stop = threading.Event()

    def noise() -> None:
        while not stop.is_set():
            torch.zeros(1 << 16, pin_memory=True).cuda(non_blocking=True)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        manager, _, twin = managed()
        made = request([(1, 8, 8), (1, 4, 4)])
        assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[torch.float32]
    finally:
        stop.set()
        thread.join()
    assert not manager.snapshot()["not_captured"]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_hazard_08_replaced_weights_are_recaptured(mode: str) -> None:
    """Assigned weights are noticed and captured anew; weights changed in place just work."""
    manager, table, twin = managed(mode=mode)
    made = request([(1, 8, 8), (1, 4, 4)])
    manager.execute(made)
    with torch.no_grad():
        for own, other in zip(table.tower.parameters(), twin.parameters(), strict=True):
            own.mul_(0.9)
            other.mul_(0.9)
    assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[torch.float32]
    assert manager.snapshot()["recaptures"] == 0
    fresh = {name: value * 1.05 for name, value in twin.state_dict().items()}
    twin.load_state_dict(fresh)
    table.tower.load_state_dict({name: value.clone() for name, value in fresh.items()}, assign=True)
    assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[torch.float32]
    assert manager.snapshot()["recaptures"] == 1
    assert manager.snapshot()["graph_misses"] == 0


def test_hazard_22_inference_mode_in_both_orders() -> None:
    """Captured under inference mode and used outside of it, and the other way round."""
    for first, second in ((True, False), (False, True)):
        with torch.inference_mode(first):
            manager, _, twin = managed()
            made = request([(1, 8, 8)])
            want = reference(twin, made)
            assert worst(manager.execute(made), want) < TOLERANCE[torch.float32]
        with torch.inference_mode(second):
            out = manager.execute(request([(1, 8, 8)]))
            assert worst(out, want) < TOLERANCE[torch.float32]
        if not second:
            out[0].add_(1)  # an inference tensor would refuse


def big(token_range: tuple[int, int] = (1 << 10, 1 << 16), **config: Any) -> EncoderCudaGraphManager:
    """A manager whose graphs take hundreds of MiB; not captured."""
    table = PackedGridTable(tower(towers.tiny_qwen2_vl, "sdpa", torch.bfloat16), token_range=token_range)
    settings = {"mode": "eager", "packing": "greedy", "max_items_per_batch": 8, **config}
    return EncoderCudaGraphManager(table, EncoderConfig(**settings), device="cuda", dtype=torch.bfloat16)


def settle() -> int:
    """Bytes that torch holds once everything that can go is gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_hazard_30_memory_comes_back() -> None:
    """`clear()` gives the memory of graphs and buffers back, and so does deleting a manager."""
    manager = big()
    before = settle()
    manager.capture()
    assert torch.cuda.memory_reserved() > before + 2 * WORKSPACE
    manager.clear()
    assert settle() <= before + WORKSPACE
    manager.capture()
    assert torch.cuda.memory_reserved() > before + 2 * WORKSPACE
    del manager
    assert settle() <= before + WORKSPACE


def test_hazard_29_one_pool() -> None:
    """All graphs of a ladder take less than twice what the largest takes."""
    manager = big(token_range=(1 << 12, 1 << 16))
    manager.capture()
    sizes = [graph.nbytes for graph in manager.graphs()]
    assert len(sizes) > 5
    assert sum(sizes) < 2 * max(sizes), sizes
    rows = {graph.inputs.values["hidden_states"].data_ptr() for graph in manager._captured.set.graphs.values()}
    assert len(rows) == 1, "every graph has row buffers of its own"


def test_max_graph_bytes_is_kept() -> None:
    """A budget that would exceed the cap is left out, its memory is given back, and smaller ones are captured."""
    before = settle()
    cap = 96 << 20
    manager = big(max_graph_bytes=cap)
    manager.capture()
    held = manager.graphs()
    assert held
    assert {row["code"] for row in manager.snapshot()["not_captured"]} == {"max-graph-bytes"}
    assert sum(graph.nbytes for graph in held) <= cap
    assert settle() - before <= cap + WORKSPACE
    made = request([(1, 8, 8)], dtype=torch.bfloat16)
    manager.execute(made)
    assert manager.snapshot()["graph_hits"] == 1


def test_hazard_31_out_of_memory_while_capturing() -> None:
    """A budget for which memory does not suffice is left out with the reason; the others work."""
    manager = big(token_range=(1 << 10, 1 << 18))
    _, total = torch.cuda.mem_get_info()
    held = settle()
    torch.cuda.set_per_process_memory_fraction((held + (200 << 20)) / total)
    try:
        manager.capture()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    codes = {(row["code"], row["token_budget"]) for row in manager.snapshot()["not_captured"]}
    assert ("out-of-memory", 1 << 18) in codes
    assert manager.graphs()
    made = request([(1, 8, 8)], dtype=torch.bfloat16)
    twin = tower(towers.tiny_qwen2_vl, "eager", torch.bfloat16)
    assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[torch.bfloat16]
    assert manager.snapshot()["graph_hits"] == 1


def test_hazard_35_clearing_one_encoder_while_another_replays() -> None:
    """Dropping one manager's graphs leaves those of another intact."""
    first, _, _ = managed()
    second, _, twin = managed(towers.tiny_qwen2_vl)
    made = request([(1, 8, 8), (1, 4, 4)])
    want = reference(twin, made)
    stop = threading.Event()
    errors: list[BaseException] = []

    def replaying() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    assert worst(second.execute(made), want) < TOLERANCE[torch.float32]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replaying)
    thread.start()
    try:
        for _ in range(5):
            first.clear()
            first.capture()
    finally:
        stop.set()
        thread.join()
    assert not errors, errors
    assert first.is_captured()


def test_a_forward_that_reads_the_host_is_not_captured() -> None:
    """A host read inside the forward makes the capture fail with a reason; items run eagerly and right (hazard 19)."""
    table = PackedGridTable(tower(towers.tiny_qwen2_vl, "sdpa", torch.float32), token_range=(16, 32))
    plain = table.forward

    def reading(path: str, values: Any) -> torch.Tensor:
        return plain(path, values) * float(values["hidden_states"][0, 0] == 1e9 or 1.0)

    table.forward = reading  # type: ignore[method-assign]
    manager = EncoderCudaGraphManager(table, EncoderConfig(mode="eager", packing="greedy"), device="cuda", dtype=torch.float32)
    manager.capture()
    assert {row["code"] for row in manager.snapshot()["not_captured"]} == {"capture-failed"}
    twin = tower(towers.tiny_qwen2_vl, "eager", torch.float32)
    made = request([(1, 8, 8)])
    assert worst(manager.execute(made), reference(twin, made)) < TOLERANCE[torch.float32]
    assert manager.snapshot()["miss_reasons"] == {"capture-failed": 1}
