"""The manager's life: made, captured, used, cleared, captured again; what it accepts, hands out, refuses and says."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.runtime import toys
from vit_compile import counters
from vit_compile.errors import GridError, InputError, ModalityError, ProtocolError, SkipError, VitCompileError
from vit_compile.runtime import graphs
from vit_compile.runtime.capture_inputs import BudgetGraphMetadata, EncoderCudaGraphCaptureInputs
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graphs import EncoderGraph
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.protocol import SupportsEncoderCudaGraph

TOLERANCE = 1e-5
GREEDY: dict[str, Any] = {"packing": "greedy"}


@pytest.fixture
def table() -> toys.PackedTable:
    """A packed tower."""
    return toys.packed_table()


def check(manager: EncoderCudaGraphManager, table: toys.PackedTable, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """Features equal the reference."""
    got = manager.execute(request)
    assert toys.largest_difference(got, toys.packed_reference(table, request)) <= TOLERANCE
    return got


@contextmanager
def no_work(manager: EncoderCudaGraphManager) -> Iterator[None]:
    """Any replay, eager run or fill of a buffer fails the test, and nothing may be counted."""
    before = manager.snapshot()

    def forbidden(*args: object, **kwargs: object) -> None:
        pytest.fail("something ran")

    with (
        mock.patch.object(EncoderGraph, "replay", forbidden),
        mock.patch.object(manager.model, "encoder_eager_forward", forbidden),
        mock.patch.object(manager._server.runner, "_fill", forbidden),
    ):
        yield
    assert manager.snapshot() == before


def graph_storages(manager: EncoderCudaGraphManager) -> set[int]:
    """Memory that replays write."""
    return {graph.output.untyped_storage().data_ptr() for graph in manager._captured.set.graphs.values()}


def storages(features: list[torch.Tensor]) -> list[int]:
    """Memory of features."""
    return [feature.untyped_storage().data_ptr() for feature in features]


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_the_constructor_does_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer, no forward and no capture before `capture()`, whatever the mode and the form of the model."""
    model = toys.HandWritten()
    for name in ("prepare_encoder_cudagraph_capture_inputs", "encoder_cudagraph_forward", "encoder_eager_forward"):
        monkeypatch.setattr(model, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
    with counters.expect(captures=0, skips={}):
        for mode in ("compiled", "eager"):
            manager = EncoderCudaGraphManager(model, EncoderConfig(mode=mode), device="cpu", dtype=torch.float32)
    assert not manager.is_captured()
    assert manager.graphs() == ()
    assert manager.get_num_graphs_to_capture() == 5 * len(toys.ROW_WIDTHS)
    tables = toys.packed_table(), toys.twin_table()
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, lambda *args, name=name, **kwargs: pytest.fail(f"torch.{name} was called"))
    for table in tables:
        EncoderCudaGraphManager(table, device="cpu", dtype=torch.float32)


def test_capture_is_idempotent(table: toys.PackedTable) -> None:
    """A second `capture()` does nothing: the same graphs, buffers and counts."""
    manager = toys.manager(table)
    with counters.expect(captures=manager.get_num_graphs_to_capture()):
        manager.capture()
    graphs, snapshot = dict(manager._captured.set.graphs), manager.snapshot()
    with counters.expect(captures=0):
        manager.capture()
    assert all(manager._captured.set.graphs[key] is graph for key, graph in graphs.items())
    assert manager.snapshot() == snapshot


def test_the_context_manager_captures_and_clears(table: toys.PackedTable) -> None:
    """Inside the block graphs are there, behind it they are not, also after an error."""
    request = toys.packed_request([(1, 4, 4)])
    with toys.manager(table) as manager:
        assert manager.is_captured()
        check(manager, table, request)
        assert manager.snapshot()["graph_hits"] == 1
    assert not manager.is_captured()
    assert manager.graphs() == ()
    check(manager, table, request)
    with pytest.raises(InputError), manager:
        manager.execute({"pixel_values": None})
    assert not manager.is_captured()


def test_cleared_then_eager_then_captured_again(table: toys.PackedTable) -> None:
    """Without graphs everything is right and eager, with the reason; a new capture serves again, and counts go on."""
    manager = toys.captured(table)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6)], [(2, 2, 2)])
    check(manager, table, request)
    manager.clear()
    manager.clear()
    assert manager.snapshot()["graphs"] == []
    check(manager, table, request)
    assert manager.snapshot()["miss_reasons"] == {"not-captured": 3}
    manager.capture()
    check(manager, table, request)
    snapshot = manager.snapshot()
    assert (snapshot["graph_hits"], snapshot["graph_misses"], snapshot["calls"]) == (6, 3, 3)
    assert len(snapshot["graphs"]) == manager.get_num_graphs_to_capture()


def test_before_capture_everything_is_eager(table: toys.PackedTable) -> None:
    """A manager that was never captured serves all the same."""
    manager = toys.manager(table)
    check(manager, table, toys.packed_request([(1, 4, 4)], [(2, 2, 2)]))
    assert manager.snapshot()["miss_reasons"] == {"not-captured": 2}


def test_switched_off(table: toys.PackedTable) -> None:
    """`enabled=False`: nothing is captured, and everything runs eagerly for that reason."""
    manager = toys.captured(table, enabled=False)
    assert not manager.is_captured()
    assert manager.get_num_graphs_to_capture() == 0
    check(manager, table, toys.packed_request([(1, 4, 4), (1, 2, 2)]))
    assert manager.snapshot()["miss_reasons"] == {"disabled": 2}
    assert counters.captures == 0


