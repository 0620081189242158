"""Roles: what each real input of a graph is, and so how it may be padded.

The vocabulary is small: *rows* (one entry per patch or image), *boundaries* (`cu_seqlens`), *index* (integers that
gather rows), *per segment* (one row per segment), *fixed* (never padded). Roles are inferred from the graph; whether
padding is safe is then proved, not assumed (`proof.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from vit_compile.backend.program import AttentionCall, Program
from vit_compile.backend.sizes import Env, Size, TensorSpec
from vit_compile.backend.survey import source_line
from vit_compile.stats import Skip


class Role(Enum):
    """How an input is padded."""

    ROWS = "rows"
    BOUNDARIES = "boundaries"
    INDEX = "index"
    PER_SEGMENT = "per segment"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class InputRole:
    """The role of one real input. `dim` is the dimension that grows when it is padded (-1: none)."""

    arg: int
    name: str
    role: Role
    spec: TensorSpec
    dim: int = -1
    fixed: tuple[int, ...] = field(init=False)
    """Its traced shape, -1 where the size is symbolic."""

    def __post_init__(self) -> None:
        sizes = tuple(-1 if size.symbols else size(()) for size in self.spec.shape)
        object.__setattr__(self, "fixed", sizes)


@dataclass(slots=True)
class RoleTable:
    """Roles of all real inputs, and what each symbol counts.

    `row_symbol` is the symbol of the row count (-1: the graph was traced for one size). `scaled` are symbols in a fixed
    ratio to it, as (numerator, denominator) of symbol / rows. `segment_symbols` maps a boundary tensor's length symbol
    to itself or, for per-segment inputs, (boundary symbol, difference). `bound_symbols` only reach `max_seqlen`.
    """

    inputs: list[InputRole] = field(default_factory=list)
    row_symbol: int = -1
    static_rows: int = 0
    """Rows of the largest input where the graph was traced for one size."""
    scaled: dict[int, tuple[int, int]] = field(default_factory=dict)
    segment_symbols: dict[int, tuple[int, int]] = field(default_factory=dict)
    bound_symbols: frozenset[int] = frozenset()
    conflict: Skip | None = None
    boundary_calls: dict[int, list[AttentionCall]] = field(default_factory=dict)
    """For each boundary input, the attention calls that it reaches."""

    def boundary_rows(self, arg: int, env: Env) -> int:
        """What the last offset of a boundary input must be: the rows of the packed query that it divides."""
        return self.boundary_calls[arg][0].query_rows(env)

    def rows(self, env: Env) -> int | None:
        """Real rows of an environment."""
        return env[self.row_symbol] if self.row_symbol >= 0 else None


def infer(program: Program, gm: fx.GraphModule, example_env: Env) -> RoleTable:
    """Roles of the inputs of `program`, whose uncut graph is `gm`; `example_env` are the sizes it was traced with."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    calls, computed = _boundary_calls(program, placeholders)
    boundary_args = set(calls)
    table = RoleTable(boundary_calls=calls)
    table.row_symbol = _row_symbol(program, boundary_args)
    table.static_rows = _static_rows(program, boundary_args)
    table.bound_symbols = _bound_symbols(program, gm, placeholders)
    lengths = {_plain_symbol(program.specs[arg].shape[0]): arg for arg in boundary_args}
    for symbol in lengths:
        if symbol is not None:
            table.segment_symbols[symbol] = (symbol, 0)
    for arg in program.tensor_args:
        table.inputs.append(_role(arg, placeholders[arg], program, table, boundary_args, example_env))
    table.conflict = _conflict(program, table, boundary_args)
    if table.conflict is None:
        table.conflict = _size_in_arithmetic(gm, program, table)
    if computed and table.conflict is None:
        table.conflict = Skip("padding-unproved", f"the boundaries of {computed} are computed inside the graph")
    return table


def _plain_symbol(size: Size) -> int | None:
    """The symbol that a size is, or None for constants and composite expressions."""
    return next(iter(size.symbols)) if len(size.symbols) == 1 and size.text.isidentifier() else None


def _row_dim(spec: TensorSpec) -> int:
    """Dimension that may hold rows: 0, or 1 behind a leading 1; -1 where it has no symbol."""
    for dim, size in enumerate(spec.shape[:2]):
        if size.symbols:
            return dim
        if size.text != "1":
            return -1
    return -1


