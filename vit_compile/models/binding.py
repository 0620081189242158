"""How an encoder is bound to a Hugging Face model: the table that serves it, and the calls of the model that it answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from vit_compile.backend.proof import difference_over_tolerance
from vit_compile.errors import ModelError
from vit_compile.runtime.table import EncoderTable

Execute = Callable[[Mapping[str, Any]], list[torch.Tensor]]
"""`EncoderCudaGraphManager.execute`."""


class Unserved(Exception):
    """Raised by a `Call.serve`: this call is the model's own to answer, for the reason given. Never reaches the user."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A method of one module that the encoder answers in the model's place."""

    owner: nn.Module
    """Whose method."""

    method: str
    """Its name, such as "forward" or "get_image_features"."""

    takes: tuple[str, ...]
    """Arguments that `serve` gets, by name, defaults included. With any other argument that is not at its default (or None)
    the original answers."""

    serve: Callable[..., Any]
    """`serve(execute, **arguments)` -> what the original returns. May raise `Unserved`."""

    ignores: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments with a value that changes nothing, beside `return_dict=True`."""


class Switch(Protocol):
    """A change of a tower's attention: `AttentionSwitch`, or what does that for towers with another mechanism."""

    def undo(self) -> None:
        """The attention as it was."""


S = TypeVar("S", bound=Switch)


@contextmanager
def undone_on_failure(switch: S) -> Iterator[S]:
    """A switch that stays if what follows succeeds: `with undone_on_failure(AttentionSwitch(tower)) as switch`."""
    try:
        yield switch
    except BaseException:
        switch.undo()
        raise


@dataclass(frozen=True, kw_only=True)
class Binding:
    """An encoder for one model, before it is captured."""

    table: EncoderTable
    calls: Sequence[Call] = ()
    switch: Switch | None = None
    """The towers' attention, if it was switched."""

    encode: Callable[[Execute, Any], Any] | None = None
    """`encode(execute, images)` -> outputs per image, where the architecture takes images of native sizes that way."""

    def undo(self) -> None:
        """The model as it was."""
        if self.switch is not None:
            self.switch.undo()


def find_module(model: nn.Module, *class_names: str) -> nn.Module:
    """The first module of one of these classes, by name: the model itself, or somewhere inside.

    Raises:
        ModelError: there is none.
    """
    for module in model.modules():
        if type(module).__name__ in class_names:
            return module
    raise ModelError(f"{type(model).__name__} has no {' or '.join(class_names)} inside.")


def owner_of(model: nn.Module, children: Sequence[str], parameters: Sequence[str] = ()) -> nn.Module | None:
    """The first module, beginning with the model, that has all these children and parameters of its own; None: there is none."""
    for module in model.modules():
        if all(name in module._modules for name in children) and all(name in module._parameters for name in parameters):
            return module
    return None


def find_owner(model: nn.Module, child: str) -> nn.Module:
    """`owner_of` a child that has to be there.

    `find_owner(model, "multi_modal_projector")` is `model.model` for a model with a head, and `model` without one.

    Raises:
        ModelError: there is none.
    """
    owner = owner_of(model, [child])
    if owner is None:
        raise ModelError(f"{type(model).__name__} has no module with {child!r}.")
    return owner


def original(owner: nn.Module, method: str) -> Callable[..., Any]:
    """The method of the module's class, whatever stands in its place on the instance."""
    # Dynamo of torch 2.11 traces this, but neither `__get__` nor `types.MethodType`.
    return functools.partial(getattr(type(owner), method), owner)


def floating_dtype(module: nn.Module) -> torch.dtype:
    """Of the first floating-point weight: quantised ones do not say what the encoder computes in.

    Raises:
        ModelError: there is none.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    raise ModelError(f"{type(module).__name__} has no floating-point weights.")


def plain_layer(layer: Any, *kinds: type[nn.Module]) -> nn.Module:
    """A layer that an adapter reads the weights of, and does not call: so it has to be what its class says, and nothing more.

    Args:
        layer: the layer; returned.
        kinds: classes that it may have. No others: subclasses and wrappers (LoRA) have a forward of their own.

    Raises:
        ModelError: it is of another class, has a forward of its own, or forward hooks.
    """
    wanted = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    if type(layer) not in kinds:
        found = f"a {type(layer).__module__}.{type(layer).__name__} stands in the place of a plain {wanted}"
    elif "forward" in vars(layer) and not _is_placed(layer):
        found = f"a {wanted} has a forward of its own"
    elif layer._forward_hooks or layer._forward_pre_hooks:
        found = f"a {wanted} has forward hooks"
    else:
        plain: nn.Module = layer
        return plain
    raise ModelError(f"{found}: the adapter reads its weights and does not call it. Merge or remove what was put around it.")


def _is_placed(layer: nn.Module) -> bool:
    """Does the forward in its place only move inputs to the layer's device, as `device_map` of transformers makes it do?"""
    hook, inner = vars(layer).get("_hf_hook"), vars(layer).get("_old_forward")
    return type(hook).__name__ == "AlignDevicesHook" and getattr(inner, "__func__", None) is type(layer).forward


def check_reentry(tower: nn.Module, got: torch.Tensor, want: torch.Tensor) -> None:
    """An adapter that enters a tower through its parts computes what the tower's own forward computes.

    Args:
        tower: for the message.
        got, want: outputs of the adapter and of the tower for the same example.

    Raises:
        ModelError: they differ by more than rounding: the tower is another one than the adapter was written for.
    """
    # In half precision deep towers differ by rounding alone, more than padded and exact runs do; another order of operations, or
    # one that is left out, gives something unrelated.
    most = 1 if got.dtype == torch.float32 else 5
    if got.shape != want.shape or not difference_over_tolerance(got, want) <= most:
        raise ModelError(f"{type(tower).__name__} computes something else than the published tower: it is not supported.")


def comparable(tower: nn.Module) -> bool:
    """Can a tower be compared with its own forward? Not in train mode, which may be random, and not without values."""
    return not tower.training and not any(parameter.is_meta for parameter in tower.parameters())


def noise(tower: nn.Module, *shape: int) -> torch.Tensor:
    """Seeded normal numbers on the tower's device, in its dtype: an example for comparisons."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return values.to(next(tower.parameters()).device, floating_dtype(tower))


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolutions inside round as matrix products do: cuDNN multiplies in TF32, which is not to be taken for another tower."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
