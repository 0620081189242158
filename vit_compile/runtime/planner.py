"""From item sizes to batches with their graphs: packing over what is captured, priced by what was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vit_compile.errors import ProtocolError
from vit_compile.planning import cost_plans, packing
from vit_compile.runtime.graph_config import AxisKeys, EncoderCudaGraphConfig
from vit_compile.runtime.graphs import SEES_OTHERS, GraphKey
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.ladders import Ladders
from vit_compile.runtime.replay_times import ReplayTime, candidates, squares_of
from vit_compile.stats import Skip

_CACHED_PLANS = 4096
_CACHED_PRICES = 1 << 16
_UNKNOWN_EAGER_FACTOR = 1e6
"""Where nothing was measured a graph costs its tokens, and eager is the last resort."""

EAGER_MARGIN = 1.2
"""How much dearer than measured eager runs are taken to be: a graph is only left for a clear gain, as times are measured while
others may use the device, and an eager run holds up the host besides."""

Choice: TypeAlias = GraphKey | Skip | None
"""On one path: the graph to replay, why the batch runs eagerly, or None where it has nothing there."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Items that run together, and how on each path."""

    indices: tuple[int, ...]
    """Positions among the specs that were planned, ascending: so that neighbours lie together, and a request that keeps its
    modalities apart has the same order."""
    choices: tuple[Choice, ...]
    tokens: tuple[int, ...]
    """Output tokens on each path."""


@dataclass(frozen=True, slots=True)
class EagerCost:
    """Predicted milliseconds of an eager run on one path: a fixed part, one per token, and one for squares, but never below
    `least_ms`."""

    fixed_ms: float
    ms_per_token: float
    least_ms: float = 0.0
    """What the host needs to launch the kernels, whatever their sizes."""
    ms_per_square: float = 0.0
    """Of what a batch has over, or lacks of, the squares of two equal items (`replay_times`), on which runs were timed."""

    def __call__(self, tokens: int, squares: int | None = None) -> float:
        """Milliseconds for so many output tokens; of two equal items where `squares` is None."""
        further = 0 if squares is None else squares - tokens * tokens // 2
        return max(self.least_ms, self.fixed_ms + self.ms_per_token * tokens + self.ms_per_square * further)


