"""Several outputs of a tower as one matrix of features, and back: a manager serves one tensor per item.

A unit is what an adapter's row or token group produces: one token of a packed tower (with the patches that were merged into
it), or one tile with all its tokens. Each unit's share of every output is laid out in the columns of the unit's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vit_compile.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class OutputLayout:
    """Where each output of a unit lies among the columns of its tokens.

    Args:
        outputs: real outputs by name, for `units` units; each has `units * k` rows for some k of its own.
        units: units that `outputs` are of.
        tokens: tokens of a unit.

    Raises:
        ModelError: an output's rows are not those of whole units.
    """

    def __init__(self, outputs: Mapping[str, torch.Tensor], *, units: int, tokens: int = 1) -> None:
        self.tokens = tokens
        self._parts = [_part(name, value, units, tokens) for name, value in outputs.items()]
        self.width = sum(part.columns for part in self._parts)
        """Columns of a token."""

    def join(self, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Outputs of any number of units, [units * k, ...] each, as features [units * tokens, width]."""
        columns = []
        for part in self._parts:
            flat = outputs[part.name].reshape(-1, part.numel)
            surplus = part.columns * self.tokens - part.numel
            flat = F.pad(flat, (0, surplus)) if surplus else flat
            columns.append(flat.reshape(-1, part.columns))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def split(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Features [units * tokens, width] as the outputs that `join` got: contiguous, in their own dtypes."""
        found = {}
        for part, columns in zip(self._parts, features.split([part.columns for part in self._parts], dim=1), strict=True):
            flat = columns.reshape(-1, part.columns * self.tokens)[:, : part.numel]
            found[part.name] = flat.to(part.dtype).reshape(-1, *part.shape[1:]).contiguous()
        return found


class TowerOutputs:
    """An `OutputLayout` for what a tower returns: a tensor, or a `ModelOutput` of tensors and of lists or tuples of them.

    Args:
        example: what the tower returned for `units` units; fields that are None stay None, and so do entries of lists (hidden
            states of layers that nobody asked for).
        units, tokens: see `OutputLayout`.
        fields: names of the fields to keep, in order; None: all.

    Raises:
        ModelError: see `OutputLayout`, or a field holds something else.
    """

    def __init__(self, example: Any, *, units: int, tokens: int = 1, fields: Sequence[str] | None = None) -> None:
        self._type = type(example)
        self._fields: dict[str, _Several | None] = {}
        if isinstance(example, torch.Tensor):
            self._fields["features"] = None
        else:
            for name in fields if fields is not None else example.keys():
                value = example[name]
                self._fields[name] = None if isinstance(value, torch.Tensor) else _several(name, value)
        self._layout = OutputLayout(self._flat(example), units=units, tokens=tokens)
        self.width = self._layout.width
        """Columns of a token."""

    def _flat(self, output: Any) -> dict[str, torch.Tensor]:
        if isinstance(output, torch.Tensor):
            return {"features": output}
        flat: dict[str, torch.Tensor] = {}
        for name, several in self._fields.items():
            value = getattr(output, name)
            if several is None:
                flat[name] = value
            else:
                flat |= {key: part for key, part in zip(several.keys, value, strict=True) if key is not None}
        return flat

    def join(self, output: Any) -> torch.Tensor:
        """What the tower returns, as features [units * tokens, width]."""
        return self._layout.join(self._flat(output))

    def wrap(self, features: torch.Tensor) -> Any:
        """Features as the tower would have returned them: its type, its fields, its dtypes. New memory."""
        flat = self._layout.split(features)
        if issubclass(self._type, torch.Tensor):
            return flat["features"]
        fields: dict[str, Any] = {}
        for name, several in self._fields.items():
            if several is None:
                fields[name] = flat[name]
            else:
                fields[name] = several.kind(None if key is None else flat[key] for key in several.keys)
        output = self._type(**fields)
        for name in fields:  # fields that were set later come later, as `to_tuple` shows
            output.move_to_end(name)
        return output


@dataclass(frozen=True, slots=True)
class _Several:
    """A field with several tensors."""

    kind: type
    keys: tuple[str | None, ...]
    """Names of its entries among the parts; None for those that are None."""


def _several(name: str, value: Any) -> _Several:
    if not isinstance(value, list | tuple) or not all(part is None or isinstance(part, torch.Tensor) for part in value):
        raise ModelError(f"output {name!r} is {type(value).__name__}: expected a tensor or a list of tensors.")
    kind = list if isinstance(value, list) else tuple
    return _Several(kind, tuple(None if part is None else f"{name}.{number}" for number, part in enumerate(value)))


def _part(name: str, value: torch.Tensor, units: int, tokens: int) -> _Part:
    if value.dim() == 0 or value.shape[0] % units:
        raise ModelError(f"output {name!r} is {list(value.shape)}: not a whole number of rows for each of {units} units.")
    shape = (value.shape[0] // units, *value.shape[1:])
    return _Part(name, shape, value.dtype, -(-torch.Size(shape).numel() // tokens))
