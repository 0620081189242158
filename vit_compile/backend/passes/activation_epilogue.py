"""Linear layer + activation -> one operation, whose activation runs in the epilogue of the matrix product.

Only for what the epilogue computes exactly: ReLU, and GELU in its tanh form. The exact GELU (DINOv2, InternVL, GLM), the quick
one (CLIP, Qwen2-VL) and gated layers (Qwen2.5-VL) have none and are left to the compiler. A layer without bias is left alone,
too, and one whose product somebody else reads.
"""

from __future__ import annotations

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.passes import linear_activation as operation
from vit_compile.backend.passes.linear_calls import LINEAR, linear_arguments, operands
from vit_compile.backend.passes.values import layout

_GELU = {torch.nn.functional.gelu, torch.ops.aten.gelu.default}
_RELU = {torch.nn.functional.relu, torch.relu, torch.ops.aten.relu.default}


class ActivationEpilogue:
    """Rewrites every such pair of a graph."""

    name = "activation_epilogue"

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite `gm` in place; the number of rewritten pairs."""
        return sum(_rewrite(gm.graph, node) for node in list(gm.graph.nodes))


def _activation(node: fx.Node) -> str | None:
    """Which activation with an epilogue this node computes."""
    if node.op == "call_method":
        return "relu" if node.target == "relu" else None
    if node.op != "call_function":
        return None
    if node.target in _RELU:
        return "relu"
    approximate = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
    return "gelu_tanh" if node.target in _GELU and approximate == "tanh" else None


def _applies(linear: fx.Node) -> bool:
    if linear.op != "call_function" or linear.target not in LINEAR or len(linear.users) != 1:
        return False
    tensors, (_, _, bias) = operands(linear), linear_arguments(linear)
    return tensors is not None and bias is not None and tensors[0].is_floating_point()


def _rewrite(graph: fx.Graph, node: fx.Node) -> int:
    activation = _activation(node)
    linear = node.args[0] if node.args else node.kwargs.get("input")
    if activation is None or not isinstance(linear, fx.Node) or not _applies(linear):
        return 0
    arguments = (*linear_arguments(linear), activation)
    mode = linear.meta["example_value"].fake_mode
    with compat.running_fake(mode):
        value = operation.linear_activation(*fx.map_arg(arguments, lambda n: n.meta["example_value"]))
    if layout(value) != layout(node.meta["example_value"]):
        return 0  # somebody further down may rely on the strides
    # In the linear layer's place, not the activation's: in between somebody may write into what the layer reads.
    with graph.inserting_before(linear):
        fused = graph.call_function(operation.OPERATION, arguments)
    fused.meta["example_value"] = value
    fused.meta["stack_trace"] = node.meta.get("stack_trace")
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    graph.erase_node(linear)
    return 1
