"""Sizes: symbols are read from a call, expressions evaluate as in the graph, guards are kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.common import Traced, dynamic, traced


def merge(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sizes of many forms: a quarter, a product, a sum, a rounded half, a remainder."""
    rows, more = x.shape[0], other.shape[0]
    return (
        x.view(rows // 4, -1),
        x.new_zeros(rows * more),
        x.new_zeros(rows + more + 1),
        x.new_zeros((rows + 1) // 2, 3),
        x.new_zeros(rows % 7 + 1, 2),
        x.new_zeros(max(rows, more)),
        other * 2,
    )


def trace() -> Traced:
    """`merge` with 8 and 5 rows."""
    return traced(merge, *dynamic([torch.randn(8, 4), torch.randn(5, 2)]))


def test_shapes_of_outputs_are_evaluated() -> None:
    """The symbolic sizes of the outputs, evaluated for another call, are the shapes that eager gives."""
    found = trace()
    for rows, more in ((12, 3), (16, 40), (100, 7)):
        x, other = torch.randn(rows, 4), torch.randn(more, 2)
        try:
            args = found.args(x, other)
        except AssertionError:  # max() was specialised by a guard: another trace, not what is looked at
            continue
        env = found.table.read(args)
        want = [tuple(t.shape) for t in merge(x, other)]
        assert [found.program.specs[output.slot].sizes(env) for output in found.program.outputs] == want


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 500).map(lambda n: 4 * n), st.integers(2, 400))
def test_expressions_for_any_sizes(rows: int, more: int) -> None:
    """The same for any sizes, without running the graph."""
    if not _shared:
        _shared.append(trace())
    found = _shared[0]
    values = {"x": rows, "other": more}
    env = tuple(values["x"] if found.env[i] == 8 else values["other"] for i in range(len(found.env)))
    shapes = [found.program.specs[output.slot].sizes(env) for output in found.program.outputs][:5]
    assert shapes == [(rows // 4, 16), (rows * more,), (rows + more + 1,), ((rows + 1) // 2, 3), (rows % 7 + 1, 2)]


_shared: list[Traced] = []


def test_symbols_are_read_from_tensors() -> None:
    """An environment is the concrete value of every symbol, read from shapes; a static graph has none."""
    found = trace()
    args = found.args(torch.randn(12, 4), torch.randn(9, 2))
    assert sorted(found.table.read(args)) == [9, 12]
    assert found.table.describe((1, 2)) == f"{found.table.names[0]} = 1, {found.table.names[1]} = 2"
    static = traced(lambda x: x * 2, torch.randn(8, 4))
    assert static.table.read(static.seen[-1]) == ()
    assert static.table.describe(()) == "static"
    assert found.table.unreadable == static.table.unreadable == ()


def test_a_symbolic_integer_is_read_from_its_argument() -> None:
    """A symbol that no tensor carries is read from the integer argument."""

    def function(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * times

    with torch._dynamo.config.patch(assume_static_by_default=False):
        found = traced(function, torch.randn(8, 4), 3)
    env = found.table.read(found.seen[-1])
    assert sorted(env) == [3, 4, 8]


def test_guards_are_kept() -> None:
    """A size that the graph was not traced for is named: a divisor, a range."""
    found = trace()
    row = found.env.index(8)

    def at(rows: int) -> str | None:
        return found.table.broken_guard(tuple(rows if i == row else v for i, v in enumerate(found.env)))

    assert at(12) is None
    broken = at(9)
    assert broken is not None
    assert "= 9" in broken
    assert at(1) is not None
    plain = traced(lambda x: x * 2, *dynamic([torch.randn(8, 4)]))
    assert plain.table.broken_guard((2,)) is None
    below = plain.table.broken_guard((1,))  # torch.compile traces a size of one apart
    assert below is not None
    assert "= 1" in below


def test_a_relation_between_inputs_is_a_guard() -> None:
    """Inputs that are added must be as long as each other: one symbol, or a guard that says so."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    found = traced(function, *dynamic([torch.randn(8, 4), torch.randn(8, 4)]))
    if len(found.env) == 2:
        assert found.table.broken_guard((8, 9)) is not None
    assert found.table.broken_guard(found.env) is None


def test_specs_describe_tensors() -> None:
    """Shape, strides, dtype and device; readable in a table."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(4, 9).t()
    torch._dynamo.mark_dynamic(x, 0)
    found = traced(function, x)
    (arg,) = found.program.tensor_args
    spec = found.program.specs[arg]
    assert spec.sizes((11,)) == (11, 4)
    assert [stride((11,)) for stride in spec.stride] == [1, 11]
    assert spec.dtype == torch.float32
    assert str(spec) == f"float32[{found.table.names[0]}, 4] cpu"
