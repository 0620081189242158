"""`EncoderCudaGraphManager`: from the images of a request to their features, by replays of captured graphs.

Guarantees:
- features come back in input order, in memory that no later call touches (`outputs="copy"`);
- what has no graph runs eagerly and is counted with a reason, while its neighbours replay;
- a call is checked before any work; after an error the manager is as it was;
- any thread may call any method; a replay runs on the caller's stream, ordered after the one before;
- no call waits for the device, if sizes come from the host and data from the device (data in pinned host memory is waited for).

Gradients are not recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from vit_compile.attention.choice import KernelChoices
from vit_compile.backend.cuda import seconds_captured
from vit_compile.errors import InputError, ModalityError, OptionError, ProtocolError
from vit_compile.runtime.batches import NOT_CAPTURED, BatchRunner
from vit_compile.runtime.capture_inputs import BudgetGraphMetadata
from vit_compile.runtime.capture_work import CaptureWork
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.data_parallel import DataParallel
from vit_compile.runtime.forward import compiled_forward, eager_forward
from vit_compile.runtime.graphs import GraphKey, GraphSet
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.ladders import resolve
from vit_compile.runtime.phases import TIMING
from vit_compile.runtime.planner import EagerCost, PlannedBatch, Planner
from vit_compile.runtime.protocol import SupportsDirectFill, SupportsEncoderCudaGraph
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.runtime.table import EncoderTable
from vit_compile.runtime.table_encoder import TableEncoder
from vit_compile.runtime.weights import WeightWatch, modules_of, settings_of, tensors_of, train_mode
from vit_compile.stats import Skip, counters, logger, report_skip, skip_error


class EncoderCudaGraphManager:
    """Captures a vision encoder at its token budgets and serves requests from the graphs.

    Args:
        model: a `SupportsEncoderCudaGraph`, or an `EncoderTable`.
        config: None means all defaults.
        device: where the encoder runs.
        dtype: of its buffers; inputs of another dtype are converted only where that loses nothing. With a group also of the
            features.
        group: a process group over whose ranks the items of each call are spread. Every rank calls `execute` with the same
            request. None: this process alone.

    The constructor does no GPU work; `capture()` does.

    Raises:
        ProtocolError: the model lacks a method, or declares something impossible.
        BudgetError, OptionError: the configuration does not fit the model.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph | EncoderTable,
        config: EncoderConfig | None = None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device, self.dtype = _usable(device, dtype), dtype
        self.config = EncoderConfig() if config is None else config
        if not isinstance(self.config, EncoderConfig):
            raise OptionError(
                f"config is {type(config).__name__}: expected an EncoderConfig; EncoderConfig.from_dict takes dicts."
            )
        self.model = TableEncoder(model, device=self.device, dtype=dtype) if isinstance(model, EncoderTable) else _checked(model)
        self.declaration = self.model.get_encoder_cudagraph_config()
        self.ladders = resolve(self.config, self.declaration, self.model.get_encoder_cudagraph_budget_range())
        self._work = CaptureWork(self.model, self.declaration, self.ladders, self.config, self.device, dtype)
        self._direct = self.model if isinstance(self.model, SupportsDirectFill) else None
        self._lock = threading.RLock()
        self._statistics = EncoderStatistics(self.config.log_every)
        if self.config.mode == "compiled":
            forward = compiled_forward(
                self.model, frozenset(self.declaration.buffer_keys), self.config.compiler, self.config.passes
            )
        else:
            forward = eager_forward(self.model)
        # What the buffers hold behind the items is zero, so that a graph with room for one segment needs no fence.
        fence_from = 2 if self.config.isolate else 0
        timer = seconds_captured if self.device.type == "cuda" else None
        self._kernels = KernelChoices(self.config.attention, self.device, timer, fence_from=fence_from, strict=self.config.strict)
        width = self.declaration.out_hidden_size
        self._set = GraphSet(self.model, forward, width, self.device, kernels=self._kernels)
        self._runner = BatchRunner(self.model, self.declaration, self._set, self._statistics, strict=self.config.strict)
        self._paths = tuple(self.declaration.paths)
        self._watch: WeightWatch | None = None
        self._planner: Planner | None = None
        self._eager_costs: dict[str, EagerCost] = {}
        self._uncaptured = NOT_CAPTURED
        self._recapture_due = False
        self._was_changed = False
        """The call before found something that spoke against the graphs."""
        self._idle_planner = self._new_planner()
        self._parallel: DataParallel | None = None
        if group is not None:
            self._parallel = DataParallel(group, device=self.device, dtype=dtype, width=self.declaration.out_hidden_size)

    # --- life cycle --------------------------------------------------------------------------------------------------

    def capture(self, *, progress: bool = False) -> None:
        """Capture every graph, largest first, and time them. Does nothing if that was done.

        Args:
            progress: show a progress bar on stderr.

        What cannot be captured is left out with the reason (`snapshot()["not_captured"]`), and everything else works.

        Raises:
            SkipError: something could not be captured, and `strict=True`.
            ProtocolError: the model's inputs or forward are not what the contract says.
        """
        with self._lock:
            if self._planner is None and self.config.enabled and self.declaration.refusal is None:
                with self._on_device():
                    self._capture(progress)

    def _capture(self, progress: bool) -> None:
        modules = modules_of(self.model)
        if not modules:
            logger.warning("no torch module found in %s: replaced weights will not be noticed", type(self.model).__name__)
        training = train_mode(modules)
        if training is not None:
            self._uncaptured = Skip("train-mode", f"{training} is in train mode; call eval() before capture()")
            report_skip(self._uncaptured, strict=self.config.strict)
            return
        keys, settings = self._work.keys(), settings_of(modules)
        eager: dict[str, EagerCost] = {}
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._set.capture(
                    _tracked(keys, progress),
                    self._work.inputs,
                    max_graphs=self.config.max_graphs,
                    max_graph_bytes=self.config.max_graph_bytes,
                    verify=self.config.verify,
                )
                if self.config.packing == "cost":
                    with self._set.phases(TIMING):
                        eager = self._work.time(self._set, modules)
        except BaseException:
            self._set.drop()
            self._set.skips.clear()
            raise
        self._watch = self._runner.watch = WeightWatch(modules, tensors_of(self.model), settings)
        self._eager_costs = eager
        self._planner = self._new_planner(eager)
        for key, graph in self._set.graphs.items():
            where = (key.path, key.token_budget, key.axis_keys)
            self._statistics.captured(*where, nbytes=graph.nbytes, seconds=graph.milliseconds / 1e3)
            if graph.predicted_ms is not None:
                eager_ms = eager[key.path](key.token_budget) if key.path in eager else None
                self._statistics.calibrated(*where, graph.predicted_ms, eager_ms)
        for key, skip in self._set.skips.items():
            self._statistics.skipped(key.path, key.token_budget, key.axis_keys, skip)
            report_skip(skip, strict=self.config.strict)

    def _new_planner(self, eager: Mapping[str, EagerCost] | None = None) -> Planner:
        return Planner(
            self.declaration,
            self.ladders,
            {key: graph.time for key, graph in self._set.graphs.items()},
            self._set.skips,
            by_cost=self.config.packing == "cost",
            look_ahead=self.config.look_ahead,
            eager=eager,
        )

    def clear(self) -> None:
        """Drop every graph and give its memory back. Calls run eagerly until the next `capture()`."""
        with self._lock:
            with self._on_device():
                self._set.drop()
                self._set.skips.clear()
                if self._set.recorder is not None:
                    torch.cuda.empty_cache()
            if self._direct is not None:
                self._direct.forget_encoder_metadata()  # it may depend on weights that are replaced
            self._planner, self._uncaptured = None, NOT_CAPTURED
            self._watch = self._runner.watch = None
            self._recapture_due = False
            self._idle_planner = self._new_planner()
            self._statistics.cleared()

    def __enter__(self) -> EncoderCudaGraphManager:
        """Captures."""
        try:
            self.capture()
        except BaseException:
            self.clear()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Clears."""
        self.clear()

    # --- serving -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Features of every item of a request.

        Args:
            mm_kwargs: the inputs of one or more modalities, as the model's processor makes them. They are only read, and may
                be overwritten by later work on the current stream.

        Returns:
            One tensor [tokens, out_hidden_size] for each item, in input order, modality by modality where there are
            several (in the order of the declaration). Owned by the caller; those of one batch are views of one copy, so
            clone what is kept long. With `outputs="borrow"`, and where one replay served the call, they are views of graph
            memory that are valid until the next call. No items: an empty list.

        Raises:
            InputError, GridError: the request is wrong; nothing ran.
            ModalityError: the model does not encode this, or nothing at all.
            SkipError: something would run eagerly, and `strict=True`.
            ParallelError: another rank of the group failed.
        """
        started = time.perf_counter()
        try:
            request, specs = self._parsed(mm_kwargs)
        except BaseException:
            if self._parallel is not None:
                self._parallel.report_failure()
            raise
        if self._parallel is None:
            mine: Sequence[int] = range(len(specs))
            features = self._local(request, specs, mine)
        else:  # also without items: every rank counts its calls, so that one that fell behind is noticed
            taken: list[int] = []

            def run_local(indices: Sequence[int]) -> list[torch.Tensor]:
                taken[:] = indices
                return self._local(request, specs, indices)

            features = self._parallel.execute([spec.input_size for spec in specs], run_local)
            mine = taken
        if specs:
            self._statistics.finished(len(mine), time.perf_counter() - started)
        return features

    def _parsed(self, mm_kwargs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[EncoderItemSpec]]:
        """The request, checked, and the sizes of its items."""
        if self.declaration.refusal is not None:
            raise ModalityError(f"this model is not served: {self.declaration.refusal}")
        if not isinstance(mm_kwargs, Mapping):
            raise InputError(f"the request is {type(mm_kwargs).__name__}: expected a dict of inputs by name.")
        with self._lock:
            request = mm_kwargs if self._direct is None else self._direct.parse_encoder_request(mm_kwargs)
            specs = self.model.get_encoder_cudagraph_item_specs(request)
        if not isinstance(specs, Sequence):
            raise ProtocolError(f"get_encoder_cudagraph_item_specs gave {type(specs).__name__}: expected a list.")
        return request, specs

    def _local(self, request: Mapping[str, Any], specs: Sequence[EncoderItemSpec], indices: Sequence[int]) -> list[torch.Tensor]:
        """Features of these items, in their order, from this process's graphs."""
        if not indices:
            return []
        with self._lock, self._on_device():
            planner, watch, wanted = self._planner, self._watch, [specs[index] for index in indices]
            plan = None
            if planner is not None and watch is not None and self._may_run_ahead(watch):
                plan = planner.plan(wanted)
                features = self._ahead(request, specs, indices, plan, watch) if self._runner.only_replays(plan) else None
                if features is not None:
                    return features
            reason = self._ready()
            self._was_changed = reason is not None
            current = self._idle_planner if self._planner is None or reason is not None else self._planner
            if plan is None or current is not planner:
                plan = current.plan(wanted)
            self._refuse_eager(plan, reason)
            try:
                return self._run(request, specs, indices, plan, reason)
            finally:
                self._runner.counted()

    def _may_run_ahead(self, watch: WeightWatch) -> bool:
        """What a replay reads is where it was, and nothing speaks against the graphs so far."""
        if not self.config.enabled or self._was_changed:
            return False
        # Without a graph a replay runs the modules, which in train mode may count their calls.
        return not (self._set.recorder is None and watch.training()) and not watch.moved()

    def _ahead(
        self,
        request: Mapping[str, Any],
        specs: Sequence[EncoderItemSpec],
        indices: Sequence[int],
        plan: Sequence[PlannedBatch],
        watch: WeightWatch,
    ) -> list[torch.Tensor] | None:
        """Features by replays, launched before the weights are looked at, so that the device computes meanwhile.

        What the graphs read is where it was, as old memory may have been given back. Whether the modules still hold it is seen
        afterwards: if not, None, and nothing counts.
        """

        def valid() -> bool:
            modules = modules_of(self.model)
            return watch.is_for(modules, tensors_of(self.model)) and not watch.replaced() and not watch.training()

        features, right = None, False
        try:
            features = self._run(request, specs, indices, plan, None)
            right = valid()
        except Exception:
            right = valid()
            if right:  # else it may come from what the model is not any more
                raise
        finally:
            self._runner.counted(happened=right)
        return features if right else None

    def _run(
        self,
        request: Mapping[str, Any],
        specs: Sequence[EncoderItemSpec],
        indices: Sequence[int],
        plan: Sequence[PlannedBatch],
        reason: Skip | None,
    ) -> list[torch.Tensor]:
        recorder = self._set.recorder
        if recorder is not None:
            recorder.before_replay()
        features: list[torch.Tensor | None] = [None] * len(indices)
        may_borrow = self.config.outputs == "borrow" and self._parallel is None
        try:
            for batch in plan:
                chosen = [indices[position] for position in batch.indices]
                made = self._runner.run(request, specs, chosen, batch, reason, may_borrow=may_borrow and len(plan) == 1)
                for position, feature in zip(batch.indices, made, strict=True):
                    features[position] = feature
        finally:
            if recorder is not None:
                recorder.after_replay()
            if self._runner.refused and self._planner is not None:
                self._planner = self._new_planner(self._eager_costs)
            self._runner.refused = False
        done = [feature for feature in features if feature is not None]
        assert len(done) == len(indices), "every item is in exactly one batch"
        return done

    def _ready(self) -> Skip | None:
        """Why no graph may be replayed now, or None. Graphs of replaced weights are captured anew."""
        if not self.config.enabled:
            return Skip("disabled", "EncoderConfig(enabled=False)")
        modules = modules_of(self.model)
        if self._planner is None or self._watch is None:
            if not self._recapture_due or train_mode(modules):
                return self._uncaptured
        else:
            replaced = not self._watch.is_for(modules, tensors_of(self.model))
            if train_mode(modules) if replaced else self._watch.training():
                return Skip("train-mode", "the encoder is in train mode")
            if not replaced and not self._watch.changed():
                return None
            self.clear()
            self._statistics.recaptured()
            counters.add("recaptures")
        self._recapture_due = True
        self._capture(progress=False)
        self._recapture_due = False
        if self._planner is None:
            self._recapture_due = True  # a part is in train mode, as new layers are at first
            return self._uncaptured
        return None

    def _refuse_eager(self, plan: Sequence[PlannedBatch], reason: Skip | None) -> None:
        """Under `strict` nothing runs eagerly, and nothing runs at all before that is known."""
        if self.config.strict:
            for batch in plan:
                for choice in batch.choices:
                    skip = reason if choice is not None and reason is not None else choice
                    if isinstance(skip, Skip):
                        raise skip_error(skip)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # --- what there is -----------------------------------------------------------------------------------------------

    def supports_modality(self, modality: str) -> bool:
        """Does the model encode this ("image", "video")? False for all where the model is refused."""
        return self.declaration.refusal is None and modality in self.declaration.modalities

    def is_captured(self) -> bool:
        """Did `capture()` run, with a graph to show for it?"""
        with self._lock:
            return self._planner is not None and bool(self._set.graphs)

    def get_num_graphs_to_capture(self) -> int:
        """How many graphs `capture()` will try to make."""
        wanted = self.config.enabled and self.declaration.refusal is None
        return min(len(self._work.keys()), self.config.max_graphs) if wanted else 0

    def graphs(self) -> tuple[BudgetGraphMetadata, ...]:
        """The captured graphs, in the order of capture."""
        with self._lock:
            rows = {(g["path"], g["token_budget"], tuple(g["axis_keys"])): g for g in self.snapshot()["graphs"]}
            return tuple(
                BudgetGraphMetadata(
                    path=key.path,
                    token_budget=key.token_budget,
                    max_items=self.ladders.max_items,
                    max_frames=self.ladders.max_frames,
                    axis_keys=key.axis_keys,
                    nbytes=graph.nbytes,
                    capture_seconds=graph.milliseconds / 1e3,
                    predicted_ms=graph.predicted_ms,
                    replays=rows[key.path, key.token_budget, tuple(map(str, key.axis_keys))]["replays"],
                    buffers={
                        name: tuple(value.shape)
                        for name, value in graph.inputs.values.items()
                        if name in self.declaration.buffer_keys
                    },
                )
                for key, graph in self._set.graphs.items()
            )

    def get_cumulative_stats(self) -> dict[str, Any]:
        """`graph_hits`, `graph_misses`, `hit_rate`, `num_budgets`, `token_budgets` since the manager was made."""
        budgets = sorted({budget for ladder in self.ladders.paths.values() for budget in ladder if budget})
        return self._statistics.cumulative(budgets)

    def snapshot(self) -> dict[str, Any]:
        """Everything that is counted, as a plain dict; see `EncoderStatistics.snapshot`.

        Also `attention`: the kernel of each attention call in graphs, with times and refusals (`KernelChoices.rows`), and
        `phase_seconds`: where the time of all captures went (`phases.PHASES`).
        """
        return {
            **self._statistics.snapshot(),
            "attention": self._kernels.rows(),
            "phase_seconds": dict(self._set.phases.seconds),
        }


def _usable(device: torch.device | str, dtype: object) -> torch.device:
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device={str(found)!r}, but torch sees no CUDA device here.")
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: expected a torch.dtype, such as torch.bfloat16.")
    return found


def _checked(model: object) -> SupportsEncoderCudaGraph:
    if isinstance(model, SupportsEncoderCudaGraph):
        return model
    methods = [name for name in vars(SupportsEncoderCudaGraph) if "encoder" in name]
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    raise ProtocolError(f"{type(model).__name__} is no SupportsEncoderCudaGraph: it lacks {', '.join(missing)}.")


def _tracked(keys: list[GraphKey], show: bool) -> Any:
    if not show or not keys:
        return keys
    from rich.console import Console
    from rich.progress import track

    return track(keys, description="capturing graphs", console=Console(stderr=True), transient=True)
