"""Models of tiles, accelerated and as encoders, against untouched models with eager attention that see one tile at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import tiled_models
from tests.models.parity import CLEARLY_WRONG, TOLERANCE, accelerated, difference, eager_copy, random, served
from tests.runtime.toys import largest_difference
from vit_compile.errors import InputError, ModelError, OptionError
from vit_compile.models.accelerate import accelerate, encoder_for
from vit_compile.models.registry import architecture_of
from vit_compile.models.tiled_vlms import bind_idefics3
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.stats import counters

pytest.importorskip("transformers")

SIDE = tiled_models.SIDE


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    call: Callable[[Any, torch.Tensor], Any]
    """The call that is answered, with the untouched or the accelerated model."""
    features: Callable[[Any, torch.Tensor], torch.Tensor]
    """What the language model gets, [N, tokens, width], by public calls of the model."""
    owner: Callable[[Any], Any]
    """Whose method is replaced."""
    tokens: int = 4
    counts: str | None = None
    uncounted: int = 0


def pooled(model: Any, tiles: torch.Tensor) -> torch.Tensor:
    """Behind the projector, by `get_image_features`."""
    found = model.model.get_image_features(tiles).pooler_output
    return torch.stack(found) if isinstance(found, list) else found


def projected(model: Any, tiles: torch.Tensor) -> torch.Tensor:
    """Llama 4: its forward applies the projector itself."""
    return model.multi_modal_projector(model.vision_model(tiles).last_hidden_state)


def connected(model: Any, tiles: torch.Tensor) -> torch.Tensor:
    """Idefics3: tower and connector."""
    return model.model.connector(model.model.vision_model(tiles).last_hidden_state)


def inner(model: Any, tiles: torch.Tensor) -> Any:
    """The call that a model makes itself."""
    return model.model.get_image_features(tiles)


CASES = {
    "internvl": Case(tiled_models.tiny_internvl, inner, pooled, lambda model: model.model, counts="image_num_patches"),
    "internvl_chat": Case(
        tiled_models.tiny_internvl_chat,
        lambda model, tiles: model.extract_feature(tiles),
        lambda model, tiles: model.extract_feature(tiles),
        lambda model: model,
        counts="image_num_patches",
    ),
    "gemma3": Case(tiled_models.tiny_gemma3, inner, pooled, lambda model: model.model, counts="num_crops", uncounted=1),
    "llama4": Case(
        tiled_models.tiny_llama4,
        lambda model, tiles: model.vision_model(tiles),
        projected,
        lambda model: model.vision_model,
        counts="patches_per_image",
    ),
    "llava": Case(tiled_models.tiny_llava, inner, pooled, lambda model: model.model, tokens=16),
    "idefics3": Case(
        tiled_models.tiny_idefics3,
        lambda model, tiles: model.model.vision_model(tiles),
        connected,
        lambda model: model.model.vision_model,
        tokens=16,
    ),
    "smolvlm": Case(
        tiled_models.tiny_smolvlm,
        lambda model, tiles: model.model.vision_model(tiles),
        connected,
        lambda model: model.model.vision_model,
        tokens=16,
    ),
}
FEATURE_TOKENS = {name: 16 if name == "llava" else 4 for name in CASES}
"""Of a tile; `Case.tokens` are those that the budgets of the calls count, for Idefics3 before its connector."""
COUNTED = [name for name, case in CASES.items() if case.counts is not None]
MASKED = ["idefics3", "smolvlm"]


@functools.cache
def model_of(name: str) -> Any:
    """The same for all tests: each leaves it as it was."""
    return CASES[name].build()


@functools.cache
def reference_of(name: str) -> Any:
    """An untouched one with eager attention."""
    return eager_copy(model_of(name))


def tiles_of(count: int, seed: int = 0) -> torch.Tensor:
    """Seeded tiles of the size that all models have."""
    return random(count, 3, SIDE, SIDE, seed=seed)


def stacked(outputs: Sequence[Any]) -> Any:
    """Outputs for one tile each as the output for all of them: lists hold an entry for each tile, tuples one for each layer."""
    first = outputs[0]
    if first is None or isinstance(first, torch.Tensor):
        return None if first is None else torch.cat(list(outputs))
    if isinstance(first, list):
        return [entry for output in outputs for entry in output]
    if isinstance(first, tuple):
        return tuple(stacked(entries) for entries in zip(*outputs, strict=True))
    joined = type(first)(**{field: stacked([output[field] for output in outputs]) for field in first})
    for field in first:  # in the order of the original, which is not always that of the class
        joined.move_to_end(field)
    return joined


@torch.no_grad()
def alone(call: Callable[[Any, torch.Tensor], Any], model: Any, tiles: torch.Tensor) -> Any:
    """One tile at a time."""
    return stacked([call(model, tile[None]) for tile in tiles])


def budgets(name: str) -> dict[str, Any]:
    """Two graphs, for two tiles and for four."""
    tokens = CASES[name].tokens
    return {"token_budgets": (2 * tokens, 4 * tokens)}


def request_of(name: str, counts: Sequence[int], tiles: torch.Tensor) -> dict[str, Any]:
    """Items with so many tiles each, as the processor says it."""
    case = CASES[name]
    return {"pixel_values": tiles, case.counts: [count - case.uncounted for count in counts]}


@functools.cache
def encoder_of(name: str) -> EncoderCudaGraphManager:
    """A captured encoder, the same for all tests: what one leaves in its buffers is there for the next."""
    tokens = FEATURE_TOKENS[name]
    made = encoder_for(model_of(name), mode="eager", packing="greedy", token_budgets=(2 * tokens, 4 * tokens))
    made.capture()
    assert made.snapshot()["not_captured"] == []
    return made


@torch.no_grad()
def encoded(name: str, request: Mapping[str, Any]) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Features of each item, hits, misses by reason."""
    made = encoder_of(name)
    made._statistics.reset()
    features = made.execute(request)
    snapshot = made.snapshot()
    return features, snapshot["graph_hits"], snapshot["miss_reasons"]


