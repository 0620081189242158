"""A lint for forwards that are to be captured: what in them waits for the host. Needs no GPU, only a CUDA build of torch.

The forward runs on fake tensors, which have a shape and a device but no values. Whatever would read a value of the device,
has a result whose size depends on the data, or moves data between host and device, is noted with the line that does it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from vit_compile import _torch_compat as compat
from vit_compile.errors import MissingDependencyError
from vit_compile.runtime.graph_config import EncoderCudaGraphConfig
from vit_compile.runtime.protocol import SupportsEncoderCudaGraph
from vit_compile.runtime.table import EncoderTable
from vit_compile.runtime.table_encoder import TableEncoder
from vit_compile.runtime.weights import modules_of, tensors_of

READ = "reads a value on the host"
SIZED_BY_DATA = "has a result whose size the host must read from the device"
TO_DEVICE = "copies from the host to the device"
TO_HOST = "copies from the device to the host"
MIXED = "uses a CPU tensor beside tensors of the device"
ON_HOST = "reads a tensor that the forward computes on the host"

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = (__file__, compat.__file__)
_ITEMS = 2
"""Items and frames that the buffers are made for."""


@dataclass(frozen=True, slots=True)
class HostRead:
    """One operation that a capture cannot hold, or that would make every eager run wait."""

    path: str
    op: str
    """Such as "aten._local_scalar_dense.default"."""

    why: str
    where: str
    """file:line of the innermost frame outside of torch."""

    def __str__(self) -> str:
        return f"{self.where}: {self.op} {self.why} (path {self.path!r})"


def find_host_reads(
    model: EncoderTable | SupportsEncoderCudaGraph, *, dtype: torch.dtype | None = None, token_budget: int | None = None
) -> list[HostRead]:
    """What waits for the host in the fixed-shape forward of every path; nothing, for a forward that can be captured.

    Args:
        model: an adapter, as `EncoderCudaGraphManager` takes it; on any device.
        dtype: of the encoder; None: of its first floating-point weight.
        token_budget: of the buffers; None: the smallest useful one.

    Returns:
        Each place once, in the order in which it is reached. Where the size of a result depends on the data the run of that
        path ends, so there may be more behind it. A value that is read is taken to be 1 from there on.

    Each forward runs twice, and what only the first run does does not count: a capture has warm-up runs in front. Weights are
    replaced for that time and put back, as are attributes that the forward sets, so nobody may use the model meanwhile. Caches of
    functions (`functools.lru_cache`) beside the modules' classes are emptied.

    Tensors that an adapter made and kept are taken to be on the device, if they are where the weights are now. Those that a
    module has as plain attributes stay on the CPU, as they do when a model is moved.

    It is a lint: it does not see what kernels do by themselves, and no capture was tried.

    Raises:
        MissingDependencyError: torch was built without CUDA.
        Exception: whatever a forward raises that has no finding before it.
    """
    if not torch.backends.cuda.is_built():
        raise MissingDependencyError(
            f"find_host_reads needs a build of torch with CUDA (but no GPU), and this is {torch.__version__}: pip install torch "
            "from PyPI on Linux."
        )
    modules = modules_of(model)
    weights = (weight for module in modules for weight in module.parameters() if weight.is_floating_point())
    dtype = dtype or next((weight.dtype for weight in weights), torch.float32)
    encoder = TableEncoder(model, device=torch.device("cpu"), dtype=dtype) if isinstance(model, EncoderTable) else model
    declaration = encoder.get_encoder_cudagraph_config()
    found: list[HostRead] = []
    for path in declaration.paths:
        values = _buffers(encoder, declaration, path, dtype, token_budget)
        found += _of_path(encoder, model, modules, path, values)
    return list(dict.fromkeys(found))


def _buffers(
    encoder: SupportsEncoderCudaGraph, declaration: EncoderCudaGraphConfig, path: str, dtype: torch.dtype, budget: int | None
) -> Mapping[str, Any]:
    """What the forward gets for the smallest graph of a path that there may be."""
    smallest, largest = encoder.get_encoder_cudagraph_budget_range()
    budgets = [max(smallest, declaration.paths[path].min_token_budget or 0), largest] if budget is None else [budget]
    choices = list(product(budgets, product(*declaration.capture_axes)))
    reachable = declaration.is_reachable
    tokens, axes = next(
        (choice for choice in choices if reachable is None or reachable(path, *choice, _ITEMS, _ITEMS)), choices[-1]
    )
    device = torch.device("cpu")
    return encoder.prepare_encoder_cudagraph_capture_inputs(tokens, _ITEMS, _ITEMS, device, dtype, path, axes).values


def _of_path(
    encoder: SupportsEncoderCudaGraph, model: Any, modules: Sequence[nn.Module], path: str, values: Mapping[str, Any]
) -> list[HostRead]:
    fakes = _Fakes(modules)
    inputs = {name: fakes(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    forward = _Swapped(modules, lambda: encoder.encoder_cudagraph_forward(inputs, path))
    found: list[HostRead] = []
    with _as_before(modules), _loose_tensors(model, fakes), torch.no_grad():
        for _ in range(2):
            watch = _Watch(path, fakes)
            try:
                with fakes.mode, watch:
                    forward.run(fakes)
            except Exception:
                if not watch.found:
                    raise
                return watch.found
            found = watch.found
    return found


class _Fakes:
    """Tensors of the same shape and strides on a device that need not be there; the same one for the same tensor."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        inside = [module for root in modules for module in root.modules()]
        self._homes = {weight.device for root in modules for weight in root.parameters()} or {torch.device("cpu")}
        self._plain = {id(value) for module in inside for value in vars(module).values() if isinstance(value, torch.Tensor)}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            self._made[id(tensor)] = (tensor, fake)
        return self._made[id(tensor)][1]

    def kept(self, value: Any) -> Any:
        """The same for real tensors among an operation's arguments that the adapter keeps; all else as it is."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.kept, value))
        if not isinstance(value, torch.Tensor) or isinstance(value, compat.FakeTensor):
            return value
        return value if id(value) in self._plain or value.device not in self._homes else self(value)


class _Swapped(nn.Module):
    """A function of modules, for `functional_call`."""

    def __init__(self, modules: Sequence[nn.Module], function: Callable[[], Any]) -> None:
        super().__init__()
        self.parts, self._function = nn.ModuleList(modules), function

    def run(self, fakes: _Fakes) -> None:
        """Call it with fakes in the place of all weights."""
        weights = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        swapped = {name: fakes(weight) for name, weight in weights.items()}
        torch.func.functional_call(self, swapped, (), tie_weights=False)

    def forward(self) -> None:
        """The function."""
        self._function()


class _Watch(compat.DispatchMode):
    """Notes what waits for the host."""

    def __init__(self, path: str, fakes: _Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[HostRead] = []
        self._path, self._fakes = path, fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is not torch.ops.aten.lift_fresh:  # of a tensor that was made this very moment
            args, kwargs = self._fakes.kept(args), {name: self._fakes.kept(value) for name, value in kwargs.items()}
        why = _why(func, args, kwargs)
        if why is not None:
            self.found.append(HostRead(self._path, str(func), why, _where()))
            if why == READ and isinstance(args[0], torch.Tensor) and args[0].dim() == 0:
                return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        try:
            return func(*args, **kwargs)
        except compat.DATA_DEPENDENT:
            if why is None:
                self.found.append(HostRead(self._path, str(func), ON_HOST, _where()))
            raise


def _why(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operation waits for the host; None where it does not."""
    packet, tensors = func.overloadpacket, list(_tensors((args, kwargs)))
    if packet in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
        target = kwargs.get("device") if packet is torch.ops.aten._to_copy else args[0].device
        source = tensors[-1].device.type
        if target is None or torch.device(target).type == source:
            return None
        return TO_DEVICE if source == "cpu" else TO_HOST
    if all(tensor.is_cpu for tensor in tensors):
        return None
    if torch.Tag.data_dependent_output in func.tags:
        return READ
    if packet in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        # A mask with one number of the host is filled, without a look at the mask.
        filled = len(args) > 2 and args[2].is_cpu and args[2].numel() == 1
        if not filled and any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])):
            return SIZED_BY_DATA
    elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        return SIZED_BY_DATA
    # A kernel gets a CPU tensor of a single number by value.
    return MIXED if any(tensor.is_cpu and tensor.dim() > 0 for tensor in tensors) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _where() -> str:
    """file:line of the innermost frame outside of torch and of this file."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, "<")) and name not in _OWN:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextmanager
def _as_before(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards modules have the attributes that they had, and no cache beside their classes holds a fake tensor."""
    before = [(module, dict(vars(module))) for root in modules for module in root.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            now = vars(module)
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update(attributes)
        kinds = {type(module) for module, _ in before}
        homes = {id(home): home for kind in kinds for home in (vars(kind), vars(sys.modules[kind.__module__]))}
        for home in homes.values():
            for value in list(home.values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear) and not isinstance(value, type | torch.Tensor):
                    clear()


@contextmanager
def _loose_tensors(model: Any, fakes: _Fakes) -> Iterator[None]:
    """Fakes in the place of the tensors among a model's own attributes."""
    own = {name: value for name, value in tensors_of(model).items() if vars(model).get(name) is value}
    vars(model).update({name: fakes(value) for name, value in own.items()})
    try:
        yield
    finally:
        vars(model).update(own)
