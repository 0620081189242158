"""Requests of pictures as the tensors that towers take, on the device.

Pixels are cut from one block of random numbers, at another place for each request, and copied: compilers look at where a
tensor begins in its storage, and a caller's tensors begin at 0. A request is made when it is its turn, so memory stays bounded.
Shapes: T patches, K values of a patch, n images of one size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vit_compile.planning.traffic import Request
from vit_compile.planning.units import Grid
from vit_compile.tools.bench.towers import Tower

_STEP = 128
"""Values between the beginnings of requests in the block."""
_PLACES = 997
"""Different beginnings."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Images of one size."""

    positions: tuple[int, ...]
    """Of each among the items."""

    pixels: torch.Tensor
    """[n,3,H,W]"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One request on the device. Items are its images, then its clips; a dense tower has an item for each frame."""

    grids: tuple[Grid, ...]
    """Of the items, on the host."""

    clips: int
    """How many of the last items are clips."""

    tokens: tuple[int, ...]
    """Output tokens of the items."""

    image_rows: torch.Tensor | None = None
    """[T,K] of the images, for packed towers; None without images."""

    clip_rows: torch.Tensor | None = None
    """[T,K] of the clips."""

    batches: tuple[Batch, ...] = ()
    """For dense towers, one for each distinct size."""

    @property
    def image_grids(self) -> list[Grid]:
        """Of the images."""
        return list(self.grids[: len(self.grids) - self.clips])

    @property
    def clip_grids(self) -> list[Grid]:
        """Of the clips."""
        return list(self.grids[len(self.grids) - self.clips :])

    @property
    def rows(self) -> torch.Tensor:
        """[T,K] of all items, for packed towers."""
        parts = [rows for rows in (self.image_rows, self.clip_rows) if rows is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def images(self) -> list[torch.Tensor]:
        """[3,H,W] of each item, for dense towers."""
        found = {at: image for batch in self.batches for at, image in zip(batch.positions, batch.pixels, strict=True)}
        return [found[at] for at in range(len(found))]


def patches(grid: Grid) -> int:
    """Of an item."""
    t, h, w = grid
    return t * h * w


def item_grids(request: Request, tower: Tower) -> tuple[tuple[Grid, ...], int]:
    """Grids of the items of a request, and how many of the last ones are clips."""
    images = [tower.geometry.grid(picture) for picture in request if picture.frames == 1]
    clips = [tower.geometry.grid(picture) for picture in request if picture.frames > 1]
    if tower.kind == "packed":
        return (*images, *clips), len(clips)
    frames = [(1, h, w) for t, h, w in clips for _ in range(t)]
    return (*images, *frames), 0


class Pixels:
    """Makes `Inputs`. All ranks of a group make the same.

    Args:
        tower: whose inputs are made.
        requests: every request that will be asked for.
    """

    def __init__(self, tower: Tower, requests: Iterable[Request]) -> None:
        self._tower = tower
        largest = max(self.values(request) for request in set(requests))
        generator = torch.Generator(tower.device).manual_seed(1)
        size = largest + _STEP * _PLACES
        self._block = torch.empty(size, device=tower.device, dtype=tower.dtype).normal_(generator=generator)

    def values(self, request: Request) -> int:
        """Numbers in the pixels of a request."""
        grids, _ = item_grids(request, self._tower)
        channels = 3 * self._tower.geometry.patch_size**2
        return sum(map(patches, grids)) * (self._tower.row_width if self._tower.kind == "packed" else channels)

    def nbytes(self, request: Request) -> int:
        """Bytes that its inputs take on the device."""
        return self.values(request) * self._block.element_size()

    def inputs(self, request: Request, number: int) -> Inputs:
        """A request; those of other numbers have other pixels."""
        tower = self._tower
        grids, clips = item_grids(request, tower)
        values = self._block[_STEP * (number * 271 % _PLACES) :]
        tokens = tuple(tower.tokens(grid) for grid in grids)
        if tower.kind == "dense":
            return Inputs(grids, 0, tokens, batches=tuple(_batches(grids, values, tower.geometry.patch_size)))
        images, moving = (sum(map(patches, part)) for part in (grids[: len(grids) - clips], grids[len(grids) - clips :]))
        rows = values[: (images + moving) * tower.row_width].view(-1, tower.row_width)
        still, clip = (part.clone() if len(part) else None for part in (rows[:images], rows[images:]))
        return Inputs(grids, clips, tokens, image_rows=still, clip_rows=clip)


def _batches(grids: tuple[Grid, ...], values: torch.Tensor, side: int) -> Iterable[Batch]:
    alike: dict[Grid, list[int]] = {}
    for position, grid in enumerate(grids):
        alike.setdefault(grid, []).append(position)
    start = 0
    for (_, h, w), positions in alike.items():
        shape = (len(positions), 3, h * side, w * side)
        count = torch.Size(shape).numel()
        yield Batch(tuple(positions), values[start : start + count].view(shape).clone())
        start += count
