"""The cut graph as a flat list of steps, and the straight run through it.

A `Program` is what a traced graph becomes: arguments, steps (pieces and attention calls) that read and write numbered
slots, and outputs. Integers between steps are never taken from a step's results: they are size expressions, evaluated
under the environment (real or padded) in which a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vit_compile.attention.choice import dense_attention
from vit_compile.attention.signatures import AttentionOp
from vit_compile.attention.tail import zero_tail_, zero_tail_in_torch_
from vit_compile.backend.pieces import Piece
from vit_compile.backend.sizes import Env, Size, SymbolTable, TensorSpec
from vit_compile.backend.survey import PieceFacts

_DENSE = ("scaled_dot_product_attention", "aten::scaled_dot_product_attention")


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
    target = dense_attention if attention.op.name in _DENSE else attention.target
    result = target(*args, **kwargs)
    if covering_bounds and attention.boundaries and not attention.op.clears_tail:
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
