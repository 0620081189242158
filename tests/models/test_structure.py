"""A model that is changed after it was accelerated: other towers and projectors, wrapped layers, hooks, derivatives.

The reference is always the untouched model, changed in the same way.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.models import test_packed_dense as dense
from tests.models import test_paddleocr_vl as paddle
from tests.models import test_pixtral as pixtral
from tests.models.parity import accelerated, difference, eager_copy, random, seeded, served
from tests.models.tiled_models import tiny_gemma3, tiny_internvl, tiny_llava
from tests.towers import tiny_vlm
from vit_compile import encoder_for
from vit_compile.errors import BudgetError, ModelError
from vit_compile.models.accelerate import accelerate
from vit_compile.models.structure import Listeners, Structure

TOLERANCE = 1e-5
CLEARLY_WRONG = 1e-2
SIZES = [(16, 24), (8, 16)]
GRIDS = [(1, 8, 10), (1, 4, 6)]


def with_pooled(output: Any) -> dict[str, Any]:
    """Everything that is returned: in transformers 5.17 some outputs have what the language model gets as a loose attribute."""
    return {**output, "pooler_output": output.pooler_output}


def tiles(model: Any) -> Any:
    """Features of three tiles."""
    return with_pooled(model.get_image_features(random(3, 3, 16, 16)))


def native(model: Any) -> Any:
    """Features of two images."""
    return with_pooled(model.get_image_features(pixtral.images(SIZES), image_sizes=torch.tensor(SIZES)))


def documents(model: Any) -> Any:
    """Features of two images."""
    return with_pooled(model.get_image_features(paddle.pixels(GRIDS), torch.tensor(GRIDS)))


Case = tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any], str, str]
CASES: dict[str, Case] = {
    "internvl": (tiny_internvl, tiles, {"token_budgets": [16]}, "model.vision_tower", "model.multi_modal_projector"),
    "gemma3": (tiny_gemma3, tiles, {"token_budgets": [16]}, "model.vision_tower", "model.multi_modal_projector"),
    "llava": (tiny_llava, tiles, {"token_budgets": [64]}, "model.vision_tower", "model.multi_modal_projector"),
    "pixtral": (
        lambda: seeded(pixtral.llava),
        native,
        pixtral.options(pixtral.llava),
        "model.vision_tower",
        "model.multi_modal_projector",
    ),
    "mistral3": (
        lambda: seeded(pixtral.mistral3),
        native,
        pixtral.options(pixtral.mistral3),
        "model.vision_tower",
        "model.multi_modal_projector",
    ),
    "paddleocr": (
        lambda: seeded(paddle.build),
        documents,
        {"token_budgets": [32], "token_range": (8, 32)},
        "model.visual",
        "model.projector",
    ),
}


def replaced(model: Any, path: str, *, trainable: bool = False) -> None:
    """Another module of the same kind with other weights in this place."""
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    other = copy.deepcopy(getattr(owner, name))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    setattr(owner, name, other.requires_grad_(trainable))


@pytest.mark.parametrize("part", [3, 4], ids=["tower", "projector"])
@pytest.mark.parametrize("name", CASES)
def test_a_replaced_part_is_used(name: str, part: int) -> None:
    """A tower or projector put in another's place after the capture gives the features of what is there now."""
    build, call, options, *paths = CASES[name]
    model = build()
    twin = eager_copy(model)
    path = (*paths,)[part - 3]
    with torch.no_grad(), accelerated(model, **options) as handle:
        old = call(model)
        for changed in (model, twin):
            replaced(changed, path)
        got, want = call(model), call(twin)
        assert difference(got, want) <= TOLERANCE
        assert difference(got, old) > CLEARLY_WRONG
        assert not served(handle)[1]


@pytest.mark.parametrize("name", CASES)
def test_a_projector_in_training_gets_its_gradient(name: str) -> None:
    """A frozen model with a new, trainable projector: the call is the model's own, with a gradient."""
    build, call, options, _, projector = CASES[name]
    model = build().requires_grad_(False)
    with accelerate(model, mode="eager", packing="greedy", **options) as handle:
        assert not any(value.requires_grad for value in _tensors(call(model)))
        replaced(model, projector, trainable=True)
        assert any(value.requires_grad for value in _tensors(call(model)))
        assert handle.stats()["own_calls"] == {"gradients": 1}


