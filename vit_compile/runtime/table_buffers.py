"""Static buffers of one graph in the table form: allocated, filled with a batch, padded.

Data (pixels) goes straight from the request into buffers that all graphs of a path share, since a smaller graph reads the
front of a larger one's. Metadata is laid out in one block of bytes per graph, built on the host with its padding and sent in
one copy; blocks are kept by the batch's layout, so that a layout that comes again costs nothing but the copy, and one that
is there already costs nothing at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vit_compile.backend.cuda import part_of
from vit_compile.backend.padding import PaddedBuffer
from vit_compile.backend.roles import Role
from vit_compile.errors import ProtocolError
from vit_compile.runtime.inputs import same_device
from vit_compile.runtime.table import Buffer, TablePath

_ALIGNMENT = 256
CACHED_LAYOUT_BYTES = 64 << 20
"""Host memory for metadata blocks of one encoder."""
CACHED_LAYOUTS = 4096
"""Blocks that are kept at most, however small."""

Metadata = Callable[[Hashable, str], Mapping[str, torch.Tensor]]
Slices = Mapping[str, Sequence[torch.Tensor]]
"""For each data buffer the rows of a batch, as slices of the request's tensors."""


@dataclass(frozen=True, slots=True)
class _Field:
    """Where a metadata buffer lies in its graph's block."""

    name: str
    buffer: Buffer
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def padded(self, block: torch.Tensor) -> PaddedBuffer:
        tensor = part_of(block, self.offset, self.shape, self.dtype)
        return PaddedBuffer(self.name, tensor, self.buffer.role, 0, self.buffer.pad)


