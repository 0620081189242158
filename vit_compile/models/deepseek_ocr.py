"""DeepSeek-OCR, DeepSeek-OCR 2, Unlimited-OCR: a global view and local tiles."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
