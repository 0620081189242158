"""Pieces: equal structure is compiled once, anything else apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from tests.backend.common import (
    BOUND,
    BUDGETS,
    call,
    compiled,
    dynamic,
    largest_difference,
    packed,
    trace_dynamic,
    traced,
    wide_rows,
)
from tests.towers import COUNTING_NAME, counting_attention, norm_view_tower, toy_tower
from vit_compile import _torch_compat, counters
from vit_compile.backend.pieces import structure


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_layers_share_their_code(depth: int) -> None:
    """`depth + 1` pieces, of which three are distinct: the first, the middle ones, the last; each is compiled once."""
    with counters.expect(pieces=depth + 1, distinct_pieces=3, piece_compiles=3, graphs_seen=1):
        ours = compiled(toy_tower(depth), mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
        for lengths in ([5, 3], [9], [30], [40, 2]):
            trace_dynamic(ours, *packed([5, 2], bound=BOUND)) if lengths == [5, 3] else None
            call(ours, *packed([*lengths, 1], bound=BOUND))


def test_one_layer_has_two_pieces() -> None:
    """With one attention call there is no middle piece."""
    with counters.expect(pieces=2, distinct_pieces=2):
        trace_dynamic(compiled(toy_tower(1), mode="piecewise", splitting_ops=[COUNTING_NAME]), *packed([5, 2], bound=BOUND))


def test_shared_code_takes_each_layers_weights() -> None:
    """Layers with equal structure and other weights give each its own result."""
    model = norm_view_tower(depth=4)
    ours = compiled(model, mode="piecewise", compiler="aot_eager", token_budgets=BUDGETS)
    args = packed([5, 2], make=wide_rows, bound=BOUND)
    with counters.expect(pieces=5, distinct_pieces=3):
        got = trace_dynamic(ours, *args)
    assert largest_difference(got, call(model, *args)) <= 1e-5
    firsts = [block.up.weight for block in model.blocks]
    assert all(not torch.equal(firsts[0], other) for other in firsts[1:])


def graph_of(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The first piece of a function's graph."""
    found = traced(function, *dynamic(args))
    return next(piece.module for piece in found.library.pieces.values())


def test_equal_structure_gives_equal_keys() -> None:
    """Two traces of the same arithmetic with different sizes and symbol names have one key."""
    one = structure(graph_of(lambda x: torch.relu(x) * 2, torch.randn(8, 4)))
    two = structure(graph_of(lambda y: torch.relu(y) * 2, torch.randn(11, 4)))
    assert one == two
    assert len(one) == 16


DIFFERENT: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "base": (lambda x: torch.relu(x) * 2, torch.randn(8, 4)),
    "constant": (lambda x: torch.relu(x) * 3, torch.randn(8, 4)),
    "operation": (lambda x: torch.tanh(x) * 2, torch.randn(8, 4)),
    "order": (lambda x: torch.relu(x * 2), torch.randn(8, 4)),
    "width": (lambda x: torch.relu(x) * 2, torch.randn(8, 5)),
    "dtype": (lambda x: torch.relu(x) * 2, torch.randn(8, 4, dtype=torch.float64)),
    "strides": (lambda x: torch.relu(x) * 2, torch.randn(4, 8).t()),
    "wiring": (lambda x: torch.relu(x) * 2 + x, torch.randn(8, 4)),
    "keyword": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), torch.randn(8, 4)),
    "other keyword": (lambda x: torch.nn.functional.gelu(x, approximate="none"), torch.randn(8, 4)),
    "slice": (lambda x: x[:, 1:3], torch.randn(8, 4)),
    "other slice": (lambda x: x[:, 0:2], torch.randn(8, 4)),
    "integer and float": (lambda x: torch.relu(x) * 2.0, torch.randn(8, 4)),
    "outputs": (lambda x: (torch.relu(x) * 2, torch.relu(x)), torch.randn(8, 4)),
}


def test_any_difference_gives_another_key() -> None:
    """Constants, operations, wiring, dtypes, strides, keywords and slices are all part of the key."""
    keys = {name: structure(graph_of(function, x)) for name, (function, x) in DIFFERENT.items()}
    by_key: dict[str, list[str]] = {}
    for name, key in keys.items():
        by_key.setdefault(key, []).append(name)
    assert [names for names in by_key.values() if len(names) > 1] == []


def test_the_same_symbol_twice_differs_from_two_symbols() -> None:
    """[s0, s0] and [s0, s1] may not share code."""
    same = traced(lambda x, y: x.sum() + y.sum(), *_marked(torch.randn(8, 4), torch.randn(8, 4), tie=True))
    other = traced(lambda x, y: x.sum() + y.sum(), *_marked(torch.randn(8, 4), torch.randn(9, 4), tie=False))
    keys = [next(iter(found.library.pieces)) for found in (same, other)]
    specs = [[str(found.program.specs[arg].shape[0]) for arg in found.program.tensor_args] for found in (same, other)]
    assert len(set(specs[1])) == 2
    assert (len(set(specs[0])) == 2) or keys[0] != keys[1]


def _marked(x: torch.Tensor, y: torch.Tensor, *, tie: bool) -> list[torch.Tensor]:
    if tie:
        return [x, x[:]]
    return dynamic([x, y])


