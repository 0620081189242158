"""`Architecture`: one row of the support table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vit_compile.models.binding import Binding


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What `accelerate` looks a model up by, and what docs/models.md shows."""

    name: str
    """As people say it."""

    model_types: tuple[str, ...]
    """`config.model_type` of whole models and of bare towers."""

    classes: tuple[str, ...]
    """Class names of the towers; a model of this architecture has one of them inside."""

    binder: Callable[..., Binding]
    """`binder(model, *classes, fields=, **options)`; its module is the adapter."""

    modalities: tuple[str, ...] = ("image",)
    paths: tuple[str, ...] = ("main",)

    buffers: tuple[str, ...] = ()
    """Inputs of the fixed-shape forward, over all paths."""

    tokens: str
    """Output tokens of an item as a formula; t, h and w are its grid in patches."""

    remote_code: bool = False
    """Not in transformers: the published module structure, loaded with `trust_remote_code`."""

    versions: tuple[str, ...] = ("5.17", "5.24")
    """Of transformers, on which it is tested."""

    limits: tuple[str, ...] = ()
    """What a user has to know, one sentence each."""

    matches: Callable[[nn.Module], bool] | None = None
    """Decides instead of `model_types`, for models without a transformers config."""

    def is_for(self, model: nn.Module) -> bool:
        """Is this model's row this one?"""
        if self.matches is not None:
            return self.matches(model)
        kind = getattr(getattr(model, "config", None), "model_type", None)
        return kind in self.model_types and any(type(module).__name__ in self.classes for module in model.modules())

    def bind(self, model: nn.Module, *, fields: str | None = None, **options: Any) -> Binding:
        """The encoder of a model of this architecture.

        Args:
            model: a whole model, or its tower.
            fields: None for what the language model gets (projector included); "all" for every field that the model's own
                call returns.
            options: of the adapter's table.
        """
        return self.binder(model, *self.classes, fields=fields, **options)
