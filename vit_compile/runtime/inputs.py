"""Checks of a request before any work, and the reading of sizes that come as lists, arrays or tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from vit_compile.errors import GridError, InputError


def host_rows(name: str, value: Any, width: int) -> list[tuple[int, ...]]:
    """A table of integers as host tuples: lists, NumPy arrays, tensors on any device (a device tensor is read, once).

    Args:
        name: of the input, for messages.
        value: rows of `width` integers each; may be empty.
        width: integers in a row, such as 3 for grids (t, h, w).

    Raises:
        InputError: it is None, or not such a table.
    """
    rows = []
    for index, row in enumerate(_entries(name, value, f"rows of {width} integers")):
        if isinstance(row, torch.Tensor | _Listable):
            row = row.tolist()
        try:
            integers = tuple(map(operator.index, row))
        except TypeError:
            raise InputError(f"row {index} of {name} is {row!r}: expected {width} integers.") from None
        if len(integers) != width:
            raise InputError(f"row {index} of {name} is {row!r}: expected {width} integers, not {len(integers)}.")
        rows.append(integers)
    return rows


def _entries(name: str, value: Any, expected: str) -> Iterable[Any]:
    """What a list, an array or a tensor holds, on the host."""
    if isinstance(value, torch.Tensor | _Listable):
        value = value.tolist()
    if value is None or isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name}={value!r}: expected {expected}, as a list, an array or a tensor.")
    return value


def host_counts(name: str, value: Any, *, least: int = 1) -> list[int]:
    """One integer for each item, on the host: a list, an array or a tensor (a device tensor is read, once).

    Args:
        name: of the input, for messages.
        value: the integers; may be empty.
        least: no integer is smaller; 1 or 0.

    Raises:
        InputError: anything else.
    """
    kind = "a positive integer" if least else "an integer from 0 on"
    counts = []
    for index, count in enumerate(_entries(name, value, f"{kind} for each item")):
        try:
            counts.append(operator.index(count))
        except TypeError:
            raise InputError(f"entry {index} of {name} is {count!r}: expected {kind}.") from None
        if counts[-1] < least:
            raise InputError(f"entry {index} of {name} is {counts[-1]}: expected {kind}.")
    return counts


def host_grids(name: str, value: Any, *, spatial_merge_size: int = 1) -> list[tuple[int, int, int]]:
    """Patch grids (t, h, w) as host tuples, checked.

    Args:
        name: of the input, for messages.
        value: one grid per item, as `host_rows` takes them.
        spatial_merge_size: side, in patches, of the square that becomes one token; height and width must be multiples.

    Raises:
        InputError: it is no table of three integers.
        GridError: a side is not positive, or does not merge evenly.
    """
    grids = []
    for index, (t, h, w) in enumerate(host_rows(name, value, 3)):
        if min(t, h, w) < 1:
            raise GridError(f"grid {index} of {name} is {(t, h, w)}: t, h and w must be at least 1 patch.")
        if h % spatial_merge_size or w % spatial_merge_size:
            raise GridError(
                f"grid {index} of {name} is {(t, h, w)}: h and w must be multiples of the merge size {spatial_merge_size}; "
                "resize the image."
            )
        grids.append((t, h, w))
    return grids


def check_request(mm_kwargs: Any, modalities: Mapping[str, Sequence[str]]) -> list[str]:
    """The modalities that a request has, in the order of the declaration.

    Args:
        mm_kwargs: the request.
        modalities: names of the inputs of each modality, all of which have to come together.

    Raises:
        InputError: not a mapping; an input is None, unknown, or comes without the others of its modality.
    """
    if not isinstance(mm_kwargs, Mapping):
        raise InputError(f"the request is {type(mm_kwargs).__name__}: expected a dict of inputs by name.")
    for name, value in mm_kwargs.items():
        if not any(name in names for names in modalities.values()):
            known = "; ".join(f"{modality}: {', '.join(names)}" for modality, names in modalities.items())
            raise InputError(f"unknown input {name!r}. This model encodes {known}.")
        if value is None:
            raise InputError(f"{name} is None: leave it out where there is none of it.")
    found = []
    for modality, names in modalities.items():
        given = [name for name in names if name in mm_kwargs]
        if given and len(given) < len(names):
            missing = [name for name in names if name not in mm_kwargs]
            raise InputError(f"{', '.join(given)} without {', '.join(missing)}: {modality} needs {', '.join(names)}.")
        if given:
            found.append(modality)
    return found


def check_rows(name: str, value: Any, *, rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """A data input has the rows that the sizes say, the right shape, and a dtype that loses nothing.

    Args:
        name: of the input, for messages.
        value: the data, [rows, *shape].
        rows: what the items add up to.
        shape, dtype: of one row of the encoder's buffer.
        device: the encoder's; the host is fine too.

    Raises:
        InputError: anything else.
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} is {type(value).__name__}: expected a tensor [{rows}, {', '.join(map(str, shape))}].")
    if tuple(value.shape[1:]) != shape or value.dim() == 0:
        raise InputError(f"{name} is {list(value.shape)}: expected [{rows}, {', '.join(map(str, shape))}].")
    if value.shape[0] != rows:
        raise InputError(f"{name} has {value.shape[0]} rows, but the sizes of its items add up to {rows}.")
    if not lossless(value.dtype, dtype):
        raise InputError(
            f"{name} is {value.dtype} and the encoder works in {dtype}: that loses precision, so cast it yourself "
            f"({name}.to({dtype})) if it is meant."
        )
    if value.device.type != "cpu" and not same_device(value.device, device):
        raise InputError(f"{name} is on {value.device} and the encoder on {device}: move it.")


def same_device(one: torch.device, other: torch.device) -> bool:
    """Equal, where a device without an index is the current one of its kind."""
    if one.type != other.type:
        return False
    if one.index == other.index:
        return True
    current = torch.cuda.current_device() if one.type == "cuda" else 0
    return (current if one.index is None else one.index) == (current if other.index is None else other.index)


def lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Does every value of `source` have an equal one in `target`?"""
    if source == target or source == torch.bool:
        return True
    if source.is_complex or target.is_complex or target == torch.bool:
        return False
    if source.is_floating_point:
        if not target.is_floating_point:
            return False
        # No dtype has more digits and less range but float16 beside bfloat16, and they hold neither one the other.
        a, b = torch.finfo(source), torch.finfo(target)
        return a.eps >= b.eps and a.max <= b.max and a.tiny * a.eps >= b.tiny * b.eps
    a_low, a_high = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point:
        return max(-a_low, a_high) <= 2 / torch.finfo(target).eps
    return torch.iinfo(target).min <= a_low and a_high <= torch.iinfo(target).max


class _ListableMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return callable(getattr(value, "tolist", None))


class _Listable(metaclass=_ListableMeta):
    """NumPy arrays and scalars, without importing NumPy."""

    def tolist(self) -> Any:
        """Python numbers."""
        raise NotImplementedError
