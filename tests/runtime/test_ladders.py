"""Ladders and limits follow the documented rules, whatever is given and whatever is left to be inferred."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import BudgetError, OptionError
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graph_config import EncoderCudaGraphConfig, EncoderPathConfig
from vit_compile.runtime.item_spec import DEFAULT_PATH
from vit_compile.runtime.ladders import Ladders, graph_count, resolve

OCR_PATHS = {
    "global": EncoderPathConfig(min_token_budget=272),
    "local": EncoderPathConfig(min_token_budget=100, allow_zero_tokens=True),
}
OCR_RANGE = (272, 13824)


def declare(**fields: Any) -> EncoderCudaGraphConfig:
    """A model's declaration: images only and one path, unless said otherwise."""
    return EncoderCudaGraphConfig(**{"modalities": ("image",), "buffer_keys": ("pixels",), "out_hidden_size": 8, **fields})


def one_path(budget_range: tuple[int, int], **options: Any) -> tuple[tuple[int, ...], int]:
    """Ladder and most items of a model with one path."""
    ladders = resolve(EncoderConfig(**options), declare(), budget_range)
    assert list(ladders.paths) == [DEFAULT_PATH]
    return ladders.paths[DEFAULT_PATH], ladders.max_items


@pytest.mark.parametrize(
    ("options", "budget_range", "ladder", "items"),
    [
        # Neither: the range doubled; items = max // min, or the smallest budget where that is less.
        ({}, (64, 1000), (64, 128, 256, 512, 1000), 15),
        ({}, (4, 64), (4, 8, 16, 32, 64), 4),
        ({}, (50, 50), (50,), 1),
        # Only items: the ladder begins at the larger of minimum and items.
        ({"max_items_per_batch": 8}, (64, 512), (64, 128, 256, 512), 8),
        ({"max_items_per_batch": 100}, (64, 512), (100, 200, 400, 512), 100),
        ({"max_items_per_batch": 512}, (64, 512), (512,), 512),
        # Only budgets: items = max // min of the range, or the smallest budget where that is less.
        ({"token_budgets": [4096, 512]}, (64, 4096), (512, 4096), 64),
        ({"token_budgets": [48, 4096]}, (64, 4096), (48, 4096), 48),
        ({"token_budgets": [9000]}, (64, 4096), (9000,), 64),
        # Both: as given, sorted.
        ({"token_budgets": [4096, 512], "max_items_per_batch": 8}, (64, 4096), (512, 4096), 8),
        ({"token_budgets": [4096, 512], "max_items_per_batch": 512}, (64, 4096), (512, 4096), 512),
    ],
)
def test_budgets_and_items(options: dict[str, Any], budget_range: tuple[int, int], ladder: tuple[int, ...], items: int) -> None:
    """All four cases of budgets and items, each given or not."""
    assert one_path(budget_range, **options) == (ladder, items)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"token_budgets": [256, 4096], "max_items_per_batch": 300},
            r"max_items_per_batch=300 is above 256 tokens, the smallest of token_budgets: 256 // 300 = 0 tokens for an item\. "
            r"Raise that budget to 300 or more, or set max_items_per_batch to 256 or less",
        ),
        (
            {"max_items_per_batch": 5000},
            r"max_items_per_batch=5000 is above 4096 tokens, the largest budget of the model: 4096 // 5000 = 0 tokens",
        ),
        (
            {"max_items_per_batch": 300, "path_token_budgets": {DEFAULT_PATH: [256]}},
            r"max_items_per_batch=300 is above 256 tokens, the smallest of path 'main': 256 // 300 = 0 tokens",
        ),
    ],
)
def test_hazard_14_more_items_than_the_smallest_budget(options: dict[str, Any], message: str) -> None:
    """An item would have no token: an error with both numbers, the quotient and what to change."""
    with pytest.raises(BudgetError, match=message):
        one_path((64, 4096), **options)


