"""Pixtral towers in LLaVA form, in Mistral 3 and alone, against untouched models with eager attention.

The reference encodes one image at a time, without padding, where features are compared, and all of them where whole outputs are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.models import parity
from tests.models.parity import as_it_is, no_positions, one_segment, raster_order
from vit_compile.errors import GridError, InputError, ModelError, OptionError
from vit_compile.models import pixtral
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.pixtral import PixtralTable, pack
from vit_compile.stats import counters

transformers = pytest.importorskip("transformers")

Size = tuple[int, int]
Layers = int | list[int]

PATCH, IMAGE_TOKEN = 4, 5

# Images in pixels; patches are 4 x 4 pixels, and Mistral 3 merges 2 x 2 of them.
CASES: dict[str, list[Size]] = {
    "one image": [(24, 32)],
    "three sizes": [(16, 24), (8, 16), (40, 24)],
    "thin": [(8, 64), (64, 8)],
    "exact fit": [(32, 48)],
    "exact fit of three": [(16, 32), (32, 16), (8, 64)],
    "one above the largest": [(16, 24), (48, 48), (24, 16)],
}
BUDGETS = (32, 96)
"""In patches."""


def vision(layers: int) -> dict[str, Any]:
    """The tower's configuration."""
    return {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "image_size": 64,
    }


TEXT = {
    "model_type": "mistral",
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "head_dim": 12,
}


def llava(chosen: Layers = -1, layers: int = 2) -> Any:
    """Pixtral in LLaVA form: one token per patch."""
    config = transformers.LlavaConfig(
        vision_config=vision(layers),
        text_config=TEXT,
        vision_feature_layer=chosen,
        vision_feature_select_strategy="full",
        image_token_index=IMAGE_TOKEN,
    )
    return transformers.LlavaForConditionalGeneration(config)


def mistral3(chosen: Layers = -1, layers: int = 2) -> Any:
    """One token for 2 x 2 patches."""
    config = transformers.Mistral3Config(
        vision_config=vision(layers), text_config=TEXT, vision_feature_layer=chosen, image_token_index=IMAGE_TOKEN
    )
    return transformers.Mistral3ForConditionalGeneration(config)


Builder = Callable[..., Any]
BUILDERS: list[Builder] = [llava, mistral3]
by_name = pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)


@functools.cache
def model(build: Builder) -> Any:
    """For tests that leave it as it was."""
    return parity.seeded(build)


@functools.cache
def reference(build: Builder) -> Any:
    """Its untouched copy."""
    return parity.eager_copy(model(build))


def patches_per_token(build: Builder) -> int:
    """Of the model's features."""
    return 4 if build is mistral3 else 1


def options(build: Builder, *budgets: int) -> dict[str, Any]:
    """Budgets of so many patches, in tokens."""
    per_token = patches_per_token(build)
    smallest, largest = (16 // per_token, 96 // per_token)  # room for six images in a batch
    return {"token_budgets": [budget // per_token for budget in budgets or BUDGETS], "token_range": (smallest, largest)}


def images(sizes: Sequence[Size], seed: int = 0) -> torch.Tensor:
    """Padded, [N, 3, H, W]: with noise where the processor has zeros, which nothing may read."""
    return parity.random(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes), seed=seed)


@torch.no_grad()
def alone(build: Builder, sizes: Sequence[Size], data: torch.Tensor) -> list[torch.Tensor]:
    """Features of each image by itself, cut out."""
    found = []
    for image, (h, w) in zip(data, sizes, strict=True):
        output = reference(build).get_image_features(image[None, :, :h, :w], image_sizes=[[h, w]])
        found.append(output.pooler_output[0])
    return found


@torch.no_grad()
def together(of: Any, sizes: Sequence[Size], data: torch.Tensor, **more: Any) -> Any:
    """The whole output for all images."""
    return of.get_image_features(data, image_sizes=torch.tensor(sizes), **more)


def largest_difference(got: Any, want: Any) -> float:
    """Of everything, also of what is an attribute only: features are that in transformers 5.17."""
    return max(parity.difference(got, want), parity.difference(got.pooler_output, want.pooler_output, "pooler_output"))


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda build: build.__name__)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Builder, AcceleratedModel]]:
    """One handle of each kind for all parity tests: what one leaves in the buffers is there for the next."""
    build = request.param
    with parity.accelerated(parity.seeded(build), **options(build)) as handle:
        yield build, handle


