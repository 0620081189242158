"""MiniCPM-V 4.6 and 4.7 behind an encoder, against untouched models with eager attention, one image at a time."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.models import parity
from tests.models.parity import CLEARLY_WRONG, TOLERANCE, SpoiledMetadata, one_segment, random
from tests.runtime.toys import captured, largest_difference
from vit_compile.backend.roles import Role
from vit_compile.errors import GridError, ModelError
from vit_compile.models import minicpm_v
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.hf_attention import ATTENTION_NAME, AttentionSwitch
from vit_compile.models.minicpm_v import merge_order, patch_rows
from vit_compile.models.registry import architecture_of
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.stats import counters

transformers = pytest.importorskip("transformers")

Size = tuple[int, int]
Spoil = Callable[[dict[str, Any]], dict[str, Any]]

PATCH, HIDDEN, WIDTH = 4, 32, 48
BUDGETS = (8, 24)
OPTIONS = {"token_budgets": BUDGETS, "token_range": (4, 24), "segment_capacities": (2,), "packing": "greedy", "mode": "eager"}
BF16_BOUND = 0.02
"""Relative difference by norm from the untouched model in bfloat16; measured: 0.008."""
VERSIONS = [name for name in ("4_6", "4_7") if hasattr(transformers, f"MiniCPMV{name}Config")]

# Sides in patches; tokens are a sixteenth.
CASES: dict[str, list[Size]] = {
    "one image": [(8, 12)],
    "three sizes": [(8, 16), (4, 12), (20, 4)],
    "equal areas": [(8, 16), (16, 8)],
    "thin": [(4, 32), (32, 4)],
    "exact fit": [(8, 16)],
    "exact fit of three": [(8, 16), (16, 8), (4, 32)],
    "one above the largest": [(4, 12), (20, 24), (8, 4)],
}


def navit(sizes: Sequence[Size], seed: int = 0) -> torch.Tensor:
    """As the processor packs patches: [1, 3, p, p * T]."""
    return random(1, 3, PATCH, PATCH * sum(h * w for h, w in sizes), seed=seed)


def each(pixels: torch.Tensor, sizes: Sequence[Size]) -> Iterator[tuple[torch.Tensor, Size]]:
    """Images with their patches."""
    return zip(pixels.split([PATCH * h * w for h, w in sizes], dim=-1), sizes, strict=True)


@functools.cache
def model_of(version: str = "4_6", merges: int = 1, layers: int = 3) -> Any:
    """A whole model, windows merged after the last layer but one."""
    config_class = getattr(transformers, f"MiniCPMV{version}Config")
    linear = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    config = config_class(
        vision_config={
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "image_size": 7 * PATCH,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "qwen3_5_text",
            "hidden_size": WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 64,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            **linear,
        },
        insert_layer_id=layers - 2,
        merger_times=merges,
        image_token_id=60,
        video_token_id=61,
    )
    build = getattr(transformers, f"MiniCPMV{version}ForConditionalGeneration")
    return parity.seeded(lambda: build(config))


@functools.cache
def reference(version: str = "4_6", merges: int = 1) -> Any:
    """Untouched, with eager attention."""
    return parity.eager_copy(model_of(version, merges))


@torch.no_grad()
def alone(pixels: torch.Tensor, sizes: Sequence[Size], model: Any) -> list[Any]:
    """What the model's `get_image_features` returns for every image by itself."""
    return [model.model.get_image_features(part, torch.tensor([size])) for part, size in each(pixels, sizes)]


def features(pixels: torch.Tensor, sizes: Sequence[Size], model: Any) -> list[torch.Tensor]:
    """What the language model gets."""
    return [output.pooler_output[0] for output in alone(pixels, sizes, model)]


def counts(made: EncoderCudaGraphManager | AcceleratedModel) -> tuple[int, dict[str, int]]:
    """Hits, and misses by reason, since the last call."""
    made = made.manager if isinstance(made, AcceleratedModel) else made
    snapshot = made.snapshot()
    made._statistics.reset()
    return snapshot["graph_hits"], snapshot["miss_reasons"]


