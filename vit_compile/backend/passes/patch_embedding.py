"""Patch-embedding convolution -> matrix product.

A convolution whose kernel equals its stride, without padding, dilation or groups, reads every pixel once: it is the
product of unfolded patches `[rows, C * prod(kernel)]` with the weight `[E, C * prod(kernel)]`. GEMM libraries are much
faster at it than implicit convolutions (3-D ones above all). The result is equal up to the order of summation.

Shapes: N images, C channels, K kernel sides, G grid sides (input side // kernel side), E embedding width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.passes.builder import Builder
from vit_compile.backend.passes.values import refresh_downstream

_CONVOLUTIONS: dict[Any, int] = {
    torch.conv2d: 2,
    torch.conv3d: 3,
    torch.nn.functional.conv2d: 2,
    torch.nn.functional.conv3d: 3,
    torch.ops.aten.conv2d.default: 2,
    torch.ops.aten.conv3d.default: 3,
}
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


class PatchEmbeddingGemm:
    """Rewrites every such 2-D or 3-D convolution of a graph."""

    name = "patch_embedding_gemm"

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite `gm` in place; the number of rewritten convolutions."""
        nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _CONVOLUTIONS]
        return sum(_rewrite(gm.graph, node, _CONVOLUTIONS[node.target]) for node in nodes)


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return {**_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_all(value: Any, wanted: int) -> bool:
    if isinstance(value, int | torch.SymInt):
        return value == wanted
    return isinstance(value, list | tuple) and all(v == wanted for v in value)


def _sides(value: Any, dims: int) -> tuple[Any, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _applies(arguments: dict[str, Any], dims: int) -> bool:
    pixels, weight = arguments["input"], arguments["weight"]
    if not isinstance(pixels, fx.Node) or not isinstance(weight, fx.Node):
        return False
    x, w = pixels.meta.get("example_value"), weight.meta.get("example_value")
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor) or x.dim() != dims + 2:
        return False
    kernel = tuple(w.shape[2:])
    static = all(isinstance(side, int) for side in (*w.shape, x.shape[1]))
    padding = arguments["padding"]
    return (
        static
        and _sides(arguments["stride"], dims) == kernel
        and (padding == "valid" or (not isinstance(padding, str) and _is_all(padding, 0)))
        and _is_all(arguments["dilation"], 1)
        and arguments["groups"] == 1
        and x.dtype == w.dtype
    )


def _rewrite(graph: fx.Graph, node: fx.Node, dims: int) -> int:
    arguments = _arguments(node)
    if not _applies(arguments, dims):
        return 0
    pixels, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    width, channels, *kernel = weight.meta["example_value"].shape
    fan_in = channels
    for side in kernel:
        fan_in *= side
    mode = pixels.meta["example_value"].fake_mode
    with graph.inserting_before(node), compat.running_fake(mode):
        build = Builder(graph, node)
        images = build.side(pixels, 0)
        sides = [build.side(pixels, dim + 2) for dim in range(dims)]
        grid = [build.floordiv(side, k) for side, k in zip(sides, kernel, strict=True)]
        x = pixels
        for dim, (side, cells, k) in enumerate(zip(sides, grid, kernel, strict=True)):
            if not isinstance(side, int) or side % k:
                x = build.call(torch.narrow, x, dim + 2, 0, build.mul(cells, k))
        if all(cells == 1 for cells in grid):
            rows = build.method("reshape", x, images, fan_in)
        else:
            folded = build.method(
                "reshape", x, images, channels, *(part for pair in zip(grid, kernel, strict=True) for part in pair)
            )
            # [N, C, G1, K1, G2, K2, ..] -> [N, G1, G2, .., C, K1, K2, ..]
            order = (0, *range(2, 2 * dims + 2, 2), 1, *range(3, 2 * dims + 2, 2))
            rows = build.method("reshape", build.method("permute", folded, *order), images, *grid, fan_in)
        matrix = build.method("reshape", weight, width, fan_in)
        product = build.call(torch.nn.functional.linear, rows, matrix, bias)
        if all(cells == 1 for cells in grid):
            result = build.method("reshape", product, images, width, *grid)
        else:
            result = _channels_first(build, product, node, dims)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    try:
        refresh_downstream(graph, result, mode)
    except (RuntimeError, ValueError):  # a view further down relies on the convolution's own strides
        with graph.inserting_after(result):
            copy = graph.call_method("contiguous", (result,))
        result.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        with compat.running_fake(mode):
            copy.meta["example_value"] = result.meta["example_value"].contiguous()
        refresh_downstream(graph, copy, mode)
    return 1


def _channels_first(build: Builder, product: fx.Node, node: fx.Node, dims: int) -> fx.Node:
    """`[N, G.., E]` -> `[N, E, G..]`: a free view in front of the usual `flatten(2).transpose(1, 2)`, else a copy.

    Behind that pair the rows `[N, L, E]` are contiguous; anywhere else a reader may rely on the convolution's own strides.
    """
    view = build.method("permute", product, 0, dims + 1, *range(1, dims + 1))
    usual = all(_is_call(user, "flatten", 2) and all(_is_call(u, "transpose", 1, 2) for u in user.users) for user in node.users)
    strides = any(_is_call(n, "as_strided") or _is_call(n, "stride") for n in build.graph.nodes)
    return view if usual and node.users and not strides else build.method("contiguous", view)


def _is_call(node: fx.Node, name: str, *args: int) -> bool:
    """Is `node` a call of a tensor method or function `name` (with just these arguments, if any are given)?"""
    target = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return target == name and (not args or (node.args[1:] == args and not node.kwargs))
