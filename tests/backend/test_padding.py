"""Static inputs: what lies in the padding, by role, and that only the dirty tail is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.common import BOUND, Traced, dynamic, packed, traced
from tests.towers import boundaries, counting_attention
from vit_compile.backend.padding import (
    MIN_SEGMENTS,
    StaticInputs,
    cut,
    generator_on,
    neutral,
    overlaps,
    padded_env,
    segment_capacity,
)
from vit_compile.backend.roles import Role
from vit_compile.backend.sizes import Env
from vit_compile.stats import Skip


def tower(
    x: torch.Tensor,
    index: torch.Tensor,
    keep: torch.Tensor,
    merged: torch.Tensor,
    grid: torch.Tensor,
    lengths: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Every role in one graph: rows, an index, a mask of rows, merged rows, per-segment rows and lengths, boundaries."""
    y = counting_attention(x[index].masked_fill(keep[:, None], 0), cu_seqlens, BOUND)
    return y[torch.argsort(index)], merged + 1, grid + 1, lengths + 1


def inputs(segments: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Arguments of `tower` for segments whose lengths are multiples of 4."""
    rows = sum(segments)
    generator = torch.Generator().manual_seed(seed)
    x, cu_seqlens, _ = packed(segments, seed=seed)
    return [
        x,
        torch.randperm(rows, generator=generator),
        torch.rand(rows, generator=generator) > 0.5,
        torch.randn(rows // 4, 4, generator=generator),
        torch.randint(1, 9, (len(segments), 3), generator=generator),
        torch.tensor(segments),
        cu_seqlens,
    ]


@pytest.fixture
def found() -> Traced:
    """`tower`, traced with dynamic sizes that are all different."""
    traced_tower = traced(tower, *dynamic(inputs([8, 12, 4, 4, 16, 4, 4, 4])))
    assert traced_tower.roles.conflict is None
    return traced_tower


def named(found: Traced, statics: StaticInputs) -> dict[str, Any]:
    """Buffers by the name of the argument."""
    return {buffer.name.lower().removeprefix("l_").rstrip("_"): buffer.tensor for buffer in statics.buffers}


def statics_for(found: Traced, segments: list[int], rows: int) -> tuple[StaticInputs, list[Any], Env]:
    """Static inputs for `rows` rows, filled with a call of these segments; and the call."""
    args = found.args(*inputs(segments))
    env = found.table.read(args)
    target = padded_env(found.program, found.roles, env, rows, pad_segments=True)
    assert not isinstance(target, Skip), str(target)
    statics = StaticInputs(found.program, found.roles, target)
    statics.fill(args)
    return statics, args, env


def check_content(found: Traced, statics: StaticInputs, segments: list[int]) -> None:
    """Real entries in front, documented padding behind, in every buffer."""
    want = dict(zip(("x", "index", "keep", "merged", "grid", "lengths", "cu_seqlens"), inputs(segments), strict=True))
    for name, buffer in named(found, statics).items():
        real = want[name]
        assert torch.equal(buffer[: real.shape[0]], real), name
        tail = buffer[real.shape[0] :]
        if name == "index":
            assert torch.equal(tail, torch.arange(real.shape[0], buffer.shape[0])), "an index goes on as identity"
        elif name == "cu_seqlens":
            assert tail.tolist() == [int(real[-1])] * tail.numel(), "boundaries repeat the last offset"
        elif name == "grid":
            assert bool((tail == 1).all()), "per-segment rows are one"
        else:
            assert not bool(tail.any()), f"{name} is padded with zeros"


def test_roles_of_the_tower(found: Traced) -> None:
    """The tower has what the tests below are about."""
    roles = {name: found.role(name) for name in ("x", "index", "keep", "merged", "grid", "lengths", "cu_seqlens")}
    assert roles == {
        "x": Role.ROWS,
        "index": Role.INDEX,
        "keep": Role.ROWS,
        "merged": Role.ROWS,
        "grid": Role.PER_SEGMENT,
        "lengths": Role.PER_SEGMENT,
        "cu_seqlens": Role.BOUNDARIES,
    }


def test_content_after_a_fill(found: Traced) -> None:
    """Buffers hold the call in front and the documented padding behind."""
    statics, _, _ = statics_for(found, [8, 4, 4], 32)
    check_content(found, statics, [8, 4, 4])


def test_shapes_follow_the_rows_and_the_capacity(found: Traced) -> None:
    """Row buffers have the capture's rows, merged ones a quarter; segments their own capacity, whatever the rows (hazard 16)."""
    for rows in (32, 64):
        statics, _, _ = statics_for(found, [8, 4, 4, 4, 4], rows)
        shapes = {name: buffer.shape[0] for name, buffer in named(found, statics).items()}
        capacity = segment_capacity(5)
        assert shapes == {
            "x": rows,
            "index": rows,
            "keep": rows,
            "merged": rows // 4,
            "grid": capacity + 1,  # one neutral row for "the segment after the last"
            "lengths": capacity + 1,
            "cu_seqlens": capacity + 1,
        }


@pytest.mark.parametrize(
    "calls",
    [
        [[4, 4], [8, 12, 4], [4, 8]],
        [[8, 12, 4], [4, 4], [8, 8]],
        [[4, 4], [4, 4, 4, 4], [8, 4]],
        [[8, 8], [8, 8]],
        [[8, 16], [12, 8, 4]],
    ],
)
def test_content_after_several_fills(found: Traced, calls: list[list[int]]) -> None:
    """Whatever came before, the padding is as documented after each fill."""
    statics, _, _ = statics_for(found, [4, 4, 4, 4], 32)
    for segments in calls:
        statics.fill(found.args(*inputs(segments)))
        check_content(found, statics, segments)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=4).filter(lambda parts: sum(parts) <= 8), min_size=1, max_size=5)
)
def test_content_after_any_fills(calls: list[list[int]]) -> None:
    """The same for any sequence of calls."""
    found = _shared()
    statics, _, _ = statics_for(found, [4, 4, 4, 4], 32)
    for parts in calls:
        segments = [4 * part for part in parts]
        statics.fill(found.args(*inputs(segments)))
        check_content(found, statics, segments)


