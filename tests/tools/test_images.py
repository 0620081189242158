"""Reading, the resize rule, normalisation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vit_compile.errors import ImageError, OptionError
from vit_compile.tools.images import Normalization, PatchGrid, fit_grid, load_image, normalize, resize

PIXELS = st.integers(1, 20_000)


def save(tmp_path: Path, image: Image.Image, name: str = "image.png", **options: object) -> Path:
    """Writes a picture and returns its path."""
    path = tmp_path / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize(
    ("orientation", "corner"),
    [(1, (0, 0)), (2, (1, 0)), (3, (1, 1)), (4, (0, 1)), (5, (0, 0)), (6, (1, 0)), (7, (1, 1)), (8, (0, 1))],
)
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, corner: tuple[int, int]) -> None:
    """The stored top left corner ends up where the EXIF tag says, and sides swap for the four rotated cases."""
    stored = Image.new("RGB", (40, 20))
    stored.paste((255, 0, 0), (0, 0, 10, 10))
    exif = Image.Exif()
    exif[0x0112] = orientation
    loaded = load_image(save(tmp_path, stored, exif=exif))
    assert loaded.size == ((20, 40) if orientation >= 5 else (40, 20))
    x, y = corner[0] * (loaded.width - 1), corner[1] * (loaded.height - 1)
    assert loaded.getpixel((x, y)) == (255, 0, 0)


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    """Clear pixels become white, half clear ones are mixed, opaque ones stay."""
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 0), (0, 0, 0, 128), (0, 255, 0, 255)])
    loaded = load_image(save(tmp_path, image))
    assert loaded.mode == "RGB"
    assert loaded.getpixel((0, 0)) == (255, 255, 255)
    assert abs(loaded.getpixel((1, 0))[0] - 127) <= 1  # type: ignore[index]
    assert loaded.getpixel((2, 0)) == (0, 255, 0)


def test_grey_with_alpha(tmp_path: Path) -> None:
    """A grey picture with alpha follows the same rule."""
    image = Image.new("LA", (2, 1))
    image.putdata([(10, 0), (10, 255)])
    loaded = load_image(save(tmp_path, image))
    assert [loaded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (10, 10, 10)]


def test_grey_becomes_three_equal_channels(tmp_path: Path) -> None:
    """A grey value is repeated in all channels."""
    assert load_image(save(tmp_path, Image.new("L", (2, 2), 77))).getpixel((0, 0)) == (77, 77, 77)


@pytest.mark.parametrize("value", [0, 257, 30_000, 65_535])
def test_sixteen_bit_grey_is_scaled(tmp_path: Path, value: int) -> None:
    """A 16-bit value becomes its eight upper bits, rounded; it is not clipped at 255."""
    image = Image.fromarray(np.full((4, 4), value, dtype=np.uint16))
    expected = round(value / 257)
    assert load_image(save(tmp_path, image)).getpixel((0, 0)) == (expected,) * 3


@pytest.mark.parametrize(("value", "expected"), [(0.5, 128), (1.0, 255), (200.0, 200)])
def test_float_grey_is_scaled(tmp_path: Path, value: float, expected: int) -> None:
    """Floats up to 1 are shares of white; larger ones are 8-bit values."""
    image = Image.fromarray(np.full((4, 4), value, dtype=np.float32))
    assert load_image(save(tmp_path, image, "image.tiff")).getpixel((0, 0)) == (expected,) * 3


def test_palette_with_and_without_transparency(tmp_path: Path) -> None:
    """Palette entries become their colours; the transparent one becomes white."""
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert load_image(save(tmp_path, image)).getpixel((0, 0)) == (255, 0, 0)
    clear = load_image(save(tmp_path, image, "clear.png", transparency=0))
    assert [clear.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (0, 0, 255)]


@pytest.mark.parametrize("mode", ["1", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    """Whatever Pillow reads comes out as RGB of the same size."""
    loaded = load_image(save(tmp_path, Image.new(mode, (8, 8)), "image.tiff"))
    assert (loaded.mode, loaded.size) == ("RGB", (8, 8))


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(ImageError, match=r"nothing\.png: no such file"):
        load_image(tmp_path / "nothing.png")


def test_folder(tmp_path: Path) -> None:
    """A folder is refused with what to give instead."""
    with pytest.raises(ImageError, match="is a folder"):
        load_image(tmp_path)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"hello, world\n", "is not an image")])
def test_files_that_are_no_images(tmp_path: Path, content: bytes, message: str) -> None:
    """Empty files and text files are told apart."""
    path = tmp_path / "file.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=message):
        load_image(path)


@pytest.mark.parametrize("name", ["image.png", "image.jpg"])
def test_truncated_file(tmp_path: Path, name: str) -> None:
    """A file that ends early is an error, never a half grey picture."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    path = save(tmp_path, noise, name)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ImageError, match="cannot be read"):
        load_image(path)


