"""A check, without a GPU, that a forward keeps off the host: on the device "meta", what has a tensor of the host is noted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCALARS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.fill_.Tensor)
"""A slice that is set to a number goes through a scalar on the host, which is read there and copied nowhere."""


class HostTensors(TorchDispatchMode):
    """Notes operations with a tensor on the host in `noted`. Reads of values on "meta" fail by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, whatever it is."""
        out = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in tree_leaves((args, kwargs, out)) if isinstance(value, torch.Tensor)}
        if "cpu" in devices and func not in SCALARS:
            self.noted.append(str(func))
        return out
