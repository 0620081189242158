"""Attention's q and k with the further columns that cuDNN's dense attention needs for a padded segment (`one_segment`).

Without this pass a kernel of its own makes them, for each layer of a graph with room for one segment: it reads q and k, and
writes them again. Where q and k come out of elementwise work (rotary positions), the compiler can write the columns at once.
Where they are views of a matrix product there is nothing to join, and the call is left alone.

For graphs of the encoder manager, whose padding is finite; half precision on a GPU from compute capability 9.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.attention import one_segment, varlen, wide

_VIEWS = {"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "select"}
_COMPUTED_METHODS = {"to", "type_as", "float", "half", "bfloat16", "add", "mul", "sub"}
_COMPUTED = {operator.add, operator.mul, operator.sub, torch.add, torch.mul, torch.sub, torch.cat, torch.where}


class PaddingColumns:
    """Rewrites every such call of a graph."""

    name = "padding_columns"

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite `gm` in place; the number of rewritten calls."""
        rows: dict[fx.Node, fx.Node] = {}
        return sum(_rewrite(gm.graph, node, rows) for node in list(gm.graph.nodes) if _applies(node))


def _applies(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.name != varlen.NAME or node.kwargs:
        return False
    given: tuple[Any, ...] = node.args
    q, k, v, cu_seqlens, _, scale = given
    if (
        not all(isinstance(x, fx.Node) for x in (q, k, v, cu_seqlens))
        or not isinstance(scale, float)
        or scale <= one_segment.LEAST_SCALE
    ):
        return False
    values = [x.meta.get("example_value") for x in (q, k, v)]
    alike = all(isinstance(value, compat.FakeTensor) for value in values)
    return alike and supports(values[0]) and _is_computed(q) and _is_computed(k)


def supports(q: torch.Tensor) -> bool:
    """Can the columns be of use for such q [T,H,D]?"""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) >= one_segment.CAPABILITY and fits(q)


def fits(q: torch.Tensor) -> bool:
    """The same, but for the device."""
    return q.dim() == 3 and isinstance(q.shape[-1], int) and one_segment.takes(q.dtype, q.shape[-1])


def _is_computed(found: Any) -> bool:
    """Does it come out of elementwise work, views apart?"""
    while isinstance(found, fx.Node) and _is_view(found):
        found = found.args[0]
    if not isinstance(found, fx.Node):
        return False
    return found.target in (_COMPUTED_METHODS if found.op == "call_method" else _COMPUTED)


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWS
    # Of a tensor, not of a tuple of results.
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), torch.Tensor)


def _rewrite(graph: fx.Graph, node: fx.Node, rows: dict[fx.Node, fx.Node]) -> int:
    given: tuple[Any, ...] = node.args
    q, k, v, cu_seqlens, max_seqlen, scale = given
    mode = node.meta["example_value"].fake_mode
    with graph.inserting_before(node):
        if cu_seqlens not in rows:
            rows[cu_seqlens] = _call(graph, mode, torch.ops.vit_compile.real_rows.default, q, cu_seqlens)
        real = rows[cu_seqlens]
        extra = (0, one_segment.EXTRA_COLUMNS)
        in_q, in_k = one_segment.in_columns(q.meta["example_value"].dtype)
        real_q = _call(graph, mode, torch.where, real, q, 0.0)
        wide_q = _call(graph, mode, F.pad, real_q, extra, "constant", in_q)
        real_k = _call(graph, mode, torch.where, real, k, 0.0)
        wide_k = _call(graph, mode, F.pad, real_k, extra, "constant", in_k)
        # Zero in the further columns of real rows: there the padding of k with zeros is taken.
        zero_k = _call(graph, mode, F.pad, real_k, extra, "constant", 0.0)
        wide_k = _call(graph, mode, torch.where, real, zero_k, wide_k)
        fused = _call(
            graph,
            mode,
            torch.ops.vit_compile.varlen_attention_wide.default,
            wide_q,
            wide_k,
            v,
            cu_seqlens,
            max_seqlen,
            scale,
        )
    fused.meta["stack_trace"] = node.meta.get("stack_trace")
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    return 1


def _call(graph: fx.Graph, mode: compat.FakeTensorMode, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    values: Any = fx.map_arg(args, lambda n: n.meta["example_value"])
    with compat.running_fake(mode):
        made.meta["example_value"] = target(*values)
    return made


assert wide.NAME == "vit_compile::varlen_attention_wide", "importing it registers the operation"
