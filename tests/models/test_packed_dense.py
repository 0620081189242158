"""Dense towers with images of native sizes in packed calls, against untouched models with eager attention, one by one."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import parity
from tests.models.parity import CLEARLY_WRONG, TOLERANCE, one_segment
from vit_compile.errors import GridError, InputError, ModelError
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.dense_positions import PositionTaps, mixed_positions
from vit_compile.models.dense_table import GRIDS, PIXELS, PackedDenseTable, pack
from vit_compile.models.packed_dense import TABLES
from vit_compile.stats import counters

transformers = pytest.importorskip("transformers")

PATCH, SIDE = 14, 4
BUDGETS = (24, 48)
OPTIONS: dict[str, Any] = {"token_budgets": BUDGETS, "token_range": BUDGETS, "segment_capacities": (2,)}
VALUES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": SIDE * PATCH,
    "patch_size": PATCH,
}


def dinov2(**values: Any) -> Any:
    """Any size; positions with a class token."""
    return transformers.Dinov2Model(transformers.Dinov2Config(**{**VALUES, "mlp_ratio": 2, **values}))


def registers(**values: Any) -> Any:
    """Antialiased positions; registers behind the class token."""
    config = transformers.Dinov2WithRegistersConfig(**{**VALUES, "mlp_ratio": 2, "num_register_tokens": 3, **values})
    return transformers.Dinov2WithRegistersModel(config)


def dinov3(**values: Any) -> Any:
    """Rotary positions."""
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**{**VALUES, "num_register_tokens": 3, **values}))


def siglip(**values: Any) -> Any:
    """No class token, an attention pooling head."""
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**{**VALUES, **values}))


def clip(**values: Any) -> Any:
    """A norm before the blocks."""
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**VALUES, **values}))


def vit(**values: Any) -> Any:
    """No encoder module, a pooler."""
    return transformers.ViTModel(transformers.ViTConfig(**{**VALUES, **values}))


Builder = Callable[..., Any]
BUILDERS: list[Builder] = [dinov2, registers, dinov3, siglip, clip, vit]
LEARNED = [build for build in BUILDERS if build is not dinov3]
ASKED = (siglip, clip, vit)
"""Their forwards interpolate on request only."""
PREFIX = {dinov2: 1, registers: 4, dinov3: 4, siglip: 0, clip: 1, vit: 1}
EXACT = {1: (14, 47 * 14), 4: (4 * 14, 11 * 14), 0: (6 * 14, 8 * 14)}
"""Pixels of an image that fills the largest budget, by the number of tokens before its patches."""

CASES: dict[str, list[tuple[int, int]]] = {
    "one image": [(56, 56)],
    "three sizes": [(56, 56), (28, 84), (112, 56)],
    "thin": [(14, 140), (196, 14)],
    "not multiples": [(60, 71), (57, 56), (29, 100)],
    "one above the largest": [(28, 28), (112, 112), (28, 42)],
}


def pictures(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[torch.Tensor]:
    """Seeded images."""
    return [parity.random(3, height, width, seed=seed + number) for number, (height, width) in enumerate(sizes)]


@functools.cache
def untouched(build: Builder) -> Any:
    """A model that nobody accelerates."""
    return parity.seeded(build)


@functools.cache
def eager(build: Builder) -> Any:
    """The reference."""
    return parity.eager_copy(untouched(build))


@torch.no_grad()
def alone(reference: Any, images: Sequence[torch.Tensor], *, asked: bool) -> list[Any]:
    """Every image by itself, at its size."""
    extra = {"interpolate_pos_encoding": True} if asked else {}
    return [reference(image[None], **extra) for image in images]


@functools.cache
def kept(build: Builder) -> AcceleratedModel:
    """A captured handle, the same for all tests: what one leaves in its buffers is there for the next."""
    handle = accelerate(copy.deepcopy(untouched(build)), mode="eager", packing="greedy", **OPTIONS)
    handle.capture()
    assert handle.stats()["not_captured"] == []
    return handle


def clean(build: Builder) -> AcceleratedModel:
    """The same, counting from zero."""
    handle = kept(build)
    handle.manager._statistics.reset()
    handle._own_calls.clear()
    return handle


def by_name(function: Any) -> str | None:
    """For test ids."""
    return getattr(function, "__name__", None)


every_tower = pytest.mark.parametrize("build", BUILDERS, ids=by_name)

# --- encode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, "exact fit"])
@every_tower
def test_encode_gives_what_each_image_gives_alone(build: Builder, case: str) -> None:
    """Type, fields, shapes and numbers of the model's own forward, from padded graphs; only what is too large runs eagerly."""
    handle, images = clean(build), pictures(CASES.get(case, [EXACT[PREFIX[build]]]))
    want = alone(eager(build), images, asked=build in ASKED)
    assert parity.difference(handle.encode(images), want) <= TOLERANCE
    large = sum(output.last_hidden_state.shape[1] > BUDGETS[-1] for output in want)
    assert parity.served(handle) == (len(images) - large, {"too-large": large} if large else {}, {})
    if case == "exact fit":
        assert want[0].last_hidden_state.shape[1] == BUDGETS[-1]


