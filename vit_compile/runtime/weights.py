"""Noticing that the weights behind captured graphs were replaced: a graph reads the memory that it was recorded with."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_IS_TRAINING = operator.itemgetter("training")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT_SWITCHES = frozenset({"torch", "torchvision", "transformers", "transformers_modules", "timm"})
"""Packages whose layers are not switched by attributes once they are built: they are not looked at, which would take long."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType)
_SEQUENCES = (list, tuple)
_MISSING = object()
_COUNT = "(number of attributes)"
MOST_ENTRIES = 64
"""Of a container; longer ones are data, not settings, and would take long to compare."""

Settings = list[tuple[dict[str, Any], str, Any]]


def modules_of(model: Any) -> list[nn.Module]:
    """The modules whose weights a model's graphs read: what it says (`encoder_modules()`), else those among its attributes."""
    declared = getattr(model, "encoder_modules", None)
    if callable(declared):
        return list(declared())
    if isinstance(model, nn.Module):
        return [model]
    return [value for value in _held(model) if isinstance(value, nn.Module)]


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Tensors that are attributes of a model that is no module itself, or what its `encoder_tensors()` says."""
    declared = getattr(model, "encoder_tensors", None)
    if callable(declared):
        return dict(declared())
    if isinstance(model, nn.Module):
        return {}
    return {name: value for name, value in getattr(model, "__dict__", {}).items() if isinstance(value, torch.Tensor)}


def _held(model: Any) -> Iterator[Any]:
    """Attributes of an object, and what lies in lists, tuples and dicts among them."""
    for value in getattr(model, "__dict__", {}).values():
        if isinstance(value, _SEQUENCES):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def settings_of(modules: Iterable[nn.Module]) -> Settings:
    """Plain attributes of layers that somebody has put into a tower: an adapter that can be switched off keeps a flag, a scale or
    a name there, which a graph has frozen. (The attributes' home, name, a copy of the value.)"""
    found: Settings = []
    for root in modules:
        for module in root.modules():
            if type(module).__module__.partition(".")[0] in _WITHOUT_SWITCHES:
                continue
            home = vars(module)
            found.append((home, _COUNT, len(home)))  # a default of the class may get a value on the instance
            found += [
                (home, name, copy.deepcopy(value))
                for name, value in home.items()
                if name not in _OF_EVERY_MODULE and _is_plain(value)
            ]
    return found


def _is_plain(value: Any, depth: int = 3) -> bool:
    if isinstance(value, list | tuple | set | frozenset | dict):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and len(value) <= MOST_ENTRIES and all(_is_plain(entry, depth - 1) for entry in entries)
    return isinstance(value, _PLAIN)


def unchanged(settings: Settings) -> Settings:
    """Those that still have their values: the same tuples."""
    return [setting for setting in settings if _value(setting) == setting[2]]


def _value(setting: tuple[dict[str, Any], str, Any]) -> Any:
    home, name, _ = setting
    return len(home) if name is _COUNT else home.get(name, _MISSING)


class Entries:
    """Entries of dicts, such as the parameters or children of modules, and whether they still hold the same objects."""

    def __init__(self) -> None:
        self._homes: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._empty: list[dict[str, Any]] = []
        self._whole: list[dict[str, Any]] = []
        self._lengths: list[int] = []

    def add(self, home: dict[str, Any], name: str) -> None:
        """Watch one entry."""
        self._homes.append(home)
        self._names.append(name)
        self._values.append(home[name])

    def add_all(self, home: dict[str, Any]) -> None:
        """Watch every entry, and that none comes or goes."""
        if not home:
            self._empty.append(home)
            return
        self._whole.append(home)
        self._lengths.append(len(home))
        for name in home:
            self.add(home, name)

    def changed(self) -> bool:
        """Is any of them another object, or missing, or new?"""
        # Over a thousand entries before every call: `map` keeps the loops in C.
        try:
            same = all(map(operator.is_, map(operator.getitem, self._homes, self._names), self._values))
        except KeyError:
            return True
        return not same or any(self._empty) or list(map(len, self._whole)) != self._lengths


class WeightWatch:
    """What the modules consisted of when their graphs were recorded.

    Replaced parameters, buffers and submodules are seen (LoRA merges, `load_state_dict(assign=True)`, `.to()`), and so is new
    memory behind the same parameter. A change of values in place is none: the graphs read it. Costs some 80 microseconds for a
    tower of 27 layers, and half a microsecond for each setting; nothing on the device is touched.

    Args:
        modules, tensors: see `modules_of` and `tensors_of`.
        settings: of `settings_of` before the graphs were recorded; those that a run changes itself, like a counter, do not count.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tensors: Mapping[str, torch.Tensor] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._settings = unchanged(settings or [])
        self._entries = Entries()
        self._tensors: list[torch.Tensor] = []
        self._modes: list[nn.Module] = []
        self._attributes: list[dict[str, Any]] = []
        self._with_property: list[nn.Module] = []
        self._loose = {} if tensors is None else dict(tensors)
        for root in modules:
            self._modes.append(root)
            for module in root.modules():
                if "training" in vars(module):
                    self._attributes.append(vars(module))
                else:  # a module that `torch.compile` has wrapped has a property
                    self._with_property.append(module)
                for home in (module._parameters, module._buffers, module._modules):
                    self._entries.add_all(home)
                    self._tensors += [value for value in home.values() if isinstance(value, torch.Tensor)]
        self._tensors += self._loose.values()
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))

    def changed(self) -> bool:
        """Is any weight another object, or in other memory, or a setting another one, than when this was made?"""
        return self.replaced() or self.moved()

    def replaced(self) -> bool:
        """Is any weight another object?"""
        return self._entries.changed()

    def moved(self) -> bool:
        """Is any of the weights that were there in other memory, or a setting another one?

        The weights are held here: memory that is where it was is theirs, whoever else has let go of it.
        """
        if self._settings and len(unchanged(self._settings)) < len(self._settings):
            return True
        return list(map(torch.Tensor.data_ptr, self._tensors)) != self._pointers

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model's own code runs inside: a setting that it changes itself, such as a log of its calls, is not the user's.

        One that was changed before stays a change.
        """
        if not self._settings:
            yield
            return
        before = unchanged(self._settings)
        try:
            yield
        finally:
            after = unchanged(before)
            if len(after) < len(before):
                own = {id(setting) for setting in before} - {id(setting) for setting in after}
                self._settings = [setting for setting in self._settings if id(setting) not in own]

    def is_for(self, modules: list[nn.Module], tensors: Mapping[str, torch.Tensor] | None = None) -> bool:
        """Was it made for these very modules and tensors?"""
        loose = tensors or {}
        return (
            self._modes == modules
            and self._loose.keys() == loose.keys()
            and all(map(operator.is_, self._loose.values(), map(loose.get, self._loose)))
        )

    def training(self) -> bool:
        """Is one of the modules, or of their children, in train mode?"""
        # `train()` and `eval()` write it into nearly every module itself.
        return any(map(_IS_TRAINING, self._attributes)) or any(module.training for module in self._with_property)


def train_mode(modules: Iterable[nn.Module]) -> str | None:
    """The name of a module in train mode, children included; None where there is none."""
    for root in modules:
        for name, module in root.named_modules():
            if module.training:
                return name or type(root).__name__
    return None
