"""`accelerate` and its handle, on tiny whole models: what they return, what they keep, what their own code answers."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import towers
from tests.models.parity import CLEARLY_WRONG, TOLERANCE, accelerated, difference, eager_copy, served
from vit_compile.errors import BudgetError, ModelError, OptionError, SkipError
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.installed_call import InstalledCall
from vit_compile.models.registry import architectures
from vit_compile.runtime.config import EncoderConfig
from vit_compile.stats import counters

pytest.importorskip("transformers")

GRIDS = [(1, 4, 6), (1, 8, 4)]
TABLE: dict[str, Any] = {"token_range": (8, 32), "max_frames_per_video": 4, "segment_capacities": ()}
OPTIONS: dict[str, Any] = {"token_budgets": [32], **TABLE}
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


@functools.cache
def shared(kind: str) -> Any:
    """A model for tests that change nothing about it."""
    return towers.tiny_vlm(kind, depth=2)


@functools.cache
def reference(kind: str = "qwen3_vl") -> Any:
    """An untouched one of the same weights with eager attention."""
    return eager_copy(shared(kind))


def fresh(kind: str = "qwen3_vl", attn: str = "sdpa") -> Any:
    """A model of the same weights for a test that changes it."""
    model = copy.deepcopy(shared(kind))
    model.set_attn_implementation(attn)
    return model


def images(seed: int = 0, grids: Any = GRIDS) -> dict[str, Any]:
    """Two of them."""
    return {
        "pixel_values": towers.pixels(sum(t * h * w for t, h, w in grids), seed),
        "image_grid_thw": torch.tensor(grids),
    }


def clip() -> dict[str, Any]:
    """One of three frames, and one of two."""
    return {"pixel_values_videos": towers.pixels(3 * 16 + 2 * 8, 3), "video_grid_thw": torch.tensor([(3, 4, 4), (2, 2, 4)])}


def prompt() -> dict[str, Any]:
    """Two images in a prompt of 24 tokens."""
    ids = [1, 2, 108, *[towers.IMAGE_TOKEN] * 6, 109, 3, 108, *[towers.IMAGE_TOKEN] * 8, 109, 4, 5]
    types = [int(token == towers.IMAGE_TOKEN) for token in ids]
    return {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([types], dtype=torch.int32), **images()}


def features(model: Any, **inputs: Any) -> Any:
    """Of two images, unless others are given."""
    with torch.no_grad():
        return model.get_image_features(**(inputs or images()))


def assert_untouched(model: nn.Module) -> None:
    """Nothing of the package hangs on any module, and the tower shares its config with the whole model again."""
    for name, module in model.named_modules():
        assert not any(isinstance(value, InstalledCall) for value in vars(module).values()), name
        kind = type(vars(module).get("config"))
        assert kind is getattr(sys.modules[kind.__module__], kind.__name__, kind), name
    whole: Any = model
    assert whole.model.visual.config is whole.config.vision_config
    assert "forward" not in vars(whole.model.visual)


# --- what is returned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_outputs_are_what_they_were(kind: str) -> None:
    """`get_image_features`, `get_video_features` and `forward` return the same types, fields, shapes, dtypes and numbers.

    GLM flattens clips to frames before its tower: 5 items instead of 2.
    """
    model = shared(kind)
    with accelerated(model, **OPTIONS) as handle:
        got, want = features(model), features(reference(kind))
        assert difference(got, want) <= TOLERANCE
        assert ("deepstack_features" in want) == (kind == "qwen3_vl")
        assert difference(model.get_video_features(**clip()), reference(kind).get_video_features(**clip())) <= TOLERANCE
        got, want = model(**prompt()), reference(kind)(**prompt())
        assert type(got) is type(want)
        assert list(got) == list(want)
        assert difference(got.logits, want.logits) <= 1e-4
        assert served(handle) == (2 + (5 if kind == "glm4v" else 2) + 2, {}, {})


def test_features_are_new_memory() -> None:
    """What one call returned is not changed by the next."""
    model = shared("qwen3_vl")
    with accelerated(model, **OPTIONS):
        first = features(model)
        kept = copy.deepcopy(first)
        features(model, **images(seed=5))
        assert difference(first, kept) == 0


def test_bare_towers() -> None:
    """A tower by itself is accelerated like the tower of a model, and writes the same files."""
    tower, want = towers.tiny_qwen2_vl("sdpa", depth=2), towers.tiny_qwen2_vl("eager", depth=2)
    grid = torch.tensor(GRIDS)
    with accelerated(tower, **OPTIONS) as handle:
        assert difference(tower(towers.pixels(56), grid), want(towers.pixels(56), grid_thw=grid)) <= TOLERANCE
        assert served(handle) == (2, {}, {})


def test_bfloat16() -> None:
    """In bfloat16 the fields keep their dtypes, and are within 1 % (measured: 0.7 %) of those of eager attention."""
    model, want = fresh().to(torch.bfloat16), copy.deepcopy(reference()).to(torch.bfloat16)
    with accelerated(model, **OPTIONS) as handle:
        got, expected = features(model), features(want)
        difference(got, expected)  # types, fields, dtypes
        for a, b in zip(got.pooler_output, expected.pooler_output, strict=True):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 0.01
        assert served(handle) == (2, {}, {})


# --- what the model keeps ---------------------------------------------------------------------------------------------


def saved(model: Any, folder: Path) -> dict[str, bytes]:
    """What `save_pretrained` writes."""
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("whole", [True, False], ids=["model", "tower"])
def test_saving_and_loading(whole: bool, tmp_path: Path) -> None:
    """While accelerated: the same `state_dict`, the same files to the byte, and what is loaded from them is a plain model."""
    model = fresh()
    part = model if whole else model.model.visual
    keys, before = list(part.state_dict()), saved(part, tmp_path / "before")
    with accelerated(part, **OPTIONS):
        assert list(part.state_dict()) == keys
        assert saved(part, tmp_path / "during") == before
        loaded = type(part).from_pretrained(tmp_path / "during").eval()
    if whole:
        assert_untouched(loaded)
        assert difference(features(loaded), features(reference())) <= TOLERANCE


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_not_accelerated(how: str) -> None:
    """A copy has the original's config and numbers, counts nothing, and its weights are its own."""
    model = fresh()
    with accelerated(model, **OPTIONS) as handle:
        features(model)
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        visual = twin.model.visual
        assert visual.config is twin.config.vision_config
        assert type(visual.config) is type(reference().config.vision_config)
        assert visual.config._attn_implementation == "sdpa"
        hits = handle.stats()["graph_hits"]
        assert difference(features(twin), features(reference())) <= TOLERANCE
        with torch.no_grad():
            for parameter in visual.parameters():
                parameter.zero_()
        assert difference(features(model), features(reference())) <= TOLERANCE
        assert served(handle) == (hits + 2, {}, {})
        with accelerated(twin, **OPTIONS) as second:
            assert difference(features(twin), features(reference())) > CLEARLY_WRONG
            assert served(second) == (2, {}, {})


