"""InternVL, Gemma 3, Llama 4, LLaVA, Idefics3, SmolVLM: images and tiles of one size."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
