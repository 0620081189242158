"""The manager where something goes wrong, comes unexpected, or happens in the middle of something else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime import toys
from tests.runtime.toys import captured, largest_difference, manager, packed_reference, packed_request, packed_table
from vit_compile.errors import OptionError, ProtocolError, SkipError
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.captured import RECAPTURES_TRIED_AGAIN
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graphs import GraphKey
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.stats import counters

GREEDY: dict[str, Any] = {"packing": "greedy"}
REQUEST = packed_request([(1, 4, 4), (1, 2, 6)])


def check(made: EncoderCudaGraphManager, table: Any, request: Mapping[str, Any] = REQUEST) -> None:
    """Features equal the reference."""
    assert largest_difference(made.execute(request), packed_reference(table, request)) < 1e-5


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there(device: str) -> None:
    """CUDA without a CUDA device is an error where it is asked for, not at the first allocation."""
    with pytest.raises(OptionError, match=f"device='{device}', but torch sees no CUDA device"):
        manager(packed_table(), device=device)


@pytest.mark.parametrize("dtype", ["bfloat16", None, float])
def test_a_dtype_is_a_torch_dtype(dtype: Any) -> None:
    """A name, or a Python type, is an error that shows it."""
    with pytest.raises(OptionError, match=r"dtype=.*expected a torch\.dtype"):
        manager(packed_table(), dtype=dtype)


@pytest.mark.parametrize("config", [{"mode": "eager"}, "eager", 3, EncoderConfig])
def test_a_config_is_a_config(config: Any) -> None:
    """A dict is an error that says how one is made of it."""
    with pytest.raises(OptionError, match=r"expected an EncoderConfig; EncoderConfig\.from_dict"):
        EncoderCudaGraphManager(packed_table(), config, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("most", [1, 2, 5, 999])
def test_the_number_of_graphs_is_at_most_the_limit(most: int) -> None:
    """What `capture()` will try is what it makes."""
    made = manager(packed_table(segment_capacities=(1, 16, 64)), max_graphs=most, **GREEDY)
    expected = made.get_num_graphs_to_capture()
    assert expected == min(most, 10)
    made.capture()
    assert len(made.graphs()) == expected


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["greedy", "cost"])
def test_clips_that_are_switched_off_run_eagerly(packing: str) -> None:
    """`max_frames_per_batch=0`: images fill batches up to the most items, and any item of several frames runs by itself."""
    table = packed_table()
    made = captured(table, token_budgets=(64,), max_items_per_batch=8, max_frames_per_batch=0, packing=packing)
    assert made.ladders.max_frames == 0
    assert {len(graph.buffers["cu_seqlens"]) for graph in made.graphs()} == {1}
    check(made, table, packed_request([(1, 2, 2)] * 8, [(2, 2, 2), (1, 2, 2), (3, 2, 2)]))
    assert made.snapshot()["miss_reasons"] == {"too-many-frames": 2}
    assert made.snapshot()["replays"] == 2
    assert {row["path"]: row["items"] for row in made.snapshot()["misses"]} == {"main": 2}


def test_the_limit_is_of_frames_not_of_items() -> None:
    """Fewer frames than items: an image is a frame, no batch has more, and boundaries have no more room than that."""
    table = packed_table(segment_capacities=())
    made = captured(table, token_budgets=(64,), max_items_per_batch=8, max_frames_per_batch=3, **GREEDY)
    (graph,) = made.graphs()
    assert graph.buffers["cu_seqlens"] == (4,)
    check(made, table, packed_request([(1, 2, 2)] * 7, [(3, 2, 2), (4, 2, 2)]))
    assert made.snapshot()["replays"] == 4
    assert made.snapshot()["miss_reasons"] == {"too-many-frames": 1}


def only(modality: str, name: str, **kwargs: Any) -> toys.PackedTable:
    """The packed table with one modality, under another name."""
    table = packed_table(**kwargs)
    table.modalities = {name: table.modalities[modality]}
    return table


class Pages(toys.PackedTable):
    """Images of several segments: a grid's frames are pages."""

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        return [tuple(grid) for grid in inputs["image_grid_thw"]]


def test_images_of_several_segments_replay() -> None:
    """A model of images alone has no frames to limit: its items may have as many segments as a batch may have items."""
    table = Pages(packed_table().tower, segment_capacities=(1,))
    table.modalities = {"image": table.modalities["image"]}
    made = captured(table, token_budgets=(64,), max_items_per_batch=4, **GREEDY)
    assert made.ladders.max_frames == 0
    check(made, table, packed_request([(4, 2, 2), (2, 2, 2), (1, 2, 2), (1, 2, 2)]))
    assert made.snapshot()["miss_reasons"] == {}
    assert made.snapshot()["replays"] == 2
    check(made, table, packed_request([(5, 2, 2)]))
    assert made.snapshot()["miss_reasons"] == {"too-many-frames": 1}


