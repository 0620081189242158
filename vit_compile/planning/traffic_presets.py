"""How the requests of each traffic preset are drawn: see `traffic`, where they are described and made.

What a preset leaves open is decided here: how many pictures a request has, and which of them go together.
"""

from __future__ import annotations

import functools
import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate

from vit_compile.errors import TraceError
from vit_compile.planning.traffic import Geometry, Picture, Request

MAX_ASPECT = 4
"""Longer side / shorter side of a chat image, at most."""
CATALOGUE_SIDES = (62, 32, 50, 38, 76, 94, 64, 124, 68, 100, 16)
"""Patches on a side, the most common first."""
CATALOGUE_NEIGHBOURS = 0.25
"""Share of pictures whose side is one block more or less."""
DOCUMENT_WIDTHS, DOCUMENT_HEIGHTS = (590, 5367), (290, 7184)
FIXED_SIDES = (336, 384)
VIDEO_FRAMES, VIDEO_SIDES = (4, 64), (224, 480)
LEGAL_ASPECT = 200
"""Processors refuse pictures that are more than this many times as long as they are wide."""

_SEVERAL = 4
"""Most pictures of a request where a preset says nothing."""
_FIXED_PICTURES = 8


class Dice:
    """Random numbers. Only `Random.random` is promised to be the same in every version of Python, so all is made of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, weights_up_to: list[float]) -> int:
        """A position, with the weights whose running totals these are; one without weight is never picked."""
        return bisect_right(weights_up_to, self.random() * weights_up_to[-1])

    def log_integer(self, low: int, high: int) -> int:
        """From `low` to `high`, its logarithm being uniform."""
        power: float = (high / low) ** self.random()
        return round(low * power)


@dataclass(frozen=True, slots=True)
class Histograms:
    """What is known of production chat traffic, as running totals of weights."""

    tokens: tuple[tuple[int, int], ...]
    """Buckets of an image's output tokens: first and last."""
    tokens_up_to: list[float]
    images: tuple[int, ...]
    """Images of a request."""
    images_up_to: list[float]


@functools.cache
def chat_histograms() -> Histograms:
    """The histograms of `traces/servegen_chat.json`, without requests that have no image."""
    file = resources.files("vit_compile.planning") / "traces" / "servegen_chat.json"
    trace = json.loads(file.read_text(encoding="utf-8"))
    edges = [edge for edge, _ in trace["image_tokens_upper_edges_pdf"]]
    firsts = [1, *[edge + 1 for edge in edges[:-1]]]
    images = {int(count): weight for count, weight in trace["images_per_request_pdf"].items() if int(count)}
    return Histograms(
        tokens=tuple(zip(firsts, edges, strict=True)),
        tokens_up_to=_running(weight for _, weight in trace["image_tokens_upper_edges_pdf"]),
        images=tuple(images),
        images_up_to=_running(images.values()),
    )