_cache: list[Traced] = []


def _shared() -> Traced:
    """One trace for all examples of a property test."""
    if not _cache:
        _cache.append(traced(tower, *dynamic(inputs([8, 12, 4, 4, 16, 4, 4, 4]))))
    return _cache[0]


def test_only_the_dirty_tail_is_reset(found: Traced) -> None:
    """Entries that no call has dirtied are not written again: a sentinel there survives, one in the dirty tail does not."""
    statics, _, _ = statics_for(found, [8, 8], 32)
    buffers = named(found, statics)
    buffers["x"][30], buffers["x"][12] = 7.0, 7.0
    buffers["index"][30] = 5
    statics.fill(found.args(*inputs([4, 4])))
    assert bool((buffers["x"][30] == 7).all()), "rows 16.. were clean already"
    assert not bool(buffers["x"][8:16].any()), "rows 8..15 were dirty"
    assert int(buffers["index"][30]) == 5
    assert torch.equal(buffers["index"][8:16], torch.arange(8, 16))


def test_buffers_stay_where_they_are(found: Traced) -> None:
    """A captured graph reads fixed addresses: no fill, poison or clean reallocates (hazard 6)."""
    statics, _, _ = statics_for(found, [8, 8], 32)
    before = {name: buffer.data_ptr() for name, buffer in named(found, statics).items()}
    for segments in ([4, 4], [8, 12, 4]):
        statics.fill(found.args(*inputs(segments)))
        statics.poison("large", torch.Generator().manual_seed(0))
        statics.clean()
    assert {name: buffer.data_ptr() for name, buffer in named(found, statics).items()} == before


def test_buffers_belong_to_normal_mode(found: Traced) -> None:
    """Buffers made under inference_mode are normal tensors, so that any mode may write them (hazard 22)."""
    args = found.args(*inputs([8, 8]))
    env = found.table.read(args)
    target = padded_env(found.program, found.roles, env, 32, pad_segments=True)
    assert not isinstance(target, Skip)
    with torch.inference_mode():
        statics = StaticInputs(found.program, found.roles, target)
        assert not any(buffer.tensor.is_inference() for buffer in statics.buffers)
        statics.fill(args)
    statics.fill(args)
    check_content(found, statics, [8, 8])


