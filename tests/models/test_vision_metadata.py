"""Towers with precomputed metadata and our attention, against untouched towers that get `grid_thw` and eager attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests import towers
from vit_compile.errors import GridError, MissingDependencyError, ModelError
from vit_compile.models.hf_attention import use_attention
from vit_compile.models.vision_metadata import check_grids, vision_metadata

pytest.importorskip("transformers")

TOLERANCE = 1e-5
CLEARLY_WRONG = 0.05
BUILDERS = [towers.tiny_qwen2_vl, towers.tiny_qwen2_5_vl, towers.tiny_qwen3_vl, towers.tiny_glm4v]
CASES = {
    "one image": [(1, 8, 12)],
    "one block": [(1, 2, 2)],
    "three images": [(1, 8, 12), (1, 4, 6), (1, 10, 2)],
    "video": [(3, 6, 8)],
    "image, video, image": [(1, 4, 4), (2, 6, 10), (1, 8, 6)],
}
Builder = Callable[..., Any]


def rows(grids: list[tuple[int, int, int]]) -> int:
    """Patches of all grids."""
    return sum(t * h * w for t, h, w in grids)


def outputs(out: Any) -> list[torch.Tensor]:
    """All features that a caller uses."""
    return [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]


def untouched(build: Builder, grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Eager attention, `grid_thw` only. GLM wants one row per frame, as its own model gives it."""
    frames = [(1, h, w) for t, h, w in grids for _ in range(t)] if build is towers.tiny_glm4v else grids
    with torch.no_grad():
        return outputs(build("eager")(towers.pixels(rows(grids)), grid_thw=torch.tensor(frames)))


