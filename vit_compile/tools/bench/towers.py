"""The towers of the benchmark: released vision sizes with random weights, tiny ones of the same kind, or a model folder.

Parameters are cast to the dtype, and nothing else: rotary tables stay in float32, as checkpoints load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit_compile.errors import ModelError, OptionError
from vit_compile.models.binding import find_module
from vit_compile.models.packed_dense import TABLES
from vit_compile.models.registry import architecture_of
from vit_compile.options import did_you_mean
from vit_compile.planning.traffic import Geometry
from vit_compile.planning.units import Grid

PACKED_MODULE = "vit_compile.models.packed_grid"
MAX_TOKENS = {"packed": 16384, "dense": 8192}
"""Largest image, in output tokens: what processors of packed towers allow; dense towers have no rule of their own."""
SMALL_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower on its device, in eval mode, without gradients."""

    name: str
    """For titles."""

    key: str
    """As the command line names it."""

    kind: str
    """"packed": patches of all images end to end, with grids; "dense": images [N,3,H,W]."""

    module: Any
    geometry: Geometry
    device: torch.device
    dtype: torch.dtype
    small: bool

    interpolates: bool = False
    """A dense tower whose forward takes `interpolate_pos_encoding`."""

    @property
    def row_width(self) -> int:
        """Values in a row of a packed tower's pixels."""
        config = self.module.config
        width: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return width

    def tokens(self, grid: Grid) -> int:
        """Output tokens of an image or clip; a dense tower gives each frame tokens of its own."""
        t, h, w = grid
        return t * (h * w // self.geometry.merge_size**2 + self.geometry.extra_tokens)


def load_tower(
    key: str, *, small: bool, weights: Path | None, model: str | None, device: torch.device, dtype: torch.dtype
) -> Tower:
    """The tower that the command line asks for.

    Raises:
        OptionError: an unknown name.
        ModelError: a folder that cannot be loaded, or whose model is neither a packed nor a dense tower.
    """
    if model is not None:
        return _finished(_from_folder(model), Path(model).name, Path(model).name, device, dtype, small=False)
    if key not in TOWERS:
        raise OptionError(f"tower {key!r}.{did_you_mean(key, TOWERS)} Known are {', '.join(TOWERS)}.")
    name, build = TOWERS[key]
    if weights is not None:
        module, origin = _from_folder(str(weights)), f"weights of {weights.name}"
    else:
        torch.manual_seed(0)
        with torch.device(device):
            module, origin = build(small), "random weights"
    return _finished(module, f"{name}{', tiny' if small else ''}, {origin}", key, device, dtype, small=small)


def _from_folder(folder: str) -> nn.Module:
    from transformers import AutoModel

    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json.")
    try:
        found: nn.Module = AutoModel.from_pretrained(folder)
    except Exception as error:  # the loader raises many kinds, and a user can act on the text only
        raise ModelError(f"{folder}: cannot load the model ({str(error).splitlines()[0]})") from error
    return found


def _finished(model: nn.Module, name: str, key: str, device: torch.device, dtype: torch.dtype, *, small: bool) -> Tower:
    row = architecture_of(model)
    module: Any = find_module(model, *row.classes)
    kind = _kind(row.binder.__module__, type(module).__name__)
    if kind is None:
        raise ModelError(f"{row.name}: the benchmark has inputs for packed towers with grids and for dense ViTs only.")
    module.config._attn_implementation = "sdpa"
    module.eval().requires_grad_(False).to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    limit = SMALL_MAX_TOKENS if small else MAX_TOKENS[kind]
    geometry, interpolates = (_packed_geometry if kind == "packed" else _dense_geometry)(module, limit)
    return Tower(name, key, kind, module, geometry, device, dtype, small, interpolates)


def _kind(adapter: str, tower: str) -> str | None:
    if adapter == PACKED_MODULE:
        return "packed"
    return "dense" if tower in TABLES else None


def _packed_geometry(module: Any, limit: int) -> tuple[Geometry, bool]:
    config = module.config
    sizes = {"merge_size": config.spatial_merge_size, "temporal_patch_size": config.temporal_patch_size}
    return Geometry(patch_size=config.patch_size, max_tokens=limit, **sizes), False


def _dense_geometry(module: Any, limit: int) -> tuple[Geometry, bool]:
    import inspect

    table = TABLES[type(module).__name__](module)
    if table.switch is not None:
        table.switch.undo()
    height, width = table.patch
    if height != width:
        raise ModelError(f"{type(module).__name__} has patches of {height} x {width} pixels: the benchmark takes square ones.")
    interpolates = "interpolate_pos_encoding" in inspect.signature(module.forward).parameters
    smallest = table.least**2
    return Geometry(patch_size=height, min_tokens=smallest, max_tokens=limit, extra_tokens=table.prefix_tokens), interpolates


def _qwen3_vl(small: bool) -> nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}
    sizes |= {"num_heads": 16, "deepstack_visual_indexes": [8, 16, 24]}
    if small:
        sizes = {**_TINY_PACKED, "deepstack_visual_indexes": [0]}
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(patch_size=16, num_position_embeddings=2304, **sizes))


def _qwen2_5_vl(small: bool) -> nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    sizes: dict[str, Any] = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    sizes |= {"num_heads": 16, "fullatt_block_indexes": [7, 15, 23, 31]}
    if small:
        sizes = {**_TINY_PACKED, "fullatt_block_indexes": [1]}
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(patch_size=14, window_size=112, **sizes))


def _dinov2_s(small: bool) -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    sizes = _TINY_DENSE if small else {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12}
    return Dinov2Model(Dinov2Config(image_size=518, patch_size=14, **sizes))


def _siglip(small: bool) -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes: dict[str, Any] = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    if small:
        sizes = {**_TINY_DENSE, "intermediate_size": 128}
    return SiglipVisionModel(SiglipVisionConfig(image_size=384, patch_size=14, **sizes))


_TINY_PACKED: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 48,
}
_TINY_DENSE: Mapping[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}

TOWERS: Mapping[str, tuple[str, Callable[[bool], nn.Module]]] = {
    "qwen3-vl-8b": ("Qwen3-VL-8B vision", _qwen3_vl),
    "qwen2.5-vl-7b": ("Qwen2.5-VL-7B vision", _qwen2_5_vl),
    "dinov2-s": ("DINOv2 ViT-S/14", _dinov2_s),
    "siglip-so400m": ("SigLIP so400m-patch14-384", _siglip),
}
