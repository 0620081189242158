"""Captured runnables: one per capture size, `full` (the whole chain) or `piecewise` (a graph per piece).

Both own static inputs, are replayed with a call's arguments and hand out trimmed views of their own memory, valid until
the next replay. On a device without CUDA the same objects run the compiled pieces on the same static buffers, so that
everything but recording itself is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from vit_compile.backend.cuda import Recorder, check_recorded, reserved_bytes, unowned
from vit_compile.backend.padding import StaticInputs, trim
from vit_compile.backend.program import Program, Step, attend, run_piece
from vit_compile.backend.roles import RoleTable
from vit_compile.backend.sizes import Env

WARMUP_RUNS = 2
Watch: TypeAlias = Callable[[Step, list[Any]], None]


def size_label(program: Program, roles: RoleTable, env: Env) -> str:
    """An environment in a user's words: the rows, or the shape of the largest input where there is no row dimension."""
    rows = roles.rows(env)
    if rows is not None:
        return f"{rows} rows"
    shapes = [role.spec.sizes(env) for role in roles.inputs]
    return "x".join(map(str, max(shapes, key=math.prod))) if shapes else "no inputs"


class Capture:
    """A runnable for one environment. `nbytes` is the memory that it added; `recorder` is None off CUDA."""

    mode = ""

    def __init__(
        self, program: Program, roles: RoleTable, env: Env, recorder: Recorder | None, calls: dict[str, Callable[..., Any]]
    ) -> None:
        self.program, self.roles, self.env, self.recorder, self.calls = program, roles, env, recorder, calls
        self.inputs = StaticInputs(program, roles, env)
        self.prepared = False
        self.nbytes = 0
        self.milliseconds = 0.0

    @property
    def label(self) -> str:
        """Name of the capture in tables and dumps."""
        return f"{self.mode} {size_label(self.program, self.roles, self.env)}"

    def record(self, args: Sequence[Any]) -> None:
        """Warm up and record, with a call's arguments as data."""
        raise NotImplementedError

    def prepare(self, args: Sequence[Any]) -> None:
        """Make what step-by-step runs need, with a call's arguments as data; only without a recorder."""

    def replay_unrecorded(self, args: Sequence[Any], env: Env, watch: Watch | None = None) -> list[Any]:
        """Serve a call step by step on the static inputs, without a recording: what the proofs need. Made on first use."""
        assert self.recorder is None, "only a capture without a recorder runs unrecorded"
        if not self.prepared:
            self.prepare(args)
            self.prepared = True
        self.inputs.fill(args)
        return self.replay_filled(self.inputs.substitute(args), env, watch)

    def replay(self, args: Sequence[Any], env: Env) -> list[Any]:
        """Serve a call whose real sizes are `env`: padded values, one per graph output."""
        self.inputs.fill(args)
        return self.replay_filled(self.inputs.substitute(args), env)

    def replay_filled(self, args: list[Any], env: Env, watch: Watch | None = None) -> list[Any]:
        """Replay on the buffers as they are; `args` are the substituted arguments.

        `watch` is called after each step with the slots, where steps run one by one (off CUDA).
        """
        raise NotImplementedError


class FullCapture(Capture):
    """The whole chain of pieces and attention calls as one graph."""

    mode = "full"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.values: list[Any] = []

    def _run(self, args: list[Any], watch: Watch | None = None) -> list[Any]:
        return self.program.run(args, self.env, covering_bounds=True, calls=self.calls, watch=watch)

    def record(self, args: Sequence[Any]) -> None:
        """See `Capture.record`."""
        self.inputs.fill(args)
        substituted = self.inputs.substitute(args)
        self.nbytes = self.inputs.nbytes
        if self.recorder is None:
            self._run(substituted)
            return
        self.recorder.choose_kernels(lambda: self._run(substituted))
        with self.recorder.session(), self.recorder.kernels.active():
            for _ in range(WARMUP_RUNS):
                self._run(substituted)
            before = reserved_bytes(self.recorder.device)
            graph, values = self.recorder.record(lambda: self._run(substituted))
        self.graph = check_recorded(graph, self.label)
        self.nbytes += max(0, reserved_bytes(self.recorder.device) - before)
        self.values = [unowned(v) if isinstance(v, torch.Tensor) else v for v in values]

    def replay_filled(self, args: list[Any], env: Env, watch: Watch | None = None) -> list[Any]:
        """See `Capture.replay_filled`; `env` makes no difference to the whole chain."""
        if self.graph is None:
            return self._run(args, watch)
        self.graph.replay()
        return self.values


