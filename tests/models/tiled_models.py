"""Tiny models of tiles with random weights: 16 x 16 pixels, 16 patches, 4 tokens (16 for LLaVA)."""

from __future__ import annotations

from typing import Any

from tests.models.parity import seeded
from tests.models.reference.internvl_chat import internvl_chat

IMAGE_TOKEN = 3
SIDE, WIDTH = 16, 32
VOCABULARY = 64


def _vision(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return {**sizes, "image_size": SIDE, "patch_size": 4, **more}


def _text(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return {**sizes, **heads, "max_position_embeddings": 512, "pad_token_id": 0, **more}


def tiny_internvl(**more: Any) -> Any:
    """InternVL of transformers: class token, pixel shuffle by 2, projector."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.internvl import InternVLVisionConfig

    vision = InternVLVisionConfig(**_vision(image_size=[SIDE, SIDE], patch_size=[4, 4]))
    text = _text(model_type="qwen2")
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, downsample_ratio=0.5, **more)
    return seeded(lambda: InternVLForConditionalGeneration(config))


def tiny_internvl_chat(select_layer: int = -1, version: str = "v2") -> Any:
    """InternVLChat, as in the remote code."""
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "mlp": 64, "image": SIDE, "patch": 4, "width": WIDTH}
    return seeded(lambda: internvl_chat(**sizes, select_layer=select_layer, version=version))


def tiny_gemma3() -> Any:
    """Gemma 3: SigLIP, average pooling to 4 tokens, projection."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        vision_config=_vision(vision_use_head=False),
        text_config=_text(sliding_window=64),
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=4,
        eoi_token_index=5,
    )
    return seeded(lambda: Gemma3ForConditionalGeneration(config))


def tiny_llama4() -> Any:
    """Llama 4: class token at the end, complex rotary positions, pixel shuffle and adapter inside, projector outside."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    widths = {"vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24, "pixel_shuffle_ratio": 0.5}
    config = Llama4Config(
        vision_config=_vision(intermediate_size=128, **widths),
        text_config=_text(intermediate_size_mlp=48, num_local_experts=2),
        image_token_index=IMAGE_TOKEN,
        boi_token_index=4,
        eoi_token_index=5,
    )
    return seeded(lambda: Llama4ForConditionalGeneration(config))


def tiny_llava(**more: Any) -> Any:
    """LLaVA: CLIP, the hidden states before the last layer without the class token, projector."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision, text = CLIPVisionConfig(**_vision()), _text(model_type="llama")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, **more)
    return seeded(lambda: LlavaForConditionalGeneration(config))


def tiny_idefics3() -> Any:
    """Idefics3: SigLIP with positions by the mask, a connector with pixel shuffle by 2."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    text = _text(model_type="llama")
    config = Idefics3Config(vision_config=_vision(), text_config=text, scale_factor=2, image_token_id=IMAGE_TOKEN, pad_token_id=0)
    return seeded(lambda: Idefics3ForConditionalGeneration(config))


def tiny_smolvlm() -> Any:
    """SmolVLM: as Idefics3."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    text = _text(model_type="llama")
    config = SmolVLMConfig(vision_config=_vision(), text_config=text, scale_factor=2, image_token_id=IMAGE_TOKEN, pad_token_id=0)
    return seeded(lambda: SmolVLMForConditionalGeneration(config))
