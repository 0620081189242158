"""MiniCPM-V 4.6."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
