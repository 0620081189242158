"""PaddleOCR-VL, accelerated and as an encoder, against untouched models with eager attention.

The reference encodes one image at a time where features are compared, and all of them where whole outputs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.models import parity
from tests.models.parity import as_it_is, no_positions, one_segment, raster_order
from vit_compile.errors import GridError, InputError, ModelError, OptionError
from vit_compile.models import paddleocr_vl
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.paddleocr_vl import PaddleOCRTable
from vit_compile.stats import counters

pytest.importorskip("transformers")

Grid = tuple[int, int, int]

PATCH, IMAGE_TOKEN, VOCABULARY = 4, 7, 64
BUDGETS = (8, 32)

# Images; tokens are a quarter of the patches.
CASES: dict[str, list[Grid]] = {
    "one image": [(1, 8, 6)],
    "three sizes": [(1, 8, 10), (1, 4, 6), (1, 10, 2)],
    "thin": [(1, 2, 24), (1, 24, 2)],
    "exact fit": [(1, 8, 16)],
    "exact fit of three": [(1, 8, 8), (1, 4, 8), (1, 16, 2)],
    "one above the largest": [(1, 4, 6), (1, 14, 12), (1, 6, 4)],
}


def build(layers: int = 2) -> Any:
    """A whole model; its learned positions are 8 x 8, so that every grid here is interpolated but one."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    config = PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "image_size": 8 * PATCH,
        },
        text_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": VOCABULARY,
            "head_dim": 12,
            "rope_parameters": rope,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=IMAGE_TOKEN + 2,
    )
    return PaddleOCRVLForConditionalGeneration(config)


@functools.cache
def model() -> Any:
    """For tests that leave it as it was."""
    return parity.seeded(build)


@functools.cache
def reference() -> Any:
    """Its untouched copy."""
    return parity.eager_copy(model())


def pixels(grids: Sequence[Grid], seed: int = 0) -> torch.Tensor:
    """As the processor makes them: [T, 3, patch, patch]."""
    return parity.random(sum(t * h * w for t, h, w in grids), 3, PATCH, PATCH, seed=seed)


@torch.no_grad()
def alone(grids: Sequence[Grid], data: torch.Tensor) -> list[torch.Tensor]:
    """Features of each image by itself."""
    parts = data.split([t * h * w for t, h, w in grids])
    made = [reference().get_image_features(p, torch.tensor([grid])) for p, grid in zip(parts, grids, strict=True)]
    return [output.pooler_output[0] for output in made]


@torch.no_grad()
def together(grids: Sequence[Grid], data: torch.Tensor, of: Any = None) -> Any:
    """The whole output for all images."""
    return (of or reference()).get_image_features(data, torch.tensor(grids))


def served(**options: Any) -> Any:
    """The model accelerated for these budgets."""
    return parity.accelerated(model(), **{"token_budgets": BUDGETS, "token_range": BUDGETS, **options})


@pytest.fixture(scope="module")
def handle() -> Iterator[AcceleratedModel]:
    """One for all parity tests: what one leaves in the buffers is there for the next."""
    reference()
    own = parity.seeded(build)
    with parity.accelerated(own, token_budgets=BUDGETS, token_range=BUDGETS) as made:
        yield made


# --- accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_image_features_are_those_of_the_untouched_model(handle: AcceleratedModel, case: str) -> None:
    """Type, fields, dtypes and numbers of `get_image_features`; every image as it is alone; hits unless too large."""
    grids, data = CASES[case], pixels(CASES[case])
    handle.manager._statistics.reset()
    got = together(grids, data, of=handle.model)
    assert parity.difference(got, together(grids, data)) <= parity.TOLERANCE
    assert parity.difference(got.pooler_output, tuple(alone(grids, data))) <= parity.TOLERANCE
    large = sum(t * h * w // 4 > BUDGETS[-1] for t, h, w in grids)
    assert parity.served(handle) == (len(grids) - large, {"too-large": large} if large else {}, {})


def test_a_clip_among_images_keeps_its_frames_apart(handle: AcceleratedModel) -> None:
    """The model takes grids with several frames: each frame attends to itself only."""
    grids: list[Grid] = [(1, 4, 6), (3, 4, 4), (1, 2, 2)]
    data = pixels(grids)
    assert parity.difference(together(grids, data, of=handle.model), together(grids, data)) <= parity.TOLERANCE


def test_what_the_processor_makes_is_served(handle: AcceleratedModel) -> None:
    """The real processor's output goes in as it is, and is answered by graphs."""
    pytest.importorskip("PIL")
    numpy = pytest.importorskip("numpy")
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    processor = PaddleOCRVLImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=PATCH)
    images = [numpy.random.default_rng(0).integers(0, 255, (*size, 3), dtype=numpy.uint8) for size in ((30, 50), (64, 20))]
    made = dict(processor(images, return_tensors="pt"))
    handle.manager._statistics.reset()
    with torch.no_grad():
        got, want = handle.model.get_image_features(**made), reference().get_image_features(**made)
    assert parity.difference(got, want) <= parity.TOLERANCE
    assert parity.served(handle) == (2, {}, {})


