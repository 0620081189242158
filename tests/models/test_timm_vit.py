"""timm's VisionTransformer with images of native sizes in packed calls, against untouched models without fused attention.

The reference takes any size (`dynamic_img_size`), one image at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import parity
from tests.models.parity import CLEARLY_WRONG, TOLERANCE
from vit_compile.errors import GridError, InputError, ModelError
from vit_compile.models.accelerate import AcceleratedModel, accelerate, encoder_for
from vit_compile.models.dense_table import GRIDS, PIXELS, pack
from vit_compile.models.registry import architecture_of
from vit_compile.models.timm_vit import PackedAttention, is_timm
from vit_compile.stats import counters

PATCH, SIDE = 14, 4
BUDGETS = (24, 48)
OPTIONS: dict[str, Any] = {"token_budgets": BUDGETS, "token_range": BUDGETS, "segment_capacities": (2,)}
KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers, positions for patches only": {"reg_tokens": 3, "no_embed_class": True},
    "registers with positions, norms of q and k": {"reg_tokens": 2, "qk_norm": True},
    "no prefix, attention pooling": {"class_token": False, "global_pool": "map"},
    "norm before, mean": {"pre_norm": True, "global_pool": "avg", "init_values": 0.5},
    "no positions, no pooling": {"pos_embed": "none", "global_pool": "", "num_classes": 0},
    "wide": {"img_size": (SIDE * PATCH, 6 * PATCH)},
}
CASES: dict[str, list[tuple[int, int]]] = {
    "one image": [(56, 56)],
    "three sizes": [(56, 56), (28, 84), (112, 56)],
    "thin": [(14, 140), (196, 14)],
    "one above the largest": [(28, 28), (112, 112), (28, 42)],
}


@functools.cache
def untouched(kind: str, *, dynamic: bool = True) -> Any:
    """Of any size, or of one."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    values = {"img_size": SIDE * PATCH, "num_classes": 5, "mlp_ratio": 2.0, **KINDS[kind]}
    return parity.seeded(
        lambda: timm.VisionTransformer(patch_size=PATCH, embed_dim=32, depth=2, num_heads=4, dynamic_img_size=dynamic, **values)
    )


def eager_copy(model: Any) -> Any:
    """Attention written out."""
    reference = copy.deepcopy(model)
    for block in reference.blocks:
        block.attn.fused_attn = False
    return reference


@functools.cache
def eager(kind: str) -> Any:
    """The reference."""
    return eager_copy(untouched(kind))


@functools.cache
def kept(kind: str) -> AcceleratedModel:
    """A captured handle, the same for all tests."""
    handle = accelerate(copy.deepcopy(untouched(kind)), mode="eager", packing="greedy", **OPTIONS)
    handle.capture()
    assert handle.stats()["not_captured"] == []
    return handle


def clean(kind: str) -> AcceleratedModel:
    """The same, counting from zero."""
    handle = kept(kind)
    handle.manager._statistics.reset()
    handle._own_calls.clear()
    return handle


