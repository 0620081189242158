"""Kimi-K2.5 and Kimi-VL behind an encoder, against untouched towers with eager attention, one image or clip at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.models import parity
from tests.models.parity import CLEARLY_WRONG, TOLERANCE, SpoiledMetadata, one_segment, random
from tests.models.reference import kimi_vl as published
from tests.runtime.toys import captured, largest_difference
from vit_compile.backend.roles import Role
from vit_compile.errors import GridError, InputError, ModelError, OptionError
from vit_compile.models import kimi, moonvit
from vit_compile.models import kimi_vl as vl_adapter
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.hf_attention import ATTENTION_NAME, AttentionSwitch
from vit_compile.models.registry import architecture_of
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.stats import counters

pytest.importorskip("transformers")

Grid = tuple[int, int, int]
Spoil = Callable[[dict[str, Any]], dict[str, Any]]

PATCH, HIDDEN, WIDTH = 4, 32, 48
BUDGETS = (16, 48)
OPTIONS = {"token_budgets": BUDGETS, "token_range": (8, 48), "segment_capacities": (2,), "packing": "greedy", "mode": "eager"}
COMPILED = {"mode": "compiled", "compiler": "eager", "segment_capacities": (), "verify": False}
BF16_BOUND = 0.02
"""Relative difference by norm from the untouched tower in bfloat16; measured: 0.006 (Kimi-K2.5) and 0.007 (Kimi-VL)."""

IMAGES: dict[str, list[Grid]] = {
    "one image": [(1, 8, 6)],
    "three sizes": [(1, 8, 12), (1, 4, 6), (1, 10, 2)],
    "thin": [(1, 2, 30), (1, 30, 2)],
    "exact fit": [(1, 8, 8)],
    "exact fit of three": [(1, 8, 8), (1, 4, 16), (1, 16, 4)],
    "one above the largest": [(1, 4, 6), (1, 14, 14), (1, 6, 4)],
}
CLIPS: dict[str, list[Grid]] = {
    "clip": [(3, 4, 6)],
    "clips among images": [(1, 8, 6), (3, 4, 6), (4, 2, 4), (1, 2, 2), (2, 2, 6)],
    "clip above the largest": [(1, 4, 4), (4, 8, 8), (2, 4, 4)],
}


def rows(grids: Sequence[Grid]) -> int:
    """Patches of all items."""
    return sum(t * h * w for t, h, w in grids)


def patches(grids: Sequence[Grid], seed: int = 0) -> torch.Tensor:
    """[T, 3, p, p]."""
    return random(rows(grids), 3, PATCH, PATCH, seed=seed)


def each(pixels: torch.Tensor, grids: Sequence[Grid]) -> Iterator[tuple[torch.Tensor, Grid]]:
    """Items with their patches."""
    return zip(pixels.split([rows([grid]) for grid in grids]), grids, strict=True)


def too_large(grids: Sequence[Grid]) -> int:
    """Items that no budget takes."""
    return sum(rows([grid]) // 4 > BUDGETS[-1] for grid in grids)


def counts(made: EncoderCudaGraphManager | AcceleratedModel) -> tuple[int, dict[str, int]]:
    """Hits, and misses by reason, since the last call."""
    made = made.manager if isinstance(made, AcceleratedModel) else made
    snapshot = made.snapshot()
    made._statistics.reset()
    return snapshot["graph_hits"], snapshot["miss_reasons"]


def expected_counts(grids: Sequence[Grid]) -> tuple[int, dict[str, int]]:
    """Only what is above the largest budget runs eagerly."""
    large = too_large(grids)
    return len(grids) - large, {"too-large": large} if large else {}


def in_bfloat16(model: Any) -> Any:
    """Parameters only: buffers with rotary frequencies stay as `from_pretrained` leaves them."""
    cast = copy.deepcopy(model)
    for parameter in cast.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return cast


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Difference by norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


# --- Kimi-K2.5 -------------------------------------------------------------------------------------------------------


@functools.cache
def k25(layers: int = 2, frames: int = 4) -> Any:
    """A whole model with positions for 8 x 8 patches and some frames."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    config = Kimi_K25Config(
        vision_config={
            "patch_size": PATCH,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "pos_emb_time": frames,
            "num_attention_heads": 4,
            "num_hidden_layers": layers,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
        },
        text_config={
            "model_type": "deepseek_v3",
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            **heads,
        },
        projection_hidden_size=HIDDEN,
        image_token_id=60,
        video_token_id=61,
    )
    return parity.seeded(lambda: Kimi_K25ForConditionalGeneration(config))


