"""Images as one global view and any number of local tiles, by a tower that takes both: one path for each size.

`SizedForward`: a module's `forward`, which a model calls once with all views and once with all tiles (for `accelerate`).
`TwoViewTable`: whole images, put together from both paths as the language model gets them (for `encoder_for`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vit_compile.errors import ModelError
from vit_compile.models.binding import Binding, Call, Execute, Unserved, check_reentry, comparable, noise, original
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.models.tiles import Tiles, TileTable, on_one_tile
from vit_compile.runtime.inputs import host_counts
from vit_compile.runtime.table import EncoderTable, ItemSize, Modality

GLOBAL, LOCAL = "global", "local"
DEFAULT_MOST_VIEWS = 16
MORE_OUTPUTS = ("output_hidden_states", "output_attentions")


@dataclass(frozen=True, kw_only=True)
class SizedForward:
    """A module's `forward` for entries of a few sizes: a path for each size, and every entry of the batch is an item."""

    owner: nn.Module
    """Whose `forward`."""

    run: Callable[[torch.Tensor], Any]
    """`run(entries)`: what `forward` returns, in fixed shapes, as a tensor or a `ModelOutput` with tensors [N, ...]."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """By path: the name of its input in a request, and the shape of one entry."""

    width: Callable[[Any], int]
    """`width(output)`: columns of the features. What an entry has more of are its tokens."""

    takes: tuple[str, ...] = ("pixel_values",)
    """See `Call`. The last one holds the entries."""

    fields: Sequence[str] | None = None
    """See `TowerOutputs`."""

    refuse: Callable[..., str | None] = lambda *arguments: None
    """`refuse(*arguments)`: why a call is the model's own to answer, or None."""

    def bound(self) -> tuple[dict[str, Tiles], int, Call]:
        """Paths by name, columns of the features, and the call, found out on one entry of zeros for each path.

        Raises:
            ModelError: the forward returns something else, or its sizes have features of different widths.
        """
        outputs, tiles, widths = {}, {}, set()
        for path, (name, shape) in self.inputs.items():
            example = on_one_tile(lambda **values: self.run(*values.values()), self.owner, {name: shape})
            if not isinstance(example, torch.Tensor) and not hasattr(example, "keys"):
                kind = type(example).__name__
                raise ModelError(f"{type(self.owner).__name__} returns {kind}: expected a tensor or a ModelOutput.")
            main = example if isinstance(example, torch.Tensor) else example[0]
            tokens = main.numel() // self.width(example)
            outputs[path] = TowerOutputs(example, units=1, tokens=tokens, fields=self.fields)
            tiles[path] = Tiles(forward=self._joined(outputs[path]), shapes={name: shape}, tokens=tokens)
            widths.add(outputs[path].width)
        if len(widths) > 1:
            raise ModelError(f"{type(self.owner).__name__} has features of {sorted(widths)} columns: expected one width.")
        return tiles, widths.pop(), self._call(outputs)

    def _joined(self, outputs: TowerOutputs) -> Callable[..., torch.Tensor]:
        return lambda **values: outputs.join(self.run(*values.values()))

    def _call(self, outputs: Mapping[str, TowerOutputs]) -> Call:
        configs = {id(config): config for config in map(_config, self.owner.modules()) if config is not None}

        def serve(execute: Execute, **arguments: Any) -> Any:
            entries = arguments[self.takes[-1]]
            shape = tuple(entries.shape[1:]) if isinstance(entries, torch.Tensor) else type(entries).__name__
            path = next((path for path, (_, known) in self.inputs.items() if known == shape), None)
            if path is None or not len(entries):
                known = " and ".join(str(list(known)) for _, known in self.inputs.values())
                raise Unserved(f"entries {shape}, where there are graphs for {known}")
            if any(getattr(config, flag, False) for config in configs.values() for flag in MORE_OUTPUTS):
                raise Unserved("hidden states or attentions are asked for by a config")
            reason = self.refuse(*arguments.values())
            if reason is not None:
                raise Unserved(reason)
            return outputs[path].wrap(torch.cat(execute({self.inputs[path][0]: entries})))

        return Call(owner=self.owner, method="forward", takes=self.takes, serve=serve, ignores=dict.fromkeys(MORE_OUTPUTS, False))


def bind_forwards(*forwards: SizedForward, token_range: tuple[int, int] | None = None) -> Binding:
    """One table for several forwards with paths of different names, and the calls that it answers.

    Args:
        forwards: of modules that lie on one device.
        token_range: see `TileTable`.

    Raises:
        ModelError: see `SizedForward.bound`; or their features differ in width.
    """
    tiles: dict[str, Tiles] = {}
    calls, widths = [], set()
    for forward in forwards:
        paths, width, call = forward.bound()
        tiles |= paths
        widths.add(width)
        calls.append(call)
    if len(widths) > 1:
        raise ModelError(f"features of {sorted(widths)} columns: expected one width.")
    modules = [forward.owner for forward in forwards]
    return Binding(table=TileTable(tiles, modules=modules, width=widths.pop(), token_range=token_range), calls=calls)


