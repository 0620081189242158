"""What the traced graphs of one encoder share, and when its memory goes."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vit_compile
from tests.backend.common import BOUND, BUDGETS, call, compiled, compiled_toy, packed, trace_dynamic, wide_rows
from tests.towers import COUNTING_NAME, norm_view_tower, toy_tower
from vit_compile import counters
from vit_compile.backend.encoder import Encoder, encoder_of, encoders


def captures() -> list[Any]:
    """All captures of this process."""
    return [capture for encoder in encoders() for capture in encoder.captures()]


def test_traces_of_one_model_share_an_encoder() -> None:
    """Graphs traced for no_grad and for inference_mode belong to one encoder: the caps hold for the model."""
    _, ours = compiled_toy(max_graphs=3)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    with torch.inference_mode():
        for lengths in ([5, 2], [9, 3]):
            ours(*packed(lengths, bound=BOUND))
    assert len({id(encoder) for encoder in encoders() if encoder.captures()}) == 1
    assert len(captures()) == 3
    with counters.expect(captures=0, uncaptured_calls=1, skips={"max-graphs": 1}), torch.inference_mode():
        ours(*packed([28, 2], bound=BOUND))


def test_weights_decide_the_encoder() -> None:
    """Equal first weights: one encoder; others, or none: another one."""
    cpu = torch.device("cpu")
    one, two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert encoder_of([one, two], cpu) is encoder_of([one], cpu)
    assert encoder_of([one], cpu) is not encoder_of([two], cpu)
    assert encoder_of([], cpu) is not encoder_of([], cpu)


def test_encoders_go_with_their_weights() -> None:
    """The registry keeps no weight and no encoder alive."""
    weight = nn.Parameter(torch.zeros(2))
    encoder = weakref.ref(encoder_of([weight], torch.device("cpu")))
    assert encoder() is not None
    del weight
    gc.collect()
    assert encoder() is None


def test_room_for_one_more() -> None:
    """No captures: room under any cap."""
    encoder = Encoder(torch.device("cpu"))
    assert encoder.room_for_one_more(1, None) is None
    assert encoder.room_for_one_more(1, 1) is None
    assert encoder.nbytes == 0
    assert encoder.recorder is None


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_captures_go_with_the_compiled_model(mode: str) -> None:
    """Deleting the model and what torch.compile made of it frees every capture (hazard 30)."""
    model = norm_view_tower(depth=1)
    ours = compiled(model, mode=mode, token_budgets=BUDGETS)
    for lengths in ([5, 2], [9, 4], [20, 3]):
        trace_dynamic(ours, *packed(lengths, make=wide_rows, bound=BOUND))
    held = [weakref.ref(capture) for capture in captures()]
    buffers = [weakref.ref(buffer.tensor) for capture in captures() for buffer in capture.inputs.buffers]
    assert len(held) == 3
    del model, ours
    # Dynamo keeps compiled code with the model's code object, not with the model: reset() is what drops it.
    torch.compiler.reset()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    assert [ref() for ref in buffers if ref() is not None] == []


def test_captures_go_with_the_model_alone() -> None:
    """Deleting the model is enough where Dynamo's guards hold on to it weakly: nothing here keeps captures alive."""
    model = toy_tower(2)
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    held = [weakref.ref(capture) for capture in captures()]
    weight = weakref.ref(model.layers[0].weight)
    assert len(held) == 1
    del model, ours
    gc.collect()
    assert weight() is None
    assert [ref() for ref in held] == [None]


def test_dumps_keep_nothing_alive(tmp_path: Path) -> None:
    """With a debug folder captures go as well."""
    model = toy_tower(2)
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS, debug_dir=tmp_path)
    trace_dynamic(ours, *packed([5, 2], bound=BOUND))
    held = [weakref.ref(capture) for capture in captures()]
    assert len(held) == 1
    del model, ours
    torch.compiler.reset()
    gc.collect()
    assert [ref() for ref in held] == [None]


def test_warmup_keeps_nothing_alive() -> None:
    """Neither does a warm-up, nor its report."""
    model = toy_tower(2)
    ours = compiled(model, mode="piecewise", splitting_ops=[COUNTING_NAME], token_budgets=BUDGETS)
    report = vit_compile.warmup(ours, *packed([5, 2], bound=BOUND), progress=False)
    held = [weakref.ref(capture) for capture in captures()]
    assert len(held) == len(BUDGETS) == len(report.captures)
    del model, ours
    torch.compiler.reset()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(BUDGETS)


def test_clear_frees_captures_at_once() -> None:
    """`clear()` drops every capture of every model; the models work on."""
    pairs = [compiled_toy(), compiled_toy(depth=2)]
    args = packed([5, 2], bound=BOUND)
    for _, ours in pairs:
        trace_dynamic(ours, *args)
    held = [weakref.ref(capture) for capture in captures()]
    assert len(held) == 2
    vit_compile.clear()
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert captures() == []
    for model, ours in pairs:
        assert torch.equal(call(ours, *args), call(model, *args))


def test_clearing_one_model_while_another_runs() -> None:
    """Dropping all captures from another thread never gives a wrong result or an error."""
    model, ours = compiled_toy()
    calls = [packed(lengths, bound=BOUND) for lengths in ([5, 2], [9, 4], [20, 3])]
    wants = [call(model, *args) for args in calls]
    trace_dynamic(ours, *calls[0])
    stop = threading.Event()

    def clear_again_and_again() -> None:
        while not stop.is_set():
            vit_compile.clear()

    thread = threading.Thread(target=clear_again_and_again)
    thread.start()
    try:
        for _ in range(20):
            for args, want in zip(calls, wants, strict=True):
                assert torch.equal(call(ours, *args), want)
    finally:
        stop.set()
        thread.join()


def test_a_model_without_weights_has_its_own_encoder() -> None:
    """Functions without weights are cleared like others."""
    ours = compiled(lambda x: torch.relu(x) * 2, token_budgets=BUDGETS)
    call(ours, torch.randn(8, 4))
    assert len(captures()) == 1
    vit_compile.clear()
    assert captures() == []
