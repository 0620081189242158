"""Tiny whole vision-language models with a prompt."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.parity import random, seeded

IMAGE, VIDEO, START, END = 150, 151, 152, 153


def qwen3_vl_example() -> tuple[Any, dict[str, Any]]:
    """A Qwen3-VL with random weights, and inputs of two images of different sizes among text, as its processor makes them."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rotary = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
    text = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12}
    vision = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 48, "patch_size": 4}
    config = Qwen3VLConfig(
        text_config={**text, "num_key_value_heads": 2, "vocab_size": 200, "rope_parameters": rotary},
        vision_config={**vision, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = seeded(lambda: Qwen3VLForConditionalGeneration(config))
    ids = torch.tensor([[1, 2, START, *[IMAGE] * 12, END, 5, START, *[IMAGE] * 4, END, 7]])
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": random(64, 96),
        "image_grid_thw": torch.tensor([[1, 8, 6], [1, 4, 4]]),
    }
