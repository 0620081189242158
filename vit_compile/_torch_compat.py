"""The one place for torch's private names, and for what differs between torch 2.11 and 2.13.

Each function says which private thing it stands for. Everything else in the package uses public torch only.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType
from typing import Any
from unittest import mock

import sympy
import torch
import torch._inductor
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.decorators import maybe_mark_dynamic
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "DATA_DEPENDENT",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "compile_inductor_piece",
    "compile_plain",
    "compiled_artifacts",
    "fake_mode_of",
    "float_symbols",
    "guard_expressions",
    "is_static_input",
    "linear_epilogue",
    "load_artifacts",
    "make_floats_constant",
    "mark_dynamic",
    "noting_generated_files",
    "on_bytecode",
    "quiet_constraints",
    "running_fake",
    "size_hint",
    "symbolic_ints",
    "sympy_expr",
    "to_python",
    "tracing_under",
    "unbacked_symbols",
    "value_ranges",
]

DispatchMode = TorchDispatchMode
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises where only its values would tell."""


def is_static_input(placeholder: fx.Node) -> bool:
    """Is this graph input a parameter or buffer of an inlined module (Dynamo's `_dynamo_static_input_type`)?"""
    tensor_dict = placeholder.meta.get("tensor_dict") or {}
    if tensor_dict.get("_dynamo_static_input_type"):
        return True
    return isinstance(placeholder.meta.get("example_value"), torch.nn.Parameter)


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode | None:
    """The fake mode of Dynamo's placeholders, which is not the tracing context's own."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextmanager
def tracing_under(mode: FakeTensorMode) -> Iterator[None]:
    """Make `mode` the ambient tracing context's fake mode, so that compiled pieces share its symbols and guards."""
    context = TracingContext.try_get()
    if context is None:
        with tracing(TracingContext(mode)):
            yield
        return
    before, context.fake_mode = context.fake_mode, mode
    try:
        yield
    finally:
        context.fake_mode = before


def sympy_expr(value: Any) -> sympy.Expr:
    """The expression behind an int or a SymInt, with the replacements made so far."""
    if isinstance(value, torch.SymInt):
        return value.node.expr
    return sympy.Integer(int(value))


def float_symbols(value: torch.SymFloat) -> set[sympy.Symbol]:
    """Symbols that a symbolic float is computed from."""
    return set(value.node.expr.free_symbols)


def unbacked_symbols(value: Any) -> set[sympy.Symbol]:
    """Symbols in a value's shape that come from the data (`u0`), not from an input's size."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def to_python(expr: sympy.Expr, names: Mapping[sympy.Symbol, str]) -> str:
    """Python source of a size expression (integer arithmetic, torch's FloorDiv and Mod included)."""
    return str(PythonPrinter().doprint(expr.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()})))


def guard_expressions(mode: FakeTensorMode) -> list[sympy.Basic]:
    """The relations between sizes that tracing relied on (`ShapeEnv.guards`)."""
    env = mode.shape_env
    return [] if env is None else [guard.expr for guard in env.guards]


@contextmanager
def running_fake(mode: FakeTensorMode) -> Iterator[None]:
    """Run operations on fake tensors as Dynamo does: symbolic sizes stay symbolic, no guard is added, no gradients.

    Stands for the Python dispatcher (without it composite operations turn sizes into integers) and
    `ShapeEnv.suppress_guards`.
    """
    with ExitStack() as stack:
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())
        yield


def make_floats_constant(gm: fx.GraphModule) -> None:
    """Replace Python floats that Dynamo made graph inputs by guarded constants.

    A float that differs between two traces (an epsilon, an attention scale) becomes an input that is read with
    `.item()`, which no capture can hold. Where tracing has fixed its value already, with a guard, the constant is put in;
    else Dynamo is made to trace again with it fixed, as Inductor does (`TensorifyState`).
    """
    names: set[str] = set()
    for node in list(gm.graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymFloat):
            continue
        symbols = {str(symbol) for symbol in value.node.expr.free_symbols if symbol_is_type(symbol, SymT.FLOAT)}
        names |= symbols
        if not value.node.expr.free_symbols:
            node.replace_all_uses_with(float(value.node.expr))
            gm.graph.erase_node(node)
    fresh = [name for name in names if not TensorifyState.should_specialize(name)]
    for name in fresh:
        TensorifyState.specialize(name)
    if fresh:
        raise TensorifyScalarRestartAnalysis


def value_ranges(mode: FakeTensorMode) -> Mapping[sympy.Symbol, Any]:
    """The inclusive range (`.lower`, `.upper`) that tracing assumed for each symbol."""
    env = mode.shape_env
    return {} if env is None else env.var_to_range


def mark_dynamic(tensor: torch.Tensor, dim: int, *, strict: bool = False) -> None:
    """Ask Dynamo for a symbolic size where the model allows one (`torch._dynamo.maybe_mark_dynamic`).

    `strict`: a trace with another size than a symbol does not serve this tensor, and a model that allows none is an error.
    """
    (torch._dynamo.mark_dynamic if strict else maybe_mark_dynamic)(tensor, dim)


@contextmanager
def _quieter(name: str, level: int) -> Iterator[None]:
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _quiet_artifacts() -> Iterator[None]:
    """Silence the warning about a piece that gives no cache artefact (a lone convolution): it runs all the same."""
    with _quieter("torch._inductor.standalone_compile", logging.ERROR):
        yield


