"""SigLIP 2 (NaFlex), whole and as a bare tower, against an untouched copy with eager attention, one unpadded image at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import parity
from tests.runtime.toys import captured
from vit_compile.errors import InputError, ModelError
from vit_compile.models.accelerate import accelerate, encoder_for
from vit_compile.models.registry import architecture_of
from vit_compile.models.siglip2 import Siglip2Table, bind
from vit_compile.stats import counters

pytest.importorskip("transformers")

Size = tuple[int, int]

CHANNELS, WIDTH, GRID = 12, 32, 5
BUDGETS = (24, 72)
PADDED = 90
OPTIONS = {"token_budgets": BUDGETS, "segment_capacities": (2,)}

# (height, width) in patches, above, at and below the learned grid of 5 x 5.
CASES: dict[str, list[Size]] = {
    "one image": [(4, 6)],
    "three sizes": [(3, 7), (9, 2), (5, 5)],
    "thin": [(1, 18), (18, 1), (1, 1)],
    "exact fit": [(8, 9)],
    "exact fit of three": [(4, 6), (6, 4), (2, 12)],
    "one above the largest": [(3, 4), (9, 9), (2, 3)],
    "no padding at all": [(9, 10)],
}


def build(head: bool = True, kind: str = "Siglip2Model", depth: int = 2) -> Any:
    """A tiny one with random weights."""
    import transformers

    text = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "patch_size": 2,
    }
    config = transformers.Siglip2Config(
        text_config={**text, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**vision, "num_patches": GRID**2, "vision_use_head": head},
    )
    return parity.seeded(lambda: getattr(transformers, kind)(config))


@functools.cache
def untouched() -> Any:
    """The reference."""
    return parity.eager_copy(build())


def pixels(size: Size, seed: int = 0) -> torch.Tensor:
    """Patches [h * w, C] of one image."""
    return parity.random(size[0] * size[1], CHANNELS, seed=seed)


def padded(sizes: Sequence[Size], length: int = PADDED) -> dict[str, torch.Tensor]:
    """Images as a processor pads them."""
    values = [F.pad(pixels(size, seed), (0, 0, 0, length - size[0] * size[1])) for seed, size in enumerate(sizes)]
    shapes = torch.tensor(sizes)
    return {
        "pixel_values": torch.stack(values),
        "pixel_attention_mask": (torch.arange(length) < shapes.prod(1)[:, None]).int(),
        "spatial_shapes": shapes,
    }


@torch.no_grad()
def alone(size: Size, seed: int = 0, model: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(last hidden state [h * w, E], pooled embedding [1, E]) of one image from the reference, without padding."""
    model = untouched() if model is None else model
    count = size[0] * size[1]
    mask, shapes = torch.ones(1, count, dtype=torch.int32), torch.tensor([size])
    found = model.vision_model(pixels(size, seed)[None], mask, shapes)
    return found.last_hidden_state[0], found.pooler_output


def zero_padding(output: Any, mask: torch.Tensor) -> Any:
    """The same output with zeros where images have padding, where the model has values that nobody may read."""
    output.last_hidden_state = output.last_hidden_state.masked_fill(mask[..., None] == 0, 0.0)
    return output


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests that leave it as it was."""
    return build()


@functools.cache
def encoder(kind: str) -> Any:
    """Captured managers over models of their own, for pooled embeddings and for all tokens."""
    whole = build()
    made = encoder_for(whole if kind == "pooled" else whole.vision_model, mode="eager", packing="greedy", **OPTIONS)
    made.capture()
    assert made.snapshot()["not_captured"] == []
    return made


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_image_features_are_what_they_were(model: Any, case: str) -> None:
    """Type, fields, dtypes and numbers of the whole model's call; zeros in the padding; each image equals itself alone."""
    sizes = CASES[case]
    inputs = padded(sizes)
    with torch.no_grad():
        want = untouched().get_image_features(**inputs)
    with parity.accelerated(model, **OPTIONS) as handle:
        got = model.get_image_features(**inputs)
        assert parity.difference(got, zero_padding(want, inputs["pixel_attention_mask"])) <= parity.TOLERANCE
        large = sum(h * w > BUDGETS[-1] for h, w in sizes)
        assert parity.served(handle) == (len(sizes) - large, {"too-large": large} if large else {}, {})
    for i, size in enumerate(sizes):
        tokens, pooled = alone(size, i)
        assert parity.difference(got.last_hidden_state[i, : len(tokens)], tokens) <= parity.TOLERANCE
        assert parity.difference(got.pooler_output[i : i + 1], pooled) <= parity.TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["tokens", "pooled"])