@every_tower
def test_an_image_does_not_depend_on_its_neighbours(build: Builder) -> None:
    """An image of NaN between two others changes no bit of theirs, nor of the next call."""
    handle, images = kept(build), pictures([(28, 42), (28, 28), (42, 28)])
    before = handle.encode(images)
    spoiled = handle.encode([images[0], torch.full_like(images[1], float("nan")), images[2]])
    assert bool(spoiled[1].last_hidden_state.isnan().all())
    for number in (0, 2):
        assert parity.difference(spoiled[number], before[number]) == 0
    assert parity.difference(handle.encode(images), before) == 0


def test_images_of_other_dtypes() -> None:
    """Bytes and doubles are converted to the tower's dtype; no images give no outputs; a tensor [N,C,H,W] is a list of images."""
    handle, reference = kept(siglip), eager(siglip)
    whole = torch.randint(0, 5, (3, 30, 45), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = [whole, pictures([(56, 42)])[0].double()]
    want = alone(reference, [image.float() for image in images], asked=True)
    assert parity.difference(handle.encode(images), want) <= TOLERANCE
    assert handle.encode([]) == []
    assert handle.encode(torch.zeros(0, 3, 56, 56)) == []
    batch = torch.stack(pictures([(28, 42), (28, 42)]))
    assert parity.difference(handle.encode(batch), alone(reference, list(batch), asked=True)) <= TOLERANCE


@every_tower
def test_bfloat16(build: Builder) -> None:
    """Beside the untouched model in bfloat16: at most 0.02 of the norm (0.004 to 0.010 were measured)."""
    with torch.no_grad():
        model = copy.deepcopy(untouched(build))
        for parameter in model.parameters():  # as from_pretrained casts: buffers stay in float32
            parameter.data = parameter.data.bfloat16()
    images = [image.bfloat16() for image in pictures(CASES["three sizes"])]
    want = alone(parity.eager_copy(model), images, asked=build in ASKED)
    with parity.accelerated(model, **OPTIONS) as handle:
        for got, expected in zip(handle.encode(images), want, strict=True):
            for name, value in expected.items():
                assert got[name].dtype == torch.bfloat16
                assert float((got[name].float() - value.float()).norm() / value.float().norm()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("build", [registers, dinov3, siglip], ids=by_name)
def test_compiled_once_for_all_budgets(build: Builder) -> None:
    """Dynamo traces the packed forward into one graph, whatever the budget and the number of segments."""
    model = parity.seeded(functools.partial(build, num_hidden_layers=1))
    images = pictures(CASES["three sizes"])
    want = alone(parity.eager_copy(model), images, asked=build in ASKED)
    options = {**OPTIONS, "segment_capacities": ()}
    with parity.accelerated(model, mode="compiled", compiler="eager", **options) as handle:
        assert parity.difference(handle.encode(images), want) <= TOLERANCE
        assert parity.served(handle) == (3, {}, {})
        assert counters.graphs_seen == 1


# --- the model's own calls -------------------------------------------------------------------------------------------


@every_tower
def test_forward_returns_what_it_returned(build: Builder) -> None:
    """Two images of the trained size, by position and by name, without and with interpolation."""
    handle, images = clean(build), torch.stack(pictures([(56, 56), (56, 56)]))
    with torch.no_grad():
        want = eager(build)(images)
        assert parity.difference(handle.model(images), want) <= TOLERANCE
        assert parity.difference(handle.model(pixel_values=images, output_attentions=False, return_dict=True), want) <= TOLERANCE
        if build in ASKED:
            assert parity.difference(handle.model(images, interpolate_pos_encoding=True), want) <= TOLERANCE
    assert parity.served(handle) == (6 if build in ASKED else 4, {}, {})


@every_tower
def test_forward_at_other_sizes(build: Builder) -> None:
    """Answered where the model interpolates; else its own code raises, or does what it did."""
    handle, images = clean(build), torch.stack(pictures([(28, 112), (28, 112)]))
    with torch.no_grad():
        if build in (clip, vit):
            with pytest.raises(ValueError, match="doesn't match model"):
                handle.model(images)
            assert parity.served(handle)[2] == {"unserved": 1}
        if build is siglip:  # as many patches as it was trained on, so that it takes them for a square
            assert parity.difference(handle.model(images), eager(build)(images)) <= TOLERANCE
            assert parity.served(handle)[2] == {"unserved": 1}
        handle._own_calls.clear()
        extra = {"interpolate_pos_encoding": True} if build in ASKED else {}
        assert parity.difference(handle.model(images, **extra), eager(build)(images, **extra)) <= TOLERANCE
    assert parity.served(handle) == (2, {}, {})


def test_calls_for_more_are_the_models_own() -> None:
    """Hidden states, masked patches, tuples, gradients: the model answers, with the attention that it had."""
    model = parity.seeded(functools.partial(dinov2, use_mask_token=True))
    reference, image = parity.eager_copy(model), torch.stack(pictures([(28, 42)]))
    masked = torch.tensor([[True, False, True, False, False, False]])
    with parity.accelerated(model, **OPTIONS) as handle:
        for extra in ({"output_hidden_states": True}, {"bool_masked_pos": masked}, {"return_dict": False}):
            assert parity.difference(model(image, **extra), reference(image, **extra)) <= TOLERANCE
        assert parity.served(handle) == (0, {}, {"more-outputs": 1, "unserved": 2})
        with torch.enable_grad():
            assert model(image).last_hidden_state.requires_grad
        assert handle.stats()["own_calls"]["gradients"] == 1


@torch.no_grad()
def test_tuples_by_config_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that asks for tuples gets them."""
    handle, reference, images = clean(clip), eager(clip), torch.stack(pictures([(56, 56)]))
    for model in (handle.model, reference):
        monkeypatch.setattr(model.config, "return_dict", False)
    assert parity.difference(handle.model(images), reference(images)) <= TOLERANCE
    assert parity.served(handle) == (0, {}, {"unserved": 1})


@torch.no_grad()
@every_tower
def test_packed_images_do_not_depend_on_return_dict(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers whose config asks for tuples, before and after they are bound: `encode` gives what it gave, `forward` is theirs."""
    images = pictures([(28, 84), (42, 42)])
    want = alone(eager(build), images, asked=build in ASKED)
    tuples = copy.deepcopy(untouched(build))
    tuples.config.return_dict = False
    for handle in (clean(build), accelerate(tuples, mode="eager", packing="greedy", **OPTIONS)):
        monkeypatch.setattr(handle.model.config, "return_dict", False)
        assert parity.difference(handle.encode(images), want) <= TOLERANCE
        assert parity.served(handle) == (2, {}, {})
        assert handle.model.config.return_dict is False
        if build in ASKED:  # the others' own forward fails without it
            assert isinstance(handle.model(torch.stack(pictures([(56, 56)]))), tuple)
            assert parity.served(handle)[2] == {"unserved": 1}


def whole_clip() -> Any:
    """Text and vision."""
    text = {**VALUES, "vocab_size": 50, "max_position_embeddings": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VALUES, projection_dim=16))


def whole_siglip() -> Any:
    """Text and vision."""
    text = {**VALUES, "vocab_size": 50, "max_position_embeddings": 8, "projection_size": 32}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=VALUES))


