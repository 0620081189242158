"""The cut graph as a flat list of steps, and the straight run through it.

A `Program` is what a traced graph becomes: arguments, steps (pieces and attention calls) that read and write numbered
slots, and outputs. Integers between steps are never taken from a step's results: they are size expressions, evaluated
under the environment (real or padded) in which a step runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.attention.signatures import AttentionOp
from vit_compile.attention.tail import zero_tail_, zero_tail_in_torch_
from vit_compile.backend.pieces import Piece, PieceLibrary, example_inputs
from vit_compile.backend.sizes import Env, Size, SymbolTable, TensorSpec
from vit_compile.backend.split import AttentionChild, Split, argument_names, is_element
from vit_compile.backend.survey import PieceFacts, survey

_UNCUT_NAME = "vit_compile_uncut_name"


class UnsupportedValueError(Exception):
    """A value between pieces is neither a tensor nor an integer; the caller falls back."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a step's input comes from: a slot (tensor), or a size expression (integer)."""

    slot: int = -1
    size: Size | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """The `max_seqlen` of an attention call: a literal of the traced graph, or a size expression."""

    literal: int | None
    size: Size | None

    def real(self, env: Env) -> int:
        """The bound that the caller gave."""
        if self.literal is not None:
            return self.literal
        assert self.size is not None, "a bound is a literal or a size"
        return self.size(env)

    def covering(self, env: Env, rows: int) -> int:
        """The bound of a capture with these sizes: no segment is longer than all its `rows` together."""
        return min(self.real(env), rows)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call. `args` and `kwargs` hold `Ref`s, `Bound`s and constants, nested as in the graph."""

    op: AttentionOp
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    boundaries: tuple[int, ...]
    """Slots of the boundary tensors."""
    bounds: tuple[Bound, ...]
    query_rows: Size
    """Rows of the packed query: what the last boundary must equal."""
    results: tuple[int | None, ...]
    """For each output slot, which element of the op's result it is (None: the result itself)."""


@dataclass(slots=True)
class Step:
    """One piece or one attention call."""

    name: str
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    """A slot for each result that is used."""
    results: tuple[int, ...] = ()
    """For each output slot, its index among the results of `piece`."""
    piece: Piece | None = None
    attention: AttentionCall | None = None
    """Set for an attention call; one to a higher-order op has `piece` too, since it only runs well compiled."""
    facts: PieceFacts = field(default_factory=PieceFacts)
    release: tuple[int, ...] = ()
    """Slots that nobody reads after this step, neither directly nor through a view."""


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph: a slot, a size, or a constant (None)."""

    slot: int = -1
    size: Size | None = None
    constant: Any = None


@dataclass(slots=True)
class Program:
    """See the module's docstring. Slots `0 .. n_args-1` are the graph's arguments in order."""

    table: SymbolTable
    arg_names: tuple[str, ...]
    static_args: tuple[int, ...]
    """Arguments that are weights."""
    tensor_args: tuple[int, ...]
    """Arguments that are real inputs: what a replay copies."""
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    """Symbolic description of every tensor slot."""
    slot_names: dict[int, str] = field(default_factory=dict)
    """Names in the uncut graph."""
    roots: dict[int, int] = field(default_factory=dict)
    """Slots that are views of another step's result or of an argument, and of which."""
    steps: list[Step] = field(default_factory=list)
    outputs: tuple[Output, ...] = ()
    n_slots: int = 0

    @property
    def attention_steps(self) -> list[Step]:
        """The attention calls in order."""
        return [step for step in self.steps if step.attention is not None]

    def run(
        self,
        args: Sequence[Any],
        env: Env,
        *,
        covering_bounds: bool = False,
        calls: dict[str, Callable[..., Any]] | None = None,
        watch: Callable[[Step, list[Any]], None] | None = None,
    ) -> list[Any]:
        """Run every step under one environment.

        Args:
            args: the graph's arguments; tensors have the sizes that `env` says.
            env: values of the symbols.
            covering_bounds: give attention bounds that hold for any layout of as many rows, and clear rows past the
                last boundary: what a capture and a padded run need.
            calls: compiled functions by step name, instead of the dynamic ones.
            watch: called after each step with the slots.

        Returns:
            The output values, one per graph output.
        """
        slots: list[Any] = [*args, *([None] * (self.n_slots - len(args)))]
        for step in self.steps:
            values = [slots[ref.slot] if ref.size is None else ref.size(env) for ref in step.inputs]
            self.run_step(step, values, slots, env, covering_bounds=covering_bounds, call=(calls or {}).get(step.name))
            del values
            if watch is not None:
                watch(step, slots)
            for slot in step.release:
                slots[slot] = None
        return self.results(slots, env)

    def run_step(
        self,
        step: Step,
        values: Sequence[Any],
        slots: list[Any],
        env: Env,
        *,
        covering_bounds: bool,
        call: Callable[..., Any] | None = None,
    ) -> None:
        """Run one step on its input values and store its results in `slots`."""
        if step.piece is None:
            produced = attend(step, values, env, covering_bounds=covering_bounds)
        else:
            produced = run_piece(step, values, call)
        for slot, value in zip(step.outputs, produced, strict=True):
            slots[slot] = value

    def results(self, slots: Sequence[Any], env: Env) -> list[Any]:
        """Output values from filled slots."""
        return [
            output.size(env) if output.size is not None else slots[output.slot] if output.slot >= 0 else output.constant
            for output in self.outputs
        ]