def test_encoder_features(kind: str, case: str) -> None:
    """Of a whole model what is compared with texts, [1, E] for each image; of a bare tower the last hidden state. From padded
    and from packed requests."""
    sizes, which = CASES[case], kind == "pooled"
    want = [alone(size, i)[which] for i, size in enumerate(sizes)]
    assert parity.difference(encoder(kind).execute(padded(sizes)), want) <= parity.TOLERANCE
    packed = {"pixel_values": torch.cat([pixels(size, i) for i, size in enumerate(sizes)]), "spatial_shapes": sizes}
    assert parity.difference(encoder(kind).execute(packed), want) <= parity.TOLERANCE


def test_one_set_of_graphs_serves_every_padding(model: Any) -> None:
    """However far images are padded: no new graph, all hits, and what comes back is as long as what came."""
    with parity.accelerated(model, **OPTIONS) as handle:
        for length in (24, 25, 200):
            inputs = padded([(4, 6), (3, 3)], length)
            want = zero_padding(untouched().get_image_features(**inputs), inputs["pixel_attention_mask"])
            assert parity.difference(model.get_image_features(**inputs), want) <= parity.TOLERANCE
        assert parity.served(handle) == (6, {}, {})


def test_bare_tower_and_texts(model: Any) -> None:
    """The tower called by itself with positions, and the whole model with texts: as before."""
    tower, inputs = model.vision_model, padded(CASES["three sizes"])
    assert architecture_of(tower).name == "SigLIP 2 (NaFlex)"
    with torch.no_grad():
        want = zero_padding(untouched().vision_model(**inputs), inputs["pixel_attention_mask"])
        ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
        logits = untouched()(input_ids=ids, **inputs).logits_per_image
    with parity.accelerated(tower, **OPTIONS) as handle:
        assert parity.difference(tower(*inputs.values()), want) <= parity.TOLERANCE
        assert parity.difference(model(input_ids=ids, **inputs).logits_per_image, logits) <= parity.TOLERANCE
        assert parity.served(handle) == (6, {}, {})


def test_classifier() -> None:
    """It averages the last hidden state over the mask, so zeros in the padding change nothing."""
    classifier, inputs = build(kind="Siglip2ForImageClassification"), padded(CASES["three sizes"])
    with torch.no_grad():
        want = parity.eager_copy(classifier)(**inputs).logits
    with parity.accelerated(classifier, **OPTIONS) as handle:
        assert parity.difference(classifier(**inputs).logits, want) <= parity.TOLERANCE
        assert parity.served(handle) == (3, {}, {})


def test_tower_without_head() -> None:
    """Its pooled output stays None, and there is none to ask for."""
    headless, inputs = build(head=False), padded(CASES["three sizes"])
    with torch.no_grad():
        want = zero_padding(parity.eager_copy(headless).get_image_features(**inputs), inputs["pixel_attention_mask"])
    with parity.accelerated(headless, **OPTIONS):
        got = headless.get_image_features(**inputs)
        assert got.pooler_output is None
        assert parity.difference(got, want) <= parity.TOLERANCE
    with pytest.raises(ModelError, match="no pooling head"):
        Siglip2Table(headless.vision_model, fields="pooled")


def test_compiled_features_are_the_same() -> None:
    """`torch.compile` traces the forward, pooling included, once for both budgets; features are the same."""
    shallow = build(depth=1)
    reference = parity.eager_copy(shallow)
    made = encoder_for(shallow, packing="greedy", compiler="eager", token_budgets=BUDGETS, segment_capacities=())
    made.capture()
    assert made.snapshot()["not_captured"] == []
    for case in ("three sizes", "one image"):
        want = [alone(size, i, reference)[1] for i, size in enumerate(CASES[case])]
        assert parity.difference(made.execute(padded(CASES[case])), want) <= parity.TOLERANCE
    snapshot = made.snapshot()
    assert (snapshot["graph_hits"], snapshot["miss_reasons"]) == (4, {})
    assert counters.graphs_seen == 1


def test_bfloat16() -> None:
    """With weights in bfloat16: 1.5 % of the norm beside the untouched model in bfloat16 (measured: 0.58 % of tokens, 0.66 % of
    pooled embeddings; bfloat16 differs by as much from float32 here)."""
    half = build().to(torch.bfloat16)
    reference, inputs = parity.eager_copy(half), padded(CASES["three sizes"])
    with parity.accelerated(half, **OPTIONS) as handle:
        want = zero_padding(reference.get_image_features(**inputs), inputs["pixel_attention_mask"])
        got = half.get_image_features(**inputs)
        parity.difference(got, want)
        assert parity.served(handle) == (3, {}, {})
        for name in ("last_hidden_state", "pooler_output"):
            difference = (got[name].float() - want[name].float()).norm() / want[name].float().norm()
            assert difference < 1.5e-2, name


