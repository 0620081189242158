"""The table of attention operations: names and argument names are facts about other packages, so they are checked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen

import vit_compile.attention.varlen  # noqa: F401 - registers the operation
from vit_compile.attention.signatures import DEFAULT_SPLITTING_OPS, AttentionOp, describe, from_schema


@pytest.mark.parametrize("name", [name for name in DEFAULT_SPLITTING_OPS if "::" in name])
def test_arguments_exist(name: str) -> None:
    """Every boundary and bound named in the table is an argument of the operation, where it is installed."""
    namespace, operation = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), operation, None)
    if packet is None:
        pytest.skip(f"{name} is not part of this installation")
    arguments = {argument.name for argument in packet.default._schema.arguments}
    assert {*DEFAULT_SPLITTING_OPS[name].boundaries, *DEFAULT_SPLITTING_OPS[name].bounds} <= arguments


def test_own_op_is_described() -> None:
    """Our operation may be captured whole and isolates NaN."""
    assert describe("vit_compile::varlen_attention") == AttentionOp(
        "vit_compile::varlen_attention", ("cu_seqlens",), ("max_seqlen",), full_capture=True, clears_tail=True, isolates_nan=True
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vit_compile::varlen_attention.default", "vit_compile::varlen_attention"),
        ("higher_order::flex_attention", "flex_attention"),
        ("scaled_dot_product_attention", "scaled_dot_product_attention"),
        ("aten::mm", None),
    ],
)
def test_names_as_graphs_spell_them(name: str, found: str | None) -> None:
    """An overload or the higher-order prefix makes no difference; an unknown name gives None."""
    op = describe(name)
    assert (op and op.name) == found


def test_names_of_functions_in_a_traced_graph() -> None:
    """Dense attention appears in a Dynamo graph under the bare name that the table holds."""
    seen = []

    def record(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.extend(node.target.__name__ for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch._dynamo.reset()
    x = torch.randn(1, 2, 4, 8)
    torch.compile(torch.nn.functional.scaled_dot_product_attention, backend=record)(x, x, x)
    assert "scaled_dot_product_attention" in seen
    assert describe("scaled_dot_product_attention") is not None


def test_host_bounds_forbid_full_capture() -> None:
    """Operations whose bound is read on the host may not be captured."""
    forbidden = {name for name, op in DEFAULT_SPLITTING_OPS.items() if not op.full_capture}
    assert forbidden == {
        "vllm::flash_attn_maxseqlen_wrapper",
        "vllm::fa4_flash_attn_maxseqlen_wrapper",
        "vllm::flashinfer_wrapper",
    }


@pytest.mark.parametrize(
    ("arguments", "roles", "limits"),
    [
        (["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "scale"], 2, 2),
        (["query", "cu_seq_q", "cu_seq_k", "max_q", "max_k"], 2, 2),
        (["x", "cu_window_seqlens", "max_window_seqlen"], 1, 1),
        (["x", "cu_seqlens", "max_length_q"], 1, 1),
        (["q", "k", "v", "max_value", "custom", "maximum"], 0, 0),
    ],
)
def test_inference_from_argument_names(arguments: list[str], roles: int, limits: int) -> None:
    """An unknown operation's boundaries and bounds are found by name, and nothing is promised for it."""
    op = from_schema("mine::attention", arguments)
    assert (op.name, len(op.boundaries), len(op.bounds)) == ("mine::attention", roles, limits)
    assert not op.full_capture
    assert not op.isolates_nan


def test_known_names_win() -> None:
    """A name of the table keeps its entry, whatever arguments are given."""
    assert from_schema("vit_compile::varlen_attention", []) is DEFAULT_SPLITTING_OPS["vit_compile::varlen_attention"]