def shape_of(tokens: int, aspect: float, bucket: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of blocks: as many as `tokens` as nearly as may be, and of such shapes the one nearest to the aspect.

    Args:
        tokens: Blocks that are wanted, 1 or more.
        aspect: Height / width that is wanted, from 1 / `MAX_ASPECT` to `MAX_ASPECT`; up to a quarter is given up for tokens.
        bucket: First and last number of blocks of the histogram's bucket, which is left only where no shape is in it.
    """
    wanted = math.sqrt(tokens * aspect)
    shapes = [(rows, max(1, round(tokens / rows))) for rows in range(max(1, int(wanted * 0.8)), int(wanted * 1.25) + 2)]
    # One block too long is allowed: sides in pixels may be anywhere within half a block.
    fitting = [shape for shape in shapes if max(shape) <= MAX_ASPECT * min(shape) + 1]

    def distance(shape: tuple[int, int]) -> tuple[bool, int, float]:
        blocks = shape[0] * shape[1]
        return not bucket[0] <= blocks <= bucket[1], abs(blocks - tokens), abs(shape[0] - wanted)

    return min(fitting, key=distance)


def _chat(dice: Dice, geometry: Geometry) -> Request:
    histograms = chat_histograms()
    count = histograms.images[dice.pick(histograms.images_up_to)]
    return tuple([_chat_image(dice, geometry, histograms.tokens[dice.pick(histograms.tokens_up_to)]) for _ in range(count)])


def _chat_image(dice: Dice, geometry: Geometry, bucket: tuple[int, int]) -> Picture:
    blocks = dice.integer(*bucket) - geometry.extra_tokens
    within = bucket[0] - geometry.extra_tokens, bucket[1] - geometry.extra_tokens
    aspect = 1 + (MAX_ASPECT - 1) * dice.random()
    lying = dice.random() < 0.5
    reachable = min(max(blocks, geometry.min_tokens), geometry.max_tokens)
    return _picture(*shape_of(reachable, 1 / aspect if lying else aspect, within), geometry.block)


def _picture(rows: int, columns: int, block: int) -> Picture:
    """An image of so many blocks: whole ones, or as little off as the greatest aspect ratio asks for."""
    short, long = sorted((rows, columns))
    short_pixels, long_pixels = short * block, long * block
    if long > MAX_ASPECT * short:
        long_pixels = (2 * long - 1) * block // 2 + 1  # just above the half block from which it is rounded up
        short_pixels = -(-long_pixels // MAX_ASPECT)
    return Picture(short_pixels, long_pixels) if rows <= columns else Picture(long_pixels, short_pixels)


def _catalogue(dice: Dice, geometry: Geometry) -> Request:
    pictures = []
    for _ in range(dice.integer(1, _SEVERAL)):
        patches = CATALOGUE_SIDES[dice.pick(_zipf(len(CATALOGUE_SIDES)))]
        chance = dice.random()
        if chance < CATALOGUE_NEIGHBOURS:
            patches += geometry.merge_size if chance < CATALOGUE_NEIGHBOURS / 2 else -geometry.merge_size
        side = max(1, patches) * geometry.patch_size
        pictures.append(Picture(side, side))
    return tuple(pictures)


def _documents(dice: Dice, geometry: Geometry) -> Request:
    pages = dice.integer(1, _SEVERAL)
    return tuple(
        [Picture(width=dice.log_integer(*DOCUMENT_WIDTHS), height=dice.log_integer(*DOCUMENT_HEIGHTS)) for _ in range(pages)]
    )


def _fixed(dice: Dice, geometry: Geometry) -> Request:
    side = FIXED_SIDES[dice.integer(0, len(FIXED_SIDES) - 1)]
    return (Picture(side, side),) * dice.integer(1, _FIXED_PICTURES)


def _video(dice: Dice, geometry: Geometry) -> Request:
    height, width = dice.integer(*VIDEO_SIDES), dice.integer(*VIDEO_SIDES)
    group = geometry.temporal_patch_size
    fewest, most = VIDEO_FRAMES
    first = -(-fewest // group)
    return (Picture(height, width, frames=group * dice.integer(first, max(first, most // group))),)


def _adversarial(dice: Dice, geometry: Geometry) -> Request:
    columns_of, grids_up_to = _legal(geometry.min_tokens, geometry.max_tokens)
    pictures = []
    for _ in range(dice.integer(1, _SEVERAL)):
        at = dice.pick(grids_up_to)
        pictures.append(Picture((at + 1) * geometry.block, dice.integer(*columns_of[at]) * geometry.block))
    return tuple(pictures)


DRAWN_BY: Mapping[str, Callable[[Dice, Geometry], Request]] = {
    "chat": _chat,
    "catalogue": _catalogue,
    "documents": _documents,
    "fixed": _fixed,
    "video": _video,
    "adversarial": _adversarial,
}


@functools.cache
def _zipf(count: int) -> list[float]:
    return _running(1 / rank for rank in range(1, count + 1))


@functools.lru_cache(maxsize=8)
def _legal(fewest: int, most: int) -> tuple[list[tuple[int, int]], list[float]]:
    """For 1, 2, ... rows of blocks: the least and most columns, and how many grids there are with so many rows or fewer."""
    columns = [
        (max(-(-fewest // rows), -(-rows // LEGAL_ASPECT)), min(most // rows, rows * LEGAL_ASPECT)) for rows in range(1, most + 1)
    ]
    grids_up_to = _running(max(0, last - first + 1) for first, last in columns)
    if not grids_up_to[-1]:
        raise TraceError(f"no grid of {fewest} to {most} tokens has an aspect ratio of {LEGAL_ASPECT} or less: widen the limits.")
    return columns, grids_up_to


def _running(weights: Iterable[float]) -> list[float]:
    return [float(total) for total in accumulate(weights)]
