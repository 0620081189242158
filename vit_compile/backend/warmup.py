"""`warmup`: every budget captured before traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vit_compile import _torch_compat as compat
from vit_compile.backend.padding import cut
from vit_compile.backend.runnable import Runnable, listeners
from vit_compile.backend.sizes import Env
from vit_compile.errors import WarmupError
from vit_compile.stats import Skip, forget_call, report_skip

# Arguments that bound segments: traced symbolically, so that traffic with other bounds needs no new trace.
_BOUND_NAMES = r"L\[.*max_?\w*(seq_?len|length|_q|_k)\w*['\]\"]"


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What `warmup` prepared: labels of the captures held now, their bytes, and what was skipped."""

    captures: tuple[str, ...]
    nbytes: int
    skips: tuple[Skip, ...]


def warmup(compiled: Callable[..., Any], *example_args: Any, progress: bool = True, **example_kwargs: Any) -> WarmupReport:
    """Trace a compiled model with symbolic sizes and capture every budget, largest first.

    Args:
        compiled: the result of `torch.compile(model, backend="vit_cudagraph", options={"token_budgets": ...})`.
        *example_args, **example_kwargs: one call of it, of any size that the model accepts. Tensors are not changed.
        progress: show a progress bar on stderr.

    Returns:
        What was captured and what was not, with reasons. Without budgets the example's own size is captured.

    Raises:
        WarmupError: the call ran no graph of this backend, or the model would learn from it (a batch norm in train mode).

    Runs without gradients: under the caller's `inference_mode` where that is on, else under `no_grad`. Traffic should
    come under the same, since torch.compile traces anew for the other.
    """
    _refuse_training(compiled)
    args, kwargs = _symbolic(example_args), _symbolic(example_kwargs)
    with nullcontext() if not torch.is_grad_enabled() else torch.no_grad():
        calls = _listen(compiled, args, kwargs)
        if _traced_for_one(calls):
            # torch.compile treats a size of 1 as a constant: two of the same give a graph for any number.
            calls += _listen(compiled, _symbolic(_doubled(example_args)), _symbolic(_doubled(example_kwargs)))
        else:
            if _traced_for_this_size(calls):
                # An earlier call of this size left a static trace, which serves it for ever. A model that allows no other
                # size raises here, and the trace that there is has to do.
                with suppress(Exception), compat.quiet_constraints():
                    calls += _listen(compiled, _symbolic(example_args, strict=True), _symbolic(example_kwargs, strict=True))
            if _needs_one(calls):
                calls += _listen(compiled, _first(example_args, calls), _first(example_kwargs, calls))
        if not calls:
            raise WarmupError(
                "the call ran no graph that can be captured. Either it was not compiled with backend='vit_cudagraph', or every "
                "graph went to the plain compiler: vit_compile.last_call() says why."
            )
        return _capture_all(calls, progress)


def _refuse_training(compiled: Callable[..., Any]) -> None:
    """A warm-up must not move running statistics."""
    model = getattr(compiled, "_orig_mod", compiled)
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if isinstance(model, nn.Module) and any(isinstance(m, norms) and m.training for m in model.modules()):
        raise WarmupError(
            "the model is in train mode and has a batch norm, which would learn from the example: call eval() first."
        )


def _listen(compiled: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[Runnable, list[Any], Env]]:
    before, listeners.calls = listeners.calls, []
    forget_call()
    try:
        with compat.symbolic_ints(_BOUND_NAMES):
            compiled(*args, **kwargs)
        return listeners.calls
    finally:
        listeners.calls = before


