"""Cutting a graph at its attention ops: which names match, what the parts are, and that nothing is swallowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.backend.common import BOUND, BUDGETS, call, compiled, dynamic, packed, traced, wide_rows
from tests.towers import COUNTING_CALLS, COUNTING_NAME, counting_attention, norm_view_tower, toy_tower
from vit_compile import counters
from vit_compile.backend import split as split_module
from vit_compile.backend.split import Split, attention_nodes, op_names, split
from vit_compile.errors import SplitError


def attention_calls(cut: Split) -> dict[str, int]:
    """Attention ops in each child of a cut graph."""
    found = {}
    for node in cut.module.graph.nodes:
        if node.op == "call_module":
            child: Any = cut.module.get_submodule(node.target)
            found[node.target] = len(attention_nodes(child.graph, (COUNTING_NAME,))[0])
    return found


@pytest.mark.parametrize("depth", [1, 3])
def test_pieces_and_attention_alternate(depth: int) -> None:
    """`depth` attention calls, each alone in its part, between `depth + 1` pieces without any."""
    found = traced(toy_tower(depth), *dynamic(packed([5, 3], bound=BOUND)))
    counts = list(attention_calls(found.cut).values())
    assert counts == [0, *[1, 0] * depth]
    assert len(found.cut.attention) == len(found.program.attention_steps) == depth
    assert [step.piece is None for step in found.program.steps] == [bool(count) for count in counts]


def test_attention_first_and_last() -> None:
    """An attention call at the start or the end of the graph leaves no empty piece behind."""

    def bare(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return counting_attention(x, cu_seqlens, max_seqlen)

    found = traced(bare, *dynamic(packed([5, 3], bound=BOUND)))
    assert list(attention_calls(found.cut).values()) == [1]
    args = packed([4, 4])
    assert torch.equal(call(compiled(bare, splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS), *args), bare(*args))


def test_two_attention_calls_in_a_row() -> None:
    """Two calls without anything between them are two parts."""

    def twice(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return counting_attention(counting_attention(x, cu_seqlens, max_seqlen), cu_seqlens, max_seqlen)

    found = traced(twice, *dynamic(packed([5, 3], bound=BOUND)))
    assert list(attention_calls(found.cut).values()) == [1, 1]


def test_a_graph_without_attention_is_one_part() -> None:
    """Nothing to cut: one piece, no attention, no skip."""
    found = traced(lambda x: x * 2 + 1, *dynamic([torch.randn(8, 4)]), extra=())
    assert len(found.program.steps) == 1
    assert found.cut.attention == {}
    assert found.cut.skips == ()


@pytest.mark.parametrize("name", [COUNTING_NAME, f"{COUNTING_NAME}.default"])
def test_a_custom_op_matches_by_either_of_its_names(name: str) -> None:
    """An overload that is called by its full name is found by it, and by the op's name alone."""

    def tower(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> Any:
        return torch.ops.vit_compile_test.counting_attention.default(x * 2, cu_seqlens, max_seqlen) + 1

    found = traced(tower, *dynamic(packed([5, 3], bound=BOUND)), extra=(name,))
    assert len(found.cut.attention) == 1
    assert found.cut.skips == ()
    args = packed([3, 3])
    ours = compiled(tower, mode="piecewise", splitting_ops=[name], token_budgets=BUDGETS)
    assert torch.equal(call(ours, *args), tower(*args))


@pytest.mark.parametrize("name", ["softmax", "torch.nn.functional.softmax"])
def test_a_python_function_matches_by_either_of_its_names(name: str) -> None:
    """A function can be a splitting op, by its bare name and by its full one; the numbers stay right."""

    def attends(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 2, dim=-1) + 1

    x = torch.randn(8, 4)
    ours = compiled(attends, mode="piecewise", splitting_ops=[name], token_budgets=BUDGETS)
    with counters.expect(attention_calls_outside_graphs=1, pieces=2, skips={}):
        assert torch.equal(call(ours, x), attends(x))


def test_a_method_matches_by_its_name() -> None:
    """A tensor method can be a splitting op."""

    def attends(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(-1) + 1

    x = torch.randn(8, 4)
    ours = compiled(attends, mode="piecewise", splitting_ops=["cumsum"], token_budgets=BUDGETS)
    with counters.expect(attention_calls_outside_graphs=1, pieces=2, skips={}):
        assert torch.equal(call(ours, x), attends(x))


def test_unmatched_names_are_reported_with_what_is_there() -> None:
    """Each name that matches nothing gives one skip; the detail lists the graph's custom operations."""
    found = traced(toy_tower(1), *dynamic(packed([5, 3], bound=BOUND)), extra=(COUNTING_NAME, "a::b", "c"))
    assert [skip.code for skip in found.cut.skips] == ["splitting-op-unmatched"] * 2
    assert "'a::b'" in found.cut.skips[0].detail
    assert COUNTING_NAME in found.cut.skips[0].detail


def test_a_default_name_given_again_is_not_unmatched() -> None:
    """Listing an op of the default set changes nothing."""
    found = traced(
        norm_view_tower(1), *dynamic(packed([5, 3], make=wide_rows, bound=BOUND)), extra=("vit_compile::varlen_attention",)
    )
    assert found.cut.skips == ()
    assert len(found.cut.attention) == 1


def test_attention_is_not_swallowed() -> None:
    """Without its name an op stays inside a piece; with it, it runs outside, once per layer and call (counted)."""
    depth = 3
    inside = traced(toy_tower(depth), *dynamic(packed([5, 3], bound=BOUND)), extra=())
    assert list(attention_calls(inside.cut).values()) == [depth]
    ours = compiled(toy_tower(depth), mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    call(ours, *dynamic(packed([5, 3], bound=BOUND)))
    COUNTING_CALLS.reset()
    with counters.expect(attention_calls_outside_graphs=2 * depth):
        call(ours, *packed([4, 4], bound=BOUND))
        call(ours, *packed([3, 2], bound=BOUND))
    # The first of the two replays what is captured; both run attention once per layer.
    assert COUNTING_CALLS.calls == 2 * depth


def test_splitting_leaves_the_graphs_meaning() -> None:
    """The cut module computes what the uncut one does, bit for bit."""
    found = traced(toy_tower(2), *dynamic(packed([5, 3], bound=BOUND)))
    args = found.args(*packed([3, 4, 4], bound=BOUND))
    want = found.gm.forward(*args)
    got = split(found.gm, (COUNTING_NAME,)).module(*args)
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("lone", [True, False])
def test_attention_left_inside_a_piece_is_an_error(lone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that leaves attention in a piece, or two calls in one part, is never used (hazard 11)."""

    def twice(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        y = counting_attention(x, cu_seqlens, max_seqlen)
        return counting_attention(y if lone else y + 1, cu_seqlens, max_seqlen)

    found = traced(twice, *dynamic(packed([5, 3], bound=BOUND)))
    calls = [node for node in found.gm.graph.nodes if node.op not in ("placeholder", "output")]
    monkeypatch.setattr(split_module, "_partition", lambda graph, attention: dict.fromkeys(calls, 0))
    with pytest.raises(SplitError, match="attention op"):
        split(found.gm, (COUNTING_NAME,))


def qkv(rows: int = 8, heads: int = 2, dim: int = 8) -> list[torch.Tensor]:
    """Seeded q, k and v [N,H,L,D]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, heads, 5, dim, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_scaled_dot_product_attention_splits(mode: str) -> None:
    """Torch's dense attention is a splitting op by default."""

    def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, scale=0.3) + 1

    ours = compiled(attends, mode=mode, token_budgets=BUDGETS)
    for rows in (8, 5, 16, 3):
        args = qkv(rows)
        torch.testing.assert_close(call(ours, *args), attends(*args), atol=1e-6, rtol=0)
    assert counters.pieces >= 2
    assert counters.padded_replays > 0


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_flex_attention_splits(compiler: str) -> None:
    """A higher-order attention op is cut out together with its score function, and runs right."""
    from torch.nn.attention.flex_attention import flex_attention

    def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flex_attention(q * 2, k, v, score_mod=lambda score, b, h, i, j: score + (i - j))
        assert isinstance(out, torch.Tensor)
        return out + 1

    ours = compiled(attends, mode="piecewise", compiler=compiler, token_budgets=BUDGETS)
    for rows in (8, 5, 16):
        args = qkv(rows)
        torch.testing.assert_close(call(ours, *args), attends(*args), atol=1e-5, rtol=1e-5)
    assert counters.attention_calls_outside_graphs >= 3
    assert counters.plain_calls == 0


def test_torchs_varlen_attention_splits() -> None:
    """`torch.nn.attention.varlen` is found with its boundaries and bounds (its kernels need a GPU: only the cut is tested)."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def attends(x: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        q = x.view(-1, 2, 8) * 2
        return varlen.varlen_attn(q, q, q, cu_seqlens, cu_seqlens, 16, 16) + 1

    graphs: list[Any] = []

    def grab(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append((gm, split(gm)))
        return lambda *args: [torch.zeros(args[1].shape[0] if args[1].dim() == 2 else 8, 2, 8)]

    x, cu_seqlens = torch.zeros(9, 16, dtype=torch.bfloat16), torch.tensor([0, 5, 9], dtype=torch.int32)
    torch._dynamo.mark_dynamic(x, 0)
    try:
        with torch.no_grad():
            torch.compile(attends, backend=grab)(x, cu_seqlens)
    except IndexError:
        pass  # what the stand-in returns is not looked at
    ((gm, cut),) = graphs
    (child,) = cut.attention.values()
    op = child.op
    assert op.name == "torch_attn::_varlen_attn"
    assert op.boundaries == ("cu_seq_q", "cu_seq_k")
    assert any("_varlen_attn" in name for node in gm.graph.nodes for name in op_names(node))


def test_an_op_with_several_results_is_cut_whole() -> None:
    """Tuple accesses stay with the call, so that no tuple crosses into a piece."""

    def attends(x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.max(x * 2, -1, keepdim=True)
        return values + indices

    x = torch.randn(8, 4)
    ours = compiled(attends, mode="piecewise", splitting_ops=["max"], token_budgets=BUDGETS)
    with counters.expect(attention_calls_outside_graphs=1, pieces=2):
        assert torch.equal(call(ours, x), attends(x))
