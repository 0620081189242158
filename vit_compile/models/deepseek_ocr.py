"""DeepSeek-OCR, DeepSeek-OCR 2, Unlimited-OCR: a global view and local tiles.

`accelerate` answers the towers' `forward`, which the models call once with all views and once with all tiles. `encoder_for` gives
whole images: tiles, view, separator, with a newline behind each line where the model has one.

Requests for `encoder_for` (C channels; sides are those of the released models):

- DeepSeek-OCR 2: `pixel_values` [n, C, 1024, 1024], `pixel_values_local` [all tiles, C, 768, 768], `num_local_patches` [n].
- Unlimited-OCR: the same with tiles of 640, and `patches_grid` [n, 2], (columns, rows), as its processor makes them.
- DeepSeek-OCR: `pixel_values` [n, C, 1024, 1024], `images_crop` [all tiles, C, 640, 640], `images_spatial_crop` [n, 2], (columns,
  rows); (1, 1) stands for no tiles. The published code keeps a pair (tiles, view) for each image: concatenate the views of all
  images, and the tiles of those that have any.
- A tower without its model: `pixel_values` and `pixel_values_local`; every view and every tile is an item.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vit_compile.errors import InputError, ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, check_reentry, comparable, find_module, noise, original, owner_of
from vit_compile.models.tiles import Tiles, on_one_tile
from vit_compile.models.two_views import (
    GLOBAL,
    LOCAL,
    Encode,
    OwnParameters,
    SizedForward,
    TwoViewTable,
    bind_forwards,
    check_whole,
    two_sizes,
    view_and_tile,
)
from vit_compile.runtime.inputs import host_counts, host_rows

NAMES = ("pixel_values", "pixel_values_local")
PUBLISHED_NAMES = ("pixel_values", "images_crop")
PUBLISHED_CHILDREN = ("sam_model", "vision_model", "projector")
PUBLISHED_PARAMETERS = ("image_newline", "view_seperator")
"""Spelled as published."""
NO_TILES = (0, 0)


# --- relative positions ----------------------------------------------------------------------------------------------


class RelativePositions:
    """`get_rel_pos` of one SAM attention, in the method's place, with its coordinates made where the weights are.

    The method makes them on the host, and indexes weights on the device with them: a copy that no graph may contain. Nothing is
    kept, so nothing grows old when weights are replaced or moved. Deep copies and pickles have the method.
    """

    def __init__(self, attention: nn.Module) -> None:
        self._attention = weakref.ref(attention)  # else attention and this would keep each other alive

    def __call__(self, q_size: int, k_size: int, rel_pos: torch.Tensor) -> torch.Tensor:
        """[q_size, k_size, C] from `rel_pos` [L, C], resized to 2 * q_size - 1 distances.

        Raises:
            ModelError: the sizes differ, which self-attention has no use for.
        """
        if q_size != k_size:
            raise ModelError(f"relative positions of {q_size} queries to {k_size} keys: expected equal numbers.")
        distances = 2 * q_size - 1
        if len(rel_pos) != distances:
            rel_pos = F.interpolate(rel_pos.T[None], size=distances, mode="linear")[0].T
        steps = torch.arange(q_size, device=rel_pos.device)
        return rel_pos[steps[:, None] - steps + q_size - 1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The method of the copied attention."""
        owner = memo.get(id(self._attention()))
        return self if owner is None else types.MethodType(type(owner).get_rel_pos, owner)

    def __reduce__(self) -> Any:
        """The method of the unpickled attention."""
        return getattr, (self._attention(), "get_rel_pos")


class RelativePositionsSwitch:
    """Puts `RelativePositions` on every SAM attention of a tower, until `undo`.

    Raises:
        ModelError: a method gives something else than its replacement.
    """

    def __init__(self, tower: nn.Module) -> None:
        found = [module for module in tower.modules() if hasattr(module, "get_rel_pos") and hasattr(module, "rel_pos_h")]
        self._placed = [(module, vars(module).get("get_rel_pos"), RelativePositions(module)) for module in found]
        for module, _, mine in self._placed:
            _check_equal(module, mine)
        for module, _, mine in self._placed:
            module.get_rel_pos = mine  # type: ignore[assignment]

    def undo(self) -> None:
        """Give every attention its method back, where nobody else has taken its place since."""
        for module, before, mine in self._placed:
            if vars(module).get("get_rel_pos") is not mine:
                continue
            if before is None:
                delattr(module, "get_rel_pos")
            else:
                module.get_rel_pos = before
        self._placed = []