def test_logits_are_those_of_the_untouched_model(handle: AcceleratedModel) -> None:
    """The model's own forward calls what is answered, with arguments that are served."""
    grids = [(1, 4, 6), (1, 2, 2)]
    ids = torch.tensor([[1, IMAGE_TOKEN + 2, *[IMAGE_TOKEN] * 6, 3, IMAGE_TOKEN + 2, IMAGE_TOKEN, 4]])
    inputs = {
        "input_ids": ids,
        "pixel_values": pixels(grids),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }
    handle.manager._statistics.reset()
    with torch.no_grad():
        difference = parity.difference(handle.model(**inputs).logits, reference()(**inputs).logits)
    assert difference <= parity.TOLERANCE
    assert parity.served(handle) == (2, {}, {})


def test_bfloat16_is_as_near_as_bfloat16_allows() -> None:
    """Beside the untouched model in bfloat16: measured 0.005 to 0.008 of the norm."""
    own = parity.seeded(build)
    for parameter in own.parameters():  # not buffers: frequencies stay as they are loaded
        parameter.data = parameter.data.bfloat16()
    untouched, grids = parity.eager_copy(own), CASES["three sizes"]
    want = together(grids, pixels(grids), of=untouched)
    with parity.accelerated(own, token_budgets=(32,), token_range=BUDGETS) as made:
        got = together(grids, pixels(grids), of=own)
        assert parity.served(made) == (3, {}, {})
    parity.difference(got, want)  # dtypes and shapes
    for a, b in zip((got.last_hidden_state, *got.pooler_output), (want.last_hidden_state, *want.pooler_output), strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) <= 0.012


@pytest.mark.slow
def test_compiled_features_are_the_same() -> None:
    """Through `torch.compile`, traced once for all budgets, after a call that installed the model's own hooks."""
    own = parity.seeded(functools.partial(build, layers=1))
    untouched = parity.eager_copy(own)
    with torch.no_grad():
        own.get_image_features(pixels([(1, 2, 2)]), torch.tensor([(1, 2, 2)]), output_hidden_states=True)
    options = {"mode": "compiled", "compiler": "eager", "segment_capacities": ()}
    seen = counters.graphs_seen
    with parity.accelerated(own, token_budgets=BUDGETS, token_range=BUDGETS, **options) as made:
        for case in ("three sizes", "one image"):
            grids, data = CASES[case], pixels(CASES[case])
            want = together(grids, data, of=untouched)
            assert parity.difference(together(grids, data, of=own), want) <= parity.TOLERANCE
        assert parity.served(made)[1:] == ({}, {})
    assert counters.graphs_seen - seen == 1


def test_no_mask_is_made_under_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower asks for a mask that no layer reads, of rows * width^2 bytes under traces and captures in transformers 5.17:
    in the fixed-shape forward it is never made."""
    from transformers import AttentionMaskInterface

    from vit_compile.models.hf_attention import ATTENTION_NAME, register

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask is made")

    with encoder_for(model(), mode="eager", token_budgets=(8,), token_range=BUDGETS) as manager:
        AttentionMaskInterface.register(ATTENTION_NAME, refuse)
        try:
            manager.execute({"pixel_values": pixels([(1, 2, 2)]), "image_grid_thw": [(1, 2, 2)]})
        finally:
            register()


def test_what_is_not_served_is_the_models_own() -> None:
    """Hidden states, grids that do not merge, wrong row counts: the model's own result or error, counted."""
    grids = [(1, 4, 6), (1, 2, 2)]
    with served() as made:
        with torch.no_grad():
            got = model().get_image_features(pixels(grids), torch.tensor(grids), output_hidden_states=True)
            want = reference().get_image_features(pixels(grids), torch.tensor(grids), output_hidden_states=True)
        assert parity.difference(got, want) <= parity.TOLERANCE
        with pytest.raises(RuntimeError):
            together([(1, 3, 4)], pixels([(1, 3, 4)]), of=model())
        with pytest.raises(RuntimeError):
            together([(1, 4, 4)], pixels([(1, 2, 2)]), of=model())
        assert parity.served(made) == (0, {}, {"more-outputs": 1, "refused-input": 2})


