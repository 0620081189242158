"""Roles are inferred from the graph: one small graph for each role, and for what must not be guessed."""

from __future__ import annotations

import pytest
import torch

from tests import towers
from tests.backend.common import BOUND, Traced, dynamic, packed, traced, wide_rows
from tests.towers import counting_attention, norm_view_tower, toy_tower
from vit_compile.backend.roles import Role


def toy(lengths: list[int] | None = None, bound: int | None = BOUND) -> Traced:
    """A traced toy tower."""
    return traced(toy_tower(1), *dynamic(packed([5, 3, 3] if lengths is None else lengths, bound=bound)))


def test_rows_and_boundaries() -> None:
    """The widest floating-point input has the rows; what reaches `cu_seqlens` are the boundaries."""
    found = toy()
    assert found.role("x") is Role.ROWS
    assert found.role("cu_seqlens") is Role.BOUNDARIES
    assert found.roles.rows(found.env) == 11
    assert found.roles.conflict is None


@pytest.mark.parametrize("convert", ["int", "to", "contiguous", "view", "add"])
def test_boundaries_are_followed_through_conversions(convert: str) -> None:
    """A conversion keeps the role; arithmetic on boundaries does not, and then padding is off with the reason."""
    conversions = {
        "int": lambda cu: cu.int(),
        "to": lambda cu: cu.to(torch.int32),
        "contiguous": lambda cu: cu.to(torch.int32).contiguous(),
        "view": lambda cu: cu.view(-1).to(torch.int32),
        "add": lambda cu: (cu + 0).to(torch.int32),
    }

    def tower(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return counting_attention(x * 2, conversions[convert](cu_seqlens), max_seqlen) + 1

    x, cu_seqlens, bound = packed([5, 3, 3], bound=BOUND)
    found = traced(tower, *dynamic([x, cu_seqlens.long()]), bound)
    if convert == "add":
        assert found.roles.conflict is not None
        assert found.roles.conflict.code == "padding-unproved"
    else:
        assert found.role("cu_seqlens") is Role.BOUNDARIES
        assert found.roles.conflict is None


def test_each_boundary_input_knows_its_attention_calls() -> None:
    """Windowed and full attention have boundaries of their own; each is checked against the calls that it reaches."""

    def tower(x: torch.Tensor, cu_seqlens: torch.Tensor, cu_window_seqlens: torch.Tensor) -> torch.Tensor:
        for boundaries in (cu_window_seqlens, cu_seqlens, cu_window_seqlens):
            x = counting_attention(x + 1, boundaries, BOUND)
        return x

    x, cu_seqlens, _ = packed([5, 6])
    windows = towers.boundaries([3, 2, 3, 3])
    found = traced(tower, *dynamic([x, cu_seqlens, windows]))
    calls = {found.program.arg_names[arg]: len(calls) for arg, calls in found.roles.boundary_calls.items()}
    assert sorted(calls.values()) == [1, 2]
    assert found.role("cu_window_seqlens") is Role.BOUNDARIES
    assert len(found.roles.segment_symbols) == 2


def gathers(x: torch.Tensor, index: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Rows in another order, attention, and back."""
    y = counting_attention(x[index], cu_seqlens, BOUND)
    return y[torch.argsort(index)]


def test_an_index_gathers_rows() -> None:
    """Integers that pick rows of a tensor with rows are an index."""
    x, cu_seqlens, _ = packed([5, 3, 3])
    found = traced(gathers, *dynamic([x, torch.randperm(11), cu_seqlens]))
    assert found.role("index") is Role.INDEX
    assert found.role("x") is Role.ROWS


def test_an_index_into_a_table_is_rows() -> None:
    """Integers that look up a fixed table are padded with zeros, which every table has."""
    table = torch.randn(20, 8)

    def tower(x: torch.Tensor, ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x + table[ids], cu_seqlens, BOUND)

    x, cu_seqlens, _ = packed([5, 3, 3])
    found = traced(tower, *dynamic([x, torch.arange(11), cu_seqlens]))
    assert found.role("ids") is Role.ROWS


def test_scaled_rows() -> None:
    """An input with a fixed share of the rows follows them: four patches make one merged row."""

    def tower(x: torch.Tensor, merged: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        y = counting_attention(x * 2, cu_seqlens, BOUND)
        return y.view(merged.shape[0], -1) + merged

    x, cu_seqlens, _ = packed([8, 12, 4])
    found = traced(tower, *dynamic([x, torch.randn(6, 1), cu_seqlens]))
    assert found.role("merged") is Role.ROWS
    assert found.roles.rows(found.env) == 24
    assert found.roles.conflict is None


def test_scaled_rows_with_a_symbol_of_their_own() -> None:
    """Where nothing in the graph ties the two counts together, the traced ratio does."""

    def tower(x: torch.Tensor, merged: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return counting_attention(x * 2, cu_seqlens, BOUND), merged + 1

    x, cu_seqlens, _ = packed([8, 12, 4])
    found = traced(tower, *dynamic([x, torch.randn(6, 4), cu_seqlens]))
    assert found.role("merged") is Role.ROWS
    assert list(found.roles.scaled.values()) == [(1, 4)]


@pytest.mark.parametrize("extra", [0, -1])
def test_per_segment_inputs(extra: int) -> None:
    """One row per segment (or per boundary) follows the boundaries, not the rows."""

    def tower(x: torch.Tensor, sizes: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return counting_attention(x * 2, cu_seqlens, BOUND), sizes + 1

    x, cu_seqlens, _ = packed([5, 3, 3])
    found = traced(tower, *dynamic([x, torch.ones(cu_seqlens.shape[0] + extra, 3), cu_seqlens]))
    assert found.role("sizes") is Role.PER_SEGMENT
    assert (0 if extra == 0 else -1) in [difference for _, difference in found.roles.segment_symbols.values()]


def test_fixed_inputs() -> None:
    """Inputs without a symbol, and counts in no ratio to the rows, are never padded."""

    def tower(x: torch.Tensor, scale: torch.Tensor, other: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return counting_attention(x * scale, cu_seqlens, BOUND), other + 1

    x, cu_seqlens, _ = packed([5, 3, 3])
    args = dynamic([x, cu_seqlens])
    found = traced(tower, args[0], torch.ones(1), *dynamic([torch.randn(7, 2)]), args[1])
    assert found.role("scale") is Role.FIXED
    assert found.role("other") is Role.FIXED


def test_one_size_for_all_is_fixed() -> None:
    """A graph traced for one size has no rows to pad."""
    found = traced(toy_tower(1), *packed([5, 3], bound=BOUND))
    assert found.roles.row_symbol == -1
    assert found.roles.rows(found.env) is None
    assert found.role("x") is Role.FIXED


def test_rows_behind_a_leading_one() -> None:
    """[1, T, C] has its rows in dimension 1."""

    def tower(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(1, 11, 4)
    torch._dynamo.mark_dynamic(x, 1)
    found = traced(tower, x)
    assert found.role("x") is Role.ROWS
    assert found.roles.inputs[0].dim == 1


def test_a_mask_of_rows_is_rows() -> None:
    """Booleans per row are rows, never an index."""

    def tower(x: torch.Tensor, keep: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x.masked_fill(keep[:, None], 0), cu_seqlens, BOUND)

    x, cu_seqlens, _ = packed([5, 3, 3])
    found = traced(tower, *dynamic([x, torch.rand(11) > 0.5, cu_seqlens]))
    assert found.role("keep") is Role.ROWS


def test_a_bound_is_not_rows() -> None:
    """A symbol that only reaches `max_seqlen` is a bound: its value does not select a capture."""

    def tower(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return counting_attention(x * 2, cu_seqlens, max_seqlen)

    found = traced_with_symbolic_bound(tower)
    assert [found.table.names[i] for i in found.roles.bound_symbols] != []
    assert found.roles.row_symbol not in found.roles.bound_symbols


def traced_with_symbolic_bound(tower: object) -> Traced:
    """A trace in which `max_seqlen` is a symbol, as it becomes when it changes from call to call."""
    from tests.backend import common

    x, cu_seqlens, longest = packed([5, 3, 3])
    with torch._dynamo.config.patch(assume_static_by_default=False):
        return common.traced(tower, x, cu_seqlens, longest)  # type: ignore[arg-type]


def test_a_symbol_for_two_counts_is_a_conflict() -> None:
    """Rows that were as many as boundaries when traced share their symbol: neither can be padded alone."""

    def tower(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return counting_attention(x * 2, cu_seqlens, BOUND)

    x, cu_seqlens, _ = packed([1, 1, 2, 0])
    assert x.shape[0] != cu_seqlens.shape[0]
    x, cu_seqlens, _ = packed([1, 2, 1])
    assert x.shape[0] == cu_seqlens.shape[0] == 4
    # Both stay unmarked and become symbols by themselves, with equal values: one symbol ("duck shaping").
    with torch._dynamo.config.patch(assume_static_by_default=False):
        found = traced(tower, x, cu_seqlens)
    assert found.roles.conflict is not None
    assert found.roles.conflict.code == "duck-shape"


def test_rows_that_are_also_a_side_are_a_conflict() -> None:
    """A square input whose both sides share the symbol cannot be padded in one dimension."""

    def tower(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return bias @ x

    with torch._dynamo.config.patch(assume_static_by_default=False):
        found = traced(tower, torch.randn(9, 4), torch.randn(9, 9))
    assert found.roles.conflict is not None
    assert found.roles.conflict.code == "duck-shape"


def test_a_real_tower_has_all_roles() -> None:
    """Qwen2.5-VL with precomputed metadata: pixels, window index, two kinds of boundaries, positions."""
    pytest.importorskip("transformers")
    from vit_compile.models.hf_attention import use_attention
    from vit_compile.models.vision_metadata import vision_metadata

    tower = towers.tiny_qwen2_5_vl("sdpa", depth=2)
    use_attention(tower)
    grids = [(1, 8, 12), (1, 4, 6), (1, 10, 2)]
    metadata = vision_metadata(tower, grids)
    (pixels,) = dynamic([towers.pixels(140)])
    marked = {k: dynamic([v])[0] for k, v in metadata.items()}
    found = traced(tower, pixels, **marked)
    assert found.roles.conflict is None
    roles = {role.name.lower(): role.role for role in found.roles.inputs}
    named = {key: [role for name, role in roles.items() if name.rstrip("_").endswith(key)] for key in metadata}
    assert named["cu_seqlens"] == [Role.BOUNDARIES]
    assert named["cu_window_seqlens"] == [Role.BOUNDARIES]
    assert named["window_index"] == [Role.INDEX]
    assert named["position_ids"] == [Role.ROWS]
    assert found.roles.rows(found.env) == 140


def test_norm_view_tower_has_no_conflict() -> None:
    """A tower with `view(q.shape)` keeps its rows one symbol."""
    found = traced(norm_view_tower(2), *dynamic(packed([5, 3, 3], make=wide_rows, bound=BOUND)))
    assert found.roles.conflict is None
    assert found.role("x") is Role.ROWS