def classifier() -> Any:
    """A head on a tower."""
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VALUES, num_labels=5))


def dino_classifier() -> Any:
    """A head on class token and patches."""
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**VALUES, mlp_ratio=2, num_labels=5))


@pytest.mark.parametrize(
    ("build", "call"),
    [
        (whole_clip, "get_image_features"),
        (whole_siglip, "get_image_features"),
        (classifier, "__call__"),
        (dino_classifier, "__call__"),
    ],
    ids=by_name,
)
def test_whole_models(build: Builder, call: str) -> None:
    """The tower inside answers: projections and heads get what they got. `close` restores the model."""
    model = parity.seeded(build)
    reference, images = parity.eager_copy(model), torch.stack(pictures([(56, 56), (56, 56)]))
    with torch.no_grad():
        want = getattr(reference, call)(images)
    states = {name: dict(vars(module)) for name, module in model.named_modules()}
    with parity.accelerated(model, **OPTIONS) as handle:
        assert parity.difference(getattr(model, call)(images), want) <= TOLERANCE
        assert parity.served(handle) == (2, {}, {})
        if call == "get_image_features":
            text = torch.tensor([[3, 7, 11, 49]])
            assert parity.difference(model(text, images).logits_per_image, reference(text, images).logits_per_image) <= TOLERANCE
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == states
    with torch.no_grad():
        assert parity.difference(getattr(model, call)(images), want) <= TOLERANCE


