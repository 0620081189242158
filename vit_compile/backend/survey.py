"""What a piece would do to a capture, found by running it once on fake tensors.

Looks at the ATen operations behind a piece: random numbers, host reads, copies between host and device, writes into
inputs. The result is facts; what follows from them is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat


@dataclass(slots=True)
class PieceFacts:
    """Names of the operations that matter, each with where it was met; empty lists for an ordinary piece."""

    random: list[str] = field(default_factory=list)
    host_reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    mutated_inputs: set[int] = field(default_factory=set)
    """Inputs that are written into, by position."""
    aliases: dict[int, int] = field(default_factory=dict)
    """Outputs that share memory with an input: output position to input position."""


# Under a dispatch mode these are dispatched too, and the fake mode below would turn symbolic sizes into integers.
_METADATA: dict[Any, Any] = {
    torch.ops.aten.size.default: lambda t: t.size(),
    torch.ops.aten.sym_size.default: lambda t: t.size(),
    torch.ops.aten.stride.default: lambda t: t.stride(),
    torch.ops.aten.sym_stride.default: lambda t: t.stride(),
    torch.ops.aten.numel.default: lambda t: t.numel(),
    torch.ops.aten.sym_numel.default: lambda t: t.numel(),
    torch.ops.aten.storage_offset.default: lambda t: t.storage_offset(),
    torch.ops.aten.sym_storage_offset.default: lambda t: t.storage_offset(),
}


class _Recorder(compat.DispatchMode):
    """Watches every ATen call of a fake run."""

    def __init__(self, facts: PieceFacts, inputs: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.facts, self.inputs, self.where = facts, inputs, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return _METADATA[func](args[0])
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and not _no_dropout(func, args, kwargs):
            self.facts.random.append(f"{func} at {self.where}")
        if _reads_data(func, args):
            self.facts.host_reads.append(f"{func} at {self.where}")
        devices = {t.device.type for t in tensors if t.dim() > 0}
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if len(devices) > 1 or (target is not None and devices and devices != {target}):
            self.facts.copies.append(f"{func} at {self.where}")
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    self._note_write(value)
        return func(*args, **kwargs)

    def _note_write(self, value: torch.Tensor) -> None:
        index = self.inputs.get(value.untyped_storage()._cdata)
        if index is not None:
            self.facts.mutated_inputs.add(index)


def _reads_data(func: Any, args: Any) -> bool:
    """Does the shape or a host value depend on the data? Indexing does so only with masks."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _no_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention kernels carry the random tag for their dropout; with probability 0 they draw nothing."""
    if "attention" not in str(func):
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = kwargs.get("dropout_p", args[position] if position < len(args) else argument.default_value)
            return float(value or 0.0) == 0.0
    return True


def example_value(value: Any) -> Any:
    """What an argument of a traced call stood for: a node's fake value, else the argument itself."""
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def source_line(node: fx.Node) -> str:
    """The line of the user's code behind a node, if known."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]
    return lines[-1] if lines else ""


class _Runner(fx.Interpreter):
    def __init__(self, piece: fx.GraphModule, recorder: _Recorder) -> None:
        super().__init__(piece)
        self.recorder = recorder

    def run_node(self, node: fx.Node) -> Any:
        line = source_line(node)
        self.recorder.where = f"{node.name} ({line})" if line else node.name
        return super().run_node(node)


def survey(piece: fx.GraphModule, args: Sequence[Any], mode: compat.FakeTensorMode) -> PieceFacts:
    """Run `piece` on the fake tensors `args` and report what it does."""
    facts = PieceFacts()
    storages = {a.untyped_storage()._cdata: i for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    recorder = _Recorder(facts, storages)
    with compat.running_fake(mode), recorder:
        outputs = _Runner(piece, recorder).run(*args)
    for index, output in enumerate(outputs if isinstance(outputs, tuple | list) else (outputs,)):
        if isinstance(output, torch.Tensor):
            origin = storages.get(output.untyped_storage()._cdata)
            if origin is not None:
                facts.aliases[index] = origin
    return facts
