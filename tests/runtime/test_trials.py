"""Trials at capture: on an adapter's own metadata where it gives an example, and what becomes of items whose graph was refused.

`Loose` is a tower of rows (a row is a token) whose forward mixes rows as a test says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.runtime import toys
from tests.runtime.toys import captured, largest_difference, manager, packed_reference, packed_request, packed_table
from vit_compile.backend.roles import Role
from vit_compile.errors import ProtocolError
from vit_compile.runtime import table_trials
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.table import Buffer, ItemSize
from vit_compile.runtime.table_encoder import TableEncoder

CPU = torch.device("cpu")
Rows = dict[str, torch.Tensor]
Mixing = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]


def about_square(tokens: int) -> Hashable:
    """A key of the packed table with at most so many tokens."""
    height = max(1, int(tokens**0.5))
    return (1, 2 * height, 2 * (tokens // height))


class Example(toys.PackedTable):
    """The packed table with an example, asked for numbers of tokens that are noted."""

    def __init__(self, example: Callable[[int], Hashable | None] = about_square, **kwargs: Any) -> None:
        super().__init__(packed_table().tower, **kwargs)
        self.example, self.asked = example, list[int]()

    def example_key(self, tokens: int) -> Hashable | None:
        self.asked.append(tokens)
        return self.example(tokens)


def tried(table: Any, tokens: int, *, budget: int = 16, segments: int = 8, path: str = "main", key: int = 0) -> tuple[Any, ...]:
    """A protocol object, the inputs of one graph, and the real tokens of a clean trial in it."""
    made = TableEncoder(table, device=CPU, dtype=torch.float32)
    inputs = made.prepare_encoder_cudagraph_capture_inputs(budget, segments, 0, CPU, torch.float32, path, (key,))
    return made, inputs, made.fill_encoder_cudagraph_trial(inputs.state, path, tokens, None)


UNEQUAL: list[toys.Grid] = [(1, 2, 4), (1, 4, 4), (1, 2, 4)]
"""In 8 tokens."""

# --- what a trial puts in --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "segments", "keys"),
    [
        (8, 8, UNEQUAL),
        (9, 8, UNEQUAL),
        (8, 2, [(1, 4, 4)] * 2),
        (8, 1, [(1, 4, 8)]),
        (3, 8, [(1, 2, 2)] * 2),
        (1, 8, [(1, 4, 6)] * 2),
    ],
)
def test_a_trial_has_the_metadata_of_examples(tokens: int, segments: int, keys: list[toys.Grid]) -> None:
    """Three of two sizes where they fit; two where two fit into the tokens, or else into the graph; one where there is room for
    one segment. Each has its own positions and boundaries, and different data."""
    table = Example()
    made, inputs, real = tried(table, tokens, segments=segments)
    sizes = [t * h * w for t, h, w in keys]
    assert real * 4 == sum(sizes)
    values = inputs.values
    assert values["positions"][: sum(sizes)].tolist() == [row for size in sizes for row in range(size)]
    assert values["cu_seqlens"][: len(keys) + 1].tolist() == [0, *torch.tensor(sizes).cumsum(0).tolist()]
    assert not bool(values["pixels"][sum(sizes) :].any())
    alone = made.encoder_cudagraph_trial_values(inputs.state, "main")
    assert [len(item["pixels"]) for item in alone] == sizes
    assert torch.equal(torch.cat([item["pixels"] for item in alone]), values["pixels"][: sum(sizes)])
    assert all(item["cu_seqlens"].tolist() == [0, size] for item, size in zip(alone, sizes, strict=True))
    assert [item["max_seqlen"] for item in alone] == sizes
    if len(keys) > 1:
        assert not torch.equal(alone[0]["pixels"], alone[-1]["pixels"])


@pytest.mark.parametrize(
    "example",
    [lambda tokens: None, lambda tokens: (1, 2, 2 * tokens + 2), lambda tokens: (9, 2, 2), lambda tokens: (2, 2, tokens)],
    ids=["none", "too many tokens", "too many frames", "two frames in a graph of one segment"],
)
def test_examples_that_do_not_fit_are_made_up(example: Callable[[int], Hashable | None]) -> None:
    """Without an example that fits, integers are zeros and segments half of the room; the values are those of one item."""
    segments = 1 if example(4) == (2, 2, 4) else 4
    made, inputs, real = tried(Example(example), 8, segments=segments)
    assert real == 8
    assert not bool(inputs.values["positions"].any())
    lengths = [length for length in inputs.values["cu_seqlens"].diff().tolist() if length]
    assert len(lengths) == max(1, segments // 2)
    (values,) = made.encoder_cudagraph_trial_values(inputs.state, "main")
    assert torch.equal(values["pixels"], inputs.values["pixels"][:32])


def test_an_item_that_is_not_on_the_path_is_no_example() -> None:
    """The other path's trial is made up."""

    class NoTags(toys.TwinTable):
        def example_key(self, tokens: int) -> Hashable:
            return (1, 2, 2 * tokens, 0)

    table = NoTags(toys.twin_table().tower)
    made, inputs, _ = tried(table, 8, path="fine")
    assert len(made.encoder_cudagraph_trial_values(inputs.state, "fine")) == 3
    made, inputs, _ = tried(table, 4, path="coarse")
    (values,) = made.encoder_cudagraph_trial_values(inputs.state, "coarse")
    assert values.keys() == {"tags"}
    assert captured(table, token_budgets=(8, 16), packing="greedy").snapshot()["not_captured"] == []


