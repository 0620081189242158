"""vLLM's encoder options, by their own names, as an `EncoderConfig`.

There, graphs of encoders have grown an option for every way to say how large they are. Here a graph's shape depends on its row
count alone, so all of these are one ladder, `token_budgets`, or a cap on the items of a replay. `explain_vllm` says what each
given option became; one that can do nothing says so, with the reason. Only options that are given act: defaults are those of
`EncoderConfig`, not vLLM's, but for two numbers that sizes in patches need: `DEFAULT_MERGE_SIZE`, and a longest side of
`budgets.DEFAULT_MAX_SIDE`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from vit_compile.errors import BudgetError, OptionError
from vit_compile.options import check_choice, check_flag, checked_keys, listed, natural_int, positive_int, positive_ints
from vit_compile.planning import budgets, units
from vit_compile.runtime.config import DEFAULT_MAX_GRAPHS, EncoderConfig

logger = logging.getLogger("vit_compile")

DEFAULT_MERGE_SIZE = 2
"""Patches per side of a token where `encoder_spatial_merge_size` is not given: that of Qwen-VL and GLM-V, for which sizes in
patches were introduced."""

ENABLE = "cudagraph_mm_encoder"
TOKEN_BUDGETS = "encoder_cudagraph_token_budgets"
MAX_ITEMS = "encoder_cudagraph_max_vision_items_per_batch"
MAX_FRAMES = "encoder_cudagraph_max_frames_per_batch"
TP_MODE = "mm_encoder_tp_mode"
PIECEWISE = "encoder_cudagraph_piecewise"
CAPTURE_SIZES = "encoder_cudagraph_capture_sizes"
MERGE_SIZE = "encoder_spatial_merge_size"
BUCKET_SIZES = "encoder_cudagraph_bucket_sizes"
GRID_CONFIGS = "encoder_cudagraph_grid_configs"
PADDED_MODE = "encoder_cudagraph_padded_mode"
MAX_GRID_SIZE = "encoder_cudagraph_max_grid_size"
VERBOSE = "encoder_cudagraph_verbose"
ONE_BY_ONE = "encoder_cudagraph_one_by_one"
BATCH_SIZES = "encoder_cudagraph_batch_sizes"

FULL_CAPTURE = (ENABLE, BUCKET_SIZES, GRID_CONFIGS, PADDED_MODE, MAX_GRID_SIZE, ONE_BY_ONE, BATCH_SIZES)
"""Options that ask for capture of the whole encoder, which excludes `encoder_cudagraph_piecewise`."""


_Values: TypeAlias = Mapping[str, Any]
"""Given options by name, checked and in one form each: a list that is None is ()."""


def config_from_vllm(given: Mapping[str, Any] | None) -> EncoderConfig:
    """`EncoderConfig.from_vllm`: the configuration, with one INFO line for each given option."""
    config, became = _translate(given)
    for name, text in became.items():
        logger.info("%s: %s", name, text)
    return config


def explain_vllm(given: Mapping[str, Any] | None) -> dict[str, str]:
    """What each given option became: the field that it set, or "no effect: " and why.

    Raises:
        OptionError: As `EncoderConfig.from_vllm` does.
    """
    return _translate(given)[1]


def _translate(given: Mapping[str, Any] | None) -> tuple[EncoderConfig, dict[str, str]]:
    values = {name: _CHECKS[name](name, value) for name, value in checked_keys(given, list(_CHECKS)).items()}
    _refuse_contradictions(values)
    fields: dict[str, Any] = {}
    became: dict[str, str] = {}
    for translate in (_ladder, _items, _frames, _switches):
        translate(values, fields, became)
    return EncoderConfig(**fields), {name: became[name] for name in values}


def _refuse_contradictions(values: _Values) -> None:
    full = [name for name in FULL_CAPTURE if values.get(name)]
    if values.get(PIECEWISE) and full:
        raise OptionError(
            f"{PIECEWISE}=True excludes capture of the whole encoder, which {', '.join(full)} asks for: drop one or the other. "
            f"Sizes of piecewise graphs are {CAPTURE_SIZES}."
        )
    most, together = values.get(MAX_ITEMS, 0), _images_together(values)
    if 0 < most < together:
        raise OptionError(
            f"{BATCH_SIZES} has {together} images share a replay, and {MAX_ITEMS}={most} allows {most}: raise it to {together}, "
            "or give smaller batch sizes."
        )
    if values.get(ONE_BY_ONE) and together == 1 and most > 1:
        raise OptionError(
            f"{ONE_BY_ONE}=True allows one item per replay, and {MAX_ITEMS}={most} allows {most}: drop one of them."
        )


def _ladder(values: _Values, fields: dict[str, Any], became: dict[str, str]) -> None:
    """Every option that says how large graphs are: together they are `token_budgets`."""
    merge = values.get(MERGE_SIZE, DEFAULT_MERGE_SIZE)
    ladders: dict[str, tuple[int, ...]] = {name: values[name] for name in (TOKEN_BUDGETS, CAPTURE_SIZES) if values.get(name)}
    grids, left_out = _grids(values)
    for name, kept in grids.items():
        ladders[name] = _multiples(name, kept, (1,), merge)
    if grids and values.get(BATCH_SIZES):
        every = [grid for kept in grids.values() for grid in kept]
        ladders[BATCH_SIZES] = _multiples(BATCH_SIZES, every, values[BATCH_SIZES], merge)
    if ladders:
        budgets_of_all = tuple(sorted({size for ladder in ladders.values() for size in ladder}))
        fields["token_budgets"] = budgets_of_all
        if len(budgets_of_all) > DEFAULT_MAX_GRAPHS:
            # There is no such cap among these options, so it may not stand in the way of sizes that are asked for.
            fields["max_graphs"] = len(budgets_of_all)

    for name, ladder in ladders.items():
        became[name] = ", ".join(f"{field}={value}" for field, value in fields.items())
        if len(ladders) > 1:
            became[name] += f", of which this gives {ladder}"
        if name not in (TOKEN_BUDGETS, CAPTURE_SIZES) and MERGE_SIZE not in values:
            became[name] += f"; {MERGE_SIZE}={merge} is assumed"
        if left_out.get(name):
            became[name] += f"; too large for a graph: {', '.join(map(str, left_out[name]))}"
    for name in (TOKEN_BUDGETS, CAPTURE_SIZES):
        inferred = f"no effect: the ladder is that of {', '.join(ladders)}" if ladders else "token_budgets=None: inferred"
        became.setdefault(name, inferred)
    became.setdefault(BUCKET_SIZES, "no effect: it names no size")
    became.setdefault(GRID_CONFIGS, _PRESET if values.get(GRID_CONFIGS) else "no effect: it names no grid")
    became.setdefault(BATCH_SIZES, _NO_IMAGE if values.get(BATCH_SIZES) else "no effect: it names no number of images")
    used_by = f"used by {', '.join(grids)}" if grids else "no effect: no option gives a size in patches"
    became[MERGE_SIZE] = became[MAX_GRID_SIZE] = used_by


def _grids(values: _Values) -> tuple[dict[str, list[units.Grid]], dict[str, list[units.Grid]]]:
    """(kept, left out): grids by the option that gives them, without and with a side that is too long for a graph."""
    given: dict[str, Sequence[units.Grid]] = {BUCKET_SIZES: [(1, side, side) for side in values.get(BUCKET_SIZES, ())]}
    if not isinstance(values.get(GRID_CONFIGS, ""), str):
        given[GRID_CONFIGS] = values[GRID_CONFIGS]
    longest = values.get(MAX_GRID_SIZE, budgets.DEFAULT_MAX_SIDE)
    kept, left_out = {}, {}
    for name, grids in given.items():
        if grids:
            kept[name] = [grid for grid in grids if _side(grid) <= longest]
            left_out[name] = [grid for grid in grids if _side(grid) > longest]
            if not kept[name]:
                raise OptionError(
                    f"{name}: no size is left, since {MAX_GRID_SIZE}={longest} and the smallest is {min(grids, key=_side)}: "
                    f"add a smaller one, or raise {MAX_GRID_SIZE}."
                )
    return kept, left_out


def _side(grid: units.Grid) -> int:
    """The longer side of a grid, in patches."""
    return max(grid[1:])


def _multiples(name: str, grids: Sequence[units.Grid], counts: Sequence[int], merge: int) -> tuple[int, ...]:
    """Budgets for each of these numbers of images of each grid."""
    try:
        return budgets.explicit(
            size for grid in grids for size in budgets.from_batch_sizes(counts, grid, spatial_merge_size=merge)
        )
    except BudgetError as error:
        raise OptionError(f"{name}: {error}") from None


def _images_together(values: _Values) -> int:
    """Most images of one size that batch sizes ask for, where there is a size to take several of."""
    has_sizes = values.get(BUCKET_SIZES) or not isinstance(values.get(GRID_CONFIGS) or "", str)
    return max(values.get(BATCH_SIZES, ()), default=1) if has_sizes else 1


def _items(values: _Values, fields: dict[str, Any], became: dict[str, str]) -> None:
    one_by_one, together = values.get(ONE_BY_ONE), _images_together(values)
    became[MAX_ITEMS] = "max_items_per_batch=None: inferred"
    if one_by_one and together == 1:
        fields["max_items_per_batch"] = 1
        became[ONE_BY_ONE] = "max_items_per_batch=1"
        became[MAX_ITEMS] = f"no effect: {ONE_BY_ONE} sets max_items_per_batch=1"
    elif one_by_one:
        became[ONE_BY_ONE] = f"no effect: {BATCH_SIZES} has {together} images share a replay"
    else:
        became[ONE_BY_ONE] = "no effect: items share replays anyway, up to max_items_per_batch"
    if values.get(MAX_ITEMS):
        fields["max_items_per_batch"] = values[MAX_ITEMS]
        became[MAX_ITEMS] = f"max_items_per_batch={values[MAX_ITEMS]}"


def _frames(values: _Values, fields: dict[str, Any], became: dict[str, str]) -> None:
    fields["max_frames_per_batch"] = frames = values.get(MAX_FRAMES)
    became[MAX_FRAMES] = f"max_frames_per_batch={frames}" + (": inferred" if frames is None else "")


def _switches(values: _Values, fields: dict[str, Any], became: dict[str, str]) -> None:
    if ENABLE in values:
        fields["enabled"] = values[ENABLE]
        became[ENABLE] = f"enabled={values[ENABLE]}"
    became[PIECEWISE] = _PIECEWISE if values.get(PIECEWISE) else "no effect: the whole forward is captured anyway"
    became[PADDED_MODE] = (
        "no effect: items are padded to the next budget anyway"
        if values.get(PADDED_MODE)
        else "no effect: items are padded to the next budget in any case, since every graph's padding is tried at capture; "
        "graphs of exact sizes only are options={'padding': 'exact'} of torch.compile(tower, backend='vit_cudagraph')"
    )
    became[VERBOSE] = "no effect: captures and statistics go to the logger 'vit_compile'; log_every says how often"
    became[TP_MODE] = (
        "no effect on the configuration: pass group= to EncoderCudaGraphManager, whose ranks then share the items"
        if values.get(TP_MODE) == "data"
        else "no effect: without group= every rank encodes every item anyway"
    )


_PRESET = (
    "no effect: the grids of a preset belong to the engine, and a budget serves every grid that fits it; list grids (t, h, w) to "
    "have budgets of exactly their sizes"
)
_NO_IMAGE = (
    f"no effect: without {BUCKET_SIZES} or {GRID_CONFIGS} there is no image to take several of, and images of any sizes share a "
    "replay anyway, up to max_items_per_batch"
)
_PIECEWISE = (
    "no effect: the whole forward is captured, attention included, since attention reads its boundaries on the device; for a "
    "graph per piece use torch.compile(tower, backend='vit_cudagraph', options={'mode': 'piecewise'})"
)


def _flag(name: str, value: object) -> object:
    check_flag(name, value)
    return value


def _sizes(name: str, value: object) -> tuple[int, ...]:
    return () if value is None else positive_ints(name, value)


def _grids_or_preset(name: str, value: object) -> tuple[units.Grid, ...] | str:
    if isinstance(value, str) and value.strip():
        return value
    try:
        return () if value is None else tuple(map(units.checked_grid, listed(name, value, "grids (t, h, w)")))
    except BudgetError as error:
        raise OptionError(f"{name}: {error}") from None


def _frame_count(name: str, value: object) -> int | None:
    return None if value is None else natural_int(name, value)


def _tp_mode(name: str, value: object) -> object:
    check_choice(name, value, ("weights", "data"))
    return value


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    ENABLE: _flag,
    TOKEN_BUDGETS: _sizes,
    MAX_ITEMS: natural_int,
    MAX_FRAMES: _frame_count,
    TP_MODE: _tp_mode,
    PIECEWISE: _flag,
    CAPTURE_SIZES: _sizes,
    MERGE_SIZE: positive_int,
    BUCKET_SIZES: _sizes,
    GRID_CONFIGS: _grids_or_preset,
    PADDED_MODE: _flag,
    MAX_GRID_SIZE: positive_int,
    VERBOSE: _flag,
    ONE_BY_ONE: _flag,
    BATCH_SIZES: _sizes,
}
"""Every option, and what checks its value."""
