"""Image files in, model inputs out: decoding, the native-aspect resize rule, normalisation.

Guarantees: the picture is upright (EXIF orientation is applied), has three 8-bit channels (transparency is laid over
white, 16-bit and float greys are scaled), and is resized so that both sides are multiples of the patch side.
Does not do: cropping, batching, colour management, frames of an animation beyond the first.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from vit_compile.errors import ImageError, OptionError

_GREY_16_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """A picture's size in patches."""

    rows: int
    columns: int
    patch_side: int
    """Side of one patch in pixels."""

    @property
    def patches(self) -> int:
        """Patches in the whole picture."""
        return self.rows * self.columns

    @property
    def height(self) -> int:
        """Pixels."""
        return self.rows * self.patch_side

    @property
    def width(self) -> int:
        """Pixels."""
        return self.columns * self.patch_side


@dataclass(frozen=True, slots=True)
class Normalization:
    """Per-channel statistics of a model's preprocessor, for values in 0..1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    source: str
    """Where the numbers come from, for the reader of a report."""


def load_image(path: str | Path) -> Image.Image:
    """Decodes one image file.

    Args:
        path: a file of any format that Pillow reads; of an animation, the first frame.
    Returns:
        An upright RGB picture with 8 bits per channel, owned by the caller.
    Raises:
        ImageError: the file is missing, empty, a folder, not an image, truncated or absurdly large.
    """
    path = Path(path)
    if path.is_dir():
        raise ImageError(f"{path} is a folder: give image files, for example {path}/*.jpg.")
    if not path.exists():
        raise ImageError(f"{path}: no such file.")
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is empty (0 bytes).")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                opened.load()
                return to_rgb(opened)
    except UnidentifiedImageError:
        raise ImageError(f"{path} is not an image that Pillow can read.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"{path} has more pixels than Pillow's safety limit allows: make it smaller first.") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow's decoders raise on damaged files
        raise ImageError(
            f"{path} cannot be read: {str(error).splitlines()[0].rstrip('.') if str(error) else type(error).__name__}."
        ) from None


def to_rgb(image: Image.Image) -> Image.Image:
    """An upright 8-bit RGB copy of a decoded picture of any Pillow mode; transparency is laid over white."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode in _GREY_16_BIT or upright.mode in ("I", "F"):
        upright = _grey_to_8_bit(upright)
    if upright.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in upright.info:
        layer = upright.convert("RGBA")
        background = Image.new("RGBA", layer.size, (*_WHITE, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    rgb = upright.convert("RGB")
    return rgb.copy() if rgb is image else rgb


def _grey_to_8_bit(image: Image.Image) -> Image.Image:
    """Greys wider than 8 bits: 16-bit codes are divided by 257; floats are read as 0..1, or as 0..255 if any exceeds 1."""
    values = np.asarray(image).astype(np.float64)
    largest = float(np.nanmax(values, initial=0.0))
    if image.mode == "F":
        scaled = values * 255 if largest <= 1 else values
    elif image.mode == "I" and largest <= 255:
        scaled = values
    else:
        scaled = values / 257
    codes = np.clip(np.rint(np.nan_to_num(scaled)), 0, 255).astype(np.uint8)
    return Image.fromarray(codes)


def fit_grid(width_pixels: int, height_pixels: int, *, patch_side: int, max_patches: int) -> PatchGrid:
    """The patch grid that keeps a picture's aspect ratio best within a number of patches.

    A picture that fits is only rounded to whole patches; a larger one is scaled down by one factor for both sides. Each
    side then ends up less than one patch from its exact length, except that no side is below one patch.

    Args:
        width_pixels, height_pixels: the upright picture, both positive.
        patch_side: side of a patch in pixels.
        max_patches: the most patches wanted, at least 1.
    """
    for name, value in (
        ("width", width_pixels),
        ("height", height_pixels),
        ("patch_side", patch_side),
        ("max_patches", max_patches),
    ):
        if value < 1:
            raise OptionError(f"{name}={value}: expected a positive number.")
    exact_rows, exact_columns = height_pixels / patch_side, width_pixels / patch_side
    shrink = min(1.0, math.sqrt(max_patches / (exact_rows * exact_columns)))
    exact_rows, exact_columns = exact_rows * shrink, exact_columns * shrink
    if min(exact_rows, exact_columns) < 1:  # a thin strip: one patch across, as long as the other side allows
        longest = min(max_patches, max(1, round(max(height_pixels, width_pixels) / patch_side)))
        rows, columns = (1, longest) if height_pixels <= width_pixels else (longest, 1)
        return PatchGrid(rows, columns, patch_side)
    candidates = [
        (rows, columns)
        for rows in {max(1, math.floor(exact_rows)), math.ceil(exact_rows)}
        for columns in {max(1, math.floor(exact_columns)), math.ceil(exact_columns)}
        if rows * columns <= max_patches
    ]

    def cost(candidate: tuple[int, int]) -> tuple[float, int, int]:
        rows, columns = candidate
        bend = abs(math.log(rows / exact_rows)) + abs(math.log(columns / exact_columns))
        return (round(bend, 9), -rows * columns, rows)

    rows, columns = min(candidates, key=cost)
    return PatchGrid(rows, columns, patch_side)


def resize(image: Image.Image, grid: PatchGrid) -> Image.Image:
    """The picture at a grid's size: bicubic, antialiased; a new picture of `grid.width` x `grid.height` pixels."""
    return image.resize((grid.width, grid.height), Image.Resampling.BICUBIC)


def normalize(image: Image.Image, normalization: Normalization) -> torch.Tensor:
    """Pixels as a model wants them.

    Args:
        image: an RGB picture, already at the model's size.
        normalization: channel statistics.
    Returns:
        float32 tensor of shape [1, 3, height, width] on the CPU, owned by the caller.
    """
    values = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0).permute(2, 0, 1)
    mean = torch.tensor(normalization.mean).view(3, 1, 1)
    std = torch.tensor(normalization.std).view(3, 1, 1)
    return ((values - mean) / std).unsqueeze(0).contiguous()