@given(
    st.integers(1, 300),
    st.integers(0, 5000),
    st.none() | st.integers(1, 400),
    st.none() | st.lists(st.integers(1, 6000), min_size=1, max_size=5),
    st.none() | st.integers(1, 400),
    st.booleans(),
)
def test_hazard_14_every_item_has_a_token(
    low: int, rise: int, items: int | None, sizes: list[int] | None, minimum: int | None, may_be_empty: bool
) -> None:
    """Whatever is given, either it is refused, or every path that may not be empty has room for a token of every item."""
    declaration = declare(
        paths={"a": EncoderPathConfig(), "b": EncoderPathConfig(min_token_budget=minimum, allow_zero_tokens=may_be_empty)}
    )
    config = EncoderConfig(token_budgets=None if sizes is None else tuple(sizes), max_items_per_batch=items)
    try:
        ladders = resolve(config, declaration, (low, low + rise))
    except BudgetError:
        return
    top = low + rise if sizes is None else max(sizes)
    assert ladders.max_items == items or items is None
    assert ladders.max_items >= 1
    for name, ladder in ladders.paths.items():
        assert list(ladder) == sorted(set(ladder))
        assert ladder[-1] == top
        assert (ladder[0] == 0) == declaration.paths[name].allow_zero_tokens
        assert ladder[0] >= ladders.max_items or declaration.paths[name].allow_zero_tokens


@pytest.mark.parametrize(
    ("budget_range", "message"),
    [
        ((0, 64), "smallest budget of the model's range=0: expected a positive integer"),
        ((-64, 64), "smallest budget of the model's range=-64"),
        ((64, 0), "largest budget of the model's range=0: expected a positive integer"),
        ((64.0, 128), "smallest budget of the model's range=64.0"),
        ((128, 64), r"range \(128, 64\) is inverted: it is \(smallest, largest\)"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"token_budgets": [64], "max_items_per_batch": 1}])
def test_the_models_range_is_a_range(options: dict[str, Any], budget_range: Any, message: str) -> None:
    """A range that is not positive or is inverted is an error, also where nothing needs to be inferred from it."""
    with pytest.raises(BudgetError, match=message):
        one_path(budget_range, **options)


@pytest.mark.parametrize(
    ("modalities", "longest", "given_frames", "frames"),
    [
        (("image", "video"), 32, None, 8 * 32),
        (("video",), 32, None, 8 * 32),
        (("image", "video"), 32, 100, 100),
        (("image", "video"), 32, 0, 0),
        (("image",), 32, None, 0),
        (("image",), 32, 100, 0),
        (("image", "video"), 0, None, 0),
        (("image", "video"), 0, 100, 0),
        (("clip",), 32, None, 8 * 32),
        (("image", "slides"), 32, 5, 5),
        (("image", "slides"), 32, 0, 0),
    ],
)
def test_frames(modalities: tuple[str, ...], longest: int, given_frames: int | None, frames: int) -> None:
    """0 for images alone and without frames; else what is given; else as many as the most items at their longest have."""
    declaration = declare(modalities=modalities, max_frames_per_video=longest)
    ladders = resolve(EncoderConfig(max_items_per_batch=8, max_frames_per_batch=given_frames), declaration, (64, 128))
    assert ladders.max_frames == frames


def test_two_paths_of_a_document_model() -> None:
    """DeepSeek-OCR: each path doubles from its own minimum to the common maximum, and the one that may be empty has a 0."""
    ladders = resolve(EncoderConfig(), declare(paths=OCR_PATHS), OCR_RANGE)
    assert ladders == Ladders(
        paths={
            "global": (272, 544, 1088, 2176, 4352, 8704, 13824),
            "local": (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824),
        },
        max_items=13824 // 272,
        max_frames=0,
    )
    assert list(ladders.paths) == ["global", "local"]


