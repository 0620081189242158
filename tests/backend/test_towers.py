"""Real towers, tiny: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V packed; DINOv2, SigLIP, CLIP batch-first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vit_compile
from tests import towers
from tests.backend.common import call, compiled, largest_difference
from vit_compile import counters

pytest.importorskip("transformers")

from vit_compile.models.hf_attention import use_attention
from vit_compile.models.vision_metadata import vision_metadata

TOLERANCE = 1e-5
Grids = list[tuple[int, int, int]]
TOKEN_BUDGETS = [16, 32, 64, 128]  # 64, 128, 256 and 512 patches
CASES: dict[str, Grids] = {
    "one image": [(1, 8, 12)],
    "three images": [(1, 8, 12), (1, 4, 6), (1, 10, 2)],
    "video": [(3, 6, 8)],
    "image, video, image": [(1, 4, 4), (2, 6, 10), (1, 8, 6)],
    "thin": [(1, 2, 30)],
    "smallest": [(1, 2, 2)],
    "exact fit": [(1, 8, 16)],
    "exact fit of two": [(1, 8, 8), (1, 8, 8)],
    "above every budget": [(1, 24, 24)],
    "one again": [(1, 8, 12)],
}
DENSE = [towers.tiny_dinov2, towers.tiny_siglip, towers.tiny_clip]


def patches(grids: Grids) -> int:
    """Rows of a call."""
    return sum(t * h * w for t, h, w in grids)


def outputs(out: Any) -> list[torch.Tensor]:
    """All features that a caller uses."""
    return [out.last_hidden_state, out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]


_references: dict[tuple[str, str], Any] = {}


def reference(build: Callable[..., Any], case: str) -> Any:
    """The untouched tower's output for a case, computed once."""
    key = (build.__name__, case)
    if key not in _references:
        _references[key] = eager(build, CASES[case])
    return _references[key]


def eager(build: Callable[..., Any], grids: Grids) -> Any:
    """The untouched tower: eager attention, `grid_thw` alone. GLM wants one row per frame."""
    frames = [(1, h, w) for t, h, w in grids for _ in range(t)] if build is towers.tiny_glm4v else grids
    return call(build("eager", depth=2), towers.pixels(patches(grids)), grid_thw=torch.tensor(frames))