def pictures(sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Seeded images."""
    return [parity.random(3, height, width, seed=number) for number, (height, width) in enumerate(sizes)]


@torch.no_grad()
def alone(model: Any, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every image by itself."""
    return [model(image[None]) for image in images]


every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("case", CASES)
@every_kind
def test_encode_gives_what_each_image_gives_alone(kind: str, case: str) -> None:
    """Logits, or whatever its head gives; only what is too large runs eagerly."""
    reference, images = eager(kind), pictures(CASES[case])
    handle = clean(kind)
    assert parity.difference(handle.encode(images), alone(reference, images)) <= TOLERANCE
    large = case == "one above the largest"
    assert parity.served(handle) == (len(images) - large, {"too-large": 1} if large else {}, {})


@every_kind
def test_forward_and_features(kind: str) -> None:
    """`forward` and `forward_features` at the trained size and at another: packed rows, the model's own head."""
    reference, handle = eager(kind), clean(kind)
    for height, width in (reference.patch_embed.img_size, (28, 42)):
        images = torch.stack(pictures([(height, width)] * 2))
        with torch.no_grad():
            assert parity.difference(handle.model(images), reference(images)) <= TOLERANCE
            assert parity.difference(handle.model.forward_features(images), reference.forward_features(images)) <= TOLERANCE
    assert parity.served(handle) == (8, {}, {})
    with torch.no_grad(), pytest.raises(AssertionError, match="should be divisible by patch size"):
        handle.model(torch.zeros(1, 3, 30, 42))
    assert parity.served(handle) == (8, {}, {"unserved": 1})


def test_models_of_one_size() -> None:
    """`encode` interpolates as `dynamic_img_size` does; the model's own forward refuses other sizes as it did."""
    model = copy.deepcopy(untouched("class token", dynamic=False))
    reference = copy.deepcopy(eager("class token"))
    reference.load_state_dict(model.state_dict())
    images = pictures(CASES["three sizes"])
    with parity.accelerated(model, **OPTIONS) as handle:
        assert parity.difference(handle.encode(images), alone(reference, images)) <= TOLERANCE
        assert parity.difference(model(images[0][None]), reference(images[0][None])) <= TOLERANCE
        assert parity.served(handle) == (4, {}, {})
        with pytest.raises(AssertionError, match="doesn't match model"):
            model(images[1][None])
        assert parity.served(handle)[2] == {"unserved": 1}
        rest = parity.random(3, 30, 50)
        assert parity.difference(handle.encode([rest]), alone(reference, [rest[:, :28, :42]])) <= TOLERANCE


def test_few_patches_are_not_packed() -> None:
    """Antialiased positions of a large table: the model's own code answers, or an error says why there is none."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    build = functools.partial(
        timm.VisionTransformer, img_size=14 * PATCH, patch_size=PATCH, embed_dim=32, depth=1, num_heads=4, num_classes=5
    )
    model = parity.seeded(functools.partial(build, dynamic_img_size=True))
    images = pictures([(70, 84), (42, 98), (56, 56)])
    want = alone(eager_copy(model), images)
    with parity.accelerated(model, **OPTIONS) as handle:
        assert parity.difference(handle.encode(images), want) <= TOLERANCE
        assert parity.served(handle) == (2, {}, {})
    with parity.accelerated(parity.seeded(build), **OPTIONS) as handle, pytest.raises(GridError, match="at least 4 patches"):
        handle.encode(images)


def test_encoder_for_gives_tokens() -> None:
    """Of each image what `forward_features` gives; the model is not touched."""
    model, images = copy.deepcopy(untouched("class token")), pictures(CASES["three sizes"])
    before = dict(vars(model))
    manager = encoder_for(model, mode="eager", packing="greedy", **OPTIONS)
    manager.capture()
    packed = pack(images, PATCH, prefix_tokens=1)
    got = manager.execute({PIXELS: packed["patches"], GRIDS: packed["grids"]})
    with torch.no_grad():
        want = [eager("class token").forward_features(image[None])[0] for image in images]
    assert parity.difference(got, want) <= TOLERANCE
    assert dict(vars(model)) == before
    manager.clear()


def test_close_restores() -> None:
    """The model's own methods again, and its own attention."""
    model = copy.deepcopy(untouched("class token"))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with parity.accelerated(model, **OPTIONS):
        assert "forward_features" in vars(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_compiled_once_for_all_budgets() -> None:
    """Dynamo traces the blocks with their attention replaced, into one graph."""
    kind = "registers with positions, norms of q and k"
    images = pictures(CASES["three sizes"])
    want = alone(eager(kind), images)
    options = {**OPTIONS, "segment_capacities": ()}
    with parity.accelerated(copy.deepcopy(untouched(kind)), mode="compiled", compiler="eager", **options) as handle:
        assert parity.difference(handle.encode(images), want) <= TOLERANCE
        assert parity.served(handle) == (3, {}, {})
        assert counters.graphs_seen == 1


@every_kind
def test_weights_changed_in_place_are_seen(kind: str) -> None:
    """Positions, class token and registers are read by the graphs."""
    model = copy.deepcopy(untouched(kind))
    reference, images = eager_copy(model), pictures(CASES["three sizes"])
    with parity.accelerated(model, **OPTIONS) as handle:
        before = handle.encode(images)
        for name in ("pos_embed", "cls_token", "reg_token"):
            if getattr(model, name) is None:
                continue
            for one in (model, reference):
                parameter = getattr(one, name)
                parameter.data.add_(0.5 * parity.random(*parameter.shape, seed=5))
            got = handle.encode(images)
            assert parity.difference(got, alone(reference, images)) <= TOLERANCE, name
            assert parity.difference(got, before) > CLEARLY_WRONG, name
            before = got


def test_bfloat16() -> None:
    """Beside the untouched model in bfloat16: at most 0.02 of the norm of its features."""
    model = copy.deepcopy(untouched("class token")).bfloat16()
    reference, image = eager_copy(model), pictures([(28, 84)])[0].bfloat16()[None]
    with parity.accelerated(model, **OPTIONS) as handle:
        got, want = model.forward_features(image), reference.forward_features(image)
        assert parity.served(handle) == (1, {}, {})
    assert got.dtype == torch.bfloat16
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 0.02


def one_segment(values: dict[str, Any]) -> dict[str, Any]:
    """All rows attend to each other."""
    boundaries = values["cu_seqlens"].clone()
    boundaries[1:] = boundaries[-1]
    return {"cu_seqlens": boundaries}


def no_positions(values: dict[str, Any]) -> dict[str, Any]:
    """Patches are anywhere."""
    return {"taps": torch.zeros_like(values["taps"])}


def no_prefix(values: dict[str, Any]) -> dict[str, Any]:
    """Class token and registers are patches of nothing."""
    return {"kind": torch.zeros_like(values["kind"])}


@pytest.mark.parametrize("spoil", [one_segment, no_positions, no_prefix], ids=lambda function: function.__name__)
def test_wrong_metadata_shows(spoil: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of metadata reaches the logits."""
    kind = "registers with positions, norms of q and k"
    images = pictures([(28, 84), (42, 42)])
    want, handle = alone(eager(kind), images), clean(kind)
    table: Any = handle._binding.table
    right = table.forward
    monkeypatch.setattr(table, "forward", lambda path, values: right(path, {**values, **spoil(values)}))
    assert parity.difference(handle.encode(images), want) > CLEARLY_WRONG
    assert parity.served(handle) == (2, {}, {})


def test_other_models_are_refused() -> None:
    """Attention that is not fused, other blocks, padded images; and later changes of the attention."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    build = functools.partial(timm.VisionTransformer, img_size=28, patch_size=14, embed_dim=32, depth=1, num_heads=4)
    for model in (
        eager("class token"),
        build(block_fn=timm.ParallelScalingBlock),
        build(attn_layer="diff"),
        build(dynamic_img_pad=True, dynamic_img_size=True),
    ):
        with pytest.raises(ModelError, match="this VisionTransformer"):
            accelerate(model.eval())
    model = copy.deepcopy(untouched("class token"))
    with parity.accelerated(model, **OPTIONS) as handle:
        model.blocks[1].attn.fused_attn = False
        with pytest.raises(ModelError, match="fused Attention"):
            handle.encode(pictures([(28, 28)]))


@pytest.mark.parametrize("part", ["patch_embed", "block", "attention"])
def test_a_subclass_is_refused(part: str) -> None:
    """A class of somebody else's may compute something else, whatever it is called."""
    model = copy.deepcopy(untouched("class token"))
    block = model.blocks[0]
    layer = {"patch_embed": model.patch_embed, "block": block, "attention": block.attn}[part]
    layer.__class__ = type(type(layer).__name__, (type(layer),), {})
    with pytest.raises(ModelError, match="VisionTransformer"):
        accelerate(model)


def test_which_models_are_timm() -> None:
    """Found by class and module, without an import of timm."""

    class VisionTransformer(nn.Module):
        """Somebody else's."""

    assert not is_timm(VisionTransformer())
    assert not is_timm(nn.Linear(2, 2))
    VisionTransformer.__module__ = "timm.models.vision_transformer"
    assert is_timm(VisionTransformer())
    assert architecture_of(VisionTransformer()).name == "timm VisionTransformer"


@pytest.mark.parametrize(
    "more", [{"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}], ids=list
)
def test_packed_attention_takes_nothing_else(more: dict[str, Any]) -> None:
    """Masks, dropout and causal attention are errors, as are several batch items; other functions pass."""
    rows = parity.random(1, 2, 3, 8)
    boundaries = torch.tensor([0, 1, 3], dtype=torch.int32)
    with PackedAttention(boundaries, 3):
        with pytest.raises(ModelError, match="one batch item"):
            F.scaled_dot_product_attention(rows, rows, rows, **more)
        with pytest.raises(ModelError, match="one batch item"):
            F.scaled_dot_product_attention(*[rows.expand(2, -1, -1, -1)] * 3)
        got = F.scaled_dot_product_attention(rows, 2 * rows, torch.relu(rows))
        scaled = F.scaled_dot_product_attention(rows, rows, rows, scale=0.5)
    for part in (slice(0, 1), slice(1, 3)):
        q = rows[:, :, part]
        assert parity.difference(got[:, :, part], F.scaled_dot_product_attention(q, 2 * q, q.relu())) <= 1e-6
        assert parity.difference(scaled[:, :, part], F.scaled_dot_product_attention(q, q, q, scale=0.5)) <= 1e-6


def test_what_is_no_image_is_refused() -> None:
    """As for other dense towers."""
    pytest.importorskip("timm")
    with pytest.raises(InputError, match="at least one patch"):
        kept("class token").encode([torch.zeros(3, 13, 28)])
