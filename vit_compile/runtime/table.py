"""The table form: what an adapter declares, instead of writing the encoder contract out.

A tower is a set of buffers by role, a key for each item, the sizes that belong to a key, metadata that depends on the key
alone, and a forward of fixed shape. `TableEncoder` turns that into the protocol; it allocates, fills, pads, slices and
caches. `docs/engines.md` has a complete example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from vit_compile.backend.roles import Role
from vit_compile.errors import ProtocolError
from vit_compile.planning import units
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.item_spec import DEFAULT_PATH

Capacity = Callable[[int, int], int]
"""`(rows, segments)` of a graph -> entries, or segments where it is about boundaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One input of the fixed-shape forward. Data comes from the request; all others are metadata of the items."""

    role: Role
    """ROWS: an entry per patch or tile, zero behind. INDEX: picks rows, identity behind; items are shifted by the rows before
    them. BOUNDARIES: [segments + 1] offsets in rows, the last repeated behind; items are shifted. PER_SEGMENT: an entry per
    segment, `pad` behind."""

    shape: tuple[int, ...] = ()
    """Of one entry."""

    dtype: torch.dtype | None = None
    """None: the encoder's."""

    rows_per_entry: int = 1
    """Rows behind one entry: 4 for an index of merge blocks of 2 x 2 patches."""

    pad: int = 0
    """What is behind the data."""

    capacity: Capacity | None = None
    """Room of a boundary or per-segment buffer, in segments. None: the segments of the graph."""

    bound: str | None = None
    """For boundaries: the name under which the forward gets an int that no segment exceeds (`max_seqlen`)."""

    longest: int | None = None
    """For boundaries: rows that no segment ever exceeds (a full window). None: a segment may fill the graph."""

    def __post_init__(self) -> None:
        if self.role is Role.FIXED:
            raise ProtocolError("a buffer is ROWS, INDEX, BOUNDARIES or PER_SEGMENT; constants belong into the forward.")
        if self.rows_per_entry < 1:
            raise ProtocolError(f"rows_per_entry={self.rows_per_entry}: expected a positive integer.")
        if self.role is not Role.BOUNDARIES and (self.bound or self.longest):
            raise ProtocolError("bound and longest are about boundaries.")
        if self.role in (Role.ROWS, Role.INDEX) and self.capacity is not None:
            raise ProtocolError("capacity is about boundaries and per-segment buffers; others have room for the graph's rows.")
        if self.role in (Role.BOUNDARIES, Role.INDEX) and self.shape:
            raise ProtocolError(f"shape={self.shape}: boundaries and indices are single integers.")
        if self.role in (Role.BOUNDARIES, Role.INDEX) and self.pad:
            raise ProtocolError("boundaries repeat their last offset and an index goes on as identity: they take no pad.")
        whole = self.dtype is not None and not (self.dtype.is_floating_point or self.dtype.is_complex)
        if self.role in (Role.BOUNDARIES, Role.INDEX) and not whole:
            raise ProtocolError(f"dtype={self.dtype}: boundaries and indices are integers, torch.int32 or torch.int64.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePath:
    """One path of a tower: its buffers, and how output tokens become rows."""

    buffers: Mapping[str, Buffer]
    """By the name under which the forward gets them."""

    spatial_merge_size: int = 1
    """Packed towers: a token is this many patches squared, and a row is a patch."""

    tokens_per_row: int = 1
    """Tiled towers: output tokens of one tile, and a row is a tile."""

    min_token_budget: int | None = None
    """See `EncoderPathConfig`."""

    allow_zero_tokens: bool = False
    """See `EncoderPathConfig`."""

    def rows(self, tokens: int) -> int:
        """Rows of a graph for a budget of output tokens; whole tiles, rounded down."""
        return units.patches_from_tokens(tokens, spatial_merge_size=self.spatial_merge_size) // self.tokens_per_row


@dataclass(frozen=True, kw_only=True, slots=True)
class Modality:
    """Where a modality's inputs are in a request."""

    data: Mapping[str, str]
    """Buffer -> input: tensors whose rows are copied into the buffer, items one after another."""

    per_item: tuple[str, ...] = ()
    """Inputs with one entry for each item: grids, tile counts."""

    @property
    def names(self) -> tuple[str, ...]:
        """All inputs."""
        return (*self.data.values(), *self.per_item)


@dataclass(frozen=True, slots=True)
class ItemSize:
    """Sizes that belong to an item's key."""

    rows: int | Mapping[str, int]
    """Rows of the data, by path where there are several."""

    tokens: int | Mapping[str, int]
    """Output tokens, by path where there are several."""

    frames: int = 1
    """Attention segments of the first boundary buffer."""

    kind: Hashable = None
    """See `EncoderItemSpec.kind`."""


@dataclass(kw_only=True, eq=False)
class EncoderTable:
    """Base class of adapters: set the fields, override the methods below.

    Modules among the attributes (`self.tower = tower`) are the ones whose weights are watched.
    """

    modalities: Mapping[str, Modality]
    """By name, such as "image" and "video"; items come back in this order of modalities."""

    paths: Mapping[str, TablePath]
    """One, or several for towers that are run twice (thumbnail and tiles)."""

    out_hidden_size: int
    """Width of the features."""

    token_range: tuple[int, int]
    """(smallest, largest) useful budget in output tokens."""

    max_frames_per_video: int = 1
    """See `EncoderCudaGraphConfig`."""

    segment_capacities: Sequence[int] = field(default=SEGMENT_CAPACITIES)
    """Numbers of segments for which tighter graphs are captured, beside the largest number that a batch may have. A loose
    number of segments costs time in FlashAttention even where they are empty. Used where a path has boundaries."""

    refusal: str | None = None
    """See `EncoderCudaGraphConfig`."""

    new_metadata: ClassVar[bool] = False
    """True: `item_metadata` makes tensors that nobody else holds or writes to, so that no copies of them are kept."""

    def prepare_request(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request as `modalities` describe it, from what the model's processor makes, where those differ (padded images for
        a packed tower). Called first, once per request; may run on the device, and raises what is wrong with the inputs."""
        return inputs

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """A key for each item, from the inputs of one modality: all that sizes and metadata depend on. Called per request.

        Raises what is wrong with the sizes; `host_grids` reads and checks grids of any type.
        """
        raise NotImplementedError

    def item_size(self, key: Any) -> ItemSize:
        """Sizes of an item. Cached by key."""
        raise NotImplementedError

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """Values of every buffer that is not data, for one item alone, on the CPU. Cached by key.

        Boundaries begin with 0 and end with the item's rows; indices count from the item's first entry.
        """
        return {}

    def example_key(self, tokens: int) -> Hashable | None:
        """The key of an item that has at most so many output tokens on every path, and at least one somewhere.

        With it graphs are tried at capture on real metadata, with three items of two sizes where they fit, else with two or one,
        each compared with itself alone. None: made-up metadata is used (zeros), which shows less.
        """
        return None

    def example_key_on(self, path: str, tokens: int) -> Hashable | None:
        """The same for one path, where items of different paths are of different kinds."""
        return self.example_key(tokens)

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """Features [tokens, out_hidden_size] from buffers and bounds by name. Fixed shapes in, fixed shape out, no host reads."""
        raise NotImplementedError

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """One item's features from its tokens on each path (None: it has none there); may return a view."""
        (output,) = outputs.values()
        assert output is not None, "an item of the only path has tokens"
        return output


def single_path(**kwargs: Any) -> dict[str, TablePath]:
    """`paths` of a tower with one path: `single_path(buffers={...}, spatial_merge_size=2)`."""
    return {DEFAULT_PATH: TablePath(**kwargs)}