def _capture_all(calls: Sequence[tuple[Runnable, list[Any], Env]], progress: bool) -> WarmupReport:
    alone = any(runnable.roles.row_symbol < 0 and runnable.roles.static_rows == 1 for runnable, _, _ in calls)
    todo = [
        (runnable, args, env, rows)
        for runnable, args, env in calls
        for rows in _rows(runnable)
        if rows != 1 or not alone  # a batch of one has its own trace
    ]
    skips: list[Skip] = []
    for runnable, args, env, rows in _progress(todo, progress):
        skip = runnable.prepare_as_seen(args, env) if rows is None else _capture_one(runnable, args, env, rows)
        if skip is not None:
            skips.append(skip)
    for runnable in dict.fromkeys(runnable for runnable, _, _ in calls):
        off = runnable.roles.conflict
        if off is not None and runnable.options.token_budgets and runnable.options.padding == "auto":
            report_skip(off, strict=runnable.options.strict)
            skips.append(off)
    encoders = {id(runnable.encoder): runnable.encoder for runnable, _, _ in calls if runnable.encoder is not None}
    captures = [capture for encoder in encoders.values() for capture in encoder.captures()]
    return WarmupReport(tuple(capture.label for capture in captures), sum(capture.nbytes for capture in captures), tuple(skips))


def _rows(runnable: Runnable) -> Sequence[int | None]:
    """Sizes to capture for one traced graph; None: the example's own."""
    if runnable.mode == "none":
        return []
    if runnable.roles.row_symbol < 0 or not runnable.options.token_budgets:
        return [None]
    return runnable.budgets_largest_first()


def _capture_one(runnable: Runnable, args: list[Any], env: Env, rows: int) -> Skip | None:
    real = runnable.roles.rows(env)
    assert real is not None, "only graphs with a row dimension have budgets"
    if rows < real:
        smaller = cut(args, runnable.program, runnable.roles, env, rows)
        if isinstance(smaller, Skip):
            report_skip(smaller, strict=runnable.options.strict)
            return smaller
        args, env = smaller
    return runnable.prepare(args, env, rows)


def _progress(todo: Sequence[Any], show: bool) -> Iterator[Any]:
    if not show or not todo:
        yield from todo
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(todo, description="capturing budgets", console=Console(stderr=True), transient=True)


def _traced_for_one(calls: Sequence[tuple[Runnable, list[Any], Env]]) -> bool:
    """Were all graphs traced for a batch of one, though there are budgets for more?"""
    return bool(calls) and all(
        runnable.roles.row_symbol < 0
        and len(runnable.options.budget_rows()) > 0
        and runnable.options.budget_rows()[-1] > 1
        and runnable.options.patches_per_row > 1
        for runnable, _, _ in calls
    )


def _traced_for_this_size(calls: Sequence[tuple[Runnable, list[Any], Env]]) -> bool:
    """Are there budgets, and a trace of a packed tower for one number of rows only?"""
    return any(
        runnable.roles.row_symbol < 0 and runnable.roles.static_rows > 1 and len(runnable.options.budget_rows()) > 0
        for runnable, _, _ in calls
    )


def _needs_one(calls: Sequence[tuple[Runnable, list[Any], Env]]) -> bool:
    """Is there a budget of one image, which the traces for several cannot serve?"""
    return any(
        runnable.roles.row_symbol >= 0 and runnable.options.patches_per_row > 1 and 1 in runnable.options.budget_rows()
        for runnable, _, _ in calls
    )


def _first(value: Any, calls: Sequence[tuple[Runnable, list[Any], Env]]) -> Any:
    """The first image of every batch among the arguments."""
    batches = {runnable.roles.rows(env) for runnable, _, env in calls}
    return _map(value, lambda t: t[:1].clone() if t.dim() > 1 and t.shape[0] in batches else t)


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _map(item, function)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _map(getattr(value, f.name), function) for f in dataclasses.fields(value)})
    return value


def _symbolic(value: Any, *, strict: bool = False) -> Any:
    """The same arguments with the dimension that may hold rows marked dynamic on aliases of the tensors."""

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()
        dim = 1 if tensor.dim() == 3 and tensor.shape[0] == 1 else 0
        if tensor.dim() > dim and tensor.shape[dim] > 1:
            compat.mark_dynamic(alias, dim, strict=strict)
        return alias

    return _map(value, mark)


def _doubled(value: Any) -> Any:
    return _map(value, lambda t: torch.cat([t, t]) if t.dim() > 0 and t.shape[0] == 1 else t)
