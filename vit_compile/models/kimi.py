"""Kimi-K2.5 and Kimi-VL (MoonViT)."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
