"""`vit_compile::linear_activation`: a linear layer with its activation in the epilogue of the matrix product.

On CUDA it is torch's `_addmm_activation`, which hands bias and activation to cuBLASLt, so that the product is written once,
activated. cuBLASLt knows two activations: ReLU and GELU in its tanh form. Elsewhere the two functions run one after the other
(on a CPU `_addmm_activation` has the other GELU, the exact one). An operation of our own keeps both under one name, and is
opaque to compilers, which would take it apart again.

The epilogue works on the float32 sums of the product, before they are rounded: in half precision results differ from the two
functions by that rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.library import register_fake

from vit_compile import _torch_compat as compat

NAME = "vit_compile::linear_activation"
ACTIVATIONS = ("gelu_tanh", "relu")

_NAMESPACE, _OP_NAME = NAME.split("::")


def linear_activation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x weight^T + bias); no gradient.

    Args:
        x: [.., I], any strides.
        weight, bias: [O, I] and [O], of x's dtype and device.
        activation: "gelu_tanh" or "relu".

    Returns:
        [.., O], contiguous, owned by the caller.
    """
    out: torch.Tensor = torch.ops.vit_compile.linear_activation.default(x, weight, bias, activation)
    return out


def _forward_cuda(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = compat.linear_epilogue(rows, weight, bias, gelu=activation == "gelu_tanh")
    return out.view(*x.shape[:-1], weight.shape[0])


def _forward_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    out = F.linear(x, weight, bias)
    return F.gelu(out, approximate="tanh") if activation == "gelu_tanh" else F.relu(out)


def _forward_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _register() -> Any:
    untyped: Any = torch.library  # Library has no annotations
    library = untyped.Library(_NAMESPACE, "FRAGMENT")
    signature = "(Tensor x, Tensor weight, Tensor bias, str activation) -> Tensor"
    library.define(f"{_OP_NAME}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_OP_NAME, _forward_cpu, "CPU")
    library.impl(_OP_NAME, _forward_cuda, "CUDA")
    register_fake(NAME, _forward_fake, lib=library)
    return library


# The operation lives as long as this object; a second import of this file finds it registered and leaves it alone.
if not hasattr(torch.ops.vit_compile, _OP_NAME):
    _LIBRARY = _register()

OPERATION: Any = torch.ops.vit_compile.linear_activation.default
