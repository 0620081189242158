"""The function that Dynamo calls: picks a capture by the sizes of a call, makes it on first need, or says why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vit_compile.backend.capture import Capture, FullCapture, PiecewiseCapture, size_label
from vit_compile.backend.checks import check_call, device_of
from vit_compile.backend.encoder import Encoder, encoder_of
from vit_compile.backend.padding import overlaps, padded_env
from vit_compile.backend.pieces import PieceLibrary
from vit_compile.backend.program import Program, run_piece
from vit_compile.backend.proof import guards_at, prove_count, prove_garbage, smaller_call, trim
from vit_compile.backend.roles import RoleTable
from vit_compile.backend.sizes import Env
from vit_compile.errors import SkipError, VitCompileError
from vit_compile.options import BackendOptions
from vit_compile.stats import CallRecord, Skip, counters, logger, record_call, report_skip

_PLAN_CACHE = 4096


@dataclass(slots=True)
class Report:
    """What happened to one traced graph, for the dumps."""

    captures: list[str] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    on_change: Callable[[], None] | None = None

    def note_call(self, kind: str, skip: Skip | None = None) -> None:
        """Count a call and its skip; the dump is written again when a kind is new."""
        new = kind not in self.calls or (skip is not None and str(skip) not in self.skips)
        self.calls[kind] = self.calls.get(kind, 0) + 1
        if skip is not None:
            self.skips[str(skip)] = self.skips.get(str(skip), 0) + 1
        if new and self.on_change is not None:
            self.on_change()


class _Listeners(threading.local):
    """Calls seen by `warmup` in this thread; None outside of it."""

    calls: list[tuple[Runnable, list[Any], Env]] | None = None


listeners = _Listeners()


class Runnable:
    """One traced graph, ready to run. Called by Dynamo's bytecode with the graph's arguments."""

    def __init__(
        self,
        program: Program,
        roles: RoleTable,
        library: PieceLibrary,
        options: BackendOptions,
        mode: str,
        never: Skip | None,
    ) -> None:
        self.program, self.roles, self.library, self.options = program, roles, library, options
        self.mode = mode
        """"full", "piecewise" or "none", as decided for this graph."""
        self.never = never
        """Why nothing of this graph can be captured."""
        self.unsafe: Skip | None = None
        self.report = Report()
        self.encoder: Encoder | None = None
        self.captures: dict[Env, Capture] = {}
        self.failures: dict[Env, Skip] = {}
        self._budgets = options.budget_rows()
        self._compile_rows = frozenset(options.compile_rows())
        self._plans: dict[Env, Env | Skip] = {}
        self._count_proved = False
        self._static_calls: dict[Env, dict[str, Callable[..., Any]]] = {}
        self._state_lock = threading.Lock()

    def __call__(self, *args: Any) -> list[Any]:
        """Outputs of the graph, a list; tensors belong to the caller unless `outputs="borrow"`."""
        env = self.program.table.read(args)
        check_call(self.roles, args, env, read_device=self.options.checks == "full")
        if listeners.calls is not None:
            listeners.calls.append((self, list(args), env))
        target = self.plan(env)
        if isinstance(target, Skip):
            return self.run_uncaptured(args, env, target)
        encoder = self._encoder(args)
        with encoder.lock:
            found, fresh = self._find_or_capture(encoder, target, args, env)
            if not isinstance(found, Skip):
                return self._replay(encoder, found, args, env, fresh=fresh)
        return self.run_uncaptured(args, env, found)

    def plan(self, env: Env) -> Env | Skip:
        """The environment of the capture that serves a call, or why there is none."""
        plan = self._plans.get(env)
        if plan is None:
            plan = self._make_plan(env)
            if len(self._plans) >= _PLAN_CACHE:
                self._plans.clear()
            self._plans[env] = plan
        return plan

    @property
    def may_pad(self) -> bool:
        """Could a call of this graph be padded, as far as is known?"""
        return (
            bool(self._budgets)
            and self.options.padding == "auto"
            and self.roles.row_symbol >= 0
            and self.roles.conflict is None
            and self.unsafe is None
        )

    def _make_plan(self, env: Env) -> Env | Skip:
        if self.mode == "none":
            return Skip("mode-none", "nothing is captured")
        if self.never is not None:
            return self.never
        shared = overlaps(self.program, self.roles, env)
        if shared is not None:
            return Skip("input-layout", shared.name)
        rows = self.roles.rows(env)
        if rows is None or not self._budgets:
            return self._target(env, rows if rows is not None else 0, pad_segments=False)
        larger = [budget for budget in self._budgets if budget >= rows]
        if not larger:
            return Skip("too-large", f"{rows} rows; the largest capture size has {self._budgets[-1]}")
        if rows not in self._budgets and not self.may_pad:
            if self.options.padding == "exact":
                return Skip("not-a-budget", f"{rows} rows; capture sizes in rows: {self._budgets}")
            return self.roles.conflict or self.unsafe or Skip("padding-unproved", f"{rows} rows")
        return self._target(env, min(larger), pad_segments=self.may_pad)

    def _target(self, env: Env, rows: int, *, pad_segments: bool) -> Env | Skip:
        target = padded_env(self.program, self.roles, env, rows, pad_segments=pad_segments)
        if isinstance(target, Skip):
            return target
        broken = guards_at(self.program, self.roles, target, env)
        return Skip("guard-forbids-size", f"{rows} rows: {broken}") if broken else target

    def _encoder(self, args: Sequence[Any]) -> Encoder:
        if self.encoder is None:
            with self._state_lock:
                if self.encoder is None:
                    encoder = encoder_of([args[i] for i in self.program.static_args], device_of(args))
                    with encoder.lock:
                        encoder.owners.add(self)
                    self.encoder = encoder
        return self.encoder

    def _find_or_capture(self, encoder: Encoder, target: Env, args: Sequence[Any], env: Env) -> tuple[Capture | Skip, bool]:
        """The capture for a plan, made now if need be, and whether it is new."""
        pointers = self._weight_pointers(args)
        stale = [t for t, c in self.captures.items() if c.weight_pointers != pointers]
        if stale:
            encoder.drop(self, stale)
            counters.add("recaptures")
        capture = self._serving(target)
        if capture is not None:
            return capture, False
        made = self.capture(encoder, target, args, env)
        if isinstance(made, Skip) and made.code == "padding-unsafe":
            report_skip(made, strict=self.options.strict)
            exact = self.plan(env)  # padding is off now, so this is the exact size or a skip
            if isinstance(exact, Skip) or exact == target:
                return (exact if isinstance(exact, Skip) else made), False
            return self._find_or_capture(encoder, exact, args, env)
        return made, not isinstance(made, Skip)

    def _serving(self, target: Env) -> Capture | None:
        """The held capture for a plan: this very one, else the one with the fewest spare segments."""
        capture = self.captures.get(target)
        if capture is not None or not self.roles.segment_symbols or not self.may_pad:
            return capture
        segments = self.roles.segment_symbols
        fitting = [
            env
            for env in self.captures
            if all(
                have >= need if i in segments else have == need for i, (have, need) in enumerate(zip(env, target, strict=True))
            )
        ]
        return self.captures[min(fitting, key=lambda env: sum(env[i] for i in segments))] if fitting else None

    def _weight_pointers(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple([args[i].data_ptr() for i in self.program.static_args])

    def capture(self, encoder: Encoder, target: Env, args: Sequence[Any], env: Env) -> Capture | Skip:
        """Make and prove the capture for `target`, with a call's arguments as data. `encoder.lock` is held."""
        if target in self.failures:
            return self.failures[target]
        full = encoder.room_for_one_more(self.options.max_graphs, self.options.max_graph_bytes)
        if full is not None:
            return full
        if self.may_pad and not self._count_proved:
            unsafe = prove_count(self.program, self.roles, args, env)
            if unsafe is not None:
                return self._padding_is_off(unsafe)
            self._count_proved = True
        encoder.start_afresh_if_empty()
        made = self._record(encoder, target, args)
        if isinstance(made, Skip):
            self.failures[target] = made
            return made
        if self.may_pad:
            unsafe = self._prove(made, args, env)
            if unsafe is not None:
                return self._padding_is_off(unsafe)
        made.weight_pointers = self._weight_pointers(args)
        self.captures[target] = made
        counters.add("captures")
        self.report.captures.append(f"{made.label}: {made.nbytes} bytes, {made.milliseconds:.0f} ms")
        if self.report.on_change is not None:
            self.report.on_change()
        return made

    def _padding_is_off(self, skip: Skip) -> Skip:
        self.unsafe = Skip("padding-unsafe", skip.detail)
        self._plans.clear()
        return self.unsafe

    def _record(self, encoder: Encoder, target: Env, args: Sequence[Any]) -> Capture | Skip:
        started = time.perf_counter()
        kind = FullCapture if self.mode == "full" else PiecewiseCapture
        label = size_label(self.program, self.roles, target)
        try:
            made = self._record_twice(kind, encoder, target, args)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return Skip("out-of-memory", f"{label}: {str(error).splitlines()[0]}")
        except SkipError:
            raise
        except Exception as error:
            return Skip("capture-failed", f"{label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        made.milliseconds = (time.perf_counter() - started) * 1e3
        cap = self.options.max_graph_bytes
        if cap is not None and encoder.nbytes + made.nbytes > cap:
            return Skip("max-graph-bytes", f"{label} would take {made.nbytes} bytes more; max_graph_bytes={cap}")
        return made

    def _record_twice(self, kind: type[Capture], encoder: Encoder, target: Env, args: Sequence[Any]) -> Capture:
        """Record; once more if the device reported an error, since another thread's synchronisation breaks a capture."""
        with torch.inference_mode(False), torch.no_grad():
            for attempt in (1, 2):
                made = kind(self.program, self.roles, target, encoder.recorder, self._calls_for(target, args))
                try:
                    made.record(args)
                    return made
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    if encoder.recorder is None or attempt == 2:
                        raise
                    logger.warning("capture of %s failed, trying once more: %s", made.label, (str(error).splitlines() or [""])[0])
        raise AssertionError("two attempts end in a return or an error")

    def _prove(self, made: Capture, args: Sequence[Any], env: Env) -> Skip | None:
        rows = self.roles.rows(made.env)
        assert rows is not None, "only graphs with a row dimension are padded"
        smaller = smaller_call(args, self.program, self.roles, env, rows)
        if smaller is None:
            return None  # no smaller call exists, so nothing will be padded to this size
        nan = all(s.attention is not None and s.attention.op.isolates_nan for s in self.program.attention_steps)
        with torch.inference_mode(False), torch.no_grad():
            return prove_garbage(self.program, self.roles, made.inputs, smaller[0], smaller[1], made.replay_filled, nan=nan)

    def _calls_for(self, env: Env, args: Sequence[Any]) -> dict[str, Callable[..., Any]]:
        """Statically compiled pieces where `compile_sizes` asks for them."""
        if self.roles.rows(env) not in self._compile_rows:
            return {}
        if env not in self._static_calls:
            from vit_compile.backend.padding import StaticInputs

            calls: dict[str, Callable[..., Any]] = {}
            slots: list[Any] = StaticInputs(self.program, self.roles, env).substitute(args)
            slots += [None] * (self.program.n_slots - len(slots))
            for step in self.program.steps:
                values = [slots[ref.slot] if ref.size is None else ref.size(env) for ref in step.inputs]
                if step.attention is None:
                    assert step.piece is not None, f"{step.name} is neither piece nor attention"
                    calls[step.name] = self.library.specialize(step.piece, values)
                    for slot, value in zip(step.outputs, run_piece(step, values, calls[step.name]), strict=True):
                        slots[slot] = value
                else:
                    self.program.run_step(step, values, slots, env, covering_bounds=True)
            self._static_calls[env] = calls
        return self._static_calls[env]

    def _replay(self, encoder: Encoder, capture: Capture, args: Sequence[Any], env: Env, *, fresh: bool) -> list[Any]:
        recorder = encoder.recorder
        if recorder is None:
            outputs = self._finish(capture.replay(args, env), args, env)
        else:
            with torch.cuda.device(encoder.device):
                recorder.before_replay()
                outputs = self._finish(capture.replay(args, env), args, env)
                recorder.after_replay()
        exact = self.roles.rows(env) == self.roles.rows(capture.env)
        kind = "exact" if exact else "padded"
        counters.add("exact_replays" if exact else "padded_replays")
        if self.mode == "piecewise":
            counters.add("attention_calls_outside_graphs", len(self.program.attention_steps))
        self.report.note_call(kind)
        record_call(CallRecord(kind, self.roles.rows(env), capture.label, None, fresh))
        return outputs

    def _finish(self, values: Sequence[Any], args: Sequence[Any], env: Env) -> list[Any]:
        """Real rows of the outputs, copied unless borrowed."""
        outputs: list[Any] = []
        copy = self.options.outputs == "copy"
        for output, value in zip(self.program.outputs, values, strict=True):
            if output.size is not None:
                outputs.append(output.size(env))
            elif output.slot < 0:
                outputs.append(output.constant)
            elif output.slot < len(args):
                outputs.append(args[output.slot])  # an input handed through: the caller's own tensor
            else:
                real = trim(value, self.program.specs[output.slot].sizes(env))
                outputs.append(real.clone() if copy else real)
        return outputs

    def run_uncaptured(self, args: Sequence[Any], env: Env, skip: Skip) -> list[Any]:
        """Run the compiled pieces without a graph, and count why."""
        if skip.code != "mode-none":  # asked for, so not a fallback
            report_skip(skip, strict=self.options.strict)
        outputs = self.program.run(args, env, calls=self._uncaptured_calls(env, args))
        counters.add("uncaptured_calls")
        counters.add("attention_calls_outside_graphs", len(self.program.attention_steps))
        self.report.note_call("uncaptured", skip)
        record_call(CallRecord("uncaptured", self.roles.rows(env), None, str(skip), False))
        return outputs

    def _uncaptured_calls(self, env: Env, args: Sequence[Any]) -> dict[str, Callable[..., Any]] | None:
        if self.roles.rows(env) in self._compile_rows:
            return self._calls_for(env, args)
        return None

    def prepare(self, args: Sequence[Any], env: Env, rows: int) -> Skip | None:
        """Capture the size `rows` with a call of at most as many rows as data; why it could not be done, or None."""
        if self.never is not None:
            report_skip(self.never, strict=self.options.strict)
            return self.never
        encoder = self._encoder(args)
        with encoder.lock:
            made: Capture | Skip = self._prepare_once(encoder, args, env, rows)
            if isinstance(made, Skip):
                report_skip(made, strict=self.options.strict)
            if isinstance(made, Skip) and made.code == "padding-unsafe":
                self._prepare_once(encoder, args, env, rows)  # padding is off now; the exact size is still worth a graph
        return made if isinstance(made, Skip) else None

    def _prepare_once(self, encoder: Encoder, args: Sequence[Any], env: Env, rows: int) -> Capture | Skip:
        target = self._target(env, rows, pad_segments=self.may_pad)
        if isinstance(target, Skip):
            return target
        held = self.captures.get(target)
        if held is not None and held.weight_pointers == self._weight_pointers(args):
            return held
        return self.capture(encoder, target, args, env)

    def budgets_largest_first(self) -> list[int]:
        """Capture sizes in rows, in the order in which `warmup` makes them."""
        return sorted(self._budgets, reverse=True)


class PlainRunnable:
    """A graph that must not be captured at all: compiled as a whole by the plain compiler, counted at every call."""

    def __init__(self, call: Callable[..., Any], skip: Skip, options: BackendOptions) -> None:
        self.call, self.skip, self.options = call, skip, options
        self.report = Report()

    def __call__(self, *args: Any) -> Any:
        """Outputs of the graph; differentiable where the plain compiler is."""
        report_skip(self.skip, strict=self.options.strict)
        outputs = self.call(*args)
        counters.add("plain_calls")
        self.report.note_call("plain", self.skip)
        record_call(CallRecord("plain", None, None, str(self.skip), False))
        return outputs


class Refusal:
    """Raises the error that was found while compiling, at every call: Dynamo would wrap it in one of its own."""

    def __init__(self, error: VitCompileError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        """Raise a fresh copy of the error."""
        raise type(self.error)(*self.error.args)


def clear() -> None:
    """Drop every capture of every encoder in this process and give their memory back; later calls capture anew."""
    from vit_compile.backend.encoder import encoders

    for encoder in encoders():
        with encoder.lock:
            encoder.clear()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
