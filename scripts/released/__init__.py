"""Models at their released vision sizes with random weights, one file for each adapter: for benchmarks and tests on a GPU.

Text parts are tiny: only the vision part is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Released:
    """One model and one image for it."""

    name: str
    """As it is published, such as "Qwen3-VL-8B"."""

    architecture: str
    """`Architecture.name` of its row."""

    build: Callable[[int | None], nn.Module]
    """Layers of the vision tower (None: all of them) -> the model in eval mode, on the current default device and dtype."""

    inputs: Callable[[torch.device, torch.dtype], dict[str, Any]]
    """One image (or what its processor makes of one) of a typical size, seeded."""

    call: Callable[[nn.Module, dict[str, Any]], Any]
    """The public call of the model that is answered, such as `model.get_image_features(**inputs)`."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """For `accelerate`: the budgets that this image and several of it need, and no more."""

    image: str = ""
    """What the image is, for the table: "448 x 448"."""


def all_released() -> dict[str, Released]:
    """By name."""
    from vit_compile.models.registry import ADAPTERS

    found: dict[str, Released] = {}
    for adapter in ADAPTERS:
        try:
            module = import_module(f"scripts.released.{adapter}")
        except ModuleNotFoundError as error:
            if error.name != f"scripts.released.{adapter}":
                raise
            continue
        found |= {model.name: model for model in module.MODELS}
    return found
