"""Images of one size as a table: a row is an image or a tile, and needs no metadata. Towers that are called with several
sizes (a thumbnail and crops) have a path for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import InputError, ModelError
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

    def path(self, **options: Any) -> TablePath:
        """As a path of a table; `options` are its further fields."""
        buffers = {name: Buffer(role=Role.ROWS, shape=shape, dtype=self.dtypes.get(name)) for name, shape in self.shapes.items()}
        return TablePath(buffers=buffers, tokens_per_row=self.tokens, **options)


@dataclass(frozen=True, kw_only=True)
class TileInputs:
    """One modality: tiles for one path."""

    path: str
    inputs: Mapping[str, str] | None = None
    """Buffer -> name in the request. None: the buffers' own names."""

    counts: str | None = None
    """Input with the number of tiles of each item. None: every tile is an item."""

    uncounted: int = 0
    """Tiles of every item that `counts` leaves out: 1 where it counts the crops beside a thumbnail."""


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
                name: tiles.path(min_token_budget=tiles.tokens if several else None, allow_zero_tokens=several)
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
            numbers = host_counts(declared.counts, inputs[declared.counts], least=1 - min(declared.uncounted, 1))
            counts = [number + declared.uncounted for number in numbers]
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
        """As many tiles as there is room for, of the path with the smallest ones."""
        return self.example_key_on(min(self.tiles, key=lambda name: self.tiles[name].tokens), tokens)

    def example_key_on(self, path: str, tokens: int) -> Hashable | None:
        """As many tiles of the path as there is room for."""
        count = tokens // self.tiles[path].tokens
        return (path, count) if count else None

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The path's own."""
        return self.tiles[path].forward(**values)

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """The item's tokens on its path."""
        output = outputs[key[0]]
        assert output is not None, "an item has tiles on its path"
        return output


def tile_table_for(
    module: nn.Module,
    image_shape: tuple[int, int, int],
    *,
    call: Callable[[torch.Tensor], Any] | None = None,
    output: str | None = None,
    name: str = "pixel_values",
    counts: str | None = None,
    token_range: tuple[int, int] | None = None,
) -> TileTable:
    """A table for any module that maps images of one size, [N, *image_shape], to features: timm's, torchvision's, your own.

    Args:
        module: in eval mode; its weights are watched. One image of a batch may not depend on another.
        image_shape: (channels, height, width).
        call: maps images to the output; None: the module itself. `module.forward_features`, for example.
        output: which field, where the output is a `ModelOutput` or a dict. None: its `last_hidden_state`, or else its first.
        name: input of a request that has the images.
        counts: input of a request with the number of images of each item. None: every image is an item.
        token_range: see `TileTable`.

    The output is [N, tokens, width], or [N, width] for one token; how many tokens is found out by a run on two images of zeros.
    An item's features are [images * tokens, width].

    Raises:
        ModelError: the output is of another form.
    """
    run = module if call is None else call
    images = torch.zeros(2, *image_shape, dtype=floating_dtype(module), device=next(module.parameters()).device)
    with torch.no_grad():
        example = run(images)
    if output is None and isinstance(example, Mapping):
        output = "last_hidden_state" if example.get("last_hidden_state") is not None else next(iter(example.keys()))
    features = _field(example, output)
    if features.dim() not in (2, 3) or features.shape[0] != 2:
        raise ModelError(
            f"{type(module).__name__} makes {list(features.shape)} of two images: expected [2, tokens, width] or [2, width]. "
            "Pass a call= that brings it into this form."
        )
    tokens, width = 1 if features.dim() == 2 else features.shape[1], features.shape[-1]

    def forward(**values: torch.Tensor) -> torch.Tensor:
        return _field(run(values[name]), output).reshape(-1, width)

    return TileTable(
        {"main": Tiles(forward=forward, shapes={name: tuple(image_shape)}, tokens=tokens)},
        modules=[module],
        width=width,
        modalities={"image": TileInputs(path="main", counts=counts)},
        token_range=token_range,
    )


def _field(value: Any, name: str | None) -> torch.Tensor:
    """A field of an output, or an output that is a tensor.

    Raises:
        ModelError: it is no tensor.
    """
    found = value if name is None else value[name]
    if not isinstance(found, torch.Tensor):
        raise ModelError(f"the output{'' if name is None else ' ' + name} is {type(found).__name__}: expected a tensor.")
    return found


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
