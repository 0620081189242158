"""The captured graphs of one encoder: recorded largest first into one pool, under caps, tried out, timed.

Without CUDA the same objects run the forward on the same static buffers and copy into an output that the next run overwrites,
so that everything but recording is the same everywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vit_compile.attention.choice import KernelChoices
from vit_compile.backend.cuda import Recorder, check_recorded, no_garbage_collection, reserved_bytes, unowned
from vit_compile.backend.proof import bits_equal, difference_over_tolerance
from vit_compile.backend.recording import record, trial
from vit_compile.errors import ProtocolError, first_line
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.graph_config import AxisKeys
from vit_compile.runtime.phases import FIRST_RUNS, KERNELS, RECORDING, TRIALS, WARM_UP, Phases
from vit_compile.runtime.protocol import KeepsTrialData, SupportsEncoderCudaGraph, SupportsLayoutTiming, SupportsPaddingTrial
from vit_compile.runtime.replay_times import FEW_ITEMS, LEAST_MANY_ITEMS, MANY_ITEMS, ReplayTime, through
from vit_compile.stats import Skip, counters, logger

WARMUP_RUNS = 2
TIMED_RUNS = 5
ENOUGH_MS = 60.0
SEES_OTHERS = ("padding-unsafe", "padding-unproved", "input-mutation")
"""Reasons for which a graph is refused that make running items together doubtful."""
MAX_REBUILDS = 4
"""Times that the held graphs are recorded again because a further one was too large; then no further one is tried."""
Forward = Callable[[Mapping[str, Any], str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is captured for."""

    path: str
    token_budget: int
    axis_keys: AxisKeys = ()

    def __str__(self) -> str:
        axes = f" {self.axis_keys}" if self.axis_keys else ""
        return f"{self.path} {self.token_budget} tokens{axes}"