def test_absurdly_large_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decompression bomb is refused before it is decoded."""
    path = save(tmp_path, Image.new("L", (100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="more pixels"):
        load_image(path)


@given(PIXELS, PIXELS, st.integers(4, 32), st.integers(1, 4096))
def test_fit_grid_keeps_its_promises(width: int, height: int, patch_side: int, max_patches: int) -> None:
    """Whole patches, at least one a side, at most the cap; each side within one patch of its exact length."""
    grid = fit_grid(width, height, patch_side=patch_side, max_patches=max_patches)
    assert grid.rows >= 1
    assert grid.columns >= 1
    assert grid.patches <= max_patches
    assert (grid.width % patch_side, grid.height % patch_side) == (0, 0)
    shrink = min(1.0, math.sqrt(max_patches * patch_side**2 / (width * height)))
    exact_rows, exact_columns = height * shrink / patch_side, width * shrink / patch_side
    if min(exact_rows, exact_columns) >= 1:
        assert abs(grid.rows - exact_rows) < 1 + 1e-6
        assert abs(grid.columns - exact_columns) < 1 + 1e-6


@given(PIXELS, PIXELS, st.integers(16, 4096))
def test_aspect_ratio_error_is_bounded(width: int, height: int, max_patches: int) -> None:
    """Where both sides have patches enough, the aspect ratio is off by less than one patch on each side."""
    grid = fit_grid(width, height, patch_side=14, max_patches=max_patches)
    if min(grid.rows, grid.columns) >= 2:
        bound = (1 + 1 / (grid.rows - 1)) * (1 + 1 / (grid.columns - 1))
        error = (grid.width / grid.height) / (width / height)
        assert 1 / bound <= error <= bound


@given(st.integers(1, 60), st.integers(1, 60))
def test_whole_patches_that_fit_stay_as_they_are(rows: int, columns: int) -> None:
    """A picture that already is a grid within the cap is not resized."""
    assert fit_grid(columns * 14, rows * 14, patch_side=14, max_patches=3600) == PatchGrid(rows, columns, 14)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(1, 1, (1, 1)), (20_000, 1, (1, 1024)), (3, 20_000, (1024, 1)), (140, 5, (1, 10)), (512, 512, (32, 32))],
)
def test_extreme_pictures(width: int, height: int, expected: tuple[int, int]) -> None:
    """Strips and single pixels get a grid too."""
    grid = fit_grid(width, height, patch_side=14, max_patches=1024)
    assert (grid.rows, grid.columns) == expected


@pytest.mark.parametrize("wrong", [{"width_pixels": 0}, {"height_pixels": -1}, {"patch_side": 0}, {"max_patches": 0}])
def test_fit_grid_refuses_nonsense(wrong: dict[str, int]) -> None:
    """Nothing below one is taken."""
    with pytest.raises(OptionError, match="expected a positive number"):
        fit_grid(**{"width_pixels": 10, "height_pixels": 10, "patch_side": 14, "max_patches": 4, **wrong})


def test_resize_and_normalize() -> None:
    """A flat picture becomes a flat tensor of (value / 255 - mean) / std at the grid's size."""
    image = resize(Image.new("RGB", (100, 50), (255, 0, 51)), PatchGrid(2, 3, 14))
    values = normalize(image, Normalization((0.5, 0.5, 0.5), (0.5, 0.25, 1.0), "test"))
    assert values.shape == (1, 3, 28, 42)
    assert values.dtype == torch.float32
    expected = torch.tensor([1.0, -2.0, -0.3]).view(1, 3, 1, 1).expand_as(values)
    torch.testing.assert_close(values, expected)