# --- the calls of a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_calls_return_what_they_returned(name: str) -> None:
    """One tile, three, as many as a graph holds, and more than the largest holds: same type, fields, dtypes and numbers."""
    case = CASES[name]
    with accelerated(model_of(name), **budgets(name)) as handle:
        hits = 0
        for count in (1, 3, 4, 7):
            tiles = tiles_of(count, seed=count)
            want = alone(case.call, reference_of(name), tiles)
            assert difference(case.call(handle.model, tiles), want) <= TOLERANCE
            hits += count
        assert served(handle) == (hits, {}, {})


@pytest.mark.parametrize("name", CASES)
def test_close_restores_the_model(name: str) -> None:
    """Afterwards the method is the class's own, and it answers."""
    case, tiles = CASES[name], tiles_of(2)
    with accelerated(model_of(name), **budgets(name)) as handle:
        (method,) = [call.method for call in handle._binding.calls]
        assert method in vars(case.owner(handle.model))
    assert method not in vars(case.owner(model_of(name)))
    with torch.no_grad():
        assert difference(case.call(model_of(name), tiles), alone(case.call, reference_of(name), tiles)) <= TOLERANCE
    assert handle.stats()["graph_hits"] == 0


BF16_BOUND = 0.02
"""Norm of the error over the norm; measured values are up to 0.009 (Llama 4), on both versions."""


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name: str) -> None:
    """In bfloat16 the answer is that of the untouched model in bfloat16, up to the order of sums."""
    case, tiles = CASES[name], tiles_of(3)
    model, reference = copy.deepcopy(model_of(name)), copy.deepcopy(reference_of(name))
    for one in (model, reference):
        for parameter in one.parameters():  # buffers stay as they are: `from_pretrained` does not round them either
            parameter.data = parameter.data.bfloat16()
    tiles = tiles.bfloat16()
    want = alone(case.call, reference, tiles)
    with accelerated(model, **budgets(name)) as handle:
        got = case.call(model, tiles)
        difference(got, want)  # types, fields, dtypes
        assert served(handle) == (3, {}, {})
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert a.dtype == torch.bfloat16
        error = float((a.float() - b.float()).norm() / b.float().norm())
        assert error <= BF16_BOUND, error


def tensors(output: Any) -> list[torch.Tensor]:
    """All that an output holds."""
    if output is None or isinstance(output, torch.Tensor):
        return [] if output is None else [output]
    return [tensor for value in (output.values() if isinstance(output, Mapping) else output) for tensor in tensors(value)]


@pytest.mark.parametrize("name", ["llama4", "llava", "idefics3"])
def test_traced_once_for_all_budgets(name: str) -> None:
    """Dynamo takes the whole forward into one graph, hidden states that hooks record and complex numbers included.

    Without trials, which also run single tiles: torch.compile traces them by themselves.
    """
    case, tiles = CASES[name], tiles_of(3)
    with accelerated(model_of(name), **budgets(name), mode="compiled", compiler="eager", verify=False) as handle:
        assert difference(case.call(handle.model, tiles), alone(case.call, reference_of(name), tiles)) <= TOLERANCE
        assert served(handle) == (3, {}, {})
    assert counters.graphs_seen == 1