class EncoderGraph:
    """One graph with its buffers. `replay` after the buffers are filled; `output` is valid until another graph replays."""

    def __init__(
        self,
        key: GraphKey,
        forward: Forward,
        inputs: EncoderCudaGraphCaptureInputs,
        width: int,
        recorder: Recorder | None,
        phases: Phases | None = None,
    ) -> None:
        self.key, self.inputs, self.recorder = key, inputs, recorder
        self._forward, self._width = forward, width
        self._phases = Phases(torch.device("cpu")) if phases is None else phases
        self._graph: torch.cuda.CUDAGraph | None = None
        self.output: torch.Tensor = torch.empty(0)
        self.nbytes = inputs.nbytes
        self.milliseconds = 0.0
        """Time that capturing took."""
        self.time: ReplayTime | None = None
        """Of a replay, by its layout; None where it was not measured."""
        self.unseen: set[str] = set()
        """What no real batch has shown yet to be right: "use" at all, "padding" behind the items, "company" of several."""
        self.failed_comparisons = 0

    @property
    def label(self) -> str:
        """For messages."""
        return str(self.key)

    @property
    def predicted_ms(self) -> float | None:
        """Measured milliseconds of a replay with few long items."""
        return None if self.time is None else self.time.ms

    def _run(self) -> torch.Tensor:
        return self._forward(self.inputs.values, self.key.path)

    def record(self, args: Sequence[Any] = ()) -> None:
        """Warm up and record, on what the buffers hold."""
        phases = self._phases
        if self.recorder is None:
            with phases(FIRST_RUNS), no_garbage_collection:
                self.output = self._checked(self._run()).clone()
            return
        with phases(FIRST_RUNS), no_garbage_collection:
            self.recorder.observe(self._run)
        with phases(KERNELS):
            self.recorder.kernels.settle()
        with self.recorder.session(), self.recorder.kernels.active():
            with phases(WARM_UP):
                for _ in range(WARMUP_RUNS if self.recorder.kernels.enabled else WARMUP_RUNS - 1):
                    self._checked(self._run())
            # While it records, torch's allocator gives no cached memory back, and the graph has a pool of its own: what timing
            # and warm-up left in the cache would be missing where memory is scarce.
            torch.cuda.empty_cache()
            before = reserved_bytes(self.recorder.device)
            with phases(RECORDING):
                graph, output = self.recorder.record(self._run)
        self._graph = check_recorded(graph, self.label)
        self.nbytes += max(0, reserved_bytes(self.recorder.device) - before)
        self.output = unowned(output)

    def _checked(self, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor) or output.dim() != 2 or output.shape[1] != self._width:
            found = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise ProtocolError(f"encoder_cudagraph_forward gave {found}: expected a tensor [tokens, {self._width}].")
        expected = self.inputs.output_tokens
        if expected is not None and output.shape[0] != expected:
            raise ProtocolError(f"encoder_cudagraph_forward gave {output.shape[0]} tokens: expected {expected}.")
        return output

    def replay(self) -> torch.Tensor:
        """Run on the buffers as they are: [tokens, width] of the whole budget, in memory that the next replay overwrites."""
        return self.repeat()

    def repeat(self) -> torch.Tensor:
        """The same, to see whether it gives the same again: no request is served by it."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.output.copy_(self._run())
        return self.output


class GraphSet:
    """All graphs of one manager. Every method runs under the manager's lock."""

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        forward: Forward,
        width: int,
        device: torch.device,
        *,
        kernels: KernelChoices | None = None,
    ) -> None:
        self._model, self._forward, self._width, self._device = model, forward, width, device
        self.recorder = Recorder(device) if device.type == "cuda" else None
        if self.recorder is not None and kernels is not None:
            self.recorder.kernels = kernels
        self.phases = Phases(device)
        self.graphs: dict[GraphKey, EncoderGraph] = {}
        self.skips: dict[GraphKey, Skip] = {}

    def is_distrusted(self, path: str) -> bool:
        """Was a graph of this path refused because its items see each other, or might?"""
        return any(key.path == path and skip.code in SEES_OTHERS for key, skip in self.skips.items())

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs."""
        return sum(graph.nbytes for graph in self.graphs.values())

    def capture(
        self,
        keys: Iterable[GraphKey],
        make_inputs: Callable[[GraphKey], EncoderCudaGraphCaptureInputs],
        *,
        max_graphs: int,
        max_graph_bytes: int | None,
        verify: bool,
    ) -> None:
        """Record the graphs for these keys, in this order. What cannot be, or may not be, goes to `skips` with the reason."""
        rebuilds = 0
        for key in keys:
            full = self._no_room(max_graphs, max_graph_bytes)
            if full is None and rebuilds > MAX_REBUILDS:
                full = Skip("max-graph-bytes", f"{key}: nothing larger than {self.nbytes} bytes fits; not tried")
            made = full or self._one(key, make_inputs, verify=verify)
            if isinstance(made, EncoderGraph) and max_graph_bytes is not None and self.nbytes + made.nbytes > max_graph_bytes:
                made = Skip("max-graph-bytes", f"{key} would take {made.nbytes} bytes; max_graph_bytes={max_graph_bytes}")
                rebuilds += bool(self.graphs)
                self._move_to_a_new_pool(make_inputs)
            if isinstance(made, Skip):
                self.skips[key] = made
            else:
                self.graphs[key] = made
                counters.add("captures")
        if not self.graphs:
            self.drop()  # what refused graphs took stays in the pool for as long as there is one

    def _move_to_a_new_pool(self, make_inputs: Callable[[GraphKey], EncoderCudaGraphCaptureInputs]) -> None:
        """Give back a refused graph's memory: it stays in the pool until the pool goes, so all others are recorded again."""
        kept = {key: graph.unseen for key, graph in self.graphs.items()}
        self.drop()
        if self.recorder is not None:
            torch.cuda.empty_cache()
        for key, unseen in kept.items():
            again = self._one(key, make_inputs, verify=False)
            if isinstance(again, Skip):
                self.skips[key] = again
            else:
                again.unseen = unseen
                self.graphs[key] = again

    def _no_room(self, max_graphs: int, max_graph_bytes: int | None) -> Skip | None:
        if len(self.graphs) >= max_graphs:
            return Skip("max-graphs", f"{len(self.graphs)} graphs are held; max_graphs={max_graphs}")
        if max_graph_bytes is not None and self.nbytes >= max_graph_bytes:
            return Skip("max-graph-bytes", f"graphs take {self.nbytes} bytes; max_graph_bytes={max_graph_bytes}")
        return None

    def _one(
        self, key: GraphKey, make_inputs: Callable[[GraphKey], EncoderCudaGraphCaptureInputs], *, verify: bool
    ) -> EncoderGraph | Skip:
        def make() -> EncoderGraph:
            return EncoderGraph(key, self._forward, make_inputs(key), self._width, self.recorder, self.phases)

        made = record(make, (), str(key))
        if isinstance(made, EncoderGraph) and verify:
            with self.phases(TRIALS):
                unsafe = trial(partial(self._try_out, made))
            if self.recorder is not None:
                self.recorder.after_replay()
            return made if unsafe is None else unsafe
        return made

    @torch.no_grad()
    def _try_out(self, graph: EncoderGraph) -> Skip | None:
        """Why a graph may not be used: its forward writes into its inputs, or padding changes real rows."""
        if not isinstance(self._model, SupportsPaddingTrial):
            graph.unseen = {"use", "padding", "company"}
            return _written(graph)
        try:
            unsafe = self._try_padding(self._model, graph)
            shown = self._model.encoder_cudagraph_trial_shows(graph.inputs.state)
        finally:
            self._forget_trial(graph)
        graph.unseen = {"use", "padding", "company"}.difference(shown)
        return unsafe

    def _forget_trial(self, graph: EncoderGraph) -> None:
        if isinstance(self._model, KeepsTrialData):
            self._model.forget_encoder_cudagraph_trial(graph.inputs.state)

    def _try_padding(self, model: SupportsPaddingTrial, graph: EncoderGraph) -> Skip | None:
        """Real rows must be those of each item alone, and different garbage in the padding must leave every bit of them."""
        key, state = graph.key, graph.inputs.state
        tokens = max(1, key.token_budget // 2)
        real = model.fill_encoder_cudagraph_trial(state, key.path, tokens, None)
        written = _written(graph)  # with data: multiplying zeros in place does not show
        if written is not None:
            return written
        want = graph.output[:real].clone()  # of that very replay, which left its inputs as they were
        alone = self._alone(model.encoder_cudagraph_trial_values(state, key.path), key.path)
        if alone is not None and (alone.shape != want.shape or not difference_over_tolerance(want, alone) <= 1):
            return Skip("padding-unsafe", f"{key}: {real} tokens differ between a padded run and one of each item alone")
        try:
            for kind in ("small", "large"):
                model.fill_encoder_cudagraph_trial(state, key.path, tokens, kind)
                if not bits_equal(graph.replay()[:real], want):
                    return Skip("padding-unsafe", f"{key}: {kind} garbage in the padding changed real rows")
        finally:
            model.fill_encoder_cudagraph_trial(state, key.path, tokens, None)
        return None

    def _alone(self, items: Sequence[Mapping[str, Any]], path: str) -> torch.Tensor | None:
        """Features of the items, each by itself and without padding; None where the forward takes no such size."""
        try:
            return torch.cat([self._forward(values, path).clone() for values in items]) if items else None
        except Exception:  # it says nothing about padding
            return None

    @torch.no_grad()
    def time_graphs(self, known: Mapping[str, ReplayTime]) -> None:
        """Measure replays of each graph, in wall milliseconds with synchronisation: what plans are chosen by.

        Args:
            known: times by a graph's label: these are taken, not measured.
        """
        for graph in self.graphs.values():
            time_of = known.get(graph.label)
            graph.time = self._measured(graph) if time_of is None else time_of

    def _measured(self, graph: EncoderGraph) -> ReplayTime:
        """With few long items, and with shorter ones: many where there is room, else one that fills half. The few come last: they
        stay in the buffers, where eager runs are timed on them."""
        try:
            whole = graph.key.token_budget
            short = self._measured_layout(graph, whole, LEAST_MANY_ITEMS, MANY_ITEMS)
            short = short or self._measured_layout(graph, whole // 2, 1, 1)
            few = None if short is None else self._measured_layout(graph, whole, 1, FEW_ITEMS)
            if short is not None and few is not None:
                return through(few, short)
            if isinstance(self._model, SupportsPaddingTrial):
                self._model.fill_encoder_cudagraph_trial(graph.inputs.state, graph.key.path, graph.key.token_budget, None)
            return ReplayTime(least_ms(graph.replay, self._device)[1])
        finally:
            self._forget_trial(graph)

    def _measured_layout(self, graph: EncoderGraph, tokens: int, least: int, most: int) -> ReplayTime | None:
        """With so many items of so many tokens together; None where the model makes no such layout."""
        if not isinstance(self._model, SupportsLayoutTiming) or not tokens:
            return None
        try:
            squares = self._model.fill_encoder_cudagraph_layout(graph.inputs.state, graph.key.path, tokens, least, most)
        except Exception as error:  # examples are there to make plans better: without them there is one time for all layouts
            logger.warning("%s is timed with one layout: %s: %s", graph.label, type(error).__name__, first_line(error))
            return None
        return ReplayTime(least_ms(graph.replay, self._device)[1], 0.0, squares) if squares else None

    def drop(self) -> None:
        """Let go of all graphs, buffers and the pool."""
        if self.recorder is not None:
            torch.cuda.synchronize(self._device)
        self.graphs.clear()
        if self.recorder is not None:
            self.recorder.abandon_pool()


def _written(graph: EncoderGraph) -> Skip | None:
    """The first of its inputs that a replay changes."""
    before = {name: value.clone() for name, value in graph.inputs.values.items() if isinstance(value, torch.Tensor)}
    graph.replay()
    for name, value in before.items():
        if not bits_equal(graph.inputs.values[name], value):
            return Skip("input-mutation", f"{graph.key}: the forward writes into {name}")
    return None


def median_ms(function: Callable[[], object], device: torch.device, runs: int = TIMED_RUNS) -> float:
    """Median wall time of a call in milliseconds, with synchronisation, after one that does not count."""
    return statistics.median(wall for _, wall in timed(function, device, runs))


def least_ms(function: Callable[[], object], device: torch.device, runs: int = TIMED_RUNS) -> tuple[float, float]:
    """(until the call returns, until the device is done), in milliseconds: the least of several calls after one that does not
    count. Other work on a shared device only adds to a call's time, so that the least is what to predict with. Of a long call,
    two are enough."""
    times = timed(function, device, runs, ENOUGH_MS)
    return min(host for host, _ in times), min(wall for _, wall in times)


def timed(
    function: Callable[[], object], device: torch.device, runs: int, enough_ms: float = math.inf
) -> list[tuple[float, float]]:
    """(until the call returns, until the device is done), in milliseconds, of calls that find the device idle, but the first.

    Args:
        function: the call.
        device: where it runs.
        runs: calls that count.
        enough_ms: after so much time two of them are enough.
    """
    times: list[tuple[float, float]] = []
    while len(times) <= runs and (len(times) < 3 or sum(wall for _, wall in times) < enough_ms):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        returned = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(((returned - started) * 1e3, (time.perf_counter() - started) * 1e3))
    return times[1:]