@pytest.mark.parametrize("kind", ["small", "large", "nan"])
def test_poison_touches_only_padding_rows(found: Traced, kind: str) -> None:
    """Garbage goes behind the real rows; boundaries, indices and per-segment rows keep their meaning; clean undoes it."""
    statics, _, _ = statics_for(found, [8, 4, 4], 32)
    statics.poison(kind, torch.Generator().manual_seed(0))
    want = dict(zip(("x", "index", "keep", "merged", "grid", "lengths", "cu_seqlens"), inputs([8, 4, 4]), strict=True))
    buffers = named(found, statics)
    for name, real in want.items():
        assert torch.equal(buffers[name][: real.shape[0]], real), name
    assert torch.equal(buffers["index"][16:], torch.arange(16, 32))
    assert bool((buffers["grid"][3:] == 1).all())
    assert buffers["cu_seqlens"][4:].tolist() == [16] * (buffers["cu_seqlens"].numel() - 4)
    for name in ("x", "merged"):
        tail = buffers[name][want[name].shape[0] :]
        if kind == "nan":
            assert bool(tail.isnan().all())
        else:
            assert bool(tail.isfinite().all())
            assert float(tail.abs().max()) > (1e3 if kind == "large" else 0)
    statics.clean()
    check_content(found, statics, [8, 4, 4])


def test_integer_rows_are_poisoned_with_legal_values() -> None:
    """Integers that look up a table get values that occur among the real ones."""
    table = torch.randn(6, 8)

    def lookup(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + table[ids]

    found = traced(lookup, *dynamic([torch.randn(9, 8), torch.arange(9) % 6]))
    args = found.args(torch.randn(5, 8), torch.tensor([3, 4, 3, 5, 4]))
    env = found.table.read(args)
    target = padded_env(found.program, found.roles, env, 16, pad_segments=True)
    assert not isinstance(target, Skip)
    statics = StaticInputs(found.program, found.roles, target)
    statics.fill(args)
    statics.poison("large", torch.Generator().manual_seed(0))
    (ids,) = [buffer.tensor for buffer in statics.buffers if buffer.tensor.dtype == torch.int64]
    assert set(ids[5:].tolist()) <= {3, 4, 5}
    assert len(set(ids[5:].tolist())) > 1
    statics.clean()
    assert ids[5:].tolist() == [0] * 11


def test_values_are_made_where_they_go() -> None:
    """Elsewhere a generator seeds one there, each time another, and the same ones in the same order for the same seed."""
    here, elsewhere = torch.Generator().manual_seed(3), torch.device("cpu", 0)  # which is not "cpu"
    assert generator_on(torch.device("cpu"), here) is here
    seeds = [[generator_on(elsewhere, g).initial_seed() for _ in range(3)] for g in (here, torch.Generator().manual_seed(3))]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_padding_values_by_role(found: Traced) -> None:
    """The neutral value: one for integer per-segment rows of several columns, zero for everything else."""
    values = {role.name.lower().removeprefix("l_").rstrip("_"): neutral(role) for role in found.roles.inputs}
    assert values == {"x": 0, "index": 0, "keep": 0, "merged": 0, "grid": 1, "lengths": 0, "cu_seqlens": 0}


@pytest.mark.parametrize(("segments", "capacity"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (1000, 1024)])
def test_segment_capacity(segments: int, capacity: int) -> None:
    """The next power of two, at least MIN_SEGMENTS."""
    assert MIN_SEGMENTS == 4
    assert segment_capacity(segments) == capacity


def test_padded_env(found: Traced) -> None:
    """Rows go to the target, scaled symbols with them, segments to their capacity."""
    args = found.args(*inputs([8, 4, 4]))
    env = found.table.read(args)
    target = padded_env(found.program, found.roles, env, 32, pad_segments=True)
    assert not isinstance(target, Skip)
    assert found.roles.rows(target) == 32
    for symbol, (numerator, denominator) in found.roles.scaled.items():
        assert target[symbol] == 32 * numerator // denominator
    for symbol in found.roles.segment_symbols:
        assert target[symbol] == segment_capacity(3) + 1
    alone = padded_env(found.program, found.roles, env, 32, pad_segments=False)
    assert not isinstance(alone, Skip)
    assert all(alone[symbol] == env[symbol] for symbol in found.roles.segment_symbols)


def test_padded_env_refuses_what_does_not_divide(found: Traced) -> None:
    """A capture size that is no whole number of merged rows is a skip."""
    args = found.args(*inputs([8, 4, 4]))
    refused = padded_env(found.program, found.roles, found.table.read(args), 30, pad_segments=True)
    assert isinstance(refused, Skip)
    assert refused.code == "guard-forbids-size"


def test_padded_env_refuses_another_ratio(found: Traced) -> None:
    """Inputs that no longer keep the traced ratio cannot share a padded size."""
    call = inputs([8, 4, 4])
    call[3] = torch.randn(8, 4)
    refused = padded_env(found.program, found.roles, found.table.read(found.args(*call)), 32, pad_segments=True)
    assert isinstance(refused, Skip)
    assert refused.code == "row-scale-changed"


def test_cut_makes_a_smaller_call(found: Traced) -> None:
    """The first rows of a call: boundaries clipped, the index identity, everything else in front; the call is untouched."""
    args = found.args(*inputs([8, 4, 4]))
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    made = cut(args, found.program, found.roles, found.table.read(args), 12)
    assert not isinstance(made, Skip)
    smaller, env = made
    assert found.roles.rows(env) == 12
    named_args = {
        name.lower().removeprefix("l_").rstrip("_"): value
        for name, value in zip(found.program.arg_names, smaller, strict=True)
        if isinstance(value, torch.Tensor)
    }
    assert torch.equal(named_args["x"], before[found.program.arg_names.index("L_x_")][:12])
    assert torch.equal(named_args["index"], torch.arange(12))
    assert named_args["merged"].shape[0] == 3
    assert named_args["cu_seqlens"].tolist() == [0, 8, 12, 12]
    assert named_args["grid"].shape[0] == 3
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))