@pytest.mark.parametrize("name", CASES)
def test_a_tile_does_not_depend_on_its_neighbours(name: str) -> None:
    """A tile of NaN changes no bit of the others, nor of the next call."""
    case, tiles = CASES[name], tiles_of(4)
    spoiled = tiles.clone()
    spoiled[1] = float("nan")
    with accelerated(model_of(name), **budgets(name)) as handle:
        clean, got = (tensors(case.call(handle.model, one)) for one in (tiles, spoiled))
        for a, b in zip(got, clean, strict=True):
            if len(a) == 4:
                assert bool(a[1].isnan().any())
                assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])
        assert all(torch.equal(a, b) for a, b in zip(tensors(case.call(handle.model, tiles)), clean, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_exchanged_tiles_show(name: str) -> None:
    """The control of the comparisons: two tiles exchanged, or one pixel row lost, are clearly another answer."""
    case, tiles = CASES[name], tiles_of(3)
    lost = tiles.clone()
    lost[:, :, 4:] = lost[:, :, :-4].clone()
    want = alone(case.call, reference_of(name), tiles)
    with accelerated(model_of(name), **budgets(name)) as handle:
        for other in (tiles[[1, 0, 2]], lost):
            assert difference(case.call(handle.model, other), want) > CLEARLY_WRONG


def images_of(name: str, tiles: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the whole model's `get_image_features`."""
    if name == "llama4":
        return (tiles,), {"vision_feature_select_strategy": "default"} if strategy_wanted() else {}
    if name in MASKED:  # two prompts, of which the second has one image less: its place is taken by zeros
        padded = torch.cat([tiles, torch.zeros_like(tiles[:1])]).unflatten(0, (2, -1))
        return (padded,), {"pixel_attention_mask": torch.ones(2, padded.shape[1], SIDE, SIDE).long()}
    return (tiles,), {}


def strategy_wanted() -> bool:
    """Llama 4 of transformers 5.17 has to be given one."""
    import inspect

    from transformers import Llama4ForConditionalGeneration

    return "vision_feature_select_strategy" in inspect.signature(Llama4ForConditionalGeneration.get_image_features).parameters


@pytest.mark.parametrize("name", [name for name in CASES if name != "internvl_chat"])
def test_get_image_features_of_the_whole_model(name: str) -> None:
    """As users call it, on the model with a head: type, fields, dtypes and numbers; all tiles from the graphs."""
    args, kwargs = images_of(name, tiles_of(3))
    with torch.no_grad():
        want = reference_of(name).get_image_features(*args, **kwargs)
    with accelerated(model_of(name), **budgets(name)) as handle:
        assert difference(handle.model.get_image_features(*args, **kwargs), want) <= TOLERANCE
        assert served(handle) == (3, {}, {})


# --- calls that are the model's own -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("internvl", lambda model: model.model.get_image_features(random(2, 3, 24, 24)), "unserved"),
        ("internvl", lambda model: model.model.get_image_features(tiles_of(2), vision_feature_layer=1), "unserved"),
        ("internvl", lambda model: model.model.get_image_features(tiles_of(2), output_hidden_states=True), "more-outputs"),
        ("internvl", lambda model: model.model.get_image_features(tiles_of(2), return_dict=False), "unserved"),
        ("gemma3", lambda model: model.model.get_image_features(tiles_of(2), interpolate_pos_encoding=True), "unserved"),
        ("llama4", lambda model: model.vision_model(tiles_of(2), output_hidden_states=True), "more-outputs"),
        ("llama4", lambda model: model.vision_model(tiles_of(2), return_dict=False), "unserved"),
        ("llava", lambda model: model.model.get_image_features(tiles_of(2), vision_feature_layer=-1), "unserved"),
        ("llava", lambda model: model.model.get_image_features(tiles_of(2), vision_feature_layer=[-2]), "unserved"),
        ("llava", lambda model: model.model.get_image_features(tiles_of(2), vision_feature_select_strategy="full"), "unserved"),
        ("idefics3", lambda model: model.model.vision_model(random(2, 3, 8, 16)), "unserved"),
        ("smolvlm", lambda model: model.model.vision_model(random(2, 3, 16, 8)), "unserved"),
    ],
)
def test_other_calls_run_the_models_own_code(name: str, call: Callable[[Any], Any], reason: str) -> None:
    """Other sizes, layers and outputs: counted with a reason, and the numbers are the model's."""
    with torch.no_grad():
        want = call(reference_of(name))
    with accelerated(model_of(name), **budgets(name)) as handle:
        assert difference(call(handle.model), want) <= TOLERANCE
        assert served(handle) == (0, {}, {reason: 1})


def test_arguments_that_repeat_the_config_are_served() -> None:
    """Layer and strategy said explicitly, but as the config has them."""
    tiles = tiles_of(2)
    chosen = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    with accelerated(model_of("llava"), **budgets("llava")) as handle:
        got = handle.model.model.get_image_features(tiles, **chosen)
        assert difference(got, alone(inner, reference_of("llava"), tiles)) <= TOLERANCE
        assert served(handle) == (2, {}, {})


@pytest.mark.parametrize("setting", [("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")])
def test_a_config_that_was_changed_since(setting: tuple[str, Any]) -> None:
    """The graphs were made for the settings of then: the model's own code answers, until they are back."""
    attribute, value = setting
    model, tiles = copy.deepcopy(model_of("llava")), tiles_of(2)
    reference = eager_copy(model)
    setattr(reference.model.config, attribute, value)
    want = alone(inner, reference, tiles)
    with accelerated(model, **budgets("llava")) as handle:
        before = getattr(model.model.config, attribute)
        setattr(model.model.config, attribute, value)
        assert difference(inner(model, tiles), want) <= TOLERANCE
        setattr(model.model.config, attribute, before)
        assert difference(inner(model, tiles), alone(inner, reference_of("llava"), tiles)) <= TOLERANCE
        assert served(handle) == (2, {}, {"unserved": 1})


def test_a_config_without_return_dict() -> None:
    """Outputs are tuples then, which the encoder does not make."""
    model, tiles = copy.deepcopy(model_of("internvl")), tiles_of(2)
    reference = eager_copy(model)
    model.model.config.return_dict = reference.model.config.return_dict = False
    with torch.no_grad():
        want = inner(reference, tiles)
    assert isinstance(want, tuple)
    with accelerated(model, **budgets("internvl")) as handle:
        assert difference(inner(model, tiles), want) <= TOLERANCE
        assert served(handle) == (0, {}, {"unserved": 1})


def test_no_tiles_at_all() -> None:
    """An empty batch is the model's own to answer, with its own error."""
    with accelerated(model_of("gemma3"), **budgets("gemma3")) as handle:
        with pytest.raises(RuntimeError, match="0 elements"):
            inner(handle.model, tiles_of(0))
        assert served(handle) == (0, {}, {"unserved": 1})


# --- variants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "call"),
    [
        (lambda: tiled_models.tiny_llava(vision_feature_layer=[-2, 0], vision_feature_select_strategy="default"), inner),
        (lambda: tiled_models.tiny_llava(vision_feature_layer=-1, vision_feature_select_strategy="full"), inner),
        (lambda: tiled_models.tiny_internvl(vision_feature_layer=-2), inner),
        (lambda: tiled_models.tiny_internvl_chat(select_layer=-2), CASES["internvl_chat"].call),
        (lambda: tiled_models.tiny_internvl_chat(version="v1"), CASES["internvl_chat"].call),
    ],
    ids=["llava several layers", "llava full", "internvl inner layer", "chat inner layer", "chat v1"],
)
def test_layers_and_strategies(build: Callable[[], Any], call: Callable[[Any, torch.Tensor], Any]) -> None:
    """Whichever hidden states the config chooses: the answer has the same fields and numbers."""
    model, tiles = build(), tiles_of(3)
    want = alone(call, eager_copy(model), tiles)
    with accelerated(model, token_budgets=(16, 64)) as handle:
        assert difference(call(model, tiles), want) <= TOLERANCE
        assert served(handle) == (3, {}, {})


