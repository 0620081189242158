"""Rows that see each other, found in the graph: what no trial on one call's data can rule out.

The proofs of `proof.py` run on the data of one call, and a minimum, a last row or a count can hide there. This check needs
no data. It looks at every operation outside of attention and refuses padding where

- the row dimension disappears (a reduction, the last row, a product over rows), or the segments of a per-segment input;
- a tensor is computed with the number of rows or segments, directly or as a float, other than as a size;
- rows are turned round, or integers are sorted that are not an index of rows.

It errs on the safe side: what it refuses still replays at exact sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.program import Program
from vit_compile.backend.survey import example_value, source_line
from vit_compile.stats import Skip

# Operations that take sizes as sizes: the rows in front stay what they are.
_SIZE_OPS = {
    "view", "reshape", "expand", "broadcast_to", "unflatten", "flatten", "repeat", "tile", "narrow", "split", "chunk", "unbind",
    "split_with_sizes", "tensor_split", "permute", "getitem", "zeros", "ones", "empty", "full", "arange", "new_zeros",
    "new_ones", "new_empty", "new_full", "view_as", "expand_as", "repeat_interleave", "slice", "pad", "setitem", "index_select",
    "unsqueeze", "squeeze", "size", "to", "unfold",
}  # fmt: skip
_FILLS = {"full": 1, "new_full": 2}
_FACTORIES = {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
_TURNS = {"flip", "flipud", "roll", "rot90"}
_SORTS = {"sort", "argsort", "msort", "topk", "kthvalue", "unique", "unique_consecutive", "searchsorted", "mode", "median"}
_PICKS = {"getitem", "index_select", "gather", "take_along_dim", "embedding", "index_put", "index_put_", "scatter"}


def find_mixing(
    gm: fx.GraphModule,
    program: Program,
    *,
    rows: Collection[int],
    segments: Collection[int],
    per_segment: Collection[fx.Node],
    indices: Collection[fx.Node],
    attention: Collection[fx.Node],
) -> Skip | None:
    """Why this graph must not be padded, as far as its operations tell.

    Args:
        rows, segments: symbols that count rows, and lengths of boundaries and per-segment inputs.
        per_segment, indices: placeholders of those roles.
        attention: the attention calls, which keep segments apart themselves.
    """
    look = _Look(program, frozenset(rows), frozenset(segments), set(indices))
    from_segments = set(per_segment)
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in attention:
            continue
        if isinstance(node.target, compat.HigherOrderOperator):
            continue
        if not from_segments.isdisjoint(node.all_input_nodes):
            from_segments.add(node)
        what = look.at(node, from_segments)
        if what is not None:
            line = source_line(node)
            return Skip("padding-unsafe", f"{node.name} {what}" + (f": {line}" if line else ""))
    return None


class _Look:
    def __init__(self, program: Program, rows: frozenset[int], segments: frozenset[int], indices: set[fx.Node]) -> None:
        self.program, self.rows, self.segments, self.indices = program, rows, segments, indices

    def at(self, node: fx.Node, from_segments: set[fx.Node]) -> str | None:
        """What one operation does to rows, in words; None if nothing."""
        name, value = op_name(node), node.meta.get("example_value")
        if name == "setitem":
            return "writes into a row by its number" if self._numbered(node) else None
        outputs = [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, torch.Tensor)]
        if not outputs:
            return None
        return self._counts(node, name) or self._lost(node, name, outputs, from_segments) or self._order(node, name)

    def symbols(self, value: Any) -> frozenset[int]:
        """Symbols of a tensor's shape or of a number."""
        if isinstance(value, torch.Tensor):
            sizes = [self.program.table.size(size) for size in value.shape]
            return frozenset().union(*(size.symbols for size in sizes)) if sizes else frozenset()
        if isinstance(value, torch.SymInt):
            return self.program.table.size(value).symbols
        if isinstance(value, torch.SymFloat):
            return self.program.table.indices(compat.float_symbols(value))
        return frozenset()

    def _counts(self, node: fx.Node, name: str) -> str | None:
        counts = self.rows | self.segments
        for argument in node.all_input_nodes:
            value = example_value(argument)
            if isinstance(value, torch.Tensor) or not self.symbols(value) & counts:
                continue
            fills = name in _FILLS and (node.args[_FILLS[name] :][:1] == (argument,) or node.kwargs.get("fill_value") is argument)
            if isinstance(value, torch.SymFloat) or name not in _SIZE_OPS or fills:
                return "computes with the number of rows or segments"
        return None

    def _lost(self, node: fx.Node, name: str, outputs: list[torch.Tensor], from_segments: set[fx.Node]) -> str | None:
        if name in _FACTORIES:
            return None
        left = frozenset().union(*(self.symbols(output) for output in outputs))
        for argument in node.all_input_nodes:
            value = example_value(argument)
            if not isinstance(value, torch.Tensor):
                continue
            if self.symbols(value) & self.rows and not left & self.rows:
                return "joins rows, or picks one by its number"
            lost = self.symbols(value) & self.segments and not left & self.segments
            if lost and argument in from_segments and name not in _PICKS:
                return "joins the segments of a per-segment input"
        return None

    def _order(self, node: fx.Node, name: str) -> str | None:
        source = node.args[0] if node.args else None
        value = example_value(source)
        if not isinstance(value, torch.Tensor) or not self.symbols(value) & self.rows:
            return None
        if name in _TURNS and self._along_rows(node, value):
            return "turns the rows round"
        integers = not (value.dtype.is_floating_point or value.dtype.is_complex)
        if name in _SORTS and integers and through_conversions(source) not in self.indices:
            return "sorts integers of all rows"
        return None

    def _along_rows(self, node: fx.Node, value: torch.Tensor) -> bool:
        dims = node.kwargs.get("dims", node.args[-1] if len(node.args) > 1 else None)
        chosen = dims if isinstance(dims, tuple | list) else (dims,)
        if not all(isinstance(dim, int) for dim in chosen):
            return True
        own = [d for d, size in enumerate(value.shape) if self.program.table.size(size).symbols & self.rows]
        return any(int(dim) % value.dim() in own for dim in chosen if isinstance(dim, int))

    def _numbered(self, node: fx.Node) -> bool:
        value = example_value(node.args[0])
        if not isinstance(value, torch.Tensor):
            return False
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        for dim, item in enumerate(index[: value.dim()]):
            if item is Ellipsis or item is None:
                return bool(self.symbols(value) & self.rows)
            if not self.program.table.size(value.shape[dim]).symbols & self.rows:
                continue
            ends = (item.start, item.stop) if isinstance(item, slice) else (item,)
            if any(isinstance(end, int) and (not isinstance(item, slice) or end < 0) for end in ends):
                return True
        return False


CONVERSIONS = {"to", "int", "long", "contiguous", "clone", "type", "cuda", "flatten", "view", "reshape", "detach"}


def through_conversions(node: Any) -> Any:
    """The node behind conversions and reshapes."""
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in CONVERSIONS:
        node = node.args[0]
    return node


def op_name(node: fx.Node) -> str:
    """Bare name of the operation that a node calls."""
    if node.op == "call_method":
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]
