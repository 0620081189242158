"""Images of one size as a table: a row is an image or a tile, and needs no metadata. Towers that are called with several
sizes (a thumbnail and crops) have a path for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import InputError
from vit_compile.models.binding import floating_dtype
from vit_compile.runtime.inputs import host_counts
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, TablePath

DEFAULT_MOST_TILES = 16


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One path: tiles of one shape."""

    forward: Callable[..., torch.Tensor]
    """Buffers by name, [tiles, *shape] each -> features [tiles * tokens, width]."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of one tile in each buffer. Names may not come twice among the paths."""

    tokens: int
    """Output tokens of a tile."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Of buffers that do not have the encoder's dtype (masks, positions)."""


@dataclass(frozen=True, kw_only=True)
class TileInputs:
    """One modality: tiles for one path."""

    path: str
    inputs: Mapping[str, str] | None = None
    """Buffer -> name in the request. None: the buffers' own names."""

    counts: str | None = None
    """Input with the number of tiles of each item. None: every tile is an item."""


class TileTable(EncoderTable):
    """Tiles of fixed sizes: an item's key is (path, number of tiles).

    Args:
        paths: by name; with more than one, an item has tiles on one of them.
        modules: whose weights are watched.
        width: columns of the features.
        modalities: by name. None: one named "image" for a single path, else one for each path under its name.
        token_range: (smallest, largest) useful budget in output tokens. None: one tile to `DEFAULT_MOST_TILES` of them.

    Raises:
        InputError (from requests): counts that do not add up.
    """

    def __init__(
        self,
        paths: Mapping[str, Tiles],
        *,
        modules: Sequence[nn.Module],
        width: int,
        modalities: Mapping[str, TileInputs] | None = None,
        token_range: tuple[int, int] | None = None,
    ) -> None:
        self.modules, self.tiles = list(modules), dict(paths)
        if modalities is None:
            names = {"image": next(iter(paths))} if len(paths) == 1 else {name: name for name in paths}
            modalities = {modality: TileInputs(path=path) for modality, path in names.items()}
        self._inputs = dict(modalities)
        several = len(paths) > 1
        sizes = [tiles.tokens for tiles in paths.values()]
        super().__init__(
            modalities={name: self._modality(inputs) for name, inputs in self._inputs.items()},
            paths={
                name: TablePath(
                    buffers={
                        buffer: Buffer(role=Role.ROWS, shape=shape, dtype=tiles.dtypes.get(buffer))
                        for buffer, shape in tiles.shapes.items()
                    },
                    tokens_per_row=tiles.tokens,
                    min_token_budget=tiles.tokens if several else None,
                    allow_zero_tokens=several,
                )
                for name, tiles in paths.items()
            },
            out_hidden_size=width,
            token_range=token_range or (min(sizes), max(sizes) * DEFAULT_MOST_TILES),
        )

    def _modality(self, inputs: TileInputs) -> Modality:
        buffers = self.tiles[inputs.path].shapes
        return Modality(
            data=inputs.inputs or {name: name for name in buffers}, per_item=(inputs.counts,) if inputs.counts else ()
        )

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """(path, number of tiles) of each item."""
        declared = self._inputs[modality]
        if declared.counts is not None:
            counts = host_counts(declared.counts, inputs[declared.counts])
        else:
            name = next(iter(self.modalities[modality].data.values()))
            data = inputs[name]
            if not isinstance(data, torch.Tensor) or data.dim() == 0:
                raise InputError(f"{name} is {type(data).__name__}: expected a tensor [tiles, ...].")
            counts = [1] * data.shape[0]
        return [(declared.path, count) for count in counts]

    def item_size(self, key: Any) -> ItemSize:
        """Tiles, and their tokens."""
        path, count = key
        tokens = count * self.tiles[path].tokens
        return ItemSize(rows={path: count}, tokens={path: tokens})

    def example_key(self, tokens: int) -> Hashable | None:
        """As many tiles of the path as there is room for; of the path with the smallest tiles where there are several."""
        path = min(self.tiles, key=lambda name: self.tiles[name].tokens)
        count = tokens // self.tiles[path].tokens
        return (path, count) if count else None

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The path's own."""
        return self.tiles[path].forward(**values)


@torch.no_grad()
def on_one_tile(
    call: Callable[..., Any],
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Any:
    """What a model returns for one tile of zeros (ones for integers and masks): the example for `TowerOutputs`.

    Args:
        call: takes the buffers by name.
        module: whose device and dtype the tile has.
        shapes, dtypes: see `Tiles`.
    """
    device, made = next(module.parameters()).device, {}
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, floating_dtype(module))
        fill = torch.zeros if dtype.is_floating_point else torch.ones
        made[name] = fill((1, *shape), dtype=dtype, device=device)
    return call(**made)
