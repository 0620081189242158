"""SigLIP 2 (NaFlex): padded batches of patches."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
