"""`generate` of whole models of tiles, accelerated and untouched: the same tokens and logits, turn by turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import tiled_models
from tests.models.parity import accelerated, eager_copy, random, served
from tests.models.test_generate import Part, answer, batch_of, check_answer, check_turns, text

pytest.importorskip("transformers")

SIDE, TOKENS = tiled_models.SIDE, 4
BUILDERS = [tiled_models.tiny_internvl, tiled_models.tiny_gemma3, tiled_models.tiny_llama4]
BUDGETS = (TOKENS, 2 * TOKENS, 4 * TOKENS)
FIRST_WORD = 8
"""Token ids below it are marks and placeholders."""


@pytest.fixture(autouse=True)
def _llama4_runs_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers 5.24 the forward of Llama 4 asks its text model's output for a field that it does not have."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)


@functools.cache
def model_of(build: Callable[[], Any]) -> Any:
    """The same for all tests: each leaves it as it was."""
    return build()


def words(count: int, seed: int = 0) -> Part:
    """Text without placeholders."""
    return Part([FIRST_WORD + token for token in text(count, seed=seed, vocabulary=tiled_models.VOCABULARY - FIRST_WORD).ids])


def image(tiles: int, seed: int = 0) -> Part:
    """An image of so many tiles, each with its placeholders."""
    pixels = random(tiles, 3, SIDE, SIDE, seed=seed)
    placeholders = Part([tiled_models.IMAGE_TOKEN] * (TOKENS * tiles), {"pixel_values": pixels})
    return Part([6]) + placeholders + Part([7])


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_turns_with_images(build: Callable[[], Any]) -> None:
    """Two images of one tile and of three among text, then text and a further image: every turn as without `accelerate`.

    The second turn's prompt has all the images before it, so that the encoder gets 4 tiles, and 6 in two batches.
    """
    turns = [
        words(3) + image(1, seed=1) + words(4, seed=1) + image(3, seed=2) + words(2, seed=2),
        words(2, seed=3) + image(2, seed=3) + words(5, seed=4),
    ]
    stats = check_turns(model_of(build), turns, token_budgets=BUDGETS)
    assert stats["graph_hits"] == 4 + 6


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_padded_batch(build: Callable[[], Any]) -> None:
    """Prompts of different lengths in one batch, with one image, two and none: each row as without `accelerate`."""
    model = model_of(build)
    inputs = batch_of(
        words(2) + image(1, seed=1) + words(3, seed=1),
        image(2, seed=2) + words(1, seed=2) + image(1, seed=3) + words(9, seed=3),
        words(12, seed=4),
    )
    want = answer(eager_copy(model), inputs)
    with accelerated(model, token_budgets=BUDGETS) as handle:
        check_answer(answer(model, inputs), want)
        assert served(handle) == (4, {}, {})


def test_images_of_zeros_are_left_out() -> None:
    """SmolVLM fills prompts with fewer images up with zeros, and drops them before its tower: only real ones are encoded."""
    model = model_of(tiled_models.tiny_smolvlm)
    one, two = words(2) + image(2, seed=1) + words(3, seed=1), image(1, seed=2) + words(4, seed=2)
    inputs = batch_of(one, two)
    tiles = inputs["pixel_values"]
    inputs["pixel_values"] = torch.stack([tiles[:2], torch.stack([tiles[2], torch.zeros_like(tiles[2])])])
    inputs["pixel_attention_mask"] = torch.ones(2, 2, SIDE, SIDE, dtype=torch.int64)
    want = answer(eager_copy(model), inputs)
    with accelerated(model, token_budgets=(16, 64)) as handle:  # tokens before the connector
        check_answer(answer(model, inputs), want)
        assert served(handle) == (3, {}, {})


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_other_images_give_another_answer(build: Callable[[], Any]) -> None:
    """The control: with two images exchanged, or with another image, the logits are clearly others."""
    model = model_of(build)
    one, two = image(1, seed=1), image(1, seed=2)
    _, logits = answer(model, batch_of(one + two + words(3)))
    for other in (two + one, one + image(1, seed=3)):
        _, changed = answer(model, batch_of(other + words(3)))
        assert float((changed[0] - logits[0]).abs().max()) > 1e-2
