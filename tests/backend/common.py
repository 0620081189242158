"""What the backend's tests share: compiled towers, calls of them, and the parts of a traced graph.

Shapes: T rows, C channels, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tests.towers import COUNTING_NAME, ToyTower, boundaries, toy_rows, toy_tower
from vit_compile.backend import passes as graph_passes
from vit_compile.backend import roles as role_module
from vit_compile.backend.builder import Builder
from vit_compile.backend.pieces import PieceLibrary
from vit_compile.backend.program import Program
from vit_compile.backend.roles import Role, RoleTable
from vit_compile.backend.sizes import Env, SymbolTable
from vit_compile.backend.split import Split, split

BUDGETS = (8, 16, 32)
BOUND = 64
"""A `max_seqlen` above every segment of these tests: a constant, so that it causes no new trace."""


def compiled(model: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Any:
    """`model` through this backend; pieces run as they are unless `compiler` says otherwise."""
    return torch.compile(model, backend="vit_cudagraph", dynamic=dynamic, options={"compiler": "eager", **options})


def compiled_toy(depth: int = 3, **options: Any) -> tuple[ToyTower, Any]:
    """An untouched toy tower, and the same one compiled piecewise with `BUDGETS`."""
    model = toy_tower(depth)
    defaults: dict[str, Any] = {"mode": "piecewise", "splitting_ops": [COUNTING_NAME], "token_budgets": BUDGETS}
    return model, compiled(model, **{**defaults, **options})


def wide_rows(rows: int, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers [rows, 12], for the towers that project patches."""
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed))


def packed(
    lengths: Sequence[int],
    *,
    make: Callable[[int, int], torch.Tensor] = toy_rows,
    capacity: int | None = None,
    bound: int | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(x, cu_seqlens, max_seqlen) of segments with these lengths."""
    longest = max(lengths, default=0)
    return make(sum(lengths), seed), boundaries(list(lengths), capacity), longest if bound is None else bound


def dynamic(args: Iterable[Any]) -> list[Any]:
    """The same arguments with dimension 0 of every tensor marked dynamic, on aliases: one trace for all sizes."""
    marked = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dim() and arg.shape[0] > 1:
            arg = arg.detach()
            torch._dynamo.mark_dynamic(arg, 0)
        marked.append(arg)
    return marked


def trace_dynamic(function: Any, *args: Any) -> Any:
    """Call `function` once with dynamic rows, without gradients: what later calls find traced."""
    with torch.no_grad():
        return function(*dynamic(args))


@torch.no_grad()
def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call without gradients."""
    return function(*args, **kwargs)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, tuple | list):
        return [t for item in value for t in tensors(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in tensors(getattr(value, name))]
    return []


def largest_difference(got: Any, want: Any) -> float:
    """Largest absolute difference between two outputs of the same structure."""
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    assert pairs, "nothing to compare"
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs), "shapes or dtypes differ"
    return max((float((a - b).detach().abs().max()) if a.numel() else 0.0) for a, b in pairs)


@dataclass
class Traced:
    """A traced graph and what the backend makes of it."""

    gm: fx.GraphModule
    table: SymbolTable
    cut: Split
    library: PieceLibrary
    program: Program
    roles: RoleTable
    env: Env
    """The sizes with which it was traced."""
    function: Callable[..., Any]
    """The compiled model."""
    seen: list[tuple[Any, ...]]
    """Graph arguments of every call so far."""
    traces: list[int]

    def role(self, name: str) -> Role:
        """The role of the argument `name` of the traced function."""
        found = [role.role for role in self.roles.inputs if role.name.lower() == f"l_{name}_"]
        assert len(found) == 1, f"{name} is not one of {[role.name for role in self.roles.inputs]}"
        return found[0]

    def args(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The graph's arguments for another call of the model that needs no new trace."""
        traces = self.traces[0]
        with torch.no_grad():
            self.function(*args, **kwargs)
        assert self.traces[0] == traces, "another call traced anew"
        return list(self.seen[-1])


def traced(
    model: Callable[..., Any], *args: Any, extra: Sequence[str] = (COUNTING_NAME,), passes: Sequence[str] = (), **kwargs: Any
) -> Traced:
    """Trace one call with the sizes that its tensors are marked with, cut it and build everything up to the roles."""
    parts: list[Any] = []
    seen: list[tuple[Any, ...]] = []
    traces = [0]

    def grab(gm: fx.GraphModule, _inputs: Any) -> Any:
        traces[0] += 1
        for name in passes:
            graph_passes.run_pass(gm, name)
        table = SymbolTable(gm)
        cut = split(gm, tuple(extra))
        library = PieceLibrary("eager", table.mode)
        program = Builder(cut, table, library).build()
        library.compile()
        env = table.traced_env()
        parts[:] = [gm, table, cut, library, program, role_module.infer(program, gm, env), env]

        def run(*graph_args: Any) -> Any:
            seen.append(graph_args)
            return gm.forward(*graph_args)

        return run

    torch.compiler.reset()
    function = torch.compile(model, backend=grab)
    with torch.no_grad():
        function(*args, **kwargs)
    assert traces[0] == 1, f"{traces[0]} graphs"
    return Traced(*parts, function=function, seen=seen, traces=traces)
