"""Step3-VL and Step3.7, whole images and the models' own calls, against untouched models.

The reference encodes one view and one tile at a time with eager attention.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from tests.models import parity
from tests.models.host_tensors import HostTensors
from tests.models.parity import counts, runs
from tests.models.reference import step3_vl as published
from vit_compile.errors import InputError, ModelError
from vit_compile.models.accelerate import accelerate, encoder_for
from vit_compile.models.two_views import GLOBAL, LOCAL, TwoViewTable
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.weights import modules_of
from vit_compile.stats import counters

transformers = pytest.importorskip("transformers")

VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2.0}
TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
TEXT |= {"moe_intermediate_size": 8, "share_expert_dim": 8, "sliding_window": 8}
IMAGE = 60


def build_step3p7(image_size: int = 52, patch_size: int = 4) -> Any:
    """16 tokens a view, 9 a tile."""
    vision = VISION | {"image_size": image_size, "patch_size": patch_size}
    config = transformers.Step3p7Config(vision_config=vision, text_config=TEXT, image_token_id=IMAGE)
    return parity.seeded(lambda: transformers.Step3p7ForConditionalGeneration(config))


def build_published(image_size: int = 52, patch_size: int = 4) -> Any:
    """9 tokens a view, 4 a tile."""
    sizes = published.TINY | {"image_size": image_size, "patch_size": patch_size}
    return parity.seeded(lambda: published.Step3VLForConditionalGeneration(sizes))


@dataclass(frozen=True)
class Family:
    """One architecture, and what a test has to know about it."""

    build: Callable[..., Any]
    tokens: tuple[int, int]
    """Of a view and of a tile."""

    tiles: str
    counts: str

    def request(self, counts: Sequence[int], seed: int = 0) -> dict[str, Any]:
        """Images with so many tiles, as the processor makes them."""
        return {
            "pixel_values": parity.random(len(counts), 3, 52, 52, seed=seed),
            self.tiles: parity.random(sum(counts), 3, 36, 36, seed=seed + 1),
            self.counts: list(counts),
        }

    def encode(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """The model's own modules on one entry: [tokens, width]."""
        inner = model.model
        if self.counts == "num_patches":
            return inner.encode(pixels[None])[0]
        return inner.multi_modal_projector(inner.vision_model(pixels[None]).last_hidden_state)[0]

    @torch.no_grad()
    def by_hand(self, model: Any, request: Mapping[str, Any]) -> list[torch.Tensor]:
        """Every tile alone, then the view."""
        tiles, found = iter(request[self.tiles]), []
        for view, count in zip(request["pixel_values"], request[self.counts], strict=True):
            own = [self.encode(model, next(tiles)) for _ in range(count)]
            found.append(torch.cat([*own, self.encode(model, view)]))
        return found


FAMILIES = {
    "step3p7": Family(build_step3p7, (16, 9), "pixel_values_local", "num_local_patches"),
    "published": Family(build_published, (9, 4), "patch_pixel_values", "num_patches"),
}
THREE = [2, 0, 3]
CASES: dict[str, Sequence[int]] = {
    "one image without tiles": [0],
    "one image": [2],
    "three images": THREE,
    "no tiles at all": [0, 0, 0],
    "exact fit": [6, 0, 0],
    "one above the largest": [1, 9, 0],
}


@functools.cache
def reference(name: str) -> Any:
    """Untouched, with eager attention; never served."""
    return parity.eager_copy(FAMILIES[name].build())


def ladders(name: str, views: Sequence[int] = (1, 3), tiles: Sequence[int] = (2, 6)) -> dict[str, tuple[int, ...]]:
    """A graph for each number of views and of tiles."""
    view, tile = FAMILIES[name].tokens
    return {GLOBAL: tuple(view * number for number in views), LOCAL: tuple(tile * number for number in tiles)}