def _row_symbol(program: Program, boundary_args: set[int]) -> int:
    """The symbol of the largest floating-point input's row dimension (pixels, not interpolation weights)."""
    best, largest = -1, -1
    for arg in program.tensor_args:
        spec = program.specs[arg]
        dim = _row_dim(spec)
        if arg in boundary_args or dim < 0 or not (spec.dtype.is_floating_point or spec.dtype == torch.uint8):
            continue
        symbol = _plain_symbol(spec.shape[dim])
        width = 1
        for size in spec.shape[dim + 1 :]:
            width *= int(size.text) if size.text.isdigit() else 1 << 20
        if symbol is not None and width > largest:
            best, largest = symbol, width
    return best


def _static_rows(program: Program, boundary_args: set[int]) -> int:
    """Rows of the largest input without a symbolic row dimension; 0 where there is none."""
    shapes = [
        [int(size.text) for size in program.specs[arg].shape]
        for arg in program.tensor_args
        if arg not in boundary_args and not program.specs[arg].symbols and program.specs[arg].shape
    ]
    return max(shapes, key=math.prod)[0] if shapes else 0


_UNARY = {"to", "int", "long", "contiguous", "clone", "type", "cuda", "flatten", "view", "reshape", "detach"}


def _boundary_calls(program: Program, placeholders: Sequence[fx.Node]) -> tuple[dict[int, list[AttentionCall]], str | None]:
    """For each argument that reaches the boundaries of attention calls (directly or through a conversion), those calls;
    and the name of a step whose boundaries come from somewhere else."""
    origin = {p.name: i for i, p in enumerate(placeholders)}
    for i, p in enumerate(placeholders):
        origin.update({node.name: i for node in _downstream_conversions(p)})
    calls: dict[int, list[AttentionCall]] = {}
    computed = None
    for step in program.attention_steps:
        assert step.attention is not None
        for slot in step.attention.boundaries:
            arg = origin.get(program.slot_names[slot])
            if arg is None:
                computed = step.name
            else:
                calls.setdefault(arg, []).append(step.attention)
    return calls, computed


def _downstream_conversions(node: fx.Node) -> list[fx.Node]:
    found = []
    for user in node.users:
        if user.op == "call_method" and user.target in _UNARY:
            found += [user, *_downstream_conversions(user)]
    return found


def _bound_symbols(program: Program, gm: fx.GraphModule, placeholders: Sequence[fx.Node]) -> frozenset[int]:
    """Symbols that reach nothing but `max_seqlen` arguments."""
    bounds: set[int] = set()
    for step in program.attention_steps:
        assert step.attention is not None
        for bound in step.attention.bounds:
            if bound.size is not None:
                bounds |= bound.size.symbols
    elsewhere: set[int] = set()
    for spec in program.specs.values():
        elsewhere |= spec.symbols
    for step in program.steps:
        if step.attention is None:
            for ref in step.inputs:
                if ref.size is not None:
                    elsewhere |= ref.size.symbols
    return frozenset(bounds - elsewhere)


_GATHERS = {"index_select", "gather", "take_along_dim", "argsort", "sort", "index_copy", "index_copy_", "scatter", "index_add"}


def _gathers_rows(node: fx.Node, row_symbols: set[int], program: Program, length: Size, example_env: Env) -> bool:
    """Does an integer input permute or thin out the rows of a tensor that itself grows with the rows?

    One that is longer than what it picks from repeats rows: an identity tail would reach past the end, zeros do not.
    """
    for user in [u for n in [node, *_downstream_conversions(node)] for u in n.users]:
        name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
        if name in ("argsort", "sort"):
            return True
        is_getitem = user.op == "call_function" and user.target in (operator.getitem, operator.setitem)
        if not (is_getitem or name in _GATHERS):
            continue
        source = user.args[0]
        value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
        if isinstance(value, torch.Tensor):
            growing = [size for size in program.table.spec(value).shape if size.symbols & row_symbols]
            if growing and all(size(example_env) >= length(example_env) for size in growing):
                return True
    return False


