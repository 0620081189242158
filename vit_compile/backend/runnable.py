"""The function that Dynamo calls: picks a capture by the sizes of a call, makes it on first need, or says why not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from vit_compile.backend.capture import Capture, FullCapture, PiecewiseCapture, size_label
from vit_compile.backend.checks import check_call, device_of
from vit_compile.backend.encoder import Encoder, encoder_of
from vit_compile.backend.padding import StaticInputs, overlaps, padded_env, trim
from vit_compile.backend.pieces import PieceLibrary
from vit_compile.backend.program import Program, run_piece
from vit_compile.backend.proof import guards_at, prove_count, prove_garbage, smaller_call
from vit_compile.backend.recording import record, trial
from vit_compile.backend.report import Report
from vit_compile.backend.roles import RoleTable
from vit_compile.backend.sizes import Env
from vit_compile.options import BackendOptions
from vit_compile.stats import CallRecord, Skip, counters, forget_call, record_call, report_skip

_PLAN_CACHE = 4096


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
        self.lost_weights = False
        """Captures went because the weights that they read are gone; if the graph is called again, it has others."""
        self._recorded_pointers: tuple[int, ...] = ()
        self._budgets = options.budget_rows()
        self._compile_rows = frozenset(options.compile_rows())
        self._plans: dict[Env, Env | Skip] = {}
        self._count_proved = False
        self._static_calls: dict[Env, dict[str, Callable[..., Any]]] = {}
        self._state_lock = threading.Lock()

    def __call__(self, *args: Any) -> list[Any]:
        """Outputs of the graph, a list; tensors belong to the caller unless `outputs="borrow"`."""
        forget_call()  # a call that raises must not leave an older call's record
        env = self.program.table.read(args)
        checks = self.options.checks
        check_call(self.roles, args, env, read_device=checks == "full", padded=checks == "padded")
        if listeners.calls is not None:
            listeners.calls.append((self, list(args), env))
            return self.program.run(args, env)
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
        if not self._budgets:
            return self._target(env, rows if rows is not None else 0, pad_segments=False)
        if rows is None:
            traced = self.roles.static_rows
            if traced > self._budgets[-1]:
                return Skip("too-large", f"{traced} rows; the largest capture size has {self._budgets[-1]}")
            return self._target(env, 0, pad_segments=False)
        larger = [budget for budget in self._budgets if budget >= rows]
        if not larger:
            return Skip("too-large", f"{rows} rows; the largest capture size has {self._budgets[-1]}")
        if rows not in self._budgets and not self.may_pad:
            if self.options.padding == "exact":
                return Skip("not-a-budget", f"{rows} rows; capture sizes in rows: {self._budgets}")
            return self.roles.conflict or self.unsafe or Skip("padding-unproved", f"{rows} rows")
        return self._target(env, min(larger), pad_segments=self.may_pad)

    def _target(self, env: Env, rows: int, *, pad_segments: bool) -> Env | Skip:
        # Between captured pieces attention gets the call's own bound; inside one graph the capture's.
        tight = self.mode == "full"
        target = padded_env(self.program, self.roles, env, rows, pad_segments=pad_segments, tight_bounds=tight)
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
                    for index in self.program.static_args[:1]:
                        # Dynamo may keep a trace for as long as the code lives; its captures go with the weights.
                        weakref.finalize(args[index], _forget, weakref.ref(self)).atexit = False
                    self.encoder = encoder
        return self.encoder

    def _find_or_capture(self, encoder: Encoder, target: Env, args: Sequence[Any], env: Env) -> tuple[Capture | Skip, bool]:
        """The capture for a plan, made now if need be, and whether it is new."""
        made, fresh = self._held_or_new(encoder, target, args, env)
        if isinstance(made, Skip) and made is self.unsafe:
            exact = self.plan(env)  # padding is off now, so this is the exact size or a skip
            if isinstance(exact, Skip) or exact == target:
                return (exact if isinstance(exact, Skip) else made), False
            report_skip(made, strict=self.options.strict)
            return self._find_or_capture(encoder, exact, args, env)
        return made, fresh

    def _held_or_new(self, encoder: Encoder, target: Env, args: Sequence[Any], env: Env) -> tuple[Capture | Skip, bool]:
        """A held capture that can serve `target`, else a new one, and whether it is new."""
        pointers = self._weight_pointers(args)
        stale = bool(self.captures) and pointers != self._recorded_pointers
        if stale or self.lost_weights:
            encoder.drop(self, list(self.captures))
            self.lost_weights = False
            counters.add("recaptures")
        capture = self._serving(target)
        if capture is not None:
            return capture, False
        made = self.capture(encoder, target, args, env)
        return made, not isinstance(made, Skip)

    def _serving(self, target: Env) -> Capture | None:
        """The held capture for a plan: this very one, else the one with the fewest spare segments and tightest bound."""
        capture = self.captures.get(target)
        if capture is not None:
            return capture
        loose = self.roles.bound_symbols | (self.roles.segment_symbols.keys() if self.may_pad else frozenset())
        fitting = [env for env in self.captures if _covers(env, target, loose)]
        return self.captures[min(fitting, key=sum)] if fitting else None

    def _weight_pointers(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple([args[i].data_ptr() for i in self.program.static_args])

    def capture(self, encoder: Encoder, target: Env, args: Sequence[Any], env: Env) -> Capture | Skip:
        """Make and prove the capture for `target`, with a call's arguments as data. `encoder.lock` is held."""
        if target in self.failures:
            return self.failures[target]
        full = self._make_room(encoder, target)
        if full is not None:
            return full
        if self.may_pad:
            unsafe = self._prove_count(args, env)
            if unsafe is not None:
                return self._padding_is_off(unsafe)
        encoder.start_afresh_if_empty()
        made = self._record(encoder, target, args)
        if isinstance(made, Skip):
            self.failures[target] = made
            return made
        if self.may_pad:
            unsafe = self._prove_garbage(made, args, env)
            if encoder.recorder is not None:
                encoder.recorder.after_replay()  # the trial ran replays on this stream, outside of `_replay`
            if unsafe is not None:
                return self._padding_is_off(unsafe)
        self._recorded_pointers = self._weight_pointers(args)
        self.captures[target] = made
        counters.add("captures")
        self.report.captures.append(f"{made.label}: {made.nbytes} bytes, {made.milliseconds:.0f} ms")
        if self.report.on_change is not None:
            self.report.on_change()
        return made

    @property
    def _kind(self) -> type[Capture]:
        return FullCapture if self.mode == "full" else PiecewiseCapture

    def _make_room(self, encoder: Encoder, target: Env) -> Skip | None:
        """Why no further capture is allowed, or None. Captures that a new one makes useless go first."""
        bounds = self.roles.bound_symbols
        encoder.drop(self, [env for env in self.captures if env != target and _covers(target, env, bounds)])
        full = encoder.room_for_one_more(self.options.max_graphs, self.options.max_graph_bytes)
        if full is not None and self._budgets and self.roles.row_symbol >= 0:
            # torch.compile traces the first size statically; that capture is worth less than a budget's.
            for owner in list(encoder.owners):
                if isinstance(owner, Runnable) and owner.roles.row_symbol < 0 and owner.roles.static_rows > 1:
                    encoder.drop(owner, list(owner.captures))
            full = encoder.room_for_one_more(self.options.max_graphs, self.options.max_graph_bytes)
        return full

    def _padding_is_off(self, skip: Skip) -> Skip:
        self.unsafe = skip
        self._plans.clear()
        return skip

    def _record(self, encoder: Encoder, target: Env, args: Sequence[Any]) -> Capture | Skip:
        def make() -> Capture:
            return self._kind(self.program, self.roles, target, encoder.recorder, self._calls_for(target, args))

        encoder.use_attention(self.options.attention, strict=self.options.strict)
        made = record(make, args, size_label(self.program, self.roles, target))
        cap = self.options.max_graph_bytes
        if isinstance(made, Capture) and cap is not None and encoder.nbytes + made.nbytes > cap:
            return Skip("max-graph-bytes", f"{made.label} would take {made.nbytes} bytes more; max_graph_bytes={cap}")
        return made

    def _prove_count(self, args: Sequence[Any], env: Env) -> Skip | None:
        """The proof that is made once for a graph."""
        if self._count_proved:
            return None
        rows, largest = self.roles.rows(env), self._budgets[-1]
        if rows is not None and 2 * rows > largest:  # the trial doubles the rows: stay within what the user budgeted
            args, env = smaller_call(args, self.program, self.roles, env, largest) or (args, env)
        with torch.inference_mode(False), torch.no_grad():
            unsafe = trial(lambda: prove_count(self.program, self.roles, args, env, self._kind))
        self._count_proved = unsafe is None
        return unsafe

    def _prove_garbage(self, made: Capture, args: Sequence[Any], env: Env) -> Skip | None:
        """The proof that is made for every capture."""
        rows = self.roles.rows(made.env)
        assert rows is not None, "only graphs with a row dimension are padded"
        smaller = smaller_call(args, self.program, self.roles, env, rows)
        if smaller is None:
            return None  # no legal size is smaller, so nothing will ever be padded to this one
        nan = all(s.attention is not None and s.attention.op.isolates_nan for s in self.program.attention_steps)
        with torch.inference_mode(False), torch.no_grad():
            return trial(lambda: prove_garbage(self.program, self.roles, made, smaller[0], smaller[1], nan=nan))

    def _calls_for(self, env: Env, args: Sequence[Any]) -> dict[str, Callable[..., Any]]:
        """Statically compiled pieces where `compile_sizes` asks for them."""
        if self.roles.rows(env) not in self._compile_rows:
            return {}
        if env not in self._static_calls:
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
                try:
                    outputs = self._finish(capture.replay(args, env), args, env)
                finally:
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

    def prepare_as_seen(self, args: Sequence[Any], env: Env) -> Skip | None:
        """Capture what this very call would use; why it could not be done, or None."""
        target = self.plan(env)
        if not isinstance(target, Skip):
            encoder = self._encoder(args)
            with encoder.lock:
                found, _ = self._find_or_capture(encoder, target, args, env)
            target = found if isinstance(found, Skip) else target
        if not isinstance(target, Skip):
            return None
        if target.code != "mode-none":
            report_skip(target, strict=self.options.strict)
        return target

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
            if isinstance(made, Skip) and made is self.unsafe:
                self._prepare_once(encoder, args, env, rows)  # padding is off now; the exact size is still worth a graph
        return made if isinstance(made, Skip) else None

    def _prepare_once(self, encoder: Encoder, args: Sequence[Any], env: Env, rows: int) -> Capture | Skip:
        target = self._target(env, rows, pad_segments=self.may_pad)
        if isinstance(target, Skip):
            return target
        return self._held_or_new(encoder, target, args, env)[0]

    def budgets_largest_first(self) -> list[int]:
        """Capture sizes in rows, in the order in which `warmup` makes them."""
        return sorted(self._budgets, reverse=True)


def _covers(have: Env, need: Env, loose: Collection[int]) -> bool:
    """Are two environments equal, but for `loose` symbols (segments, bounds), of which `have` has no less?"""
    return all(h >= n if i in loose else h == n for i, (h, n) in enumerate(zip(have, need, strict=True)))


def _forget(runnable: weakref.ref[Runnable]) -> None:
    """The weights of a graph are gone: so are its captures."""
    owner = runnable()
    if owner is not None:
        owner.lost_weights = bool(owner.captures)
        owner.captures.clear()
        owner.failures.clear()
        owner.encoder = None  # and its pool; a call with other weights finds another


def clear() -> None:
    """Drop every capture of every encoder in this process and give their memory back; later calls capture anew."""
    from vit_compile.backend.encoder import encoders

    for encoder in encoders():
        with encoder.lock:
            encoder.clear()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