def manager(name: str, model: Any = None, **options: Any) -> EncoderCudaGraphManager:
    """Of whole images, not captured."""
    defaults = {"mode": "eager", "packing": "greedy", "path_token_budgets": ladders(name), "max_items_per_batch": 6}
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
    """From padded graphs, in the order of the request: tiles, then the view. Tiles above the largest budget run eagerly."""
    family, made, request = FAMILIES[name], served(name), FAMILIES[name].request(CASES[case])
    made._statistics.reset()
    assert parity.difference(made.execute(request), family.by_hand(reference(name), request)) <= parity.TOLERANCE
    large = sum(count > 6 for count in CASES[case])
    hits = len(CASES[case]) + sum(0 < count <= 6 for count in CASES[case])
    assert counts(made) == (hits, {"too-large": large} if large else {})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_is_what_the_model_computes(name: str) -> None:
    """The tests' own assembly equals the model's, which encodes all views and all tiles together."""
    request, model = FAMILIES[name].request(THREE), reference(name).model
    with torch.no_grad():
        want = model.get_image_features(**request)
    want = want if name == "published" else want.pooler_output
    assert parity.difference(FAMILIES[name].by_hand(reference(name), request), want) <= parity.TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_may_be_tensors(name: str) -> None:
    """Of tiles, on the host."""
    family, request = FAMILIES[name], FAMILIES[name].request(THREE)
    got = served(name).execute(request | {family.counts: torch.tensor(THREE)})
    assert parity.difference(got, served(name).execute(request)) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_of_tokens_at_the_released_sizes(name: str) -> None:
    """Views of 728 and tiles of 504 pixels, patches of 14, at a small width: 169 + 81 P, and 169 in a request without tiles."""
    family = FAMILIES[name]
    with mock.patch.dict(VISION, {"num_hidden_layers": 1}), mock.patch.dict(published.TINY, {"num_hidden_layers": 1}):
        made = manager(name, family.build(728, 14), path_token_budgets=None, max_items_per_batch=None)
    assert made.ladders.paths == {
        GLOBAL: (169, 338, 676, 1352, 2704),
        LOCAL: (0, 81, 162, 324, 648, 1296, 2592, 2704),
    }
    request = {"pixel_values": parity.random(2, 3, 728, 728), family.tiles: parity.random(2, 3, 504, 504), family.counts: [2, 0]}
    assert [len(feature) for feature in made.execute(request)] == [169 + 2 * 81, 169]


@pytest.mark.parametrize("name", FAMILIES)
def test_swapped_tiles_show(name: str) -> None:
    """The first and the last tile of an image exchanged give clearly other features."""
    family, request = FAMILIES[name], FAMILIES[name].request([3])
    want = family.by_hand(reference(name), request)
    request[family.tiles] = request[family.tiles][[2, 1, 0]]
    assert parity.difference(served(name).execute(request), want) > parity.CLEARLY_WRONG


def test_the_view_in_front_shows() -> None:
    """The other order of the parts gives clearly other features."""
    family, request = FAMILIES["published"], FAMILIES["published"].request([2])
    want = family.by_hand(reference("published"), request)

    def assemble(self: Any, key: Any, outputs: Mapping[str, Any]) -> torch.Tensor:
        return torch.cat([outputs[GLOBAL], outputs[LOCAL]])

    with mock.patch.object(TwoViewTable, "assemble", assemble):
        assert parity.difference(served("published").execute(request), want) > parity.CLEARLY_WRONG


def test_transposed_positions_show() -> None:
    """Step3.7: rows and columns of the rotary positions exchanged give clearly other features, and are refused at the start."""
    model, made, request = build_step3p7(), served("step3p7"), FAMILIES["step3p7"].request([0])
    real = torch.cartesian_prod
    with mock.patch.object(torch, "cartesian_prod", lambda *axes: real(*axes).flip(1)):
        with pytest.raises(ModelError, match="something else"):
            encoder_for(model)
        with torch.no_grad():
            got = made.model.encoder_eager_forward(request, GLOBAL)
    want = FAMILIES["step3p7"].by_hand(reference("step3p7"), request)[0]
    assert parity.difference(got, want) > parity.CLEARLY_WRONG


