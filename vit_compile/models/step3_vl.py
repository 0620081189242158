"""Step3-VL and Step3.7: a global view and local tiles.

`accelerate` answers the tower's `forward`, which the models call once with all views and once with all tiles. `encoder_for` gives
whole images: tiles, then the view.

Requests for `encoder_for` (C channels; sides are those of the released models):

- Step3.7: `pixel_values` [n, C, 728, 728], `pixel_values_local` [all tiles, C, 504, 504], `num_local_patches` [n].
- Step3-VL: `pixel_values` [n, C, 728, 728], `patch_pixel_values` [all tiles, C, 504, 504], `num_patches` [n].
- A tower without its model: `pixel_values` and `pixel_values_local`; every view and every tile is an item.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vit_compile.errors import ModelError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, check_reentry, comparable, find_module, noise, original, owner_of
from vit_compile.models.tiles import on_one_tile
from vit_compile.models.two_views import (
    GLOBAL,
    LOCAL,
    SizedForward,
    TwoViewTable,
    bind_forwards,
    check_whole,
    two_sizes,
    view_and_tile,
)

NAMES = ("pixel_values", "pixel_values_local")
PUBLISHED_NAMES = ("pixel_values", "patch_pixel_values")
PUBLISHED_CHILDREN = ("vision_model", "vit_downsampler", "vit_downsampler2", "vit_large_projector")
CLASS_TOKENS = 4
"""Of the published vision model, before its patches."""


def bind_step3p7(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """Step3.7.

    Args:
        model: a whole model, or its tower.
        towers: class names of the towers.
        fields: "all" answers the tower's `forward`; None gives whole images, or the tower's main output for a bare tower.
        options: `token_range`, see `TwoViewTable` and `TileTable`.

    Raises:
        ModelError: the tower's forward is another one than in the tested versions of transformers.
    """
    tower: Any = find_module(model, *towers)
    inputs = two_sizes(NAMES, _sides(tower.config))
    forward = SizedForward(
        owner=tower,
        run=_reentered(tower, inputs[LOCAL]),
        inputs=inputs,
        width=lambda output: int(output.last_hidden_state.shape[-1]),
        fields=("last_hidden_state",),
    )
    owner: Any = owner_of(model, ("vision_model", "multi_modal_projector"))
    if fields == "all" or owner is None:
        return bind_forwards(forward, **options)
    projector = owner.multi_modal_projector

    def encode(entries: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = projector(forward.run(entries).last_hidden_state)
        return features

    view, tile, width = view_and_tile(encode, encode, inputs, tower)
    table = TwoViewTable(view, tile, per_image=("num_local_patches",), modules=[tower, projector], width=width, **options)
    check_whole(table, owner, {"num_local_patches": [1]})
    return Binding(table=table)


def _sides(config: Any) -> tuple[int, int]:
    """Views of the config's size; tiles have a fixed share of it in the released processors: 504 of 728."""
    side: int = config.image_size
    return side, side * 9 // 13


def _reentered(tower: Any, tile: tuple[str, tuple[int, ...]]) -> Callable[[torch.Tensor], Any]:
    """The tower by its parts: its own forward makes positions from a tensor that it reads on the host.

    It is compared with the tower's own forward once, on a tile.
    """
    kind = type(on_one_tile(lambda **entries: original(tower, "forward")(*entries.values()), tower, dict([tile])))

    def run(entries: torch.Tensor) -> Any:
        patch = tower.embeddings.patch_size
        rows, columns = entries.shape[-2] // patch, entries.shape[-1] // patch
        hidden = tower.pre_layernorm(tower.embeddings(entries, interpolate_pos_encoding=True))
        positions = torch.cartesian_prod(*(torch.arange(count, device=entries.device) for count in (rows, columns)))
        rotary = tower.rotary_emb(hidden, positions)
        for layer in tower.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        maps = tower.downsampler2(tower.downsampler1(hidden.transpose(1, 2).unflatten(2, (rows, columns))))
        return kind(last_hidden_state=maps.flatten(2).transpose(1, 2))

    if comparable(tower):
        example = noise(tower, 1, *tile[1])
        with torch.no_grad():
            check_reentry(tower, run(example).last_hidden_state, original(tower, "forward")(example).last_hidden_state)
    return run


def bind_published(model: nn.Module, *towers: str, fields: str | None, **options: Any) -> Binding:
    """Step3-VL, which is not in transformers: `vision_model`, two downsamplers and `vit_large_projector` of the published code.

    Args:
        model: the whole model.
        towers: not used; the modules are found by their names.
        fields: "all" answers `vision_model.forward`; None gives whole images.
        options: `token_range`, see `TwoViewTable` and `TileTable`.
    """
    owner: Any = _published(model)
    if owner is None:
        raise ModelError(f"{type(model).__name__} has no module with {', '.join(PUBLISHED_CHILDREN)}.")
    tower, projector = owner.vision_model, owner.vit_large_projector
    run = original(tower, "forward")
    inputs = two_sizes(PUBLISHED_NAMES, _sides(tower.config))
    if fields == "all":
        return bind_forwards(
            SizedForward(owner=tower, run=run, inputs=inputs, width=lambda output: int(_main(output).shape[-1])), **options
        )

    def encode(entries: torch.Tensor) -> torch.Tensor:
        hidden = _main(run(entries))[:, CLASS_TOKENS:]
        side = math.isqrt(hidden.shape[1])
        maps = owner.vit_downsampler2(owner.vit_downsampler(hidden.transpose(1, 2).unflatten(2, (side, side))))
        features: torch.Tensor = projector(maps.flatten(2).transpose(1, 2))
        return features

    view, tile, width = view_and_tile(encode, encode, inputs, tower)
    modules = [tower, owner.vit_downsampler, owner.vit_downsampler2, projector]
    return Binding(table=TwoViewTable(view, tile, per_image=("num_patches",), modules=modules, width=width, **options))


def _main(output: Any) -> torch.Tensor:
    """A tensor, or the first of several."""
    main: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return main


def _published(model: nn.Module) -> nn.Module | None:
    return owner_of(model, PUBLISHED_CHILDREN)


_TWO_SIZES = (
    "Views have the side of the vision config and tiles 9/13 of it, as in the released model; others run the model's own code."
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        name="Step3-VL",
        model_types=(),
        classes=(),
        binder=bind_published,
        buffers=("patch_pixel_values", "pixel_values"),
        paths=(GLOBAL, LOCAL),
        tokens="169 + 81 P for P tiles",
        remote_code=True,
        limits=(
            _TWO_SIZES,
            "`accelerate` answers `vision_model.forward`; its budgets count that module's own rows (2708 and 1300).",
            "Step3-VL-10B has its downsamplers inside of its vision model, and is not this one.",
        ),
        matches=lambda model: _published(model) is not None,
    ),
    Architecture(
        name="Step3.7",
        model_types=("step3p7", "step3p5_vision"),
        classes=("Step3p7VisionModel",),
        binder=bind_step3p7,
        buffers=("pixel_values", "pixel_values_local"),
        paths=(GLOBAL, LOCAL),
        tokens="169 + 81 P for P tiles",
        limits=(_TWO_SIZES,),
    ),
)
