"""Example values after a rewrite: a new node may have other strides than the one it replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat


def refresh_downstream(graph: fx.Graph, start: fx.Node, mode: compat.FakeTensorMode) -> None:
    """Compute anew the example values behind `start`, as far as shapes or strides change.

    Pieces are compiled for the strides of their example inputs, so stale ones would fail far from here.
    """
    changed = {start}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or changed.isdisjoint(node.all_input_nodes):
            continue
        if isinstance(node.target, compat.HigherOrderOperator):
            continue
        before, after = node.meta.get("example_value"), _run(node, mode)
        if layout(before) != layout(after):
            changed.add(node)
        node.meta["example_value"] = after


def _run(node: fx.Node, mode: compat.FakeTensorMode) -> Any:
    args = fx.map_arg(node.args, lambda n: n.meta["example_value"])
    kwargs = fx.map_arg(node.kwargs, lambda n: n.meta["example_value"])
    with compat.running_fake(mode):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target), "a call_function node has a function"
        return node.target(*args, **kwargs)


def layout(value: Any) -> Any:
    """Shapes, strides and dtypes of a value, for comparison."""
    if isinstance(value, torch.Tensor):
        return (str(tuple(value.shape)), str(value.stride()), value.dtype)
    return [layout(item) for item in value] if isinstance(value, tuple | list) else str(value)