@pytest.mark.parametrize("part", [3, 4], ids=["tower", "projector"])
def test_an_encoder_refuses_a_model_with_other_parts(part: int) -> None:
    """`encoder_for` is bound to the modules that were there: with others every call is an error, not a wrong number."""
    model = tiny_gemma3()
    manager = encoder_for(model, mode="eager", token_budgets=[16])
    request = {"pixel_values": random(2, 3, 16, 16), "num_crops": [0, 0]}
    assert len(manager.execute(request)) == 2
    replaced(model, CASES["gemma3"][part])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="replaced"):
        manager.execute(request)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [
        one
        for value in output.values()
        for one in (value if isinstance(value, list | tuple) else [value])
        if torch.is_tensor(one)
    ]


@pytest.mark.parametrize("part", [3, 4], ids=["tower", "projector"])
@pytest.mark.parametrize("name", CASES)
def test_a_hook_is_run(name: str, part: int) -> None:
    """A hook that changes an output, put there after the capture: the call is the model's own until the hook is gone."""
    build, call, options, *paths = CASES[name]
    model = build()
    twin = eager_copy(model)

    def doubled(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return output * 2
        for key, value in output.items():
            if isinstance(value, torch.Tensor):
                output[key] = value * 2
        return output

    with torch.no_grad(), accelerated(model, **options) as handle:
        old = call(model)
        hooks = [changed.get_submodule((*paths,)[part - 3]).register_forward_hook(doubled) for changed in (model, twin)]
        got = call(model)
        assert difference(got, call(twin)) <= TOLERANCE
        assert handle.stats()["own_calls"] == {"hooks": 1}
        for hook in hooks:
            hook.remove()
        assert difference(call(model), old) <= TOLERANCE
        assert handle.stats()["own_calls"] == {"hooks": 1}


@pytest.mark.parametrize("pre", [True, False])
def test_a_hook_on_a_layer_is_run(pre: bool) -> None:
    """Inside a tower whose forward is answered, too; a hook on that tower itself runs around the answer."""
    model = tiny_vlm("qwen3_vl", depth=2)
    visual, runs = model.model.visual, []
    layer = visual.blocks[0]
    (layer.register_forward_pre_hook if pre else layer.register_forward_hook)(lambda *_: runs.append("layer"))
    pixels, grid = random(16, visual.patch_embed.proj.weight[0].numel()), torch.tensor([[1, 4, 4]])
    with torch.no_grad(), accelerated(model, token_budgets=[32], token_range=(8, 32), segment_capacities=()) as handle:
        runs.clear()
        model.get_image_features(pixels, grid)
        assert runs == ["layer"]
        assert handle.stats()["own_calls"] == {"hooks": 1}
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
        visual.register_forward_hook(lambda *_: runs.append("tower"))
        model.get_image_features(pixels, grid)
        assert runs == ["layer", "tower"]
        assert handle.stats()["own_calls"] == {"hooks": 1}


def test_forward_mode_derivatives_are_the_models_own() -> None:
    """A dual tensor does not require a gradient, but it carries one."""
    model = tiny_gemma3().requires_grad_(False)
    model.set_attn_implementation("eager")
    image, tangent = random(1, 3, 16, 16), random(1, 3, 16, 16, seed=1)

    def derivative() -> torch.Tensor:
        with forward_ad.dual_level():
            output = model.get_image_features(forward_ad.make_dual(image, tangent)).pooler_output
            (found,) = [forward_ad.unpack_dual(one).tangent for one in output[:1]]
            return found

    want = derivative()
    with accelerated(model, token_budgets=[16]) as handle:
        torch.testing.assert_close(derivative(), want)
        assert handle.stats()["own_calls"] == {"gradients": 1}


def test_a_tower_gets_its_config_back_when_the_encoder_is_gone() -> None:
    """`encoder_for` gives towers config objects of its own, for as long as the manager lives."""
    model = tiny_vlm("qwen3_vl", depth=2)
    config = model.model.visual.config
    manager = encoder_for(model, mode="eager", token_budgets=[16], token_range=(8, 32))
    assert model.model.visual.config is not config
    del manager
    gc.collect()
    assert model.model.visual.config is config


def test_an_encoder_that_goes_leaves_a_later_one_alone() -> None:
    """The config of an encoder that was put on top of another one stays when the lower one goes."""
    model = tiny_vlm("qwen3_vl", depth=2)
    pixels, grid = random(16, model.model.visual.patch_embed.proj.weight[0].numel()), torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        want = eager_copy(model).get_image_features(pixels, grid)
        manager = encoder_for(model, mode="eager", token_budgets=[16], token_range=(8, 32))
        with accelerated(model, token_budgets=[32], token_range=(8, 32), segment_capacities=()) as handle:
            del manager
            gc.collect()
            assert difference(model.get_image_features(pixels, grid), want) <= TOLERANCE
            assert handle.stats()["graph_hits"] == 1


@pytest.mark.parametrize("model", [None, 7, "gemma3"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    """An error of the catalogue that says what came."""
    with pytest.raises(ModelError, match=type(model).__name__):
        accelerate(model)
    with pytest.raises(ModelError, match=type(model).__name__):
        encoder_for(model)


def test_a_ladder_below_every_item_is_an_error() -> None:
    """Hazard 37: it would be an option without effect."""
    with pytest.raises(BudgetError, match="every item of this model is larger"):
        accelerate(tiny_gemma3(), token_budgets=[1])


# --- the parts ------------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """A tower somewhere inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.tower = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_what_counts_as_a_change() -> None:
    """Modules and their places count, from the model down; weights do not."""

    def watched(change: Callable[[Toy], Any], **kwargs: Any) -> bool:
        model = Toy()
        structure = Structure(model, [model.inner.tower], **kwargs)
        assert not structure.changed()
        change(model)
        return structure.changed()

    assert not watched(lambda model: model.inner.tower[0].weight.data.mul_(2))
    assert not watched(lambda model: setattr(model, "other", nn.Linear(2, 2)))
    assert watched(lambda model: setattr(model, "inner", copy.deepcopy(model.inner)))
    assert watched(lambda model: setattr(model.inner, "tower", nn.Linear(2, 2)))
    assert watched(lambda model: delattr(model.inner, "tower"))
    for layer in (lambda model: model.inner.tower.append(nn.ReLU()), lambda model: model.inner.tower.pop(1)):
        assert watched(layer)
        assert not watched(layer, inside=False)
    assert not Structure(Toy(), [nn.Linear(2, 2)]).changed(), "a module from elsewhere has no place"


def test_whose_hooks_count() -> None:
    """Everybody's but transformers' own, on every module but those that are called themselves."""
    tower = nn.Sequential(nn.Linear(2, 2))
    everywhere, inside = Listeners([tower], []), Listeners([tower], [tower])

    def hook(*args: Any) -> None:
        """Nothing."""

    def theirs(*args: Any) -> None:
        """Nothing."""

    theirs.__module__ = "transformers.utils.output_capturing"
    tower[0].register_forward_hook(theirs)
    assert everywhere.found() is None
    handle = tower.register_forward_hook(hook)
    assert "Sequential" in str(everywhere.found())
    assert inside.found() is None
    handle.remove()
    tower[0].register_forward_pre_hook(hook)
    assert "Linear" in str(inside.found())


@pytest.mark.parametrize("where", ["", "encoder"])
def test_encode_refuses_what_it_would_leave_out(where: str) -> None:
    """Hooks anywhere in the tower, and hidden states that its config asks for, are an error of `encode`."""
    model = copy.deepcopy(dense.untouched(dense.dinov2))
    images = [random(3, 56, 56)]
    with accelerated(model, **dense.OPTIONS) as handle:
        handle.encode(images)
        hook = model.get_submodule(where).register_forward_hook(lambda *_: None)
        with pytest.raises(ModelError, match="hook"):
            handle.encode(images)
        hook.remove()
        model.config.output_hidden_states = True
        with pytest.raises(ModelError, match="output_hidden_states"):
            handle.encode(images)
        model.config.output_hidden_states = False
        assert len(handle.encode(images)) == 1
