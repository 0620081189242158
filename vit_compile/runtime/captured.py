"""The graphs of one encoder, and what is known of them: captured, planned with, checked for being current, dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vit_compile.attention.choice import KernelChoices
from vit_compile.backend.cuda import seconds_captured
from vit_compile.runtime.capture_work import CaptureWork
from vit_compile.runtime.forward import compiled_forward, eager_forward
from vit_compile.runtime.graphs import GraphKey, GraphSet
from vit_compile.runtime.phases import TIMING
from vit_compile.runtime.planner import EagerCost, Planner
from vit_compile.runtime.protocol import SupportsDirectFill
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.runtime.weights import WeightWatch, modules_of, settings_of, tensors_of, train_mode
from vit_compile.stats import Skip, counters, logger, report_skip

NOT_CAPTURED = Skip("not-captured", "capture() did not run since the manager was made or cleared")

RECAPTURES_TRIED_AGAIN = 2
"""Further tries where graphs of replaced weights could not be captured for a cause that may pass. Each delays a call."""
_MAY_PASS = {"capture-failed", "out-of-memory"}


class CapturedEncoder:
    """Every method runs under the manager's lock and on its device."""

    def __init__(self, work: CaptureWork, statistics: EncoderStatistics) -> None:
        model, declaration, config, device = work.model, work.declaration, work.config, work.device
        self.work, self.model, self.declaration, self.config = work, model, declaration, config
        self._statistics = statistics
        if config.mode == "compiled":
            forward = compiled_forward(model, frozenset(declaration.buffer_keys), config.compiler, config.passes)
        else:
            forward = eager_forward(model)
        # What the buffers hold behind the items is zero, so that a graph with room for one segment needs no fence.
        fence_from = 2 if config.isolate else 0
        timer = seconds_captured if device.type == "cuda" else None
        self.kernels = KernelChoices(config.attention, device, timer, fence_from=fence_from, strict=config.strict)
        self.set = GraphSet(model, forward, declaration.out_hidden_size, device, kernels=self.kernels)
        self.planner: Planner | None = None
        """None: nothing is captured."""
        self.idle_planner = self.new_planner()
        """For calls that no graph may serve."""
        self.watch: WeightWatch | None = None
        """What the graphs' weights and modules were at capture."""
        self._eager_costs: dict[str, EagerCost] = {}
        self._why_not = NOT_CAPTURED
        self._recapture_due = False
        self._tries_left = RECAPTURES_TRIED_AGAIN

    # --- life cycle --------------------------------------------------------------------------------------------------

    def capture(self, progress: bool) -> None:
        """See `EncoderCudaGraphManager.capture`."""
        modules = modules_of(self.model)
        if not modules:
            logger.warning("no torch module found in %s: replaced weights will not be noticed", type(self.model).__name__)
        training = train_mode(modules)
        if training is not None:
            self._why_not = Skip("train-mode", f"{training} is in train mode; call eval() before capture()")
            report_skip(self._why_not, strict=self.config.strict)
            return
        keys, settings = self.work.keys(), settings_of(modules)
        eager: dict[str, EagerCost] = {}
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.set.capture(
                    _tracked(keys, progress),
                    self.work.inputs,
                    max_graphs=self.config.max_graphs,
                    max_graph_bytes=self.config.max_graph_bytes,
                    verify=self.config.verify,
                )
                for skip in self.set.skips.values():
                    report_skip(skip, strict=self.config.strict)
                if self.config.packing == "cost":
                    with self.set.phases(TIMING):
                        eager = self.work.time(self.set, modules)
        except BaseException:
            self.set.drop()
            self.set.skips.clear()
            raise
        self.watch = WeightWatch(modules, tensors_of(self.model), settings)
        self._eager_costs = eager
        self.planner = self.new_planner(eager)
        self._count(eager)
        if self.set.graphs:
            self._tries_left = RECAPTURES_TRIED_AGAIN

    def _count(self, eager: Mapping[str, EagerCost]) -> None:
        for key, graph in self.set.graphs.items():
            where = (key.path, key.token_budget, key.axis_keys)
            self._statistics.captured(*where, nbytes=graph.nbytes, seconds=graph.milliseconds / 1e3)
            if graph.predicted_ms is not None:
                eager_ms = eager[key.path](key.token_budget) if key.path in eager else None
                self._statistics.calibrated(*where, graph.predicted_ms, eager_ms)
        for key, skip in self.set.skips.items():
            self._statistics.skipped(key.path, key.token_budget, key.axis_keys, skip)

    def clear(self) -> None:
        """Drop every graph and give its memory back."""
        self.set.drop()
        self.set.skips.clear()
        if self.set.recorder is not None:
            torch.cuda.empty_cache()
        if isinstance(self.model, SupportsDirectFill):
            self.model.forget_encoder_metadata()  # it may depend on weights that are replaced
        self.planner, self.watch, self._why_not = None, None, NOT_CAPTURED
        self._recapture_due = False
        self.idle_planner = self.new_planner()
        self._statistics.cleared()

    def new_planner(self, eager: Mapping[str, EagerCost] | None = None) -> Planner:
        """A planner for the graphs that there are."""
        return Planner(
            self.declaration,
            self.work.ladders,
            {key: graph.time for key, graph in self.set.graphs.items()},
            self.set.skips,
            by_cost=self.config.packing == "cost",
            look_ahead=self.config.look_ahead,
            eager=eager,
        )

    def plan_anew(self) -> None:
        """A graph was refused while it served: no further call is planned with it."""
        if self.planner is not None:
            self.planner = self.new_planner(self._eager_costs)

    # --- is it current? ----------------------------------------------------------------------------------------------

    def stands(self) -> bool:
        """There are graphs, and what their replays read is where it was: a replay does no harm, even if it is in vain."""
        if self.planner is None or self.watch is None or not self.config.enabled:
            return False
        # Without a graph a replay runs the modules, which in train mode may count their calls.
        return not (self.set.recorder is None and self.watch.training()) and not self.watch.moved()

    def is_current(self) -> bool:
        """The modules still hold what the graphs read, unchanged, and are in eval mode."""
        watch = self.watch
        if watch is None or not watch.is_for(modules_of(self.model), tensors_of(self.model)):
            return False
        return not watch.replaced() and not watch.training()

    def ready(self) -> Skip | None:
        """Why no graph may be replayed now, or None. Graphs of replaced weights are captured anew."""
        if not self.config.enabled:
            return Skip("disabled", "EncoderConfig(enabled=False)")
        modules = modules_of(self.model)
        if self.planner is None or self.watch is None:
            if not self._recapture_due or train_mode(modules):
                return self._why_not
        else:
            replaced = not self.watch.is_for(modules, tensors_of(self.model))
            if train_mode(modules) if replaced else self.watch.training():
                return Skip("train-mode", "the encoder is in train mode")
            if not replaced and not self.watch.changed():
                return None
            self.clear()
            self._statistics.recaptured()
            counters.add("recaptures")
        self._recapture_due = True
        self.capture(progress=False)
        self._recapture_due = False
        if self.planner is None:
            self._recapture_due = True  # a part is in train mode, as new layers are at first
            return self._why_not
        return self._try_again()

    def _try_again(self) -> Skip | None:
        """After a recapture without a graph, for a cause that may pass: the next calls try again, a few times."""
        why = next((skip for skip in self.set.skips.values() if skip.code in _MAY_PASS), None)
        if self.set.graphs or why is None or not self._tries_left:
            return None
        left = self._tries_left - 1
        self.clear()
        self._tries_left, self._recapture_due, self._why_not = left, True, why
        return why


def _tracked(keys: list[GraphKey], show: bool) -> Any:
    if not show or not keys:
        return keys
    from rich.console import Console
    from rich.progress import track

    return track(keys, description="capturing graphs", console=Console(stderr=True), transient=True)
