"""Every architecture that is supported: the rows of the adapters' modules."""

from __future__ import annotations

import functools
from importlib import import_module

from torch import nn

from vit_compile.errors import ModelError
from vit_compile.models.architecture import Architecture

ADAPTERS = (
    "packed_grid",
    "tiled_vlms",
    "deepseek_ocr",
    "step3_vl",
    "kimi",
    "kimi_vl",
    "paddleocr_vl",
    "pixtral",
    "minicpm_v",
    "gemma4",
    "siglip2",
    "packed_dense",
    "timm_vit",
)
"""Modules of `vit_compile.models` that have `ROWS`, in the order of the table."""


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """All rows."""
    return tuple(row for name in ADAPTERS for row in import_module(f"vit_compile.models.{name}").ROWS)


def architecture_of(model: nn.Module) -> Architecture:
    """The row of a model, by its type.

    Raises:
        ModelError: it is not supported; the text lists what is, and the ways on.
    """
    for row in architectures():
        if row.is_for(model):
            return row
    kind = getattr(getattr(model, "config", None), "model_type", None)
    raise ModelError(
        f"{type(model).__name__} (model_type {kind!r}) is not supported. Supported are "
        f"{', '.join(row.name for row in architectures())}. For anything else: torch.compile(vision_model, "
        'backend="vit_cudagraph") works for any vision encoder (README.md), and docs/engines.md shows how to write an adapter.'
    )