@pytest.mark.parametrize(
    ("options", "main", "own", "may_be_empty", "items"),
    [
        # The common maximum ends both.
        ({}, (64, 128, 256), (10, 20, 40, 80, 160, 256), (0, 10, 20, 40, 80, 160, 256), 4),
        ({"token_budgets": [50, 100]}, (50, 100), (10, 20, 40, 80, 100), (0, 10, 20, 40, 80, 100), 4),
        # A given number of items moves the start of what is inferred, except where an item may have nothing.
        ({"max_items_per_batch": 30}, (64, 128, 256), (30, 60, 120, 240, 256), (0, 10, 20, 40, 80, 160, 256), 30),
        # Ladders of single paths win; the 0 is added where it is allowed.
        ({"path_token_budgets": {"own": [300, 7]}}, (64, 128, 256), (7, 300), (0, 10, 20, 40, 80, 160, 256), 4),
        ({"path_token_budgets": {"own": [3]}}, (64, 128, 256), (3,), (0, 10, 20, 40, 80, 160, 256), 3),
        ({"path_token_budgets": {"empty": [20, 5]}}, (64, 128, 256), (10, 20, 40, 80, 160, 256), (0, 5, 20), 4),
        ({"path_token_budgets": {"empty": [20, 0]}}, (64, 128, 256), (10, 20, 40, 80, 160, 256), (0, 20), 4),
        # More items than the smallest budget are fine on a path where an item may have nothing.
        (
            {"max_items_per_batch": 30, "path_token_budgets": {"own": [30], "empty": [8]}},
            (64, 128, 256),
            (30,),
            (0, 8),
            30,
        ),
    ],
)
def test_paths(
    options: dict[str, Any], main: tuple[int, ...], own: tuple[int, ...], may_be_empty: tuple[int, ...], items: int
) -> None:
    """A path without a minimum has the common ladder, one with a minimum its own, and an explicit ladder wins over both."""
    declaration = declare(
        paths={
            "main": EncoderPathConfig(),
            "own": EncoderPathConfig(min_token_budget=10),
            "empty": EncoderPathConfig(min_token_budget=10, allow_zero_tokens=True),
        }
    )
    ladders = resolve(EncoderConfig(**options), declaration, (64, 256))
    assert ladders == Ladders({"main": main, "own": own, "empty": may_be_empty}, max_items=items, max_frames=0)


@pytest.mark.parametrize(("low", "ladder", "items"), [(64, (0, 64, 128, 256), 4), (4, (0, 4, 8, 16, 32, 64, 128, 256), 4)])
def test_the_common_ladder_may_have_a_zero_too(low: int, ladder: tuple[int, ...], items: int) -> None:
    """A path without a minimum that may be empty has the common ladder and a 0; items follow the ladder as ever, not the 0."""
    ladders = resolve(EncoderConfig(), declare(paths={"tiles": EncoderPathConfig(allow_zero_tokens=True)}), (low, 256))
    assert ladders == Ladders({"tiles": ladder}, max_items=items, max_frames=0)


def test_inferred_items_follow_the_smallest_path() -> None:
    """Items that nobody gave are never more than the smallest budget of a path on which every item has tokens."""
    low = declare(paths={"main": EncoderPathConfig(), "small": EncoderPathConfig(min_token_budget=2)})
    assert resolve(EncoderConfig(), low, (64, 4096)).max_items == 2


@pytest.mark.parametrize("minimum", [0, -5, 257])
def test_a_paths_minimum_is_in_the_range(minimum: int) -> None:
    """A minimum that is not above 0 and up to the maximum is an error with both numbers; an explicit ladder does without it."""
    declaration = declare(paths={"own": EncoderPathConfig(min_token_budget=minimum)})
    with pytest.raises(BudgetError, match=f"path 'own': min_token_budget={minimum} is not in 1 to 256.*path_token_budgets"):
        resolve(EncoderConfig(), declaration, (64, 256))
    assert resolve(EncoderConfig(path_token_budgets={"own": (64,)}), declaration, (64, 256)).paths == {"own": (64,)}