@every_tower
def test_encoder_for_gives_tokens(build: Builder) -> None:
    """Of each image its `last_hidden_state`, from packed rows and grids of any kind."""
    images = pictures(CASES["three sizes"])
    prefix = PREFIX[build]
    packed = pack(images, PATCH, prefix_tokens=prefix)
    manager = encoder_for(copy.deepcopy(untouched(build)), mode="eager", packing="greedy", **OPTIONS)
    manager.capture()
    for grids in (packed["grids"], torch.tensor(packed["grids"])):
        got = manager.execute({PIXELS: packed["patches"], GRIDS: grids})
        want = [output.last_hidden_state[0] for output in alone(eager(build), images, asked=build in ASKED)]
        assert parity.difference(got, want) <= TOLERANCE
    with pytest.raises(GridError, match=r"grid 0 of image_grid_hw is \(0, 4\)"):
        manager.execute({PIXELS: packed["patches"], GRIDS: [(0, 4)]})
    with pytest.raises(InputError, match="rows"):
        manager.execute({PIXELS: packed["patches"][1:], GRIDS: packed["grids"]})
    manager.clear()


# --- weights ---------------------------------------------------------------------------------------------------------


@every_tower
def test_weights_changed_in_place_are_seen(build: Builder) -> None:
    """Position table, class token, registers and the patch embedding's bias are read by the graphs, not kept in metadata."""
    model = copy.deepcopy(untouched(build))
    reference = parity.eager_copy(model)
    images = pictures(CASES["three sizes"])
    with parity.accelerated(model, **OPTIONS) as handle:
        before = handle.encode(images)
        names = [name for name, _ in model.embeddings.named_parameters() if "mask" not in name]
        assert len(names) >= 3 or build in (clip, siglip)
        for name in names:
            for one in (model, reference):
                parameter = one.embeddings.get_parameter(name)
                parameter.data.add_(0.3 * parity.random(*parameter.shape, seed=5))  # the version counter does not see it
            want = alone(reference, images, asked=build in ASKED)
            got = handle.encode(images)
            assert parity.difference(got, want) <= TOLERANCE, name
            assert parity.difference(got, before) > CLEARLY_WRONG, name
            before = got
        assert parity.served(handle)[1] == {}