def ours(build: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """The same tower with our attention, and compiled."""
    tower = build("sdpa", depth=2)
    use_attention(tower)
    budgets = {} if options.get("mode") == "none" else {"token_budgets": TOKEN_BUDGETS}
    return tower, compiled(tower, spatial_merge_size=2, **{**budgets, **options})


def check(build: Callable[..., Any], tower: Any, function: Any, cases: list[str]) -> None:
    """Every case against the untouched tower."""
    for case in cases:
        grids = CASES[case]
        got = call(function, towers.pixels(patches(grids)), **vision_metadata(tower, grids))
        want = reference(build, case)
        assert type(got) is type(want)
        assert largest_difference(outputs(got), outputs(want)) <= TOLERANCE, case


# Qwen2.5-VL's window order makes it the slowest to trace: what Qwen3-VL shows as well runs in the test matrix only.
_SLOW = pytest.mark.slow
_PACKED = [pytest.param(towers.tiny_qwen2_5_vl, marks=_SLOW), towers.tiny_qwen3_vl]


@pytest.mark.parametrize(
    ("build", "mode"),
    [
        pytest.param(towers.tiny_qwen2_5_vl, "piecewise", marks=_SLOW),
        pytest.param(towers.tiny_qwen2_5_vl, "full", marks=_SLOW),
        pytest.param(towers.tiny_qwen2_5_vl, "none", marks=_SLOW),
        (towers.tiny_qwen3_vl, "piecewise"),
        (towers.tiny_qwen3_vl, "full"),
        pytest.param(towers.tiny_qwen3_vl, "none", marks=_SLOW),
    ],
)
def test_packed_towers_in_every_mode(build: Callable[..., Any], mode: str) -> None:
    """Precomputed metadata and our attention, compiled, give the untouched tower's features for every kind of call."""
    check(build, *ours(build, mode=mode), list(CASES))
    assert counters.plain_calls == 0
    assert (counters.padded_replays > 0) == (mode != "none")
    if mode != "none":
        # A single output token is a constant to torch.compile: its trace serves that size alone.
        assert counters.skips == {"too-large": 1, "padding-unsafe": 1}


@pytest.mark.parametrize("build", _PACKED)
def test_packed_towers_through_aot(build: Callable[..., Any]) -> None:
    """The same with pieces that went through AOTAutograd."""
    check(build, *ours(build, mode="piecewise", compiler="aot_eager"), ["one image", "three images", "thin"])
    assert counters.padded_replays > 0


@_SLOW
@pytest.mark.parametrize("build", [towers.tiny_qwen2_vl, towers.tiny_glm4v])
def test_other_packed_towers(build: Callable[..., Any]) -> None:
    """Qwen2-VL and GLM-4.1V as well."""
    check(build, *ours(build, mode="piecewise"), list(CASES))


@pytest.mark.parametrize("build", _PACKED)
def test_packed_towers_through_inductor(build: Callable[..., Any]) -> None:
    """After a warm-up, its compiled pieces and captures serve every call: nothing is traced, compiled or captured."""
    tower, function = ours(build, mode="auto", compiler="inductor")

    def inputs(case: str) -> tuple[torch.Tensor, dict[str, Any]]:
        grids = CASES[case]
        return towers.pixels(patches(grids)), {**vision_metadata(tower, grids), "max_seqlen": 576}  # a bound for all

    x, metadata = inputs("image, video, image")
    report = vit_compile.warmup(function, x, **metadata, progress=False)
    assert len(report.captures) == len(TOKEN_BUDGETS)
    with counters.expect(piece_compiles=0, graphs_seen=0, captures=0):
        for case in CASES:
            if case != "smallest":
                x, metadata = inputs(case)
                assert largest_difference(outputs(call(function, x, **metadata)), outputs(reference(build, case))) <= TOLERANCE


@pytest.mark.parametrize("build", [towers.tiny_qwen2_5_vl, towers.tiny_qwen3_vl])
def test_traffic_after_warmup_with_its_own_bounds(build: Callable[..., Any]) -> None:
    """Each call brings its own longest segment: after warm-up that causes no new trace and no new capture."""
    tower, function = ours(build, mode="piecewise")
    grids = CASES["image, video, image"]
    vit_compile.warmup(function, towers.pixels(patches(grids)), **vision_metadata(tower, grids), progress=False)
    with counters.expect(graphs_seen=0, captures=0):
        check(build, tower, function, ["three images", "video", "thin", "exact fit", "one image"])


@_SLOW
def test_a_stock_tower_with_grids_alone_is_right() -> None:
    """Called with `grid_thw` only, the tower breaks into frames: correct all the same."""
    tower = towers.tiny_qwen2_5_vl("sdpa", depth=2)
    function = compiled(tower, spatial_merge_size=2, token_budgets=TOKEN_BUDGETS)
    for case in ("one image", "three images"):
        grids = CASES[case]
        got = call(function, towers.pixels(patches(grids)), grid_thw=torch.tensor(grids))
        assert largest_difference(outputs(got), outputs(reference(towers.tiny_qwen2_5_vl, case))) <= TOLERANCE, case


def test_packed_images_stay_apart() -> None:
    """One image's NaN reaches no other image's features through the compiled tower (hazard 39)."""
    tower, function = ours(towers.tiny_qwen3_vl, mode="full")
    grids = CASES["three images"]
    x, metadata = towers.pixels(patches(grids)), vision_metadata(tower, grids)
    clean = outputs(call(function, x, **metadata))
    poisoned = x.clone()
    poisoned[100] = float("nan")  # in the second image: rows 96 to 119
    got = outputs(call(function, poisoned, **metadata))
    for a, b, merge in zip(got, clean, [1, 4, 4, 4], strict=False):
        start, end = 96 // merge, 120 // merge
        assert torch.equal(a[:start], b[:start])
        assert torch.equal(a[end:], b[end:])
        assert bool(a[start:end].isnan().any())


def images(batch: int, side: int = 16, seed: int = 0) -> torch.Tensor:
    """Seeded images."""
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed + batch))


