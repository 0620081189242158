"""Sizes of a traced graph: its free symbols, their values in a call, and the expressions made of them.

The one key of the backend is an *environment*: the concrete values of the graph's free symbols, in a fixed order. A
`Size` is a size expression compiled to a Python function of that tuple.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from vit_compile import _torch_compat as compat

Env: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """One size expression: `size(env)` is its value; `symbols` are the indices of the symbols it depends on."""

    text: str
    symbols: frozenset[int]
    function: Callable[[Env], int]

    def __call__(self, env: Env) -> int:
        """The value under an environment."""
        return self.function(env)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor in the traced graph; sizes are expressions."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def symbols(self) -> frozenset[int]:
        """Symbols that the shape depends on."""
        return frozenset().union(*(size.symbols for size in self.shape)) if self.shape else frozenset()

    def sizes(self, env: Env) -> tuple[int, ...]:
        """The concrete shape."""
        return tuple(size(env) for size in self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}] {self.device}"


class SymbolTable:
    """The free symbols of a graph, where a call's arguments carry their values, and the guards between them."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.mode = compat.fake_mode_of(gm)
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        values = [node.meta.get("example_value") for node in placeholders]
        found: dict[sympy.Symbol, tuple[int, int] | None] = {}
        for value in values:
            for expr in _expressions(value):
                for symbol in sorted(expr.free_symbols, key=str):
                    found.setdefault(symbol, None)
        for index, value in enumerate(values):
            # A tensor's dimension is preferred: it is what a replay copies, so it cannot disagree with the data.
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    expr = compat.sympy_expr(size)
                    if isinstance(expr, sympy.Symbol) and found.get(expr) is None:
                        found[expr] = (index, dim)
        for index, value in enumerate(values):
            if isinstance(value, torch.SymInt):
                expr = compat.sympy_expr(value)
                if isinstance(expr, sympy.Symbol) and found.get(expr) is None:
                    found[expr] = (index, -1)
        self.symbols = tuple(found)
        self.names = tuple(str(symbol) for symbol in found)
        self.unreadable = tuple(str(symbol) for symbol, source in found.items() if source is None)
        self._sources = tuple(source for source in found.values() if source is not None)
        self._index = {symbol: index for index, symbol in enumerate(found)}
        self._cache: dict[sympy.Expr, Size] = {}
        self._verdicts: dict[Env, str | None] = {}

    def read(self, args: Sequence[Any]) -> Env:
        """The environment of a call, from the graph's arguments."""
        return tuple([args[index] if dim < 0 else args[index].shape[dim] for index, dim in self._sources])

    def traced_env(self) -> Env:
        """The sizes with which the graph was traced."""
        return tuple(compat.size_hint(self.mode, symbol) for symbol in self.symbols)

    def size(self, value: Any) -> Size:
        """The `Size` of an int or SymInt."""
        expr = compat.sympy_expr(value)
        if expr not in self._cache:
            self._cache[expr] = self._compile(expr)
        return self._cache[expr]

    def _compile(self, expr: sympy.Expr) -> Size:
        if expr.is_Integer:
            constant = int(expr)
            return Size(str(constant), frozenset(), lambda env: constant)
        symbols = frozenset(self._index[symbol] for symbol in expr.free_symbols)
        source = compat.to_python(expr, {symbol: f"env[{self._index[symbol]}]" for symbol in expr.free_symbols})
        # The text comes from torch's own printer of integer expressions, never from a user.
        function = eval(f"lambda env: {source}", {"math": math, "torch": torch, "max": max, "min": min})
        return Size(str(expr), symbols, function)

    def indices(self, symbols: Iterable[sympy.Symbol]) -> frozenset[int]:
        """Indices of those symbols that the table has."""
        return frozenset(self._index[symbol] for symbol in symbols if symbol in self._index)

    def spec(self, value: torch.Tensor) -> TensorSpec:
        """The symbolic description of a (fake) tensor."""
        return TensorSpec(
            tuple(self.size(size) for size in value.shape),
            tuple(self.size(stride) for stride in value.stride()),
            value.dtype,
            value.device,
        )

    def broken_guard(self, env: Env) -> str | None:
        """The first traced relation that these sizes violate, or None: compiled pieces do not check for themselves.

        Asked for after everything is compiled, when no more relations are added; answers are kept.
        """
        if env not in self._verdicts:
            self._verdicts[env] = self._broken_guard(env)
        return self._verdicts[env]

    def _broken_guard(self, env: Env) -> str | None:
        if self.mode is None:
            return None
        values = {symbol: sympy.Integer(value) for symbol, value in zip(self.symbols, env, strict=True)}
        ranges = compat.value_ranges(self.mode)
        for symbol, value in values.items():
            bounds = ranges.get(symbol)
            if bounds is not None and not (bounds.lower <= value <= bounds.upper):
                return f"{bounds.lower} <= {symbol} <= {bounds.upper} ({symbol} = {value})"
        for guard in compat.guard_expressions(self.mode):
            if guard.free_symbols <= values.keys() and guard.xreplace(values) == sympy.false:
                return f"{guard} with {', '.join(f'{s} = {v}' for s, v in values.items() if s in guard.free_symbols)}"
        return None

    def describe(self, env: Env) -> str:
        """Readable form of an environment: "s0 = 784, s1 = 5"."""
        return ", ".join(f"{name} = {value}" for name, value in zip(self.names, env, strict=True)) or "static"


def _expressions(value: Any) -> Iterable[sympy.Expr]:
    if isinstance(value, torch.SymInt):
        yield compat.sympy_expr(value)
    elif isinstance(value, torch.Tensor):
        for size in value.shape:
            yield compat.sympy_expr(size)