def test_replaced_weights_are_followed() -> None:
    """Other parameters in the place of the old ones: captured anew, and right."""
    model, other, images = copy.deepcopy(untouched(clip)), parity.seeded(clip, seed=7), pictures(CASES["three sizes"])
    with parity.accelerated(model, **OPTIONS) as handle:
        handle.encode(images)
        model.load_state_dict(other.state_dict(), assign=True)
        want = alone(parity.eager_copy(other), images, asked=True)
        assert parity.difference(handle.encode(images), want) <= TOLERANCE


def test_encode_follows_a_model_that_is_cast() -> None:
    """Its encoder is made anew, and outputs have the new dtype."""
    model, images = copy.deepcopy(untouched(siglip)), pictures(CASES["three sizes"])
    with parity.accelerated(model, **OPTIONS) as handle:
        handle.encode(images)
        model.double()
        want = alone(parity.eager_copy(model), [image.double() for image in images], asked=True)
        assert parity.difference(handle.encode(iter(images)), want) <= TOLERANCE


def test_another_table_of_positions_is_an_error() -> None:
    """Taps belong to a table of one size: they are never applied to another."""
    table = TABLES["Dinov2Model"](parity.seeded(dinov2), token_range=BUDGETS)
    table.tower.embeddings.position_embeddings = torch.nn.Parameter(torch.zeros(1, 26, 32))
    values = {**table.item_metadata((2, 2), "main"), "patches": torch.zeros(5, 3 * PATCH * PATCH), "max_seqlen": 5}
    with pytest.raises(ModelError, match="another number of positions"):
        table.forward("main", values)


# --- positions -------------------------------------------------------------------------------------------------------


def rows_of_positions(table: PackedDenseTable, height: int, width: int) -> torch.Tensor:
    """What the forward adds to patches."""
    assert table.taps is not None
    positions = table.positions()
    assert positions is not None
    return mixed_positions(positions, *table.taps(height, width), table.taps.sides, before=table.before)


@torch.no_grad()
@pytest.mark.parametrize("build", LEARNED, ids=by_name)
def test_positions_are_the_models_own(build: Builder) -> None:
    """Bit for bit at the trained size; at any other as the model interpolates them."""
    model = copy.deepcopy(untouched(build))
    table = TABLES[type(model).__name__](model, token_range=BUDGETS)
    positions, prefix = table.positions(), table.before
    assert positions is not None
    assert torch.equal(rows_of_positions(table, SIDE, SIDE), positions[prefix:])
    for height, width in ((1, 1), (2, 8), (7, 3), (16, 1), (9, 9)):
        shape = torch.empty(1, prefix + height * width, 32)
        own = model.embeddings.interpolate_pos_encoding(shape, height * PATCH, width * PATCH)[0, prefix:]
        assert parity.difference(rows_of_positions(table, height, width), own) <= 2e-6


def interpolation(side: int, antialias: bool) -> Any:
    """As towers have it."""

    def interpolate(table: torch.Tensor, height: int, width: int) -> torch.Tensor:
        square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        mixed = F.interpolate(square, size=(height, width), mode="bicubic", antialias=antialias)
        return mixed.permute(0, 2, 3, 1).reshape(height * width, -1)

    return interpolate


def test_taps() -> None:
    """Four a side without antialiasing, whatever the grid; with it as many as are allowed, and a least number of patches."""
    plain, smooth = (PositionTaps(interpolation(37, antialias), (37, 37)) for antialias in (False, True))
    assert (plain.width, plain.least) == (4, 1)
    assert (smooth.width, smooth.least) == (12, 12)
    values = parity.random(37 * 37, 5)
    for taps, antialias, grids in ((plain, False, ((1, 1), (16, 9), (50, 40))), (smooth, True, ((12, 12), (16, 40), (50, 13)))):
        for height, width in grids:
            first, weights = taps(height, width)
            assert (first.shape, first.dtype, weights.dtype) == ((height * width, 2), torch.int32, torch.float32)
            got = mixed_positions(values, first, weights, (37, 37))
            assert parity.difference(got, interpolation(37, antialias)(values, height, width)) <= 5e-6
    with pytest.raises(GridError, match="11 x 40 patches are few"):
        smooth(11, 40)