def test_close_restores() -> None:
    """Method, configuration and numbers are the model's own again."""
    grids, data, inner = CASES["three sizes"], pixels(CASES["three sizes"]), model().model
    configs = [id(vars(module).get("config")) for module in inner.visual.modules()]
    before = together(grids, data, of=model())
    with served() as made:
        assert "get_image_features" in vars(inner)
        together(grids, data, of=model())
        assert parity.served(made)[0] == 3
    assert "get_image_features" not in vars(inner)
    assert [id(vars(module).get("config")) for module in inner.visual.modules()] == configs
    assert parity.difference(together(grids, data, of=model()), before) == 0.0


# --- the tower alone -------------------------------------------------------------------------------------------------


def test_a_tower_alone_is_served() -> None:
    """`forward` of the tower: tokens are patches then, and grids need not merge."""
    grids: list[Grid] = [(1, 3, 5), (1, 4, 2)]
    data, tower = pixels(grids)[None], parity.seeded(build).model.visual
    with torch.no_grad():
        want = reference().model.visual(data, torch.tensor(grids))
        with parity.accelerated(tower, token_budgets=(32,), token_range=BUDGETS) as made:
            assert parity.difference(tower(data, torch.tensor(grids)), want) <= parity.TOLERANCE
            assert parity.served(made) == (2, {}, {})
        with encoder_for(tower, mode="eager", token_budgets=(32,), token_range=BUDGETS) as manager:
            manager.capture()
            features = manager.execute({"pixel_values": data[0], "image_grid_thw": grids})
    assert parity.difference(torch.cat(features), want.last_hidden_state) <= parity.TOLERANCE


# --- encoder_for -----------------------------------------------------------------------------------------------------


def test_an_encoder_gives_what_the_language_model_gets() -> None:
    """One tensor per image, projected; the model's methods stay its own."""
    grids, data = CASES["three sizes"], pixels(CASES["three sizes"])
    with encoder_for(model(), mode="eager", packing="greedy", token_budgets=BUDGETS, token_range=BUDGETS) as manager:
        manager.capture()
        features = manager.execute({"pixel_values": data, "image_grid_thw": torch.tensor(grids)})
        assert parity.difference(features, alone(grids, data)) <= parity.TOLERANCE
        assert "get_image_features" not in vars(model().model)
        with pytest.raises(GridError, match="multiples of the merge size 2"):
            manager.execute({"pixel_values": pixels([(1, 3, 4)]), "image_grid_thw": [(1, 3, 4)]})
        with pytest.raises(InputError, match="add up to"):
            manager.execute({"pixel_values": data[1:], "image_grid_thw": grids})
    with pytest.raises(OptionError, match="max_frames_per_video"):
        encoder_for(model(), max_frames_per_video=3)


# --- the comparisons can fail ----------------------------------------------------------------------------------------


def other_taps(values: dict[str, Any]) -> dict[str, Any]:
    """Learned positions with the weights of other corners."""
    return {"interp_weights": values["interp_weights"].flip(1)}


@pytest.mark.parametrize(
    "spoil", [one_segment, no_positions, other_taps, raster_order, as_it_is], ids=lambda function: function.__name__
)
def test_wrong_metadata_shows(spoil: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of metadata reaches the features through the graphs: wrong ones give clearly other features."""
    grids, data = CASES["three sizes"], pixels(CASES["three sizes"])
    right = PaddleOCRTable.forward
    monkeypatch.setattr(
        paddleocr_vl.PaddleOCRTable, "forward", lambda self, path, values: right(self, path, {**values, **spoil(dict(values))})
    )
    options = {"verify": False, "segment_capacities": ()}
    with encoder_for(model(), mode="eager", packing="greedy", token_budgets=(32,), token_range=BUDGETS, **options) as manager:
        manager.capture()
        features = manager.execute({"pixel_values": data, "image_grid_thw": grids})
        difference = parity.difference(features, alone(grids, data))
        assert manager.snapshot()["graph_hits"] == 3
    assert difference <= parity.TOLERANCE if spoil is as_it_is else difference > parity.CLEARLY_WRONG


def test_another_projector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are called one by one: one that computes something else is refused, where it is used."""
    own = parity.seeded(build)
    kind = type(own.model.projector)
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **more: 1.5 * real(*args, **more))
    for start in (accelerate, encoder_for):
        with pytest.raises(ModelError, match="something else"):
            start(own)
    encoder_for(own.model.visual).clear()


def test_another_tower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that it makes itself are not those that it is given."""
    own = parity.seeded(build)
    made = paddleocr_vl.PaddleOCRTable._tower_metadata
    monkeypatch.setattr(
        PaddleOCRTable, "_tower_metadata", lambda *args: {**made(*args), "interp_weights": 2 * made(*args)["interp_weights"]}
    )
    with pytest.raises(ModelError, match="something else"):
        accelerate(own)