@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("internvl", lambda model: model.model.vision_tower),
        ("llama4", lambda model: model.vision_model),
        ("idefics3", lambda model: model.model.vision_model),
        ("smolvlm", lambda model: model.model.vision_model),
    ],
)
def test_bare_towers(name: str, find: Callable[[Any], Any]) -> None:
    """A tower without its model: `forward` as before, and its last hidden states as features."""
    tower, tiles = copy.deepcopy(find(model_of(name))), tiles_of(3)
    want = alone(lambda tower, tiles: tower(tiles), eager_copy(tower), tiles)
    with accelerated(tower, token_budgets=(17, 68), token_range=(4, 68)) as handle:
        assert difference(tower(tiles), want) <= TOLERANCE
        assert served(handle) == (3, {}, {})
    made = encoder_for(tower, mode="eager", token_budgets=(17, 68), token_range=(4, 68))
    made.capture()
    assert (
        largest_difference(made.execute({**one_each(name, 3), "pixel_values": tiles}), list(want.last_hidden_state)) <= TOLERANCE
    )


def one_each(name: str, count: int) -> dict[str, Any]:
    """Bare towers have no counts."""
    return {}


# --- masks and positions ----------------------------------------------------------------------------------------------


def masks(count: int, h: int = 4, w: int = 4) -> torch.Tensor:
    """Whole tiles, and a last one of h x w patches."""
    mask = torch.ones(count, 4, 4, dtype=torch.bool)
    mask[-1] = False
    mask[-1, :h, :w] = True
    return mask


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_whole_tiles(name: str) -> None:
    """A mask without a hole is that of a whole tile: served."""
    tiles = tiles_of(3)
    want = alone(CASES[name].call, reference_of(name), tiles)
    with accelerated(model_of(name), **budgets(name)) as handle:
        assert difference(handle.model.model.vision_model(tiles, patch_attention_mask=masks(3)), want) <= TOLERANCE
        assert served(handle) == (3, {}, {})