@functools.cache
def k25_reference() -> Any:
    """Untouched, with eager attention."""
    return parity.eager_copy(k25())


def splits_clips() -> bool:
    """transformers 5.17 splits the features of clips into sizes that do not add up."""
    return hasattr(k25().model.vision_tower, "temporal_merge")


@torch.no_grad()
def k25_alone(pixels: torch.Tensor, grids: Sequence[Grid], model: Any = None) -> list[Any]:
    """The tower's outputs, every item by itself."""
    tower = (model or k25_reference()).model.vision_tower
    return [tower(part, grid_thw=torch.tensor([grid])) for part, grid in each(pixels, grids)]


@torch.no_grad()
def k25_features(pixels: torch.Tensor, grids: Sequence[Grid], model: Any = None) -> list[torch.Tensor]:
    """What the language model gets, every item by itself."""
    projector = (model or k25_reference()).model.mm_projector
    return [projector(output.pooler_output).squeeze(1) for output in k25_alone(pixels, grids, model)]


@pytest.fixture(scope="module")
def k25_accelerated() -> Iterator[tuple[Any, AcceleratedModel]]:
    """A model and its handle, the same for all tests: what one leaves in the buffers is there for the next."""
    model = copy.deepcopy(k25())
    with parity.accelerated(model, **OPTIONS) as handle:
        yield model, handle


@functools.cache
def k25_encoder() -> EncoderCudaGraphManager:
    """With the projector, captured."""
    made = encoder_for(copy.deepcopy(k25()), **OPTIONS)
    made.capture()
    assert made.snapshot()["not_captured"] == []
    return made


@pytest.mark.parametrize("case", [*IMAGES, *CLIPS])
def test_k25_tower_returns_what_it_returned(k25_accelerated: Any, case: str) -> None:
    """Both fields, with the mean over each clip's frames, for any mixture of clip lengths in one call."""
    (model, handle), grids = k25_accelerated, {**IMAGES, **CLIPS}[case]
    pixels = patches(grids)
    with torch.no_grad():
        got = model.model.vision_tower(pixels, grid_thw=torch.tensor(grids))
    alone = k25_alone(pixels, grids)
    want = type(alone[0])(**{name: torch.cat([output[name] for output in alone]) for name in alone[0]})
    assert parity.difference(got, want) <= TOLERANCE
    assert counts(handle) == expected_counts(grids)
    assert handle.stats()["own_calls"] == {}


