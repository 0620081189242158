"""Cutting the traced graph at its attention ops, with `torch.fx`'s `split_module`.

Result: a module whose children alternate between pieces (no attention inside) and attention calls (exactly one op).
An attention op left inside a piece is an error, never ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx
from torch.fx.passes.split_module import split_module

from vit_compile import _torch_compat as compat
from vit_compile.attention import signatures
from vit_compile.attention.signatures import AttentionOp
from vit_compile.errors import SplitError
from vit_compile.stats import Skip


@dataclass(frozen=True, slots=True)
class AttentionChild:
    """A child that is one attention call: the op, and the name of its node."""

    op: AttentionOp
    node: str


@dataclass(frozen=True, slots=True)
class Split:
    """The cut graph. `attention` maps the name of a child to the call that it is."""

    module: fx.GraphModule
    attention: dict[str, AttentionChild]
    calls: frozenset[fx.Node]
    """The attention calls in the uncut graph."""
    skips: tuple[Skip, ...]


def op_names(node: fx.Node) -> tuple[str, ...]:
    """The names under which a call can be listed in `splitting_ops`, most specific first."""
    target = node.target
    if node.op == "call_method":
        return (str(target),)
    if node.op != "call_function":
        return ()
    if isinstance(target, compat.OpOverload):
        name = target._schema.name
        return (f"{name}.{target._schema.overload_name or 'default'}", name)
    if isinstance(target, compat.OpOverloadPacket):
        return (target._qualified_op_name,)
    if isinstance(target, compat.HigherOrderOperator):
        return (target.name(),)
    name = getattr(target, "__name__", str(target))
    return (f"{getattr(target, '__module__', '')}.{name}", name)


def is_element(node: fx.Node, producer: fx.Node) -> bool:
    """Is `node` one result of a call that returns several (not an index into a tensor)?"""
    picks = node.op == "call_function" and node.target is operator.getitem and node.args[0] is producer
    return picks and isinstance(producer.meta.get("example_value"), tuple | list)


def argument_names(node: fx.Node) -> tuple[str, ...]:
    """Names of a custom op's arguments in order, from its schema; empty for plain functions."""
    target = node.target
    if isinstance(target, compat.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, compat.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    return ()


def attention_nodes(graph: fx.Graph, extra: Collection[str] = ()) -> tuple[dict[fx.Node, AttentionOp], tuple[Skip, ...]]:
    """The attention calls of a graph, and a skip for every extra name that matched nothing."""
    found: dict[fx.Node, AttentionOp] = {}
    matched: set[str] = set()
    for node in graph.nodes:
        for name in op_names(node):
            op = signatures.describe(name)
            if op is None and name in extra:
                op = signatures.from_schema(name, argument_names(node))
            if op is not None:
                found[node] = op
                matched.update(set(op_names(node)) & set(extra))
                break
    seen = sorted({name for node in graph.nodes for name in op_names(node)[-1:] if "::" in name})
    skips = tuple(
        Skip("splitting-op-unmatched", f"{name!r} is not in the graph; custom ops there: {', '.join(seen) or 'none'}")
        for name in extra
        if name not in matched
    )
    return found, skips


def split(gm: fx.GraphModule, extra: Collection[str] = ()) -> Split:
    """Cut `gm` at its attention ops; `gm` itself is left as it is but for the order of tuple accesses."""
    attention, skips = attention_nodes(gm.graph, extra)
    part = _partition(gm.graph, attention)
    module = split_module(gm, gm, lambda node: part[node], keep_original_order=True)
    names = _attention_children(module, extra)
    inside = len(attention) - len(names)
    if inside:
        raise SplitError(f"{inside} of {len(attention)} attention ops were not cut out of their pieces.")
    return Split(module, names, frozenset(attention), skips)


def _partition(graph: fx.Graph, attention: Mapping[fx.Node, AttentionOp]) -> dict[fx.Node, int]:
    for node in attention:
        for user in list(node.users):
            # An op with several results hands them out by tuple access; a tuple must not cross into a piece.
            if is_element(user, node):
                node.append(user)
    part: dict[fx.Node, int] = {}
    current, cut = 0, False
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node in attention:
            current, cut = current + 1, True
        elif cut and not any(is_element(node, producer) for producer in node.all_input_nodes if producer in attention):
            current, cut = current + 1, False
        part[node] = current
    _attributes_with_their_users(graph, part)
    return part


def _attributes_with_their_users(graph: fx.Graph, part: dict[fx.Node, int]) -> None:
    """A `get_attr` (a constant, or the sub-graph of a higher-order op) belongs to the part that reads it."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            first = min(node.users, key=lambda user: part.get(user, 1 << 30))
            part[node] = part.get(first, part[node])


def _attention_children(module: fx.GraphModule, extra: Collection[str]) -> dict[str, AttentionChild]:
    names: dict[str, AttentionChild] = {}
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        child = module.get_submodule(str(node.target))
        assert isinstance(child, fx.GraphModule), f"{node.target} is not a graph"
        inner, _ = attention_nodes(child.graph, extra)
        others = [n for n in child.graph.nodes if n.op in ("call_function", "call_method") and n not in inner]
        if inner and not all(any(is_element(n, op) for op in inner) for n in others):
            raise SplitError(f"{node.target} holds an attention op beside other calls.")
        if len(inner) == 1:
            found, op = next(iter(inner.items()))
            names[str(node.target)] = AttentionChild(op, found.name)
    return names