def test_made_up_segments_are_not_tried_alone() -> None:
    """How many per-segment entries belong to them only the adapter knows: no values, and the graphs are kept."""
    made, inputs, _ = tried(toys.twin_table(), 8, path="fine")
    assert list(made.encoder_cudagraph_trial_values(inputs.state, "fine")) == []


def test_a_trial_after_batches_and_garbage_is_clean() -> None:
    """What a batch, or garbage of a trial before, left behind the example items is padding again."""
    made, inputs, _ = tried(Example(), 8)
    request = made.parse_encoder_request(packed_request([(1, 8, 8)]))
    assert made.fill_encoder_cudagraph_buffers(inputs.state, request, [0], "main")
    for kind in ("large", "nan", None):
        assert made.fill_encoder_cudagraph_trial(inputs.state, "main", 4, kind) == 4
    assert not bool(inputs.values["pixels"][16:].any())
    assert not bool(inputs.values["positions"][16:].any())
    assert set(inputs.values["cu_seqlens"][2:].tolist()) == {16}
    assert made.fill_encoder_cudagraph_buffers(inputs.state, request, [0], "main")
    assert torch.equal(inputs.values["pixels"], request["pixel_values"])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the random rows that trials of example items make from now on."""
    made, real = [], table_trials.random_values

    def random_values(shape: tuple[int, ...], *args: Any) -> torch.Tensor:
        made.append(shape)
        return real(shape, *args)

    monkeypatch.setattr(table_trials, "random_values", random_values)
    return made


def test_rows_of_a_trial_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all fills with one seed, whatever is behind them; others for other items, another seed, and after the trial."""
    shapes = counted(monkeypatch)
    made, inputs, _ = tried(Example(), 8)
    first = inputs.values["pixels"][:32].clone()
    items = [(rows, toys.CHANNELS) for rows in (8, 16, 8)]
    for kind in ("small", "large", None):
        made.fill_encoder_cudagraph_trial(inputs.state, "main", 8, kind)
        assert torch.equal(inputs.values["pixels"][:32], first)
    assert shapes == items
    made.fill_encoder_cudagraph_trial(inputs.state, "main", 4, None)
    assert shapes == items + [(8, toys.CHANNELS)] * 2, "none of a single token"
    made.fill_encoder_cudagraph_trial(inputs.state, "main", 8, None, seed=1)
    assert not torch.equal(inputs.values["pixels"][:32], first)
    made.fill_encoder_cudagraph_trial(inputs.state, "main", 8, None)
    assert torch.equal(inputs.values["pixels"][:32], first), "the same numbers for the same seed"
    made.forget_encoder_cudagraph_trial(inputs.state)
    assert torch.equal(inputs.values["pixels"][:32], first), "the buffers stay"
    shapes.clear()
    made.fill_encoder_cudagraph_trial(inputs.state, "main", 8, None)
    assert torch.equal(inputs.values["pixels"][:32], first)
    assert shapes == items


