"""What belongs to an item's key in the table form: its sizes and its metadata, computed once and checked."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from vit_compile.backend.roles import Role
from vit_compile.errors import InputError, ProtocolError
from vit_compile.runtime.inputs import lossless
from vit_compile.runtime.item_spec import DEFAULT_PATH, EncoderItemSpec
from vit_compile.runtime.table import Buffer, EncoderTable

CACHED_KEYS = 4096
"""Keys for which sizes and metadata are kept."""
CACHED_METADATA_BYTES = 64 << 20
"""Host memory for metadata of single items of one encoder."""


class MetadataCache:
    """Metadata of items by key and path, checked once; bounded in number and bytes, least recently used out first."""

    def __init__(self, table: EncoderTable, data: Mapping[str, Sequence[str]], dtype: torch.dtype) -> None:
        self._table, self._data, self._dtype, self.nbytes = table, data, dtype, 0
        self._kept: OrderedDict[tuple[Hashable, str], dict[str, torch.Tensor]] = OrderedDict()

    def __call__(self, key: Hashable, path: str) -> Mapping[str, torch.Tensor]:
        """Metadata of an item on one path: CPU tensors by buffer name, not to be written to."""
        found = self._kept.get((key, path))
        if found is not None:
            self._kept.move_to_end((key, path))
            return found
        found = self._made(key, path)
        self._kept[key, path] = found
        self.nbytes += _nbytes(found)
        while self.nbytes > CACHED_METADATA_BYTES or len(self._kept) > CACHED_KEYS:
            self.nbytes -= _nbytes(self._kept.popitem(last=False)[1])
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.nbytes = 0

    def _made(self, key: Hashable, path: str) -> dict[str, torch.Tensor]:
        # Adapters, and what they call, make tensors without a device: on the host, whatever the caller's default is.
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            given = self._table.item_metadata(key, path)
        found: dict[str, torch.Tensor] = {}
        size = self._table.item_size(key)
        rows = _by_path(size.rows, self._table)[path]
        for name, buffer in self._table.paths[path].buffers.items():
            if name in self._data[path]:
                continue
            if name not in given:
                raise ProtocolError(f"item_metadata({key!r}, {path!r}) has no {name!r}.")
            _check_metadata(name, buffer, given[name], rows, size.frames)
            kept_as = buffer.dtype or self._dtype
            _check_range(name, given[name], kept_as)
            if given[name].is_floating_point() and not lossless(given[name].dtype, kept_as):
                raise ProtocolError(
                    f"metadata {name!r} is {given[name].dtype} and its buffer {kept_as}, which loses precision: declare the "
                    "buffer with a dtype, or cast the metadata."
                )
            # What an adapter does later with its own is its own affair.
            found[name] = given[name] if self._table.new_metadata else given[name].clone()
        return found


def _check_range(name: str, value: torch.Tensor, kept_as: torch.dtype) -> None:
    """Integers that the buffer's dtype cannot hold would wrap around."""
    if not _whole(value.dtype) or not value.numel() or lossless(value.dtype, kept_as):
        return
    if _whole(kept_as):  # not there and back: 255 as an int8 is -1, which as a uint8 is 255 again
        limits, numbers = torch.iinfo(kept_as), value.flatten().tolist()
        fits = limits.min <= min(numbers) <= max(numbers) <= limits.max
    else:
        fits = bool((value.to(kept_as).to(value.dtype) == value).all())
    if not fits:
        raise ProtocolError(f"metadata {name!r} has values that {kept_as}, the dtype of its buffer, cannot hold.")


def _whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _nbytes(metadata: Mapping[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in metadata.values())


def spec_of(table: EncoderTable, data: Mapping[str, Sequence[str]], key: Hashable) -> tuple[EncoderItemSpec, Mapping[str, int]]:
    """An item's sizes, and the rows that it has of each data buffer."""
    size = table.item_size(key)
    tokens, rows = _by_path(size.tokens, table), _by_path(size.rows, table)
    if size.frames < 1 or min(rows.values()) < 0 or sum(rows.values()) < 1:
        raise InputError(f"item {key!r} has {size}: sizes must be positive.")
    for path, declared in table.paths.items():
        if tokens[path] * declared.spatial_merge_size**2 != rows[path] * declared.tokens_per_row:
            raise ProtocolError(
                f"item {key!r} has {rows[path]} rows and {tokens[path]} tokens on path {path!r}: that is not what the path's "
                "spatial_merge_size and tokens_per_row say."
            )
    spec = EncoderItemSpec(sum(rows.values()), sum(tokens.values()), tokens, size.frames, size.kind)
    found: dict[str, int] = {}
    for path, buffers in data.items():
        for buffer in buffers:
            if found.setdefault(buffer, rows[path]) != rows[path]:
                raise ProtocolError(f"item {key!r} has another number of rows on path {path!r} than another path of {buffer!r}.")
    return spec, found


def _by_path(value: int | Mapping[str, int], table: EncoderTable) -> dict[str, int]:
    if isinstance(value, Mapping):
        if not value.keys() <= table.paths.keys():
            raise ProtocolError(f"sizes of an item are given for {', '.join(value)}; there are {', '.join(table.paths)}.")
        return {path: value.get(path, 0) for path in table.paths}
    if len(table.paths) > 1:
        raise ProtocolError(f"sizes of an item must be given by path ({', '.join(table.paths)}); there is only {value}.")
    return {next(iter(table.paths), DEFAULT_PATH): value}


def _check_metadata(name: str, buffer: Buffer, value: Any, rows: int, frames: int) -> None:
    """One item's metadata is what its buffer takes; a wrong offset would mix images without an error."""
    if not isinstance(value, torch.Tensor) or not value.is_cpu or value.dim() == 0 or tuple(value.shape[1:]) != buffer.shape:
        found = f"{list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ProtocolError(
            f"metadata {name!r} is {found}: expected a CPU tensor [entries, {', '.join(map(str, buffer.shape))}]."
        )
    if buffer.role is Role.BOUNDARIES:
        ends: list[int] = value.tolist()  # read at once: an operation for each question takes longer
        longest = max(map(operator.sub, ends[1:], ends), default=0)
        if not ends or ends[0] != 0 or ends[-1] != rows or any(map(operator.lt, ends[1:], ends)):
            raise ProtocolError(f"metadata {name!r} is {ends}: boundaries do not decrease from 0 to the {rows} rows.")
        if buffer.longest is not None and longest > buffer.longest:
            raise ProtocolError(f"metadata {name!r} has a segment of {longest} rows; longest={buffer.longest}.")
    elif buffer.role in (Role.ROWS, Role.INDEX):
        if len(value) * buffer.rows_per_entry != rows:
            raise ProtocolError(f"metadata {name!r} has {len(value)} entries: expected {rows} rows / {buffer.rows_per_entry}.")
        if buffer.role is Role.INDEX and len(value) and not 0 <= int(value.min()) <= int(value.max()) < len(value):
            raise ProtocolError(f"metadata {name!r} indexes outside of the item's {len(value)} entries.")
    elif buffer.role is Role.PER_SEGMENT and len(value) != frames:
        raise ProtocolError(f"metadata {name!r} has {len(value)} entries: expected one for each of {frames} segments.")