def test_constants_held_by_the_graph_are_part_of_the_key() -> None:
    """Graphs that read different constant tensors differ, graphs that read one and the same do not."""

    def reads(constant: torch.Tensor) -> fx.GraphModule:
        root = nn.Module()
        root.register_buffer("constant", constant)
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.zeros(2, 4)
        graph.output((graph.call_function(torch.add, (x, graph.get_attr("constant"))),))
        return fx.GraphModule(root, graph)

    one, two = torch.ones(4), torch.ones(4) * 2
    assert structure(reads(one)) == structure(reads(one))
    assert structure(reads(one)) != structure(reads(two))


def test_constants_of_two_layers_are_told_apart() -> None:
    """Layers that differ in a traced tensor constant alone do not share code."""

    class Layer(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
            return counting_attention(x * torch.tensor([self.factor] * 8), cu_seqlens, BOUND)

    layers = nn.ModuleList([Layer(1.0), Layer(2.0), Layer(3.0)])

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, cu_seqlens)
        return x

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    args = packed([5, 2])[:2]
    assert torch.equal(trace_dynamic(ours, *args), model(*args))
    args = packed([5, 3, 4])[:2]
    assert torch.equal(call(ours, *args), model(*args))


def test_layers_that_differ_in_a_number_are_told_apart() -> None:
    """A different epsilon or scale is another piece."""
    layers = nn.ModuleList([nn.LayerNorm(8, eps=eps) for eps in (1e-5, 1e-1, 10.0)])

    def model(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = counting_attention(layer(x), cu_seqlens, BOUND)
        return x

    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    args = packed([5, 2])[:2]
    with counters.expect(pieces=3, distinct_pieces=3):
        assert largest_difference(trace_dynamic(ours, *args), call(model, *args)) <= 1e-5


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_sizes_are_compiled_once_more(compiler: str) -> None:
    """Pieces are compiled again for the listed sizes, once each, and only by Inductor; the numbers stay."""
    model = norm_view_tower(depth=3)
    ours = compiled(model, mode="piecewise", compiler=compiler, token_budgets=BUDGETS, compile_sizes=[16])
    trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
    extra = 3 if compiler == "inductor" else 0
    with counters.expect(piece_compiles=extra, graphs_seen=0):
        for lengths in ([10, 4], [16], [9], [12, 3]):
            args = packed([*lengths, 0], make=wide_rows, bound=BOUND)
            assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5
    with counters.expect(piece_compiles=0):
        args = packed([7, 0], make=wide_rows, bound=BOUND)
        assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5


def test_compile_sizes_without_captures() -> None:
    """With mode="none" an exact size runs the statically compiled pieces, other sizes the dynamic ones."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, mode="none", compiler="inductor", compile_sizes=[16])
    trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
    with counters.expect(piece_compiles=2, uncaptured_calls=3):
        for lengths in ([12, 4], [7, 9], [7, 2]):
            args = packed(lengths, make=wide_rows, bound=BOUND)
            assert largest_difference(call(ours, *args), call(model, *args)) <= 1e-5


def test_pieces_are_reused_across_budgets() -> None:
    """Four captures compile nothing new."""
    ours = compiled(norm_view_tower(depth=2), mode="full", compiler="aot_eager", token_budgets=[8, 16, 24, 32])
    trace_dynamic(ours, *packed([5, 2], make=wide_rows, bound=BOUND))
    with counters.expect(piece_compiles=0, captures=3):
        for rows in (12, 20, 30):
            call(ours, *packed([rows - 3, 3], make=wide_rows, bound=BOUND))


class _Own(InductorChoices):
    """A user's heuristics."""


@pytest.mark.parametrize("own", [False, True])
def test_pieces_are_compiled_with_their_settings(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """While a piece is lowered, kernels are not to be tuned on made-up inputs, and rows of up to 2048 values stay in registers
    unless the user brings heuristics; neither setting is left behind."""
    found: list[tuple[object, type]] = []
    run = GraphLowering.run

    def noting(self: GraphLowering, *args: Any) -> Any:
        found.append((inductor_config.triton.autotune_at_compile_time, type(V.choices)))
        return run(self, *args)

    monkeypatch.setattr(GraphLowering, "run", noting)
    before = inductor_config.triton.autotune_at_compile_time, type(V.choices)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    handler = V.set_choices_handler(_Own() if own else InductorChoices())
    with torch.inference_mode(), handler, inductor_config.patch(force_disable_caches=True):
        torch.compile(model, backend="vit_cudagraph")(torch.randn(3, 8))
    assert found == [(False, _Own if own else _torch_compat._LongRows)]
    assert (inductor_config.triton.autotune_at_compile_time, type(V.choices)) == before


@pytest.mark.parametrize(
    ("size", "hint", "cooperative", "stays"),
    [
        (1024, ReductionHint.INNER, False, True),
        (1152, ReductionHint.INNER, False, True),
        (2048, ReductionHint.INNER, False, True),
        (2049, ReductionHint.INNER, False, False),
        (1152, ReductionHint.OUTER, False, False),
        (1152, ReductionHint.INNER, True, False),
    ],
)
def test_which_rows_stay_in_registers(
    monkeypatch: pytest.MonkeyPatch, size: int, hint: ReductionHint, cooperative: bool, stays: bool
) -> None:
    """Inner reductions of up to 2048 values in one program."""
    features = mock.Mock(reduction_numel=sympy.Integer(size), numel=sympy.Integer(64), get_reduction_hint=lambda: hint)
    sizes = mock.Mock(sizevars=mock.Mock(statically_known_leq=lambda a, b: a <= b, optimization_hint=int))
    with V.set_graph_handler(sizes):
        assert _torch_compat._LongRows.should_use_persistent_reduction(features, cooperative) == stays
