"""Pieces: what stands between attentions, each distinct one compiled once.

A transformer's layers give the same piece over and over with other weights. Weights are inputs of a piece, so pieces
with equal structure (same operations, wiring and input metadata up to the names of symbols) share one compiled
function, for all layers and all sizes.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.survey import PieceFacts, survey
from vit_compile.stats import counters

_SYMBOL = re.compile(r"\b[su]\d+\b")


@dataclass(slots=True)
class Piece:
    """One distinct piece.

    `call(*inputs)` returns a tuple of its results. `static` holds further compilations for exact sizes.
    """

    key: str
    module: fx.GraphModule
    facts: PieceFacts
    example_inputs: list[Any]
    call: Callable[..., Any] | None = None
    compile_ms: float = 0.0
    generated: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    static: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)


def example_inputs(module: fx.GraphModule) -> list[Any]:
    """The values with which a graph was traced, in the order of its inputs."""
    return [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]


class PieceLibrary:
    """The distinct pieces of one traced graph."""

    def __init__(self, compiler: str, mode: compat.FakeTensorMode | None) -> None:
        self.compiler, self.mode = compiler, mode
        self.pieces: dict[str, Piece] = {}

    def add(self, name: str, module: fx.GraphModule, *, look: bool = True) -> Piece:
        """Register a piece under its structure; nothing is compiled yet. `look`: find out what it does to a capture."""
        _return_tuple(module)
        key = structure(module)
        counters.add("pieces")
        if key not in self.pieces:
            args = example_inputs(module)
            facts = survey(module, args, self.mode) if look and self.mode is not None else PieceFacts()
            self.pieces[key] = Piece(key, module, facts, args)
            counters.add("distinct_pieces")
        self.pieces[key].users.append(name)
        return self.pieces[key]

    def compile(self) -> None:
        """Compile every distinct piece with dynamic shapes."""
        for piece in self.pieces.values():
            if piece.call is None:
                started = time.perf_counter()
                with compat.noting_generated_files() as files:
                    piece.call = self._compile(piece.module, piece.example_inputs)
                piece.compile_ms = (time.perf_counter() - started) * 1e3
                piece.generated = sorted(files)
                counters.add("piece_compiles")

    def _compile(self, module: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        if self.compiler == "eager" or self.mode is None:
            return module.forward
        with compat.tracing_under(self.mode), torch.no_grad():
            if self.compiler == "inductor":
                return compat.compile_inductor_piece(module, args, static=False)
            return compat.compile_plain(module, args, self.compiler)

    def specialize(self, piece: Piece, args: Sequence[Any]) -> Callable[..., Any]:
        """A compilation of `piece` for exactly the sizes of `args` (real tensors and ints), made on first need."""
        if self.compiler != "inductor":
            assert piece.call is not None, "specialize after compile"
            return piece.call
        key = tuple((tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        if key not in piece.static:
            with torch.no_grad():
                piece.static[key] = compat.compile_inductor_piece(piece.module, args, static=True)
            counters.add("piece_compiles")
        return piece.static[key]


def _return_tuple(module: fx.GraphModule) -> None:
    """Make a piece return a tuple whatever it returned before."""
    output = module.graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        output.args = ((output.args[0],),)
        module.recompile()


def structure(module: fx.GraphModule) -> str:
    """A hash of a piece: equal for pieces that the same compiled function can serve."""
    index = {node: i for i, node in enumerate(module.graph.nodes)}
    symbols: dict[str, str] = {}

    def canonical(text: str) -> str:
        return _SYMBOL.sub(lambda match: symbols.setdefault(match.group(), f"n{len(symbols)}"), text)

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{index[value]}"
        if isinstance(value, list | tuple):
            return tuple(argument(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, argument(v)) for k, v in value.items())
        if isinstance(value, slice):
            return ("slice", argument(value.start), argument(value.stop), argument(value.step))
        return repr(value)

    rows = [
        (node.op, _target(module, node), argument(node.args), argument(node.kwargs), canonical(_metadata(node)))
        for node in module.graph.nodes
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":  # a constant's value is part of the structure; identity stands for it
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return f"attribute {id(value)}"
    if isinstance(node.target, str):
        return node.target
    name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    return name if "<" not in name else f"{name} {id(node.target)}"


def _metadata(node: fx.Node) -> str:
    if node.op != "placeholder":
        return ""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {list(value.stride())} {value.dtype} {value.device} {value.requires_grad}"
    return f"{type(value).__name__} {value}"