@torch.no_grad()
def _check_equal(attention: nn.Module, mine: RelativePositions) -> None:
    """With the weights' own size, and with another, so that they are resized."""
    weights: Any = attention.rel_pos_h
    for size in ((len(weights) + 1) // 2, (len(weights) + 3) // 4):
        if not torch.equal(mine(size, size, weights), original(attention, "get_rel_pos")(size, size, weights)):
            kind = type(attention).__name__
            raise ModelError(f"{kind}.get_rel_pos is another one than in the tested versions of transformers.")


# --- tables ----------------------------------------------------------------------------------------------------------


class SeparatedTable(TwoViewTable):
    """[tiles, view, separator] of each image: DeepSeek-OCR 2.

    Args:
        parameters: where the separator is.
        separator: its name.
        options: see `TwoViewTable`.
    """

    def __init__(self, *views: Tiles, parameters: OwnParameters, separator: str, **options: Any) -> None:
        super().__init__(*views, **options)
        self.parameters, self._separator = parameters, separator  # behind the modules, the first of which says the dtype

    def ending(self) -> Sequence[torch.Tensor]:
        """The separator."""
        return (getattr(self.parameters, self._separator)[None],)


class LinesTable(SeparatedTable):
    """The same with tiles put together to one map, and a newline behind each of its lines: DeepSeek-OCR, Unlimited-OCR.

    The view has its newlines already (see `with_newlines`). An item's key is the grid (columns, rows) of its tiles.

    Args:
        grids: names of the inputs with the grids, and with the numbers of tiles; None where the grid (1, 1) means no tiles.
        options: see `SeparatedTable`.
    """

    def __init__(self, *views: Tiles, grids: tuple[str, str | None], **options: Any) -> None:
        self._grids, self._counts = grids
        super().__init__(*views, per_image=tuple(name for name in grids if name is not None), **options)

    def tile_count(self, key: Any) -> int:
        """Columns times rows."""
        columns, rows = key
        return int(columns * rows)

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """(columns, rows), or `NO_TILES`.

        Raises:
            InputError: a grid is not positive, or has another number of tiles than is said.
        """
        grids = host_rows(self._grids, inputs[self._grids], 2)
        for number, grid in enumerate(grids):
            if min(grid) < 1:
                raise InputError(f"grid {number} of {self._grids} is {grid}: expected columns and rows of at least 1.")
        if self._counts is None:
            return [NO_TILES if grid == (1, 1) else grid for grid in grids]
        counts = host_counts(self._counts, inputs[self._counts], least=0)
        if len(counts) != len(grids):
            raise InputError(f"{self._counts} has {len(counts)} entries and {self._grids} {len(grids)}: expected equal numbers.")
        for number, (count, (columns, rows)) in enumerate(zip(counts, grids, strict=True)):
            if count not in (0, columns * rows):
                raise InputError(f"image {number} has {count} tiles in {self._counts} and {columns} x {rows} in {self._grids}.")
        return [grid if count else NO_TILES for count, grid in zip(counts, grids, strict=True)]

    def example_key(self, tokens: int) -> Hashable | None:
        """One row of tiles."""
        count = super().example_key(tokens)
        return (count, 1) if count else None if count is None else NO_TILES

    def arrange(self, key: Any, tiles: torch.Tensor) -> torch.Tensor:
        """Lines of the whole map, from left to right through its tiles, each with a newline."""
        (columns, rows), side = key, math.isqrt(self.tiles[LOCAL].tokens)
        lines = tiles.view(rows, columns, side, side, -1).transpose(1, 2).reshape(1, rows * side, columns * side, -1)
        return with_newlines(lines, self.parameters).flatten(0, 1)


def with_newlines(maps: torch.Tensor, parameters: Any) -> torch.Tensor:
    """Maps [N, lines, columns, width] -> [N, lines * (columns + 1), width]."""
    newline = parameters.image_newline.expand(*maps.shape[:2], 1, -1)
    return torch.cat([maps, newline], dim=2).flatten(1, 2)


def _with_lines(encode: Encode, parameters: OwnParameters) -> Encode:
    """`encode` of square views, with newlines."""

    def run(entries: torch.Tensor) -> torch.Tensor:
        features = encode(entries)
        side = math.isqrt(features.shape[1])
        return with_newlines(features.unflatten(1, (side, side)), parameters)

    return run


# --- transformers ----------------------------------------------------------------------------------------------------


def bind_ocr2(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """DeepSeek-OCR 2.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields: "all" answers the tower's `forward`; None gives whole images, or the tower's main output for a bare tower.
        options: `token_range`, see `TwoViewTable` and `TileTable`.
    """
    return _bind(model, *towers, fields=fields, shrink=(3, 4), lines=False, **options)


def bind_unlimited(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """Unlimited-OCR. Arguments: see `bind_ocr2`."""
    return _bind(model, *towers, fields=fields, shrink=(5, 8), lines=True, **options)


def _bind(model: nn.Module, *towers: str, fields: str | None, shrink: tuple[int, int], lines: bool, **options: Any) -> Binding:
    tower: Any = find_module(model, *towers)
    inputs = _square(NAMES, tower.config.sam_config.image_size, shrink)
    run = original(tower, "forward")
    forward = SizedForward(
        owner=tower,
        run=lambda entries: run(entries, return_dict=True),
        inputs=inputs,
        width=lambda output: int(output.last_hidden_state.shape[-1]),
        fields=("last_hidden_state",),
    )
    owner: Any = owner_of(model, ("vision_tower", "multi_modal_projector"))
    if fields == "all" or owner is None:
        binding = bind_forwards(forward, **options)
        return Binding(table=binding.table, calls=binding.calls, switch=RelativePositionsSwitch(tower))

    projector, parameters = owner.multi_modal_projector, OwnParameters(owner)

    def encode(entries: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = projector(run(entries, return_dict=True).last_hidden_state)
        return features

    view, tile, width = view_and_tile(_with_lines(encode, parameters) if lines else encode, encode, inputs, tower)
    options |= {"modules": [tower, projector], "width": width, "parameters": parameters, "separator": "view_separator"}
    table = (
        LinesTable(view, tile, grids=("patches_grid", "num_local_patches"), **options)
        if lines
        else SeparatedTable(view, tile, per_image=("num_local_patches",), **options)
    )
    check_whole(table, owner, {"num_local_patches": [2], "patches_grid": [[2, 1]]} if lines else {"num_local_patches": [1]})
    return Binding(table=table, switch=RelativePositionsSwitch(tower))


def _square(names: tuple[str, str], side: int, shrink: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Views of the config's size; tiles have a fixed share of it in the released processors."""
    share, of = shrink
    return two_sizes(names, (side, side * share // of))


# --- the published code ----------------------------------------------------------------------------------------------


def bind_published(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """DeepSeek-OCR, which is not in transformers: `sam_model`, `vision_model`, `projector` of the published code.

    Its vision part is written out inside of the model's `forward`, image by image. What can be answered there are the calls of
    the two encoders, each with views and with tiles; `encoder_for` does a whole request at once.

    Args:
        model: the whole model.
        towers: not used; the modules are found by their names.
        fields: "all" answers `sam_model.forward` and `vision_model.forward`; None gives whole images.
        options: `token_range`, see `TwoViewTable` and `TileTable`.
    """
    owner: Any = _published(model)
    if owner is None:
        raise ModelError(f"{type(model).__name__} has no module with {', '.join(PUBLISHED_CHILDREN + PUBLISHED_PARAMETERS)}.")
    sam, clip, projector = owner.sam_model, owner.vision_model, owner.projector
    inputs = _square(PUBLISHED_NAMES, sam.img_size, (5, 8))
    run_sam, run_clip = original(sam, "forward"), original(clip, "forward")
    if fields == "all":
        return _published_calls(sam, clip, inputs, **options)

    def encode(entries: torch.Tensor) -> torch.Tensor:
        low = run_sam(entries)
        high = run_clip(entries, low)
        features: torch.Tensor = projector(torch.cat([high[:, 1:], low.flatten(2).transpose(1, 2)], dim=-1))
        return features

    parameters = OwnParameters(owner)
    view, tile, width = view_and_tile(_with_lines(encode, parameters), encode, inputs, sam)
    table = LinesTable(
        view,
        tile,
        grids=("images_spatial_crop", None),
        modules=[sam, clip, projector],
        width=width,
        parameters=parameters,
        separator="view_seperator",
        **options,
    )
    return Binding(table=table)


def _published(model: nn.Module) -> nn.Module | None:
    return owner_of(model, PUBLISHED_CHILDREN, PUBLISHED_PARAMETERS)


def _published_calls(
    sam: nn.Module, clip: nn.Module, inputs: Mapping[str, tuple[str, tuple[int, ...]]], **options: Any
) -> Binding:
    """`sam_model(x)`, and `vision_model(x, patch_embeds)` with what that returned."""
    run_sam, run_clip = original(sam, "forward"), original(clip, "forward")
    low = SizedForward(
        owner=sam,
        run=run_sam,
        inputs={f"sam_{path}": entry for path, entry in inputs.items()},
        width=lambda output: int(output.shape[1]),
        takes=("x",),
    )
    _check_batch_only(sam, clip, inputs[LOCAL][1])
    embedded = {}
    for path, (name, shape) in inputs.items():
        features = on_one_tile(lambda **pixels: run_sam(*pixels.values()), sam, {name: shape})
        embedded[f"vision_{path}"] = (f"{name}_embeds", tuple(features.shape[1:]))
    high = SizedForward(
        owner=clip,
        run=lambda embeds: run_clip(embeds, embeds),  # of `x` only the batch size is read
        inputs=embedded,
        width=lambda output: int(output.shape[2]),
        takes=("x", "patch_embeds"),
        refuse=_of_different_numbers,
    )
    return bind_forwards(low, high, **options)


@torch.no_grad()
def _check_batch_only(sam: nn.Module, clip: nn.Module, tile: tuple[int, ...]) -> None:
    """Raise `ModelError` where the second encoder looks at its pixels, beside the embeddings of them."""
    if comparable(clip):
        pixels, run = noise(sam, 1, *tile), original(clip, "forward")
        embeds = original(sam, "forward")(pixels)
        check_reentry(clip, run(embeds, embeds), run(pixels, embeds))


def _of_different_numbers(x: Any, embeds: torch.Tensor) -> str | None:
    if isinstance(x, torch.Tensor) and x.dim() and len(x) == len(embeds):
        return None
    return "pixels and embeddings of different numbers"


_TWO_SIZES = (
    "Views have the side of the vision config and tiles {} of it, as in the released model; others run the model's own code."
)
_EAGER = (
    'With attention "eager" the second encoder makes its mask from a host value, which mode="eager" cannot capture: use "sdpa".'
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="DeepSeek-OCR",
        model_types=(),
        classes=(),
        binder=bind_published,
        buffers=("images_crop", "images_crop_embeds", "pixel_values", "pixel_values_embeds"),
        paths=(GLOBAL, LOCAL),
        tokens="273 + 100 P + 10 rows for P tiles (budgets count 272 and 100 P)",
        remote_code=True,
        limits=(
            "`accelerate` answers `sam_model.forward` and `vision_model.forward`, which are called image by image; `encoder_for` "
            "encodes whole requests.",
            "`infer` of the published code runs under autocast, where its own code answers: call `generate` without it.",
            _TWO_SIZES.format("5/8"),
        ),
        matches=lambda model: _published(model) is not None,
    ),
    Architecture(
        name="DeepSeek-OCR 2",
        model_types=("deepseek_ocr2", "deepseek_ocr2_vision"),
        classes=("DeepseekOcr2VisionModel",),
        binder=bind_ocr2,
        buffers=("pixel_values", "pixel_values_local"),
        paths=(GLOBAL, LOCAL),
        tokens="257 + 144 P for P tiles (budgets count 256 and 144 P)",
        limits=(_TWO_SIZES.format("3/4"), _EAGER),
    ),
    Architecture(
        name="Unlimited-OCR",
        model_types=("unlimited_ocr", "unlimited_ocr_vision"),
        classes=("UnlimitedOcrVisionModel",),
        binder=bind_unlimited,
        buffers=("pixel_values", "pixel_values_local"),
        paths=(GLOBAL, LOCAL),
        tokens="273 + 100 P + 10 rows for P tiles (budgets count 272 and 100 P)",
        versions=("5.24",),
        limits=(_TWO_SIZES.format("5/8"),),
    ),
)