def test_train_mode_and_back(table: toys.PackedTable) -> None:
    """No capture and no replay in train mode, with the reason; and the reason is forgotten with the mode."""
    request = toys.packed_request([(1, 4, 4)])
    table.tower.train()
    manager = toys.captured(table)
    assert not manager.is_captured()
    check(manager, table, request)
    assert manager.snapshot()["miss_reasons"] == {"train-mode": 1}
    table.tower.eval()
    manager.capture()
    check(manager, table, request)
    table.tower.train()
    check(manager, table, request)
    table.tower.eval()
    manager.clear()
    check(manager, table, request)
    assert manager.snapshot()["miss_reasons"] == {"train-mode": 2, "not-captured": 1}
    assert manager.snapshot()["graph_hits"] == 1


def test_a_capture_that_breaks_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that breaks its contract half way: the error comes out, no graph is kept, and a later capture is complete."""
    model = toys.HandWritten()
    manager = toys.manager(model)
    right = model.prepare_encoder_cudagraph_capture_inputs
    made: list[weakref.ref[torch.Tensor]] = []

    def wrong(*args: Any) -> EncoderCudaGraphCaptureInputs:
        inputs = right(*args)
        made.append(weakref.ref(inputs.values["rows"]))
        if args[0] == 8:
            del inputs.values["scale"]
        return inputs

    monkeypatch.setattr(model, "prepare_encoder_cudagraph_capture_inputs", wrong)
    with pytest.raises(ProtocolError, match="no tensor for the buffer 'scale'"):
        manager.capture()
    assert not manager.is_captured()
    gc.collect()
    assert len(made) > 2
    assert all(reference() is None for reference in made)
    request = toys.written_request([3, 2])
    assert toys.largest_difference(manager.execute(request), toys.written_reference(model, request)) <= TOLERANCE
    monkeypatch.setattr(model, "prepare_encoder_cudagraph_capture_inputs", right)
    manager.capture()
    assert len(manager.graphs()) == manager.get_num_graphs_to_capture()


def test_a_progress_bar_is_no_output(table: toys.PackedTable, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar is no output: stdout stays clean, and every graph is captured."""
    manager = toys.manager(table)
    manager.capture(progress=True)
    assert len(manager.graphs()) == manager.get_num_graphs_to_capture()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("model", [toys.packed_table, toys.tiled_table, toys.twin_table, toys.HandWritten])
def test_the_compiled_forward(model: Callable[[], Any]) -> None:
    """`mode="compiled"`: the same features through torch.compile, and no compilation after `capture()`."""
    made = model()
    manager = EncoderCudaGraphManager(
        made, EncoderConfig(compiler="eager", packing="greedy", token_budgets=(6, 12)), device="cpu", dtype=torch.float32
    )
    manager.capture()
    assert manager.snapshot()["not_captured"] == []
    requests: list[tuple[Any, Any]] = {
        toys.PackedTable: [(toys.packed_request([(1, 4, 4), (1, 2, 4)], [(2, 2, 2)]), toys.packed_reference)],
        toys.TiledTable: [(toys.tiled_request([(1, 2), (0, 0)]), toys.tiled_reference)],
        toys.TwinTable: [(toys.twin_request([(2, 2, 4, 1), (1, 2, 2, 0)]), toys.twin_reference)],
        toys.HandWritten: [(toys.written_request([3, 4], width), toys.written_reference) for width in toys.ROW_WIDTHS],
    }[type(made)]
    with counters.expect(graphs_seen=0, piece_compiles=0, captures=0):
        for request, reference in requests:
            assert toys.largest_difference(manager.execute(request), reference(made, request)) <= TOLERANCE
    assert manager.snapshot()["graph_misses"] == 0


# --- what is handed out ----------------------------------------------------------------------------------------------


def test_copies_are_the_callers(table: toys.PackedTable) -> None:
    """Held over a hundred more calls, and written to: nothing else changes, and nothing of them."""
    manager = toys.captured(table, **GREEDY)
    grids: list[toys.Grid] = [(1, 4, 4), (1, 2, 6), (1, 8, 8)]
    request = toys.packed_request(grids, [(2, 2, 2)])
    held = check(manager, table, request)
    want = [feature.clone() for feature in held]
    for seed in range(100):
        manager.execute(toys.packed_request(grids, [(2, 2, 2)], seed=seed + 1))
    assert all(torch.equal(a, b) for a, b in zip(held, want, strict=True))
    assert not graph_storages(manager).intersection(storages(held))
    whole = {feature.untyped_storage().data_ptr(): feature.untyped_storage().nbytes() for feature in held}
    assert sum(whole.values()) == sum(feature.nbytes for feature in held), "features keep more memory than they need"
    for number, feature in enumerate(held):
        feature.fill_(float("nan"))
        assert all(torch.equal(a, b) for a, b in zip(held[number + 1 :], want[number + 1 :], strict=True)), "they overlap"
    check(manager, table, request)


def test_lent_features_are_graph_memory(table: toys.PackedTable) -> None:
    """`outputs="borrow"`: one replay for the whole call hands out views, which the next call overwrites."""
    manager = toys.captured(table, outputs="borrow", **GREEDY)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6)])
    first = check(manager, table, request)
    assert set(storages(first)) <= graph_storages(manager)
    want = [feature.clone() for feature in first]
    manager.execute(toys.packed_request([(1, 4, 4), (1, 2, 6)], seed=9))
    assert not any(torch.equal(a, b) for a, b in zip(first, want, strict=True)), "the next call wrote elsewhere"


