"""DeepSeek-OCR, DeepSeek-OCR 2 and Unlimited-OCR, whole images and the models' own calls, against untouched models.

The reference encodes one view and one tile at a time with eager attention, and puts them together line by line.
"""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.models import parity
from tests.models.host_tensors import HostTensors
from tests.models.parity import counts, runs
from tests.models.reference import deepseek_ocr as published
from vit_compile.errors import InputError, ModelError
from vit_compile.models import deepseek_ocr
from vit_compile.models.accelerate import accelerate, encoder_for
from vit_compile.models.deepseek_ocr import RelativePositions
from vit_compile.models.two_views import GLOBAL, LOCAL, TwoViewTable
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.weights import modules_of
from vit_compile.stats import counters

transformers = pytest.importorskip("transformers")

Crops = Sequence[tuple[int, int]]
"""(columns, rows) of the tiles of each image; (1, 1): none."""

# --- tiny models -----------------------------------------------------------------------------------------------------

SAM: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 4, "window_size": 6}
SAM |= {"global_attn_indexes": [1], "output_channels": 8, "mlp_dim": 32}
TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
TEXT |= {"n_shared_experts": 1, "mlp_layer_types": ["dense"], "bos_token_id": 1, "eos_token_id": 2}
IMAGE = 60
PATCHES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def build_ocr2(image_size: int = 64, patch_size: int = 4) -> Any:
    """144 tokens a view (16 patches) and 144 a tile (9 patches): as many queries as for the released tile."""
    config = transformers.DeepseekOcr2Config(
        vision_config={
            "sam_config": SAM | {"image_size": image_size, "patch_size": patch_size, "downsample_channels": [16, 32]},
            "encoder_config": PATCHES | {"num_key_value_heads": 4, "vocab_size": 8},
        },
        text_config=TEXT,
        image_token_id=IMAGE,
    )
    return parity.seeded(lambda: transformers.DeepseekOcr2ForConditionalGeneration(config))


def build_unlimited(image_size: int = 64, patch_size: int = 4) -> Any:
    """16 tokens a view (20 with newlines), 9 a tile; resized positions in both encoders."""
    config = transformers.UnlimitedOcrConfig(
        vision_config={
            "sam_config": SAM | {"image_size": image_size, "patch_size": patch_size, "downsample_channels": [16, 32]},
            "encoder_config": PATCHES | {"image_size": 16, "patch_size": 4},
        },
        text_config=TEXT,
        image_token_id=IMAGE,
    )
    return parity.seeded(lambda: transformers.UnlimitedOcrForConditionalGeneration(config))


def build_published(sizes: Mapping[str, Any] | None = None) -> Any:
    """As many tokens as `build_unlimited`."""
    return parity.seeded(lambda: published.DeepseekOCRForCausalLM(published.TINY | dict(sizes or {})))