# --- accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_image_features_are_those_of_the_untouched_model(served: tuple[Builder, AcceleratedModel], case: str) -> None:
    """Type, fields, dtypes and numbers of `get_image_features`; every image as it is alone; hits unless too large."""
    (build, handle), sizes, data = served, CASES[case], images(CASES[case])
    handle.manager._statistics.reset()
    got = together(handle.model, sizes, data)
    assert largest_difference(got, together(reference(build), sizes, data)) <= parity.TOLERANCE
    assert parity.difference(got.pooler_output, tuple(alone(build, sizes, data))) <= parity.TOLERANCE
    large = sum(h * w // PATCH**2 > BUDGETS[-1] for h, w in sizes)
    assert parity.served(handle) == (len(sizes) - large, {"too-large": large} if large else {}, {})


def test_what_the_processor_makes_is_served(served: tuple[Builder, AcceleratedModel]) -> None:
    """The real processor's output goes in as it is, and is answered by graphs."""
    build, handle = served
    pytest.importorskip("PIL")
    numpy = pytest.importorskip("numpy")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    side = PATCH * (2 if build is mistral3 else 1)
    processor = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": side, "width": side})
    photos = [numpy.random.default_rng(0).integers(0, 255, (*size, 3), dtype=numpy.uint8) for size in ((30, 50), (64, 20))]
    made = dict(processor(photos, return_tensors="pt"))
    handle.manager._statistics.reset()
    with torch.no_grad():
        got, want = handle.model.get_image_features(**made), reference(build).get_image_features(**made)
    assert largest_difference(got, want) <= parity.TOLERANCE
    assert parity.served(handle) == (2, {}, {})


def test_logits_are_those_of_the_untouched_model(served: tuple[Builder, AcceleratedModel]) -> None:
    """The model's own forward calls what is answered, with arguments that are served."""
    (build, handle), sizes = served, [(16, 8), (8, 24)]
    tokens = sum(h * w for h, w in sizes) // PATCH**2 // patches_per_token(build)
    inputs = {
        "input_ids": torch.tensor([[1, *[IMAGE_TOKEN] * tokens, 2]]),
        "pixel_values": images(sizes),
        "image_sizes": torch.tensor(sizes),
    }
    handle.manager._statistics.reset()
    with torch.no_grad():
        assert parity.difference(handle.model(**inputs).logits, reference(build)(**inputs).logits) <= parity.TOLERANCE
    assert parity.served(handle) == (2, {}, {})


def test_sides_beyond_whole_patches_are_dropped(served: tuple[Builder, AcceleratedModel]) -> None:
    """As the tower does: of 19 x 26 pixels it takes 16 x 24. Sizes are lists as well as tensors."""
    (build, handle), sizes = served, [(19, 26), (8, 16)]
    data = images(sizes)
    handle.manager._statistics.reset()
    with torch.no_grad():
        got = handle.model.get_image_features(data, image_sizes=[list(size) for size in sizes])
    assert largest_difference(got, together(reference(build), sizes, data)) <= parity.TOLERANCE
    assert parity.served(handle) == (2, {}, {})


@pytest.mark.parametrize(
    ("build", "chosen"),
    [(llava, -2), (llava, [1, -1]), (llava, [-3, 1]), (mistral3, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_any_feature_layers_are_served(build: Builder, chosen: Layers) -> None:
    """Hidden states that the projector takes, one or several side by side, are those of these layers."""
    own, sizes = parity.seeded(functools.partial(build, chosen)), CASES["three sizes"]
    untouched, data = parity.eager_copy(own), images(CASES["three sizes"])
    with parity.accelerated(own, **options(build, 96)) as handle:
        assert largest_difference(together(own, sizes, data), together(untouched, sizes, data)) <= parity.TOLERANCE
        assert parity.served(handle) == (3, {}, {})


@by_name
def test_bfloat16_is_as_near_as_bfloat16_allows(build: Builder) -> None:
    """Beside the untouched model in bfloat16: measured 0.006 to 0.010 of the norm."""
    own, sizes = parity.seeded(build), CASES["three sizes"]
    for parameter in own.parameters():  # not buffers: frequencies stay as they are loaded
        parameter.data = parameter.data.bfloat16()
    untouched, data = parity.eager_copy(own), images(CASES["three sizes"])
    want = together(untouched, sizes, data)
    with parity.accelerated(own, **options(build, 96)) as handle:
        got = together(own, sizes, data)
        assert parity.served(handle) == (3, {}, {})
    largest_difference(got, want)  # dtypes and shapes
    for a, b in zip((got.last_hidden_state, *got.pooler_output), (want.last_hidden_state, *want.pooler_output), strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) <= 0.015


def test_compiled_features_are_the_same() -> None:
    """Through `torch.compile`, traced once for all budgets, after a call that installed the model's own hooks."""
    build = mistral3
    own = parity.seeded(functools.partial(build, layers=1))
    untouched = parity.eager_copy(own)
    together(own, [(16, 16)], images([(16, 16)]))
    seen = counters.graphs_seen
    more = {"mode": "compiled", "compiler": "eager", "segment_capacities": ()}
    with parity.accelerated(own, **options(build), **more) as handle:
        for case in ("three sizes", "one image"):
            sizes, data = CASES[case], images(CASES[case])
            assert largest_difference(together(own, sizes, data), together(untouched, sizes, data)) <= parity.TOLERANCE
        assert parity.served(handle)[1:] == ({}, {})
    assert counters.graphs_seen - seen == 1


# --- what is left to the model ---------------------------------------------------------------------------------------


@by_name
def test_the_models_own_code_keeps_images_apart(build: Builder) -> None:
    """Calls that are not answered go through the model's own forward, beside the switched attention: still image by image."""
    sizes, data = CASES["three sizes"], images(CASES["three sizes"])
    with parity.accelerated(model(build), **options(build)) as handle:
        got = together(model(build), sizes, data, vision_feature_layer=-2)
        want = together(reference(build), sizes, data, vision_feature_layer=-2)
        assert largest_difference(got, want) <= parity.TOLERANCE
        assert parity.served(handle) == (0, {}, {"unserved": 1})


def test_odd_grids_are_mistrals_own() -> None:
    """Mistral 3 drops the last row of an odd number; there is no such token for a graph."""
    sizes, data = [(20, 24), (8, 16)], images([(20, 24), (8, 16)])
    with parity.accelerated(model(mistral3), **options(mistral3)) as handle:
        got = together(model(mistral3), sizes, data)
        assert largest_difference(got, together(reference(mistral3), sizes, data)) <= parity.TOLERANCE
        assert parity.served(handle) == (0, {}, {"refused-input": 1})


def test_unusual_calls_are_llavas_own() -> None:
    """No sizes, sizes that reach beyond the pixels, all hidden states: what the model makes of them. (Only to say that no hidden
    states are wanted changes nothing.)"""
    own, untouched, data = model(llava), reference(llava), images([(16, 24), (16, 24)])
    with parity.accelerated(own, **options(llava)) as handle, torch.no_grad():
        calls: list[dict[str, Any]] = [
            {},
            {"image_sizes": torch.tensor([(16, 24), (16, 24)]), "output_hidden_states": True},
            {"image_sizes": torch.tensor([(16, 24), (16, 24)]), "output_hidden_states": False},
        ]
        for call in calls:
            got, want = own.get_image_features(data, **call), untouched.get_image_features(data, **call)
            assert largest_difference(got, want) <= parity.TOLERANCE
        with pytest.raises(RuntimeError):
            together(own, [(16, 24)] * 2, data, vision_feature_select_strategy="default")
        for sizes in ([(16, 24), (16, 28)], [(16, 24)] * 3, [(16, 24), (3, 24)]):
            with contextlib.suppress(RuntimeError):
                want = together(untouched, sizes, data)
                assert largest_difference(together(own, sizes, data), want) <= parity.TOLERANCE
        assert parity.served(handle) == (2, {}, {"unserved": 2, "more-outputs": 1, "refused-input": 1})


def test_a_class_token_is_refused() -> None:
    """LLaVA's default strategy drops the first token, which is a patch here: the model itself fails with it."""
    own = parity.seeded(llava)
    own.config.vision_feature_select_strategy = "default"
    with pytest.raises(ModelError, match="class token"):
        encoder_for(own)


def test_a_tower_with_flash_attention_is_served() -> None:
    """Towers of that kind pass no boundaries on in transformers 5.17: images stay apart, without the package."""
    own, sizes, data = parity.seeded(llava), CASES["three sizes"], images(CASES["three sizes"])
    for module in own.model.vision_tower.modules():
        if "config" in vars(module):
            module.config._attn_implementation = "flash_attention_2"
    with parity.accelerated(own, **options(llava)) as handle:
        got = together(own, sizes, data)
        assert largest_difference(got, together(reference(llava), sizes, data)) <= parity.TOLERANCE
        assert parity.served(handle) == (3, {}, {})


def test_another_tower_is_refused() -> None:
    """A tower that computes something else than the published one is not entered by its parts."""
    own = parity.seeded(llava)
    original = own.model.vision_tower.transformer.forward
    own.model.vision_tower.transformer.forward = lambda embeds, **more: original(
        embeds + 0.1 * (more["attention_mask"] is not None), **more
    )
    with pytest.raises(ModelError, match="something else"):
        encoder_for(own)


class Adapted(torch.nn.Module):
    """Around a convolution, as LoRA is."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "_modules") else getattr(self.layer, name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x).abs()


@by_name
def test_a_wrapped_convolution_is_refused(build: Builder) -> None:
    """It is read and not called: at the start, and when it is wrapped later."""
    own, request = parity.seeded(build), {"pixel_values": images([(16, 24)]), "image_sizes": [(16, 24)]}
    made = encoder_for(own, mode="eager", packing="greedy", **options(build))
    made.execute(request)
    tower = own.model.vision_tower
    tower.patch_conv = Adapted(tower.patch_conv).eval()
    with pytest.raises(ModelError, match=r"stands in the place of a plain nn\.Conv2d"):
        made.execute(request)
    made.clear()
    for start in (accelerate, encoder_for):
        with pytest.raises(ModelError, match=r"stands in the place of a plain nn\.Conv2d"):
            start(own)


@torch.no_grad()
@by_name
def test_a_convolution_that_is_wrapped_later(build: Builder) -> None:
    """Behind `accelerate`: the model's numbers with the wrapper."""
    own, sizes = parity.seeded(build), CASES["one image"]
    with parity.accelerated(own, **options(build)):
        before = together(own, sizes, images(sizes))
        other = parity.eager_copy(own)
        for one in (own, other):
            one.model.vision_tower.patch_conv = Adapted(one.model.vision_tower.patch_conv).eval()
        got = together(own, sizes, images(sizes))
        assert largest_difference(got, together(other, sizes, images(sizes))) <= parity.TOLERANCE
        assert largest_difference(got, before) > parity.CLEARLY_WRONG


@by_name
def test_close_restores(build: Builder) -> None:
    """Method, configurations and numbers are the model's own again."""
    sizes, data, inner = CASES["three sizes"], images(CASES["three sizes"]), model(build).model
    configs = [id(vars(module).get("config")) for module in inner.vision_tower.modules()]
    before = together(model(build), sizes, data)
    with parity.accelerated(model(build), **options(build, 96)) as handle:
        assert "get_image_features" in vars(inner)
        together(model(build), sizes, data)
        assert parity.served(handle)[0] == 3
    assert "get_image_features" not in vars(inner)
    assert [id(vars(module).get("config")) for module in inner.vision_tower.modules()] == configs
    assert largest_difference(together(model(build), sizes, data), before) == 0.0


# --- the tower alone -------------------------------------------------------------------------------------------------


def test_a_tower_alone_is_served() -> None:
    """`forward` of the tower with sizes and without; its features are `last_hidden_state`."""
    sizes, data = CASES["three sizes"], images(CASES["three sizes"])
    tower, untouched = parity.seeded(llava).model.vision_tower, reference(llava).model.vision_tower
    with torch.no_grad():
        want = untouched(data, image_sizes=sizes)
        with parity.accelerated(tower, **options(llava)) as handle:
            assert parity.difference(tower(data, image_sizes=sizes), want) <= parity.TOLERANCE
            same = data[:, :, :16]
            assert parity.difference(tower(same), untouched(same)) <= parity.TOLERANCE
            assert parity.served(handle) == (6, {}, {})
            collected = tower(data, image_sizes=sizes, output_hidden_states=True)
            assert parity.difference(collected, untouched(data, image_sizes=sizes, output_hidden_states=True)) <= parity.TOLERANCE
            assert parity.served(handle) == (6, {}, {"more-outputs": 1})
        with encoder_for(tower, mode="eager", **options(llava)) as manager:
            manager.capture()
            features = manager.execute({"pixel_values": data, "image_sizes": sizes})
    assert parity.difference(torch.cat(features)[None], want.last_hidden_state) <= parity.TOLERANCE


# --- encoder_for -----------------------------------------------------------------------------------------------------


@by_name
def test_an_encoder_gives_what_the_language_model_gets(build: Builder) -> None:
    """One tensor per image, projected, from what the processor makes or from packed rows; the model's methods stay its own."""
    sizes, data = CASES["three sizes"], images(CASES["three sizes"])
    want = alone(build, sizes, data)
    with encoder_for(model(build), mode="eager", packing="greedy", **options(build)) as manager:
        manager.capture()
        assert parity.difference(manager.execute({"pixel_values": data, "image_sizes": torch.tensor(sizes)}), want) <= 1e-5
        packed = pack(data, sizes, PATCH)
        assert list(packed.shape) == [sum(h * w for h, w in sizes) // PATCH**2, 3 * PATCH**2]
        assert parity.difference(manager.execute({"pixel_values": packed, "image_sizes": sizes}), want) <= parity.TOLERANCE
        assert manager.snapshot()["graph_hits"] == 6
        assert manager.execute({"pixel_values": data[:0], "image_sizes": []}) == []
        assert "get_image_features" not in vars(model(build).model)
        for wrong in ([*sizes, (8, 8)], [(48, 24), *sizes[1:]], [(16, 28), *sizes[1:]], [(3, 24), *sizes[1:]], sizes[0]):
            with pytest.raises(InputError):
                manager.execute({"pixel_values": data, "image_sizes": wrong})
        with pytest.raises(InputError, match="pixel_values without image_sizes"):
            manager.execute({"pixel_values": data})
        with pytest.raises(InputError, match="add up to"):
            manager.execute({"pixel_values": packed[1:], "image_sizes": sizes})
        if build is mistral3:
            with pytest.raises(GridError, match="multiples of the merge size 2"):
                manager.execute({"pixel_values": data[:1], "image_sizes": [(20, 24)]})
    with pytest.raises(OptionError, match="max_frames_per_video"):
        encoder_for(model(build), max_frames_per_video=3)


def test_the_default_range_is_one_image_of_full_size() -> None:
    """In tokens of the model."""
    assert pixtral._token_range(1024, 16) == (64, 4096)
    assert pixtral._token_range([1540, 1540], 28) == (64, 3025)
    assert pixtral._token_range(16, 4) == (16, 16)


# --- the comparisons can fail ----------------------------------------------------------------------------------------


def transposed(values: dict[str, Any]) -> dict[str, Any]:
    """Rows are columns."""
    return {"position_ids": values["position_ids"].flip(1)}


def spoiled_difference(build: Builder) -> float:
    """Of the features that a fresh encoder gives, all from one graph."""
    sizes, data = CASES["three sizes"], images(CASES["three sizes"])
    more = {"verify": False, "segment_capacities": ()}
    with encoder_for(model(build), mode="eager", packing="greedy", **options(build, 96), **more) as manager:
        manager.capture()
        features = manager.execute({"pixel_values": data, "image_sizes": sizes})
        assert manager.snapshot()["graph_hits"] == 3
    return parity.difference(features, alone(build, sizes, data))


@pytest.mark.parametrize(
    ("build", "spoil"),
    [(build, spoil) for build in BUILDERS for spoil in (one_segment, no_positions, transposed, as_it_is)]
    + [(mistral3, raster_order)],
    ids=lambda function: function.__name__,
)
def test_wrong_metadata_shows(
    build: Builder, spoil: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of metadata reaches the features through the graphs: wrong ones give clearly other features."""
    right = PixtralTable.forward
    monkeypatch.setattr(PixtralTable, "forward", lambda self, path, values: right(self, path, {**values, **spoil(dict(values))}))
    difference = spoiled_difference(build)
    assert difference <= parity.TOLERANCE if spoil is as_it_is else difference > parity.CLEARLY_WRONG


def test_lost_boundaries_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries come from `packed_segments` alone: without it images attend to each other and to the padding."""
    monkeypatch.setattr(pixtral, "packed_segments", lambda *boundaries: contextlib.nullcontext())
    assert spoiled_difference(llava) > parity.CLEARLY_WRONG