@pytest.mark.parametrize("packing", ["greedy", "cost"])
def test_nothing_of_a_trial_is_kept(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph's trial makes the rows of its items once; after the capture, and after timing, none are held."""
    shapes = counted(monkeypatch)
    made = captured(Example(segment_capacities=()), token_budgets=(8, 64), packing=packing, max_items_per_batch=2)
    assert shapes[:5] == [(rows, toys.CHANNELS) for rows in (32, 64, 32, 8, 8)]
    assert (len(shapes) == 5) == (packing == "greedy")
    assert all(not graph.inputs.state.trial for graph in made._captured.set.graphs.values())


@pytest.mark.parametrize("fails", ["in the trial", "with garbage", "alone"])
def test_nothing_is_kept_of_a_trial_that_fails(fails: str) -> None:
    """Whether the forward raises or mixes rows: the refused graph's rows go as well."""
    states = []

    class Failing(Example):
        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            pixels = values["pixels"]
            if (fails == "in the trial" and bool(pixels.any())) or (fails == "alone" and len(pixels) < 64):
                raise RuntimeError("no")
            made = super().forward(path, values)
            return made + pixels[-1].sum() if fails == "with garbage" else made

    made = manager(Failing(segment_capacities=()), token_budgets=(16,), packing="greedy")
    real = made.model.prepare_encoder_cudagraph_capture_inputs

    def noted(*args: Any) -> EncoderCudaGraphCaptureInputs:
        inputs = real(*args)
        states.append(inputs.state)
        return inputs

    made.model.prepare_encoder_cudagraph_capture_inputs = noted  # type: ignore[method-assign]
    made.capture()
    assert bool(made.graphs()) == (fails == "alone")
    assert states
    assert not any(state.trial for state in states)


def test_a_forward_may_write_into_what_it_gets_alone() -> None:
    """The rows of the next fill are those of the first all the same."""
    made, inputs, _ = tried(Example(), 8)
    first = inputs.values["pixels"][:32].clone()
    for item in made.encoder_cudagraph_trial_values(inputs.state, "main"):
        item["pixels"].fill_(7)
    made.fill_encoder_cudagraph_trial(inputs.state, "main", 8, None)
    assert torch.equal(inputs.values["pixels"][:32], first)


def test_garbage_is_not_the_real_rows_again() -> None:
    """A forward that compares rows would not see it."""
    made, inputs, _ = tried(Example(), 8)
    made.fill_encoder_cudagraph_trial(inputs.state, "main", 8, "small")
    rows = inputs.values["pixels"]
    assert bool((rows[32:] != 0).all())
    assert not bool((rows[32:].flatten()[:, None] == rows[:32].flatten()).any())


def test_right_towers_are_captured_whole() -> None:
    """An example makes a trial stricter, and refuses nothing that is right; it is asked for parts of the graph's tokens."""
    table = Example()
    made = captured(table, token_budgets=(8, 64), packing="greedy", strict=True)
    assert made.get_num_graphs_to_capture() == len(made.graphs())
    assert {32, 16, 8, 4, 2, 1} >= set(table.asked) >= {16, 8, 2, 1}
    request = packed_request([(1, 4, 4), (1, 2, 6)], [(2, 2, 2)])
    assert largest_difference(made.execute(request), packed_reference(table, request)) < 1e-5


# --- what a trial finds ----------------------------------------------------------------------------------------------


class Loose(toys.PackedTable):
    """Rows are tokens, of any grid, and `function(x, values)` of the embedded rows [T, W] is the forward."""

    def __init__(self, function: Mixing, *, example: bool = True, segment_capacities: Sequence[int] = ()) -> None:
        super().__init__(packed_table().tower, segment_capacities=segment_capacities)
        self.function, self.example, self.runs = function, example, 0
        (path,) = self.paths.values()
        valid, scale = Buffer(role=Role.ROWS), Buffer(role=Role.PER_SEGMENT)
        buffers = {**path.buffers, "valid": valid, "scale": scale}
        if not example:
            del buffers["scale"]
        self.paths = {"main": dataclasses.replace(path, buffers=buffers, spatial_merge_size=1)}

    def item_size(self, key: Any) -> ItemSize:
        t, h, w = key
        return ItemSize(rows=t * h * w, tokens=t * h * w, frames=t)

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        t, h, w = key
        return {**super().item_metadata(key, path), "valid": torch.ones(t * h * w), "scale": torch.full((t,), float(w))}

    def example_key(self, tokens: int) -> Hashable | None:
        return (1, 2, tokens // 2) if self.example and tokens > 1 else None

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        self.runs += 1
        return self.function(torch.tanh(self.tower.embed(values["pixels"])), values)

    @torch.no_grad()
    def alone(self, request: Mapping[str, Any]) -> list[torch.Tensor]:
        """Every image by itself."""
        grids = request["image_grid_thw"]
        parts = request["pixel_values"].split([t * h * w for t, h, w in grids])
        made = []
        for pixels, key in zip(parts, grids, strict=True):
            metadata = {name: value.clone() for name, value in self.item_metadata(key, "main").items()}
            made.append(self.forward("main", {"pixels": pixels, "max_seqlen": len(pixels), **metadata}).clone())
        return made


def where_late(x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """The last row, whosever it is, for rows of some position: made-up positions are zeros and do not show it."""
    return x + torch.where(values["positions"][:, None] > 1, x[-1:], torch.zeros(()))


def third_only(x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """The third item gets something of the first, whatever their sizes."""
    ends = values["cu_seqlens"]
    rows = torch.arange(len(x))
    third = (rows >= ends[2]) & (rows < ends[3]) if len(ends) > 3 else torch.zeros(len(x), dtype=torch.bool)
    return x + torch.where(third[:, None], x[:1], torch.zeros(()))


def unequal_only(x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """Items of one length do not disturb one another; where lengths differ, the longest is mixed in."""
    lengths = values["cu_seqlens"].diff()
    filled = lengths[lengths > 0]
    differ = bool((filled != filled[0]).any()) if len(filled) else False
    return x + differ * x[int(lengths.argmax())]


MIXING: dict[str, Mixing] = {
    "third item": third_only,
    "items of unequal size": unequal_only,
    "last row for later positions": where_late,
    "mean times position": lambda x, v: x + x.mean(0) * v["positions"][:, None],
    "mean of the real rows": lambda x, v: x - (x * v["valid"][:, None]).sum(0) / v["valid"].sum(),
    "number of segments": lambda x, v: x / len(v["cu_seqlens"]),
    "number of filled segments": lambda x, v: x / (v["cu_seqlens"].diff() > 0).sum(),
    "greatest of all segments": lambda x, v: x * v["scale"].max() + x * (v["scale"] > 0).sum(),
    "bound": lambda x, v: x * v["max_seqlen"],
}
IMAGES = packed_request([(1, 2, 4), (1, 4, 4), (1, 2, 2)])


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_only_real_metadata_shows_is_refused(name: str) -> None:
    """No graph where an item depends on padding, on its neighbours or on the graph's size; items are right, one by one."""
    table = Loose(MIXING[name])
    made = captured(table, token_budgets=(16, 64), packing="greedy")
    assert made.graphs() == ()
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"padding-unsafe"}
    want = table.alone(IMAGES)
    table.runs = 0
    assert largest_difference(made.execute(IMAGES), want) < 1e-5
    assert table.runs == 3
    assert made.snapshot()["miss_reasons"] == {"padding-unsafe": 3}
    together = manager(table)  # not captured: nothing was found out, and the three are one batch
    assert largest_difference(together.execute(IMAGES), want) > 1e-3, "the case proves nothing"


def test_graphs_for_one_item_are_kept() -> None:
    """Where only neighbours disturb, graphs of a single segment are right: the items of a refused batch replay them."""
    table = Loose(MIXING["mean of the real rows"], segment_capacities=(1,))
    made = captured(table, token_budgets=(16, 64), packing="greedy")
    assert {row["axis_keys"][0] for row in made.snapshot()["not_captured"]} == {"0"}
    want = table.alone(IMAGES)
    assert largest_difference(made.execute(IMAGES), want) < 1e-5
    assert made.snapshot()["miss_reasons"] == {}
    assert made.snapshot()["replays"] == 3


def test_made_up_metadata_shows_the_number_of_segments() -> None:
    """Without an example half of the segments are filled, so that the room of the graph shows."""
    made = captured(Loose(MIXING["number of segments"], example=False), token_budgets=(16, 64), packing="greedy")
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"padding-unsafe"}


@pytest.mark.parametrize("by_cost", [False, True])
def test_items_whose_graph_writes_into_its_inputs_run_alone(by_cost: bool) -> None:
    """Multiplying positions in place does not show on zeros, but on an example's; items are right, each by itself."""
    table = Loose(lambda x, v: x + torch.sin(v["positions"].mul_(2).float())[:, None])
    made = captured(table, token_budgets=(16, 64), packing="cost" if by_cost else "greedy")
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"input-mutation"}
    want = table.alone(IMAGES)
    table.runs = 0
    for _ in range(2):
        assert largest_difference(made.execute(IMAGES), want) < 1e-5
    assert table.runs == 6


def test_pixels_that_are_multiplied_in_place_are_found_on_data() -> None:
    """Buffers are zeros at capture, and a factor leaves zeros alone: the check looks again with numbers in them."""

    class Scaling(toys.PackedTable):
        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            return super().forward(path, {**values, "pixels": values["pixels"].mul_(3)})

    made = captured(Scaling(packed_table().tower), token_budgets=(16,), packing="greedy")
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"input-mutation"}
    assert all("writes into pixels" in row["detail"] for row in made.snapshot()["not_captured"])


def test_a_trial_that_fails_leaves_items_alone_too() -> None:
    """Nothing was proved about such a graph: its items run one by one."""

    def picky(x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        if bool((values["pixels"].abs() > 1e3).any()):
            raise ValueError("no such pixel")
        return x

    table = Loose(picky)
    made = captured(table, token_budgets=(64,), packing="greedy")
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"padding-unproved"}
    table.runs = 0
    made.execute(IMAGES)
    assert table.runs == 3


def test_other_eager_items_run_together() -> None:
    """Without graphs, or with a graph that failed for another reason, one forward serves the items of a batch."""
    table = Loose(lambda x, values: x)
    want = table.alone(IMAGES)
    table.runs = 0
    assert largest_difference(manager(table, packing="greedy").execute(IMAGES), want) < 1e-5
    assert table.runs == 1

    def broken(x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        if len(x) == 64:
            raise RuntimeError("this size is broken")
        return x

    table = Loose(broken)
    made = captured(table, token_budgets=(64,), packing="greedy")
    assert {row["code"] for row in made.snapshot()["not_captured"]} == {"capture-failed"}
    table.runs = 0
    assert largest_difference(made.execute(IMAGES), want) < 1e-5
    assert table.runs == 1


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda x: torch.cat([x.new_zeros(1, toys.WIDTH), x]), 17),
        (lambda x: x[:-1], 15),
        (lambda x: x.repeat(2, 1), 32),
    ],
    ids=["class token", "one less", "twice"],
)
def test_a_forward_gives_the_tokens_of_its_graph(wrong: Callable[..., Any], found: int, verify: bool) -> None:
    """One row more in front would shift every item: an error at capture, whether trials are made or not."""

    class Wrong(toys.PackedTable):
        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            features: torch.Tensor = wrong(super().forward(path, values))
            return features

    with pytest.raises(ProtocolError, match=f"encoder_cudagraph_forward gave {found} tokens: expected 16"):
        captured(Wrong(packed_table().tower), token_budgets=(16,), verify=verify)