@pytest.mark.parametrize(
    "grids",
    [
        [(1, 16, 16), (1, 16, 16)],  # two replays
        [(1, 4, 4), (1, 20, 20)],  # one replay and one eager run
        [(1, 20, 20)],  # one eager run
    ],
)
def test_nothing_is_lent_where_several_runs_served_the_call(grids: list[toys.Grid], table: toys.PackedTable) -> None:
    """With more than one batch, or none replayed, borrowed features are their own: a later batch would overwrite them."""
    manager = toys.captured(table, outputs="borrow", **GREEDY)
    request = toys.packed_request(grids)
    held = check(manager, table, request)
    assert not graph_storages(manager).intersection(storages(held))
    for seed in range(3):
        manager.execute(toys.packed_request(grids, seed=seed + 5))
    assert toys.largest_difference(held, toys.packed_reference(table, request)) <= TOLERANCE


def test_no_gradients() -> None:
    """Weights and pixels that want gradients get none, and nothing is kept alive for them; grad mode is as it was."""
    table = toys.packed_table()
    manager = toys.captured(table, **GREEDY)
    request = toys.packed_request([(1, 4, 4), (1, 20, 20)])
    request["pixel_values"].requires_grad_()
    with torch.enable_grad():
        got = check(manager, table, request)
        assert torch.is_grad_enabled()
    assert manager.snapshot()["miss_reasons"] == {"too-large": 1}
    assert all(feature.grad_fn is None and not feature.requires_grad for feature in got)
    for feature in got:
        feature += 1


@pytest.mark.parametrize("first", ["inference_mode", "no_grad"])
@pytest.mark.parametrize("captured_in", ["inference_mode", "no_grad"])
def test_inference_mode_in_both_orders(first: str, captured_in: str, table: toys.PackedTable) -> None:
    """Captured and called in either mode, in any order: static buffers are no inference tensors (hazard 22)."""
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
    }
    order = list(modes) if first == "inference_mode" else list(modes)[::-1]
    with modes[captured_in]():
        manager = toys.captured(table)
    for name in order * 2:
        with modes[name]():
            for grids in ([(1, 4, 4)], [(1, 2, 2), (1, 4, 6)], [(1, 20, 20), (1, 2, 2)]):
                for feature in check(manager, table, toys.packed_request(grids)):
                    feature += 1
    graphs = manager._captured.set.graphs.values()
    tensors = [graph.output for graph in graphs]
    tensors += [v for graph in graphs for v in graph.inputs.values.values() if isinstance(v, torch.Tensor)]
    assert not any(tensor.is_inference() for tensor in tensors)


def test_inference_tensors_as_inputs(table: toys.PackedTable) -> None:
    """Pixels made in inference mode, used outside of it, and the other way round."""
    manager = toys.captured(table)
    with torch.inference_mode():
        inside = toys.packed_request([(1, 4, 4), (1, 20, 20)])
        outside_later = [feature.clone() for feature in manager.execute(inside)]
    outside = toys.packed_request([(1, 4, 4), (1, 20, 20)])
    for request in (inside, outside):
        assert toys.largest_difference(manager.execute(request), outside_later) == 0.0
        with torch.inference_mode():
            assert toys.largest_difference(manager.execute(request), outside_later) == 0.0


# --- what is accepted ------------------------------------------------------------------------------------------------

GRIDS: list[toys.Grid] = [(1, 4, 4), (1, 20, 20), (1, 2, 6)]
GRID_FORMS: dict[str, Callable[[], Any]] = {
    "list of tuples": lambda: list(GRIDS),
    "tuple of lists": lambda: tuple(map(list, GRIDS)),
    "int64 array": lambda: np.array(GRIDS),
    "int32 array": lambda: np.array(GRIDS, dtype=np.int32),
    "list of arrays": lambda: [np.array(grid) for grid in GRIDS],
    "int64 tensor": lambda: torch.tensor(GRIDS),
    "int32 tensor": lambda: torch.tensor(GRIDS, dtype=torch.int32),
    "list of tensors": lambda: [torch.tensor(grid) for grid in GRIDS],
    "list of lists of numpy integers": lambda: [[np.int64(n) for n in grid] for grid in GRIDS],
    "strided tensor": lambda: torch.tensor(GRIDS).repeat(1, 2)[:, :3],
    "iterator": lambda: iter(GRIDS),
}


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("form", GRID_FORMS)
def test_grids_of_any_type(form: str, captured: bool, table: toys.PackedTable) -> None:
    """Lists, arrays and tensors of grids mean the same, by replay and eagerly (spec B8)."""
    manager = toys.captured(table) if captured else toys.manager(table)
    request = toys.packed_request(GRIDS)
    want = toys.packed_reference(table, request)
    got = manager.execute({**request, "image_grid_thw": GRID_FORMS[form]()})
    assert toys.largest_difference(got, want) <= TOLERANCE


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.T.contiguous().T,
    "every second row": lambda x: torch.stack([x, x + 1], dim=1).flatten(0, 1)[::2],
    "columns of a wider one": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "with an offset": lambda x: torch.cat([x[:3], x])[3:],
}


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", STRIDES)
def test_pixels_of_any_strides(name: str, captured: bool, table: toys.PackedTable) -> None:
    """Layout is made equal, never assumed (hazard 13)."""
    manager = toys.captured(table) if captured else toys.manager(table)
    request = toys.packed_request(GRIDS)
    strided = STRIDES[name](request["pixel_values"])
    assert torch.equal(strided, request["pixel_values"])
    assert strided.storage_offset() or not strided.is_contiguous()
    got = manager.execute({**request, "pixel_values": strided})
    assert toys.largest_difference(got, toys.packed_reference(table, request)) <= TOLERANCE


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.bool, torch.int16])
def test_dtypes_that_lose_nothing_are_converted(dtype: torch.dtype, captured: bool, table: toys.PackedTable) -> None:
    """Every value has an equal one in float32, so these are taken."""
    manager = toys.captured(table) if captured else toys.manager(table)
    request = toys.packed_request(GRIDS)
    request["pixel_values"] = (request["pixel_values"] * 3).abs().to(dtype)
    want = toys.packed_reference(table, {**request, "pixel_values": request["pixel_values"].float()})
    assert toys.largest_difference(manager.execute(request), want) <= TOLERANCE