class Layouts:
    """Metadata blocks on the host by graph and layout, least recently used out first. Never written after they are made."""

    def __init__(self, capacity_bytes: int = CACHED_LAYOUT_BYTES) -> None:
        self._capacity, self._nbytes = capacity_bytes, 0
        self._blocks: OrderedDict[Hashable, torch.Tensor] = OrderedDict()

    def get(self, key: Hashable) -> torch.Tensor | None:
        """The block, or None."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._nbytes = 0

    def put(self, key: Hashable, block: torch.Tensor) -> None:
        """Keep a block, if it is not larger than everything that may be kept."""
        if block.nbytes > self._capacity:
            return
        self._blocks[key] = block
        self._nbytes += block.nbytes
        while self._nbytes > self._capacity or len(self._blocks) > CACHED_LAYOUTS:
            self._nbytes -= self._blocks.popitem(last=False)[1].nbytes


@dataclass(slots=True)
class SharedRows:
    """Data buffers of one path for its largest graph; the graphs of the path read their front."""

    buffers: dict[str, PaddedBuffer] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.tensor.nbytes for buffer in self.buffers.values())


class GraphBuffers:
    """All inputs of one graph. Owned by the graph; every method runs under the manager's lock."""

    def __init__(
        self,
        path: TablePath,
        data: Sequence[str],
        *,
        tokens: int,
        segments: int,
        device: torch.device,
        dtype: torch.dtype,
        shared: SharedRows | None,
        layouts: Layouts,
    ) -> None:
        self.rows, self.segments, self.device = path.rows(tokens), segments, device
        self._layouts, self._name = layouts, object()
        with torch.inference_mode(False), torch.no_grad():
            self.own_rows = shared is None or not _fits(shared, data, self.rows, device, dtype)
            self.shared = _allocate_rows(path, data, self.rows, device, dtype) if self.own_rows or shared is None else shared
            self._fields, block_bytes = self._lay_out(path, data, dtype)
            self.block = torch.zeros(block_bytes, dtype=torch.uint8, device=device)
            self.metadata = {f.name: f.padded(self.block) for f in self._fields}
            for buffer in self.metadata.values():
                buffer.pad_from(0)
        self.held: Hashable = None
        """The layout whose metadata is on the device."""
        self._path, self._bounds = path, _bounds(path, self.rows)

    def _lay_out(self, path: TablePath, data: Sequence[str], dtype: torch.dtype) -> tuple[list[_Field], int]:
        fields, offset = [], 0
        for name, buffer in path.buffers.items():
            if name not in data:
                shape = (self._entries(buffer), *buffer.shape)
                found = _Field(name, buffer, shape, buffer.dtype or dtype, offset)
                fields.append(found)
                nbytes = torch.Size(shape).numel() * found.dtype.itemsize
                offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return fields, offset

    def _entries(self, buffer: Buffer) -> int:
        if buffer.role in (Role.ROWS, Role.INDEX):
            return self.rows // buffer.rows_per_entry
        segments = self.segments if buffer.capacity is None else buffer.capacity(self.rows, self.segments)
        # One neutral per-segment entry more than there are segments: models that look segments up by row find the rows past
        # the last boundary in "the segment after the last".
        return segments + 1

    @property
    def nbytes(self) -> int:
        """Bytes that this graph does not share."""
        return self.block.nbytes + (self.shared.nbytes if self.own_rows else 0)

    def values(self) -> dict[str, Any]:
        """What the forward gets: buffers at the graph's size, and bounds."""
        rows = {name: buffer.tensor[: self.rows] for name, buffer in self.shared.buffers.items()}
        return {**rows, **{name: buffer.tensor for name, buffer in self.metadata.items()}, **self._bounds}

    def fill(self, keys: tuple[Hashable, ...], slices: Slices, metadata: Metadata, path: str) -> bool:
        """A batch into the buffers; False where its segments do not fit."""
        if self._fields and self.held != keys:
            block = self._block(keys, metadata, path)
            if block is None:
                return False
            self.held = None
            if self.device.type == "cuda":
                # Fresh pinned memory for each copy: torch's allocator hands it out again once the copy is done, not before.
                block = torch.empty(block.shape, dtype=torch.uint8, device="cpu", pin_memory=True).copy_(block)
            self.block.copy_(block, non_blocking=True)
            self.held = keys
        for name, parts in slices.items():
            _fill_rows(self.shared.buffers[name], parts)
        return True

    def _block(self, keys: tuple[Hashable, ...], metadata: Metadata, path: str) -> torch.Tensor | None:
        """The metadata of a batch with its padding, in host memory."""
        held = self._layouts.get((self._name, keys))
        if held is not None:
            return held
        block = torch.empty(self.block.shape, dtype=torch.uint8, device="cpu")
        items = [metadata(key, path) for key in keys]
        for found in self._fields:
            if not _write(found, found.padded(block), [item[found.name] for item in items]):
                return None
        self._layouts.put((self._name, keys), block)
        return block

    def forget_contents(self) -> None:
        """Nothing is known of what the buffers hold: behind the data may be the garbage of a trial."""
        self.held = None
        for buffer in (*self.shared.buffers.values(), *self.metadata.values()):
            buffer.dirty = -1

    def fill_for_trial(self, real: int, segments: int, generator: torch.Generator) -> None:
        """Made-up data: `real` rows of random numbers in so many equal segments, neutral metadata, clean padding."""
        self.forget_contents()
        for buffer in self.shared.buffers.values():
            shape = (real, *buffer.tensor.shape[1:])
            buffer.fill(random_values(shape, buffer.tensor.dtype, generator).to(self.device))
        for found in self._fields:
            buffer = self.metadata[found.name]
            if found.buffer.role is Role.BOUNDARIES:
                buffer.fill(_even_boundaries(real, segments, found).to(self.device))
                continue
            count = real // found.buffer.rows_per_entry
            if found.buffer.role is Role.PER_SEGMENT:
                count = min(segments, buffer.entries)
            if buffer.identity is not None:
                buffer.fill(buffer.identity[:count])
            elif found.dtype.is_floating_point:
                buffer.fill(random_values((count, *found.shape[1:]), found.dtype, generator).to(self.device))
            else:
                buffer.fill(torch.zeros((count, *found.shape[1:]), dtype=found.dtype, device=self.device))

    def unpadded_trial(self) -> dict[str, Any]:
        """Copies of what `fill_for_trial` put in, without any padding, and the bounds that belong to it."""
        filled = {**self.shared.buffers, **self.metadata}
        real = max(buffer.dirty for buffer in self.shared.buffers.values())
        return {name: buffer.tensor[: buffer.dirty].clone() for name, buffer in filled.items()} | _bounds(self._path, real)

    def poison(self, kind: str, generator: torch.Generator) -> None:
        """Garbage into the padding of data buffers. That of metadata is always clean in real calls."""
        for buffer in self.shared.buffers.values():
            buffer.poison(kind, generator)

    def clean(self) -> None:
        """The padding of all buffers again, after `poison`."""
        for buffer in (*self.shared.buffers.values(), *self.metadata.values()):
            buffer.clean()