@pytest.mark.parametrize("mode", ["piecewise", pytest.param("full", marks=_SLOW), pytest.param("none", marks=_SLOW)])
@pytest.mark.parametrize("build", DENSE)
def test_batch_first_towers(build: Callable[..., Any], mode: str) -> None:
    """Batches of 1, 2, 3, a budget, and above: eager's features, in the same output class, by keyword or position."""
    model, tower = build("eager", depth=2), build("sdpa", depth=2)
    budgets = {} if mode == "none" else {"token_budgets": [32, 64, 128]}
    function = compiled(tower, mode=mode, patches_per_row=16, **budgets)
    for batch in (1, 2, 3, 4, 5, 8, 9, 1):
        x = images(batch)
        got, want = call(function, pixel_values=x), call(model, pixel_values=x)
        assert type(got) is type(want)
        assert largest_difference(outputs(got), outputs(want)) <= TOLERANCE, batch
        assert torch.equal(got[0], got.last_hidden_state)
    assert largest_difference(outputs(call(function, images(3))), outputs(call(model, images(3)))) <= TOLERANCE
    assert counters.plain_calls == 0
    if mode != "none":
        assert counters.padded_replays >= 2
        assert counters.skips == {"too-large": 1}


@pytest.mark.parametrize("build", DENSE)
def test_batch_first_towers_after_warmup(build: Callable[..., Any]) -> None:
    """A batch of one as the example: afterwards no call compiles, traces or captures."""
    model, tower = build("eager", depth=2), build("sdpa", depth=2)
    function = compiled(tower, patches_per_row=16, token_budgets=[32, 64])
    vit_compile.warmup(function, pixel_values=images(1), progress=False)
    with counters.expect(captures=0, graphs_seen=0, piece_compiles=0, uncaptured_calls=0):
        for batch in (1, 2, 3, 4):
            got, want = call(function, pixel_values=images(batch)), call(model, pixel_values=images(batch))
            assert largest_difference(outputs(got), outputs(want)) <= TOLERANCE, batch


def test_dinov2_through_inductor() -> None:
    """The same through Inductor, with the convolution rewritten."""
    model, tower = towers.tiny_dinov2("eager", depth=2), towers.tiny_dinov2("sdpa", depth=2)
    function = compiled(tower, compiler="inductor", patches_per_row=16, token_budgets=[32, 64])
    vit_compile.warmup(function, pixel_values=images(2), progress=False)
    for batch in (2, 3, 4, 5):
        got, want = call(function, pixel_values=images(batch)), call(model, pixel_values=images(batch))
        assert largest_difference(outputs(got), outputs(want)) <= TOLERANCE, batch


def test_every_hidden_state_comes_out() -> None:
    """`output_hidden_states=True`: a tuple of all layers, right after padding, and held over later calls (hazard 7)."""
    model, tower = towers.tiny_dinov2("eager", depth=2), towers.tiny_dinov2("sdpa", depth=2)
    function = compiled(tower, patches_per_row=16, token_budgets=[32, 64])
    held = []
    for batch in (1, 2, 3, 4, 3):
        got = call(function, pixel_values=images(batch), output_hidden_states=True)
        want = call(model, pixel_values=images(batch), output_hidden_states=True)
        assert isinstance(got.hidden_states, tuple)
        held.append((got, want))
    for got, want in held:
        assert largest_difference(got.hidden_states, want.hidden_states) <= TOLERANCE


def test_other_image_sizes_of_dinov2() -> None:
    """Native aspect ratios: each size is right, whether captured or not."""
    model, tower = towers.tiny_dinov2("eager", depth=2), towers.tiny_dinov2("sdpa", depth=2)
    function = compiled(tower, patches_per_row=16, token_budgets=[32, 64])
    for height, width in ((16, 16), (16, 24), (32, 16), (20, 28), (16, 16)):
        x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height + width))
        got, want = call(function, pixel_values=x), call(model, pixel_values=x)
        assert largest_difference(outputs(got), outputs(want)) <= TOLERANCE, (height, width)


def test_gradients_flow_through_a_real_tower() -> None:
    """With gradients on, SigLIP is differentiable through the plain path."""
    model, tower = towers.tiny_siglip("eager", depth=1), towers.tiny_siglip("eager", depth=1)
    function = compiled(tower, patches_per_row=16, token_budgets=[32])
    for m in (model, function):
        m(pixel_values=images(2)).last_hidden_state.square().sum().backward()
    for theirs, mine in zip(model.parameters(), tower.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3)
    assert counters.captures == 0
    assert set(counters.skips) == {"gradients"}