def test_positions_that_are_no_separable_interpolation_are_an_error() -> None:
    """What the taps give is compared with the model's own at every grid."""
    mixing = torch.eye(16) + 0.01 * parity.random(16, 16)

    def interpolate(table: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return interpolation(4, False)(mixing @ table, height, width)

    with pytest.raises(ModelError, match="not a separable interpolation"):
        PositionTaps(interpolate, (4, 4))(3, 5)


def test_few_patches_beside_many_antialiased_positions() -> None:
    """They are not served: the model's own code answers, in `encode` too, in the order of the images."""
    model = parity.seeded(functools.partial(registers, image_size=14 * PATCH, num_hidden_layers=1))
    images = pictures([(70, 84), (42, 98), (56, 56)])
    want = alone(parity.eager_copy(model), images, asked=False)
    with parity.accelerated(model, **OPTIONS) as handle:
        assert parity.difference(handle.encode(images), want) <= TOLERANCE
        assert parity.served(handle) == (2, {}, {})
        assert parity.difference(model(images[1][None]), want[1]) <= TOLERANCE
        assert parity.served(handle) == (2, {}, {"refused-input": 1})


def test_rotary_positions_do_not_jitter() -> None:
    """Metadata that is made in train mode, in which the tower moves its coordinates, is that of eval mode."""
    table = TABLES["DINOv3ViTModel"](parity.seeded(functools.partial(dinov3, pos_embed_rescale=2.0)), token_range=BUDGETS)
    want = table.item_metadata((3, 5), "main")
    table.tower.train()
    got = table.item_metadata((3, 5), "main")
    assert all(torch.equal(got[name], want[name]) for name in want)


# --- the comparisons can fail ----------------------------------------------------------------------------------------


def later_boundaries(values: dict[str, Any]) -> dict[str, Any]:
    """The first image takes a row of the second."""
    boundaries = values["cu_seqlens"].clone()
    boundaries[1:-1] += 1
    return {"cu_seqlens": boundaries.clamp(max=int(boundaries[-1]))}


def exchanged(values: dict[str, Any]) -> dict[str, Any]:
    """Heights and widths."""
    half = values["taps"].shape[1] // 2
    return {"first": values["first"].flip(1), "taps": values["taps"].roll(half, 1)}


def no_positions(values: dict[str, Any]) -> dict[str, Any]:
    """Patches are anywhere."""
    return {"taps": torch.zeros_like(values["taps"])}


def no_prefix(values: dict[str, Any]) -> dict[str, Any]:
    """Class token and registers are patches of nothing."""
    return {"kind": torch.zeros_like(values["kind"])}


def other_turns(values: dict[str, Any]) -> dict[str, Any]:
    """Rotated the other way."""
    return {"sin": -values["sin"].flip(0)}


SPOILED = [
    *[(build, spoil) for build in BUILDERS for spoil in (one_segment, later_boundaries)],
    *[(build, spoil) for build in LEARNED for spoil in (exchanged, no_positions)],
    *[(build, no_prefix) for build in BUILDERS if build is not siglip],
    (dinov3, other_turns),
]


@pytest.mark.parametrize(("build", "spoil"), SPOILED, ids=by_name)
def test_wrong_metadata_shows(
    build: Builder, spoil: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of metadata reaches the features: two images in one call are clearly wrong with other metadata."""
    handle, images = clean(build), pictures([(28, 84), (42, 42)])
    table: Any = handle._binding.table
    right, want = table.forward, alone(eager(build), images, asked=build in ASKED)
    monkeypatch.setattr(table, "forward", lambda path, values: right(path, dict(values)))
    assert parity.difference(handle.encode(images), want) <= TOLERANCE
    monkeypatch.setattr(table, "forward", lambda path, values: right(path, {**values, **spoil(values)}))
    assert parity.difference(handle.encode(images), want) > CLEARLY_WRONG
    assert parity.served(handle) == (4, {}, {})


# --- packing and refusals --------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("patch", [14, (7, 14)])
def test_packed_rows_are_what_a_convolution_sees(patch: Any) -> None:
    """Rows times the weights of a convolution give its output, after as many blank rows as asked for."""
    conv = torch.nn.Conv2d(2, 5, patch, stride=patch, bias=False)
    images = [parity.random(2, 30, 47), parity.random(2, 14, 14, seed=1)]
    packed = pack(images, patch, prefix_tokens=2, channels=2)
    assert packed["grids"] == [(30 // conv.kernel_size[0], 3), (14 // conv.kernel_size[0], 1)]
    start = 0
    for image, (height, width) in zip(images, packed["grids"], strict=True):
        rows = packed["patches"][start : start + 2 + height * width]
        assert not rows[:2].any()
        want = conv(image[None])[0].flatten(1).T
        assert parity.difference(rows[2:] @ conv.weight.flatten(1).T, want) <= TOLERANCE
        start += len(rows)
    assert start == len(packed["patches"])


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.zeros(3, 13, 28), r"image 1 is \[3, 13, 28\].*at least one patch of 14 x 14"),
        (torch.zeros(1, 28, 28), r"image 1 is \[1, 28, 28\]: expected 3 channels"),
        (torch.zeros(1, 3, 28, 28), r"an image is \[1, 3, 28, 28\]"),
        ("photo.jpg", "an image is str"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, words: str) -> None:
    """With its number, and what was expected."""
    with pytest.raises(InputError, match=words):
        kept(clip).encode([torch.zeros(3, 28, 28), image])


def test_towers_of_another_layout_are_refused() -> None:
    """A patch embedding with overlapping patches, positions that are no square."""
    model = parity.seeded(dinov2)
    model.embeddings.patch_embeddings.projection.stride = (7, 7)
    with pytest.raises(ModelError, match="not a plain convolution"):
        accelerate(model)
    with pytest.raises(ModelError, match="only square tables"):
        accelerate(parity.seeded(functools.partial(vit, image_size=(56, 84))))


# --- layers that are read and not called -----------------------------------------------------------------------------


class Adapted(nn.Module):
    """Around a layer, as LoRA is: its weights are those of the layer, and its forward gives something else."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "_modules") else getattr(self.layer, name)

    def forward(self, *args: Any) -> torch.Tensor:
        return 1.5 * self.layer(*args)


def wrapped(model: nn.Module, path: str) -> None:
    """Another module in the layer's place."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, Adapted(model.get_submodule(path)).eval())


def subclassed(model: nn.Module, path: str) -> None:
    """Another forward of the layer's class."""
    layer: Any = model.get_submodule(path)
    kind = type(layer)
    layer.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, *args: 1.5 * kind.forward(self, *args)})