class TwoViewTable(EncoderTable):
    """Whole images: an item is one view on the path "global" and `tile_count(key)` tiles on the path "local", if it has any.

    Args:
        view, tile: the paths, with one buffer each, named as the input of the request.
        per_image: names of the inputs with one entry for each image, on which `item_keys` decides.
        modules: whose weights are watched.
        width: columns of the features.
        token_range: (smallest, largest) useful budget in output tokens. None: one view to `DEFAULT_MOST_VIEWS` of them.

    A request names all inputs: without tiles the tile input is empty, [0, C, H, W].
    """

    def __init__(
        self,
        view: Tiles,
        tile: Tiles,
        *,
        per_image: tuple[str, ...],
        modules: Sequence[nn.Module],
        width: int,
        token_range: tuple[int, int] | None = None,
    ) -> None:
        self.modules, self.tiles = list(modules), {GLOBAL: view, LOCAL: tile}
        names = [name for tiles in self.tiles.values() for name in tiles.shapes]
        super().__init__(
            modalities={"image": Modality(data={name: name for name in names}, per_item=per_image)},
            paths={GLOBAL: view.path(), LOCAL: tile.path(min_token_budget=tile.tokens, allow_zero_tokens=True)},
            out_hidden_size=width,
            token_range=token_range or (view.tokens, view.tokens * DEFAULT_MOST_VIEWS),
        )

    def tile_count(self, key: Any) -> int:
        """Tiles of an image."""
        count: int = key
        return count

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """The number of tiles of each image."""
        (name,) = self.modalities[modality].per_item
        return host_counts(name, inputs[name], least=0)

    def item_size(self, key: Any) -> ItemSize:
        """A view and the tiles, and their tokens."""
        rows = {GLOBAL: 1, LOCAL: self.tile_count(key)}
        return ItemSize(rows=rows, tokens={path: count * self.tiles[path].tokens for path, count in rows.items()})

    def example_key(self, tokens: int) -> Hashable | None:
        """An image with as many tiles as there is room for; none where there is no room for its view."""
        return tokens // self.tiles[LOCAL].tokens if tokens >= self.tiles[GLOBAL].tokens else None

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """The path's own."""
        return self.tiles[path].forward(**values)

    def assemble(self, key: Any, outputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Tiles, then the view, then what `ending` gives."""
        view, tiles = outputs[GLOBAL], outputs[LOCAL]
        assert view is not None, "every image has a view"
        parts = [view, *self.ending()] if tiles is None else [self.arrange(key, tiles), view, *self.ending()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def arrange(self, key: Any, tiles: torch.Tensor) -> torch.Tensor:
        """An image's tiles [tiles * tokens, width] in the order in which the language model gets them."""
        return tiles

    def ending(self) -> Sequence[torch.Tensor]:
        """What is behind the view, [rows, width] each."""
        return ()


@torch.no_grad()
def check_whole(table: TwoViewTable, owner: Any, per_image: Mapping[str, Any]) -> None:
    """One whole image is what the model's `get_image_features` makes of it. The view is as small as a tile, to be quick.

    Args:
        table: what is compared.
        owner: whose method it is; without one there is nothing to compare with.
        per_image: the inputs of the table with one entry for each image, for one image.

    Raises:
        ModelError: it is something else.
    """
    tower = table.modules[0]
    if not comparable(tower) or not hasattr(owner, "get_image_features"):
        return
    (key,) = table.item_keys("image", per_image)
    ((name, shape),) = table.tiles[LOCAL].shapes.items()
    (view_name,) = table.tiles[GLOBAL].shapes
    view, *tiles = noise(tower, 1 + table.tile_count(key), *shape).split(1)
    found = {GLOBAL: table.forward(GLOBAL, {view_name: view}), LOCAL: table.forward(LOCAL, {name: torch.cat(tiles)})}
    features = original(owner, "get_image_features")(**{view_name: view, name: torch.cat(tiles)}, **per_image, return_dict=True)
    check_reentry(owner, table.assemble(key, found), features.pooler_output[0])


class OwnParameters(nn.Module):
    """The parameters that lie on a module itself, without those of its children: a separator on a whole language model.

    Shares the module's dict of them, so that replaced ones are seen.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["_parameters"] = owner._parameters
        self.eval()


def two_sizes(names: tuple[str, str], sides: tuple[int, int], channels: int = 3) -> dict[str, tuple[str, tuple[int, ...]]]:
    """`SizedForward.inputs` of square views and tiles."""
    return {path: (name, (channels, side, side)) for path, name, side in zip((GLOBAL, LOCAL), names, sides, strict=True)}


Encode = Callable[[torch.Tensor], torch.Tensor]
"""Entries [N, C, H, W] -> features [N, tokens, width]."""


def view_and_tile(
    encode_view: Encode, encode_tile: Encode, inputs: Mapping[str, tuple[str, tuple[int, ...]]], module: nn.Module
) -> tuple[Tiles, Tiles, int]:
    """Both paths of a `TwoViewTable`, and its width, found out on one entry of zeros each.

    Args:
        encode_view, encode_tile: what a view and a tile become.
        inputs: see `SizedForward`.
        module: whose device and dtype the entries have.
    """
    view, _ = _encoded(encode_view, *inputs[GLOBAL], module)
    return view, *_encoded(encode_tile, *inputs[LOCAL], module)


def _encoded(encode: Encode, name: str, shape: tuple[int, ...], module: nn.Module) -> tuple[Tiles, int]:
    def forward(**entries: torch.Tensor) -> torch.Tensor:
        return encode(entries[name]).flatten(0, 1)

    tokens, width = on_one_tile(forward, module, {name: shape}).shape
    return Tiles(forward=forward, shapes={name: shape}, tokens=tokens), width


def _config(module: nn.Module) -> Any:
    return vars(module).get("config")
