"""`torch.compile(model, backend="vit_cudagraph", options={...})`: from a traced graph to a runnable.

The pipeline, each step in a module of its own: options -> passes -> split at attention -> distinct pieces, compiled once
-> roles -> a runnable that captures by size. Graphs that must not be captured go to the plain compiler, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend import passes, roles
from vit_compile.backend.builder import Builder, UnsupportedValueError
from vit_compile.backend.dump import Dump
from vit_compile.backend.pieces import PieceLibrary
from vit_compile.backend.plain import PlainRunnable, Refusal
from vit_compile.backend.program import Program
from vit_compile.backend.runnable import Runnable
from vit_compile.backend.sizes import SymbolTable
from vit_compile.backend.split import Split, split
from vit_compile.backend.survey import source_line
from vit_compile.errors import OptionError, VitCompileError
from vit_compile.options import MODES, BackendOptions
from vit_compile.stats import Skip, counters, report_skip


def vit_cudagraph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """The Dynamo backend, registered as "vit_cudagraph".

    Args:
        gm: the traced graph; parameters and buffers are among its inputs.
        example_inputs: fake tensors and SymInts, in the order of the placeholders.
        mode: what `torch.compile(mode=...)` passes on; one of `options.MODES`, like `options={"mode": ...}`.
        options: see `BackendOptions`.

    Returns:
        A callable with the graph's arguments. An error of the catalogue is raised by that callable, at every call, since
        Dynamo would wrap one that is raised here.
    """
    counters.add("graphs_seen")
    try:
        return _compile(gm, example_inputs, _options(mode, options, unknown))
    except VitCompileError as error:
        return Refusal(error)


def _options(mode: str | None, options: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> BackendOptions:
    if unknown:
        raise OptionError(f"the backend takes `options` (and `mode`), not {', '.join(sorted(unknown))}.")
    chosen = BackendOptions.from_dict(options)
    if mode is None:
        return chosen
    if mode not in MODES:
        raise OptionError(f"torch.compile(mode={mode!r}): this backend knows the modes {', '.join(map(repr, MODES))}.")
    return replace(chosen, mode=mode)


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> Callable[..., Any]:
    compat.make_floats_constant(gm)
    dump = Dump.open(options.debug_dir)
    dump.graph("traced", gm)
    plain = _plain_reason(gm)
    if plain is not None:
        return _plain(gm, example_inputs, plain, options, dump)
    for name in passes.selected(options.passes):
        report = passes.run_pass(gm, name)
        dump.graph_pass(report, gm)
    table = SymbolTable(gm)
    if table.unreadable or table.mode is None:
        what = (
            f"no input carries the size {', '.join(table.unreadable)} by itself" if table.unreadable else "no input is a tensor"
        )
        skip = Skip("unsupported-value", what)
        return _plain(gm, example_inputs, skip, options, dump)
    cut = split(gm, options.splitting_ops)
    library = PieceLibrary(options.compiler, table.mode)
    try:
        program = Builder(cut, table, library).build()
    except UnsupportedValueError as error:
        return _plain(gm, example_inputs, Skip("unsupported-value", str(error)), options, dump)
    forbidden = _forbidden(program)
    if forbidden is not None:
        return _plain(gm, example_inputs, forbidden, options, dump)
    for skip in cut.skips:
        report_skip(skip, strict=options.strict)
    library.compile()
    role_table = roles.infer(program, gm, table.traced_env(), cut.calls)
    chosen, mode_skip = _mode(options.mode, cut)
    if mode_skip is not None:
        report_skip(mode_skip, strict=options.strict)
    runnable = Runnable(program, role_table, library, options, chosen, _never(program))
    dump.program(runnable, cut, [*cut.skips, *([mode_skip] if mode_skip else [])])
    return runnable


def _plain(gm: fx.GraphModule, example_inputs: Sequence[Any], skip: Skip, options: BackendOptions, dump: Dump) -> PlainRunnable:
    runnable = PlainRunnable(compat.compile_plain(gm, example_inputs, options.compiler), skip, options)
    dump.plain(runnable)
    return runnable


def _plain_reason(gm: fx.GraphModule) -> Skip | None:
    """Why this graph must not be split and captured, as far as its inputs and values tell."""
    if torch.is_grad_enabled():
        for node in gm.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad:
                return Skip(
                    "gradients", f"{node.target} requires a gradient; call under torch.no_grad() or torch.inference_mode()"
                )
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and compat.unbacked_symbols(value):
            return Skip("host-read", f"{node.name} = {node.target} depends on the data ({source_line(node)})")
    return None


def _forbidden(program: Program) -> Skip | None:
    """A fact about a step that rules out replays altogether."""
    for step in program.steps:
        if step.facts.random:
            return Skip("rng", step.facts.random[0])
        if step.facts.host_reads:
            return Skip("host-read", step.facts.host_reads[0])
    for step in program.steps:
        for position in step.facts.mutated_inputs:
            slot = program.roots.get(step.inputs[position].slot, step.inputs[position].slot)
            if 0 <= slot < len(program.arg_names):
                return Skip("input-mutation", f"{step.name} writes into {program.arg_names[slot]}")
    return None


def _never(program: Program) -> Skip | None:
    """Why nothing of this graph can be captured, though its pieces run."""
    args = {arg: program.specs[arg] for arg in (*program.tensor_args, *program.static_args)}
    if any(spec.device.type != "cpu" for spec in args.values()):
        for arg, spec in args.items():
            # Also a single number: a kernel takes it by value, and a recording would repeat the first one for ever.
            if spec.device.type == "cpu":
                return Skip("host-device-copy", f"{program.arg_names[arg]} lies on the host; move it to the device")
    for step in program.steps:
        if step.facts.copies:
            return Skip("host-device-copy", step.facts.copies[0])
    return None


def _mode(asked: str, cut: Split) -> tuple[str, Skip | None]:
    """The mode for this graph, and why it is not the one that was asked for."""
    if asked in ("none", "piecewise"):
        return asked, None
    planning = sorted({child.op.name for child in cut.attention.values() if not child.op.full_capture})
    if not planning:
        return "full", None
    skip = Skip("attention-forbids-full", f"{', '.join(planning)}; piecewise instead") if asked == "full" else None
    return "piecewise", skip
