"""The demo's retrieval task: does a photo find its own flips and crops among everybody's?

Every photo gives four gallery entries: a horizontal flip, a centre crop, and two seeded random crops. A crop keeps the
photo's aspect ratio and is enlarged to the photo's size, so that the whole gallery runs on the photos' graphs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageOps

FLIPPED = "flipped"
NEIGHBOURS = 3
CENTRE_SHARE = 0.6
"""Sides of the centre crop, as a share of the photo's."""

RANDOM_SHARES = (0.45, 0.75)
"""Range of the random crops' sides, as a share of the photo's."""

_SEED = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One gallery picture."""

    source: str
    """Name of the photo that it was made from."""

    transform: str
    """How, in words for a caption."""

    image: Image.Image


@dataclass(frozen=True, slots=True)
class Match:
    """One of a photo's nearest neighbours."""

    entry: Entry
    similarity: float
    """Cosine of the two pooled features."""

    correct: bool
    """The entry was made from the query photo."""


@dataclass(frozen=True, slots=True)
class Query:
    """A photo and what it found, nearest first."""

    name: str
    image: Image.Image
    matches: tuple[Match, ...]


def gallery_entries(name: str, image: Image.Image) -> list[Entry]:
    """The four entries of one RGB photo; the same ones in every run."""
    generator = random.Random(f"{_SEED}/{name}")
    entries = [
        Entry(name, FLIPPED, ImageOps.mirror(image)),
        Entry(name, f"centre {CENTRE_SHARE:.0%}", _crop(image, CENTRE_SHARE, 0.5, 0.5)),
    ]
    for _ in range(2):
        share = generator.uniform(*RANDOM_SHARES)
        entries.append(Entry(name, f"crop {share:.0%}", _crop(image, share, generator.random(), generator.random())))
    return entries


def retrieve(
    photos: Sequence[tuple[str, Image.Image]],
    photo_features: torch.Tensor,
    entries: Sequence[Entry],
    entry_features: torch.Tensor,
) -> list[Query]:
    """The nearest gallery entries of each photo by cosine similarity.

    Args:
        photos: name and picture of each query.
        photo_features: float32 [Q, D].
        entries: the gallery.
        entry_features: float32 [G, D].
    """
    queries_QD = torch.nn.functional.normalize(photo_features, dim=1)
    gallery_GD = torch.nn.functional.normalize(entry_features, dim=1)
    similarity_QG = queries_QD @ gallery_GD.T
    best, order = similarity_QG.topk(min(NEIGHBOURS, len(entries)), dim=1)
    return [
        Query(
            name,
            image,
            tuple(
                Match(entries[index], value, entries[index].source == name)
                for value, index in zip(best[row].tolist(), order[row].tolist(), strict=True)
            ),
        )
        for row, (name, image) in enumerate(photos)
    ]


def accuracy(queries: Sequence[Query]) -> dict[str, float]:
    """Shares of 0..1: the nearest neighbour is right; one of the three is; and of all three, how many are."""
    count = max(1, len(queries))
    found = [[match.correct for match in query.matches] for query in queries]
    return {
        "top1": sum(matches[0] for matches in found) / count,
        "top3": sum(any(matches) for matches in found) / count,
        "precision_at_3": sum(sum(matches) / len(matches) for matches in found) / count,
    }


def without_flips(entries: Sequence[Entry], entry_features: torch.Tensor) -> tuple[list[Entry], torch.Tensor]:
    """The gallery's crops alone, a harder task: a flip is easily a photo's nearest neighbour."""
    kept = [index for index, entry in enumerate(entries) if entry.transform != FLIPPED]
    return [entries[index] for index in kept], entry_features[kept]


def _crop(image: Image.Image, share: float, across: float, down: float) -> Image.Image:
    """A window of `share` of both sides, enlarged to the picture's size; `across` and `down` in 0..1 place it."""
    width, height = max(1, round(image.width * share)), max(1, round(image.height * share))
    left, top = round((image.width - width) * across), round((image.height - height) * down)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
