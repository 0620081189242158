"""Roles: what each real input of a graph is, and so how it may be padded.

The vocabulary is small: *rows* (one entry per patch or image), *boundaries* (`cu_seqlens`), *index* (integers that
gather rows), *per segment* (one row per segment), *fixed* (never padded). Roles are inferred from the graph; whether
padding is safe is then proved, not assumed (`proof.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from vit_compile.backend.mixing import CONVERSIONS, find_mixing, op_name
from vit_compile.backend.program import AttentionCall, Program
from vit_compile.backend.sizes import Env, Size, TensorSpec
from vit_compile.backend.split import attention_nodes
from vit_compile.backend.survey import example_value
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
    indexes: Size | None = None
    """For integers that pick rows: how many there are to pick from. Negative ones count from the real end."""
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


def infer(program: Program, gm: fx.GraphModule, example_env: Env, attention: Collection[fx.Node] | None = None) -> RoleTable:
    """Roles of the inputs of `program`.

    Args:
        gm: the uncut graph.
        example_env: the sizes with which it was traced.
        attention: its attention calls; None: those of the default set.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    calls, computed = _boundary_calls(program, placeholders)
    boundary_args = set(calls)
    table = RoleTable(boundary_calls=calls)
    table.row_symbol = _row_symbol(program, boundary_args)
    table.static_rows = _static_rows(program, boundary_args)
    table.bound_symbols = _bound_symbols(program)
    for arg in boundary_args:
        symbol = _plain_symbol(program.specs[arg].shape[0])
        if symbol is not None:
            table.segment_symbols[symbol] = (symbol, 0)
    for arg in program.tensor_args:
        table.inputs.append(_role(arg, placeholders[arg], program, table, boundary_args, example_env))
    table.conflict = _conflict(program, table, boundary_args)
    if table.conflict is None and table.row_symbol >= 0:
        table.conflict = _mixing(gm, program, table, placeholders, attention)
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
        if user.op == "call_method" and user.target in CONVERSIONS:
            found += [user, *_downstream_conversions(user)]
    return found


def _bound_symbols(program: Program) -> frozenset[int]:
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


def _index_target(node: fx.Node, row_symbols: set[int], program: Program, length: Size, env: Env) -> tuple[bool, Size | None]:
    """Is an integer input an index of rows, and how many rows does it index?

    An index permutes or thins out a dimension that grows with the rows and is at least as long as itself: an identity tail
    stays in range there. One that is longer repeats rows; zeros stay in range for it. Sorting alone makes no index.
    """
    is_index, target = False, None
    for user, dim in _indexed_dims(node):
        value = example_value(user.args[0])
        if not isinstance(value, torch.Tensor) or dim >= value.dim():
            continue
        size = program.table.size(value.shape[dim])
        if size.symbols & row_symbols:
            twice = tuple(2 * v for v in env)
            is_index = is_index or (size(env) >= length(env) and size(twice) >= length(twice))
            target = size
    return is_index, target


def _indexed_dims(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Calls that use an input (or a conversion of it) as an index, and the dimension that it indexes."""
    found = []
    for source in [node, *_downstream_conversions(node)]:
        for user in source.users:
            name = op_name(user)
            if name in ("getitem", "setitem") and len(user.args) > 1 and user.args[0] is not source:
                items = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
                if source in items and not any(item is None or item is Ellipsis for item in items):
                    found.append((user, items.index(source)))
            elif name in ("index_select", "gather", "take_along_dim", "index_copy", "index_add") and user.args[0] is not source:
                dim = user.kwargs.get("dim", user.args[1] if len(user.args) > 1 else 0)
                if isinstance(dim, int) and dim >= 0:
                    found.append((user, dim))
    return found


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
    if integers:
        is_index, target = _index_target(node, rows, program, spec.shape[dim], example_env)
        chosen = Role.INDEX if is_index and len(spec.shape) == 1 else Role.ROWS
        return InputRole(arg, name, chosen, spec, dim, indexes=target)
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


def _mixing(
    gm: fx.GraphModule,
    program: Program,
    table: RoleTable,
    placeholders: Sequence[fx.Node],
    attention: Collection[fx.Node] | None,
) -> Skip | None:
    of_role = {role: [placeholders[i.arg] for i in table.inputs if i.role is role] for role in Role}
    return find_mixing(
        gm,
        program,
        rows={table.row_symbol, *table.scaled},
        segments=table.segment_symbols.keys(),
        per_segment=of_role[Role.PER_SEGMENT],
        indices=of_role[Role.INDEX],
        attention=attention_nodes(gm.graph)[0] if attention is None else attention,
    )


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
