"""Calls of a linear layer in a traced graph, for the passes that rewrite them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat

LINEAR = {torch.nn.functional.linear, torch.ops.aten.linear.default}


def linear_arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear call."""
    given = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
    return given.get("input"), given.get("weight"), given.get("bias")


def operands(node: fx.Node) -> list[compat.FakeTensor] | None:
    """Input [..,I], weight [O,I], bias where there is one, and result of a linear call, with at least two dims of the input.

    None where one of them is no plain tensor (other subclasses, as quantised weights, compute in their own way), or where they
    have several dtypes (under autocast the product has another one than what goes in).
    """
    given = [argument for argument in linear_arguments(node) if argument is not None]
    if not all(isinstance(argument, fx.Node) for argument in given):
        return None
    values = [each.meta.get("example_value") for each in (*given, node)]
    tensors = [value for value in values if isinstance(value, compat.FakeTensor)]
    if len(tensors) < len(values) or len({value.dtype for value in tensors}) > 1:
        return None
    return tensors if tensors[0].dim() >= 2 and tensors[1].dim() == 2 else None
