"""What graphs an encoder gets: the configuration and the model's declaration, resolved into ladders and limits.

The rules are those of the documented encoder graph manager. Plain integers in and out; nothing here imports torch, so that a
server can see its ladders before it loads a model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vit_compile.errors import BudgetError, OptionError
from vit_compile.options import did_you_mean
from vit_compile.planning import budgets, units
from vit_compile.runtime.config import EncoderConfig

if TYPE_CHECKING:
    from vit_compile.runtime.graph_config import AxisKeys, EncoderCudaGraphConfig, EncoderPathConfig

logger = logging.getLogger("vit_compile")

MANY_GRAPHS = 64
"""More graphs than this are worth a warning: each costs a capture at start-up, and memory."""


@dataclass(frozen=True, slots=True)
class Ladders:
    """Sizes of an encoder's graphs, and what one replay may hold."""

    paths: dict[str, tuple[int, ...]]
    """Budgets of each path in output tokens, ascending, in the order in which paths run. A leading 0 stands for "skip this
    path": it is never captured."""

    max_items: int
    """Most images and clips of one replay."""

    max_frames: int
    """Most frames of one replay. 0: no clips, so that an image is one segment and `max_items` is the only limit."""


def resolve(config: EncoderConfig, declaration: EncoderCudaGraphConfig, budget_range: tuple[int, int]) -> Ladders:
    """Ladders and limits of one encoder.

    - The common ladder is `token_budgets`; without them it doubles over the model's range, from `max_items_per_batch` where
      that is more than the minimum.
    - Without `max_items_per_batch` it is the range's maximum // minimum, but never above the smallest budget.
    - A path with a minimum of its own doubles from there to the common maximum; one that is named in `path_token_budgets` has
      that ladder; others have the common one. Paths that may be empty get a 0.
    - An item has at least one token on every path that may not be empty, so there the smallest budget is never below
      `max_items`: a given number raises the start of an inferred ladder, and an inferred one follows a given ladder.

    Every inferred ladder ends at the maximum. (The documented local ladder of DeepSeek-OCR stops at 12800 although its rule
    appends the maximum of 13824; here the rule holds.)

    What is configured and cannot act is logged as a warning, and so are more than `MANY_GRAPHS` graphs.

    Args:
        config: What the user wants.
        declaration: What the model declares.
        budget_range: The model's smallest and largest useful budget, in output tokens.

    Raises:
        BudgetError: The range is not positive or is inverted, `max_items_per_batch` is above a smallest budget, a path's minimum
            is not in the range, or a ladder has a 0 that its path does not allow.
        OptionError: `path_token_budgets` names a path that the model does not have.
    """
    low, high = _checked_range(budget_range)
    given = config.path_token_budgets or {}
    for name in given:
        if name not in declaration.paths:
            known = ", ".join(declaration.paths)
            hint = did_you_mean(name, declaration.paths)
            raise OptionError(f"path_token_budgets names the path {name!r}.{hint} Paths of this model: {known}.")
    common = _common_ladder(config, low, high)
    paths = {
        name: _explicit_path(name, given[name], path) if name in given else _inferred_path(name, common, path, config)
        for name, path in declaration.paths.items()
    }
    items = _max_items(config, declaration, paths, min(high // low, common[0]))
    ladders = Ladders(paths=paths, max_items=items, max_frames=_max_frames(config, declaration, items))
    _warn(config, declaration, ladders)
    return ladders


def graph_count(ladders: Ladders, axes: Sequence[AxisKeys]) -> int:
    """Graphs to capture: every budget but 0 of every path, for every combination of axis keys."""
    return sum(size > 0 for ladder in ladders.paths.values() for size in ladder) * math.prod(len(axis) for axis in axes)


def _checked_range(budget_range: tuple[int, int]) -> tuple[int, int]:
    low = units.positive_int("smallest budget of the model's range", budget_range[0])
    high = units.positive_int("largest budget of the model's range", budget_range[1])
    if low > high:
        raise BudgetError(f"the model's budget range ({low}, {high}) is inverted: it is (smallest, largest), in output tokens.")
    return low, high


def _common_ladder(config: EncoderConfig, low: int, high: int) -> tuple[int, ...]:
    items = config.max_items_per_batch
    if config.token_budgets is not None:
        if items is not None and items > config.token_budgets[0]:
            raise _too_many_items(items, config.token_budgets[0], "the smallest of token_budgets")
        return config.token_budgets
    if items is not None and items > high:
        raise _too_many_items(items, high, "the largest budget of the model")
    return budgets.power_of_two(max(low, items or 0), high)


def _inferred_path(name: str, common: tuple[int, ...], path: EncoderPathConfig, config: EncoderConfig) -> tuple[int, ...]:
    ladder, start = common, path.min_token_budget
    if start is not None:
        if not 0 < start <= common[-1]:
            raise BudgetError(
                f"path {name!r}: min_token_budget={start} is not in 1 to {common[-1]}, the maximum of all paths: declare another "
                "minimum, raise the largest budget, or give the path a ladder in path_token_budgets."
            )
        # A given number of items moves the start of this ladder as it moves that of the common one.
        ladder = budgets.power_of_two(
            start if path.allow_zero_tokens else max(start, config.max_items_per_batch or 0), common[-1]
        )
    return (0, *ladder) if path.allow_zero_tokens else ladder


def _explicit_path(name: str, ladder: tuple[int, ...], path: EncoderPathConfig) -> tuple[int, ...]:
    if path.allow_zero_tokens:
        return tuple(sorted({0, *ladder}))
    if 0 in ladder:
        raise BudgetError(
            f"path_token_budgets[{name!r}]={ladder} has a 0, and every item of this model has tokens on that path: drop the 0."
        )
    return ladder


def _max_items(
    config: EncoderConfig, declaration: EncoderCudaGraphConfig, paths: dict[str, tuple[int, ...]], inferred: int
) -> int:
    items = config.max_items_per_batch
    for name, ladder in paths.items():
        if not declaration.paths[name].allow_zero_tokens:
            if items is not None and items > ladder[0]:
                raise _too_many_items(items, ladder[0], f"the smallest of path {name!r}")
            inferred = min(inferred, ladder[0])
    return inferred if items is None else items


def _too_many_items(items: int, budget: int, which: str) -> BudgetError:
    return BudgetError(
        f"max_items_per_batch={items} is above {budget} tokens, {which}: {budget} // {items} = 0 tokens for an item. Raise that "
        f"budget to {items} or more, or set max_items_per_batch to {budget} or less."
    )


def _max_frames(config: EncoderConfig, declaration: EncoderCudaGraphConfig, items: int) -> int:
    if set(declaration.modalities) <= {"image"} or not declaration.max_frames_per_video:
        return 0
    if config.max_frames_per_batch is not None:
        return config.max_frames_per_batch
    return items * declaration.max_frames_per_video


def _warn(config: EncoderConfig, declaration: EncoderCudaGraphConfig, ladders: Ladders) -> None:
    if config.max_frames_per_batch and not ladders.max_frames:
        logger.warning("max_frames_per_batch=%d has no effect: the model takes no clips", config.max_frames_per_batch)
    own = config.path_token_budgets or {}
    if config.token_budgets is not None and all(
        name in own or path.min_token_budget is not None for name, path in declaration.paths.items()
    ):
        logger.warning(
            "token_budgets=%s: no path uses this ladder, at most its maximum, since each has one of its own; name the paths in "
            "path_token_budgets instead: %s",
            config.token_budgets,
            ", ".join(declaration.paths),
        )
    count = graph_count(ladders, declaration.capture_axes)
    if count > MANY_GRAPHS:
        logger.warning(
            "%d graphs to capture, more than %d: start-up and memory grow with each; shorten the ladders (budgets.fit makes the "
            "best short one) or the capture axes. max_graphs=%d is the cap",
            count,
            MANY_GRAPHS,
            config.max_graphs,
        )