@pytest.mark.parametrize("captured", [True, False])
def test_requests_are_only_read(captured: bool, table: toys.PackedTable) -> None:
    """Neither the dict nor any tensor in it is written, by replay or eagerly."""
    manager = toys.captured(table) if captured else toys.manager(table)
    request = toys.packed_request(GRIDS, [(2, 2, 2)])
    request["image_grid_thw"] = torch.tensor(request["image_grid_thw"])
    names, kept = list(request), {name: value.clone() for name, value in request.items() if isinstance(value, torch.Tensor)}
    versions = {name: request[name]._version for name in kept}
    objects = {name: id(value) for name, value in request.items()}
    manager.execute(request)
    assert list(request) == names
    assert {name: id(value) for name, value in request.items()} == objects
    assert all(torch.equal(request[name], value) for name, value in kept.items())
    assert {name: request[name]._version for name in kept} == versions


def test_images_and_clips_come_back_by_modality(table: toys.PackedTable) -> None:
    """Images first, whatever the order of the dict, and each modality in its own order; also in eager batches of both."""
    for manager in (toys.captured(table, **GREEDY), toys.manager(table, **GREEDY), toys.captured(table)):
        request = toys.packed_request([(1, 8, 8), (1, 4, 4)], [(1, 2, 2), (3, 2, 4)])
        turned = dict(reversed(list(request.items())))
        got = check(manager, table, request)
        assert toys.largest_difference(manager.execute(turned), got) == 0.0


@pytest.mark.parametrize(
    "nothing",
    [
        {},
        {"pixel_values": torch.empty(0, toys.CHANNELS), "image_grid_thw": []},
        {"pixel_values": [], "image_grid_thw": []},
        {"pixel_values": (), "image_grid_thw": torch.empty(0, 3, dtype=torch.int64)},
        {"pixel_values": np.empty((0, toys.CHANNELS)), "image_grid_thw": np.empty((0, 3), dtype=int)},
        {"pixel_values": [], "image_grid_thw": [], "pixel_values_videos": [], "video_grid_thw": []},
    ],
)
def test_no_items_give_an_empty_list(nothing: dict[str, Any], table: toys.PackedTable) -> None:
    """Nothing to encode is no error and no work, captured or not."""
    for manager in (toys.captured(table), toys.manager(table)):
        with no_work(manager):
            assert manager.execute(nothing) == []


def test_an_empty_modality_beside_a_full_one(table: toys.PackedTable) -> None:
    """An empty list of images does not disturb the clips."""
    clips = toys.packed_request([], [(2, 2, 2), (1, 4, 4)])
    for manager in (toys.captured(table), toys.manager(table)):
        got = manager.execute({"pixel_values": [], "image_grid_thw": [], **clips})
        assert toys.largest_difference(got, toys.packed_reference(table, clips)) <= TOLERANCE


def test_one_item_per_batch(table: toys.PackedTable) -> None:
    """`max_items_per_batch=1`: as many replays as items."""
    manager = toys.captured(table, max_items_per_batch=1, max_frames_per_batch=1, **GREEDY)
    check(manager, table, toys.packed_request([(1, 4, 4), (1, 2, 2), (1, 8, 8), (1, 4, 4)]))
    snapshot = manager.snapshot()
    assert (snapshot["replays"], snapshot["graph_hits"], snapshot["graph_misses"]) == (4, 4, 0)


# --- bad input -------------------------------------------------------------------------------------------------------

