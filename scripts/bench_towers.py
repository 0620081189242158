"""The towers of the benchmarks, at their real widths (`small`: tiny ones, for trying a script out on a CPU)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast_parameters(model: nn.Module, device: str, dtype: torch.dtype) -> Any:
    """To the device; parameters only to `dtype`, since rotary tables lose too much in bfloat16."""
    model = model.eval().to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def build_qwen3_vl(attention: str, *, small: bool) -> nn.Module:
    """The vision tower of Qwen3-VL-8B, random weights: patches of 16, merge 2."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes: dict[str, Any] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    if small:
        sizes = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 48}
        sizes |= {"deepstack_visual_indexes": [1]}
    config = Qwen3VLVisionConfig(patch_size=16, num_position_embeddings=2304, **sizes)
    config._attn_implementation = attention
    return Qwen3VLVisionModel(config)


def build_qwen2_5_vl(attention: str, *, small: bool) -> nn.Module:
    """The vision tower of Qwen2.5-VL-7B, random weights: patches of 14, merge 2, windows of 8 x 8 patches."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    sizes: dict[str, Any] = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    if small:
        sizes = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 48}
        sizes |= {"fullatt_block_indexes": [1]}
    config = Qwen2_5_VLVisionConfig(patch_size=14, window_size=112, **sizes)
    config._attn_implementation = attention
    return Qwen2_5_VisionTransformerPretrainedModel(config)