def test_a_budget_that_is_no_whole_tile_gives_whole_tiles() -> None:
    """The tokens that are expected are those of the rows: 13 tokens are 2 thumbnails of 6 and 3 tiles of 4."""
    table = toys.tiled_table()
    made = captured(table, token_budgets=(13,), path_token_budgets={"local": (13,)}, packing="greedy")
    tokens = {key.path: graph.inputs.output_tokens for key, graph in made._captured.set.graphs.items()}
    assert tokens == {"global": 12, "local": 12}


def test_models_that_write_the_contract_out_may_leave_the_tokens_unsaid() -> None:
    """None: not checked. A number: checked."""
    model = toys.HandWritten(axes=((4,),))
    real = model.prepare_encoder_cudagraph_capture_inputs
    captured(model, packing="greedy")

    def saying(*args: Any) -> EncoderCudaGraphCaptureInputs:
        return dataclasses.replace(real(*args), output_tokens=args[0] + 1)

    model.prepare_encoder_cudagraph_capture_inputs = saying  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="gave 32 tokens: expected 33"):
        captured(model, packing="greedy")


# --- memory ----------------------------------------------------------------------------------------------------------


class Sharing(toys.HandWritten):
    """Its graphs share the rows, and the result depends on what is behind the values."""

    def __init__(self) -> None:
        super().__init__(axes=((4,),))
        self.memory: Rows = {}

    def prepare_encoder_cudagraph_capture_inputs(self, token_budget: int, *args: Any) -> EncoderCudaGraphCaptureInputs:
        if not self.memory:
            self.memory = {"rows": torch.zeros(token_budget, 4), "scale": torch.ones(token_budget)}
        return EncoderCudaGraphCaptureInputs({name: value[:token_budget] for name, value in self.memory.items()})

    def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
        return super().encoder_cudagraph_forward(values, path) + values["rows"].sum()