@pytest.mark.parametrize("name", ["video", "clip", "slides"])
def test_any_modality_but_images_has_frames(name: str) -> None:
    """The name says nothing more: room for frames is made, and a clip of the most frames replays."""
    table = only("video", name)
    made = captured(table, token_budgets=(16,), max_items_per_batch=1, **GREEDY)
    assert made.ladders.max_frames == 4
    check(made, table, packed_request([], [(4, 2, 2)]))
    assert made.snapshot()["miss_reasons"] == {}


# --- capture and clear -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "strict", "raised"),
    [
        (RuntimeError("odd"), False, None),
        (RuntimeError("odd"), True, SkipError),
        (torch.OutOfMemoryError("full"), False, None),
        (torch.OutOfMemoryError("full"), True, SkipError),
        (ProtocolError("x"), False, ProtocolError),
        (ProtocolError("x"), True, ProtocolError),
        (KeyboardInterrupt(), False, KeyboardInterrupt),
        (KeyboardInterrupt(), True, KeyboardInterrupt),
    ],
)
def test_a_recapture_that_raises_is_tried_again(error: BaseException, strict: bool, raised: type[BaseException] | None) -> None:
    """Replaced weights and an error in the capture that follows: it comes out once, or a graph is left out; then all is right."""
    table = packed_table()
    made = captured(table, strict=strict, token_budgets=(8, 16), **GREEDY)
    check(made, table)
    table.tower = toys.PackedTower().eval()
    forward, left = table.tower.forward, [error]

    def raises_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        if left and made._captured._recapture_due:  # not in the replay before, which runs code on a CPU only
            raise left.pop()
        return forward(*args, **kwargs)

    table.tower.forward = raises_once  # type: ignore[method-assign]
    with pytest.raises(raised) if raised else nullcontext():
        check(made, table)
    assert left == []
    for _ in range(2):
        check(made, table)
    assert made.is_captured()
    assert made.snapshot()["recaptures"] == 1


def test_an_interrupted_recapture_leaves_it_due() -> None:
    """What is no `Exception` comes out of the call; the next call captures everything."""
    table = packed_table()
    made = captured(table, token_budgets=(8, 16), **GREEDY)
    graphs = len(made.graphs())
    table.tower.merge.weight = nn.Parameter(table.tower.merge.weight * 2)
    forward = table.tower.forward

    def interrupted(*args: Any, **kwargs: Any) -> torch.Tensor:
        table.tower.forward = forward  # type: ignore[method-assign]
        raise KeyboardInterrupt

    table.tower.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.execute(REQUEST)
    assert not made.is_captured()
    with counters.expect(captures=graphs):
        check(made, table)
        check(made, table)
    assert made.snapshot()["miss_reasons"] == {}


SMALL = toys.packed_request([(1, 2, 2)])


