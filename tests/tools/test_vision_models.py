"""Loading towers: what is found out about them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from vit_compile.errors import ModelError, OptionError
from vit_compile.tools.images import PatchGrid
from vit_compile.tools.vision_models import VisionModel, choose_device, load_vision_model

TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
CPU = torch.device("cpu")


def load(folder: Path | str) -> VisionModel:
    """The model in a folder, in float32 on the CPU."""
    return load_vision_model(str(folder), device=CPU, dtype=torch.float32)


class FixedConfig(transformers.PretrainedConfig):
    model_type = "vit_compile_test_fixed"

    def __init__(self, image_size: int = 28, patch_size: int = 14, **rest: Any) -> None:
        super().__init__(**rest)
        self.image_size, self.patch_size = image_size, patch_size


class FixedTower(transformers.PreTrainedModel):
    config_class = FixedConfig
    main_input_name = "pixel_values"

    def __init__(self, config: FixedConfig) -> None:
        super().__init__(config)
        self.projection = nn.Conv2d(3, 8, config.patch_size, config.patch_size)
        self.positions = nn.Parameter(torch.randn((config.image_size // config.patch_size) ** 2, 8))
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.projection(pixel_values).flatten(2).transpose(1, 2) + self.positions)


transformers.AutoConfig.register(FixedConfig.model_type, FixedConfig)
transformers.AutoModel.register(FixedConfig, FixedTower)


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [
        ("Dinov2", "pooler_output"),
        ("Dinov2WithRegisters", "pooler_output"),
        ("DINOv3ViT", "pooler_output"),
        ("ViT", "pooler_output"),
    ],
)
def test_towers_of_any_size(tmp_path: Path, architecture: str, pooling: str) -> None:
    """Towers that interpolate their positions, or rotate, take any multiple of the patch."""
    config = getattr(transformers, f"{architecture}Config")(**TOWER)
    getattr(transformers, f"{architecture}Model")(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.fixed_grid is None
    assert model.encoder.pooling == pooling
    assert not any(parameter.requires_grad for parameter in model.encoder.parameters())
    tokens, pooled = model.encoder(torch.randn(1, 3, 28, 70))
    assert tokens.shape[1] >= 10
    assert pooled.shape == (1, 32)


def test_dual_model_gives_its_vision_half(siglip_dir: Path) -> None:
    """Of a model with text and vision only the vision tower is used, with its own pooled output."""
    model = load(siglip_dir)
    assert model.family == "siglip_vision_model"
    assert model.encoder.pooling == "pooler_output"
    assert model.normalization.mean == (0.5, 0.5, 0.5)
    assert not any("text" in name for name, _ in model.encoder.named_parameters())


def test_tower_without_class_token_is_averaged(tmp_path: Path) -> None:
    """No pooler and no class token: the pooled vector is the mean over tokens."""
    transformers.IJepaModel(transformers.IJepaConfig(**TOWER, intermediate_size=48)).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.encoder.pooling == "mean"
    tokens, pooled = model.encoder(torch.randn(1, 3, 28, 28))
    torch.testing.assert_close(pooled, tokens.mean(dim=1))


def test_untrained_pooler_is_not_used(tmp_path: Path) -> None:
    """A classifier's checkpoint has no pooler: its random stand-in is ignored for the class token."""
    transformers.ViTForImageClassification(transformers.ViTConfig(**TOWER, intermediate_size=48)).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.encoder.pooling == "cls"
    tokens, pooled = model.encoder(torch.randn(1, 3, 28, 28))
    assert torch.equal(pooled, tokens[:, 0])


def test_fixed_position_table(tmp_path: Path) -> None:
    """A tower that refuses other sizes gets its own one for every picture."""
    FixedTower(FixedConfig()).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.fixed_grid == PatchGrid(2, 2, 14)
    assert model.grid(1000, 200, max_patches=64) == PatchGrid(2, 2, 14)
    assert model.encoder.pooling == "mean"


def test_own_preprocessor_wins(dinov2_dir: Path, tmp_path: Path) -> None:
    """Statistics come from preprocessor_config.json where there is one, else from the family."""
    assert load(dinov2_dir).normalization.source == "ImageNet's default"
    folder = shutil.copytree(dinov2_dir, tmp_path / "model")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}))
    normalization = load(folder).normalization
    assert (normalization.mean, normalization.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    (folder / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False}))
    assert load(folder).normalization.std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("content", ["{", json.dumps({"image_mean": 0.5, "image_std": [1, 1, 1]})])
def test_broken_preprocessor(dinov2_dir: Path, tmp_path: Path, content: str) -> None:
    """A preprocessor file that cannot be used is an error, not a silent default."""
    folder = shutil.copytree(dinov2_dir, tmp_path / "model")
    (folder / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match="preprocessor_config"):
        load(folder)


def test_missing_weights(dinov2_dir: Path, tmp_path: Path) -> None:
    """A checkpoint without one of the tower's weights is refused: random weights would give random features."""
    folder = shutil.copytree(dinov2_dir, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    dropped = next(name for name in weights if name.endswith("fc1.weight"))
    save_file(
        {name: weights[name] for name in weights if name != dropped}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"lacks 1 of the tower's weights, for example .*fc1\.weight"):
        load(folder)


def test_damaged_weights(dinov2_dir: Path, tmp_path: Path) -> None:
    """A damaged weights file is a clear error."""
    folder = shutil.copytree(dinov2_dir, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(folder)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (
            lambda: transformers.BertModel(transformers.BertConfig(**{**TOWER, "intermediate_size": 48})),
            "does not take pixel_values",
        ),
        (
            lambda: transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])),
            "has no square patch_size",
        ),
        (
            lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(**TOWER, intermediate_size=48)),
            "two runs on one image differ",
        ),
        (
            lambda: transformers.Siglip2Model(
                transformers.Siglip2Config(
                    vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
                    text_config={
                        "hidden_size": 32,
                        "num_hidden_layers": 1,
                        "num_attention_heads": 2,
                        "intermediate_size": 48,
                        "vocab_size": 50,
                    },
                )
            ),
            "takes packed patches",
        ),
    ],
)
def test_models_that_are_refused(tmp_path: Path, build: Any, problem: str) -> None:
    """What is not a plain image tower is refused with the reason and with what is supported."""
    build().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=problem) as caught:
        load(tmp_path)
    assert "supported are" in str(caught.value)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    """A missing folder, a folder without a configuration and a broken configuration are told apart."""
    with pytest.raises(ModelError, match="no such model folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the model's configuration"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "meta", "cuda:99"])
def test_devices_that_do_not_exist(name: str) -> None:
    """Only devices that are there are taken."""
    with pytest.raises(OptionError, match="device"):
        choose_device(name)
