"""`generate` of whole models with packed towers, accelerated and untouched: the same tokens and logits, turn by turn.

The prompts are made by hand, as the processors make them: ids, a mask, and for each image or clip its placeholders and rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests import towers
from tests.models.parity import accelerated, eager_copy, served

pytest.importorskip("transformers")

NEW_TOKENS = 5
LOGITS_TOLERANCE = 1e-4


# --- prompts and turns, for any model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: text, or an image with its placeholders. `+` puts two behind one another."""

    ids: list[int]
    """Token ids; placeholders included."""

    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the model gets beside the ids, by name. Behind one another along dimension 0 where parts are joined."""

    def __add__(self, other: Part) -> Part:
        names = [*self.inputs, *(name for name in other.inputs if name not in self.inputs)]
        return Part(
            self.ids + other.ids,
            {name: torch.cat([part.inputs[name] for part in (self, other) if name in part.inputs]) for name in names},
        )


def text(count: int, seed: int = 0, vocabulary: int = 100) -> Part:
    """So many seeded tokens below `vocabulary`."""
    generator = torch.Generator().manual_seed(seed)
    return Part(torch.randint(1, vocabulary, (count,), generator=generator).tolist())


def batch_of(*prompts: Part, token_types: Mapping[int, int] | None = None) -> dict[str, torch.Tensor]:
    """What `generate` gets: prompts padded on the left to the longest, and the images of all of them.

    Args:
        prompts: one for each row.
        token_types: `mm_token_type_ids` by placeholder id, for models that take them; None: left out.
    """
    length = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[0] * (length - len(prompt.ids)) + prompt.ids for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
    joined = functools.reduce(lambda a, b: a + b, prompts)
    made = {"input_ids": ids, "attention_mask": mask, **joined.inputs}
    if token_types is not None:
        types = torch.zeros_like(ids, dtype=torch.int32)
        for placeholder, kind in token_types.items():
            types[ids == placeholder] = kind
        made["mm_token_type_ids"] = types
    return made


@torch.no_grad()
def answer(model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each row, and the logits [steps, rows, vocabulary] behind them."""
    generate: Any = model.generate
    given = {name: value.clone() for name, value in inputs.items()}
    found = generate(
        **given, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return found.sequences[:, inputs["input_ids"].shape[1] :].tolist(), torch.stack(found.logits)


def check_turns(
    model: nn.Module,
    turns: Sequence[Part],
    *,
    token_types: Mapping[int, int] | None = None,
    generate: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A conversation with the untouched model with eager attention, and the same with the accelerated one.

    Each turn's prompt is the one before, the untouched model's answer to it, and the turn. Tokens have to be the same, and
    logits within `LOGITS_TOLERANCE`; nothing may be answered by the model's own code.

    Args:
        model: a whole model; left as it was.
        turns: what is said, one after another.
        token_types: see `batch_of`.
        generate: more options of `generate`.
        options: of `accelerate`.

    Returns:
        `stats()` of the handle at the end.
    """
    reference, history = eager_copy(model), Part([])
    asked: list[dict[str, torch.Tensor]] = []
    wanted = []
    for turn in turns:
        history = history + turn
        asked.append(batch_of(history, token_types=token_types))
        wanted.append(answer(reference, asked[-1], **(generate or {})))
        history = history + Part(wanted[-1][0][0])
    with accelerated(model, **options) as handle:
        for inputs, want in zip(asked, wanted, strict=True):
            check_answer(answer(model, inputs, **(generate or {})), want)
        _, misses, own_calls = served(handle)
        assert (misses, own_calls) == ({}, {})
        return handle.stats()


def check_answer(got: tuple[list[list[int]], torch.Tensor], want: tuple[list[list[int]], torch.Tensor]) -> None:
    """The same tokens, and logits within `LOGITS_TOLERANCE`; they do not come from a model that says one thing only."""
    assert got[0] == want[0]
    assert float((got[1] - want[1]).abs().max()) <= LOGITS_TOLERANCE
    assert float(want[1].std()) > 0.1


# --- packed towers ---------------------------------------------------------------------------------------------------

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
TOKEN_TYPES = {towers.IMAGE_TOKEN: 1, towers.VIDEO_TOKEN: 2}
OPTIONS: dict[str, Any] = {"token_budgets": [16, 48], "token_range": (8, 48), "max_frames_per_video": 4, "segment_capacities": ()}
START, END = Part([108]), Part([109])


@functools.cache
def model_of(kind: str) -> Any:
    """A tiny whole model, the same for all tests: each leaves it as it was."""
    return towers.tiny_vlm(kind)


def image(h: int, w: int, seed: int = 0) -> Part:
    """An image of so many patches, between its marks."""
    inputs = {"pixel_values": towers.pixels(h * w, seed), "image_grid_thw": torch.tensor([(1, h, w)])}
    return START + Part([towers.IMAGE_TOKEN] * (h * w // 4), inputs) + END


def clip(kind: str, t: int, h: int, w: int, seed: int = 0) -> Part:
    """A clip: one block of placeholders (Qwen2-VL, Qwen2.5-VL), or one for each frame, behind its time."""
    inputs = {"pixel_values_videos": towers.pixels(t * h * w, seed), "video_grid_thw": torch.tensor([(t, h, w)])}
    frame = Part([towers.IMAGE_TOKEN if kind == "glm4v" else towers.VIDEO_TOKEN] * (h * w // 4))
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return START + Part(frame.ids * t, inputs) + END
    frames = [text(2, seed=number) + START + frame + END for number in range(t)]
    return Part([], inputs) + functools.reduce(lambda a, b: a + b, frames)


@pytest.mark.parametrize("kind", KINDS)
def test_turns_with_images_and_a_clip(kind: str) -> None:
    """Two images of different sizes between text, then a further image, then a clip: every turn as without `accelerate`.

    A turn's prompt has all the images before it, so that the encoder gets 2 items, 3, and 3 with a clip.
    """
    turns = [
        text(3) + image(4, 6, seed=1) + text(4, seed=1) + image(8, 4, seed=2) + text(2, seed=2),
        text(2, seed=3) + image(2, 10, seed=3) + text(5, seed=4),
        clip(kind, 3, 4, 4, seed=4) + text(3, seed=5),
    ]
    if kind == "glm4v":  # its clips and images have one placeholder, and may not be mixed
        turns.pop()
    stats = check_turns(model_of(kind), turns, token_types=TOKEN_TYPES, **OPTIONS)
    assert stats["graph_hits"] == (5 if kind == "glm4v" else 9)


def test_turns_with_clips_of_single_frames() -> None:
    """GLM encodes each frame of a clip as an item: two turns with a clip each."""
    turns = [
        text(3) + clip("glm4v", 3, 4, 4, seed=4) + text(3, seed=5),
        clip("glm4v", 2, 4, 6, seed=5) + text(2, seed=6),
    ]
    stats = check_turns(model_of("glm4v"), turns, token_types={towers.IMAGE_TOKEN: 2}, **OPTIONS)
    assert stats["graph_hits"] == 3 + 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch(kind: str) -> None:
    """Prompts of different lengths in one batch, with one, two and no image: each row as without `accelerate`."""
    model = model_of(kind)
    inputs = batch_of(
        text(2) + image(4, 4, seed=1) + text(3, seed=1),
        image(6, 4, seed=2) + text(1, seed=2) + image(2, 4, seed=3) + text(9, seed=3),
        text(12, seed=4),
        token_types=TOKEN_TYPES,
    )
    want = answer(eager_copy(model), inputs)
    with accelerated(model, **OPTIONS) as handle:
        check_answer(answer(model, inputs), want)
        assert served(handle) == (3, {}, {})


def test_other_images_give_another_answer() -> None:
    """The control: with the pixels of another image, and with two images exchanged, the logits are clearly others."""
    model = model_of("qwen3_vl")
    one, two = image(4, 4, seed=1), image(4, 4, seed=2)
    _, logits = answer(model, batch_of(one + two + text(3), token_types=TOKEN_TYPES))
    for other in (two + one, one + image(4, 4, seed=3)):
        _, changed = answer(model, batch_of(other + text(3), token_types=TOKEN_TYPES))
        assert float((changed[0] - logits[0]).abs().max()) > 1e-2


def test_text_alone_does_not_call_the_encoder() -> None:
    """A prompt without images is answered as before, and nothing is counted."""
    model = model_of("qwen2_vl")
    inputs = batch_of(text(6))
    want = answer(eager_copy(model), inputs)
    with accelerated(model, **OPTIONS) as handle:
        check_answer(answer(model, inputs), want)
        assert served(handle) == (0, {}, {})


def test_beams_and_candidates_share_their_image() -> None:
    """`num_beams` and `num_return_sequences` repeat the image for each: all of them are served, with the same sequences."""
    model = model_of("qwen2_5_vl")
    inputs = batch_of(text(2) + image(4, 6, seed=1) + text(3, seed=1), token_types=TOKEN_TYPES)
    more = {"num_beams": 3, "num_return_sequences": 2}
    want = answer(eager_copy(model), inputs, **more)
    with accelerated(model, **OPTIONS) as handle:
        got = answer(model, inputs, **more)
        assert got[0] == want[0]
        hits, misses, own_calls = served(handle)
        assert hits > 0
        assert (misses, own_calls) == ({}, {})
