"""What a plan is made of and what it says, for tables and as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_compile.errors import OptionError
from vit_compile.planning import traffic
from vit_compile.planning.measured import Measured
from vit_compile.planning.worth import Ladder, Outcome, Worth
from vit_compile.tools.plan_model import Tower

SCHEMA = 1
DEFAULT_COUNT = 2000
DEFAULT_SEED = 0
LITTLE = 0.005
"""A graph that adds a smaller part than this when it goes is hardly worth having."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What a plan is made of."""

    traffic: str | None = None
    """A preset. Either this or `trace`."""
    trace: Path | None = None
    """A JSONL file."""
    count: int | None = None
    """Requests to draw from a preset. None: `DEFAULT_COUNT`."""
    seed: int | None = None
    """Which ones. None: `DEFAULT_SEED`."""
    max_graphs: int
    max_tokens: int
    """Largest budget, in output tokens."""
    max_items: int
    """Most images and clips of a replay."""
    measured: Path | None = None
    """JSON of `manager.snapshot()`."""
    max_bytes: int | None = None
    save_trace: Path | None = None

    def __post_init__(self) -> None:
        if (self.traffic is None) == (self.trace is None):
            presets = ", ".join(traffic.PRESETS)
            raise OptionError(f"give either --traffic with a preset ({presets}) or --trace with a JSONL file, and not both.")
        for name, value in (("--count", self.count), ("--seed", self.seed), ("--save-trace", self.save_trace)):
            if self.trace is not None and value is not None:
                raise OptionError(f"{name} would do nothing with --trace, which is read as it is: leave it out.")
        if self.max_bytes is not None and self.measured is None:
            raise OptionError("--max-bytes needs --measured: without it nobody knows what a graph takes.")

    @property
    def seed_used(self) -> int:
        """For drawing requests."""
        return DEFAULT_SEED if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Judged:
    """A ladder and what it does for the half of the trace that it was not made from."""

    name: str
    ladder: Ladder
    by_cost: Outcome
    """Packed as `EncoderConfig(packing="cost")`."""
    greedy: Outcome
    nbytes: int | None
    """Of all graphs. None: not measured."""
    startup_seconds: float | None
    """Of all captures. None: not measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a plan says."""

    options: PlanOptions
    tower: Tower
    requests: int
    images: int
    """Images and clips of the trace."""
    tokens: int
    too_large: int
    """Images and clips above the largest budget, which run eagerly whatever the ladder."""
    fitted_on: int
    """Requests of the first half; the others are what the ladder is judged on."""
    judged_on_images: int
    """Images and clips of the second half that the largest budget holds. 0: the ladder could not be judged."""
    fitted: Judged
    doubled: Judged
    """As many graphs at most, and the same maximum, in powers of two."""
    worth: tuple[Worth, ...]
    """Of the graphs of the fitted ladder, in order."""
    measured: Measured | None

    @property
    def extrapolated(self) -> bool:
        """Is a budget outside of what was measured?"""
        return self.measured is not None and not self.measured.covers(self.fitted.ladder)

    @property
    def hardly_worth(self) -> tuple[int, ...]:
        """Budgets whose absence, one at a time, would cost little and leave no image without a graph. Nothing judged: none."""
        if not self.judged_on_images:
            return ()
        return tuple(sorted(w.token_budget for w in self.worth if w.added_share < LITTLE and w.added_eager_items <= 0))

    @property
    def config_line(self) -> str:
        """For `EncoderConfig(...)`."""
        return f"token_budgets={self.fitted.ladder}, max_items_per_batch={self.options.max_items}"

    def bytes_without(self, budget: int) -> int | None:
        """Bytes that are free without a budget. None: not measured."""
        if self.measured is None:
            return None
        rest = tuple(other for other in self.fitted.ladder if other != budget)
        return self.measured.bytes_of(self.fitted.ladder) - self.measured.bytes_of(rest)

    def seconds_without(self, budget: int) -> float | None:
        """Seconds of start-up that are saved without a budget. None: not measured."""
        if self.measured is None:
            return None
        rest = tuple(other for other in self.fitted.ladder if other != budget)
        return self.measured.seconds_of(self.fitted.ladder) - self.measured.seconds_of(rest)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only."""
        options = self.options
        return {
            "schema": SCHEMA,
            "traffic": {
                "preset": options.traffic,
                "trace": None if options.trace is None else str(options.trace),
                "seed": options.seed_used if options.trace is None else None,
                "requests": self.requests,
                "images": self.images,
                "tokens": self.tokens,
                "images_above_max_tokens": self.too_large,
                "fitted_on_requests": self.fitted_on,
                "judged_on_requests": self.requests - self.fitted_on,
                "judged_on_images": self.judged_on_images,
                "saved": None if options.save_trace is None else str(options.save_trace),
            },
            "model": self.tower.name,
            "geometry": dataclasses.asdict(self.tower.geometry),
            "max_graphs": options.max_graphs,
            "max_tokens": options.max_tokens,
            "max_items_per_batch": options.max_items,
            "max_bytes": options.max_bytes,
            "measured": None if options.measured is None else str(options.measured),
            "extrapolated": self.extrapolated,
            "token_budgets": list(self.fitted.ladder),
            "config": self.config_line,
            "padded_share": self.fitted.by_cost.padded_share,
            "ladders": [self._ladder_dict(self.fitted), self._ladder_dict(self.doubled)],
            "hardly_worth": list(self.hardly_worth),
            "graphs": [self._worth_dict(worth) for worth in self.worth],
        }

    def as_json(self) -> str:
        """One JSON object, indented."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def _ladder_dict(self, judged: Judged) -> dict[str, Any]:
        return {
            "name": judged.name,
            "token_budgets": list(judged.ladder),
            "bytes": judged.nbytes,
            "startup_seconds": judged.startup_seconds,
            "packing": {"cost": self._outcome_dict(judged.by_cost), "greedy": self._outcome_dict(judged.greedy)},
        }

    def _outcome_dict(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "padded_share": outcome.padded_share,
            "replays": outcome.replays,
            "replayed_tokens": outcome.tokens,
            "computed_tokens": outcome.computed_tokens,
            "eager_images": outcome.eager_items,
            "eager_tokens": outcome.eager_tokens,
            "ms": None if self.measured is None else outcome.cost,
        }

    def _worth_dict(self, worth: Worth) -> dict[str, Any]:
        timed = self.measured is not None
        return {
            "token_budget": worth.token_budget,
            "replays": worth.replays,
            "added_share_without": worth.added_share,
            "added_ms_without": worth.added_cost if timed else None,
            "added_tokens_without": None if timed else round(worth.added_cost),
            "added_eager_images_without": worth.added_eager_items,
            "added_eager_tokens_without": worth.added_eager_tokens,
            "bytes_freed": self.bytes_without(worth.token_budget),
            "startup_seconds_saved": self.seconds_without(worth.token_budget),
            "input_and_output_row_bytes": self.tower.row_bytes(worth.token_budget),
        }
