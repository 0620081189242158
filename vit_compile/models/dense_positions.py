"""Learned positions of dense towers at any grid of patches, as metadata without weights.

Towers interpolate their table of positions for images of other sizes than they were trained on. That is linear in the table
and separable, so a grid needs no more than the weights that each row and each column of patches gives to the table's rows and
columns. They are read off the tower's own interpolation; the table itself is looked up in the graph, so that it may change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vit_compile.errors import GridError, ModelError

Interpolate = Callable[[torch.Tensor, int, int], torch.Tensor]
"""A tower's own: a table float32 [rows * columns, C], height and width in patches -> [height * width, C]; on the CPU."""

BICUBIC_TAPS = 4
MOST_TAPS = 12
"""Entries along one axis that a patch may mix. With antialiasing they are 4 times the table's side over the grid's, and the
square of them costs time at every patch."""
_NOTHING = 1e-7
_AGREES = 1e-4


class PositionTaps:
    """Which entries of a table of positions the patches of a grid mix.

    Args:
        interpolate: the tower's own interpolation.
        sides: rows and columns of the table.

    Raises:
        ModelError: the interpolation is not separable.
    """

    def __init__(self, interpolate: Interpolate, sides: tuple[int, int]) -> None:
        self._interpolate, self.sides = interpolate, sides
        rows, columns = sides
        # What varies along one axis only shows the weights of that axis.
        self._basis = torch.cat([_eye(rows).repeat_interleave(columns, dim=0), _eye(columns).repeat(rows, 1)], dim=1)
        self._probe = torch.randn(rows * columns, 2, generator=torch.Generator().manual_seed(0), device="cpu")
        needed = {side: self._needed(side) for side in self._typical()}
        if max(needed.values()) > BICUBIC_TAPS:  # antialiased: the fewer patches, the more entries
            needed |= {side: self._needed(side) for side in range(1, max(sides))}
        self.width = min(MOST_TAPS, max(needed.values()))
        """Entries that are kept for each patch and axis."""
        self.least = 1 + max((side for side, taps in needed.items() if taps > self.width), default=0)
        """Patches along each axis below which `width` entries are not enough."""

    def _typical(self) -> set[int]:
        """Fewer patches than the table has, as many, and more."""
        most = max(self.sides)
        return {1, 2, most // 3 + 1, most // 2 + 1, max(1, most - 1), most, most + 1, 2 * most + 1}

    def _needed(self, side: int) -> int:
        return max(map(_taps_of, self._weights(side, side)))

    def _weights(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[height, rows of the table] and [width, columns of the table]."""
        rows, _ = self.sides
        mixed = self._interpolate(self._basis, height, width).reshape(height, width, -1)
        return mixed[:, 0, :rows], mixed[0, :, rows:]

    def __call__(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For every patch of a grid, row by row: the first entry along each axis, and the weights from there on.

        Returns:
            int32 [height * width, 2]; float32 [height * width, 2 * self.width], of the rows first.

        Raises:
            GridError: the grid mixes more entries than are kept.
            ModelError: what the taps give is not what the tower's interpolation gives.
        """
        weights = self._weights(height, width)
        if max(map(_taps_of, weights)) > self.width:
            raise GridError(
                f"{height} x {width} patches are few beside the {self.sides[0]} x {self.sides[1]} positions of the model: its "
                f"antialiased interpolation would mix over {self.width} of them along a side."
            )
        (top, down), (left, along) = (_window(of_axis, self.width) for of_axis in weights)
        first = torch.stack([top.repeat_interleave(width), left.repeat(height)], dim=1)
        taps = torch.cat([down.repeat_interleave(width, dim=0), along.repeat(height, 1)], dim=1)
        found, own = mixed_positions(self._probe, first, taps, self.sides), self._interpolate(self._probe, height, width)
        if not float((found - own).abs().max()) <= _AGREES:
            raise ModelError(f"positions at {height} x {width} patches are not a separable interpolation of the model's table.")
        return first, taps


def mixed_positions(
    table: torch.Tensor, first: torch.Tensor, taps: torch.Tensor, sides: tuple[int, int], *, before: int = 0
) -> torch.Tensor:
    """The positions of patches, float32 [T,E].

    Args:
        table: [before + rows * columns, E].
        first, taps: see `PositionTaps`, for T patches.
        sides: rows and columns of the table.
        before: entries before those of patches (class token).
    """
    width = taps.shape[1] // 2
    step = torch.arange(width, device=first.device, dtype=first.dtype)
    down, along = taps.split(width, dim=1)
    rows, columns = first[:, :1] + step, first[:, 1:] + step
    entries = (rows.clamp(max=sides[0] - 1)[:, :, None] * sides[1] + columns.clamp(max=sides[1] - 1)[:, None, :]).flatten(1)
    weights = (down[:, :, None] * along[:, None, :]).flatten(1)
    return F.embedding_bag(entries + before, table.float(), per_sample_weights=weights, mode="sum")


def _eye(side: int) -> torch.Tensor:
    return torch.eye(side, device="cpu")


def _taps_of(weights: torch.Tensor) -> int:
    """Entries from the first to the last that any row of [n, entries] gives weight to."""
    first, last = _span(weights)
    return int((last - first).max()) + 1


def _span(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    used = (weights.abs() > _NOTHING).to(torch.int32)
    return used.argmax(dim=1), weights.shape[1] - 1 - used.flip(1).argmax(dim=1)


def _window(weights: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's first entry with weight, and `width` weights from there on; zeros past the end."""
    first, _ = _span(weights)
    kept = F.pad(weights, (0, width)).gather(1, first[:, None] + torch.arange(width, device="cpu"))
    return first.to(torch.int32), kept.contiguous()
