"""From the cut graph to a `Program`: slots, steps, attention calls with their boundaries and bounds, outputs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.pieces import PieceLibrary, example_inputs
from vit_compile.backend.program import AttentionCall, Bound, Output, Program, Ref, Step
from vit_compile.backend.sizes import SymbolTable
from vit_compile.backend.split import AttentionChild, Split, argument_names, is_element
from vit_compile.backend.survey import example_value, survey

_UNCUT_NAME = "vit_compile_uncut_name"


class UnsupportedValueError(Exception):
    """A value between pieces is neither a tensor nor an integer; the caller falls back."""


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
            if argument in op.bounds and not isinstance(example_value(value), torch.Tensor) and value is not None:
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
        query = next(example_value(a) for a in node.args if isinstance(example_value(a), torch.Tensor)) if node.args else None
        if query is None:
            query = next(example_value(v) for v in node.kwargs.values() if isinstance(example_value(v), torch.Tensor))
        rows = self.table.size(query.shape[0])
        target = _Method(node.target) if isinstance(node.target, str) else node.target
        return AttentionCall(op, target, args, kwargs, tuple(boundaries), tuple(bounds), rows, tuple(results))

    def _bound(self, value: Any) -> Bound:
        example = example_value(value)
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
        user.meta.setdefault("example_value", example_value(produced[index]))
        if isinstance(produced[index], fx.Node):
            user.meta[_UNCUT_NAME] = produced[index].name
    return [
        (index, user)
        for index, user in sorted(users.items(), key=lambda item: item[0])
        if not isinstance(example_value(produced[index]), int | torch.SymInt)
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
