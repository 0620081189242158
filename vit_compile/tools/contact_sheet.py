"""The demo's picture: each photo beside its three nearest neighbours in the gallery."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from vit_compile.errors import OptionError
from vit_compile.tools.gallery import NEIGHBOURS, Query

COLUMNS = 2
"""Queries side by side."""

DPI = 110
_CELL_INCHES = 1.45
_ROW_INCHES = 1.75
_GAP = 0.35
"""Between the two halves, as a share of a cell."""

_HEADER_INCHES = 1.15
_THUMBNAIL_PIXELS = 256
_RIGHT, _WRONG, _QUERY = "#15803d", "#b91c1c", "#334155"


def sheet_pixels(queries: int) -> tuple[int, int]:
    """Width and height of the sheet for a number of queries, in pixels."""
    rows = max(1, math.ceil(queries / COLUMNS))
    width = (COLUMNS * (1 + NEIGHBOURS) + (COLUMNS - 1) * _GAP + 0.3) * _CELL_INCHES
    return round(width * DPI), round((rows * _ROW_INCHES + _HEADER_INCHES) * DPI)


def write_contact_sheet(path: Path, queries: Sequence[Query], *, title: str, lines: Sequence[str]) -> Path:
    """Draws the sheet as PNG.

    Args:
        path: the file to write; its folder is made.
        queries: what each photo found; fewer than three neighbours leave cells empty.
        title: a bold line at the top.
        lines: up to two lines under it.
    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = sheet_pixels(len(queries))
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    inches_high = height / DPI
    figure.text(0.015, 1 - 0.32 / inches_high, title, fontsize=15, fontweight="bold", va="center")
    for line_number, line in enumerate(lines):
        figure.text(0.015, 1 - (0.62 + 0.2 * line_number) / inches_high, line, fontsize=9, color=_QUERY, va="center")
    rows = max(1, math.ceil(len(queries) / COLUMNS))
    for index, query in enumerate(queries):
        # Down the left half first, then down the right one.
        half, row = divmod(index, rows)
        left = 0.15 + half * (1 + NEIGHBOURS + _GAP)
        _draw(figure, left, row, query.image, query.name, "photo", _QUERY)
        for place, match in enumerate(query.matches, start=1):
            entry = match.entry
            mark, color = ("✓", _RIGHT) if match.correct else ("✗", _WRONG)
            _draw(
                figure,
                left + place,
                row,
                entry.image,
                f"{mark} {entry.source}",
                f"{entry.transform}, {match.similarity:.2f}",
                color,
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}.") from error
    return path


def _draw(figure: Any, left_cells: float, row: int, image: Image.Image, name: str, detail: str, color: str) -> None:
    """One picture with a coloured frame and two lines under it."""
    width_inches, height_inches = figure.get_size_inches()
    picture_inches = _CELL_INCHES * 0.9
    left = left_cells * _CELL_INCHES
    bottom = height_inches - _HEADER_INCHES - row * _ROW_INCHES - picture_inches
    axes = figure.add_axes(
        (left / width_inches, bottom / height_inches, picture_inches / width_inches, picture_inches / height_inches)
    )
    axes.imshow(ImageOps.pad(image, (_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS), color=(241, 245, 249)))
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.2)
    center = (left + picture_inches / 2) / width_inches
    figure.text(
        center, (bottom - 0.13) / height_inches, name, fontsize=9, fontweight="bold", color=color, ha="center", va="center"
    )
    figure.text(center, (bottom - 0.28) / height_inches, detail, fontsize=7.5, color=_QUERY, ha="center", va="center")