def test_another_tower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step3.7: what computes something else is not entered by its parts."""
    model = build_step3p7()
    kind = type(model.model.vision_model)
    real = kind.forward

    def forward(*args: Any, **more: Any) -> Any:
        output = real(*args, **more)
        output.last_hidden_state = 1.5 * output.last_hidden_state
        return output

    monkeypatch.setattr(kind, "forward", forward)
    for start in (accelerate, encoder_for):
        with pytest.raises(ModelError, match="something else"):
            start(model)


def test_another_assembly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step3.7: whole images are compared with `get_image_features`, which `accelerate` leaves to the model."""
    model = build_step3p7()
    kind = type(model.model)
    real = kind.get_image_features

    def features(*args: Any, **more: Any) -> Any:
        output = real(*args, **more)
        output.pooler_output = [feature.flip(0) for feature in output.pooler_output]
        return output

    monkeypatch.setattr(kind, "get_image_features", features)
    with pytest.raises(ModelError, match="something else"):
        encoder_for(model)
    accelerate(model).close()


# --- graphs and no graphs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [(), (GLOBAL,), (LOCAL,), (GLOBAL, LOCAL)])
@pytest.mark.parametrize("tiles", [THREE, [0, 0]], ids=["tiles", "no tiles"])
def test_found_and_not_found(failing: tuple[str, ...], tiles: Sequence[int]) -> None:
    """Each path has a graph or runs eagerly by itself, and without tiles theirs does not run: the features are the same."""
    family, real = FAMILIES["published"], TwoViewTable.forward

    def failing_forward(self: TwoViewTable, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        if path in failing:
            raise RuntimeError(f"no capture of {path}")
        return real(self, path, values)

    made = manager("published", verify=False)  # or first batches are compared with eager runs
    with mock.patch.object(TwoViewTable, "forward", failing_forward):
        made.capture()
    request = family.request(tiles)
    with runs(made) as noted:
        got = made.execute(request)
    assert parity.difference(got, family.by_hand(reference("published"), request)) <= parity.TOLERANCE
    paths = [GLOBAL, LOCAL] if tiles is THREE else [GLOBAL]
    assert set(noted) == {("eager" if path in failing else "replay", path) for path in paths}


def graph_memory(made: EncoderCudaGraphManager) -> set[int]:
    """Storages of the graphs' outputs and buffers."""
    graphs = made._captured.set.graphs.values()
    tensors = [*(graph.output for graph in graphs), *(value for graph in graphs for value in graph.inputs.values.values())]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("name", FAMILIES)
def test_features_without_tiles_are_no_graph_memory(name: str) -> None:
    """A view is handed on as it is, and yet what comes out is not what the next replay writes into."""
    family, made = FAMILIES[name], served(name)
    held = []
    for seed in range(3):
        request = family.request([0, 0], seed)
        got = made.execute(request)
        assert not graph_memory(made) & {feature.untyped_storage().data_ptr() for feature in got}
        held.append((got, family.by_hand(reference(name), request)))
    made.execute(family.request(THREE))
    for got, want in held:
        assert parity.difference(got, want) <= parity.TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_does_not_depend_on_its_neighbours(name: str) -> None:
    """A tile of NaN changes no bit of the other images' features (hazard 39), nor of its own image's view."""
    family, made, request = FAMILIES[name], served(name), FAMILIES[name].request(THREE)
    clean = made.execute(request)
    spoiled = {**request, family.tiles: request[family.tiles].clone()}
    spoiled[family.tiles][3] = float("nan")
    got, view = made.execute(spoiled), family.tokens[0]
    assert bool(got[2].isnan().any())
    assert torch.equal(got[2][-view:], clean[2][-view:])
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1], clean[1])