def with_its_own_forward(model: nn.Module, path: str) -> None:
    """Another forward on the layer alone."""
    layer: Any = model.get_submodule(path)
    layer.forward = lambda *args: 1.5 * type(layer).forward(layer, *args)


def hooked(model: nn.Module, path: str) -> None:
    """A hook behind the forward."""
    model.get_submodule(path).register_forward_hook(lambda layer, args, output: 1.5 * output)


READ = [
    *[(build, "embeddings.patch_embeddings.projection") for build in (dinov2, registers, vit)],
    (dinov3, "embeddings.patch_embeddings"),
    *[(build, f"embeddings.{name}_embedding") for build in (siglip, clip) for name in ("patch", "position")],
]
read_layers = pytest.mark.parametrize(
    ("build", "path"), READ, ids=lambda value: value if isinstance(value, str) else by_name(value)
)


@pytest.mark.parametrize("change", [wrapped, subclassed, with_its_own_forward, hooked], ids=by_name)
@read_layers
def test_layers_with_another_forward_are_refused(build: Builder, path: str, change: Callable[[nn.Module, str], None]) -> None:
    """Their weights alone would give the numbers of a model without it."""
    model = copy.deepcopy(untouched(build))
    change(model, path)
    with pytest.raises(ModelError, match=r"plain nn\.|a forward of its own|has forward hooks"):
        accelerate(model)
    assert type(model.config) is type(untouched(build).config)