class PiecewiseCapture(Capture):
    """A graph per piece; attention runs between them on the real rows, with the call's own boundaries and bound."""

    mode = "piecewise"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs: dict[str, torch.cuda.CUDAGraph | None] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.results = _ResultBuffers(_written_slots(self.program))

    def record(self, args: Sequence[Any]) -> None:
        """See `Capture.record`."""
        if self.recorder is None:
            self.prepare(args)
        else:
            self.inputs.fill(args)
            substituted = self.inputs.substitute(args)
            before = reserved_bytes(self.recorder.device)
            with self.recorder.session():
                self.program.run(substituted, self.env, covering_bounds=True, calls=self.calls)
                self._record_steps(substituted)
            self.nbytes += max(0, reserved_bytes(self.recorder.device) - before)
        self.nbytes += self.inputs.nbytes + self.results.nbytes

    def prepare(self, args: Sequence[Any]) -> None:
        """See `Capture.prepare`."""
        self.inputs.fill(args)
        self._record_steps(self.inputs.substitute(args))

    def _record_steps(self, args: list[Any]) -> None:
        slots: list[Any] = [*args, *([None] * (self.program.n_slots - len(args)))]
        for step in self.program.steps:
            values = self._values(step, slots)
            if step.attention is not None:
                produced = attend(step, values, self.env, covering_bounds=True)
                outputs = [self.results.take(slot, value) for slot, value in zip(step.outputs, produced, strict=True)]
            else:
                outputs = self._record_piece(step, values)
            for slot, value in zip(step.outputs, outputs, strict=True):
                slots[slot] = value
                if step.attention is not None:
                    self.views[slot] = value
                elif self.recorder is not None:
                    self.views[slot] = unowned(value)
            del values, outputs
            for slot in step.release:
                slots[slot] = None
                self.results.give_back(slot)

    def _record_piece(self, step: Step, values: list[Any]) -> list[Any]:
        call = self.calls.get(step.name)
        if self.recorder is None:
            return run_piece(step, values, call)
        for _ in range(WARMUP_RUNS):
            run_piece(step, values, call)
        graph, outputs = self.recorder.record(lambda: run_piece(step, values, call))
        if graph is None and not _only_views(outputs, values):
            check_recorded(graph, step.name)
        self.graphs[step.name] = graph
        return outputs

    def _values(self, step: Step, slots: Sequence[Any]) -> list[Any]:
        return [slots[ref.slot] if ref.size is None else ref.size(self.env) for ref in step.inputs]

    def replay_filled(self, args: list[Any], env: Env, watch: Watch | None = None) -> list[Any]:
        """See `Capture.replay_filled`; attention sees the real rows that `env` says."""
        slots: list[Any] = [*args, *([None] * (self.program.n_slots - len(args)))]
        for slot, view in self.views.items():
            slots[slot] = view
        for step in self.program.steps:
            if step.attention is not None:
                self._attend(step, slots, env)
            elif self.recorder is None:
                produced = run_piece(step, self._values(step, slots), self.calls.get(step.name))
                for slot, value in zip(step.outputs, produced, strict=True):
                    slots[slot] = value
            else:
                graph = self.graphs[step.name]
                if graph is not None:
                    graph.replay()
            if watch is not None:
                watch(step, slots)
        return self.program.results(slots, self.env)

    def _attend(self, step: Step, slots: list[Any], env: Env) -> None:
        specs = self.program.specs
        values = [
            (trim(slots[ref.slot], specs[ref.slot].sizes(env)) if ref.slot in specs else slots[ref.slot])
            if ref.size is None
            else ref.size(env)
            for ref in step.inputs
        ]
        produced = attend(step, values, env, covering_bounds=False)
        for slot, value in zip(step.outputs, produced, strict=True):
            self.results.store(slot, value)


class _ResultBuffers:
    """Static homes for attention results between graphs. Rows past the real ones are zero or become zero again."""

    def __init__(self, written: frozenset[int]) -> None:
        self.written = written
        """Slots that a piece writes into: their padding is reset every time, or it would grow from call to call."""
        self.buffers: dict[int, torch.Tensor] = {}
        self.nbytes = 0
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._dirty: dict[int, tuple[int, ...]] = {}

    def take(self, slot: int, example: torch.Tensor) -> torch.Tensor:
        """A buffer like `example` for a slot; one whose slot was released may come back."""
        key = (tuple(example.shape), tuple(example.stride()), example.dtype)
        free = self._free.setdefault(key, [])
        if free:
            buffer = free.pop()
        else:
            with torch.inference_mode(False):
                buffer = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device).zero_()
            self.nbytes += buffer.nbytes
        buffer.copy_(example)
        self.buffers[slot] = buffer
        self._dirty[id(buffer)] = tuple(buffer.shape)
        return buffer

    def give_back(self, slot: int) -> None:
        """Nobody reads this slot any more: its buffer may serve a later slot."""
        buffer = self.buffers.get(slot)
        if buffer is not None:
            self._free[(tuple(buffer.shape), tuple(buffer.stride()), buffer.dtype)].append(buffer)

    def store(self, slot: int, value: torch.Tensor) -> None:
        """Put a call's real result at the front of the slot's buffer, zeros where an earlier call left more."""
        buffer = self.buffers[slot]
        real, dirty = tuple(value.shape), self._dirty[id(buffer)]
        for dim, (size, used) in enumerate(zip(real, dirty, strict=True)):
            if used > size:
                buffer.narrow(dim, size, used - size).zero_()
        trim(buffer, real).copy_(value)
        self._dirty[id(buffer)] = tuple(buffer.shape) if slot in self.written else real


def _written_slots(program: Program) -> frozenset[int]:
    """Slots that some piece writes into, themselves or through a view."""
    slots = {step.inputs[position].slot for step in program.steps for position in step.facts.mutated_inputs}
    return frozenset(slots | {program.roots[slot] for slot in slots if slot in program.roots})


def _only_views(outputs: Sequence[Any], values: Sequence[Any]) -> bool:
    """Does a piece without kernels merely reshape its inputs?"""
    storages = {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)}
    return all(o.untyped_storage().data_ptr() in storages for o in outputs if isinstance(o, torch.Tensor))