def _role(arg: int, node: fx.Node, program: Program, table: RoleTable, boundary_args: set[int], example_env: Env) -> InputRole:
    spec, name = program.specs[arg], program.arg_names[arg]
    if arg in boundary_args:
        return InputRole(arg, name, Role.BOUNDARIES, spec, 0 if spec.shape[0].symbols else -1)
    dim = _row_dim(spec)
    symbol = _plain_symbol(spec.shape[dim]) if dim >= 0 else None
    if symbol is None or table.row_symbol < 0:
        return InputRole(arg, name, Role.FIXED, spec)
    if symbol != table.row_symbol and symbol not in table.scaled:
        relation = _segment_relation(symbol, table, example_env)
        if relation is not None:
            table.segment_symbols.setdefault(symbol, relation)
            return InputRole(arg, name, Role.PER_SEGMENT, spec, dim)
        ratio = _ratio(example_env[symbol], example_env[table.row_symbol])
        if ratio is None:
            return InputRole(arg, name, Role.FIXED, spec)
        table.scaled[symbol] = ratio
    integers = not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool)
    rows = {table.row_symbol, *table.scaled}
    if integers and len(spec.shape) == 1 and _gathers_rows(node, rows, program, spec.shape[dim], example_env):
        return InputRole(arg, name, Role.INDEX, spec, dim)
    return InputRole(arg, name, Role.ROWS, spec, dim)


def _segment_relation(symbol: int, table: RoleTable, example_env: Env) -> tuple[int, int] | None:
    """(boundary symbol, difference) when a count equals the boundaries' length or one less (the segments)."""
    if symbol in table.segment_symbols:
        return table.segment_symbols[symbol]
    for length in [s for s, (base, _) in table.segment_symbols.items() if s == base]:
        difference = example_env[symbol] - example_env[length]
        if difference in (0, -1):
            return (length, difference)
    return None


def _ratio(count: int, rows: int) -> tuple[int, int] | None:
    """(numerator, denominator) of count / rows where one divides the other."""
    if count <= 0 or rows <= 0:
        return None
    if rows % count == 0:
        return (1, rows // count)
    return (count // rows, 1) if count % rows == 0 else None


_ARITHMETIC = {
    "add", "sub", "mul", "truediv", "div", "true_divide", "floordiv", "floor_divide", "pow", "mod", "remainder", "rsub",
    "multiply", "divide", "subtract", "add_", "sub_", "mul_", "div_", "pow_", "clamp", "lerp", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip


def _size_in_arithmetic(gm: fx.GraphModule, program: Program, table: RoleTable) -> Skip | None:
    """A tensor computed *with* the count of rows or segments (divided by it, scaled by its logarithm), not only shaped by it.

    Padding would change the count. In half precision such a change can be too small for the count proof to see.
    """
    counts = {table.row_symbol, *table.scaled, *table.segment_symbols}
    for node in gm.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name not in _ARITHMETIC or not isinstance(node.meta.get("example_value"), torch.Tensor):
            continue
        for value in (_example(argument) for argument in node.all_input_nodes):
            if isinstance(value, torch.SymInt) and program.table.size(value).symbols & counts:
                what = f"{node.name} computes with the number of rows or segments"
                return Skip("padding-unsafe", f"{what}: {source_line(node)}")
    return None


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _conflict(program: Program, table: RoleTable, boundary_args: set[int]) -> Skip | None:
    """A symbol that counts two things cannot be padded."""
    if table.row_symbol < 0:
        return None
    rows = {table.row_symbol, *table.scaled}
    for arg in boundary_args:
        shared = program.specs[arg].shape[0].symbols & rows
        if shared:
            name = program.table.names[next(iter(shared))]
            what = f"{name} is both the rows and the length of {program.arg_names[arg]}"
            return Skip("duck-shape", f"{what}; trace with other sizes")
    for role in table.inputs:
        others = frozenset().union(*(s.symbols for d, s in enumerate(role.spec.shape) if d != role.dim), frozenset())
        counted = rows if role.role is not Role.FIXED else rows | set(table.segment_symbols)
        if others & counted:
            name = program.table.names[next(iter(others & counted))]
            return Skip("duck-shape", f"{name} is the rows and also another dimension of {role.name}; trace with other sizes")
    return None