@dataclass(frozen=True)
class Family:
    """One architecture, and what a test has to know about it."""

    build: Callable[..., Any]
    sides: tuple[int, int]
    tokens: tuple[int, int]
    """On both paths, as budgets count them."""

    lines: bool
    separator: str
    tiles: str = "pixel_values_local"

    def request(self, crops: Crops, seed: int = 0) -> dict[str, Any]:
        """What the processor makes of such images."""
        counts = [count_of(crop) for crop in crops]
        view, tile = self.sides
        request: dict[str, Any] = {"pixel_values": parity.random(len(crops), 3, view, view, seed=seed)}
        request[self.tiles] = parity.random(sum(counts), 3, tile, tile, seed=seed + 1)
        if self.tiles == "images_crop":
            return request | {"images_spatial_crop": torch.tensor(crops)}
        request["num_local_patches"] = counts
        return request | ({"patches_grid": [list(crop) for crop in crops]} if self.lines else {})

    def encode(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """The model's own modules on one entry: [tokens, width]."""
        inner = model.model
        if self.tiles == "images_crop":
            return inner.encode(pixels[None])[0]
        return inner.multi_modal_projector(inner.vision_tower(pixels[None]).last_hidden_state)[0]

    @torch.no_grad()
    def by_hand(self, model: Any, request: Mapping[str, Any], crops: Crops) -> list[torch.Tensor]:
        """Every view and every tile alone, assembled line by line."""
        tiles, found = iter(request[self.tiles]), []
        for view, crop in zip(request["pixel_values"], crops, strict=True):
            own = [self.encode(model, next(tiles)) for _ in range(count_of(crop))]
            rows = [self.assembled(model, own, *crop)] if own else []
            whole = self.assembled(model, [self.encode(model, view)], 1, 1)
            found.append(torch.cat([*rows, whole, getattr(model.model, self.separator)[None]]))
        return found

    def assembled(self, model: Any, tiles: list[torch.Tensor], columns: int, rows: int) -> torch.Tensor:
        """Tiles one after another; or line by line of the whole map, each with a newline."""
        if not self.lines:
            return torch.cat(tiles)
        side, found = math.isqrt(len(tiles[0])), []
        for line in range(rows * side):
            for column in range(columns):
                tile = tiles[line // side * columns + column]
                found.append(tile[line % side * side : (line % side + 1) * side])
            found.append(model.model.image_newline[None])
        return torch.cat(found)


FAMILIES = {
    "ocr2": Family(build_ocr2, (64, 48), (144, 144), lines=False, separator="view_separator"),
    "published": Family(build_published, (64, 40), (20, 9), lines=True, separator="view_seperator", tiles="images_crop"),
}
if hasattr(transformers, "UnlimitedOcrConfig"):
    FAMILIES["unlimited"] = Family(build_unlimited, (64, 40), (20, 9), lines=True, separator="view_separator")
IN_TRANSFORMERS = [name for name in FAMILIES if name != "published"]
TWO_OF_EACH = [(2, 1), (1, 1), (2, 3)]

CASES: dict[str, Crops] = {
    "one image without tiles": [(1, 1)],
    "one image": [(2, 1)],
    "three images": TWO_OF_EACH,
    "thin": [(1, 4), (4, 1)],
    "exact fit": [(3, 1), (1, 3), (1, 1)],
    "one above the largest": [(1, 1), (3, 3), (2, 1)],
}


def count_of(crop: tuple[int, int]) -> int:
    """Tiles of an image."""
    return crop[0] * crop[1] if crop != (1, 1) else 0


@functools.cache
def reference(name: str) -> Any:
    """Untouched, with eager attention; never served."""
    return parity.eager_copy(FAMILIES[name].build())


def budgets(name: str) -> dict[str, tuple[int, ...]]:
    """One and three views; two and six tiles."""
    view, tile = FAMILIES[name].tokens
    return {GLOBAL: (view, 3 * view), LOCAL: (2 * tile, 6 * tile)}


def manager(name: str, model: Any = None, **options: Any) -> EncoderCudaGraphManager:
    """Of whole images, not captured."""
    defaults = {"mode": "eager", "packing": "greedy", "path_token_budgets": budgets(name), "max_items_per_batch": 6}
    return encoder_for(FAMILIES[name].build() if model is None else model, **defaults | options)


@functools.cache
def served(name: str) -> EncoderCudaGraphManager:
    """A captured one, the same for all tests: what one leaves in its buffers is there for the next."""
    made = manager(name)
    made.capture()
    assert made.snapshot()["not_captured"] == []
    return made


# --- whole images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_those_that_the_language_model_gets(name: str, case: str) -> None:
    """From padded graphs, in the order of the request: tiles, view, separator and newlines where the model has them. Tiles above
    the largest budget run eagerly, their view does not."""
    family, made, crops = FAMILIES[name], served(name), CASES[case]
    request = family.request(crops)
    made._statistics.reset()
    assert parity.difference(made.execute(request), family.by_hand(reference(name), request, crops)) <= parity.TOLERANCE
    tiles = [count_of(crop) for crop in crops]
    large = sum(count > 6 for count in tiles)
    hits = len(crops) + sum(0 < count <= 6 for count in tiles)
    assert counts(made) == (hits, {"too-large": large} if large else {})


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_the_reference_is_what_the_model_computes(name: str) -> None:
    """The tests' own assembly equals `get_image_features`, on the same model."""
    family, request = FAMILIES[name], FAMILIES[name].request(TWO_OF_EACH)
    model = reference(name).model
    with torch.no_grad():
        want = model.get_image_features(**request).pooler_output
    assert parity.difference(family.by_hand(reference(name), request, TWO_OF_EACH), want) <= parity.TOLERANCE


def test_the_reference_is_what_the_published_model_computes() -> None:
    """The same for the published structure, whose forward goes image by image."""
    family, crops = FAMILIES["published"], TWO_OF_EACH
    request = family.request(crops)
    with torch.no_grad():
        want = reference("published")(*published_call(request, crops))
    assert parity.difference(family.by_hand(reference("published"), request, crops), want) <= parity.TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_of_tokens(name: str) -> None:
    """A view, its tiles, a newline for each line of either, and a separator."""
    family = FAMILIES[name]
    lengths = [len(feature) for feature in served(name).execute(family.request([(1, 1), (2, 1), (2, 3)]))]
    view, tile = family.tokens
    newlines = [0, 3, 9] if family.lines else [0, 0, 0]
    assert lengths == [view + 1 + tiles * tile + lines for tiles, lines in zip([0, 2, 6], newlines, strict=True)]


def test_numbers_of_tokens_at_the_released_sizes() -> None:
    """Views of 1024 and tiles of 640 or 768 pixels, patches of 16, at a small width: 273 + 100 P + 10 rows, or 257 + 144 P."""
    no_global: dict[str, Any] = {"img_size": 1024, "patch": 16, "positions": 16, "sam_depth": 1, "global_layers": ()}
    built = {"published": build_published(no_global)}
    with mock.patch.dict(SAM, {"num_hidden_layers": 1, "global_attn_indexes": []}):
        built |= {name: FAMILIES[name].build(1024, 16) for name in IN_TRANSFORMERS}
    for name, model in built.items():
        table = manager(name, model, path_token_budgets=None, max_items_per_batch=None).model.table
        tile = 768 if name == "ocr2" else 640
        assert [next(iter(tiles.shapes.values())) for tiles in table.tiles.values()] == [(3, 1024, 1024), (3, tile, tile)]
        expected = (256, 144) if name == "ocr2" else (272, 100)
        assert (table.tiles[GLOBAL].tokens, table.tiles[LOCAL].tokens) == expected
        outputs = {path: torch.zeros(rows * table.tiles[path].tokens, 24) for path, rows in ((GLOBAL, 1), (LOCAL, 6))}
        key = 6 if name == "ocr2" else (2, 3)
        assert len(table.assemble(key, outputs)) == (257 + 144 * 6 if name == "ocr2" else 273 + 100 * 6 + 10 * 3)


def test_the_documented_ladders() -> None:
    """Views double from one view's tokens, tiles from one tile's, both to the common maximum; 0 skips the tiles."""
    table = manager("published", path_token_budgets=None, max_items_per_batch=None, token_range=(20, 1000)).ladders
    assert table.paths == {
        GLOBAL: (20, 40, 80, 160, 320, 640, 1000),
        LOCAL: (0, 9, 18, 36, 72, 144, 288, 576, 1000),
    }
    defaults = manager("published", path_token_budgets=None, max_items_per_batch=None).ladders
    assert (defaults.paths[GLOBAL], defaults.max_items) == ((20, 40, 80, 160, 320), 16)


# --- the comparisons can fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_swapped_tiles_show(name: str) -> None:
    """The first and the last tile of an image exchanged give clearly other features."""
    family, crops = FAMILIES[name], [(2, 3)]
    request = family.request(crops)
    want = family.by_hand(reference(name), request, crops)
    request[family.tiles] = request[family.tiles][[5, 1, 2, 3, 4, 0]]
    assert parity.difference(served(name).execute(request), want) > parity.CLEARLY_WRONG


def column_by_column(self: Any, key: Any, tiles: torch.Tensor) -> torch.Tensor:
    """Columns and rows taken for each other."""
    columns, rows = key
    side = math.isqrt(self.tiles[LOCAL].tokens)
    maps = tiles.view(columns, rows, side, side, -1).permute(1, 2, 0, 3, 4).reshape(1, rows * side, columns * side, -1)
    return deepseek_ocr.with_newlines(maps, self.parameters).flatten(0, 1)


def tile_by_tile(self: Any, key: Any, tiles: torch.Tensor) -> torch.Tensor:
    """Tiles one after another, the newlines where they belong."""
    (columns, rows), side = key, math.isqrt(self.tiles[LOCAL].tokens)
    return deepseek_ocr.with_newlines(tiles.view(1, rows * side, columns * side, -1), self.parameters).flatten(0, 1)


@pytest.mark.parametrize("arrange", [column_by_column, tile_by_tile])
def test_wrong_assemblies_show(arrange: Callable[..., torch.Tensor]) -> None:
    """Another order of the same lines has the right length and clearly other features."""
    family, crops = FAMILIES["published"], [(2, 3)]
    request = family.request(crops)
    with mock.patch.object(deepseek_ocr.LinesTable, "arrange", arrange):
        got = served("published").execute(request)
    assert parity.difference(got, family.by_hand(reference("published"), request, crops)) > parity.CLEARLY_WRONG


@pytest.mark.parametrize("parameter", ["image_newline", "view_seperator"])
def test_newlines_and_separators_show(parameter: str) -> None:
    """Their values, changed in place, are in the features: of graphs and of what is put together behind them."""
    model, family = build_published(), FAMILIES["published"]
    made = manager("published", model)
    made.capture()
    request = family.request(TWO_OF_EACH)
    getattr(model.model, parameter).data.add_(1)
    got = made.execute(request)
    assert parity.difference(got, family.by_hand(reference("published"), request, TWO_OF_EACH)) > parity.CLEARLY_WRONG
    assert parity.difference(got, family.by_hand(model, request, TWO_OF_EACH)) <= parity.TOLERANCE


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_another_assembly_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole images are compared with `get_image_features`, which `accelerate` leaves to the model."""
    model = FAMILIES[name].build()
    kind = type(model.model)
    real = kind.get_image_features

    def features(*args: Any, **more: Any) -> Any:
        output = real(*args, **more)
        output.pooler_output = [torch.cat([feature[-1:], feature[:-1]]) for feature in output.pooler_output]
        return output

    monkeypatch.setattr(kind, "get_image_features", features)
    with pytest.raises(ModelError, match="something else"):
        encoder_for(model)
    assert not any("get_rel_pos" in vars(module) for module in model.modules())
    accelerate(model).close()


def test_an_encoder_that_looks_at_its_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published second encoder gets embeddings in their place."""
    model = build_published()
    real = published.VitModel.forward
    monkeypatch.setattr(published.VitModel, "forward", lambda self, x, embeds: real(self, x, embeds) + x.mean())
    with pytest.raises(ModelError, match="something else"):
        accelerate(model)


# --- graphs and no graphs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [(), (GLOBAL,), (LOCAL,), (GLOBAL, LOCAL)])
@pytest.mark.parametrize("crops", [TWO_OF_EACH, [(1, 1), (1, 1)]], ids=["tiles", "no tiles"])
def test_found_and_not_found(failing: tuple[str, ...], crops: Crops) -> None:
    """Each path has a graph or runs eagerly by itself, and without tiles theirs does not run: the features are the same."""
    family, real = FAMILIES["published"], TwoViewTable.forward

    def failing_forward(self: TwoViewTable, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        if path in failing:
            raise RuntimeError(f"no capture of {path}")
        return real(self, path, values)

    made = manager("published", verify=False)  # or first batches are compared with eager runs
    with mock.patch.object(TwoViewTable, "forward", failing_forward):
        made.capture()
    request = family.request(crops)
    with runs(made) as noted:
        got = made.execute(request)
    assert parity.difference(got, family.by_hand(reference("published"), request, crops)) <= parity.TOLERANCE
    paths = [GLOBAL, LOCAL] if crops is TWO_OF_EACH else [GLOBAL]
    assert set(noted) == {("eager" if path in failing else "replay", path) for path in paths}


def test_sequences_of_requests_with_and_without_tiles() -> None:
    """Nothing of the last request's tiles is left in the next one's features, and features that are held do not change."""
    family, made = FAMILIES["published"], served("published")
    held = []
    for seed, crops in enumerate(([(2, 3)], [(1, 1)], TWO_OF_EACH, [(1, 1), (2, 1)])):
        request = family.request(crops, seed)
        held.append((made.execute(request), family.by_hand(reference("published"), request, crops)))
    for got, want in held:
        assert parity.difference(got, want) <= parity.TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_does_not_depend_on_its_neighbours(name: str) -> None:
    """A tile of NaN changes no bit of the other images' features (hazard 39), nor of its own image's view."""
    family, made = FAMILIES[name], served(name)
    request = family.request(TWO_OF_EACH)
    clean = made.execute(request)
    spoiled = {**request, family.tiles: request[family.tiles].clone()}
    spoiled[family.tiles][3] = float("nan")
    got = made.execute(spoiled)
    view = family.tokens[0] + 1
    assert bool(got[2].isnan().any())
    assert torch.equal(got[2][-view:], clean[2][-view:])
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1], clean[1])


@pytest.mark.slow
def test_compiled_features_are_the_same() -> None:
    """Dynamo traces the path of the tiles once for all budgets, and the features are the same. (The other path is alike.)"""
    family = FAMILIES["ocr2"]
    sam = mock.patch.dict(SAM, {"num_hidden_layers": 1, "global_attn_indexes": [0]})
    with sam, mock.patch.dict(PATCHES, {"num_hidden_layers": 1}):
        model = build_ocr2()
    tile = family.tokens[1]
    ladders = {GLOBAL: (6,), LOCAL: (2 * tile, 6 * tile)}  # no room for a view: it runs eagerly
    made = manager("ocr2", model, mode="compiled", compiler="eager", verify=False, path_token_budgets=ladders)
    made.capture()
    request = family.request(TWO_OF_EACH)
    want = family.by_hand(parity.eager_copy(model), request, TWO_OF_EACH)
    assert parity.difference(made.execute(request), want) <= parity.TOLERANCE
    assert sorted(graph.token_budget for graph in made.graphs()) == [2 * tile, 6 * tile]
    assert counts(made)[0] == 2
    assert counters.graphs_seen == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_all_weights_are_watched(name: str) -> None:
    """Every parameter outside of the text part, so that a graph notices when one is replaced; the tower's come first."""
    model = reference(name)
    modules = modules_of(manager(name, copy.deepcopy(model)).model.table)
    watched = sum(len(list(module.parameters())) for module in modules)
    assert watched == sum("language_model" not in key and "lm_head" not in key for key, _ in model.named_parameters())
    assert len(list(modules[0].parameters())) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_replaced_weights_are_seen(name: str) -> None:
    """All parameters replaced, the loose ones on the model included: the next features are those of the new weights."""
    family, model = FAMILIES[name], FAMILIES[name].build()
    made = manager(name, model, path_token_budgets={path: sizes[1:] for path, sizes in budgets(name).items()}, verify=False)
    made.capture()
    with torch.no_grad():
        state = {key: 1.1 * value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    request = family.request(TWO_OF_EACH)
    want = family.by_hand(parity.eager_copy(model), request, TWO_OF_EACH)
    assert parity.difference(want, family.by_hand(reference(name), request, TWO_OF_EACH)) > parity.CLEARLY_WRONG
    assert parity.difference(made.execute(request), want) <= 2 * parity.TOLERANCE  # larger weights, larger features


BF16 = 0.02
"""Measured at most 0.0091 (relative norm of the difference, over all images)."""


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_features_are_close_to_the_untouched_model_in_bf16(name: str) -> None:
    """Both in bfloat16; the norm of the difference stays a small part of the features' norm."""
    family, model = FAMILIES[name], FAMILIES[name].build()
    cast_parameters(model)
    made = manager(name, model, path_token_budgets={path: sizes[1:] for path, sizes in budgets(name).items()}, verify=False)
    made.capture()
    request = family.request(TWO_OF_EACH)
    request |= {key: request[key].bfloat16() for key in ("pixel_values", family.tiles)}
    got, want = (
        torch.cat(found).float()
        for found in (made.execute(request), family.by_hand(parity.eager_copy(model), request, TWO_OF_EACH))
    )
    error = float((got - want).norm() / want.norm())
    assert error <= BF16
    assert counts(made)[1] == {}


def cast_parameters(model: nn.Module) -> None:
    """To bfloat16, as loading does it: inverse frequencies stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("published", {"images_spatial_crop": [(0, 1)]}, "columns and rows of at least 1"),
        ("published", {"images_spatial_crop": [(2, 2)]}, "add up to 4"),
        ("ocr2", {"num_local_patches": [-1]}, "integer from 0 on"),
        ("ocr2", {"num_local_patches": [1]}, "add up to 1"),
        ("unlimited", {"num_local_patches": [1]}, "1 tiles in num_local_patches and 2 x 1 in patches_grid"),
        ("unlimited", {"patches_grid": [(2, 1), (1, 1)]}, "expected equal numbers"),
    ],
)
def test_requests_that_do_not_add_up_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    """Before any work, and the text says what is wrong."""
    if name not in FAMILIES:
        pytest.skip("not in this version of transformers")
    with pytest.raises(InputError, match=message):
        served(name).execute(FAMILIES[name].request([(2, 1)]) | change)


def test_a_single_tile_where_the_processor_makes_one() -> None:
    """Unlimited-OCR: the number of tiles decides, not the grid; a grid of (1, 1) may have one tile."""
    if "unlimited" not in FAMILIES:
        pytest.skip("not in this version of transformers")
    family = FAMILIES["unlimited"]
    request = family.request([(2, 1), (1, 1)])
    request |= {"pixel_values_local": request["pixel_values_local"][:1], "num_local_patches": [0, 1]}
    with torch.no_grad():
        want = reference("unlimited").model.get_image_features(**request).pooler_output
    assert parity.difference(served("unlimited").execute(request), want) <= parity.TOLERANCE


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_a_bare_tower(name: str) -> None:
    """Its main output, view by view and tile by tile."""
    tower, request = FAMILIES[name].build().model.vision_tower, FAMILIES[name].request(TWO_OF_EACH)
    made = encoder_for(tower, mode="eager", packing="greedy")
    with torch.no_grad():
        want = [
            reference(name).model.vision_tower(entry[None]).last_hidden_state[0]
            for key in ("pixel_values", "pixel_values_local")
            for entry in request[key]
        ]
    got = made.execute({key: request[key] for key in ("pixel_values", "pixel_values_local")})
    assert parity.difference(got, want) <= parity.TOLERANCE


# --- the models' own calls -------------------------------------------------------------------------------------------


@functools.cache
def whole(name: str) -> Any:
    """A model that tests accelerate, one after another."""
    return FAMILIES[name].build()


def tower_budgets(name: str, views: Sequence[int] = (1, 3), tiles: Sequence[int] = (2, 6)) -> dict[str, Any]:
    """One graph for each number of views and of tiles, in tokens of the tower."""
    view, tile = (144, 144) if name == "ocr2" else (16, 9)
    ladders = {GLOBAL: tuple(view * number for number in views), LOCAL: tuple(tile * number for number in tiles)}
    return {"path_token_budgets": ladders, "max_items_per_batch": 6}


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_get_image_features_are_unchanged(name: str) -> None:
    """With tiles, without, and with more than the largest budget: type, fields and numbers; then the model is as before."""
    model = whole(name)
    family = FAMILIES[name]
    with parity.accelerated(model, **tower_budgets(name)) as handle:
        for crops in (TWO_OF_EACH, [(3, 3)]):
            request = family.request(crops)
            with torch.no_grad():
                want = reference(name).model.get_image_features(**request)
            assert parity.difference(model.model.get_image_features(**request), want) <= parity.TOLERANCE
        assert parity.served(handle) == (3 + 8 + 1 + 9, {}, {})
        request = family.request([(1, 1)])
        del request["pixel_values_local"]
        want = reference(name).model.get_image_features(**request)
        assert parity.difference(model.model.get_image_features(**request), want) <= parity.TOLERANCE
    assert "forward" not in vars(model.model.vision_tower)
    assert not any("get_rel_pos" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_logits_are_unchanged(name: str) -> None:
    """The whole public call, with the images of two sizes among text."""
    model, crops = whole(name), [(2, 1), (1, 1)]
    request = FAMILIES[name].request(crops)
    lengths = [len(feature) for feature in served(name).execute(request)]
    ids = torch.tensor([[5, *[IMAGE] * lengths[0], 7, *[IMAGE] * lengths[1], 9]])
    with torch.no_grad():
        want = reference(name)(input_ids=ids, **request).logits
    with parity.accelerated(model, verify=False, **tower_budgets(name, (2,), (2,))) as handle:
        got = model(input_ids=ids, **request).logits
        assert parity.served(handle) == (4, {}, {})
    assert parity.difference(got, want) <= 5 * parity.TOLERANCE


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_calls_that_the_graphs_have_no_answer_for(name: str) -> None:
    """Other sizes, hidden states, tuples and autocast are the model's own to answer, and counted; also by an inner config."""
    model = whole(name)
    tower, view = model.model.vision_tower, FAMILIES[name].sides[0]
    pixels = FAMILIES[name].request([(1, 1)])["pixel_values"]
    with parity.accelerated(model, verify=False, **tower_budgets(name, (1,), (1,))) as handle:
        small = tower(pixels[..., : view // 2, : view // 2])
        states = tower(pixels, output_hidden_states=True)
        as_tuple = tower(pixels, return_dict=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = tower(pixels)
        with mock.patch.object(tower.vision_encoder.config, "output_hidden_states", True):
            inner = tower(pixels)
        assert parity.served(handle) == (0, {}, {"unserved": 3, "more-outputs": 1, "autocast": 1})
    assert inner.hidden_states is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert parity.difference(cast, tower(pixels)) == 0
    with torch.no_grad():
        assert parity.difference(small, tower(pixels[..., : view // 2, : view // 2])) == 0
        assert parity.difference(states, tower(pixels, output_hidden_states=True)) == 0
        assert parity.difference(as_tuple, tower(pixels, return_dict=False)) == 0


def published_call(request: Mapping[str, Any], crops: Crops) -> tuple[list[Any], torch.Tensor]:
    """A request as the published forward takes it."""
    tiles = request["images_crop"].split([count_of(crop) for crop in crops])
    return list(zip(tiles, request["pixel_values"].split(1), strict=True)), request["images_spatial_crop"]


PUBLISHED_BUDGETS = {"sam_global": (16,), "sam_local": (18, 54), "vision_global": (17,), "vision_local": (20, 60)}


def test_the_published_forward_is_unchanged() -> None:
    """Its calls of both encoders are answered, image by image, with views and with tiles; then the model is as before."""
    model, crops = whole("published"), TWO_OF_EACH
    call = published_call(FAMILIES["published"].request(crops), crops)
    with torch.no_grad():
        want = reference("published")(*call)
    with parity.accelerated(model, path_token_budgets=PUBLISHED_BUDGETS, max_items_per_batch=6) as handle:
        assert parity.difference(model(*call), want) <= parity.TOLERANCE
        assert parity.served(handle) == (2 * (3 + 8), {}, {})
        pixels = parity.random(1, 3, 56, 56)
        own = model.model.vision_model(pixels, None)
        assert parity.served(handle)[2] == {"unserved": 1}
    with torch.no_grad():
        assert parity.difference(own, model.model.vision_model(pixels, None)) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_taken_for_the_published_model() -> None:
    """Its modules and parameters under their published names, in a head or alone; without one of them it is refused."""
    model = whole("published")
    for part in (model, model.model):
        with accelerate(part, capture="explicit") as handle:
            assert handle.architecture.name == "DeepSeek-OCR"
    with pytest.raises(ModelError, match="not supported"):
        accelerate(model.model.sam_model)


# --- relative positions ----------------------------------------------------------------------------------------------


def attention_of(model: Any) -> Any:
    """The first SAM attention."""
    return next(module for module in model.modules() if hasattr(module, "get_rel_pos"))


def test_relative_positions_are_those_of_the_method() -> None:
    """Bit for bit, for every number of positions, with and without resizing, in both dtypes."""
    attention = attention_of(reference("ocr2"))
    mine = RelativePositions(attention)
    for side in range(1, 20):
        for dtype in (torch.float32, torch.bfloat16):
            weights = attention.rel_pos_h.detach().to(dtype)
            assert torch.equal(mine(side, side, weights), attention.get_rel_pos(side, side, weights))
    with pytest.raises(ModelError, match="3 queries to 4 keys"):
        mine(3, 4, attention.rel_pos_h)


def test_copies_and_pickles_have_the_method() -> None:
    """Neither a deep copy nor a pickle of a model that is served holds anything of this package."""
    model = build_ocr2()
    tower = model.model.vision_tower
    made = encoder_for(model, mode="eager")
    assert isinstance(vars(attention_of(tower))["get_rel_pos"], RelativePositions)
    buffer = io.BytesIO()
    torch.save(tower, buffer)
    buffer.seek(0)
    pixels = parity.random(1, 3, 64, 64)
    for copied in (copy.deepcopy(tower), torch.load(buffer, weights_only=False)):
        assert not isinstance(attention_of(copied).get_rel_pos, RelativePositions)
        assert attention_of(copied).get_rel_pos.__self__ is attention_of(copied)
        with torch.no_grad():
            assert parity.difference(copied(pixels), tower(pixels)) == 0
    made.clear()


def test_another_method_is_refused() -> None:
    """Where `get_rel_pos` gives something else, nothing stands in for it, and the model stays as it was."""
    model = build_ocr2()
    kind = type(attention_of(model))
    real = kind.get_rel_pos
    with (
        mock.patch.object(kind, "get_rel_pos", lambda self, *sizes: 2 * real(self, *sizes)),
        pytest.raises(ModelError, match="another one than in the tested versions"),
    ):
        accelerate(model)
    assert not any("get_rel_pos" in vars(module) for module in model.modules())


def test_two_encoders_of_one_model() -> None:
    """Closing one leaves the other with its relative positions."""
    model = build_ocr2()
    made = manager("ocr2", model)
    with accelerate(model, capture="explicit"):
        pass
    assert isinstance(vars(attention_of(model))["get_rel_pos"], RelativePositions)
    made.clear()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_forward_touches_the_host(name: str) -> None:
    """On another device than the host's, no operation of a forward has a tensor of the host, which no graph may copy."""
    model = FAMILIES[name].build()
    made = manager(name, model)  # which gives the attention its methods back when it is gone
    table: Any = made.model.table
    model.to("meta")
    for path, tiles in table.tiles.items():
        values = {key: torch.zeros(2, *shape, device="meta") for key, shape in tiles.shapes.items()}
        with torch.no_grad(), HostTensors() as host:
            table.forward(path, values)
        assert host.noted == []
    if name in IN_TRANSFORMERS:
        for module in model.modules():
            vars(module).pop("get_rel_pos", None)
        with torch.no_grad(), HostTensors() as host:
            table.forward(path, values)
        assert "aten.index.Tensor" in host.noted, "the control: the tower's own method does"
