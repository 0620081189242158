"""`vit-compile`: the command line.

Commands only parse and print; the work is in the modules beside this one, which are imported when a command needs them,
so that `--help` is quick. Exit codes: 0 all well; 1 a result beyond tolerance, or something required is broken
(`doctor`); 2 a mistake of the user's, told in one line on stderr.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer

from vit_compile.errors import OptionError, VitCompileError
from vit_compile.tools.bench.command import bench
from vit_compile.tools.plan_command import plan

if TYPE_CHECKING:
    from vit_compile.tools.compiling import CompileSettings
    from vit_compile.tools.vision_models import VisionModel

P = ParamSpec("P")
R = TypeVar("R")

EXIT_DIFFERENT = 1
EXIT_USER_ERROR = 2
DEFAULT_MAX_TOKENS = 1024

app = typer.Typer(
    name="vit-compile",
    help="Vision encoders at CUDA-graph replay speed, for any mix of image sizes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Mode(StrEnum):
    """What is captured; the backend option `mode`."""

    auto = "auto"
    full = "full"
    piecewise = "piecewise"
    none = "none"


class Compiler(StrEnum):
    """What compiles the pieces; the backend option `compiler`."""

    inductor = "inductor"
    aot_eager = "aot_eager"
    eager = "eager"


class Dtype(StrEnum):
    """Precision of weights and images."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelOption = Annotated[str | None, typer.Option("--model", help="Model folder or hub name (transformers).", show_default=False)]
ModeOption = Annotated[Mode, typer.Option("--mode", help="What is captured.")]
CompilerOption = Annotated[
    Compiler | None,
    typer.Option("--compiler", help="What compiles the pieces. Default: inductor; aot_eager where there is no C++ compiler."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Precision of weights and images.")]
OutDirOption = Annotated[
    Path | None, typer.Option("--out-dir", help="Folder for everything that is written.", show_default=False)
]


def user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns the package's own errors into one line on stderr and exit code 2."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except VitCompileError as error:
            message = " ".join(str(error).split())
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, not imported here
                raise
            message = "the device ran out of memory: lower --max-tokens, or use --dtype bfloat16."
        print(f"vit-compile: {message}", file=sys.stderr)
        raise typer.Exit(EXIT_USER_ERROR)

    return guarded


@app.command()
@user_errors
def run(
    images: Annotated[list[str] | None, typer.Argument(help="Image files.", show_default=False)] = None,
    model: ModelOption = None,
    mode: ModeOption = Mode.auto,
    compiler: CompilerOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.float32,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help="Shrink images to at most so many patches; class tokens come on top [1024; demo on a CPU: 400]",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Features file (safetensors) to write.", show_default=False)] = None,
    demo: Annotated[bool, typer.Option("--demo", help="A trained DINOv2 ViT-S/14 on photographs; needs no images.")] = False,
    out_dir: OutDirOption = None,
) -> None:
    """Encode images with a compiled vision model and hold each result against eager."""
    if demo and (images or model):
        raise OptionError("--demo brings its own images and model: leave out IMAGES and --model.")
    if not demo and not images:
        raise OptionError("no images given: name at least one file, or use --demo.")
    _need_tools()
    from vit_compile.tools import report, runs

    runs.check_writable(out, out_dir)
    if demo:
        from vit_compile.tools import demo as demo_job

        folder = out_dir or Path("demo_output")
        loaded, settings = _load(None, True, mode, compiler, device, dtype, folder, max_graphs=demo_job.MAX_GRAPHS)
        limit = max_tokens or demo_job.MAX_PATCHES[loaded.device.type]
        result = demo_job.run_demo(loaded, settings, max_patches=limit, out=out, out_dir=folder)
    else:
        loaded, settings = _load(model, False, mode, compiler, device, dtype, out_dir)
        result = runs.run_images(
            images or [], loaded, settings, max_patches=max_tokens or DEFAULT_MAX_TOKENS, out=out, out_dir=out_dir
        )
    if json:
        print(result.as_json())
    else:
        report.print_report(result)
    if not result.ok:
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
@user_errors
def inspect(
    model: ModelOption = None,
    demo: Annotated[bool, typer.Option("--demo", help="The demo's DINOv2 ViT-S/14.")] = False,
    mode: ModeOption = Mode.auto,
    compiler: CompilerOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.float32,
    size: Annotated[
        str | None, typer.Option("--size", help="Pixels, as HxW. Default: the model's own size.", show_default=False)
    ] = None,
    out_dir: OutDirOption = None,
) -> None:
    """Compile a model, run it once, and print what the backend made of it, on one page."""
    _need_tools()
    from vit_compile.tools import inspection, runs

    runs.check_writable(out_dir)
    loaded, settings = _load(model, demo, mode, compiler, device, dtype, out_dir)
    inspection.print_page(inspection.inspect_model(loaded, settings, size=size, folder=out_dir), kept=out_dir)


app.command()(user_errors(plan))


@app.command()
@user_errors
def doctor() -> None:
    """Print versions and what works here; exit code 1 when something required is broken."""
    from vit_compile.tools import diagnosis

    findings = diagnosis.examine()
    diagnosis.print_findings(findings)
    if any(finding.verdict == "broken" for finding in findings):
        raise typer.Exit(EXIT_DIFFERENT)


app.command()(user_errors(bench))


def main() -> None:
    """Entry point of the `vit-compile` script."""
    app()


def _need_tools() -> None:
    from vit_compile.tools.dependencies import require

    require("torch", "transformers", "PIL", "safetensors", "numpy", extra="hf")


def _load(
    name: str | None,
    demo: bool,
    mode: Mode,
    compiler: Compiler | None,
    device_name: str,
    dtype: Dtype,
    out_dir: Path | None,
    *,
    max_graphs: int | None = None,
) -> tuple[VisionModel, CompileSettings]:
    """The model and how to compile it."""
    if demo and name:
        raise OptionError("--demo brings its own model: leave out --model.")
    if not demo and not name:
        raise OptionError("no model given: name one with --model, or use --demo.")
    from transformers.utils import logging as hf_logging

    from vit_compile.tools import compiling, vision_models

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    device = vision_models.choose_device(device_name)
    chosen = compiling.choose_compiler(compiler.value if compiler else None, device)
    if demo:
        from vit_compile.tools.demo_weights import demo_model_dir

        name = str(demo_model_dir(out_dir))
    assert name is not None, "checked above"
    settings = compiling.CompileSettings(mode=mode.value, compiler=chosen, max_graphs=max_graphs or compiling.MAX_GRAPHS)
    return vision_models.load_vision_model(name, device=device, dtype=vision_models.DTYPES[dtype.value]), settings


if __name__ == "__main__":
    main()