def run_piece(step: Step, values: Sequence[Any], call: Callable[..., Any] | None = None) -> list[Any]:
    """Run a step's compiled piece (or `call` in its place); one result for each of `step.outputs`."""
    assert step.piece is not None, f"{step.name} is an attention call"
    assert step.piece.call is not None, f"{step.name} is not compiled"
    results = (call or step.piece.call)(*values)
    return [results[index] for index in step.results]


def attend(step: Step, values: Sequence[Any], env: Env, *, covering_bounds: bool) -> list[Any]:
    """Run one attention call on its input values (in the order of `step.inputs`); one result for each of `step.outputs`."""
    attention = step.attention
    assert attention is not None, f"{step.name} is a piece"
    if step.piece is not None:
        return run_piece(step, values)

    covered = attention.query_rows(env) if covering_bounds else None
    args = _resolve(attention.args, values, env, covered)
    kwargs = {name: _resolve(value, values, env, covered) for name, value in attention.kwargs.items()}
    result = attention.target(*args, **kwargs)
    if covering_bounds and attention.boundaries and attention.op.name != "vit_compile::varlen_attention":
        first = result if isinstance(result, torch.Tensor) else result[0]
        boundaries = next(values[i] for i, ref in enumerate(step.inputs) if ref.slot == attention.boundaries[0])
        if first.dim() == 3:
            (zero_tail_ if first.is_contiguous() else zero_tail_in_torch_)(first, boundaries)
    return [result if index is None else result[index] for index in attention.results]


def _resolve(template: Any, values: Sequence[Any], env: Env, covered: int | None) -> Any:
    """A call's argument from its template; `covered`: rows that the bound must cover, None for the caller's bound.

    Not a closure: one that calls itself is a reference cycle, which would keep every q, k and v of a chain alive.
    """
    if isinstance(template, Ref):
        return values[template.slot] if template.size is None else template.size(env)
    if isinstance(template, Bound):
        return template.real(env) if covered is None else template.covering(env, covered)
    if isinstance(template, tuple | list):
        return type(template)([_resolve(item, values, env, covered) for item in template])
    return template


@dataclass(frozen=True, slots=True)
class _Method:
    """Calls a tensor's method."""

    name: str

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


