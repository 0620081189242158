"""What an encoder was bound to: which modules, where they hang in the model, and who listens to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from vit_compile.runtime.weights import Entries


class Structure:
    """The modules of an encoder and their places, as they were when this was made.

    A replaced projector, a tower put in another's place, a layer wrapped by an adapter (LoRA) are seen; values and weights are
    not looked at (`WeightWatch` does that). Costs about 30 microseconds for a tower of 27 layers.

    Args:
        model: the model that the user has.
        roots: the encoder's modules somewhere in it; one that is not found has no place to watch.
        inside: watch the modules inside of the roots, too.
    """

    def __init__(self, model: nn.Module, roots: Sequence[nn.Module], *, inside: bool = True) -> None:
        self._entries = Entries()
        for root in roots:
            for parent, name in _way(model, root):
                self._entries.add(parent._modules, name)
            for module in root.modules() if inside else ():
                self._entries.add_all(module._modules)

    def changed(self) -> bool:
        """Is any module another one, or in another place?"""
        return self._entries.changed()


def _way(model: nn.Module, root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Parents and names from the model down to a module in it."""
    for path, module in model.named_modules():
        if module is root and path:
            way, parent = [], model
            for name in path.split("."):
                way.append((parent, name))
                parent = getattr(parent, name)
            return way
    return []


class Listeners:
    """Forward hooks of the user's on an encoder's modules: a replay would not run them.

    Args:
        roots: the encoder's modules.
        called: modules whose `forward` the encoder answers: their own hooks run around that.
    """

    def __init__(self, roots: Sequence[nn.Module], called: Collection[nn.Module]) -> None:
        self._hooks: list[tuple[nn.Module, dict[int, Any]]] = [
            (module, hooks)
            for root in roots
            for module in root.modules()
            if not any(module is one for one in called)
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def found(self) -> str | None:
        """Where one is, None if nowhere. transformers' own, which record hidden states, do not count."""
        for module, hooks in self._hooks:
            if hooks and not all(map(_is_transformers, hooks.values())):
                return f"{type(module).__name__} has a forward hook"
        return None


def _is_transformers(hook: Any) -> bool:
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return home.partition(".")[0] == "transformers"
