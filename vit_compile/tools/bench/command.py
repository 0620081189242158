"""`vit-compile bench`: the options of the command; the work is in the modules beside this one, imported when it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_compile.errors import OptionError
from vit_compile.runtime.config import SEGMENT_CAPACITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vit_compile.tools.bench.ranks import Ranks
    from vit_compile.tools.bench.results import Result, Row
    from vit_compile.tools.bench.settings import BenchSettings

EXIT_DIFFERENT = 1
CPU_REQUESTS, CPU_SECONDS, CPU_BUDGETS = 20, 4.0, 4
"""A preset that is over in less than a minute on two slow cores."""


def bench(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="Result files, for --targets.", show_default=False)] = None,
    tower: Annotated[
        str | None,
        typer.Option("--tower", help="qwen3-vl-8b (if not given), qwen2.5-vl-7b, dinov2-s or siglip-so400m.", show_default=False),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A tiny tower of that kind. Default on a CPU.")] = False,
    weights: Annotated[Path | None, typer.Option("--weights", help="Checkpoint folder of the tower.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Folder of any packed or dense model, instead of --tower.", show_default=False)
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            "--traffic",
            help="A preset (chat if not given), or single:1x224,8x448 for repeated requests of COUNTxSIDE pixels.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="JSONL file of requests.", show_default=False)] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Requests of each case [150; on a CPU 20].", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the requests.")] = 2,
    peers: Annotated[str | None, typer.Option("--peers", help="Names, with commas. Default: all.", show_default=False)] = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", help="Output tokens, with commas, for vit-full. Default: fitted.", show_default=False),
    ] = None,
    max_graphs: Annotated[
        int | None,
        typer.Option("--max-graphs", min=1, help="Most budgets on the fitted ladder [12; on a CPU 4].", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Largest budget, in output tokens.", show_default=False)
    ] = None,
    capacities: Annotated[
        str | None,
        typer.Option(
            "--capacities",
            help="Segment capacities of vit-full beside the largest, with commas, or none "
            f"[{','.join(map(str, SEGMENT_CAPACITIES))}; on a CPU none].",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 [GPU] or float16.", show_default=False)] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    compiler: Annotated[
        str | None, typer.Option("--compiler", help="inductor [GPU], aot_eager or eager [CPU].", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Most seconds of timing per peer and case [60; on a CPU 4].", show_default=False),
    ] = None,
    check_requests: Annotated[int, typer.Option("--check-requests", min=1, help="Requests compared with eager.")] = 8,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", help="Relative difference from eager that is allowed.", show_default=False)
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option("--peak-tflops", help="Of the device, for the roofline [H200: 790].", show_default=False)
    ] = None,
    cache: Annotated[
        str, typer.Option("--cache", help="fresh: each peer starts with an empty Inductor cache; shared: with yours.")
    ] = "fresh",
    warm_start: Annotated[bool, typer.Option("--warm-start", help="Also time a second set-up, with a warm cache.")] = False,
    out_dir: Annotated[Path, typer.Option("--out-dir", help="Folder for JSON, PNG and HTML.")] = Path("bench_output"),
    name: Annotated[
        str | None, typer.Option("--name", help="Of the files. Default: tower and traffic.", show_default=False)
    ] = None,
    targets: Annotated[bool, typer.Option("--targets", help="Measure nothing: hold FILES against the targets.")] = False,
) -> None:
    """Time every way to run a vision tower on the same requests, and check the features against eager."""
    if targets or files:
        _print_targets(files or [], context, wanted=targets)
        return
    if trace is not None and traffic is not None:
        raise OptionError(f"--traffic {traffic} would do nothing with --trace: give one of them.")
    if model is not None and tower is not None:
        raise OptionError(f"--tower {tower} would do nothing with --model: give one of them.")
    from vit_compile.tools.dependencies import require

    require("torch", "transformers", "numpy", extra="hf")
    require("matplotlib", extra="bench")
    from vit_compile.tools.bench.ranks import joined, local_device
    from vit_compile.tools.bench.settings import DEFAULT_TOWER, DEFAULT_TRAFFIC, BenchSettings
    from vit_compile.tools.vision_models import choose_device

    where = local_device(choose_device(device))
    on_cpu = where.type == "cpu"
    settings = BenchSettings(
        tower=tower or DEFAULT_TOWER,
        small=small or (on_cpu and tower is None and model is None),
        weights=weights,
        model=model,
        traffic=traffic or DEFAULT_TRAFFIC,
        trace=trace,
        requests=requests or (CPU_REQUESTS if on_cpu else 150),
        seed=seed,
        peers=_names(peers),
        budgets=_numbers("--budgets", budgets) or None,
        max_graphs=max_graphs or (CPU_BUDGETS if on_cpu else 12),
        max_tokens=max_tokens,
        capacities=_capacities(capacities, on_cpu=on_cpu),
        dtype=dtype or ("float32" if on_cpu else "bfloat16"),
        device=str(where),
        compiler=compiler or ("eager" if on_cpu else "inductor"),
        seconds=(CPU_SECONDS if on_cpu else 60.0) if seconds is None else seconds,
        check_requests=check_requests,
        tolerance=tolerance,
        peak_tflops=peak_tflops,
        cache=cache,
        warm_start=warm_start,
    )
    with joined(where) as ranks:
        failed = _measure(settings, ranks, out_dir, name)
    if failed:
        raise typer.Exit(EXIT_DIFFERENT)


def _measure(settings: BenchSettings, ranks: Ranks, out_dir: Path, name: str | None) -> bool:
    """Measure, print, write; did one of this package's peers fail?"""
    from transformers.utils import logging as hf_logging

    from vit_compile.tools.bench import job, report, results, table

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    first = ranks.rank == 0
    if first:
        results.check_writable(out_dir if name is None else (out_dir / name).parent)

    def progress(rows: Sequence[Row], so_far: Result) -> None:
        base = _base(so_far, out_dir, name)
        if not rows:
            report.check_files(base)
            return
        _say(rows)
        results.write_json(so_far, base.with_name(base.name + ".json"))

    result = job.run(settings, ranks, command=_command(ranks), **({"progress": progress} if first else {}))
    if first:
        table.print_result(result)
        for path in report.write(result, _base(result, out_dir, name)):
            print(path)
    return bool(result.failures)


