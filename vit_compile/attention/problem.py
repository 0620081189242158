"""`Problem`: what the speed of an attention kernel depends on, as a value that can be a key, and written to a file."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

VARLEN, DENSE = "varlen", "dense"
WIDE = "wide"
PARTLY_FULL = 0.85
SHORT = 256
"""Rows of an image of 256 x 256 pixels in patches of 16, or of 224 x 224 in patches of 14. Segments are rarely shorter on
average, so that a kernel that is fast with still shorter ones is no better for it."""
LAYER, ATTENTION = 24, 4
"""Operations of a layer's projections and MLP (of four times the width) for each row and square of the width, and of attention
for each column of a pair of rows."""
SPEED_OF_PRODUCTS = 1.5
"""Of matrix products beside attention, in operations per second: 620 and 440 TFLOP/s on an H200 (4096 rows, 16 heads of 72)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape of one attention call."""

    kind: str
    """"varlen": packed rows with boundaries; "dense": a batch of equal lengths."""

    dtype: str
    """Of q, k and v, such as "bfloat16"."""

    shape: tuple[int, ...]
    """Of q: [rows, heads, head dim], or [batch, heads, rows, head dim]."""

    segments: int = 0
    """varlen: segments that the boundaries have room for."""

    max_seqlen: int = 0
    """varlen: the bound on the longest segment; dense: rows of k and v."""

    variant: str = ""
    """dense: "causal" or nothing; varlen: "wide", if q and k come with the columns of `one_segment`, or nothing."""

    @property
    def head_dim(self) -> int:
        """Columns of one head."""
        return self.shape[-1]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Problem:
        """From what `as_dict` made."""
        return cls(**{**given, "shape": tuple(given["shape"])})


def varlen_problem(q: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *, wide: bool = False) -> Problem:
    """Of a call of `varlen_attention`, or of its wide form, with the shape of q without the further columns."""
    return Problem(VARLEN, _name(q.dtype), tuple(q.shape), cu_seqlens.shape[0] - 1, max_seqlen, WIDE if wide else "")


def dense_problem(q: torch.Tensor, k: torch.Tensor, *, causal: bool) -> Problem:
    """Of a call of `scaled_dot_product_attention` without a mask."""
    return Problem(DENSE, _name(q.dtype), tuple(q.shape), 0, k.shape[-2], "causal" if causal else "")


def layouts(problem: Problem) -> tuple[list[int], ...]:
    """Boundaries to time a varlen problem with: as few segments as its bound allows, as many of `SHORT` rows as it has room for,
    and a number between (the geometric mean).

    With room for one: a full one, and one of `PARTLY_FULL` of the rows, since some kernels compute the padding and some do not.
    Which of these a replay meets is not known at capture; a kernel is chosen by all.
    """
    rows, room = problem.shape[0], max(1, problem.segments)
    if room == 1:
        full = min(rows, problem.max_seqlen)
        return [0, full], [0, max(1, int(full * PARTLY_FULL))]
    fewest = min(room, max(1, math.ceil(rows / max(1, problem.max_seqlen))))
    most = max(fewest, min(room, rows // SHORT))
    counts = (fewest, max(fewest, round(math.sqrt(fewest * most))), most)
    return tuple(_even(min(rows, parts * problem.max_seqlen), parts, room) for parts in dict.fromkeys(counts))


def rest_of_layer(problem: Problem) -> float:
    """What a layer takes beside a varlen attention, by operations: a multiple of the time of its longest layout.

    One long segment takes most of a layer's time, and many short ones hardly any: where a kernel is a fifth slower with the one
    and a fifth faster with the others, it loses more than it gains.
    """
    width = math.prod(problem.shape[1:])
    squares = sum((end - start) ** 2 for start, end in itertools.pairwise(layouts(problem)[0]))
    return LAYER * width * problem.shape[0] / (ATTENTION * max(squares, 1) * SPEED_OF_PRODUCTS)


def _even(rows: int, parts: int, room: int) -> list[int]:
    """`room` + 1 boundaries of `parts` segments of nearly equal length, the rest empty."""
    ends = [rows * part // parts for part in range(parts + 1)]
    return ends + [rows] * (room - parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
