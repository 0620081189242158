"""The set of graphs: under caps, whatever fails while capturing, with padding that was tried out, renewed with the weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.toys import (
    WIDTH,
    HandWritten,
    PackedTable,
    PackedTower,
    captured,
    largest_difference,
    manager,
    packed_reference,
    packed_request,
    packed_table,
    tiled_reference,
    tiled_request,
    tiled_table,
    written_reference,
    written_request,
)
from vit_compile.errors import ProtocolError, SkipError
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.graphs import EncoderGraph, GraphKey, GraphSet, median_ms
from vit_compile.stats import Skip, counters

CPU = torch.device("cpu")
GREEDY: dict[str, Any] = {"packing": "greedy"}


def one_width(**changes: Any) -> HandWritten:
    """The hand-written model with one capture axis of one key, and other methods."""
    model = HandWritten(axes=((4,),))
    for name, function in changes.items():
        setattr(model, name, function)
    return model


def budgets(made: Any) -> list[int]:
    """Budgets that are captured, in the order of capture."""
    return [key.token_budget for key in made._captured.set.graphs]


def reasons(made: Any) -> dict[int, str]:
    """Budgets that are not captured, with the code of the reason."""
    return {row["token_budget"]: row["code"] for row in made.snapshot()["not_captured"]}


def check_written(made: Any, model: HandWritten) -> None:
    """Items of any size are right, in graphs and out of them."""
    for counts in ([1], [3, 2], [12], [16], [17, 1, 30], [32], [33]):
        request = written_request(counts)
        assert largest_difference(made.execute(request), written_reference(model, request)) < 1e-6


# --- the order, and caps ---------------------------------------------------------------------------------------------


def test_largest_first() -> None:
    """Smaller graphs then reuse the memory of larger ones; every graph counts as a capture."""
    model = one_width()
    with counters.expect(captures=5, skips={}):
        made = captured(model, **GREEDY)
    assert budgets(made) == [32, 16, 8, 4, 2]
    check_written(made, model)


def test_a_second_capture_does_nothing() -> None:
    """Graphs that are there stay."""
    made = captured(one_width(), **GREEDY)
    before = list(made._captured.set.graphs.values())
    with counters.expect(captures=0):
        made.capture()
    assert list(made._captured.set.graphs.values()) == before


@pytest.mark.parametrize("most", [1, 2, 4, 5, 9])
def test_max_graphs(most: int) -> None:
    """The largest budgets are captured, the rest say why not; smaller inputs use what there is."""
    model = one_width()
    made = captured(model, max_graphs=most, **GREEDY)
    assert budgets(made) == [32, 16, 8, 4, 2][:most]
    assert reasons(made) == dict.fromkeys([32, 16, 8, 4, 2][most:], "max-graphs")
    check_written(made, model)
    assert set(made.snapshot()["miss_reasons"]) == {"too-large"}


def test_the_reason_of_a_missing_graph_reaches_the_count() -> None:
    """Items whose axis key has no graph for want of room run eagerly for that reason."""
    model = HandWritten()
    made = captured(model, max_graphs=1, **GREEDY)
    assert list(made._captured.set.graphs) == [GraphKey("main", 32, (4,))]
    for width in (4, 8):
        request = written_request([3, 2], width)
        assert largest_difference(made.execute(request), written_reference(model, request)) < 1e-6
    assert made.snapshot()["miss_reasons"] == {"max-graphs": 2}
    assert made.snapshot()["graph_hits"] == 2


def with_bytes(nbytes: Callable[[int], int]) -> HandWritten:
    """A model that says how many bytes the graph of a budget takes."""
    model = HandWritten(axes=((4,),))
    prepare = model.prepare_encoder_cudagraph_capture_inputs

    def sized(token_budget: int, *args: Any) -> EncoderCudaGraphCaptureInputs:
        made = prepare(token_budget, *args)
        made.nbytes = nbytes(token_budget)
        return made

    model.prepare_encoder_cudagraph_capture_inputs = sized  # type: ignore[method-assign, assignment]
    return model


@pytest.mark.parametrize(
    ("cap", "want"),
    [
        (620, [32, 16, 8, 4, 2]),
        (619, [32, 16, 8, 4]),
        (600, [32, 16, 8, 4]),
        (480, [32, 16]),
        (500, [32, 16, 2]),
        (319, [16, 8, 4, 2]),
        (160, [16]),
        (159, [8, 4, 2]),
        (19, []),
    ],
)
def test_max_graph_bytes(cap: int, want: list[int]) -> None:
    """Graphs of 10 bytes a token are held as far as their sum is under the cap; one that is too large lets smaller ones in."""
    model = with_bytes(lambda budget: 10 * budget)
    made = captured(model, max_graph_bytes=cap, **GREEDY)
    assert budgets(made) == want
    assert made._captured.set.nbytes == 10 * sum(want) <= cap
    assert made.snapshot()["graph_bytes"] == 10 * sum(want)
    assert reasons(made) == dict.fromkeys([b for b in (32, 16, 8, 4, 2) if b not in want], "max-graph-bytes")
    check_written(made, model)


def test_bytes_are_those_of_the_buffers_where_the_model_says_nothing() -> None:
    """Rows of 4 floats and a scale for each token."""
    made = captured(one_width(), **GREEDY)
    assert {graph.key.token_budget: graph.nbytes for graph in made._captured.set.graphs.values()} == {
        budget: budget * 5 * 4 for budget in (32, 16, 8, 4, 2)
    }


def test_strict_refuses_caps_that_bite() -> None:
    """With `strict` a graph that is missing is an error, which says which and why."""
    made = manager(one_width(), max_graphs=2, strict=True, **GREEDY)
    with pytest.raises(SkipError, match="max-graphs"):
        made.capture()


# --- failures --------------------------------------------------------------------------------------------------------


class Failing(HandWritten):
    """A model whose fixed-shape forward fails at some sizes; its eager forward does not."""

    def __init__(self, error: Exception, *failing: int) -> None:
        super().__init__(axes=((4,),))
        self.error, self.failing = error, failing

    def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
        if len(values["rows"]) in self.failing:
            raise self.error
        return super().encoder_cudagraph_forward(values, path)

    def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        return super().encoder_cudagraph_forward(mm_kwargs, path)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("a kernel is missing\nand more"), "capture-failed"),
        (ValueError("no such size"), "capture-failed"),
        (torch.OutOfMemoryError("tried to allocate 80 GiB"), "out-of-memory"),
    ],
    ids=["RuntimeError", "ValueError", "OutOfMemoryError"],
)
@pytest.mark.parametrize("budget", [32, 8, 2])
def test_one_budget_that_fails_leaves_the_others(error: Exception, code: str, budget: int) -> None:
    """It is left out with the reason, in one line; its items use another graph, or run eagerly for that reason."""
    model = Failing(error, budget)
    made = captured(model, **GREEDY)
    assert budgets(made) == [b for b in (32, 16, 8, 4, 2) if b != budget]
    assert reasons(made) == {budget: code}
    (row,) = made.snapshot()["not_captured"]
    assert str(error).splitlines()[0] in row["detail"]
    assert "\n" not in row["detail"]
    check_written(made, model)
    made._statistics.reset()
    made.execute(written_request([budget]))
    hits, misses = (1, {}) if budget < 32 else (0, {code: 1})
    assert (made.snapshot()["graph_hits"], made.snapshot()["miss_reasons"]) == (hits, misses)


def test_everything_may_fail() -> None:
    """Without a single graph all is eager, and right."""
    model = Failing(RuntimeError("not today"), 32, 16, 8, 4, 2)
    made = captured(model, **GREEDY)
    assert not made.is_captured()
    check_written(made, model)
    assert made.snapshot()["graph_hits"] == 0


def test_inputs_that_cannot_be_allocated() -> None:
    """Out of memory for the buffers of one budget is like any other failure."""
    model = HandWritten(axes=((4,),))
    prepare = model.prepare_encoder_cudagraph_capture_inputs

    def scarce(token_budget: int, *args: Any) -> EncoderCudaGraphCaptureInputs:
        if token_budget > 8:
            raise torch.OutOfMemoryError("no room")
        return prepare(token_budget, *args)

    model.prepare_encoder_cudagraph_capture_inputs = scarce  # type: ignore[method-assign, assignment]
    made = captured(model, **GREEDY)
    assert budgets(made) == [8, 4, 2]
    assert reasons(made) == {32: "out-of-memory", 16: "out-of-memory"}
    check_written(made, model)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda output: output[:, :5], r"\[8, 5\]"),
        (lambda output: output[0], r"\[8\]"),
        (lambda output: output[None], r"\[1, 8, 8\]"),
        (lambda output: (output,), "tuple"),
        (lambda output: None, "NoneType"),
    ],
    ids=["narrow", "vector", "three dimensions", "tuple", "none"],
)
def test_a_forward_of_another_shape_is_an_error(wrong: Callable[[torch.Tensor], Any], found: str) -> None:
    """Not a fallback, since the model breaks the contract: the error shows both shapes, and nothing is held afterwards."""

    class Wrong(HandWritten):
        mended = False

        def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> Any:
            output = super().encoder_cudagraph_forward(values, path)
            return wrong(output) if len(output) == 8 and not self.mended else output

    model = Wrong(axes=((4,),))
    made = manager(model, **GREEDY)
    with pytest.raises(ProtocolError, match=rf"encoder_cudagraph_forward gave {found}: expected a tensor \[tokens, 8\]"):
        made.capture()
    assert made.graphs() == ()
    assert not made.is_captured()
    assert made._captured.set.nbytes == 0
    model.mended = True
    made.capture()
    assert budgets(made) == [32, 16, 8, 4, 2]
    check_written(made, model)


def test_a_buffer_that_is_missing_is_an_error() -> None:
    """Capture inputs without a tensor for a declared buffer."""
    model = one_width(
        prepare_encoder_cudagraph_capture_inputs=lambda *args: EncoderCudaGraphCaptureInputs({"rows": torch.zeros(args[0], 4)})
    )
    with pytest.raises(ProtocolError, match="gave no tensor for the buffer 'scale'"):
        captured(model, **GREEDY)


def test_too_few_rows_are_an_error_before_they_are_handed_out() -> None:
    """A graph that gives fewer tokens than the batch has never fills up with something else."""
    model = one_width()
    forward = model.encoder_cudagraph_forward
    model.encoder_cudagraph_forward = lambda values, path: forward(values, path)[:5]  # type: ignore[method-assign]
    made = captured(model, **GREEDY)
    with pytest.raises(ProtocolError, match=r"the graph main 8 tokens .* gave 5 tokens for 7"):
        made.execute(written_request([3, 4]))
    assert len(made.execute(written_request([5]))) == 1


# --- trials of the padding -------------------------------------------------------------------------------------------


def over_rows(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Functions in which a row depends on all the others."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": lambda x: x - x.mean(0),
        "softmax": lambda x: x * torch.softmax(x, 0),
        "greatest": lambda x: x / (1 + x.detach().amax(0).clamp(min=20)),
        "last row": lambda x: x + x[-1],
        "next row": lambda x: x + x.roll(-1, 0),
        "number of rows": lambda x: x / len(x),
    }
    return functions[name]


class Mixing(PackedTower):
    """A packed tower that mixes the rows before its merger."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return over_rows(self.kind)(super().forward(pixels, positions, cu_seqlens, max_seqlen))

    def alone(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        return over_rows(self.kind)(super().alone(pixels, grid))


def mixing_table(kind: str) -> PackedTable:
    """A seeded one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PackedTable(Mixing(kind).eval())


@pytest.mark.parametrize("kind", ["mean", "softmax", "greatest", "last row", "next row", "number of rows"])
def test_forwards_that_mix_rows_are_not_padded(kind: str) -> None:
    """Padding, or garbage in it, changes real rows, which is found at capture: no graph is held, and items run eagerly."""
    table = mixing_table(kind)
    made = captured(table, token_budgets=(4, 16), **GREEDY)
    assert budgets(made) == []
    assert set(reasons(made).values()) == {"padding-unsafe"}
    request = packed_request([(1, 4, 6)])
    assert largest_difference(made.execute(request), packed_reference(table, request)) < 1e-5
    assert made.snapshot()["miss_reasons"] == {"padding-unsafe": 1}


@pytest.mark.parametrize("kind", ["mean", "last row", "number of rows"])
def test_without_the_trial_the_numbers_would_be_wrong(kind: str) -> None:
    """`verify=False` captures such a forward, and its features are clearly others: the trial is needed, and can fail."""
    table = mixing_table(kind)
    made = captured(table, token_budgets=(4, 16), verify=False, **GREEDY)
    request = packed_request([(1, 4, 6)])
    assert largest_difference(made.execute(request), packed_reference(table, request)) > 1e-2
    assert made.snapshot()["graph_hits"] == 1


def test_only_the_paths_that_mix_rows_are_refused() -> None:
    """Every graph is tried by itself."""
    table = tiled_table()
    forward = table.tower.forward

    def mixes_tiles(pixels: torch.Tensor, path: str) -> torch.Tensor:
        output = forward(pixels, path)
        return output - output.mean(0) if path == "local" else output

    table.tower.forward = mixes_tiles  # type: ignore[method-assign]
    made = captured(table, token_budgets=(12, 24), path_token_budgets={"local": (12,)}, **GREEDY)
    assert {key.path for key in made._captured.set.graphs} == {"global"}
    request = tiled_request([(0, 0), (0, 0)])
    assert largest_difference(made.execute(request), tiled_reference(table, request)) < 1e-5
    assert made.snapshot()["miss_reasons"] == {}
    made.execute(tiled_request([(1, 2)]))
    assert made.snapshot()["misses"] == [{"path": "local", "code": "padding-unsafe", "items": 1, "tokens": 8}]


def test_no_garbage_is_left_after_capture() -> None:
    """Behind a batch's rows there are zeros, also after the trials."""
    table = packed_table()
    made = captured(table, token_budgets=(8, 64), **GREEDY)
    for grids in ([(1, 4, 4)], [(1, 2, 2)], [(1, 8, 8), (1, 2, 8)]):
        request = packed_request(grids)
        made.execute(request)
        rows = sum(t * h * w for t, h, w in grids)
        for graph in made._captured.set.graphs.values():
            assert not bool(graph.inputs.values["pixels"][rows:].any())


def test_a_trial_that_fails_proves_nothing() -> None:
    """A forward that cannot bear garbage is not replayed with it: the graph is left out, the others and the items are fine."""

    class Picky(PackedTower):
        def forward(self, pixels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if len(pixels) == 64 and bool((pixels.abs() > 1e3).any()):
                raise ValueError("no such pixel")
            return super().forward(pixels, *args, **kwargs)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = PackedTable(Picky().eval())
    made = captured(table, token_budgets=(8, 16), **GREEDY)
    assert set(budgets(made)) == {8}
    assert set(reasons(made).values()) == {"padding-unproved"}
    request = packed_request([(1, 4, 4), (1, 6, 6)])
    assert largest_difference(made.execute(request), packed_reference(table, request)) < 1e-5
    assert not bool(next(iter(made._captured.set.graphs.values())).inputs.values["pixels"][16:].any())


@pytest.mark.parametrize("name", ["rows", "scale"])
def test_forwards_that_write_into_their_inputs_are_not_replayed(name: str) -> None:
    """The next batch would find what is left: the graph is refused, and items run eagerly."""

    class Writing(HandWritten):
        def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
            output = super().encoder_cudagraph_forward(values, path)
            if len(values["rows"]) == 8:
                values[name].add_(1)
            return output

    model = Writing(axes=((4,),))
    made = captured(model, **GREEDY)
    assert budgets(made) == [32, 16, 4, 2]
    assert reasons(made) == {8: "input-mutation"}
    (row,) = made.snapshot()["not_captured"]
    assert f"writes into {name}" in row["detail"]


# --- renewal and release ---------------------------------------------------------------------------------------------


def test_replaced_weights_capture_anew() -> None:
    """All graphs are new, the old ones are gone, and what was counted before stays."""
    model = one_width()
    made = captured(model, **GREEDY)
    made.execute(written_request([3]))
    old = [weakref.ref(graph) for graph in made._captured.set.graphs.values()]
    model.weights = nn.Parameter(model.weights.detach() * 3)
    with counters.expect(recaptures=1, captures=5):
        check_written(made, model)
    gc.collect()
    assert [ref() for ref in old] == [None] * 5
    assert budgets(made) == [32, 16, 8, 4, 2]
    assert made.snapshot()["recaptures"] == 1
    with counters.expect(recaptures=0, captures=0), torch.no_grad():
        model.weights.mul_(2)
        check_written(made, model)


def test_a_reason_may_go_with_the_weights() -> None:
    """What could not be captured is tried again, and a reason that no longer holds is forgotten."""
    model = Failing(RuntimeError("odd weights"), 16)
    made = captured(model, **GREEDY)
    assert reasons(made) == {16: "capture-failed"}
    model.failing = ()
    model.weights = nn.Parameter(model.weights.detach().clone())
    check_written(made, model)
    assert budgets(made) == [32, 16, 8, 4, 2]
    assert reasons(made) == {}


def test_dropped_graphs_are_gone() -> None:
    """Neither graph nor output nor buffer is kept by the set."""
    made = captured(packed_table(), token_budgets=(8, 16), **GREEDY)
    kept = [weakref.ref(graph) for graph in made._captured.set.graphs.values()]
    kept += [weakref.ref(graph.output) for graph in made._captured.set.graphs.values()]  # type: ignore[misc]
    made._captured.set.drop()
    gc.collect()
    assert made._captured.set.nbytes == 0
    assert [ref() for ref in kept] == [None] * len(kept)


# --- one graph -------------------------------------------------------------------------------------------------------


def test_a_replay_reads_the_buffers_and_overwrites_its_output() -> None:
    """The output is one place, which the next replay fills anew: what is handed out has to be copied."""
    values = {"rows": torch.zeros(3, 2)}
    graph = EncoderGraph(
        GraphKey("main", 3), lambda v, path: v["rows"] * 2, EncoderCudaGraphCaptureInputs(values, nbytes=24), 2, None
    )
    graph.record()
    values["rows"].fill_(4)
    first = graph.replay()
    assert bool((first == 8).all())
    values["rows"].fill_(5)
    assert graph.replay().data_ptr() == first.data_ptr()
    assert bool((first == 10).all())
    assert graph.nbytes == 24


def test_names_of_graphs() -> None:
    """Messages say path, tokens and axis keys."""
    assert str(GraphKey("local", 64)) == "local 64 tokens"
    assert str(GraphKey("main", 64, (4, "wide"))) == "main 64 tokens (4, 'wide')"


def test_replays_are_timed_for_cost_packing_only() -> None:
    """Every graph has a time then, of a replay on a full batch; greedy packing measures nothing."""
    timed, untimed = captured(one_width()), captured(one_width(), **GREEDY)
    assert all(graph.predicted_ms is not None and graph.predicted_ms > 0 for graph in timed._captured.set.graphs.values())
    assert all(graph.predicted_ms is None for graph in untimed._captured.set.graphs.values())
    check_written(timed, one_width())


def test_a_time_is_the_median_of_several_calls() -> None:
    """The first one, which may be slow, does not count."""
    calls = []
    assert median_ms(lambda: calls.append(1), CPU, runs=3) >= 0
    assert len(calls) == 4


def test_a_set_captures_what_it_is_told() -> None:
    """Keys in the given order; each with inputs of its own."""
    asked = []

    def inputs(key: GraphKey) -> EncoderCudaGraphCaptureInputs:
        asked.append(key)
        return EncoderCudaGraphCaptureInputs({"rows": torch.ones(key.token_budget, WIDTH)}, nbytes=1)

    made = GraphSet(HandWritten(), lambda values, path: values["rows"] + 1, WIDTH, CPU)
    keys = [GraphKey("b", 2), GraphKey("a", 8), GraphKey("a", 4, ("x",))]
    made.capture(keys, inputs, max_graphs=2, max_graph_bytes=None, verify=True)
    assert list(made.graphs) == asked == keys[:2]
    assert made.skips == {keys[2]: Skip("max-graphs", "2 graphs are held; max_graphs=2")}
    assert [bool((graph.replay() == 2).all()) for graph in made.graphs.values()] == [True, True]
