"""Linear layers with odd widths -> the same with zeros up to a multiple of 16 bytes.

The tensor cores' fast kernels load rows in whole vectors of 16 bytes: 8 values in half precision. A layer whose width is no
multiple of that (Qwen2.5-VL's MLP has 3420 features, patches of 14 x 14 x 3 have 588 values) gets kernels of an older kind.
Inductor can pad such products itself, but decides by size, which would tie a piece that serves all sizes to some of them; this
pass decides by the weight alone.

Zeros are appended to the inner dimension of input and weight, and to the rows of weight and bias; what the additional rows
gave is cut off. The sums are the same but for additional zeros. Weights are padded in every run: a padded copy that is kept
would not follow a weight that is written to.

Shapes: I features in, O features out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.passes import linear_activation
from vit_compile.backend.passes.builder import Builder
from vit_compile.backend.passes.linear_calls import LINEAR, linear_arguments, operands
from vit_compile.backend.passes.values import layout

_BYTES = 16
_HALF = (torch.bfloat16, torch.float16)
_EPILOGUE: Any = linear_activation.OPERATION
_PAD: Any = torch.ops.aten.constant_pad_nd.default


class AlignedLinear:
    """Rewrites every such layer of a graph; also those with an activation in their epilogue."""

    name = "aligned_linear"

    def __init__(self, device_types: tuple[str, ...] = ("cuda",)) -> None:
        self._device_types = device_types

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite `gm` in place; the number of rewritten layers."""
        return sum(_rewrite(gm.graph, node) for node in list(gm.graph.nodes) if self._applies(node))

    def _applies(self, node: fx.Node) -> bool:
        if node.op != "call_function" or (node.target not in LINEAR and node.target is not _EPILOGUE):
            return False
        tensors = operands(node)
        if tensors is None:
            return False
        x, weight = tensors[:2]
        if x.dtype not in _HALF or x.device.type not in self._device_types:
            return False
        static = all(isinstance(side, int) and side for side in weight.shape)
        # A bias may be broadcast: one number, or one for all.
        alike = all(bias.dim() == 1 and bias.shape[0] == weight.shape[0] for bias in tensors[2:-1])
        return static and alike and any(map(_missing, (weight, weight.T))) and _is_contiguous(tensors[-1])


def _is_contiguous(out: compat.FakeTensor) -> bool:
    """Somebody further down may rely on other strides."""
    with compat.running_fake(out.fake_mode):
        same: bool = layout(out) == layout(torch.empty_like(out, memory_format=torch.contiguous_format))
    return same


def _missing(weight: torch.Tensor) -> int:
    """Columns up to the next multiple of 16 bytes."""
    return -weight.shape[1] % (_BYTES // weight.dtype.itemsize)


def _rewrite(graph: fx.Graph, node: fx.Node) -> int:
    x, weight, bias = linear_arguments(node)
    value, before = weight.meta["example_value"], node.meta["example_value"]
    inner, outer, features = _missing(value), _missing(value.T), value.shape[0]
    rest = node.args[3:] if node.target is _EPILOGUE else ()
    target: Any = node.target
    with graph.inserting_before(node), compat.running_fake(before.fake_mode):
        build = Builder(graph, node)
        x = build.call(_PAD, x, [0, inner]) if inner else x
        weight = build.call(_PAD, weight, [0, inner, 0, outer])
        if outer and bias is not None:
            bias = build.call(_PAD, bias, [0, outer])
        out = build.call(target, x, weight, bias, *rest)
        if outer:
            # Contiguous, as it was. Compilers make these two part of what reads them.
            out = build.call(torch.clone, build.call(torch.narrow, out, -1, 0, features), memory_format=torch.contiguous_format)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return 1
