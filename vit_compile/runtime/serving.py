"""Serving items from the graphs of this process: replays ahead of the checks where nothing speaks against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vit_compile.runtime.batches import BatchRunner
from vit_compile.runtime.captured import CapturedEncoder
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.planner import PlannedBatch
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.stats import Skip, skip_error

Plan = Sequence[PlannedBatch]


class GraphServer:
    """Every method runs under the manager's lock and on its device.

    Args:
        captured: the graphs.
        statistics: where replays and eager runs are counted.
        may_borrow: features may be views of graph memory, if one replay made all of a call.
    """

    def __init__(self, captured: CapturedEncoder, statistics: EncoderStatistics, *, may_borrow: bool) -> None:
        self._captured, self._may_borrow = captured, may_borrow
        self.runner = BatchRunner(captured, statistics)
        self._was_changed = False
        """The call before found something that spoke against the graphs."""

    def features(
        self, request: Mapping[str, Any], specs: Sequence[EncoderItemSpec], indices: Sequence[int]
    ) -> list[torch.Tensor]:
        """Features of the items with these indices, at least one, in their order."""
        captured, wanted = self._captured, [specs[index] for index in indices]
        planner = captured.planner
        plan = None
        if planner is not None and not self._was_changed and captured.stands():
            plan = planner.plan(wanted)
            features = self._ahead(request, specs, indices, plan) if self.runner.only_replays(plan) else None
            if features is not None:
                return features
        reason = captured.ready()
        self._was_changed = reason is not None
        current = captured.idle_planner if captured.planner is None or reason is not None else captured.planner
        if plan is None or current is not planner:
            plan = current.plan(wanted)
        self._refuse_eager(plan, reason)
        try:
            return self._run(request, specs, indices, plan, reason)
        finally:
            self.runner.counted()

    def _ahead(
        self, request: Mapping[str, Any], specs: Sequence[EncoderItemSpec], indices: Sequence[int], plan: Plan
    ) -> list[torch.Tensor] | None:
        """Features by replays, launched before the weights are looked at, so that the device computes meanwhile.

        What the graphs read is where it was, as old memory may have been given back. Whether the modules still hold it is seen
        afterwards: if not, None, and nothing counts.
        """
        watch = self._captured.watch

        def valid() -> bool:
            return self._captured.watch is watch and self._captured.is_current()

        features, right = None, False
        try:
            features = self._run(request, specs, indices, plan, None)
            right = valid()
        except Exception:
            right = valid()
            if right:  # else it may come from what the model is not any more
                raise
        finally:
            self.runner.counted(happened=right)
        return features if right else None

    def _run(
        self,
        request: Mapping[str, Any],
        specs: Sequence[EncoderItemSpec],
        indices: Sequence[int],
        plan: Plan,
        reason: Skip | None,
    ) -> list[torch.Tensor]:
        recorder = self._captured.set.recorder
        if recorder is not None:
            recorder.before_replay()
        features: list[torch.Tensor | None] = [None] * len(indices)
        may_borrow = self._may_borrow and len(plan) == 1
        try:
            for batch in plan:
                chosen = [indices[position] for position in batch.indices]
                made = self.runner.run(request, specs, chosen, batch, reason, may_borrow=may_borrow)
                for position, feature in zip(batch.indices, made, strict=True):
                    features[position] = feature
        finally:
            if recorder is not None:
                recorder.after_replay()
            if self.runner.refused:
                self._captured.plan_anew()
            self.runner.refused = False
        done = [feature for feature in features if feature is not None]
        assert len(done) == len(indices), "every item is in exactly one batch"
        return done

    def _refuse_eager(self, plan: Plan, reason: Skip | None) -> None:
        """Under `strict` nothing runs eagerly, and nothing runs at all before that is known."""
        if self._captured.config.strict:
            for batch in plan:
                for choice in batch.choices:
                    skip = reason if choice is not None and reason is not None else choice
                    if isinstance(skip, Skip):
                        raise skip_error(skip)