def exact_values(
    path: TablePath,
    keys: tuple[Hashable, ...],
    slices: Slices,
    metadata: Metadata,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What the forward gets for a batch without any padding: new tensors, for eager runs and for replay values."""
    values: dict[str, Any] = {}
    for data, parts in slices.items():
        rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        values[data] = rows.to(device=device, dtype=path.buffers[data].dtype or dtype)
    items = [metadata(key, name) for key in keys]
    for field_name, buffer in path.buffers.items():
        if field_name not in slices:
            parts = _shifted(buffer, [item[field_name] for item in items])
            values[field_name] = torch.cat(parts).to(device=device, dtype=buffer.dtype or dtype)
    rows_total = max((sum(part.shape[0] for part in parts) for parts in slices.values()), default=0)
    return values | _bounds(path, rows_total)


def _bounds(path: TablePath, rows: int) -> dict[str, int]:
    found = {}
    for buffer in path.buffers.values():
        if buffer.bound is not None:
            found[buffer.bound] = rows if buffer.longest is None else min(buffer.longest, max(rows, 1))
    return found


def _fits(shared: SharedRows, data: Sequence[str], rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    return all(
        name in shared.buffers
        and shared.buffers[name].entries >= rows
        and same_device(shared.buffers[name].tensor.device, device)
        for name in data
    )


def _allocate_rows(path: TablePath, data: Sequence[str], rows: int, device: torch.device, dtype: torch.dtype) -> SharedRows:
    shared = SharedRows()
    for name in data:
        buffer = path.buffers[name]
        if buffer.role is not Role.ROWS or buffer.rows_per_entry != 1:
            raise ProtocolError(f"{name} holds data of the request, so it must be a ROWS buffer with an entry per row.")
        tensor = torch.zeros((rows, *buffer.shape), dtype=buffer.dtype or dtype, device=device)
        padded = shared.buffers[name] = PaddedBuffer(name, tensor, Role.ROWS, 0, buffer.pad)
        padded.pad_from(0)
    return shared


def _fill_rows(buffer: PaddedBuffer, parts: Sequence[torch.Tensor]) -> None:
    total = sum(part.shape[0] for part in parts)
    front = buffer.tensor[:total]
    alike = all(part.dtype == front.dtype and part.device == front.device for part in parts)
    if alike and len(parts) > 1:
        torch.cat(list(parts), out=front)
    else:
        offset = 0
        for part in parts:
            # From pinned memory an asynchronous copy would still be reading when the caller writes there again.
            length = part.shape[0]
            front[offset : offset + length].copy_(part, non_blocking=not part.is_pinned() if part.is_cpu else True)
            offset += length
    buffer.pad_from(total)


def _shifted(buffer: Buffer, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Values of the items one after another: boundaries and indices count on from the items before."""
    if buffer.role not in (Role.BOUNDARIES, Role.INDEX):
        return list(parts)
    moved, base = [], 0
    for number, part in enumerate(parts):
        values = part[1:] if buffer.role is Role.BOUNDARIES and number else part
        moved.append(values + base if base else values)
        base += int(part[-1]) if buffer.role is Role.BOUNDARIES else len(part)
    return moved


def _write(found: _Field, target: PaddedBuffer, parts: Sequence[torch.Tensor]) -> bool:
    moved = _shifted(found.buffer, parts)
    total = sum(part.shape[0] for part in moved)
    if total > target.entries:
        return False
    front = target.tensor[:total]
    if all(part.dtype == front.dtype for part in moved):
        torch.cat(moved, out=front)
    else:
        front.copy_(torch.cat(moved))
    target.pad_from(total)
    return True


def _even_boundaries(real: int, segments: int, found: _Field) -> torch.Tensor:
    """Offsets of equal segments, none longer than allowed, as many as there is room for."""
    longest = found.buffer.longest
    if longest is not None:
        segments = max(segments, -(-real // longest))
    segments = min(segments, found.shape[0] - 1)
    return torch.linspace(0, real, segments + 1).round().to(found.dtype)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Seeded made-up data on the generator's device: normal numbers, or zeros and ones."""
    device = generator.device
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, device=device, dtype=wide).to(dtype)
    return torch.randint(0, 2, shape, generator=generator, device=device).to(dtype)
