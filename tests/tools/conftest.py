"""Tiny vision models on disk and generated pictures, shared by the tools' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

transformers = pytest.importorskip("transformers", reason="the tools load models with transformers")

TINY_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
TINY_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compiled code of one test does not count against the next one's recompile limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def dinov2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny DINOv2: any size, class token, patch 14."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dinov2")
    transformers.Dinov2Model(transformers.Dinov2Config(**TINY_TOWER)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def siglip_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny SigLIP with its text half."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("siglip")
    config = transformers.SiglipConfig(vision_config={**TINY_TOWER, "intermediate_size": 48}, text_config=TINY_TEXT)
    transformers.SiglipModel(config).save_pretrained(folder)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth random RGB picture."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def image_files(tmp_path: Path) -> list[str]:
    """Pictures of four sizes, one of them larger than 16 patches, two under one file name."""
    (tmp_path / "more").mkdir()
    files = []
    for index, (name, width, height) in enumerate(
        (("a.png", 56, 42), ("b.jpg", 28, 70), ("c.png", 300, 200), ("more/a.png", 42, 42))
    ):
        picture(width, height, index).save(tmp_path / name)
        files.append(str(tmp_path / name))
    return files
