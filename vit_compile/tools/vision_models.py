"""Loads a Hugging Face vision model and makes one plain module of it: pixels in, tokens and a pooled vector out.

What is supported is found out, not listed: a tower takes one tensor `pixel_values` [N, 3, H, W], has a square patch,
gives `last_hidden_state` [N, L, D], and gives the same numbers twice. Whether it takes any size or only its own is tried
with one tiny image. Towers that take packed patches (Qwen-VL and the like) are refused: they need their own adapter.
"""

from __future__ import annotations

import gc
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit_compile.errors import ModelError, OptionError
from vit_compile.tools.images import Normalization, PatchGrid, fit_grid

SUPPORTED = (
    "supported are transformers vision models that take one image tensor [N, 3, H, W] and have a square patch "
    "(DINOv2, DINOv3, ViT, DeiT, BEiT, SigLIP, CLIP and the like), alone or as the .vision_model of a dual model"
)
_PACKED_INPUTS = ("grid_thw", "image_grid_thw", "spatial_shapes", "pixel_attention_mask", "image_sizes", "pixel_position_ids")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_OPENAI_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_FAMILY_STATISTICS = {
    "clip": _OPENAI_CLIP,
    "altclip": _OPENAI_CLIP,
    "chinese_clip": _OPENAI_CLIP,
    "metaclip_2": _OPENAI_CLIP,
    "owlvit": _OPENAI_CLIP,
    "owlv2": _OPENAI_CLIP,
    "siglip": _HALF,
    "vit": _HALF,
    "beit": _HALF,
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class VisionEncoder(nn.Module):
    """A tower behind one signature: `pixel_values` [N, 3, H, W] -> (tokens [N, L, D], pooled [N, D])."""

    def __init__(self, tower: nn.Module, *, pooling: str, interpolate: bool) -> None:
        super().__init__()
        self.tower = tower
        self.pooling = pooling
        self.extra_arguments = {"interpolate_pos_encoding": True} if interpolate else {}

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and pooled vector of a batch of images of one size."""
        return self.of_output(self.tower(pixel_values=pixel_values, **self.extra_arguments))

    def of_output(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from what the tower returned."""
        tokens = output.last_hidden_state
        if self.pooling == "pooler_output":
            return tokens, output.pooler_output
        return tokens, tokens[:, 0] if self.pooling == "cls" else tokens.mean(dim=1)


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A loaded vision encoder and what is needed to feed it."""

    name: str
    """Folder or hub name, as given."""

    family: str
    """The tower's `model_type`."""

    encoder: VisionEncoder
    """In eval mode, without gradients, on its device."""

    patch_side: int
    """Pixels."""

    fixed_grid: PatchGrid | None
    """The only size that the model takes; None: any multiple of the patch."""

    normalization: Normalization
    device: torch.device
    dtype: torch.dtype

    def grid(self, width_pixels: int, height_pixels: int, *, max_patches: int) -> PatchGrid:
        """The patch grid for a picture: native aspect ratio, or the model's fixed one."""
        if self.fixed_grid is not None:
            return self.fixed_grid
        return fit_grid(width_pixels, height_pixels, patch_side=self.patch_side, max_patches=max_patches)


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:1"; an error when it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"device {name!r}: expected auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device {name!r}: expected auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise OptionError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here.")
    return device


def load_vision_model(name: str, *, device: torch.device, dtype: torch.dtype) -> VisionModel:
    """Loads a vision tower from a local folder or the hub.

    Args:
        name: a folder written by `save_pretrained`, or a hub name.
        device, dtype: where and in what precision the weights live.
    Raises:
        ModelError: nothing there, weights missing, or not a model that these commands can run.
    """
    config = _load_config(name)
    _check_structure(name, config)
    tower, missing = _load_tower(name, dtype)
    tower_config: Any = tower.config
    unusable = sorted(key for key in missing if "pooler" not in key and "head" not in key.split("."))
    if unusable:
        raise ModelError(f"{name}: the checkpoint lacks {len(unusable)} of the tower's weights, for example {unusable[0]}.")
    tower.to(device).eval().requires_grad_(False)
    patch_side = _square_side(tower_config.patch_size)
    assert patch_side is not None, "the structure check looks at the patch size"
    encoder, fixed_grid = _probe(name, tower, patch_side, pooler_is_trained=not missing, device=device, dtype=dtype)
    return VisionModel(
        name=name,
        family=tower_config.model_type,
        encoder=encoder,
        patch_side=patch_side,
        fixed_grid=fixed_grid,
        normalization=_normalization(name, tower_config.model_type),
        device=device,
        dtype=dtype,
    )


def _load_config(name: str) -> Any:
    from transformers import AutoConfig

    if not Path(name).is_dir() and not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{name}: no such model folder.")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{name} is not a model folder: it has no config.json.")
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # the loader raises many kinds, and a user can act on the text only
        raise ModelError(f"{name}: cannot read the model's configuration ({_first_line(error)})") from error