def test_positions_follow_weights_that_change_in_place() -> None:
    """Cached metadata is of the size alone: a learned grid with other values gives other positions at once, without a capture."""
    changing = build()
    reference, inputs = parity.eager_copy(changing), padded(CASES["three sizes"])
    with parity.accelerated(changing, **OPTIONS) as handle:
        model_before = changing.get_image_features(**inputs)
        for module in (changing, reference):
            module.vision_model.embeddings.position_embedding.weight.copy_(parity.random(GRID**2, WIDTH, seed=9))
        got = changing.get_image_features(**inputs)
        want = zero_padding(reference.get_image_features(**inputs), inputs["pixel_attention_mask"])
        assert parity.difference(got, want) <= parity.TOLERANCE
        assert parity.difference(got, model_before) > parity.CLEARLY_WRONG
        assert handle.stats()["recaptures"] == 0


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 5), (5, 9), (13, 4), (31, 1)])
def test_resize_weights_are_those_of_the_tower(size: Size) -> None:
    """Rows times columns, applied to the learned grid, are what the tower's own resize makes of it."""
    embeddings = untouched().vision_model.embeddings
    table = bind(build(), "Siglip2VisionModel", fields=None).table
    weights = table.item_metadata(size, "main")["resize_weights"]
    assert weights.shape == (size[0] * size[1], 2, GRID)
    learned = embeddings.position_embedding.weight.detach().view(GRID, GRID, WIDTH)
    want = embeddings.resize_positional_embeddings(learned, torch.tensor([size]), max_length=size[0] * size[1])[0]
    got = torch.einsum("pr,pc,rce->pe", weights[:, 0], weights[:, 1], learned)
    assert parity.difference(got, want) <= 1e-6


@pytest.mark.parametrize("kind", ["tokens", "pooled"])
def test_an_image_does_not_depend_on_its_neighbours(kind: str) -> None:
    """An image of NaN among others changes no bit of theirs, nor of the next request; garbage in the padding of none."""
    made, request = encoder(kind), padded(CASES["three sizes"])
    clean, values = made.execute(request), request["pixel_values"]
    spoiled = values.masked_fill(request["pixel_attention_mask"][..., None] == 0, float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(made.execute({**request, "pixel_values": spoiled}), clean, strict=True))
    spoiled = values.clone()
    spoiled[1] = float("nan")
    got = made.execute({**request, "pixel_values": spoiled})
    assert bool(got[1].isnan().all())
    assert all(torch.equal(got[i], clean[i]) for i in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(made.execute(request), clean, strict=True))


# --- the comparisons can fail ----------------------------------------------------------------------------------------


def one_segment(values: dict[str, Any]) -> dict[str, Any]:
    """All rows attend to each other."""
    boundaries = values["cu_seqlens"].clone()
    boundaries[1:] = boundaries[-1]
    return {"cu_seqlens": boundaries}


def no_positions(values: dict[str, Any]) -> dict[str, Any]:
    """The learned grid is not looked at."""
    return {"resize_weights": torch.zeros_like(values["resize_weights"])}


def swapped_sides(values: dict[str, Any]) -> dict[str, Any]:
    """Rows and columns of the grid exchanged."""
    return {"resize_weights": values["resize_weights"].flip(1)}


@pytest.mark.parametrize("fields", ["tokens", "pooled", "all"])
@pytest.mark.parametrize("spoil", [one_segment, no_positions, swapped_sides])
def test_wrong_metadata_shows(spoil: Callable[[dict[str, Any]], dict[str, Any]], fields: str) -> None:
    """Boundaries and positions reach the tokens and the pooled embedding: wrong ones give clearly others."""
    binding = bind(build(), "Siglip2VisionModel", fields=fields, segment_capacities=())
    table, forward, sizes = binding.table, binding.table.forward, CASES["three sizes"]
    right = [alone(size, i) for i, size in enumerate(sizes)]
    which = {"tokens": slice(0, 1), "pooled": slice(1, 2), "all": slice(0, 2)}[fields]
    want = [
        torch.cat([part.expand(len(part) if fields == "pooled" else h * w, -1) for part in item[which]], dim=1)
        for item, (h, w) in zip(right, sizes, strict=True)
    ]
    for change, is_right in ((dict, True), (spoil, False)):
        table.forward = lambda path, values, change=change: forward(  # type: ignore[method-assign]
            path, {**values, **change(dict(values))}
        )
        made = captured(table, token_budgets=(72,), packing="greedy", verify=False)
        difference = parity.difference(made.execute(padded(sizes)), want)
        assert difference <= parity.TOLERANCE if is_right else difference > parity.CLEARLY_WRONG
        assert made.snapshot()["graph_hits"] == 3