def ours(build: Builder, grids: list[tuple[int, int, int]], **changes: Any) -> list[torch.Tensor]:
    """Our attention and precomputed metadata, with some of it changed."""
    tower = build("sdpa")
    use_attention(tower)
    with torch.no_grad():
        return outputs(tower(towers.pixels(rows(grids)), **{**vision_metadata(tower, grids), **changes}))


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Maximum absolute difference over all outputs."""
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", BUILDERS)
def test_towers_give_the_same_features(build: Builder, case: str) -> None:
    """Precomputed metadata and our attention change nothing beyond rounding."""
    assert largest_difference(ours(build, CASES[case]), untouched(build, CASES[case])) <= TOLERANCE


@pytest.mark.parametrize("build", BUILDERS)
def test_wrong_boundaries_show(build: Builder) -> None:
    """One segment over all images gives clearly other features: the comparison can fail."""
    grids = CASES["three images"]
    total = rows(grids)
    changes: dict[str, Any] = {"cu_seqlens": torch.tensor([0, total], dtype=torch.int32), "max_seqlen": total}
    if build is towers.tiny_glm4v:
        changes["grid_thw"] = torch.tensor([(1, 8, 12)])
    assert largest_difference(ours(build, grids, **changes), untouched(build, grids)) > CLEARLY_WRONG


@pytest.mark.parametrize("build", BUILDERS)
def test_wrong_positions_show(build: Builder) -> None:
    """All patches at position zero gives clearly other features."""
    grids = CASES["three images"]
    changes = {"position_ids": torch.zeros(rows(grids), 2, dtype=torch.long)}
    assert largest_difference(ours(build, grids, **changes), untouched(build, grids)) > CLEARLY_WRONG


def test_wrong_windows_show() -> None:
    """A window order of identity, or one big window, gives clearly other features."""
    grids = CASES["three images"]
    want = untouched(towers.tiny_qwen2_5_vl, grids)
    identity = {"window_index": torch.arange(rows(grids) // 4)}
    joined = {"cu_window_seqlens": torch.tensor([0, rows(grids)], dtype=torch.int32), "max_window_seqlen": rows(grids)}
    for changes in (identity, joined):
        assert largest_difference(ours(towers.tiny_qwen2_5_vl, grids, **changes), want) > CLEARLY_WRONG


def test_wrong_interpolation_shows() -> None:
    """Interpolation weights in the wrong order give clearly other features."""
    grids = CASES["three images"]
    weights = vision_metadata(towers.tiny_qwen3_vl(), grids)["interp_weights"].flip(1)
    assert largest_difference(
        ours(towers.tiny_qwen3_vl, grids, interp_weights=weights), untouched(towers.tiny_qwen3_vl, grids)
    ) > (CLEARLY_WRONG)


def test_wrong_frame_grids_show() -> None:
    """A GLM tower that looks up transposed sizes gives clearly other features: it does read `grid_thw`."""
    grids = CASES["three images"]
    flipped = vision_metadata(towers.tiny_glm4v(), grids)["grid_thw"].flip(1)
    flipped[:, 0], flipped[:, 2] = 1, flipped[:, 0]
    assert largest_difference(ours(towers.tiny_glm4v, grids, grid_thw=flipped), untouched(towers.tiny_glm4v, grids)) > 1e-3


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    """Two images in one call give each the features it has alone: boundaries really reach attention."""
    grids = [(1, 8, 12), (1, 4, 6)]
    tower = towers.tiny_qwen2_5_vl("sdpa")
    use_attention(tower)
    patches = towers.pixels(rows(grids))
    with torch.no_grad():
        together = tower(patches, **vision_metadata(tower, grids)).pooler_output
        alone = tower(patches[96:], **vision_metadata(tower, grids[1:])).pooler_output
    torch.testing.assert_close(together[24:], alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("build", BUILDERS)
def test_traces_into_one_graph_without_host_reads(build: Builder) -> None:
    """With metadata the tower is one full graph, and no operation in it reads the device."""
    targets: list[str] = []

    def record(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        targets.append(" ".join(str(node.target) for node in gm.graph.nodes))
        return gm

    tower = build("sdpa", depth=2)
    use_attention(tower)
    grids = CASES["three images"]
    torch._dynamo.reset()
    compiled = torch.compile(lambda patches, metadata: outputs(tower(patches, **metadata)), backend=record, fullgraph=True)
    with torch.no_grad():
        compiled(towers.pixels(rows(grids)), vision_metadata(tower, grids))
    assert len(targets) == 1
    assert targets[0].count("vit_compile.varlen_attention") == 2
    assert not [word for word in ("item", "tolist", "nonzero", "repeat_interleave") if word in targets[0].split()]


def test_kinds_of_values() -> None:
    """dtypes, sizes and bounds are the documented ones."""
    grids = [(2, 4, 8), (1, 6, 6)]
    metadata = vision_metadata(towers.tiny_qwen2_5_vl(), grids)
    assert metadata["cu_seqlens"].tolist() == [0, 32, 64, 100]
    assert metadata["cu_seqlens"].dtype == torch.int32
    assert metadata["max_seqlen"] == 36
    assert metadata["grid_thw"] is None
    assert metadata["position_ids"].shape == (100, 2)
    assert sorted(metadata["window_index"].tolist()) == list(range(25))
    assert metadata["cu_window_seqlens"].dtype == torch.int32
    assert metadata["max_window_seqlen"] == 16
    assert metadata["cu_window_seqlens"].diff().max() <= 16
    interpolated = vision_metadata(towers.tiny_qwen3_vl(), grids)
    assert interpolated["interp_indices"].shape == interpolated["interp_weights"].shape == (100, 4)
    assert interpolated["interp_weights"].dtype == torch.float32
    assert vision_metadata(towers.tiny_glm4v(), grids)["grid_thw"].tolist() == [[1, 4, 8], [1, 4, 8], [1, 6, 6]]


def test_device_is_used() -> None:
    """All tensors go to the device asked for."""
    metadata = vision_metadata(towers.tiny_qwen2_5_vl(), [(1, 4, 4)], device="meta")
    assert {value.device.type for value in metadata.values() if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        ([], "no grids"),
        ([(1, 4, 4), (1, 5, 4)], r"grid 1 is \(1, 5, 4\).*multiples of the merge size 2"),
        ([(1, 4, 3)], "multiples of the merge size 2"),
        ([(0, 4, 4)], "at least 1"),
        ([(1, -2, 4)], "at least 1"),
        ([(4, 4)], "three integers"),
        ([(1, 4.0, 4)], "three integers"),
        ([7], "three integers"),
    ],
)
def test_bad_grids_are_named(grids: list[Any], words: str) -> None:
    """A bad grid is an error that gives its index, its value and what is allowed."""
    with pytest.raises(GridError, match=words):
        vision_metadata(towers.tiny_qwen2_vl(), grids)


def test_integers_of_other_libraries() -> None:
    """NumPy and torch integers are integers."""
    assert check_grids(np.array([[1, 4, 4]]), 2) == [(1, 4, 4)]
    assert check_grids(torch.tensor([[1, 4, 4]]), 2) == [(1, 4, 4)]


def test_other_modules_are_refused() -> None:
    """A tower without grids is an error that says so."""
    with pytest.raises(ModelError, match="not a packed tower"):
        vision_metadata(towers.tiny_clip(), [(1, 4, 4)])


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the error says what to install."""
    tower = towers.tiny_qwen2_vl()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"vit_compile\[hf\]"):
        vision_metadata(tower, [(1, 4, 4)])