@pytest.mark.parametrize("name", MASKED)
def test_masked_patches_are_not_attended(name: str) -> None:
    """A tile with a masked edge runs the tower's own code, and its hidden patches do not change the others."""
    tiles, mask = tiles_of(2), masks(2, 3, 2)
    with torch.no_grad():
        want = reference_of(name).model.vision_model(tiles, patch_attention_mask=mask)
    with accelerated(model_of(name), **budgets(name)) as handle:
        tower = handle.model.model.vision_model
        got = tower(tiles, patch_attention_mask=mask)
        assert difference(got, want) <= TOLERANCE
        assert difference(got, alone(CASES[name].call, reference_of(name), tiles)) > CLEARLY_WRONG
        hidden = tiles.clone()
        hidden[-1, :, 12:] = 5.0
        again = tower(hidden, patch_attention_mask=mask).last_hidden_state[-1].unflatten(0, (4, 4))[:3, :2]
        assert difference(again, got.last_hidden_state[-1].unflatten(0, (4, 4))[:3, :2]) <= TOLERANCE
        assert served(handle) == (0, {}, {"unserved": 2})


class HostReads(TorchDispatchMode):
    """Names of the operations that wait for a device or depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "is_nonzero"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fields", ["all", None])
@pytest.mark.parametrize("name", CASES)
def test_no_host_reads(name: str, fields: str | None) -> None:
    """The fixed-shape forward reads nothing on the host, also where the tower's own forward does."""
    table = architecture_of(model_of(name)).bind(model_of(name), fields=fields).table
    with torch.no_grad(), HostReads() as mode:
        features = table.forward("main", {"pixel_values": tiles_of(2)})
    assert features.shape == (2 * table.tiles["main"].tokens, table.out_hidden_size)
    assert mode.found == []


@pytest.mark.parametrize("name", MASKED)
def test_positions_reach_the_features(name: str) -> None:
    """The control: with the positions of other patches the features are clearly others."""
    model, tiles = copy.deepcopy(model_of(name)), tiles_of(2)
    tower = model.model.vision_model
    binding = bind_idefics3(model, type(tower).__name__, fields=None)
    with torch.no_grad():
        right = binding.table.forward("main", {"pixel_values": tiles})
        tower.embeddings.position_embedding.weight.data = tower.embeddings.position_embedding.weight.data.roll(1, 0)
        wrong = binding.table.forward("main", {"pixel_values": tiles})
    want = alone(connected, reference_of(name), tiles).flatten(0, 1)
    assert difference(right, want) <= TOLERANCE
    assert difference(wrong, want) > CLEARLY_WRONG


def test_a_tower_that_computes_something_else_is_refused() -> None:
    """The graph enters the tower through its parts: if they are not all there is, it says so."""
    model = copy.deepcopy(model_of("idefics3"))
    tower = model.model.vision_model
    own = type(tower).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    tower.__class__ = type(type(tower).__name__, (type(tower),), {"forward": forward})
    with pytest.raises(ModelError, match="computes something else"):
        accelerate(model)