def test_compiled_features_are_the_same() -> None:
    """Dynamo traces the path of the tiles once for all budgets, and the features are the same. (The other path is alike.)"""
    family, tile = FAMILIES["step3p7"], FAMILIES["step3p7"].tokens[1]
    budgets = {GLOBAL: (6,), LOCAL: (2 * tile, 6 * tile)}  # no room for a view: it runs eagerly
    made = manager("step3p7", mode="compiled", compiler="eager", verify=False, path_token_budgets=budgets)
    made.capture()
    request = family.request(THREE)
    assert parity.difference(made.execute(request), family.by_hand(reference("step3p7"), request)) <= parity.TOLERANCE
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
    """All parameters replaced: the next features are those of the new weights."""
    family, model = FAMILIES[name], FAMILIES[name].build()
    made = manager(name, model, path_token_budgets=ladders(name, (3,), (6,)), verify=False)
    made.capture()
    model.load_state_dict({key: 1.1 * value for key, value in model.state_dict().items()}, assign=True)
    request = family.request(THREE)
    want = family.by_hand(parity.eager_copy(model), request)
    assert parity.difference(want, family.by_hand(reference(name), request)) > parity.CLEARLY_WRONG
    assert parity.difference(made.execute(request), want) <= 2 * parity.TOLERANCE  # larger weights, larger features


BF16 = 0.01
"""Measured at most 0.0038 (relative norm of the difference, over all images)."""


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_features_are_close_to_the_untouched_model_in_bf16(name: str) -> None:
    """Both in bfloat16; the norm of the difference stays a small part of the features' norm."""
    family, model = FAMILIES[name], FAMILIES[name].build()
    for parameter in model.parameters():  # not the inverse frequencies, which loading leaves in float32
        parameter.data = parameter.data.bfloat16()
    made = manager(name, model, path_token_budgets=ladders(name, (3,), (6,)), verify=False)
    made.capture()
    request = family.request(THREE)
    request |= {key: request[key].bfloat16() for key in ("pixel_values", family.tiles)}
    got, want = made.execute(request), family.by_hand(parity.eager_copy(model), request)
    difference = torch.cat(got).float() - torch.cat(want).float()
    error = float(difference.norm() / torch.cat(want).float().norm())
    assert error <= BF16
    assert counts(made)[1] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_patches": [1]}, "add up to 1"),
        ({"num_patches": [-1]}, "integer from 0 on"),
        ({"patch_pixel_values": torch.zeros(2, 3, 52, 52)}, r"expected \[2, 3, 36, 36\]"),
    ],
)
def test_requests_that_do_not_add_up_are_refused(change: dict[str, Any], message: str) -> None:
    """Before any work, and the text says what is wrong."""
    with pytest.raises(InputError, match=message):
        served("published").execute(FAMILIES["published"].request([2]) | change)


def test_a_bare_tower() -> None:
    """Its main output, view by view and tile by tile."""
    request = FAMILIES["step3p7"].request(THREE)
    made = encoder_for(build_step3p7().model.vision_model, mode="eager", packing="greedy")
    with torch.no_grad():
        want = [
            reference("step3p7").model.vision_model(entry[None]).last_hidden_state[0]
            for key in ("pixel_values", "pixel_values_local")
            for entry in request[key]
        ]
    got = made.execute({key: request[key] for key in ("pixel_values", "pixel_values_local")})
    assert parity.difference(got, want) <= parity.TOLERANCE


# --- the models' own calls -------------------------------------------------------------------------------------------

TOWER_TOKENS = {"step3p7": (16, 9), "published": (13 * 13 + 4, 9 * 9 + 4)}


def tower_budgets(name: str, views: Sequence[int] = (1, 3), tiles: Sequence[int] = (2, 6)) -> dict[str, Any]:
    """A graph for each number of views and of tiles, in tokens of the tower."""
    view, tile = TOWER_TOKENS[name]
    sizes = {GLOBAL: tuple(view * number for number in views), LOCAL: tuple(tile * number for number in tiles)}
    return {"path_token_budgets": sizes, "max_items_per_batch": 6}


