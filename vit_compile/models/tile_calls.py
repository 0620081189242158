"""What models of tiles have in common: one call that maps tiles [N, C, H, W] to features, answered by a `TileTable`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vit_compile.errors import ModelError
from vit_compile.models.binding import Binding, Call, Execute, Unserved, noise, original
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.models.tiles import TileInputs, Tiles, TileTable

PIXELS = "pixel_values"
SETTINGS = (
    "downsample_ratio",
    "output_attentions",
    "output_hidden_states",
    "ps_version",
    "return_dict",
    "select_layer",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)
"""Attributes of models and configs that change what a call returns."""


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class TileCall:
    """A method that a model calls with its tiles, and how the encoder answers it."""

    owner: nn.Module
    """Whose method."""

    method: str
    """Its name."""

    tower: nn.Module
    """The vision tower: its config says the size of a tile."""

    run: Callable[[torch.Tensor], Any]
    """`run(tiles)`: what the method returns, in fixed shapes, as a tensor or a `ModelOutput` of tensors [N, ...]."""

    features: Callable[[Any], torch.Tensor]
    """From what `run` returns to what the language model gets, [N, tokens, width]."""

    example: Any = None
    """What the method returns for one tile, if `run` returns more than that; in the form that `run` has."""

    finish: Callable[[Any], Any] = _itself
    """From what `run` returns to what the method returns."""

    projector: Sequence[nn.Module] = ()
    """Modules beside the tower whose weights take part in `features`."""

    inputs: Mapping[str, TileInputs] = field(default_factory=lambda: {"image": TileInputs(path="main")})
    """Modalities; the first is the one that the call is answered through."""

    takes: tuple[str, ...] = (PIXELS,)
    """See `Call`; the tiles come first."""

    refuse: Callable[..., str | None] = lambda *others: None
    """`refuse(*arguments behind the tiles)`: why a call is the model's own to answer, or None."""

    def bind(self, *, fields: str | None, token_range: tuple[int, int] | None = None) -> Binding:
        """The table, and the call that it answers.

        Args:
            fields: see `Architecture.bind`.
            token_range: see `TileTable`.
        """
        shape = tile_shape(self.tower)
        with torch.no_grad():
            example = self.run(noise_tile(self.tower)) if self.example is None else self.example
            tokens, width = self.features(example).shape[1:]
        outputs = TowerOutputs(example, units=1, tokens=tokens)

        def everything(pixel_values: torch.Tensor) -> torch.Tensor:
            return outputs.join(self.run(pixel_values))

        def main(pixel_values: torch.Tensor) -> torch.Tensor:
            return self.features(self.run(pixel_values)).flatten(0, 1)

        table = TileTable(
            {"main": Tiles(forward=everything if fields == "all" else main, shapes={PIXELS: shape}, tokens=tokens)},
            modules=[self.tower, *self.projector],
            width=outputs.width if fields == "all" else width,
            modalities=self.inputs,
            token_range=token_range,
        )
        return Binding(table=table, calls=(self._answer(outputs, shape),))

    def _answer(self, outputs: TowerOutputs, shape: tuple[int, ...]) -> Call:
        image = next(iter(self.inputs.values()))
        bound = copy.deepcopy(self._settings())

        def serve(execute: Execute, **arguments: Any) -> Any:
            tiles, *others = (arguments[name] for name in self.takes)
            if not isinstance(tiles, torch.Tensor) or tuple(tiles.shape[1:]) != shape or not len(tiles):
                what = list(tiles.shape) if isinstance(tiles, torch.Tensor) else type(tiles).__name__
                raise Unserved(f"tiles {what}, where the model has {['N', *shape]}")
            if self._settings() != bound:
                raise Unserved("a setting of the model was changed since")
            reason = self.refuse(*others)
            if reason is not None:
                raise Unserved(reason)
            request: dict[str, Any] = {PIXELS: tiles}
            if image.counts is not None:
                request[image.counts] = [1 - image.uncounted] * len(tiles)
            return self.finish(outputs.wrap(torch.cat(execute(request))))

        config = getattr(self.owner, "config", None)
        # Said explicitly, but as the config has it.
        ignores = {name: getattr(config, name) for name in SETTINGS if getattr(config, name, None) is not None}
        return Call(owner=self.owner, method=self.method, takes=self.takes, serve=serve, ignores=ignores)

    def _settings(self) -> list[Any]:
        """What the answer depends on beside tiles and weights."""
        where = (self.owner, getattr(self.owner, "config", None), getattr(self.tower, "config", None))
        return [getattr(one, name, None) for one in where for name in SETTINGS]


def tile_shape(tower: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the tower's tiles, by its config.

    Raises:
        ModelError: the config has no image size.
    """
    config: Any = getattr(tower, "config", None)
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise ModelError(f"{type(tower).__name__} has no config.image_size: the size of its tiles is not known.")
    return (getattr(config, "num_channels", 3), *size)


def noise_tile(tower: nn.Module) -> torch.Tensor:
    """A seeded tile [1, C, H, W] in the tower's dtype, on its device."""
    return noise(tower, 1, *tile_shape(tower))


def bare_tower(tower: nn.Module) -> TileCall:
    """A tower without the model around it: its `forward`, and its last hidden states as features."""
    forward = original(tower, "forward")
    return TileCall(
        owner=tower,
        method="forward",
        tower=tower,
        run=lambda tiles: forward(tiles, return_dict=True),
        features=lambda output: output.last_hidden_state,
    )
