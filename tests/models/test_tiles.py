"""Tables of tiles for any module, and outputs of several fields, against the modules themselves, one image at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import towers
from tests.models.parity import CLEARLY_WRONG, TOLERANCE, difference, random, seeded
from tests.runtime.toys import captured, largest_difference
from vit_compile.errors import InputError, ModelError
from vit_compile.models.output_layout import TowerOutputs
from vit_compile.models.tiles import TileInputs, Tiles, TileTable, tile_table_for
from vit_compile.runtime.inputs import host_counts

SHAPE = (3, 16, 16)


class Toy(nn.Module):
    """Images [N, 3, 16, 16] to four tokens of width 8 (`forward_features`), or to one feature [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.out = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 8)

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.patch(images).flatten(2).transpose(1, 2).tanh())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.forward_features(images).mean(dim=1)

    def maps(self, images: torch.Tensor) -> torch.Tensor:
        return self.patch(images)


def toy() -> Toy:
    """Seeded."""
    made: Toy = seeded(Toy)
    return made


def images_of(count: int) -> torch.Tensor:
    """Seeded."""
    return random(count, *SHAPE)


# --- tile_table_for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "tokens"),
    [(lambda module: None, 1), (lambda module: module.forward_features, 4)],
    ids=["one feature", "tokens"],
)
def test_any_module(call: Callable[[Any], Any], tokens: int) -> None:
    """Features of each image from graphs, as the module gives them for the image alone; one too many for a graph included."""
    module = toy()
    made = captured(tile_table_for(module, SHAPE, call=call(module)), token_budgets=(2 * tokens, 4 * tokens), packing="greedy")
    images = images_of(7)
    with torch.no_grad():
        want = [(call(module) or module)(image[None]).reshape(tokens, 8) for image in images]
    assert largest_difference(made.execute({"pixel_values": images}), want) <= TOLERANCE
    assert (made.snapshot()["graph_hits"], made.snapshot()["miss_reasons"]) == (7, {})


def test_items_of_several_images() -> None:
    """With counts, an item has the features of its images one after another; above the largest graph it runs eagerly."""
    module = toy()
    table = tile_table_for(module, SHAPE, call=module.forward_features, name="crops", counts="crop_counts")
    made = captured(table, token_budgets=(8, 16), packing="greedy")
    images, counts = images_of(10), [1, 6, 3]
    with torch.no_grad():
        want = [torch.cat([module.forward_features(image[None])[0] for image in part]) for part in images.split(counts)]
    got = made.execute({"crops": images, "crop_counts": counts})
    assert largest_difference(got, want) <= TOLERANCE
    assert largest_difference([got[0], got[2]], [want[0].flip(0), want[2].flip(0)]) > CLEARLY_WRONG
    assert (made.snapshot()["graph_hits"], made.snapshot()["miss_reasons"]) == (2, {"too-large": 1})


def vit(attn: str) -> Any:
    """ViT with a class token and a pooler."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
    config._attn_implementation = attn
    return seeded(lambda: ViTModel(config))


def clip(attn: str) -> Any:
    """CLIP's vision model."""
    return towers.tiny_clip(attn)


@pytest.mark.parametrize("output", [None, "pooler_output"])
@pytest.mark.parametrize("build", [vit, clip])
def test_transformers_models(build: Callable[[str], Any], output: str | None) -> None:
    """The last hidden states, or the field that is asked for, against eager attention."""
    pytest.importorskip("transformers")
    table, reference, images = tile_table_for(build("sdpa"), SHAPE, output=output), build("eager"), images_of(3)
    tokens = 17 if output is None else 1
    assert (table.tiles["main"].tokens, table.out_hidden_size, table.token_range) == (tokens, 32, (tokens, 16 * tokens))
    made = captured(table, token_budgets=(tokens, 4 * tokens), packing="greedy")
    with torch.no_grad():
        want = [reference(image[None])[output or "last_hidden_state"].reshape(tokens, 32) for image in images]
    assert largest_difference(made.execute({"pixel_values": images}), want) <= TOLERANCE
    assert made.snapshot()["miss_reasons"] == {}


