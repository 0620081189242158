"""New nodes of a rewrite, with their example values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx


class Builder:
    """Inserts calls in front of a node, with their example values. To be used under the graph's fake mode (`running_fake`)."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self.graph, self.before = graph, before

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function."""
        return self._insert(self.graph.call_function(target, args, kwargs), target)

    def method(self, name: str, *args: Any) -> fx.Node:
        """A call of a tensor's method."""
        return self._insert(self.graph.call_method(name, args), lambda x, *rest: getattr(x, name)(*rest))

    def _insert(self, node: fx.Node, function: Callable[..., Any]) -> fx.Node:
        value: Callable[[fx.Node], Any] = lambda n: n.meta["example_value"]  # noqa: E731
        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        node.meta["example_value"] = function(*args, **kwargs)
        node.meta["stack_trace"] = self.before.meta.get("stack_trace")
        return node

    def side(self, tensor: fx.Node, dim: int) -> Any:
        """A side of a tensor: an int where it is static, else a node."""
        size = tensor.meta["example_value"].shape[dim]
        return size if isinstance(size, int) else self.method("size", tensor, dim)

    def floordiv(self, value: Any, divisor: int) -> Any:
        """An int where the value is one, else a node."""
        return value // divisor if isinstance(value, int) else self.call(operator.floordiv, value, divisor)

    def mul(self, value: Any, factor: int) -> Any:
        """An int where the value is one, else a node."""
        return value * factor if isinstance(value, int) else self.call(operator.mul, value, factor)