def failing_from(table: toys.PackedTable, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tower's forward raises from so many rows on, for as long as the list has an entry."""
    forward, least = table.tower.forward, [rows]

    def fails(pixels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if least and len(pixels) >= least[0]:
            raise RuntimeError("no such size")
        return forward(pixels, **kwargs)

    monkeypatch.setattr(table.tower, "forward", fails)
    return least


def test_a_strict_capture_that_raises_leaves_nothing_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the graphs that could be captured are gone: the next `capture()` raises again, and works once the cause is gone."""
    table = packed_table()
    made = manager(table, strict=True, token_budgets=(8, 16), **GREEDY)
    cause = failing_from(table, 4 * 16, monkeypatch)
    for _ in range(2):
        with pytest.raises(SkipError, match="no such size"):
            made.capture()
        assert not made.is_captured()
        assert made.graphs() == ()
        assert made.snapshot()["not_captured"] == []
    cause.clear()
    made.capture()
    check(made, table)
    assert {graph.token_budget for graph in made.graphs()} == {8, 16}


def test_a_cause_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While replaced modules are captured: calls run eagerly with the reason, and the first one after it has graphs again."""
    table = packed_table()
    made = captured(table, token_budgets=(8, 16), **GREEDY)
    graphs = len(made.graphs())
    table.tower = toys.PackedTower().eval()
    cause = failing_from(table, 4 * 8, monkeypatch)
    check(made, table, SMALL)
    assert not made.is_captured()
    assert set(made.snapshot()["miss_reasons"]) == {"capture-failed"}
    cause.clear()
    with counters.expect(captures=graphs):
        check(made, table)
        check(made, table)
    assert made.snapshot()["not_captured"] == []
    assert made.snapshot()["recaptures"] == 1


def test_a_cause_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tries calls are not held up any more; `capture()` tries again when asked, and works once the cause is gone."""
    table = packed_table()
    made = captured(table, token_budgets=(8, 16), **GREEDY)
    graphs, inputs, tries = len(made.graphs()), made._captured.work.inputs, list[GraphKey]()
    table.tower = toys.PackedTower().eval()
    cause = failing_from(table, 4 * 8, monkeypatch)

    def noted(key: GraphKey) -> EncoderCudaGraphCaptureInputs:
        tries.append(key)
        return inputs(key)

    monkeypatch.setattr(made._captured.work, "inputs", noted)
    for _ in range(RECAPTURES_TRIED_AGAIN + 3):
        check(made, table, SMALL)
    assert len(tries) == (RECAPTURES_TRIED_AGAIN + 1) * graphs
    assert made.capture_done()
    assert not made.is_captured()
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"capture-failed"}
    made.capture()
    assert len(tries) == (RECAPTURES_TRIED_AGAIN + 2) * graphs
    cause.clear()
    with counters.expect(captures=graphs):
        made.capture()
        made.capture()
    assert made.is_captured()
    assert made.snapshot()["not_captured"] == []
    check(made, table)


def test_a_block_whose_capture_raises_is_cleared() -> None:
    """Under `strict` what could not be captured raises on the way in, where nobody would clear on the way out."""
    made = manager(packed_table(), strict=True, max_graph_bytes=1000, **GREEDY)
    with pytest.raises(SkipError), made:
        pytest.fail("the block ran")
    assert made.graphs() == ()
    assert not made.is_captured()
    with pytest.raises(SkipError):
        made.capture()


class Positions(toys.PackedTable):
    """Positions are a weight, handed on as metadata."""

    def __init__(self) -> None:
        super().__init__(packed_table().tower)
        self.tower.register_buffer("table", torch.arange(256))
        self.asked = 0

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        self.asked += 1
        found = dict(super().item_metadata(key, path))
        rows: Any = self.tower.table
        return {**found, "positions": rows[: len(found["positions"])]}


@pytest.mark.parametrize("way", ["recapture", "clear"])
def test_metadata_that_comes_from_weights_is_made_anew(way: str) -> None:
    """After replaced weights, and after `clear()`, nothing that was kept of items is used: neither values nor layouts."""
    table = Positions()
    made = captured(table, token_budgets=(16,), **GREEDY)
    check(made, table)
    asked = table.asked
    check(made, table)
    assert table.asked == asked, "it is kept"
    if way == "clear":
        table.tower.table.add_(5)  # type: ignore[operator, union-attr]
        made.clear()
        made.capture()
    else:
        table.tower.table = torch.arange(256) + 5
    assert largest_difference(made.execute(REQUEST), packed_reference(table, REQUEST)) > 1e-3
    shifted = Positions()
    shifted.tower = table.tower
    assert largest_difference(made.execute(REQUEST), manager(shifted).execute(REQUEST)) < 1e-5
    assert made.snapshot()["miss_reasons"] == {}


@pytest.mark.parametrize("recapture", [False, True])
@pytest.mark.parametrize("method", ["assemble", "item_metadata", "forward"])
def test_clear_in_the_middle_of_a_call(method: str, recapture: bool) -> None:
    """An adapter's method drops all graphs, or makes them anew, while its call runs: the call and those behind it are right."""
    made: EncoderCudaGraphManager | None = None
    left = [2]

    class Clearing(toys.PackedTable):
        def act(self, name: str) -> None:
            if made is not None and name == method and left[0]:
                left[0] -= 1
                made.clear()
                if recapture:
                    made.capture()

        def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
            self.act("assemble")
            return super().assemble(key, outputs)

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            self.act("item_metadata")
            return super().item_metadata(key, path)

        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            features = super().forward(path, values)
            self.act("forward")  # behind it: a capture writes into the buffers
            return features

    table = Clearing(packed_table().tower, segment_capacities=(1,))
    made = captured(table, token_budgets=(16,), **GREEDY)
    request = packed_request([(1, 6, 8), (1, 8, 8), (1, 6, 10), (1, 10, 10)])
    for _ in range(3):
        check(made, table, request)
    assert left == [0]
    assert made.is_captured() == recapture


def test_what_is_left_of_a_call_after_clear_runs_eagerly() -> None:
    """One batch replays, and its adapter clears: the next has no graph any more, and says so."""
    made: EncoderCudaGraphManager | None = None

    class Clearing(toys.PackedTable):
        def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
            assert made is not None
            made.clear()
            return super().assemble(key, outputs)

    table = Clearing(packed_table().tower)
    made = captured(table, token_budgets=(16,), **GREEDY)
    check(made, table, packed_request([(1, 6, 8), (1, 8, 8)]))
    assert made.snapshot()["graph_hits"] == 1
    assert made.snapshot()["miss_reasons"] == {"not-captured": 1}


# --- weights ---------------------------------------------------------------------------------------------------------


class Wrapped:
    """A model whose parts nobody finds."""

    __slots__ = ("_model",)

    def __init__(self, model: toys.HandWritten) -> None:
        self._model = model


def passed_on(name: str) -> Callable[..., Any]:
    """A method that calls the wrapped model's."""
    return lambda self, *args: getattr(self._model, name)(*args)


for _name in [name for name in vars(toys.HandWritten) if "encoder" in name]:
    setattr(Wrapped, _name, passed_on(_name))


def test_a_model_without_a_module_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be watched, which is said at capture; a model with one is not warned about."""
    model = toys.HandWritten()
    with caplog.at_level(logging.WARNING, logger="vit_compile"):
        captured(model, **GREEDY)
        assert not caplog.records
        made = captured(Wrapped(model), **GREEDY)
    (record,) = caplog.records
    assert record.getMessage() == "no torch module found in Wrapped: replaced weights will not be noticed"
    assert made.is_captured()


@pytest.mark.parametrize("kept_in", ["list", "dict"])
def test_a_cache_of_tensors_is_no_weight(kept_in: str) -> None:
    """An adapter may keep what it computed in a list or dict: nothing is captured anew as it grows."""

    class Caching(toys.PackedTable):
        def __init__(self) -> None:
            super().__init__(packed_table().tower)
            self.list: list[torch.Tensor] = []
            self.dict: dict[Any, torch.Tensor] = {}

        def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
            found = super().item_metadata(key, path)
            if kept_in == "list":
                self.list.append(found["positions"])
            else:
                self.dict[key] = found["positions"]
            return found

    table = Caching()
    made = captured(table, token_budgets=(16,), **GREEDY)
    with counters.expect(recaptures=0, captures=0):
        for width in range(2, 14, 2):
            check(made, table, packed_request([(1, 2, width)]))
    assert len(getattr(table, kept_in)) == 6


def test_a_child_in_train_mode_runs_eagerly() -> None:
    """Dropout that was switched on somewhere inside would be frozen by a graph."""

    class Dropping(toys.PackedTower):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Dropout(0.0))

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            features: torch.Tensor = self.inner(super().forward(*args, **kwargs))
            return features

    tower = Dropping().eval()
    table = toys.PackedTable(tower)
    made = captured(table, token_budgets=(16,), **GREEDY)
    tower.inner[0].train()
    check(made, table)
    assert made.snapshot()["miss_reasons"] == {"train-mode": 2}
    tower.inner[0].eval()
    with counters.expect(captures=0):
        check(made, table)
    assert made.snapshot()["graph_hits"] == 2


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: (one for one in found), "post-processing gave generator: expected a list"),
        (lambda found: None, "post-processing gave NoneType"),
        (lambda found: [None] * len(found), "post-processing gave list: expected a list with a tensor for each item"),
        (lambda found: ["a"] * len(found), "post-processing gave list"),
        (lambda found: found[:-1], "post-processing gave 1 features for 2 items"),
        (lambda found: [*found, *found], "post-processing gave 4 features for 2 items"),
    ],
    ids=["generator", "nothing", "list of nothing", "text", "too few", "too many"],
)
@pytest.mark.parametrize("captures", [False, True])
def test_post_processing_gives_a_list_of_tensors(change: Callable[[Any], Any], words: str, captures: bool) -> None:
    """Anything else is an error that says what came, from graphs and without, and the next call is right."""
    model = toys.HandWritten()
    real = model.postprocess_encoder_output
    made = captured(model, **GREEDY) if captures else manager(model, **GREEDY)
    request = toys.written_request([3, 2])
    model.postprocess_encoder_output = lambda *args: change(real(*args))  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match=words):
        made.execute(request)
    model.postprocess_encoder_output = real  # type: ignore[method-assign]
    assert largest_difference(made.execute(request), toys.written_reference(model, request)) < 1e-5


@pytest.mark.parametrize("answer", [None, 3, "generator"])
def test_specs_are_a_list(answer: Any) -> None:
    """Sizes that are no sequence are an error before any work."""
    model = toys.HandWritten()
    real = model.get_encoder_cudagraph_item_specs
    made = manager(model)

    def wrong(request: Mapping[str, Any]) -> Any:
        return (spec for spec in real(request)) if answer == "generator" else answer

    model.get_encoder_cudagraph_item_specs = wrong  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match=r"get_encoder_cudagraph_item_specs gave .*: expected a list"):
        made.execute(toys.written_request([3, 2]))
    assert model.calls == []