def expected_counts(sizes: Sequence[Size]) -> tuple[int, dict[str, int]]:
    """Only what is above the largest budget runs eagerly."""
    large = sum(h * w // 16 > BUDGETS[-1] for h, w in sizes)
    return len(sizes) - large, {"too-large": large} if large else {}


@pytest.fixture(scope="module")
def accelerated() -> Iterator[tuple[Any, AcceleratedModel]]:
    """A model and its handle, the same for all tests: what one leaves in the buffers is there for the next."""
    model = copy.deepcopy(model_of())
    with parity.accelerated(model, **OPTIONS) as handle:
        yield model, handle


@functools.cache
def encoder(version: str = "4_6", merges: int = 1) -> EncoderCudaGraphManager:
    """With the merger, captured."""
    made = encoder_for(copy.deepcopy(model_of(version, merges)), **OPTIONS)
    made.capture()
    assert made.snapshot()["not_captured"] == []
    return made


def request_of(sizes: Sequence[Size], seed: int = 0) -> dict[str, Any]:
    """For an encoder."""
    return {"pixel_values": patch_rows(navit(sizes, seed)), "target_sizes": torch.tensor(sizes)}


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_tower_returns_what_it_returned(accelerated: Any, case: str) -> None:
    """`last_hidden_state` [1, T / 4, E] in raster order, also where transformers 5.17 cannot mix sizes."""
    (model, handle), sizes = accelerated, CASES[case]
    with torch.no_grad():
        got = model.model.vision_tower(navit(sizes), target_sizes=torch.tensor(sizes))
    outputs = alone(navit(sizes), sizes, reference())
    want = torch.cat([output.last_hidden_state for output in outputs], dim=1)
    assert type(got) is type(outputs[0])
    assert list(got) == ["last_hidden_state"]
    assert parity.difference(got.last_hidden_state, want) <= TOLERANCE
    assert counts(handle) == expected_counts(sizes)
    assert handle.stats()["own_calls"] == {}


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_that_the_language_model_gets(case: str) -> None:
    """Both mergers included."""
    sizes, made = CASES[case], encoder()
    got = made.execute(request_of(sizes))
    assert [len(feature) for feature in got] == [h * w // 16 for h, w in sizes]
    assert largest_difference(got, features(navit(sizes), sizes, reference())) <= TOLERANCE
    assert counts(made) == expected_counts(sizes)


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_other_version(version: str) -> None:
    """4.7 has the same tower and merger under another name."""
    sizes, made = CASES["three sizes"], encoder(version)
    assert largest_difference(made.execute(request_of(sizes)), features(navit(sizes), sizes, reference(version))) <= TOLERANCE
    assert counts(made) == (3, {})


def test_further_merges() -> None:
    """A merger of two rounds takes four times the patches for a token."""
    sizes, made = [(8, 16), (24, 8)], encoder(merges=2)
    got = made.execute(request_of(sizes))
    assert [len(feature) for feature in got] == [2, 3]
    assert largest_difference(got, features(navit(sizes), sizes, reference(merges=2))) <= TOLERANCE


def test_images_and_frames_in_one_request() -> None:
    """Every frame of a clip is an item of its own."""
    images, frames, made = [(8, 4), (4, 12)], [(8, 8)] * 3, encoder()
    request = {"pixel_values_videos": patch_rows(navit(frames, 1)), "target_sizes_videos": frames, **request_of(images)}
    want = features(navit(images), images, reference()) + features(navit(frames, 1), frames, reference())
    assert largest_difference(made.execute(request), want) <= TOLERANCE
    assert counts(made) == (5, {})


def test_get_features_of_the_whole_model() -> None:
    """Types, fields, dtypes and numbers before, during and after, for images and for the frames of a clip."""
    model, sizes = copy.deepcopy(model_of()), [(8, 12)] * 3
    pixels, targets = navit(sizes), torch.tensor(sizes)
    with torch.no_grad():
        images = model.model.get_image_features(pixels, targets)
        clip = model.model.get_video_features(pixels, targets)
        with parity.accelerated(model, **OPTIONS) as handle:
            assert parity.difference(model.model.get_image_features(pixels, targets), images) <= TOLERANCE
            assert parity.difference(model.model.get_video_features(pixels, targets), clip) <= TOLERANCE
            assert parity.served(handle) == (6, {}, {})
        tower = model.model.vision_tower
        assert "forward" not in vars(tower)
        assert ATTENTION_NAME not in {
            module.config._attn_implementation for module in tower.modules() if hasattr(module, "config")
        }
        assert parity.difference(model.model.get_image_features(pixels, targets), images) == 0


def test_fewer_merges_are_the_models_own(accelerated: Any) -> None:
    """`downsample_mode="4x"` leaves the windows unmerged: the tower's own code answers, and is right."""
    (model, handle), sizes = accelerated, [(8, 12), (8, 12)]
    with torch.no_grad():
        got = model.model.get_image_features(navit(sizes), torch.tensor(sizes), downsample_mode="4x")
        want = reference().model.get_image_features(navit(sizes), torch.tensor(sizes), downsample_mode="4x")
    assert parity.difference(got, want) <= TOLERANCE
    assert handle.stats()["own_calls"] == {"unserved": 1}


def test_bare_tower() -> None:
    """Without a merger features are the tower's, [h * w / 4, hidden_size], and sides may be even."""
    sizes = [(8, 12), (2, 6), (10, 4)]
    tower = copy.deepcopy(model_of().model.vision_tower)
    made = encoder_for(tower, **OPTIONS)
    want = [
        reference().model.vision_tower(part, target_sizes=torch.tensor([size])).last_hidden_state[0].detach()
        for part, size in each(navit(sizes), sizes)
    ]
    assert largest_difference(made.execute(request_of(sizes)), want) <= TOLERANCE
    with parity.accelerated(copy.deepcopy(model_of().model.vision_tower), **OPTIONS) as handle:
        got = handle.model(navit(sizes), target_sizes=torch.tensor(sizes)).last_hidden_state
        assert largest_difference([got[0]], [torch.cat(want)]) <= TOLERANCE
        assert counts(handle) == (3, {})


def test_in_bfloat16() -> None:
    """Close to the untouched model in bfloat16."""
    model, sizes = copy.deepcopy(model_of()).to(torch.bfloat16), CASES["three sizes"]
    pixels = navit(sizes).to(torch.bfloat16)
    want = torch.cat(features(pixels, sizes, parity.eager_copy(model)))
    with encoder_for(model, **OPTIONS) as made:
        made.capture()
        got = torch.cat(made.execute({"pixel_values": patch_rows(pixels), "target_sizes": sizes}))
        assert counts(made) == (3, {})
    assert got.dtype == want.dtype == torch.bfloat16
    assert float((got.double() - want.double()).norm() / want.double().norm()) <= BF16_BOUND


@pytest.mark.slow
def test_compiled() -> None:
    """Through `torch.compile`: traced once for all budgets."""
    options = {**OPTIONS, "mode": "compiled", "compiler": "eager", "segment_capacities": (), "verify": False}
    made, sizes = encoder_for(copy.deepcopy(model_of(layers=2)), **options), CASES["three sizes"]
    made.capture()
    want = features(navit(sizes), sizes, parity.eager_copy(model_of(layers=2)))
    assert largest_difference(made.execute(request_of(sizes)), want) <= TOLERANCE
    assert counts(made) == (3, {})
    assert counters.graphs_seen == 1


def test_an_item_does_not_depend_on_its_neighbours() -> None:
    """An image of NaN among others changes no bit of their features."""
    sizes, made = [(4, 8), (8, 8), (4, 4)], encoder()
    request = request_of(sizes)
    clean = made.execute(request)
    spoiled = {**request, "pixel_values": request["pixel_values"].clone()}
    spoiled["pixel_values"][32:96] = float("nan")
    got = made.execute(spoiled)
    assert bool(got[1].isnan().all())
    assert all(torch.equal(got[number], clean[number]) for number in (0, 2))


def test_weights_changed_in_place_count() -> None:
    """Also the table of positions."""
    model, sizes = copy.deepcopy(model_of()), CASES["three sizes"]
    with parity.accelerated(model, **OPTIONS):
        model.model.vision_tower.embeddings.position_embedding.weight.copy_(random(49, HIDDEN, seed=5))
        got = model.model.vision_tower(navit(sizes), target_sizes=torch.tensor(sizes)).last_hidden_state
    want = torch.cat([output.last_hidden_state for output in alone(navit(sizes), sizes, parity.eager_copy(model))], dim=1)
    assert float((got - want).abs().max()) <= TOLERANCE


# --- the comparisons can fail ----------------------------------------------------------------------------------------


class Spoiled(SpoiledMetadata, minicpm_v.MiniCPMVTable):
    """Some of the metadata is replaced just before the forward."""


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """One kind of metadata is another."""
    return lambda values: {name: change(values[name])}


SPOILS: dict[str, Spoil] = {
    "one segment": one_segment,
    "every patch in the corner": replaced("position_ids", torch.zeros_like),
    "windows of rows as they come": replaced("order", lambda order: torch.arange(len(order))),
    "merges of windows in raster order": lambda values: {
        "order": torch.cat(
            [merge_order(8, 16, 1), 128 + merge_order(4, 12, 1), 176 + merge_order(20, 4, 1), values["order"][256:]]
        )
    },
    "blocks exchanged": replaced("order", lambda order: order.view(-1, 4, 4).transpose(1, 2).flatten()),
}


def spoiled_difference(spoil: Spoil) -> float:
    """How far features are from the untouched model's."""
    model, sizes = copy.deepcopy(model_of()), CASES["three sizes"]
    AttentionSwitch(model.model.vision_tower)
    table = Spoiled.__new__(Spoiled)
    table.spoil = lambda values: {}
    table.__init__(model.model.vision_tower, merger=model.model.merger, segment_capacities=())  # type: ignore[misc]
    table.spoil = spoil
    made = captured(table, token_budgets=(24,), packing="greedy", verify=False)
    got = made.execute(request_of(sizes))
    assert counts(made) == (3, {})
    return largest_difference(got, features(navit(sizes), sizes, reference()))


@pytest.mark.parametrize("name", SPOILS)
def test_wrong_metadata_shows(name: str) -> None:
    """Each kind of metadata reaches the features through the graphs."""
    assert spoiled_difference(SPOILS[name]) > CLEARLY_WRONG


def test_metadata_that_is_only_copied_changes_nothing() -> None:
    """The control of the controls."""
    assert spoiled_difference(lambda values: {}) <= TOLERANCE


# --- the declaration -------------------------------------------------------------------------------------------------


@functools.cache
def table() -> minicpm_v.MiniCPMVTable:
    """With the merger, not captured."""
    found = architecture_of(model_of()).bind(copy.deepcopy(model_of())).table
    assert isinstance(found, minicpm_v.MiniCPMVTable)
    return found


def test_what_the_table_declares() -> None:
    """Roles, sizes, and examples for trials: legal, at most so many tokens and nearly as many."""
    roles = {name: buffer.role for name, buffer in table().paths["main"].buffers.items()}
    assert roles == {
        "pixel_values": Role.ROWS,
        "position_ids": Role.ROWS,
        "order": Role.INDEX,
        "cu_seqlens": Role.BOUNDARIES,
    }
    size = table().item_size((8, 12))
    assert (size.rows, size.tokens, size.frames) == (96, 6, 1)
    for tokens in range(1, 100):
        h, w = table().example_key(tokens)  # type: ignore[misc]
        assert h % 4 == w % 4 == 0
        assert 0.6 * tokens <= h * w // 16 <= tokens


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_merge_order(levels: int) -> None:
    """As many merges in a row, each of 2 x 2 in raster order, as the same reshapes one after another make."""
    for h, w in itertools.product((8, 16), repeat=2):
        grid = torch.arange(h * w).view(h, w, 1)
        for _ in range(levels):
            rows, columns, _ = grid.shape
            blocks = grid.view(rows // 2, 2, columns // 2, 2, -1).permute(0, 2, 1, 3, 4)
            grid = blocks.reshape(rows // 2, columns // 2, -1)
        assert torch.equal(merge_order(h, w, levels), grid.flatten())


def test_rows_of_packed_patches() -> None:
    """Patch i is the i-th square of columns."""
    pixels = navit([(4, 4)])
    rows = patch_rows(pixels)
    assert rows.shape == (16, 3, PATCH, PATCH)
    assert all(torch.equal(rows[i], pixels[0, :, :, PATCH * i : PATCH * (i + 1)]) for i in range(16))


def test_wrong_requests() -> None:
    """Sides that do not merge are an error of the encoder; shapes that it does not take are the tower's own."""
    with pytest.raises(GridError, match="multiples of the merge size 4"):
        encoder().execute(request_of([(4, 6)]))


def test_inputs_that_the_tower_takes_itself(accelerated: Any) -> None:
    """Sides that are only even are answered by the tower's own code."""
    (model, handle), size = accelerated, (6, 10)
    before = dict(handle.stats()["own_calls"])
    with torch.no_grad():
        got = model.model.vision_tower(navit([size]), target_sizes=torch.tensor([size]))
        want = reference().model.vision_tower(navit([size]), target_sizes=torch.tensor([size]))
    assert parity.difference(got, want) <= TOLERANCE
    assert handle.stats()["own_calls"] == {**before, "refused-input": 1}


def test_other_towers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower that computes something else, or never merges windows, or merges others: an error, nothing changed."""
    tower = copy.deepcopy(model_of().model.vision_tower)
    forward = type(tower).forward
    with monkeypatch.context() as patch:

        def other(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output.last_hidden_state = output.last_hidden_state.flip(1)
            return output

        patch.setattr(type(tower), "forward", other)
        with pytest.raises(ModelError, match="computes something else"):
            accelerate(tower)
    with monkeypatch.context() as patch:
        patch.setattr(tower.config, "insert_layer_id", 3)
        with pytest.raises(ModelError, match="insert_layer_id=3"):
            accelerate(tower)
    with monkeypatch.context() as patch:
        patch.setattr(tower.config, "window_kernel_size", (4, 4))
        with pytest.raises(ModelError, match="expected 2 x 2"):
            accelerate(tower)
    assert tower.config._attn_implementation != ATTENTION_NAME
