"""What stands in the place of a method that an encoder answers."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from vit_compile.errors import GridError, InputError
from vit_compile.models.binding import Call, Unserved

TEXT_ARGUMENTS = {"use_cache", "logits_to_keep", "cache_position", "output_router_logits", "num_items_in_batch"}
"""What models hand to their towers though only the text part looks at it."""
PLAIN = (bool, int, float, str, list, tuple)
"""Types of values that can be compared with a default: no tensors, no arrays."""


class Handle(Protocol):
    """Who has installed calls: what they need of it, which is nothing for users."""

    def _is_installed(self, call: InstalledCall) -> bool:
        """Does it stand for this handle still?"""
        ...

    def _follow(self) -> bool:
        """Make the encoder anew if the model was changed. Was it?"""
        ...

    def _why_own(self, call: Call, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why the model's own code has to answer: (reason, detail), or None."""
        ...

    def _serve(self, installed: InstalledCall, arguments: Mapping[str, Any]) -> Any:
        """The encoder's answer.

        Raises:
            Unserved, InputError, GridError: it has none.
        """
        ...

    def _own(self, reason: str, detail: str) -> None:
        """Count a call that the model's own code answers."""
        ...


class InstalledCall:
    """Stands in the place of a method on one module."""

    def __init__(self, handle: Handle, call: Call) -> None:
        self._handle, self.call = handle, call
        self._before = vars(call.owner).get(call.method)
        self._original = getattr(call.owner, call.method)
        self._signature = inspect.signature(self._original)
        self.__signature__ = self._signature  # `generate` asks methods what they take

    def install(self) -> None:
        """Take the method's place."""
        setattr(self.call.owner, self.call.method, self)

    def remove(self) -> None:
        """Give the method back, if nobody else has taken its place since."""
        owner, method = self.call.owner, self.call.method
        if vars(owner).get(method) is not self:
            return
        if self._before is None:
            delattr(owner, method)
        else:
            setattr(owner, method, self._before)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own method returns."""
        handle, call = self._handle, self.call
        if not handle._is_installed(self):  # taken out, but somebody had wrapped it before
            return self._original(*args, **kwargs)
        if handle._follow():
            return getattr(call.owner, call.method)(*args, **kwargs)
        taken, why = self._taken(args, kwargs)
        why = why or handle._why_own(call, taken)
        if why is None:
            try:
                return handle._serve(self, taken)
            except Unserved as unserved:
                why = ("unserved", str(unserved))
            except (InputError, GridError) as error:
                why = ("refused-input", str(error))
        handle._own(*why)
        return self._original(*args, **kwargs)

    def _taken(self, args: Any, kwargs: Any) -> tuple[dict[str, Any], tuple[str, str] | None]:
        """The arguments that the encoder takes, and a reason if there are others that change the result."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return {}, ("unserved", str(error))
        bound.apply_defaults()
        given: dict[str, Any] = {}
        defaults: dict[str, Any] = {"return_dict": True, **self.call.ignores}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= bound.arguments[name]
            else:
                given[name] = bound.arguments[name]
                if parameter.default is not inspect.Parameter.empty:
                    defaults.setdefault(name, parameter.default)
        taken = {name: given.pop(name, None) for name in self.call.takes}
        for name, value in given.items():
            harmless = (
                value is None
                or name in TEXT_ARGUMENTS
                or (value is False and name.startswith("output_"))
                or (name in defaults and isinstance(value, PLAIN) and value == defaults[name])
            )
            if not harmless:
                return taken, ("more-outputs" if name.startswith("output_") else "unserved", f"{name}={_short(value)}")
        return taken, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of the model is not accelerated."""
        owner = memo.get(id(self.call.owner))
        if owner is None:
            return self
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return types.MethodType(getattr(type(owner), self.call.method), owner)

    def __reduce__(self) -> Any:
        """Nor is a pickled one."""
        return getattr, (self.call.owner, self.call.method)


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