PIXELS, CLIP = torch.zeros(16, toys.CHANNELS), torch.zeros(8, toys.CHANNELS)
BAD: dict[str, tuple[Any, type[VitCompileError], str]] = {
    "None": (None, InputError, "the request is NoneType"),
    "a list": ([PIXELS], InputError, "the request is list"),
    "a tensor": (PIXELS, InputError, "the request is Tensor"),
    "too few rows": ({"pixel_values": PIXELS[:15], "image_grid_thw": [(1, 4, 4)]}, InputError, "15 rows.*add up to 16"),
    "too many rows": ({"pixel_values": PIXELS, "image_grid_thw": [(1, 2, 4)]}, InputError, "16 rows.*add up to 8"),
    "rows without grids": ({"pixel_values": PIXELS, "image_grid_thw": []}, InputError, "16 rows.*add up to 0"),
    "grids without rows": ({"pixel_values": PIXELS[:0], "image_grid_thw": [(1, 4, 4)]}, InputError, "0 rows.*add up to 16"),
    "no pixels for grids": ({"pixel_values": [], "image_grid_thw": [(1, 4, 4)]}, InputError, "is list: expected a tensor"),
    "odd height": ({"pixel_values": PIXELS, "image_grid_thw": [(1, 1, 16)]}, GridError, r"\(1, 1, 16\).*merge size 2"),
    "odd width": ({"pixel_values": PIXELS, "image_grid_thw": [(1, 2, 5)]}, GridError, r"\(1, 2, 5\).*multiples"),
    "zero": ({"pixel_values": PIXELS, "image_grid_thw": [(1, 4, 4), (1, 0, 4)]}, GridError, r"grid 1 .*\(1, 0, 4\).*at least 1"),
    "no frames": ({"pixel_values": PIXELS, "image_grid_thw": [(0, 4, 4)]}, GridError, r"\(0, 4, 4\).*at least 1"),
    "negative": ({"pixel_values": PIXELS, "image_grid_thw": [(1, -4, -4)]}, GridError, r"\(1, -4, -4\).*at least 1"),
    "two numbers": ({"pixel_values": PIXELS, "image_grid_thw": [(4, 4)]}, InputError, "expected 3 integers, not 2"),
    "floats": ({"pixel_values": PIXELS, "image_grid_thw": [(1.0, 4.0, 4.0)]}, InputError, "expected 3 integers"),
    "a float tensor": ({"pixel_values": PIXELS, "image_grid_thw": torch.ones(1, 3)}, InputError, "expected 3 integers"),
    "a flat grid": ({"pixel_values": PIXELS, "image_grid_thw": (1, 4, 4)}, InputError, "row 0 of image_grid_thw is 1"),
    "text": ({"pixel_values": PIXELS, "image_grid_thw": "1x4x4"}, InputError, "expected rows of 3 integers"),
    "double": ({"pixel_values": PIXELS.double(), "image_grid_thw": [(1, 4, 4)]}, InputError, "float64.*loses precision.*cast"),
    "int64": ({"pixel_values": PIXELS.long(), "image_grid_thw": [(1, 4, 4)]}, InputError, "int64.*loses precision"),
    "complex": ({"pixel_values": PIXELS.cfloat(), "image_grid_thw": [(1, 4, 4)]}, InputError, "complex64.*loses precision"),
    "channels": ({"pixel_values": PIXELS[:, 1:], "image_grid_thw": [(1, 4, 4)]}, InputError, r"\[16, 5\]: expected \[16, 6\]"),
    "batched": ({"pixel_values": PIXELS[None], "image_grid_thw": [(1, 4, 4)]}, InputError, r"expected \[16, 6\]"),
    "an array": ({"pixel_values": PIXELS.numpy(), "image_grid_thw": [(1, 4, 4)]}, InputError, "ndarray: expected a tensor"),
    "meta": ({"pixel_values": PIXELS.to("meta"), "image_grid_thw": [(1, 4, 4)]}, InputError, "on meta.*move it"),
    "None pixels": ({"pixel_values": None, "image_grid_thw": [(1, 4, 4)]}, InputError, "pixel_values is None"),
    "None grids": ({"pixel_values": PIXELS, "image_grid_thw": None}, InputError, "image_grid_thw is None"),
    "pixels alone": ({"pixel_values": PIXELS}, InputError, "pixel_values without image_grid_thw"),
    "grids alone": ({"image_grid_thw": [(1, 4, 4)]}, InputError, "image_grid_thw without pixel_values"),
    "audio": ({"input_features": PIXELS}, InputError, "unknown input 'input_features'.*image: pixel_values.*video:"),
    "a good image and a bad clip": (
        {
            "pixel_values": PIXELS,
            "image_grid_thw": [(1, 4, 4)],
            "pixel_values_videos": CLIP,
            "video_grid_thw": [(3, 2, 2)],
        },
        InputError,
        "pixel_values_videos has 8 rows.*add up to 12",
    ),
}


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str, captured: bool, table: toys.PackedTable) -> None:
    """A clear error before any work, and the manager afterwards as before, to the bit."""
    given, error, words = BAD[name]
    manager = toys.captured(table) if captured else toys.manager(table)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6)], [(2, 2, 2)])
    before = check(manager, table, request)
    with no_work(manager), pytest.raises(error, match=words):
        manager.execute(given)
    again = manager.execute(request)
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))


def test_a_modality_that_the_model_lacks() -> None:
    """Clips for a model of images: the error says what it encodes, and nothing runs."""
    table = toys.packed_table()
    table.modalities = {"image": table.modalities["image"]}
    manager = toys.captured(table)
    assert manager.ladders.max_frames == 0
    assert manager.supports_modality("image")
    assert not manager.supports_modality("video")
    with no_work(manager), pytest.raises(InputError, match=r"'pixel_values_videos'.*This model encodes image: pixel_values"):
        manager.execute(toys.packed_request([(1, 4, 4)], [(2, 2, 2)]))
    check(manager, table, toys.packed_request([(1, 4, 4)]))


@pytest.mark.parametrize("counts", [[3, 0], [-1, 4]])
def test_bad_sizes_of_a_model_that_writes_the_contract_out(counts: list[int]) -> None:
    """The record of an item refuses impossible sizes, before any work."""
    model = toys.HandWritten()
    manager = toys.captured(model)
    with no_work(manager), pytest.raises(ProtocolError, match="must be above 0"):
        manager.execute({"rows": toys.seeded(3, 4), "scale": toys.seeded(3), "counts": counts})


