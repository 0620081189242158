"""The geometry of a tower, from a model's configuration alone or from plain numbers; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_compile.errors import ModelError, OptionError
from vit_compile.planning.traffic import Geometry

_BYTES = {"float32": 4, "float64": 8}
DEFAULT_BYTES = 2
"""Of an element where the configuration names no wider type: bfloat16."""
_INSTEAD = "give --patch-size and --merge-size instead of --model"


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one row in a tower's buffers."""

    patch_bytes: int
    """Of one patch at the input: channels x frames x pixels."""
    token_bytes: int
    """Of one token at the output, deepstack levels included."""


@dataclass(frozen=True, slots=True)
class Tower:
    """What a plan has to know of a model."""

    name: str | None
    """Folder or hub name. None: made from numbers."""
    geometry: Geometry
    widths: Widths | None = None
    """None: not known."""

    def row_bytes(self, tokens: int) -> int | None:
        """Bytes of a budget's input and output rows; arithmetic, and a part only of what its graph takes. None: not known."""
        if self.widths is None:
            return None
        return tokens * (self.geometry.merge_size**2 * self.widths.patch_bytes + self.widths.token_bytes)


def tower_of(
    model: str | None,
    *,
    patch_size: int | None,
    merge_size: int | None,
    temporal_patch_size: int | None,
    extra_tokens: int,
    max_image_tokens: int,
) -> Tower:
    """The tower of a model's `config.json`, or one of these sizes; without either, Qwen3-VL's 16, 2 and 2.

    Raises:
        OptionError: Both a model and sizes are given.
        ModelError: The configuration cannot be read, or does not say how many tokens an image has.
        BudgetError: A number is out of range.
    """
    sizes = {"patch_size": patch_size, "merge_size": merge_size, "temporal_patch_size": temporal_patch_size}
    limits = {"extra_tokens": extra_tokens, "max_tokens": max_image_tokens}
    given = {name: size for name, size in sizes.items() if size is not None}
    if model is None:
        if not given:
            given = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
        if "patch_size" not in given:
            raise OptionError(f"--{next(iter(given)).replace('_', '-')} needs --patch-size.")
        return Tower(None, Geometry(**given, **limits))
    if given:
        raise OptionError(f"--{next(iter(given)).replace('_', '-')} contradicts --model, whose configuration has it: give one.")
    config = _load(model)
    vision = getattr(config, "vision_config", None) or config
    merge = getattr(vision, "spatial_merge_size", getattr(config, "spatial_merge_size", None))
    if merge is None and any(hasattr(config, name) for name in ("image_token_id", "image_token_index")):
        raise ModelError(
            f"{model} ({config.model_type}) has no spatial_merge_size, so its tokens follow another rule: {_INSTEAD}."
        )
    patch = _size(model, vision, "patch_size")
    frames = _size(model, vision, "temporal_patch_size") if getattr(vision, "temporal_patch_size", None) is not None else 1
    geometry = Geometry(patch, merge or 1, frames, **limits)
    return Tower(model, geometry, _widths(config, vision, geometry))


def _load(name: str) -> Any:
    from transformers import AutoConfig

    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{name} is not a model folder: it has no config.json.")
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # the loader raises many kinds, and a user can act on the text only
        text = str(error).strip() or type(error).__name__
        raise ModelError(f"{name}: cannot read the model's configuration ({text.splitlines()[0]})") from error


def _size(name: str, vision: Any, field: str) -> int:
    value = getattr(vision, field, None)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{name}: the vision configuration's {field} is {value!r}, and not one number: {_INSTEAD}.")
    return value


def _widths(config: Any, vision: Any, geometry: Geometry) -> Widths | None:
    """None where the configuration does not name its widths."""
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None)
    width = getattr(vision, "out_hidden_size", None) or getattr(vision, "hidden_size", None)
    if not isinstance(channels, int) or not isinstance(width, int):
        return None
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    element = _BYTES.get(dtype, DEFAULT_BYTES)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    pixels = channels * geometry.temporal_patch_size * geometry.patch_size**2
    return Widths(patch_bytes=element * pixels, token_bytes=element * width * levels)