class Builder:
    """Makes a `Program` from the cut graph; one use."""

    def __init__(self, split: Split, table: SymbolTable, library: PieceLibrary) -> None:
        self.split, self.table, self.library = split, table, library
        self.slot_of: dict[fx.Node, int] = {}

    def build(self) -> Program:
        """The program; pieces are registered with the library but not compiled."""
        nodes = list(self.split.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        tensors = [(i, n) for i, n in enumerate(placeholders) if isinstance(n.meta.get("example_value"), torch.Tensor)]
        program = Program(
            table=self.table,
            arg_names=tuple(str(node.target) for node in placeholders),
            static_args=tuple(i for i, node in tensors if compat.is_static_input(node)),
            tensor_args=tuple(i for i, node in tensors if node.users and not compat.is_static_input(node)),
        )
        for node in placeholders:
            self._slot(program, node)
        for node in nodes:
            if node.op == "call_module":
                self._step(program, node)
            elif node.op == "output":
                self._outputs(program, node)
            elif node.op == "get_attr":
                raise UnsupportedValueError(f"the constant {node.target} is shared between pieces")
        _mark_releases(program)
        return program

    def _slot(self, program: Program, node: fx.Node) -> int:
        slot = program.n_slots
        program.n_slots += 1
        self.slot_of[node] = slot
        value = node.meta.get("example_value")
        program.slot_names[slot] = node.meta.get(_UNCUT_NAME, node.name)
        if isinstance(value, torch.Tensor):
            program.specs[slot] = self.table.spec(value)
        return slot

    def _ref(self, node: fx.Node) -> Ref:
        value = node.meta.get("example_value")
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            return Ref(size=self.table.size(value))
        if not isinstance(value, torch.Tensor):
            raise UnsupportedValueError(f"{node.name} is a {type(value).__name__}")
        return Ref(slot=self.slot_of[node])

    def _step(self, program: Program, node: fx.Node) -> None:
        name = str(node.target)
        child = self.split.module.get_submodule(name)
        assert isinstance(child, fx.GraphModule), f"{name} is not a graph"
        inputs = tuple(self._ref(arg) for arg in node.args if isinstance(arg, fx.Node))
        assert len(inputs) == len(node.args), f"{name} takes constants"
        kept = _tensor_results(node, child)
        if not kept and not self._writes(child):
            return  # only integers come out, and those are evaluated, not computed
        outputs = tuple(self._slot(program, user) for _, user in kept)
        results = tuple(index for index, _ in kept)
        step = Step(name, inputs, outputs, results)
        if name in self.split.attention:
            step.attention = self._attention(child, self.split.attention[name], inputs, [child_result(child, i) for i in results])
            if isinstance(step.attention.target, compat.HigherOrderOperator):
                step.piece = self.library.add(name, child, look=False)
            elif self.table.mode is not None:
                step.facts = survey(child, example_inputs(child), self.table.mode)
        else:
            step.piece = self.library.add(name, child)
            step.facts = step.piece.facts
        for slot, index in zip(outputs, results, strict=True):
            origin = inputs[step.facts.aliases[index]].slot if index in step.facts.aliases else -1
            if origin >= 0:
                program.roots[slot] = program.roots.get(origin, origin)
        program.steps.append(step)

    def _writes(self, child: fx.GraphModule) -> bool:
        """Does a child without results write into its inputs?"""
        return self.table.mode is not None and bool(survey(child, example_inputs(child), self.table.mode).mutated_inputs)

    def _attention(
        self, child: fx.GraphModule, attends: AttentionChild, inputs: tuple[Ref, ...], results: list[int | None]
    ) -> AttentionCall:
        op = attends.op
        node = next(n for n in child.graph.nodes if n.name == attends.node)
        positions = {n: i for i, n in enumerate(n for n in child.graph.nodes if n.op == "placeholder")}
        names = argument_names(node)
        boundaries: list[int] = []
        bounds: list[Bound] = []

        def template(value: Any, argument: str | None) -> Any:
            if argument in op.bounds and not isinstance(_example(value), torch.Tensor) and value is not None:
                bounds.append(self._bound(value))
                return bounds[-1]
            if isinstance(value, fx.Node):
                if value not in positions:
                    return None  # a sub-graph of a higher-order op; such calls run compiled
                ref = inputs[positions[value]]
                if argument in op.boundaries and ref.slot >= 0 and ref.slot not in boundaries:
                    boundaries.append(ref.slot)
                # Inside a step, a slot number means a position among the step's inputs.
                return Ref(slot=positions[value]) if ref.size is None else ref
            if isinstance(value, tuple | list):
                return type(value)(template(item, None) for item in value)
            return value

        args = tuple(template(a, names[i] if i < len(names) else None) for i, a in enumerate(node.args))
        kwargs = {k: template(v, k) for k, v in node.kwargs.items()}
        query = next(_example(a) for a in node.args if isinstance(_example(a), torch.Tensor)) if node.args else None
        if query is None:
            query = next(_example(v) for v in node.kwargs.values() if isinstance(_example(v), torch.Tensor))
        rows = self.table.size(query.shape[0])
        target = _Method(node.target) if isinstance(node.target, str) else node.target
        return AttentionCall(op, target, args, kwargs, tuple(boundaries), tuple(bounds), rows, tuple(results))

    def _bound(self, value: Any) -> Bound:
        example = _example(value)
        if isinstance(example, torch.SymInt):
            size = self.table.size(example)
            return Bound(None, size) if size.symbols else Bound(size(()), None)
        return Bound(int(example), None)

    def _outputs(self, program: Program, node: fx.Node) -> None:
        produced = node.args[0]
        outputs = []
        for value in produced if isinstance(produced, tuple | list) else (produced,):
            if not isinstance(value, fx.Node):
                outputs.append(Output(constant=value))
                continue
            ref = self._ref(value)
            outputs.append(Output(slot=ref.slot, size=ref.size))
        program.outputs = tuple(outputs)


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _produced(child: fx.GraphModule) -> tuple[list[Any], bool]:
    """A child's outputs, and whether it returns them as a tuple."""
    produced: Any = child.graph.output_node().args[0]
    return (list(produced), True) if isinstance(produced, tuple | list) else ([produced], False)


def _tensor_results(node: fx.Node, child: fx.GraphModule) -> list[tuple[int, fx.Node]]:
    """The used results of a child other than integers: (index among its outputs, top-level node)."""
    produced, many = _produced(child)
    users: dict[int, fx.Node] = {0: node}
    if many:
        picks: Any = [(user.args[1], user) for user in node.users if user.target is operator.getitem]
        users = dict(picks)
    for index, user in users.items():
        user.meta.setdefault("example_value", _example(produced[index]))
        if isinstance(produced[index], fx.Node):
            user.meta[_UNCUT_NAME] = produced[index].name
    return [
        (index, user)
        for index, user in sorted(users.items(), key=lambda item: item[0])
        if not isinstance(_example(produced[index]), int | torch.SymInt)
    ]


def child_result(child: fx.GraphModule, index: int) -> int | None:
    """Which element of its op's result an attention child's output number `index` is; None: the result itself."""
    node = _produced(child)[0][index]
    assert isinstance(node, fx.Node), "an attention child returns nodes"
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and is_element(node, source):
        element = node.args[1]
        assert isinstance(element, int), "a tuple access has an integer index"
        return element
    return None


def _mark_releases(program: Program) -> None:
    last: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        for slot in (*step.outputs, *(ref.slot for ref in step.inputs)):
            if slot >= 0:
                last[slot] = index
    for slot, root in program.roots.items():  # a view keeps what it looks at
        last[root] = max(last.get(root, -1), last[slot])
    for output in program.outputs:
        last.pop(output.slot, None)
        last.pop(program.roots.get(output.slot, -1), None)
    for index, step in enumerate(program.steps):
        step.release = tuple(slot for slot, at in last.items() if at == index and slot >= len(program.arg_names))
