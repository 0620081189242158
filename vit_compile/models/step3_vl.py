"""Step3-VL and Step3.7: a global view and local patches."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