def test_a_zero_that_a_path_does_not_allow() -> None:
    """An explicit 0 for a path on which every item has tokens is an error that shows path and ladder."""
    with pytest.raises(BudgetError, match=r"path_token_budgets\['global'\]=\(0, 272\) has a 0.*drop the 0"):
        resolve(EncoderConfig(path_token_budgets={"global": (0, 272)}), declare(paths=OCR_PATHS), OCR_RANGE)


def test_hazard_37_an_unknown_path_is_an_error() -> None:
    """A ladder for a path that the model does not have is an error that guesses, and lists the paths."""
    with pytest.raises(OptionError, match=r"the path 'globl'\. Did you mean 'global'\? Paths of this model: global, local"):
        resolve(EncoderConfig(path_token_budgets={"globl": (272,)}), declare(paths=OCR_PATHS), OCR_RANGE)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Warnings that resolving a configuration logs."""

    def warnings(declaration: EncoderCudaGraphConfig, **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="vit_compile"):
            resolve(EncoderConfig(**options), declaration, OCR_RANGE)
        return caplog.messages

    return warnings


def test_hazard_37_frames_without_clips_are_told(warnings_of: Callable[..., list[str]]) -> None:
    """A number of frames for a model that takes no clips is told to do nothing; 0 is no such number."""
    (text,) = warnings_of(declare(), max_frames_per_batch=64)
    assert text == "max_frames_per_batch=64 has no effect: the model takes no clips"
    assert warnings_of(declare(), max_frames_per_batch=0) == []
    assert warnings_of(declare(modalities=("video",)), max_frames_per_batch=64) == []


def test_hazard_37_budgets_that_no_path_uses_are_told(warnings_of: Callable[..., list[str]]) -> None:
    """Where every path has a ladder of its own, common budgets are told to do nothing, with the paths to name instead."""
    (text,) = warnings_of(declare(paths=OCR_PATHS), token_budgets=(544, 1088))
    assert text.startswith("token_budgets=(544, 1088): no path uses this ladder")
    assert text.endswith("path_token_budgets instead: global, local")
    assert len(warnings_of(declare(), token_budgets=(544,), path_token_budgets={DEFAULT_PATH: (272,)})) == 1
    assert warnings_of(declare(), token_budgets=(544, 1088)) == []
    assert warnings_of(declare(paths={**OCR_PATHS, "third": EncoderPathConfig()}), token_budgets=(544, 1088)) == []


@pytest.mark.parametrize(
    ("paths", "axes", "count"),
    [
        ({"main": (64, 128)}, (), 2),
        ({"main": (64, 128)}, (("a", "b", "c"),), 6),
        ({"main": (64, 128)}, (("a", "b", "c"), (1, 2)), 12),
        ({"global": (272, 544), "local": (0, 100, 200, 400)}, (), 5),
        ({"global": (272, 544), "local": (0, 100, 200, 400)}, (("a", "b"),), 10),
    ],
)
def test_graphs_are_counted(paths: dict[str, tuple[int, ...]], axes: tuple[tuple[Any, ...], ...], count: int) -> None:
    """One graph for each budget of each path and each combination of axis keys; 0 has none."""
    assert graph_count(Ladders(paths, max_items=1, max_frames=0), axes) == count


def test_many_graphs_are_warned_of(warnings_of: Callable[..., list[str]]) -> None:
    """More than 64 graphs are a warning with the number; 64 are not."""
    pick = {"select_axis_keys": lambda specs, path: (0,)}
    eight = tuple(range(64, 72))
    assert warnings_of(declare(capture_axes=(tuple(range(8)),), **pick), token_budgets=eight, max_items_per_batch=1) == []
    (text,) = warnings_of(declare(capture_axes=(tuple(range(9)),), **pick), token_budgets=eight, max_items_per_batch=1)
    assert text.startswith("72 graphs to capture, more than 64")
    assert "max_graphs=128" in text