def test_a_shared_config_object() -> None:
    """Of two models that are built from one config object the other one is not touched."""
    first = fresh()
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    with accelerated(first, **OPTIONS) as handle:
        assert second.model.visual.config._attn_implementation == "sdpa"
        assert difference(features(second), features(reference())) <= TOLERANCE
        assert difference(features(first), features(reference())) <= TOLERANCE
        assert served(handle) == (2, {}, {})
        assert second.model.visual.config is second.config.vision_config


def test_attention_of_the_model_can_be_changed() -> None:
    """`set_attn_implementation` on the whole model reaches its parts, and does not reach the encoder: captured or not."""
    model = fresh()
    with accelerated(model, **OPTIONS) as handle:
        for name in ("eager", "sdpa"):
            model.set_attn_implementation(name)
            for config in (model.config, model.config.vision_config, model.model.visual.config, model.config.text_config):
                assert config._attn_implementation == name
            assert difference(features(model), features(reference())) <= TOLERANCE
            large = images(grids=[(1, 12, 12), (1, 4, 4)])
            assert difference(features(model, **large), features(reference(), **large)) <= TOLERANCE
        assert served(handle) == (6, {"too-large": 2}, {})
    assert model.model.visual.config._attn_implementation == "sdpa"


def test_config_values_are_those_of_the_model() -> None:
    """What is set on the model's config is seen by the accelerated tower, and the other way round."""
    model = fresh()
    with accelerated(model, **OPTIONS) as handle:
        model.config.vision_config.return_dict = False
        assert model.model.visual.config.return_dict is False
        got = model.model.visual(images()["pixel_values"], grid_thw=images()["image_grid_thw"])
        assert isinstance(got, tuple)
        assert served(handle)[2] == {"unserved": 1}
        model.model.visual.config.return_dict = True
        assert model.config.vision_config.return_dict is True
        for made in (copy.copy(model.model.visual.config), copy.deepcopy(model.model.visual.config)):
            made.return_dict = False
            assert type(made) is type(model.config.vision_config)
            assert model.model.visual.config.return_dict is True