def _base(result: Result, out_dir: Path, name: str | None) -> Path:
    """Where the files go, without their suffixes."""
    from vit_compile.tools.bench import report

    return out_dir / (name or report.file_name(result))


def _say(rows: Sequence[Row]) -> None:
    """One line on stderr for each peer and case, as they come."""
    for row in rows:
        what = f"{row.mean_ms:.2f} ms mean, {row.requests} requests" if row.mean_ms is not None else f"{row.status}: {row.reason}"
        print(f"{row.peer}, {row.case}: {what}", file=sys.stderr, flush=True)


def _print_targets(files: list[Path], context: typer.Context, *, wanted: bool) -> None:
    from vit_compile.tools.bench import targets

    if not wanted:
        raise OptionError(f"{files[0]} without --targets: files are read for the targets only; a trace goes to --trace.")
    if not files:
        raise OptionError("--targets needs at least one result file.")
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in ("files", "targets") and _is_given(context, name):
            raise OptionError(f"{parameter.opts[0]} would do nothing with --targets, which measures nothing: leave it out.")
    targets.print_targets([targets.Source.read(path) for path in dict.fromkeys(files)])


def _is_given(context: typer.Context, name: str) -> bool:
    """Did the user name this option?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _command(ranks: Ranks) -> str:
    """What the user typed, so that a file can be made again."""
    program = f"torchrun --nproc-per-node {ranks.size} -m vit_compile.tools.cli" if ranks.size > 1 else "vit-compile"
    return f"{program} {shlex.join(sys.argv[1:])}"


def _capacities(text: str | None, *, on_cpu: bool) -> tuple[int, ...]:
    if text is None:
        return () if on_cpu else SEGMENT_CAPACITIES
    return () if text == "none" else _numbers("--capacities", text)


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = _parts(text)
    if not names:
        raise OptionError(f"--peers {text!r} names no peer: leave it out for all of them.")
    return names


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(map(int, _parts(text)))
    except ValueError:
        found = ()
    if not found:
        raise OptionError(f"{option} {text!r}: expected whole numbers with commas, such as 64,256.")
    return found