def _check_structure(name: str, config: Any) -> None:
    """Refuses what is not a plain image tower, from a copy without storage, before any weights are read."""
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            tower = _vision_part(AutoModel.from_config(config))
    except Exception as error:
        raise ModelError(f"{name}: transformers cannot build {config.model_type!r} ({_first_line(error)})") from error
    parameters = inspect.signature(tower.forward).parameters
    packed = [parameter for parameter in _PACKED_INPUTS if parameter in parameters]
    patch_side = _square_side(getattr(tower.config, "patch_size", None))
    if packed:
        problem = f"takes packed patches ({packed[0]})"
    elif "pixel_values" not in parameters:
        problem = "does not take pixel_values"
    elif patch_side is None:
        problem = "has no square patch_size"
    elif getattr(tower.config, "num_channels", 3) != 3:
        problem = f"takes {tower.config.num_channels} channels"
    else:
        return
    raise ModelError(f"{name} ({config.model_type}) {problem}: {SUPPORTED}.")


def _load_tower(name: str, dtype: torch.dtype) -> tuple[Any, set[str]]:
    """The tower and the names of its weights that the checkpoint lacks."""
    from transformers import AutoModel

    try:
        model, info = AutoModel.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except Exception as error:
        raise ModelError(f"{name}: cannot load the weights ({_first_line(error)})") from error
    tower = _vision_part(model)
    missing = set(info["missing_keys"])
    if tower is not model:
        missing = {key for key in missing if key.startswith("vision_model.")}
        del model
        gc.collect()
    return tower, missing


def _vision_part(model: Any) -> Any:
    return model.vision_model if hasattr(model, "text_model") and hasattr(model, "vision_model") else model


def _square_side(value: Any) -> int | None:
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else None


def _probe(
    name: str, tower: Any, patch_side: int, *, pooler_is_trained: bool, device: torch.device, dtype: torch.dtype
) -> tuple[VisionEncoder, PatchGrid | None]:
    """Runs the tower on a tiny image to learn its pooling and whether it takes other sizes than its own."""
    interpolate = "interpolate_pos_encoding" in inspect.signature(tower.forward).parameters
    encoder = VisionEncoder(tower, pooling="cls", interpolate=interpolate)
    tiny = PatchGrid(4, 6, patch_side)  # enough patches that two random masks of them never coincide
    fixed_grid: PatchGrid | None = None
    try:
        first = _tower_output(encoder, tiny, device, dtype)
    except (ValueError, RuntimeError, AssertionError) as refusal:  # a position table that cannot be interpolated
        fixed_grid = _own_grid(name, tower.config, patch_side, refusal)
        try:
            first = _tower_output(encoder, fixed_grid, device, dtype)
        except Exception as error:
            raise ModelError(f"{name}: a forward pass fails ({_first_line(error)}); {SUPPORTED}.") from error
    tokens = getattr(first, "last_hidden_state", None)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 3:
        raise ModelError(f"{name}: the output has no last_hidden_state [N, L, D]; {SUPPORTED}.")
    again = _tower_output(encoder, fixed_grid or tiny, device, dtype).last_hidden_state
    if tokens.shape != again.shape or not torch.equal(tokens, again):
        raise ModelError(f"{name}: two runs on one image differ, so there is nothing to compare with; {SUPPORTED}.")
    if pooler_is_trained and getattr(first, "pooler_output", None) is not None:
        encoder.pooling = "pooler_output"
    elif not any(key.endswith(("cls_token", "class_embedding")) for key, _ in tower.named_parameters()):
        encoder.pooling = "mean"
    return encoder, fixed_grid


def _tower_output(encoder: VisionEncoder, grid: PatchGrid, device: torch.device, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(1, 3, grid.height, grid.width, generator=generator).to(device, dtype)
    with torch.no_grad():
        return encoder.tower(pixel_values=pixel_values, **encoder.extra_arguments)


def _own_grid(name: str, config: Any, patch_side: int, refusal: Exception) -> PatchGrid:
    size = getattr(config, "image_size", None)
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    if not isinstance(height, int) or not isinstance(width, int):
        raise ModelError(f"{name}: takes no other image sizes and does not state its own ({_first_line(refusal)})") from refusal
    return PatchGrid(height // patch_side, width // patch_side, patch_side)


def _normalization(name: str, family: str) -> Normalization:
    """Statistics of the model's own preprocessor, else of its family, else of ImageNet."""
    for filename in ("preprocessor_config.json", "processor_config.json"):
        path = _model_file(name, filename)
        if path is None:
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({_first_line(error)})") from error
        settings = settings.get("image_processor", settings) if isinstance(settings, dict) else {}
        if settings.get("do_normalize") is False:
            return Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), f"{filename} (none)")
        if "image_mean" in settings and "image_std" in settings:
            return Normalization(_three(path, settings["image_mean"]), _three(path, settings["image_std"]), filename)
    for prefix, (mean, std) in _FAMILY_STATISTICS.items():
        if family == prefix or family.startswith(prefix + "_"):
            return Normalization(mean, std, f"the {prefix} family's default")
    return Normalization(*_IMAGENET, "ImageNet's default")


def _three(path: Path, values: Any) -> tuple[float, float, float]:
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"{path}: image_mean and image_std must be three numbers each, not {values!r}.")
    return float(values[0]), float(values[1]), float(values[2])


def _model_file(name: str, filename: str) -> Path | None:
    if Path(name).is_dir():
        local = Path(name) / filename
        return local if local.is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(name, filename, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no network and not in the cache: the family's default is used and reported
        return None
    return Path(found) if found else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