def test_cast_and_moved_models_get_a_new_encoder() -> None:
    """After `to(dtype)` the next call has the new dtype, from graphs that are captured anew; and back."""
    model = fresh()
    with accelerated(model, **OPTIONS) as handle:
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            got, want = features(model), features(copy.deepcopy(reference()).to(dtype))
            assert difference(got, want) <= TOLERANCE
            assert got.pooler_output[0].dtype == dtype
            assert served(handle) == (2, {}, {})
    assert_untouched(model)


def test_eval_and_train() -> None:
    """In train mode the model's own code answers, dropout included, and after `eval` the encoder again."""
    model = fresh("glm4v")
    for block in model.model.visual.blocks:
        block.attn.attention_dropout = 0.5
    with accelerated(model, **OPTIONS) as handle:
        model.train()
        assert difference(features(model), features(model)) > CLEARLY_WRONG
        assert served(handle)[2] == {"train-mode": 2}
        model.eval()
        assert difference(features(model), features(reference("glm4v"))) <= TOLERANCE
        assert served(handle) == (2, {}, {"train-mode": 2})


# --- what the model's own code answers --------------------------------------------------------------------------------


def own_cases() -> dict[str, tuple[Callable[[Any], Any], str]]:
    """A call, and the reason under which it is counted."""

    def feature_call(**more: Any) -> Callable[[Any], Any]:
        return lambda model: model.get_image_features(**images(), **more)

    boundaries = torch.tensor([0, 24, 56], dtype=torch.int32)

    def with_gradients(model: Any) -> Any:
        with torch.enable_grad():
            output = model.get_image_features(**images())
            output.pooler_output[0].sum().backward()
        gradient = model.model.visual.patch_embed.proj.weight.grad.clone()
        model.zero_grad(set_to_none=True)
        return gradient

    def with_gradients_of_pixels(model: Any) -> Any:
        model.requires_grad_(False)
        inputs = images()
        inputs["pixel_values"].requires_grad_(True)
        with torch.enable_grad():
            model.get_image_features(**inputs).pooler_output[1].sum().backward()
        model.requires_grad_(True)
        return inputs["pixel_values"].grad

    def under_autocast(model: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.get_image_features(**images())

    def tower(**more: Any) -> Callable[[Any], Any]:
        return lambda model: model.model.visual(images()["pixel_values"], images()["image_grid_thw"], **more)

    return {
        "gradients of weights": (with_gradients, "gradients"),
        "gradients of pixels": (with_gradients_of_pixels, "gradients"),
        "autocast": (under_autocast, "autocast"),
        "hidden states": (feature_call(output_hidden_states=True), "more-outputs"),
        "attentions": (feature_call(output_attentions=True), "more-outputs"),
        "boundaries by their outer name": (feature_call(image_cu_seqlens=boundaries), "unserved"),
        "boundaries": (tower(cu_seqlens=boundaries), "unserved"),
        "a tuple": (tower(return_dict=False), "unserved"),
        "an argument that nobody knows": (tower(hue=3), "unserved"),
    }


@pytest.mark.parametrize("case", own_cases())
def test_own_calls_are_right_and_counted(case: str) -> None:
    """Whatever the encoder does not answer is exactly what the untouched model returns, and is counted with its reason."""
    call, reason = own_cases()[case]
    model, untouched = fresh(attn="eager"), fresh(attn="eager")
    with accelerated(model, **OPTIONS) as handle:
        got = call(model)
        assert served(handle) == (0, {}, {reason: 1})
        assert difference(got, call(untouched)) == 0
        assert difference(features(model), features(reference())) <= TOLERANCE, "and the next call is served"
        assert served(handle) == (2, {}, {reason: 1})


def test_tuples_of_features() -> None:
    """`return_dict=False` of `get_image_features` gives the same tuple, from the encoder."""
    model = shared("qwen3_vl")
    with accelerated(model, **OPTIONS) as handle:
        got, want = features(model, **images(), return_dict=False), features(reference(), **images(), return_dict=False)
        assert isinstance(got, tuple)
        assert difference(got, want) <= TOLERANCE
        assert served(handle) == (2, {}, {})


def test_outputs_asked_for_by_the_config() -> None:
    """`config.output_hidden_states` of the tower counts like the argument."""
    model = fresh()
    with accelerated(model, **OPTIONS) as handle:
        model.config.vision_config.output_hidden_states = True
        assert len(features(model).hidden_states) > 1
        assert served(handle)[2] == {"more-outputs": 1}


@pytest.mark.slow
def test_hidden_states_before_the_first_capture() -> None:
    """transformers leaves its hooks in the layers then: graphs that are captured afterwards are as right, traced once."""
    model = towers.tiny_vlm("qwen2_vl", depth=1)
    want = features(eager_copy(model))
    with accelerate(model, mode="compiled", compiler="eager", packing="greedy", **OPTIONS) as handle:
        assert len(features(model, **images(), output_hidden_states=True).hidden_states) > 1
        assert difference(features(model), want) <= TOLERANCE
        assert served(handle) == (2, {}, {"more-outputs": 1})
        assert counters.graphs_seen == 1


@pytest.mark.parametrize("case", ["gradients of weights", "hidden states", "an argument that nobody knows"])
def test_strict_refuses_own_calls(case: str) -> None:
    """With `strict=True` they raise, and say why."""
    call, reason = own_cases()[case]
    model = fresh()
    with accelerated(model, strict=True, **OPTIONS) as handle:
        with pytest.raises(SkipError, match=reason):
            call(model)
        assert served(handle)[2] == {}
        features(model)


@pytest.mark.parametrize(
    "change",
    [
        {"pixel_values": towers.pixels(55)},
        {"image_grid_thw": torch.tensor([(1, 4, 5), (1, 8, 4)])},
        {"image_grid_thw": None},
        {"pixel_values": torch.zeros(56, 95)},
    ],
    ids=["rows", "odd sides", "no grid", "channels"],
)
def test_wrong_inputs_give_the_models_own_error(change: dict[str, Any]) -> None:
    """The very error of the untouched model, text included; the encoder works on."""
    model, inputs = shared("qwen2_vl"), {**images(), **change}
    with pytest.raises(Exception) as wanted:  # noqa: PT011 whatever it is
        features(reference("qwen2_vl"), **inputs)
    with accelerated(model, **OPTIONS) as handle:
        with pytest.raises(type(wanted.value)) as got:
            features(model, **inputs)
        assert str(got.value).splitlines()[0] == str(wanted.value).splitlines()[0]
        features(model)
        assert handle.stats()["graph_hits"] == 2


def test_a_clip_in_one_row_is_glms_own_error() -> None:
    """Its tower wants a row for each frame, and fails otherwise: it fails as before."""
    pixels, grid = towers.pixels(48), torch.tensor([(3, 4, 4)])
    with pytest.raises(IndexError):
        reference("glm4v").model.visual(pixels, grid_thw=grid)
    with accelerated(shared("glm4v"), **OPTIONS) as handle:
        with pytest.raises(IndexError):
            shared("glm4v").model.visual(pixels, grid_thw=grid)
        assert served(handle)[2] == {"unserved": 1}


# --- capturing, weights, threads --------------------------------------------------------------------------------------


def test_explicit_capture() -> None:
    """Until `capture()` images run eagerly and are counted; afterwards they are replayed."""
    model = shared("qwen3_vl")
    with accelerate(model, capture="explicit", mode="eager", packing="greedy", **OPTIONS) as handle:
        assert difference(features(model), features(reference())) <= TOLERANCE
        assert served(handle) == (0, {"not-captured": 2}, {})
        handle.capture()
        assert difference(features(model), features(reference())) <= TOLERANCE
        assert served(handle) == (2, {"not-captured": 2}, {})


def test_first_call_captures() -> None:
    """The first image captures, not `accelerate` itself."""
    model = shared("qwen3_vl")
    with accelerate(model, mode="eager", packing="greedy", **OPTIONS) as handle:
        assert not handle.manager.is_captured()
        assert difference(features(model), features(reference())) <= TOLERANCE
        assert handle.manager.is_captured()
        assert served(handle) == (2, {}, {})


class LowRank(nn.Module):
    """A linear layer and a product of two thin matrices beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def replaced_layer(visual: Any) -> None:
    """As adapters do."""
    torch.manual_seed(0)
    visual.blocks[0].mlp.linear_fc1 = LowRank(visual.blocks[0].mlp.linear_fc1).eval()


@torch.no_grad()
def changed_in_place(visual: Any) -> None:
    """By an optimiser, for example."""
    visual.blocks[1].mlp.linear_fc2.weight.mul_(1.5)


def assigned(visual: Any) -> None:
    """New tensors for all weights."""
    visual.load_state_dict({name: value * 1.1 for name, value in visual.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replaced_layer, changed_in_place, assigned])
def test_new_weights_are_used(change: Callable[[Any], None]) -> None:
    """After a capture: other weights, wherever they come from, give what the changed model gives."""
    model, twin = fresh(), copy.deepcopy(reference())
    with accelerated(model, **OPTIONS) as handle:
        old = features(model)
        change(model.model.visual)
        change(twin.model.visual)
        got = features(model)
        assert difference(got, features(twin)) <= TOLERANCE
        assert difference(got, old) > CLEARLY_WRONG
        hits = 2 if change is replaced_layer else 4  # with other modules the encoder is made anew, and counts from 0
        assert served(handle) == (hits, {}, {})


def test_threads() -> None:
    """Four threads with images of their own, one of them with gradients: each gets its own features."""
    model = shared("qwen3_vl")
    wanted = [features(reference(), **images(seed)) for seed in range(4)]
    worst = [float("inf")] * 4
    with accelerated(model, **OPTIONS) as handle:

        def work(number: int) -> None:
            found = []
            for _ in range(5):
                with torch.set_grad_enabled(number == 3):
                    output = model.get_image_features(**images(number))
                found.append(difference([part.detach() for part in output.pooler_output], [*wanted[number].pooler_output]))
            worst[number] = max(found)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(worst) <= TOLERANCE
        assert served(handle) == (30, {}, {"gradients": 5})


# --- the handle ------------------------------------------------------------------------------------------------------


def test_close_restores_everything() -> None:
    """Nothing is left on the model, the graphs are gone, closing twice is fine, and a closed handle says so."""
    model = fresh()
    own: Any = model.model.visual
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    handle = accelerate(model, mode="eager", packing="greedy", **OPTIONS)
    assert isinstance(handle, AcceleratedModel)
    features(model)
    assert handle.manager.is_captured()
    taken: Any = own.forward
    handle.close()
    handle.close()
    assert_untouched(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys
    assert handle.manager.graphs() == ()
    assert difference(features(model), features(reference())) <= TOLERANCE
    model.to(torch.float64)
    with torch.no_grad():
        assert difference(taken(*images().values()), own(*images().values())) == 0, "who kept it calls the model"
    assert_untouched(model)
    assert served(handle) == (2, {}, {})
    with pytest.raises(ModelError, match="closed"):
        handle.capture()


def test_an_error_closes_too() -> None:
    """The context manager closes whatever happens inside."""
    model = fresh()
    with pytest.raises(KeyError), accelerated(model, **OPTIONS):
        raise KeyError
    assert_untouched(model)


def test_closing_and_accelerating_again() -> None:
    """A second handle is like the first."""
    model = fresh()
    for _ in range(2):
        with accelerated(model, **OPTIONS) as handle:
            assert difference(features(model), features(reference())) <= TOLERANCE
            assert served(handle) == (2, {}, {})
    assert_untouched(model)


def test_an_attribute_in_the_methods_place_is_kept() -> None:
    """Somebody else's `forward` on the tower (as offloading hooks put one there) is back after `close()`."""
    model = fresh()
    before = model.model.visual.forward
    model.model.visual.forward = before
    with accelerated(model, **OPTIONS):
        assert isinstance(vars(model.model.visual)["forward"], InstalledCall)
    assert vars(model.model.visual)["forward"] is before


def test_accelerating_twice_is_an_error() -> None:
    """A model, its tower, and an encoder for it, while it is accelerated."""
    model = fresh()
    with accelerated(model, **OPTIONS):
        for part, what in ((model, accelerate), (model.model.visual, accelerate), (model, encoder_for)):
            with pytest.raises(ModelError, match="accelerated already"):
                what(part, **OPTIONS)
        features(model)
    assert_untouched(model)


@pytest.mark.parametrize("what", [accelerate, encoder_for])
def test_unsupported_models(what: Callable[..., Any]) -> None:
    """The error lists every supported model, and names the two ways on."""
    with pytest.raises(ModelError) as error:
        what(nn.Linear(2, 2))
    text = str(error.value)
    assert text.startswith("Linear (model_type None) is not supported")
    assert all(row.name in text for row in architectures())
    assert 'torch.compile(vision_model, backend="vit_cudagraph")' in text
    assert "docs/engines.md" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": [16]}, r"unknown option 'budgets'. Known are token_budgets.*strict.*token_range"),
        ({"capture": "later"}, "capture='later': expected one of first-call, explicit"),
        ({"config": EncoderConfig(), "mode": "eager"}, "mode beside config: put them into the config"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    """Unknown ones name the known ones; nothing happens to the model."""
    model = shared("qwen3_vl")
    with pytest.raises(OptionError, match=words):
        accelerate(model, **options)
    assert_untouched(model)


@pytest.mark.parametrize("what", [accelerate, encoder_for])
def test_a_failed_attempt_leaves_nothing(what: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that do not fit the model, a tower that fails its first run, parts on two devices: the model is as it was."""
    model = fresh()
    with pytest.raises(BudgetError):
        what(model, **{**OPTIONS, "token_range": (32, 8)})
    assert_untouched(model)
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.visual), "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            what(model, **OPTIONS)
    assert_untouched(model)
    model.model.visual.merger.to("meta")
    with pytest.raises(Exception):  # noqa: B017, PT011 the tower's own, or a ModelError
        what(model, **OPTIONS)
    assert_untouched(model)


def test_options_of_the_table_go_beside_a_config() -> None:
    """They are not fields of `EncoderConfig`."""
    model = shared("qwen3_vl")
    config = EncoderConfig(token_budgets=(8, 32), mode="eager", packing="greedy")
    with accelerate(model, config=config, **TABLE) as handle:
        assert handle.config is config
        features(model)
        assert {graph["token_budget"] for graph in handle.stats()["graphs"]} == {8, 32}


# --- encoder_for -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_for(kind: str) -> None:
    """Per item what the language model gets, deepstack levels behind it; the model itself stays as it was."""
    model, request = fresh(kind), {**images(), **clip()}
    with encoder_for(model, mode="eager", packing="greedy", **OPTIONS) as manager, torch.no_grad():
        got = manager.execute(request)
        assert manager.snapshot()["miss_reasons"] == {}
        want = []
        for output in (reference(kind).get_image_features(**images()), reference(kind).get_video_features(**clip())):
            # transformers 5.17 does not split the levels by item.
            levels = [output.pooler_output, *(output.get("deepstack_features") or [])]
            wide = torch.cat([level if isinstance(level, torch.Tensor) else torch.cat(level) for level in levels], dim=1)
            want += wide.split([len(feature) for feature in output.pooler_output])
        assert difference(got, want) <= TOLERANCE
        assert "forward" not in vars(model.model.visual)
        assert difference(features(model), features(shared(kind))) == 0
        assert manager.snapshot()["graph_hits"] == 4


def test_an_encoder_under_autocast_is_as_without() -> None:
    """Neither its graphs nor its eager runs take autocast in, whether they are made or used under it."""
    model, request = towers.tiny_vlm("qwen2_vl", depth=1), {"pixel_values": towers.pixels(24), "image_grid_thw": [(1, 4, 6)]}
    options = {"mode": "eager", "packing": "greedy", "token_budgets": (16,)}
    want = encoder_for(copy.deepcopy(model), **options).execute(request)
    made = encoder_for(model, **options)
    with torch.autocast("cpu", torch.bfloat16):
        eager = made.execute(request)
        made.capture()
        replayed = made.execute(request)
    for got in (eager, replayed, made.execute(request)):
        assert difference(got, want) <= TOLERANCE
    assert made.snapshot()["graph_hits"] == 2
