"""Encodes images with a compiled model and holds each result against eager.

Every image is encoded twice or more: the first call may capture, the later ones are timed. All of them are compared with
the eager model on the same pixels. The two numbers of a comparison: the largest absolute difference of any value, and
the worst token's relative difference, ||compiled - eager|| / ||eager|| over that token's features, so that one wrong
token cannot hide among a thousand right ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from PIL import Image

from vit_compile.stats import CallRecord
from vit_compile.tools.compiling import Encode, call_since, calls_served
from vit_compile.tools.images import PatchGrid, load_image, normalize, resize
from vit_compile.tools.vision_models import VisionModel

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 1e-2}
"""Largest relative difference of a token that still counts as rounding, by the model's precision: about 2.5 times what the
half precisions themselves cost a DINOv2-S (eager against float32: 3.2e-2 and 4.0e-3); about 20 times what reordered
float32 sums were seen to give."""

_SMALLEST_SHARE_OF_MEAN_NORM = 1e-2
REPEATS = {"cpu": 3, "cuda": 9}
"""Timed calls by device."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a compiled output is from the eager one."""

    largest_absolute: float
    worst_token_relative: float

    def within(self, tolerance: float) -> bool:
        """Is it rounding? NaN never is."""
        return self.worst_token_relative <= tolerance

    def worse(self, other: Difference) -> Difference:
        """The larger of each number; NaN counts as largest."""
        return Difference(
            _larger(self.largest_absolute, other.largest_absolute), _larger(self.worst_token_relative, other.worst_token_relative)
        )


NO_DIFFERENCE = Difference(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, ready for the model."""

    name: str
    """The file's name, made unique within the run."""

    path: str
    width_pixels: int
    """Upright, before resizing."""

    height_pixels: int
    grid: PatchGrid
    resized: Image.Image
    """RGB, `grid.width` x `grid.height` pixels."""

    @classmethod
    def of(cls, image: Image.Image, path: str, name: str, model: VisionModel, *, max_patches: int) -> Self:
        """Resizes an RGB picture for a model."""
        grid = model.grid(image.width, image.height, max_patches=max_patches)
        return cls(name, path, image.width, image.height, grid, resize(image, grid))

    @classmethod
    def read(cls, path: str | Path, name: str, model: VisionModel, *, max_patches: int) -> Self:
        """Reads and resizes one file."""
        return cls.of(load_image(path), str(path), name, model, max_patches=max_patches)

    def pixel_values(self, model: VisionModel) -> torch.Tensor:
        """[1, 3, H, W] in the model's precision, on its device."""
        return normalize(self.resized, model.normalization).to(model.device, model.dtype)


@dataclass(frozen=True, slots=True)
class ImageResult:
    """What happened to one image."""

    picture: Picture
    tokens: int
    """Rows of the model's output, with its class token where it has one."""

    call: CallRecord
    """How the timed calls were served."""

    captured: bool
    """The first call captured a graph."""

    first_ms: float
    """The first call, compilation and capture included."""

    ms: float
    """Median of the timed calls."""

    eager_ms: float
    difference: Difference
    tolerance: float
    pooled: torch.Tensor
    """float32 tensor [D] on the CPU."""

    @property
    def within_tolerance(self) -> bool:
        """Is the difference from eager rounding?"""
        return self.difference.within(self.tolerance)


def compare(tokens: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compares features of the same shape [..., D]; another shape is infinitely different."""
    if tokens.shape != reference.shape:
        return Difference(float("inf"), float("inf"))
    got, want = tokens.detach().double(), reference.detach().double()
    error = got - want
    norms = want.norm(dim=-1)
    floor = (norms.mean() * _SMALLEST_SHARE_OF_MEAN_NORM).clamp_min(torch.finfo(torch.float32).tiny)
    relative = (error.norm(dim=-1) / torch.maximum(norms, floor)).max().item()
    return Difference(error.abs().max().item(), relative)


def encode_picture(picture: Picture, model: VisionModel, compiled: Encode, eager: Encode) -> ImageResult:
    """Encodes one picture compiled and eagerly, and compares every compiled output with the eager one."""
    pixel_values = picture.pixel_values(model)
    reference, reference_pooled = eager(pixel_values)

    served = calls_served()
    (tokens, pooled), first_ms = _timed(compiled, pixel_values)
    captured = call_since(served).captured_now
    difference = compare(tokens, reference).worse(compare(pooled, reference_pooled))

    times = []
    for _ in range(REPEATS[model.device.type]):
        served = calls_served()
        (tokens, pooled), ms = _timed(compiled, pixel_values)
        times.append(ms)
        difference = difference.worse(compare(tokens, reference)).worse(compare(pooled, reference_pooled))
    eager_times = [_timed(eager, pixel_values)[1] for _ in range(REPEATS[model.device.type])]
    return ImageResult(
        picture=picture,
        tokens=tokens.shape[1],
        call=call_since(served),
        captured=captured,
        first_ms=first_ms,
        ms=statistics.median(times),
        eager_ms=statistics.median(eager_times),
        difference=difference,
        tolerance=TOLERANCES[model.dtype],
        pooled=pooled[0].float().cpu(),
    )


def unique_names(paths: list[str]) -> list[str]:
    """File names made unique, in order: the second `cat.jpg` becomes `cat-2.jpg`."""
    names: list[str] = []
    for path in paths:
        file = Path(path)
        name, count = file.name, 1
        while name in names:
            count += 1
            name = f"{file.stem}-{count}{file.suffix}"
        names.append(name)
    return names


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions in float32 mean float32: cuDNN's TF32, on by default, would blur the comparison."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _timed(encode: Encode, pixel_values: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], float]:
    synchronize = _synchronizer(pixel_values.device)
    synchronize()
    started = time.perf_counter()
    output = encode(pixel_values)
    synchronize()
    return output, (time.perf_counter() - started) * 1e3


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def _larger(a: float, b: float) -> float:
    return a if a != a or a > b else b
