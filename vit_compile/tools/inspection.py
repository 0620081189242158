"""The job behind `vit-compile inspect`: compile once with dumps, hand back the page that says what happened."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from pathlib import Path

import torch
from rich.markdown import Markdown

from vit_compile.errors import ModelError, OptionError
from vit_compile.tools.compiling import CompileSettings, compile_encoder
from vit_compile.tools.images import PatchGrid
from vit_compile.tools.report import console_for
from vit_compile.tools.vision_models import VisionModel

_DEFAULT_SIDE_PIXELS = 224
PAGE = "index.md"


def inspect_model(model: VisionModel, settings: CompileSettings, *, size: str | None, folder: Path | None) -> str:
    """Compiles a model with dumps of every stage and runs it twice on one random image (capture, then replay).

    Args:
        model: the encoder.
        settings: how it is compiled; the dump folder is set here.
        size: "HxW" in pixels, multiples of the patch; None: the model's own size, or about 224.
        folder: where the dumps stay; None: they are deleted.
    Returns:
        The text of `index.md` (Markdown).
    """
    grid = _grid(model, size)
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(1, 3, grid.height, grid.width, generator=generator).to(model.device, model.dtype)
    with tempfile.TemporaryDirectory(prefix="vit-compile-") as temporary:
        dumps = folder if folder is not None else Path(temporary)
        encode = compile_encoder(model, dataclasses.replace(settings, debug_dir=str(dumps)))
        encode(pixel_values)
        encode(pixel_values)
        page = dumps / PAGE
        if not page.is_file():
            raise ModelError(f"{model.name}: the backend wrote no {PAGE}; Dynamo ran the model without it.")
        return page.read_text(encoding="utf-8")


def print_page(text: str, *, kept: Path | None) -> None:
    """Prints a page, and where the dumps are."""
    console = console_for(sys.stdout)
    console.print(Markdown(text))
    if kept is not None:
        console.print(f"All stages: {kept}", highlight=False, soft_wrap=True)


def _grid(model: VisionModel, size: str | None) -> PatchGrid:
    side = model.patch_side
    if size is None:
        own = max(1, round(_DEFAULT_SIDE_PIXELS / side))
        return model.fixed_grid or PatchGrid(own, own, side)
    match = re.fullmatch(r"(\d+)[xX](\d+)", size)
    if match is None:
        raise OptionError(f"--size {size}: expected height and width in pixels, such as 224x336.")
    height, width = int(match.group(1)), int(match.group(2))
    if height < side or width < side or height % side or width % side:
        raise OptionError(f"--size {size}: both sides must be positive multiples of the patch side, {side} pixels.")
    grid = PatchGrid(height // side, width // side, side)
    if model.fixed_grid is not None and grid != model.fixed_grid:
        raise OptionError(f"--size {size}: this model takes {model.fixed_grid.height}x{model.fixed_grid.width} only.")
    return grid