@contextmanager
def quiet_constraints() -> Iterator[None]:
    """Silence what Dynamo logs beside the error that a dimension which was asked to be symbolic is not."""
    with _quieter("torch._guards", logging.CRITICAL):
        yield


def compile_inductor_piece(gm: fx.GraphModule, args: Sequence[Any], *, static: bool) -> Callable[..., Any]:
    """Compile one piece with Inductor, once, for all sizes (`torch._inductor.standalone_compile`).

    Args:
        gm: the piece; its weights are inputs. It is left unchanged.
        args: fake tensors and SymInts (`static=False`, under `tracing_under`), or real sizes (`static=True`).
        static: compile for exactly the given sizes.

    A piece for which Inductor makes no cache artefact is compiled without the caches.
    """
    shapes = "from_example_inputs" if static else "from_tracing_context"

    def compiled() -> Callable[..., Any]:
        # A fresh dict: Inductor keeps it.
        options = {"config_patches": dict(_PIECE_CONFIG)}
        return torch._inductor.standalone_compile(gm, list(args), dynamic_shapes=shapes, options=options)  # type: ignore[arg-type, no-any-return, unused-ignore]

    # Padding of unaligned matrix products is decided by size, which would tie a piece for all sizes to some of them.
    with _quiet_artifacts(), inductor_config.patch(shape_padding=static), _long_rows():
        try:
            made = compiled()
            _compiled.add(made)
            return made
        except Exception as error:  # the caches are an optimisation: retry without them before giving up
            if not re.search("artifact|cache", str(error), re.IGNORECASE):
                raise
            with inductor_config.patch(force_disable_caches=True):
                return compiled()


def _long_rows() -> AbstractContextManager[Any]:
    """`_LongRows` for what is compiled inside, unless the user has heuristics of their own."""
    if inductor_config.inductor_choices_class is not None or type(V.choices) is not InductorChoices:
        return nullcontext()
    context: AbstractContextManager[Any] = V.set_choices_handler(_LongRows())
    return context


# `standalone_compile` would tune kernels while it compiles, by running them on made-up numbers: an index that is computed from
# such inputs is out of range, and the failed assertion on the device ends the process (GLM-4.1V's positions). Kernels are tuned
# in the first run instead, as `torch.compile` does, on real inputs.
_PIECE_CONFIG = {"triton.autotune_at_compile_time": False}
_LONGEST_ROW = 2048


class _LongRows(InductorChoices):
    """Inductor's heuristics, but for rows of 1025 to 2048 values, which are reduced in registers like shorter ones.

    Layer norms of encoders are this wide (1152, 1280, 1408), and Inductor's loop reads such a row twice.
    """

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not inductor_config.triton.persistent_reductions:
            return False
        inner = features.get_reduction_hint() == ReductionHint.INNER
        return inner and bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, _LONGEST_ROW))


_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


def compiled_artifacts() -> list[bytes]:
    """What Inductor would keep in its caches for every piece that is alive (`CompiledArtifact._artifacts`), in no order.

    A piece without an artefact (a lone convolution) gives none.
    """
    found = [getattr(made, "_artifacts", None) for made in list(_compiled)]
    return [artifacts[0] for artifacts in found if artifacts is not None]


def load_artifacts(artifacts: bytes) -> bool:
    """Put a piece of `compiled_artifacts` into this machine's caches; False where torch cannot read it."""
    return torch.compiler.load_cache_artifacts(artifacts) is not None


def linear_epilogue(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """GELU in its tanh form, or ReLU, of x weight^T + bias, in one matrix product on CUDA (`torch._addmm_activation`).

    x [T, I], weight [O, I], bias [O]; a new [T, O]. On a CPU torch computes the exact GELU instead.
    """
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=gelu)


def compile_plain(gm: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile with one of Dynamo's own backends ("inductor", "aot_eager", "eager"); differentiable where they are."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., Any] = lookup_backend(compiler)(gm, list(example_inputs))
    return compiled


@contextmanager
def noting_generated_files() -> Iterator[set[str]]:
    """Collect the paths of the Python modules that Inductor generates or takes from its cache (`PyCodeCache`)."""
    from torch._inductor.codecache import PyCodeCache

    found: set[str] = set()
    load = PyCodeCache.load_by_key_path

    def noting(key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        found.add(path)
        return load(key, path, *args, **kwargs)

    with mock.patch.object(PyCodeCache, "load_by_key_path", noting):
        yield found


@contextmanager
def symbolic_ints(pattern: str) -> Iterator[None]:
    """Trace Python integers whose source matches a regular expression as symbols from the first call on."""
    before = torch.compiler.config.dynamic_sources
    torch.compiler.config.dynamic_sources = f"{before},{pattern}" if before else pattern
    try:
        yield
    finally:
        torch.compiler.config.dynamic_sources = before


def on_bytecode(hook: Callable[[CodeType, CodeType], None]) -> Callable[[], None]:
    """Call `hook(old, new)` for every frame that Dynamo rewrites; returns a function that removes the hook."""
    handle = register_bytecode_hook(lambda old, new: hook(old, new))
    return handle.remove


def size_hint(mode: FakeTensorMode | None, symbol: sympy.Symbol) -> int:
    """The value that a symbol had while tracing."""
    assert mode is not None, "a symbol has a fake mode"
    env = mode.shape_env
    values: Any = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
    return int(values[symbol])