@pytest.mark.parametrize("counts", [[3, 30, 3, 7, 2, 30, 2], [1, 32, 17, 1]])
def test_graphs_of_a_written_out_model_may_share_memory(counts: Sequence[int]) -> None:
    """Behind the values there are zeros, also where another graph wrote there since."""
    model = Sharing()
    made = captured(model, packing="greedy")
    for number, count in enumerate(counts):
        request = toys.written_request([count], seed=number)
        (want,) = toys.written_reference(model, request)
        with torch.no_grad():
            assert largest_difference(made.execute(request), [want + request["rows"].sum()]) < 1e-5
    assert made.snapshot()["graph_hits"] == len(counts)


@pytest.mark.parametrize("captures", [False, True])
def test_eager_features_are_copies(captures: bool) -> None:
    """A tower that writes every output into the same memory, or hands out its weights, is no danger to features held."""
    table = packed_table()
    memory = torch.zeros(4096, toys.WIDTH)

    class Reusing(toys.PackedTable):
        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            made = super().forward(path, values)
            return memory[: len(made)].copy_(made)

    reusing = Reusing(table.tower)
    made = manager(reusing, packing="greedy", token_budgets=(8,), verify=False)
    if captures:
        made.capture()
    held = []
    for seed in range(3):
        request = packed_request([(1, 10, 10), (1, 2, 4), (1, 12, 10)], seed=seed)
        held.append((made.execute(request), packed_reference(table, request)))
    assert all(largest_difference(got, want) < 1e-5 for got, want in held)
    held[0][0][0].fill_(7)
    assert not bool((memory == 7).any())


def test_eager_width_is_checked() -> None:
    """The right number of tokens of another width is named, with what was expected."""
    model = toys.HandWritten()
    model.encoder_eager_forward = lambda *args: torch.zeros(3, toys.WIDTH - 1)  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match=r"encoder_eager_forward gave \[3, 7\] on path 'main': expected \[3, 8\]"):
        manager(model).execute(toys.written_request([3]))