def test_compiled() -> None:
    """Through `torch.compile`, the field of a dict included."""
    module = toy()
    table = tile_table_for(module, SHAPE, call=lambda images: {"first": module(images), "second": images}, token_range=(2, 4))
    made = captured(table, token_budgets=(2, 4), packing="greedy", mode="compiled", compiler="eager")
    images = images_of(3)
    with torch.no_grad():
        assert largest_difference(made.execute({"pixel_values": images}), list(module(images)[:, None])) <= TOLERANCE


def test_watched_weights() -> None:
    """Replaced weights are seen: the next call has the new features."""
    module = toy()
    made = captured(tile_table_for(module, SHAPE), token_budgets=(2, 4), packing="greedy")
    made.execute({"pixel_values": images_of(2)})
    module.out.weight = nn.Parameter(module.out.weight.detach() * 2)
    with torch.no_grad():
        want = list(module(images_of(2))[:, None])
    assert largest_difference(made.execute({"pixel_values": images_of(2)}), want) <= TOLERANCE


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda module: module.maps, r"Toy makes \[2, 8, 2, 2\] of two images: expected \[2, tokens, width\]"),
        (lambda module: lambda images: module.forward_features(images).transpose(0, 1), r"Toy makes \[4, 2, 8\]"),
        (lambda module: lambda images: [module(images)], "the output is list: expected a tensor"),
        (lambda module: lambda images: {"features": [module(images)]}, "the output features is list"),
    ],
)
def test_outputs_of_another_form_are_refused(call: Callable[[Any], Any], words: str) -> None:
    """Maps, tokens in front of images, lists: which rows are an image's is not guessed."""
    module = toy()
    with pytest.raises(ModelError, match=words):
        tile_table_for(module, SHAPE, call=call(module))


def test_other_sizes_are_refused() -> None:
    """A request with images of another size, before any work."""
    made = captured(tile_table_for(toy(), SHAPE), token_budgets=(2, 4))
    with pytest.raises(InputError, match=r"pixel_values is \[2, 3, 8, 16\]: expected \[2, 3, 16, 16\]"):
        made.execute({"pixel_values": random(2, 3, 8, 16)})
    with pytest.raises(InputError, match="pixel_values is list"):
        made.execute({"pixel_values": [1, 2]})


# --- TileTable --------------------------------------------------------------------------------------------------------


def test_tiles_that_counts_leave_out() -> None:
    """`uncounted` tiles come on top of what the counts say, which may be zero then."""
    module = toy()
    table = TileTable(
        {"main": Tiles(forward=lambda x: module.forward_features(x).flatten(0, 1), shapes={"x": SHAPE}, tokens=4)},
        modules=[module],
        width=8,
        modalities={"image": TileInputs(path="main", counts="crops", uncounted=1)},
    )
    assert table.item_keys("image", {"x": images_of(4), "crops": [0, 2]}) == [("main", 1), ("main", 3)]
    assert table.item_size(("main", 3)).tokens == {"main": 12}
    with pytest.raises(InputError, match="entry 1 of crops is -1: expected an integer from 0 on"):
        table.item_keys("image", {"x": images_of(4), "crops": [0, -1]})


def test_counts_from_zero() -> None:
    """Zero is a count only where it is said to be."""
    assert host_counts("n", torch.tensor([0, 2]), least=0) == [0, 2]
    with pytest.raises(InputError, match="entry 0 of n is 0: expected a positive integer"):
        host_counts("n", [0, 2])


# --- TowerOutputs -----------------------------------------------------------------------------------------------------


def test_outputs_with_lists_tuples_and_gaps() -> None:
    """Lists stay lists, tuples tuples, entries that are None stay None, and fields keep the order of the example."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def output(tiles: int) -> Any:
        made = outputs.BaseModelOutputWithPooling(last_hidden_state=random(tiles, 4, 8, seed=1))
        made["hidden_states"] = (None, random(tiles, 5, 8, seed=2), None)
        made["pooler_output"] = [random(tiles, 3, seed=3), random(tiles, 2, 2, seed=4)]
        return made

    layout = TowerOutputs(output(1), units=1, tokens=4)
    want = output(3)
    features = layout.join(want)
    assert features.shape == (12, layout.width)
    assert difference(layout.wrap(features), want) == 0.0
    with pytest.raises(ModelError, match="output 'pooler_output' is tuple"):
        TowerOutputs(outputs.BaseModelOutputWithPooling(last_hidden_state=random(1, 4, 8), pooler_output=((1, 2),)), units=1)
