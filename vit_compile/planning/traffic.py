"""Traffic: requests of images and clips, made from a preset or read from a file, and how a tower cuts them into patches.

A *picture* is known by its sizes alone; pixels play no part here. A *request* is what arrives in one call. The presets and what
they stand for:

- `chat`: images of production chat traffic; tokens and images per request follow the histograms in `traces/`.
- `catalogue`: square pictures of a few sides that are common, and of sides next to them; Zipf's law.
- `documents`: scanned pages from 590 x 290 to 5367 x 7184 pixels.
- `fixed`: requests of 336-pixel or of 384-pixel squares, for towers of one size.
- `video`: one clip of 4 to 64 frames, sides of 224 to 480 pixels.
- `adversarial`: every grid that the geometry allows is as likely as any other.

The same seed gives the same requests in every process and version of Python. Presets that are given in pixels (`documents`,
`fixed`, the sides of `video`) do not depend on the geometry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vit_compile.errors import BudgetError, TraceError
from vit_compile.planning import units
from vit_compile.planning.units import Grid

PRESETS = ("chat", "catalogue", "documents", "fixed", "video", "adversarial")

_SIDES = ("height", "width")
_KEYS = (*_SIDES, "frames")


@dataclass(frozen=True, slots=True)
class Picture:
    """One image or clip.

    Raises:
        BudgetError: A number is not a positive integer.
    """

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    frames: int = 1
    """1: an image."""

    def __post_init__(self) -> None:
        for name in _KEYS:
            object.__setattr__(self, name, units.positive_int(name, getattr(self, name)))


Request: TypeAlias = tuple[Picture, ...]
"""The pictures of one call, in order."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tower and its processor turn pixels into patches and output tokens.

    A *block* is the square of pixels that becomes one token: `patch_size * merge_size` on a side.

    Raises:
        BudgetError: A number is out of range, or `min_tokens` is above `max_tokens`.
    """

    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int = 1
    """Side, in patches, of the square that becomes one token."""
    temporal_patch_size: int = 1
    """Frames of a clip that share their patches. An image is one frame group."""
    min_tokens: int = 1
    """The processor's lower limit: output tokens of one frame group, to which smaller pictures are enlarged."""
    max_tokens: int = 16384
    """The processor's upper limit: output tokens of one frame group, to which larger pictures are shrunk."""
    extra_tokens: int = 0
    """Class and register tokens of one image (dense ViTs). The limits do not count them."""

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_tokens", "max_tokens"):
            object.__setattr__(self, name, units.positive_int(name, getattr(self, name)))
        object.__setattr__(self, "extra_tokens", units.natural_int("extra_tokens", self.extra_tokens))
        if self.min_tokens > self.max_tokens:
            raise BudgetError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: swap them.")

    @property
    def block(self) -> int:
        """Side, in pixels, of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def grid(self, picture: Picture) -> Grid:
        """`(t, h, w)` in patches, by the rule that Qwen's image processors call smart resize.

        Each side is rounded to the nearest whole number of blocks. Where that makes too many tokens, both sides are scaled by
        the one factor that would meet the limit exactly, and rounded down; where it makes too few, they are scaled likewise and
        rounded up. So the aspect ratio is kept as nearly as blocks allow. A side is one block at least. Where rounding up breaks
        the upper limit, that limit wins. Clips fill their last frame group by repeating a frame.
        """
        high, wide = picture.height, picture.width
        rows, columns = round(high / self.block), round(wide / self.block)
        if rows * columns < self.min_tokens:
            # The factor sqrt(min_tokens * block^2 / (high * wide)), without its rounding errors.
            rows, columns = _root_up(high * self.min_tokens, wide), _root_up(wide * self.min_tokens, high)
        if rows * columns > self.max_tokens:
            rows = max(1, math.isqrt(high * self.max_tokens // wide))
            columns = max(1, math.isqrt(wide * self.max_tokens // high))
            # Only where the other side cannot be shorter than its one block.
            rows, columns = min(rows, self.max_tokens), min(columns, self.max_tokens)
        groups = -(-picture.frames // self.temporal_patch_size)
        return groups, rows * self.merge_size, columns * self.merge_size

    def tokens(self, picture: Picture) -> int:
        """Output tokens of the picture, extra ones included."""
        return units.tokens_from_grid(self.grid(picture), spatial_merge_size=self.merge_size) + self.extra_tokens


def generate(preset: str, count: int, *, seed: int, geometry: Geometry) -> list[Request]:
    """Requests of a preset; each has at least one picture.

    Args:
        preset: One of `PRESETS`.
        count: Requests, 1 or more.
        seed: Which ones. A longer list with the same seed begins with the shorter one.
        geometry: Turns the tokens, patches and grids of a preset into pixels.

    Raises:
        TraceError: The preset is unknown.
        BudgetError: `count` is not a positive integer.
    """
    # Here and not at the top: the presets make pictures, so they need this module.
    from vit_compile.planning.traffic_presets import DRAWN_BY, Dice

    if preset not in PRESETS:
        raise TraceError(f"traffic {preset!r} is not a preset: choose one of {', '.join(PRESETS)}.")
    dice = Dice(seed)
    return [DRAWN_BY[preset](dice, geometry) for _ in range(units.positive_int("count", count))]


def read_jsonl(path: str | Path) -> list[Request]:
    """Requests from a file of one JSON object a line, as `write_jsonl` writes them.

    Args:
        path: A file of lines such as `{"images": [{"height": 336, "width": 448}, {"height": 240, "width": 320, "frames": 8}]}`.

    Raises:
        TraceError: The file cannot be read or is empty, or a line is no such object; the text has the line's number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): expected a JSONL file."
        ) from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise TraceError(f"{path} is empty: give at least one request, one JSON object a line.")
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            requests.append(_request(line))
        except (TraceError, BudgetError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    return requests


def write_jsonl(path: str | Path, requests: Iterable[Request]) -> None:
    """Requests into a file, one JSON object a line; reading it gives the same requests.

    Raises:
        TraceError: There are no requests, one has no pictures, or the file cannot be written.
    """
    lines = list(_lines(requests))
    if not lines:
        raise TraceError(f"no requests to write to {path}: a trace has at least one.")
    try:
        Path(path).write_text("".join(lines), encoding="utf-8", newline="\n")
    except OSError as error:
        raise TraceError(f"{path} cannot be written ({error.strerror or error}).") from error


def _lines(requests: Iterable[Request]) -> Iterator[str]:
    for number, request in enumerate(requests, start=1):
        if not request:
            raise TraceError(f"request {number} has no pictures: leave it out.")
        images = [
            {"height": picture.height, "width": picture.width} | ({"frames": picture.frames} if picture.frames > 1 else {})
            for picture in request
        ]
        yield json.dumps({"images": images}) + "\n"


def _request(line: str) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, or a thousand brackets
        raise TraceError("not a JSON object.") from None
    _check_keys(entry, needed=("images",), known=("images",))
    images = entry["images"]
    if not isinstance(images, list) or not images:
        raise TraceError("images: expected a list of at least one picture.")
    for image in images:
        _check_keys(image, needed=_SIDES, known=_KEYS)
    return tuple([Picture(**image) for image in images])


def _check_keys(entry: object, *, needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not isinstance(entry, Mapping):
        raise TraceError(f"{entry!r:.60}: expected an object with {', '.join(known)}.")
    for name in entry:
        if name not in known:
            raise TraceError(f"unknown key {name!r:.60}: known are {', '.join(known)}.")
    for name in needed:
        if name not in entry:
            raise TraceError(f"{name} is missing.")


def _root_up(dividend: int, divisor: int) -> int:
    """The square root of a quotient above 0, rounded up; exact."""
    return math.isqrt(-(-dividend // divisor) - 1) + 1