def test_overlapping_inputs_are_found() -> None:
    """An expanded tensor has no buffer that could stand in for it; a broadcast of size one has."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(1, 6).expand(8, 6)
    found = traced(function, x)
    role = overlaps(found.program, found.roles, found.env)
    assert role is not None
    found = traced(function, torch.randn(8, 6))
    assert overlaps(found.program, found.roles, found.env) is None


def test_nbytes_counts_every_buffer(found: Traced) -> None:
    """Reported bytes are the sum over buffers, the identity of an index included."""
    statics, _, _ = statics_for(found, [8, 4, 4], 32)
    buffers = named(found, statics)
    want = sum(b.numel() * b.element_size() for b in buffers.values()) + buffers["index"].nbytes
    assert statics.nbytes == want


def test_rows_behind_a_leading_one_are_padded_there() -> None:
    """[1, T, C] grows in dimension 1; the tail behind a shorter call is zero."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(1, 11, 4)
    torch._dynamo.mark_dynamic(x, 1)
    found = traced(function, x)
    target = padded_env(found.program, found.roles, found.env, 16, pad_segments=True)
    assert not isinstance(target, Skip)
    statics = StaticInputs(found.program, found.roles, target)
    for rows in (11, 5):
        statics.fill(found.args(torch.ones(1, rows, 4)))
        (buffer,) = statics.buffers
        assert buffer.tensor.shape == (1, 16, 4)
        assert float(buffer.tensor.sum()) == rows * 4


def test_strides_are_kept() -> None:
    """A buffer has the traced strides, scaled to its own size."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(4, 9).t()
    torch._dynamo.mark_dynamic(x, 0)
    found = traced(function, x)
    target = padded_env(found.program, found.roles, found.env, 16, pad_segments=True)
    assert not isinstance(target, Skip)
    (buffer,) = StaticInputs(found.program, found.roles, target).buffers
    assert buffer.tensor.shape == (16, 4)
    assert buffer.tensor.stride() == (1, 16)


def test_boundaries_helper_matches() -> None:
    """The tests' own boundaries are what the documentation says: cumulative, int32, repeated at the end."""
    assert boundaries([3, 0, 2], 5).tolist() == [0, 3, 3, 5, 5, 5]