# --- what it does not answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["mask with a hole", "mask of another size", "no mask"])
def test_other_masks_go_to_the_model(model: Any, change: str) -> None:
    """A mask that does not say what the sizes say is the model's own affair, with the result that it had."""
    tower, inputs = model.vision_model, padded([(4, 6), (3, 3)])
    if change == "no mask":
        inputs["pixel_attention_mask"] = None  # type: ignore[assignment]
    else:
        inputs["pixel_attention_mask"][0, 3 if change == "mask with a hole" else 24] ^= 1
    with torch.no_grad():
        want = untouched().vision_model(**inputs)
    with parity.accelerated(model, **OPTIONS) as handle:
        assert parity.difference(tower(**inputs), want) <= parity.TOLERANCE
        reason = "unserved" if change == "no mask" else "refused-input"
        assert parity.served(handle) == (0, {}, {reason: 1})


def test_hidden_states_are_the_models_own(model: Any) -> None:
    """Asked for more than the encoder has, the model answers, hidden states included."""
    inputs = padded([(4, 6), (3, 3)])
    with torch.no_grad():
        want = untouched().get_image_features(**inputs, output_hidden_states=True)
    with parity.accelerated(model, **OPTIONS) as handle:
        got = model.get_image_features(**inputs, output_hidden_states=True)
        assert parity.difference(got, want) <= parity.TOLERANCE
        assert parity.served(handle) == (0, {}, {"more-outputs": 1})


def test_close_restores(model: Any) -> None:
    """Afterwards the tower is the one that it was: its method, its attention, its result."""
    tower, inputs = model.vision_model, padded([(4, 6)])
    configs = [vars(module).get("config") for module in tower.modules()]
    before = tower(**inputs)
    with parity.accelerated(model, **OPTIONS):
        assert "forward" in vars(tower)
    assert "forward" not in vars(tower)
    assert all(vars(m).get("config") is config for m, config in zip(tower.modules(), configs, strict=True))
    assert torch.equal(tower(**inputs).last_hidden_state, before.last_hidden_state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spatial_shapes": torch.tensor([[4, 5]])}, "image 0 has 4 x 5 patches by spatial_shapes"),
        ({"spatial_shapes": torch.tensor([[40, 60]])}, "image 0 has 40 x 60 patches"),
        ({"spatial_shapes": torch.tensor([[0, 6]]), "pixel_attention_mask": torch.zeros(1, PADDED)}, "image 0 of .* 0 x 6"),
        (
            {"spatial_shapes": torch.tensor([[10, 10]]), "pixel_attention_mask": torch.ones(1, PADDED)},
            "image 0 has 10 x 10 patches by spatial_shapes",
        ),
        ({"pixel_attention_mask": torch.ones(1, 7)}, r"pixel_attention_mask \[1, 7\]"),
        ({"pixel_attention_mask": None}, "expected pixel_values"),
    ],
)
def test_wrong_requests_are_refused(change: dict[str, Any], words: str) -> None:
    """Sizes and masks that do not agree, sizes that are none, shapes that do not fit."""
    with pytest.raises(InputError, match=words):
        encoder("tokens").execute({**padded([(4, 6)]), **change})


@pytest.mark.parametrize("part", ["embeddings", "head"])
def test_another_tower_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes something else is not entered by its parts; a head that nobody reads does not matter."""
    whole = build()
    kind = type(whole.vision_model.get_submodule(part))
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **more: 1.5 * real(*args, **more))
    for start in (accelerate, encoder_for):
        with pytest.raises(ModelError, match="something else"):
            start(whole)
    if part == "head":
        encoder_for(whole.vision_model).clear()


class Adapted(nn.Module):
    """Around a layer, as LoRA is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "_modules") else getattr(self.layer, name)

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.layer(*args, **more)


@pytest.mark.parametrize("path", ["embeddings.position_embedding", "head.attention"])
def test_wrapped_layers_are_refused(path: str) -> None:
    """Layers whose weights are read and that are not called: at the start, and when they are wrapped later."""
    whole, inputs = build(), padded([(3, 7)])
    made = encoder_for(whole, mode="eager", packing="greedy", **OPTIONS)
    made.execute(inputs)
    parent, _, name = path.rpartition(".")
    owner = whole.vision_model.get_submodule(parent)
    setattr(owner, name, Adapted(getattr(owner, name)).eval())
    with pytest.raises(ModelError, match="stands in the place of a plain"):
        made.execute(inputs)
    made.clear()
    for start in (accelerate, encoder_for):
        with pytest.raises(ModelError, match="stands in the place of a plain"):
            start(whole)


def test_no_images_is_no_request() -> None:
    """An empty batch gives no features."""
    nothing = {"pixel_values": torch.zeros(0, 9, CHANNELS), "pixel_attention_mask": torch.zeros(0, 9)}
    assert encoder("tokens").execute({**nothing, "spatial_shapes": torch.zeros(0, 2, dtype=torch.int64)}) == []