def test_an_error_in_the_forward_leaves_the_manager_usable(table: toys.PackedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay raises comes out as it is, and the next call is right, to the bit."""
    manager = toys.captured(table, **GREEDY)
    request = toys.packed_request([(1, 4, 4), (1, 16, 16)])
    before = check(manager, table, request)

    def broken(self: EncoderGraph) -> torch.Tensor:
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(EncoderGraph, "replay", broken)
        with pytest.raises(RuntimeError, match="no device"):
            manager.execute(request)
    assert all(torch.equal(a, b) for a, b in zip(manager.execute(request), before, strict=True))


# --- strict, refusal, protocol ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grids", "clips", "code"),
    [([(1, 2, 2), (1, 20, 20), (1, 4, 4)], [], "too-large"), ([(1, 2, 2)], [(30, 2, 2)], "too-many-frames")],
)
def test_strict_raises_before_any_work(
    grids: list[toys.Grid], clips: list[toys.Grid], code: str, table: toys.PackedTable
) -> None:
    """One item of several would run eagerly: an error with the code, and nothing runs; what replays is served."""
    manager = toys.captured(table, strict=True, **GREEDY)
    with no_work(manager), pytest.raises(SkipError, match=rf"^{code}: .*strict=True"):
        manager.execute(toys.packed_request(grids, clips))
    check(manager, table, toys.packed_request([(1, 2, 2), (1, 4, 4)]))
    assert manager.snapshot()["graph_misses"] == 0


def test_strict_without_graphs(table: toys.PackedTable) -> None:
    """Not captured, switched off, in train mode: an error with that code."""
    request = toys.packed_request([(1, 2, 2)])
    manager = toys.manager(table, strict=True)
    with no_work(manager), pytest.raises(SkipError, match="not-captured"):
        manager.execute(request)
    with pytest.raises(SkipError, match="disabled"):
        toys.captured(table, strict=True, enabled=False).execute(request)
    manager.capture()
    table.tower.train()
    with no_work(manager), pytest.raises(SkipError, match="train-mode"):
        manager.execute(request)
    with pytest.raises(SkipError, match="train-mode"):
        toys.captured(table, strict=True)
    assert manager.execute({}) == []


def test_strict_capture_says_what_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that cannot be captured is an error under `strict`."""
    table = toys.packed_table()
    real = table.tower.forward

    def forward(pixels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if len(pixels) == 4 * 16:
            raise RuntimeError("this size is broken")
        return real(pixels, **kwargs)

    monkeypatch.setattr(table.tower, "forward", forward)
    with pytest.raises(SkipError, match=r"capture-failed: main 16 tokens.*this size is broken"):
        toys.captured(table, strict=True)


def test_a_refused_model_is_refused_for_all_modalities() -> None:
    """A count that depends on data: no modality, no capture, and the reason in the error (spec A8)."""
    reason = "the number of output tokens depends on the pixels (pruning)"
    table = toys.packed_table(refusal=reason)
    manager = toys.captured(table)
    assert not manager.supports_modality("image")
    assert not manager.supports_modality("video")
    assert not manager.is_captured()
    assert manager.get_num_graphs_to_capture() == 0
    for request in (toys.packed_request([(1, 4, 4)]), toys.packed_request([], [(2, 2, 2)]), {}):
        with no_work(manager), pytest.raises(ModalityError, match=r"depends on the pixels \(pruning\)"):
            manager.execute(request)


def test_modalities(table: toys.PackedTable) -> None:
    """What the model declares, before and after `capture()`."""
    for manager in (toys.manager(table), toys.captured(table)):
        assert manager.supports_modality("image")
        assert manager.supports_modality("video")
        assert not manager.supports_modality("audio")


METHODS = [name for name in vars(SupportsEncoderCudaGraph) if "encoder" in name]


@pytest.mark.parametrize("missing", METHODS)
def test_a_missing_method_is_named(missing: str) -> None:
    """A model without one of the nine methods: the error names the model and that method alone."""
    present = {name: getattr(toys.HandWritten, name) for name in METHODS if name != missing}
    model = type("Almost", (), present)()
    with pytest.raises(ProtocolError, match=rf"Almost is no SupportsEncoderCudaGraph: it lacks {missing}\.$"):
        EncoderCudaGraphManager(model, device="cpu", dtype=torch.float32)


def test_the_protocol_has_the_documented_methods() -> None:
    """Nine methods (spec A9), all of which a hand-written model has."""
    assert len(METHODS) == 9
    assert isinstance(toys.HandWritten(), SupportsEncoderCudaGraph)
    with pytest.raises(ProtocolError, match=f"object is no SupportsEncoderCudaGraph: it lacks {', '.join(METHODS)}"):
        EncoderCudaGraphManager(object(), device="cpu", dtype=torch.float32)  # type: ignore[arg-type]


def broken(**methods: Callable[..., Any]) -> toys.HandWritten:
    """A model whose methods are replaced."""
    model = toys.HandWritten()
    for name, method in methods.items():
        setattr(model, name, method)
    return model


def test_wrong_answers_of_a_model_are_named() -> None:
    """Features of a wrong shape, too few of them, unknown axis keys: the error says which method gave what."""
    request = toys.written_request([3])
    for method, words in (
        ({"encoder_cudagraph_forward": lambda values, path: values["rows"]}, r"encoder_cudagraph_forward gave \[32, 4\]"),
        ({"encoder_cudagraph_forward": lambda values, path: [values["rows"]]}, "encoder_cudagraph_forward gave list"),
    ):
        with pytest.raises(ProtocolError, match=words):
            toys.captured(broken(**method))
    for name, wrong, captured, words in (
        ("encoder_eager_forward", lambda *args: torch.zeros(2, 8), False, r"gave \[2, 8\] .*expected \[3, "),
        ("encoder_eager_forward", lambda *args: None, False, "gave NoneType"),
        ("postprocess_encoder_output", lambda *args: [], True, "0 features for 1 items"),
        ("prepare_encoder_cudagraph_replay_buffers", lambda *args: toys.EncoderCudaGraphReplayBuffers({}), True, "'rows'"),
    ):
        model = toys.HandWritten()
        manager = toys.captured(model) if captured else toys.manager(model)
        setattr(model, name, wrong)
        with pytest.raises(ProtocolError, match=words):
            manager.execute(request)
    for keys in ((), (5,), (4, 4)):
        model = broken(select_axis_keys=lambda specs, path, keys=keys: keys)
        with pytest.raises(ProtocolError, match=r"gave .*: expected one key of each of \(\(4, 8\),\)"):
            toys.captured(model).execute(request)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_cumulative_stats(table: toys.PackedTable) -> None:
    """Exactly the documented keys (spec C6)."""
    manager = toys.captured(table, token_budgets=(4, 16), **GREEDY)
    zero = {"graph_hits": 0, "graph_misses": 0, "hit_rate": 0.0, "num_budgets": 2, "token_budgets": [4, 16]}
    assert manager.get_cumulative_stats() == zero
    check(manager, table, toys.packed_request([(1, 4, 4), (1, 2, 2), (1, 2, 4), (1, 20, 20)]))
    assert manager.get_cumulative_stats() == {**zero, "graph_hits": 3, "graph_misses": 1, "hit_rate": 0.75}


def test_cumulative_stats_of_two_paths() -> None:
    """Budgets of all paths, each once and without the 0; an image counts once on each path where it has tokens."""
    table = toys.tiled_table()
    manager = toys.captured(table, path_token_budgets={"global": (6, 12), "local": (4, 12)}, **GREEDY)
    manager.execute(toys.tiled_request([(1, 1), (0, 0)]))
    assert manager.get_cumulative_stats() == {
        "graph_hits": 3,
        "graph_misses": 0,
        "hit_rate": 1.0,
        "num_budgets": 3,
        "token_budgets": [4, 6, 12],
    }


def test_graphs_are_described(table: toys.PackedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every captured graph, largest first, with its limits, buffers and use. (All take the same time, so that a busy machine does
    not make a larger one look faster.)"""
    monkeypatch.setattr(graphs, "least_ms", lambda *args: (1.0, 1.0))
    table.segment_capacities = (1,)
    manager = toys.captured(table, token_budgets=(4, 16), max_items_per_batch=2, max_frames_per_batch=5)
    request = toys.packed_request([(1, 4, 4)])
    check(manager, table, request)
    described = manager.graphs()
    assert [(graph.path, graph.token_budget, graph.axis_keys) for graph in described] == [
        ("main", 16, (1,)),
        ("main", 16, (0,)),
        ("main", 4, (1,)),
        ("main", 4, (0,)),
    ]
    for graph in described:
        assert isinstance(graph, BudgetGraphMetadata)
        assert (graph.max_items, graph.max_frames) == (2, 5)
        segments = 1 if graph.axis_keys == (1,) else 5
        rows = 4 * graph.token_budget
        assert graph.buffers == {"pixels": (rows, toys.CHANNELS), "positions": (rows,), "cu_seqlens": (segments + 1,)}
        assert graph.nbytes > 0
        assert graph.capture_seconds > 0
        assert graph.predicted_ms is not None
    used = [(graph.token_budget, graph.axis_keys) for graph in described if graph.replays]
    assert used == [(4, (1,))], "one image of four tokens fits the tightest graph"
    assert sum(graph.nbytes for graph in described) == manager.snapshot()["graph_bytes"]


def test_the_log_line(table: toys.PackedTable, caplog: pytest.LogCaptureFixture) -> None:
    """Each time the number of items passes a multiple of `log_every`, one line at INFO with hits, misses and reasons."""
    manager = toys.captured(table, log_every=4, **GREEDY)
    caplog.set_level(logging.INFO, logger="vit_compile")
    caplog.clear()
    for grids in ([(1, 2, 2)] * 3, [(1, 2, 2), (1, 20, 20)], [(1, 2, 2)] * 2, [(1, 2, 2)] * 9):
        manager.execute(toys.packed_request(grids))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("encoder: ")]
    assert [line.split(";")[0].split(" (")[0] for line in lines] == [
        "encoder: 5 items in 2 calls",
        "encoder: 16 items in 4 calls",
    ]
    assert "4 hits, 1 misses (hit rate 80.0%)" in lines[0]
    assert lines[0].endswith("misses: too-large 1")
    quiet = toys.captured(table, log_every=0)
    caplog.clear()
    for _ in range(3):
        quiet.execute(toys.packed_request([(1, 2, 2)] * 100))
    assert not [record for record in caplog.records if record.getMessage().startswith("encoder: ")]


# --- memory and threads ----------------------------------------------------------------------------------------------


@contextmanager
def no_collector() -> Iterator[None]:
    """What dies in here dies by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def memory_of(manager: EncoderCudaGraphManager) -> list[weakref.ref[torch.Tensor]]:
    """Outputs and buffers of all graphs."""
    graphs = manager._captured.set.graphs.values()
    tensors = [graph.output for graph in graphs]
    tensors += [v for graph in graphs for v in graph.inputs.values.values() if isinstance(v, torch.Tensor)]
    tensors += [
        b.tensor for g in manager._captured.set.graphs.values() if hasattr(g.inputs.state, "buffers") for b in buffers_of(g)
    ]
    return [weakref.ref(tensor) for tensor in tensors]


def buffers_of(graph: EncoderGraph) -> list[Any]:
    """Shared data buffers and metadata of a table's graph."""
    buffers = graph.inputs.state.buffers
    return [*buffers.shared.buffers.values(), *buffers.metadata.values()]


@pytest.mark.parametrize("end", ["del", "clear"])
@pytest.mark.parametrize("make", [toys.packed_table, toys.tiled_table, toys.HandWritten])
def test_memory_goes_with_the_manager(make: Callable[[], Any], end: str) -> None:
    """`clear()` and the end of the manager free outputs and buffers at once, without the garbage collector (hazard 30)."""
    model = make()
    with no_collector():
        manager = toys.captured(model)
        if isinstance(model, toys.PackedTable):
            manager.execute(toys.packed_request([(1, 4, 4), (1, 20, 20)]))
        references = memory_of(manager)
        assert len(references) > 4
        assert all(reference() is not None for reference in references)
        if end == "clear":
            manager.clear()
        else:
            del manager
        assert [reference for reference in references if reference() is not None] == []


def test_the_tower_goes_with_its_last_user() -> None:
    """Nothing in the manager, the table or a cache keeps the weights alive (hazard 30)."""
    with no_collector():
        table = toys.packed_table()
        manager = toys.captured(table)
        manager.execute(toys.packed_request([(1, 4, 4), (1, 20, 20)]))
        weight = weakref.ref(table.tower.embed.weight)
        del manager, table
        assert weight() is None


def test_eight_threads_on_one_manager(table: toys.PackedTable) -> None:
    """Eight threads on one manager, each with its own requests: everybody gets the right features (hazard 21)."""
    manager = toys.captured(table, token_budgets=(4, 8, 16, 32), **GREEDY)
    requests = [
        toys.packed_request([(1, 4, 4), (1, 2, 6)], seed=1),
        toys.packed_request([(1, 2, 6), (1, 4, 4)], seed=2),
        toys.packed_request([(1, 20, 20), (1, 2, 2)], seed=3),
        toys.packed_request([], [(2, 4, 4), (3, 2, 2)], seed=4),
        toys.packed_request([(1, 8, 8)], [(2, 2, 2)], seed=5),
    ]
    wants = [toys.packed_reference(table, request) for request in requests]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(first: int) -> None:
        try:
            start.wait()
            held = []
            for step in range(20):
                index = (first + step) % len(requests)
                held.append((index, manager.execute(requests[index])))
            failures.extend(f"request {index}" for index, got in held if toys.largest_difference(got, wants[index]) > TOLERANCE)
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    snapshot = manager.snapshot()
    assert snapshot["calls"] == 8 * 20
    assert snapshot["graph_hits"] + snapshot["graph_misses"] == snapshot["items"]


def test_threads_that_capture_and_clear(table: toys.PackedTable) -> None:
    """While one thread captures and clears, the others are served, by graphs or eagerly, and right."""
    manager = toys.manager(table, token_budgets=(8,), verify=False, **GREEDY)
    request = toys.packed_request([(1, 4, 4), (1, 2, 6)])
    want = toys.packed_reference(table, request)
    stop, failures = threading.Event(), []

    def serve() -> None:
        try:
            while not stop.is_set():
                if toys.largest_difference(manager.execute(request), want) > TOLERANCE:
                    failures.append("wrong features")
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        manager.capture()
        manager.graphs()
        manager.get_cumulative_stats()
        manager.clear()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


# --- data parallel ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_no_group_is_local(table: toys.PackedTable) -> None:
    """Without a group nothing asks for one."""
    assert not dist.is_initialized()
    manager = toys.captured(table)
    with mock.patch.object(dist, "get_rank", side_effect=AssertionError("a rank was asked for")):
        check(manager, table, toys.packed_request([(1, 4, 4)]))


@pytest.mark.parametrize("outputs", ["copy", "borrow"])
def test_a_group_of_one(outputs: str, group: dist.ProcessGroup, table: toys.PackedTable) -> None:
    """One rank: the same features, errors and counts as without a group, and never a view of graph memory."""
    manager = EncoderCudaGraphManager(
        table, EncoderConfig(mode="eager", outputs=outputs), device="cpu", dtype=torch.float32, group=group
    )
    assert manager.execute({}) == []
    request = toys.packed_request([(1, 4, 4), (1, 2, 6), (1, 20, 20)], [(2, 2, 2)])
    check(manager, table, request)
    manager.capture()
    held = check(manager, table, request)
    one = check(manager, table, toys.packed_request([(1, 4, 4)]))
    assert not graph_storages(manager).intersection(storages(held + one))
    with pytest.raises(GridError, match=r"\(1, 1, 4\)"):
        manager.execute({"pixel_values": PIXELS, "image_grid_thw": [(1, 1, 4)]})
    check(manager, table, request)
    assert manager.snapshot()["miss_reasons"] == {"not-captured": 4, "too-large": 2}