@torch.no_grad()
@read_layers
def test_layers_that_are_wrapped_later(build: Builder, path: str) -> None:
    """An error, or the numbers of the model with the wrapper; never those without."""
    model, images = copy.deepcopy(untouched(build)), pictures([(56, 56), (56, 56)])
    made = encoder_for(copy.deepcopy(model), mode="eager", packing="greedy", **OPTIONS)
    made.capture()
    packed = pack(images, PATCH, prefix_tokens=PREFIX[build])
    made.execute({PIXELS: packed["patches"], GRIDS: packed["grids"]})
    table: Any = made.model.table
    wrapped(table.tower, path)
    with pytest.raises(ModelError, match="stands in the place of a plain"):
        made.execute({PIXELS: packed["patches"], GRIDS: packed["grids"]})
    reference = parity.eager_copy(model)
    wrapped(reference, path)
    with parity.accelerated(model, **OPTIONS) as handle:
        before = model(torch.stack(images))
        wrapped(model, path)
        got = model(torch.stack(images))
        assert parity.difference(got, reference(torch.stack(images))) <= TOLERANCE
        assert parity.difference(got, before) > CLEARLY_WRONG
        with pytest.raises(ModelError, match="stands in the place of a plain"):
            handle.encode(images)


def test_layers_that_are_only_placed_on_a_device() -> None:
    """`device_map` over several devices gives every layer a forward that moves its inputs: that is no other forward."""
    model, images = copy.deepcopy(untouched(clip)), pictures([(56, 56)])
    for layer in (model.embeddings.patch_embedding, model.embeddings.position_embedding):
        layer._hf_hook, layer._old_forward = type("AlignDevicesHook", (), {})(), layer.forward
        layer.forward = functools.partial(lambda self, *args: self._old_forward(*args), layer)
    with parity.accelerated(model, **OPTIONS) as handle:
        assert parity.difference(handle.encode(images), alone(eager(clip), images, asked=True)) <= TOLERANCE
    layer._old_forward = types.MethodType(lambda self, *args: 1.5 * type(self).forward(self, *args), layer)
    with pytest.raises(ModelError, match="a forward of its own"):
        accelerate(model)


@every_tower
def test_another_tower_is_refused(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes something else is not entered by its parts, and has its config back."""
    model = copy.deepcopy(untouched(build))
    kind = type(model.embeddings)
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **more: real(*args, **more).abs())
    for start in (accelerate, encoder_for):
        with pytest.raises(ModelError, match="something else"):
            start(model)
    assert type(model.config) is type(untouched(build).config)


def test_another_pooled_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the tower's own forward has it."""
    model = parity.seeded(clip)
    real = type(model).forward

    def forward(*args: Any, **more: Any) -> Any:
        output = real(*args, **more)
        output.pooler_output = 1.5 * output.pooler_output
        return output

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ModelError, match="something else"):
        accelerate(model)


def test_train_mode_is_not_compared() -> None:
    """With dropout two runs differ; once in eval mode, the model is served."""
    model, images = parity.seeded(functools.partial(dinov2, hidden_dropout_prob=0.5)), pictures([(56, 56)])
    want = alone(parity.eager_copy(model), images, asked=False)
    with accelerate(model.train(), mode="eager", packing="greedy", **OPTIONS) as handle:
        model.eval()
        assert parity.difference(handle.encode(images), want) <= TOLERANCE


@every_tower
def test_examples_for_trials(build: Builder) -> None:
    """At most so many tokens and nearly as many."""
    model = copy.deepcopy(untouched(build))
    table = TABLES[type(model).__name__](model, token_range=BUDGETS)
    assert table.prefix_tokens == PREFIX[build]
    assert table.example_key(PREFIX[build]) is None
    for tokens in range(PREFIX[build] + 1, 200):
        key: Any = table.example_key(tokens)
        count = table.item_size(key).tokens
        assert isinstance(count, int)
        assert 0.7 * tokens <= count <= tokens
