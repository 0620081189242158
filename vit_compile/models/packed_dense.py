"""Dense ViTs (DINOv2, DINOv3, SigLIP, CLIP, ViT) with images at their native sizes in one packed call."""

from __future__ import annotations

from vit_compile.models.architecture import Architecture

ROWS: tuple[Architecture, ...] = ()