@pytest.mark.parametrize("case", [*IMAGES, *CLIPS])
def test_k25_features_are_those_that_the_language_model_gets(case: str) -> None:
    """Projector included; a clip of t frames has the length of one frame."""
    grids = {**IMAGES, **CLIPS}[case]
    pixels, made = patches(grids), k25_encoder()
    got = made.execute({"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)})
    assert [len(feature) for feature in got] == [h * w // 4 for _, h, w in grids]
    assert largest_difference(got, k25_features(pixels, grids)) <= TOLERANCE
    assert counts(made) == expected_counts(grids)


def test_k25_images_and_clips_in_one_request() -> None:
    """Both modalities share replays; features come images first."""
    images, clips, made = [(1, 4, 6), (1, 2, 4)], [(3, 4, 4), (1, 2, 2)], k25_encoder()
    request = {
        "pixel_values_videos": patches(clips, 1),
        "video_grid_thw": clips,
        "pixel_values": patches(images),
        "image_grid_thw": images,
    }
    want = k25_features(patches(images), images) + k25_features(patches(clips, 1), clips)
    assert largest_difference(made.execute(request), want) <= TOLERANCE
    assert counts(made) == (4, {})


def test_k25_get_features_of_the_whole_model() -> None:
    """Types, fields, dtypes and numbers before, during and after; what transformers cannot split it still cannot."""
    model, images, clips = copy.deepcopy(k25()), [(1, 8, 6), (1, 4, 6)], [(3, 4, 6), (2, 2, 4)]
    pixels, frames = patches(images), patches(clips, 1)
    with torch.no_grad():
        want = model.get_image_features(pixels, torch.tensor(images))
        with parity.accelerated(model, **OPTIONS) as handle:
            assert parity.difference(model.get_image_features(pixels, torch.tensor(images)), want) <= TOLERANCE
            assert parity.served(handle) == (2, {}, {})
            if splits_clips():
                got = model.get_video_features(frames, torch.tensor(clips))
                assert parity.difference(got, k25_reference().get_video_features(frames, torch.tensor(clips))) <= TOLERANCE
                assert parity.served(handle) == (4, {}, {})
            else:
                with pytest.raises(RuntimeError, match="split"):
                    model.get_video_features(frames, torch.tensor(clips))
                with pytest.raises(RuntimeError, match="split"):
                    k25_reference().get_video_features(frames[:72], torch.tensor(clips[:1]))
        tower = model.model.vision_tower
        assert "forward" not in vars(tower)
        assert ATTENTION_NAME not in {
            module.config._attn_implementation for module in tower.modules() if hasattr(module, "config")
        }
        assert parity.difference(model.get_image_features(pixels, torch.tensor(images)), want) == 0


def test_k25_bare_tower() -> None:
    """Without a model around it the features are the merged patches of a token side by side."""
    grids = CLIPS["clips among images"]
    made = encoder_for(copy.deepcopy(k25().model.vision_tower), **OPTIONS)
    got = made.execute({"pixel_values": patches(grids), "image_grid_thw": grids})
    want = [output.pooler_output.flatten(1) for output in k25_alone(patches(grids), grids)]
    assert largest_difference(got, want) <= TOLERANCE


def test_k25_in_bfloat16() -> None:
    """Close to the untouched tower in bfloat16, clips too."""
    model, grids = in_bfloat16(k25()), CLIPS["clips among images"]
    pixels = patches(grids).to(torch.bfloat16)
    alone = k25_alone(pixels, grids, parity.eager_copy(model))
    with parity.accelerated(model, **OPTIONS) as handle:
        got = model.model.vision_tower(pixels, grid_thw=torch.tensor(grids))
        assert counts(handle) == (len(grids), {})
    for name in ("last_hidden_state", "pooler_output"):
        want = torch.cat([output[name] for output in alone])
        assert got[name].dtype == want.dtype == torch.bfloat16
        assert relative(got[name], want) <= BF16_BOUND


@pytest.mark.slow
def test_k25_compiled() -> None:
    """Through `torch.compile`: traced once for all budgets."""
    model, grids = k25(layers=1, frames=2), [(1, 8, 6), (2, 4, 6), (1, 2, 2)]
    made = encoder_for(copy.deepcopy(model), **{**OPTIONS, **COMPILED})
    made.capture()
    got = made.execute({"pixel_values": patches(grids), "image_grid_thw": grids})
    assert largest_difference(got, k25_features(patches(grids), grids, parity.eager_copy(model))) <= TOLERANCE
    assert counts(made) == (len(grids), {})
    assert counters.graphs_seen == 1


def test_k25_an_item_does_not_depend_on_its_neighbours() -> None:
    """A clip of NaN among others changes no bit of their features, nor do replays differ."""
    grids, made = [(1, 4, 6), (3, 2, 4), (2, 4, 4)], k25_encoder()
    request = {"pixel_values": patches(grids), "image_grid_thw": grids}
    clean = made.execute(request)
    spoiled = {**request, "pixel_values": patches(grids)}
    spoiled["pixel_values"][24:48] = float("nan")
    got = made.execute(spoiled)
    assert bool(got[1].isnan().all())
    assert all(torch.equal(got[number], clean[number]) for number in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(made.execute(request), clean, strict=True))


def test_k25_weights_changed_in_place_count() -> None:
    """Also the table of positions, from which patches take theirs by interpolation."""
    model, grids = copy.deepcopy(k25()), [(1, 4, 6), (2, 6, 10)]
    with parity.accelerated(model, **OPTIONS):
        tower = model.model.vision_tower
        tower(patches(grids), grid_thw=torch.tensor(grids))
        tower.patch_embed.pos_emb.position_embeddings.copy_(random(8, 8, HIDDEN, seed=5))
        got = tower(patches(grids), grid_thw=torch.tensor(grids))
        alone = k25_alone(patches(grids), grids, parity.eager_copy(model))
    assert largest_difference([got.pooler_output], [torch.cat([output.pooler_output for output in alone])]) <= TOLERANCE


@pytest.mark.parametrize(
    ("grid", "words"),
    [((5, 4, 4), "positions for 4 frames"), ((1, 4, 5), "multiples of the merge size 2"), ((0, 4, 4), "at least 1")],
)
def test_k25_wrong_grids_are_refused(grid: Grid, words: str) -> None:
    """Longer clips than the tower has positions for, sides that do not merge."""
    with pytest.raises(GridError, match=words):
        k25_encoder().execute({"pixel_values": patches([grid]), "image_grid_thw": [grid]})


def test_k25_other_calls_are_the_towers_own(k25_accelerated: Any) -> None:
    """Hidden states, precomputed metadata: answered by the tower itself, and counted."""
    model, handle = k25_accelerated
    pixels, grid = patches([(1, 4, 4)]), torch.tensor([(1, 4, 4)])
    (want,) = k25_alone(pixels, [(1, 4, 4)])
    with torch.no_grad():
        got = model.model.vision_tower(pixels, grid_thw=grid, output_hidden_states=True)
        assert len(got.hidden_states) == 3
        assert largest_difference([got.pooler_output], [want.pooler_output]) <= TOLERANCE
        model.model.vision_tower(pixels, grid_thw=grid, frame_index=torch.zeros(16, dtype=torch.int64))
    assert handle.stats()["own_calls"] == {"more-outputs": 1, "unserved": 1}


def test_another_tower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower of the same name that computes something else is not served, and is left as it was."""
    tower = copy.deepcopy(k25().model.vision_tower)
    forward = type(tower).forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.pooler_output = output.pooler_output.roll(1, 0)
        return output

    monkeypatch.setattr(type(tower), "forward", other)
    with pytest.raises(ModelError, match="computes something else"):
        accelerate(tower)
    assert tower.config._attn_implementation != ATTENTION_NAME
    uneven = copy.deepcopy(k25().model.vision_tower)
    uneven.merge_kernel_size = (2, 1)
    with pytest.raises(ModelError, match="expected a square"):
        accelerate(uneven)


# --- Kimi-VL ---------------------------------------------------------------------------------------------------------


@functools.cache
def kimi_vl(layers: int = 2) -> Any:
    """Vision side with positions for 8 x 6 patches."""
    sizes = {"num_attention_heads": 4, "num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": 64}
    return parity.seeded(lambda: published.kimi_vl(WIDTH, patch_size=PATCH, init_pos_emb_height=8, init_pos_emb_width=6, **sizes))


def sides(grids: Sequence[Grid]) -> torch.Tensor:
    """`image_grid_hws`."""
    return torch.tensor([grid[1:] for grid in grids])


@torch.no_grad()
def vl_alone(pixels: torch.Tensor, grids: Sequence[Grid], model: Any = None) -> list[torch.Tensor]:
    """Merged patches, every image by itself."""
    tower = (model or kimi_vl()).vision_tower
    return [tower(part, sides([grid]))[0] for part, grid in each(pixels, grids)]


@torch.no_grad()
def vl_features(pixels: torch.Tensor, grids: Sequence[Grid], model: Any = None) -> list[torch.Tensor]:
    """What the language model gets."""
    return [(model or kimi_vl()).multi_modal_projector([part]) for part in vl_alone(pixels, grids, model)]


@pytest.fixture(scope="module")
def vl_accelerated() -> Iterator[tuple[Any, AcceleratedModel]]:
    """A model and its handle."""
    model = copy.deepcopy(kimi_vl())
    with parity.accelerated(model, **OPTIONS) as handle:
        yield model, handle


@functools.cache
def vl_encoder() -> EncoderCudaGraphManager:
    """With the projector, captured."""
    made = encoder_for(copy.deepcopy(kimi_vl()), **OPTIONS)
    made.capture()
    assert made.snapshot()["not_captured"] == []
    return made


@pytest.mark.parametrize("case", IMAGES)
def test_vl_tower_returns_what_it_returned(vl_accelerated: Any, case: str) -> None:
    """A list with the merged patches of each image."""
    (model, handle), grids = vl_accelerated, IMAGES[case]
    with torch.no_grad():
        got = model.vision_tower(patches(grids), sides(grids))
    assert parity.difference(got, vl_alone(patches(grids), grids)) <= TOLERANCE
    assert counts(handle) == expected_counts(grids)
    assert handle.stats()["own_calls"] == {}


@pytest.mark.parametrize("case", IMAGES)
def test_vl_features_are_those_that_the_language_model_gets(case: str) -> None:
    """Projector included."""
    grids, made = IMAGES[case], vl_encoder()
    got = made.execute({"pixel_values": patches(grids), "image_grid_hws": sides(grids)})
    assert largest_difference(got, vl_features(patches(grids), grids)) <= TOLERANCE
    assert counts(made) == expected_counts(grids)


def test_vl_whole_model_before_and_after() -> None:
    """`_extract_image_features`, which the language model calls, and the attention that is given back."""
    model, grids = copy.deepcopy(kimi_vl()), IMAGES["three sizes"]
    with torch.no_grad():
        want = model._extract_image_features(patches(grids), sides(grids))
        with parity.accelerated(model, **OPTIONS) as handle:
            assert parity.difference(model._extract_image_features(patches(grids), sides(grids)), want) <= TOLERANCE
            assert parity.served(handle) == (3, {}, {})
            assert architecture_of(model).name == "Kimi-VL"
        assert "forward" not in vars(model.vision_tower)
        assert {block.attn_implementation for block in model.vision_tower.encoder.blocks} == {"eager"}
        assert parity.difference(model._extract_image_features(patches(grids), sides(grids)), want) == 0


def test_vl_own_calls_of_an_accelerated_tower_are_right(vl_accelerated: Any) -> None:
    """With gradients the tower's own forward answers, through the switched attention."""
    (model, handle), grids = vl_accelerated, IMAGES["three sizes"]
    with torch.enable_grad():
        got = model.vision_tower(patches(grids).requires_grad_(), sides(grids))
    assert largest_difference([part.detach() for part in got], vl_alone(patches(grids), grids)) <= TOLERANCE
    assert handle.stats()["own_calls"] == {"gradients": 1}


def test_vl_in_bfloat16() -> None:
    """Close to the untouched tower in bfloat16."""
    model, grids = in_bfloat16(kimi_vl()), IMAGES["three sizes"]
    pixels = patches(grids).to(torch.bfloat16)
    want = torch.cat(vl_features(pixels, grids, copy.deepcopy(model)))
    with encoder_for(model, **OPTIONS) as made:
        made.capture()
        got = torch.cat(made.execute({"pixel_values": pixels, "image_grid_hws": sides(grids)}))
        assert counts(made) == (3, {})
    assert got.dtype == want.dtype == torch.bfloat16
    assert relative(got, want) <= BF16_BOUND


@pytest.mark.slow
def test_vl_compiled() -> None:
    """Through `torch.compile`, complex factors and the looked-up attention included: traced once for all budgets."""
    made, grids = encoder_for(copy.deepcopy(kimi_vl(layers=1)), **{**OPTIONS, **COMPILED}), IMAGES["three sizes"]
    made.capture()
    got = made.execute({"pixel_values": patches(grids), "image_grid_hws": sides(grids)})
    assert largest_difference(got, vl_features(patches(grids), grids, kimi_vl(layers=1))) <= TOLERANCE
    assert counts(made) == (3, {})
    assert counters.graphs_seen == 1


def test_vl_an_item_does_not_depend_on_its_neighbours() -> None:
    """An image of NaN among others changes no bit of their features."""
    grids, made = [(1, 4, 6), (1, 8, 6), (1, 4, 4)], vl_encoder()
    request = {"pixel_values": patches(grids), "image_grid_hws": sides(grids)}
    clean = made.execute(request)
    spoiled = {**request, "pixel_values": patches(grids)}
    spoiled["pixel_values"][24:72] = float("nan")
    got = made.execute(spoiled)
    assert bool(got[1].isnan().all())
    assert all(torch.equal(got[number], clean[number]) for number in (0, 2))


def test_vl_weights_changed_in_place_count() -> None:
    """Positions are interpolated from the table as it is, not as it was when an image of that size first came."""
    model, grids = copy.deepcopy(kimi_vl()), IMAGES["three sizes"]
    with parity.accelerated(model, **OPTIONS) as handle:
        model.vision_tower(patches(grids), sides(grids))
        model.vision_tower.patch_embed.pos_emb.weight.copy_(random(8, 6, HIDDEN, seed=5))
        got = model.vision_tower(patches(grids), sides(grids))
        assert counts(handle) == (6, {})
    want = vl_alone(patches(grids), grids, model)
    assert largest_difference(got, want) <= TOLERANCE
    assert largest_difference(want, vl_alone(patches(grids), grids)) > CLEARLY_WRONG


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("source", "target"), [(8, 8), (8, 5), (8, 30), (6, 1), (2, 9), (64, 17)])
def test_taps_are_those_of_interpolation(source: int, target: int, mode: str) -> None:
    """Along one axis, larger and smaller: a weighted sum of four positions is what `interpolate` makes of the table."""
    table = random(source, 3)
    indices, weights = vl_adapter._axis_taps(source, target, mode)
    want = F.interpolate(table.T[None, :, :, None], size=(target, 1), mode=mode)[0, :, :, 0].T
    assert float(((table[indices] * weights[..., None]).sum(1) - want).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("grid", "error", "words"),
    [
        ((4, 5), GridError, "multiples of the merge size 2"),
        ((2, 514), GridError, r"positions for \(512, 512\)"),
        ((1, 4, 4), InputError, "2 integers"),
    ],
)
def test_vl_wrong_grids_are_refused(grid: tuple[int, ...], error: type[Exception], words: str) -> None:
    """Sides that do not merge or that the rotary positions do not cover; grids with frames."""
    with pytest.raises(error, match=words):
        vl_encoder().execute({"pixel_values": random(1028, 3, PATCH, PATCH), "image_grid_hws": [grid]})


def test_vl_other_structures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are missing, attention that is looked up elsewhere, a forward that does more: an error, nothing changed."""
    model = copy.deepcopy(kimi_vl())
    del model.vision_tower.encoder.final_layernorm
    with pytest.raises(ModelError, match="final_layernorm"):
        accelerate(model)
    model = copy.deepcopy(kimi_vl())
    with monkeypatch.context() as patch:
        patch.delattr(published, "VL_VISION_ATTENTION_FUNCTIONS")
        with pytest.raises(ModelError, match="VL_VISION_ATTENTION_FUNCTIONS"):
            accelerate(model)
    with monkeypatch.context() as patch:
        forward = published.MoonVitEncoder.forward
        patch.setattr(published.MoonVitEncoder, "forward", lambda self, x, grid: 2 * forward(self, x, grid))
        with pytest.raises(ModelError, match="computes something else"):
            accelerate(model)
    assert {block.attn_implementation for block in model.vision_tower.encoder.blocks} == {"eager"}


# --- both ------------------------------------------------------------------------------------------------------------


class SpoiledK25(SpoiledMetadata, kimi.KimiK25Table):
    """Some of the metadata is replaced just before the forward."""


class SpoiledVL(SpoiledMetadata, vl_adapter.KimiVLTable):
    """The same."""


def frames_apart(values: dict[str, Any]) -> dict[str, Any]:
    """A clip of two frames attends within each of them."""
    return {"cu_seqlens": torch.cat([values["cu_seqlens"][:1], values["cu_seqlens"][1:2] // 2, values["cu_seqlens"][1:]])}


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """One kind of metadata is another."""
    return lambda values: {name: change(values[name])}


K25_SPOILS: dict[str, Spoil] = {
    "one segment": one_segment,
    "frames apart": frames_apart,
    "every patch in the corner": replaced("position_ids", torch.zeros_like),
    "heights for widths": replaced("position_ids", lambda ids: ids.flip(1)),
    "weights of other taps": replaced("interp_weights", lambda weights: weights.flip(1)),
    "taps of another corner": replaced("interp_indices", torch.zeros_like),
    "no frames": replaced("frame_index", torch.zeros_like),
    "blocks as rows come": replaced("merge_index", lambda index: torch.arange(len(index))),
    "first frame only": replaced("frame_offsets", torch.zeros_like),
    "frames unevenly shared": replaced("frame_weights", lambda weights: weights * torch.tensor([1.0, 0.5, 0.2, 0.1])),
}
VL_SPOILS: dict[str, Spoil] = {
    "one segment": one_segment,
    "no rotation": replaced("rope_freqs_cis", torch.ones_like),
    "weights of other taps": replaced("interp_weights", lambda weights: weights.flip(1)),
    "taps of another corner": replaced("interp_indices", torch.zeros_like),
    "blocks as rows come": replaced("merge_index", lambda index: torch.arange(len(index))),
}


def k25_spoiled(spoil: Spoil) -> float:
    """How far features are from the untouched tower's: a clip of two frames, an image, another clip."""
    model, grids = copy.deepcopy(k25()), [(2, 4, 6), (1, 8, 4), (3, 4, 4)]
    AttentionSwitch(model.model.vision_tower)
    table = SpoiledK25.__new__(SpoiledK25)
    table.spoil = spoil
    table.__init__(model.model.vision_tower, projector=model.model.mm_projector, segment_capacities=())  # type: ignore[misc]
    made = captured(table, token_budgets=(48,), packing="greedy", verify=False)
    got = made.execute({"pixel_values": patches(grids), "image_grid_thw": grids})
    assert counts(made) == (3, {})
    return largest_difference(got, k25_features(patches(grids), grids))


def vl_spoiled(spoil: Spoil) -> float:
    """The same for three images."""
    model, grids = copy.deepcopy(kimi_vl()), IMAGES["three sizes"]
    vl_adapter.BlockAttentionSwitch(model.vision_tower)
    table = SpoiledVL(model.vision_tower, projector=model.multi_modal_projector, segment_capacities=())
    table.spoil = spoil
    made = captured(table, token_budgets=(48,), packing="greedy", verify=False)
    got = made.execute({"pixel_values": patches(grids), "image_grid_hws": sides(grids)})
    assert counts(made) == (3, {})
    return largest_difference(got, vl_features(patches(grids), grids))


@pytest.mark.parametrize("name", K25_SPOILS)
def test_k25_wrong_metadata_shows(name: str) -> None:
    """Each kind of metadata reaches the features through the graphs."""
    assert k25_spoiled(K25_SPOILS[name]) > CLEARLY_WRONG


@pytest.mark.parametrize("name", VL_SPOILS)
def test_vl_wrong_metadata_shows(name: str) -> None:
    """Each kind of metadata reaches the features through the graphs."""
    assert vl_spoiled(VL_SPOILS[name]) > CLEARLY_WRONG


def test_metadata_that_is_only_copied_changes_nothing() -> None:
    """The control of the controls."""
    assert max(k25_spoiled(lambda values: {}), vl_spoiled(lambda values: {})) <= TOLERANCE


def test_what_the_tables_declare() -> None:
    """Roles, a clip as one segment, budgets counted in merged patches of all frames."""
    roles = {name: buffer.role for name, buffer in k25_table().paths["main"].buffers.items()}
    assert {name for name, role in roles.items() if role is Role.INDEX} == {"merge_index"}
    assert {name for name, role in roles.items() if role is Role.BOUNDARIES} == {"cu_seqlens"}
    size = k25_table().item_size((3, 4, 6))
    assert (size.rows, size.tokens, size.frames) == (72, 18, 1)
    assert k25_table().out_hidden_size == WIDTH


@functools.cache
def k25_table() -> kimi.KimiK25Table:
    """With the projector, not captured."""
    table = architecture_of(k25()).bind(copy.deepcopy(k25())).table
    assert isinstance(table, kimi.KimiK25Table)
    return table


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 48, 300, 4096])
def test_examples_for_trials(tokens: int) -> None:
    """Legal images of at most so many tokens and nearly as many, no side longer than there are positions for."""
    for t, h, w in (k25_table().example_key(tokens), moonvit.side_limited_example(tokens, 2, 512)):  # type: ignore[misc]
        assert t == 1
        assert h % 2 == w % 2 == 0
        assert 0.6 * tokens <= h * w // 4 <= tokens
    _, h, w = moonvit.side_limited_example(tokens, 2, 8)
    assert max(h, w) <= 8


def test_options() -> None:
    """Clips have the lengths that the tower has positions for: there is nothing to set."""
    with pytest.raises(OptionError, match="max_frames_per_video"):
        encoder_for(k25(), max_frames_per_video=2)