# --- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[1], [3], [4], [1, 3, 2], [2, 2], [1, 6, 1]], ids=str)
@pytest.mark.parametrize("name", COUNTED)
def test_features_of_items_with_several_tiles(name: str, counts: list[int]) -> None:
    """One tensor for each item, its tiles one after another, as the language model gets them; only what is above the largest
    graph runs eagerly."""
    tiles = tiles_of(sum(counts), seed=len(counts))
    features = alone(CASES[name].features, reference_of(name), tiles)
    want = [part.flatten(0, 1) for part in features.split(counts)]
    got, hits, misses = encoded(name, request_of(name, counts, tiles))
    assert largest_difference(got, want) <= TOLERANCE
    large = sum(count > 4 for count in counts)
    assert (hits, misses) == (len(counts) - large, {"too-large": large} if large else {})


@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("name", [name for name in CASES if name not in COUNTED])
def test_features_of_single_tiles(name: str, count: int) -> None:
    """Where the processor gives no counts, every tile is an item."""
    tiles = tiles_of(count, seed=count)
    want = list(alone(CASES[name].features, reference_of(name), tiles))
    got, hits, misses = encoded(name, {"pixel_values": tiles})
    assert largest_difference(got, want) <= TOLERANCE
    assert (hits, misses) == (count, {})


@pytest.mark.parametrize("name", ["internvl", "internvl_chat"])
@pytest.mark.parametrize("images", [[], [2], [1, 3]], ids=str)
def test_clips_among_images(name: str, images: list[int]) -> None:
    """A clip of 3 frames and one of a single frame, alone and with images: images first, then clips, each frame a tile."""
    frames, tiles = tiles_of(4, seed=1), tiles_of(sum(images), seed=2)
    request: dict[str, Any] = {"pixel_values_videos": frames, "video_num_patches": [3, 1]}
    if images:
        request |= request_of(name, images, tiles)
    features = alone(CASES[name].features, reference_of(name), torch.cat([tiles, frames]))
    want = [part.flatten(0, 1) for part in features.split([*images, 3, 1])]
    got, hits, misses = encoded(name, request)
    assert largest_difference(got, want) <= TOLERANCE
    assert (hits, misses) == (len(images) + 2, {})


def test_features_in_bfloat16() -> None:
    """An encoder of a model in bfloat16 gives bfloat16 features, near those of the untouched model in bfloat16."""
    model, reference, tiles = model_of("gemma3"), reference_of("gemma3"), tiles_of(3)
    model, reference = (copy.deepcopy(one).bfloat16() for one in (model, reference))
    made = encoder_for(model, mode="eager", token_budgets=(8, 16))
    made.capture()
    (got,) = made.execute({"pixel_values": tiles.bfloat16(), "num_crops": [2]})
    want = alone(pooled, reference, tiles.bfloat16()).flatten(0, 1)
    assert got.dtype == torch.bfloat16
    assert float((got.float() - want.float()).norm() / want.float().norm()) <= BF16_BOUND


@pytest.mark.parametrize(
    ("name", "counts", "words"),
    [
        ("internvl", [1, 1], "pixel_values has 3 rows, but .* add up to 2"),
        ("internvl", [3, 0], "entry 1 of image_num_patches is 0: expected a positive integer"),
        ("gemma3", [2, 2], "pixel_values has 3 rows, but .* add up to 4"),
        ("gemma3", [4, 0], "entry 1 of num_crops is -1: expected an integer from 0 on"),
        ("llama4", [4], "pixel_values has 3 rows, but .* add up to 4"),
    ],
)
def test_wrong_counts_are_refused(name: str, counts: list[int], words: str) -> None:
    """Counts that are not those of the tiles, before any work."""
    with pytest.raises(InputError, match=words):
        encoder_of(name).execute(request_of(name, counts, tiles_of(3)))


def test_options_of_other_tables_are_refused() -> None:
    """There are no boundaries here, and so no numbers of segments."""
    with pytest.raises(OptionError, match="no option 'segment_capacities'"):
        accelerate(model_of("gemma3"), segment_capacities=(1,))


@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_table(name: str) -> None:
    """Every model is found by its own row."""
    row = architecture_of(model_of(name))
    assert row.name.lower().replace(" ", "").startswith(name.split("_")[0])
    assert row.remote_code == (name == "internvl_chat")
    assert ("video" in row.modalities) == name.startswith("internvl")