@pytest.mark.parametrize("name", FAMILIES)
def test_get_image_features_are_unchanged(name: str) -> None:
    """With tiles, without, and with more than the largest budget: type, fields and numbers; then the model is as before."""
    model, family = FAMILIES[name].build().model, FAMILIES[name]
    with parity.accelerated(model, **tower_budgets(name)) as handle:
        for tiles in (THREE, [9]):
            request = family.request(tiles)
            with torch.no_grad():
                want = reference(name).model.get_image_features(**request)
            assert parity.difference(model.get_image_features(**request), want) <= parity.TOLERANCE
        assert parity.served(handle) == (3 + 5 + 1 + 9, {}, {})
        request = family.request([0]) | {family.tiles: None}
        want = reference(name).model.get_image_features(**request)
        assert parity.difference(model.get_image_features(**request), want) <= parity.TOLERANCE
    assert "forward" not in vars(model.vision_model)


def test_logits_are_unchanged() -> None:
    """The whole public call, with images among text."""
    model, request = build_step3p7(), FAMILIES["step3p7"].request([2, 0])
    ids = torch.tensor([[5, *[IMAGE] * (16 + 18), 7, *[IMAGE] * 16, 9]])
    with torch.no_grad():
        want = reference("step3p7")(input_ids=ids, **request).logits
    with parity.accelerated(model, verify=False, **tower_budgets("step3p7", (2,), (2,))) as handle:
        assert parity.difference(model(input_ids=ids, **request).logits, want) <= 5 * parity.TOLERANCE
        assert parity.served(handle) == (4, {}, {})


def test_calls_that_the_graphs_have_no_answer_for() -> None:
    """Other sizes, no entries, hidden states and tuples by a config are the model's own to answer, and counted."""
    tower = build_step3p7().model.vision_model
    pixels = FAMILIES["step3p7"].request([0])["pixel_values"]
    calls: list[Callable[[], Any]] = [
        lambda: tower(pixels[..., :28, :28]),
        lambda: tower(pixels[:, :, :36]),
        lambda: tower(pixels, output_hidden_states=True),
    ]
    with torch.no_grad():
        want = [call() for call in calls]
    with parity.accelerated(tower, verify=False, **tower_budgets("step3p7", (1,), (2,))) as handle:
        got = [call() for call in calls]
        assert parity.served(handle) == (0, {}, {"unserved": 2, "more-outputs": 1})
        tower.config.output_hidden_states = True
        got.append(tower(pixels))
        tower.config.output_hidden_states = False
        assert parity.served(handle) == (0, {}, {"unserved": 2, "more-outputs": 2})
        # What the model says for its tiles changes nothing.
        assert parity.difference(tower(pixels, output_hidden_states=False), tower(pixels)) == 0
        assert parity.served(handle)[0] == 2
    assert parity.difference(got, [*want, want[2]]) == 0


def test_what_is_taken_for_the_published_model() -> None:
    """Its modules under their published names; without one of them it is refused."""
    model = build_published()
    with accelerate(model, capture="explicit") as handle:
        assert handle.architecture.name == "Step3-VL"
    del model.model.vit_downsampler2
    with pytest.raises(ModelError, match="not supported"):
        accelerate(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_forward_touches_the_host(name: str) -> None:
    """On another device than the host's, no operation of a forward has a tensor of the host, and none is read."""
    model = FAMILIES[name].build()
    table: Any = manager(name, model).model.table
    model.to("meta")
    for path, tiles in table.tiles.items():
        values = {key: torch.zeros(2, *shape, device="meta") for key, shape in tiles.shapes.items()}
        with torch.no_grad(), HostTensors() as host:
            table.forward(path, values)
        assert host.noted == []
    if name == "step3p7":
        with pytest.raises(RuntimeError), torch.no_grad():
            model.model.vision_model(torch.zeros(1, 3, 52, 52, device="meta"))