class Planner:
    """Plans over one state of the graph set; made anew when that changes. Plans are cached by the specs."""

    def __init__(
        self,
        declaration: EncoderCudaGraphConfig,
        ladders: Ladders,
        graphs: Mapping[GraphKey, ReplayTime | None],
        skips: Mapping[GraphKey, Skip],
        *,
        by_cost: bool,
        look_ahead: bool,
        eager: Mapping[str, EagerCost] | None = None,
    ) -> None:
        self._declaration, self._skips = declaration, skips
        self._paths = tuple(declaration.paths)
        self._by_cost, self._look_ahead = by_cost, look_ahead
        self._eager = eager or {}
        self._steps: dict[tuple[str, AxisKeys], list[int]] = {}
        self._candidates: dict[tuple[str, AxisKeys], list[list[tuple[int, ReplayTime]]]] = {}
        for key in sorted(graphs, key=lambda k: k.token_budget):
            self._steps.setdefault((key.path, key.axis_keys), []).append(key.token_budget)
        for (path, axes), steps in self._steps.items():
            self._candidates[path, axes] = candidates(
                steps, [graphs[GraphKey(path, step, axes)] or ReplayTime(float(step)) for step in steps]
            )
        self._layout_paths = frozenset(key.path for key, time in graphs.items() if time is not None and time.slope > 0)
        captured = {path: sorted({k.token_budget for k in graphs if k.path == path}) for path in self._paths}
        self._ladders = ladders
        # Where nothing is captured the configured ladder still says what one eager batch may hold.
        budgets = tuple(tuple(captured[path]) or ladders.paths[path] for path in self._paths)
        self._limits = packing.Limits(budgets, ladders.max_items, ladders.max_frames or ladders.max_items)
        # With no axis that looks at single items, two batches of equal totals and squares have one price.
        self._sizes_decide = not declaration.capture_axes or declaration.axis_keys_of_frames is not None
        self._priced: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[float, tuple[int | None, ...]]] = {}
        self._plans: dict[tuple[EncoderItemSpec, ...], list[PlannedBatch]] = {}

    def plan(self, specs: Sequence[EncoderItemSpec]) -> list[PlannedBatch]:
        """Batches for these items: every item in exactly one."""
        key = tuple(specs)
        found = self._plans.get(key)
        if found is None:
            found = self._make(key)
            if len(self._plans) >= _CACHED_PLANS:
                self._plans.clear()
            self._plans[key] = found
        return found

    def _make(self, specs: tuple[EncoderItemSpec, ...]) -> list[PlannedBatch]:
        for spec in specs:
            unknown = set(spec.path_output_tokens or ()) - set(self._paths)
            if unknown:
                raise ProtocolError(f"an item has tokens on {sorted(unknown)}; the paths are {', '.join(self._paths)}.")
        items = [packing.Item(tuple([spec.tokens_on(path) for path in self._paths]), self._frames(spec)) for spec in specs]
        if self._by_cost:
            batches = cost_plans.by_cost(items, self._limits, _Prices(self, specs))
        else:
            batches = packing.greedy(items, self._limits, look_ahead=self._look_ahead)
        planned = [self._planned(specs, items, batch) for batch in batches]
        return [part for batch in planned for part in self._parted(specs, items, batch)]

    def _frames(self, spec: EncoderItemSpec) -> int:
        """Frames as packing counts them: where clips are switched off, one has more than any batch may have."""
        assert self._limits.max_frames is not None, "the manager always limits frames"
        switched_off = not self._ladders.max_frames and not set(self._declaration.modalities) <= {"image"}
        return self._limits.max_frames + 1 if switched_off and spec.frames > 1 else spec.frames

    def _parted(self, specs: Sequence[EncoderItemSpec], items: Sequence[packing.Item], batch: PlannedBatch) -> list[PlannedBatch]:
        """A batch whose graph was refused because rows see each other: its items one by one, so that they see nobody."""
        if len(batch.indices) == 1 or not any(isinstance(c, Skip) and c.code in SEES_OTHERS for c in batch.choices):
            return [batch]
        alone = [packing.Batch((index,), (0,) * len(self._paths)) for index in batch.indices]
        return [self._planned(specs, items, one) for one in alone]

    def predicted_ms(self, specs: Sequence[EncoderItemSpec], plan: Sequence[PlannedBatch]) -> float:
        """Predicted time of a plan: what `plan` minimises under cost packing."""
        prices = _Prices(self, tuple(specs))
        return sum(prices.batch(b.indices, b.tokens, sum(self._frames(specs[i]) for i in b.indices))[0] for b in plan)

    def _planned(self, specs: Sequence[EncoderItemSpec], items: Sequence[packing.Item], batch: packing.Batch) -> PlannedBatch:
        indices = tuple(sorted(batch.indices))
        members = [specs[index] for index in indices]
        frames = sum(self._frames(member) for member in members)
        tokens = tuple([sum(items[index].tokens[number] for index in indices) for number in range(len(self._paths))])
        choices = [
            self._choice(path, members, total, frames, wanted)
            for path, total, wanted in zip(self._paths, tokens, batch.budgets, strict=True)
        ]
        return PlannedBatch(indices, tuple(choices), tokens)

    def _choice(self, path: str, members: Sequence[EncoderItemSpec], tokens: int, frames: int, wanted: int | None) -> Choice:
        if tokens == 0:
            return None
        assert self._limits.max_frames is not None, "the manager always limits frames"
        if frames > self._limits.max_frames:
            seen = sum(member.frames for member in members)
            limit = self._limits.max_frames if seen > self._limits.max_frames else 1
            return Skip("too-many-frames", f"{seen} frames; a batch may have {limit}")
        axes = self.axis_keys(members, path, frames)
        if axes is None:
            return Skip("no-axis-key", f"{path}: {len(members)} items, {tokens} tokens")
        steps = self._steps.get((path, axes), [])
        if wanted is None and steps and tokens <= steps[-1]:
            return Skip("eager-cheaper", f"{path}: {tokens} tokens")
        position = bisect_left(steps, max(tokens, wanted or 0))
        if position < len(steps):
            return GraphKey(path, steps[position], axes)
        return self._why_none(path, axes, tokens)

    def _why_none(self, path: str, axes: AxisKeys, tokens: int) -> Skip:
        for budget in self._ladders.paths[path]:
            skip = self._skips.get(GraphKey(path, budget, axes)) if budget >= tokens else None
            if skip is not None:
                return skip
        return Skip("too-large", f"{path}: {tokens} tokens; the largest budget is {self._ladders.paths[path][-1]}")

    def axis_keys(self, members: Sequence[EncoderItemSpec], path: str, frames: int) -> AxisKeys | None:
        """One key for each capture axis, as the model chooses for a batch; None where it finds none.

        Raises:
            ProtocolError: it chose another number of keys, or one that it did not declare.
        """
        declared = self._declaration
        if not declared.capture_axes:
            return ()
        if declared.axis_keys_of_frames is not None:
            keys: AxisKeys | None = declared.axis_keys_of_frames(frames, path)
        else:
            assert declared.select_axis_keys is not None, "checked by the declaration"
            keys = declared.select_axis_keys(members, path)
        if keys is None:
            return None
        axes = declared.capture_axes
        if len(keys) != len(axes) or any(key not in axis for key, axis in zip(keys, axes, strict=True)):
            chooser = "select_axis_keys" if declared.axis_keys_of_frames is None else "axis_keys_of_frames"
            raise ProtocolError(f"{chooser} gave {keys!r}: expected one key of each of {axes!r}.")
        return tuple(keys)

    def squares(self, specs: Sequence[EncoderItemSpec]) -> list[list[int]]:
        """Of every item on each path; none for a path of whose graphs no time depends on them."""
        return [
            [squares_of(spec.tokens_on(path), spec.frames) for spec in specs] if path in self._layout_paths else []
            for path in self._paths
        ]

    def price(
        self,
        specs: Sequence[EncoderItemSpec],
        indices: Sequence[int],
        tokens: tuple[int, ...],
        frames: int,
        squares: tuple[int, ...],
    ) -> tuple[float, tuple[int | None, ...]]:
        """Least predicted time of a batch, and the budget on each path that reaches it (None: eager; 0: nothing to do).

        Args:
            specs: of the request.
            indices: the items of the batch.
            tokens: on each path.
            frames: as packing counts them.
            squares: of the batch on each path, see `replay_times`.
        """
        if not self._sizes_decide:
            return self._price([specs[index] for index in indices], tokens, frames, squares)
        key = (tokens, frames, squares)
        found = self._priced.get(key)
        if found is None:
            if len(self._priced) >= _CACHED_PRICES:
                self._priced.clear()
            found = self._priced[key] = self._price((), tokens, frames, squares)
        return found

    def _price(
        self, members: Sequence[EncoderItemSpec], tokens: tuple[int, ...], frames: int, squares: tuple[int, ...]
    ) -> tuple[float, tuple[int | None, ...]]:
        total = 0.0
        budgets = []
        for path, count, of_layout in zip(self._paths, tokens, squares, strict=True):
            cost, budget = self._price_on(path, members, count, frames, of_layout)
            total += cost
            budgets.append(budget)
        return total, tuple(budgets)

    def _price_on(
        self, path: str, members: Sequence[EncoderItemSpec], tokens: int, frames: int, squares: int
    ) -> tuple[float, int | None]:
        if tokens == 0:
            return 0.0, 0
        if path in self._eager:
            eager = EAGER_MARGIN * self._eager[path](tokens, squares if path in self._layout_paths else None)
        else:
            eager = tokens * _UNKNOWN_EAGER_FACTOR
        assert self._limits.max_frames is not None, "the manager always limits frames"
        axes = self.axis_keys(members, path, frames) if frames <= self._limits.max_frames else None
        if axes is None:
            return eager, None
        steps = self._steps.get((path, axes), [])
        position = bisect_left(steps, tokens)
        if position == len(steps):
            return eager, None
        cost, budget = min([(time(squares), step) for step, time in self._candidates[path, axes][position]])
        return (cost, budget) if cost <= eager else (eager, None)


class _Prices:
    """What `cost_plans` asks: the price of a batch, over all paths. For one plan: what belongs to single items is kept."""

    def __init__(self, planner: Planner, specs: tuple[EncoderItemSpec, ...]) -> None:
        self._planner, self._specs, self._squares = planner, specs, planner.squares(specs)

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, tuple[int | None, ...]]:
        squares = tuple([sum(map(of_item.__getitem__, indices)) if of_item else 0 for of_item in self._squares])
        return self._planner.price(self._specs, indices, tokens, frames, squares)
