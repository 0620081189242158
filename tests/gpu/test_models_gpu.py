"""Every adapter on a GPU: real widths, four layers, captured; the answered call gives what the model's own code gives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from scripts.bench_models import relative_difference, tensors
from scripts.released import Released, all_released
from tests.models.parity import difference
from vit_compile.models.accelerate import accelerate

pytest.importorskip("transformers")

DEPTH = 4
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
"""Of the difference's norm over the norm. In float32 the patch convolution of eager runs with TF32 switched off."""


@pytest.fixture
def full_precision() -> Any:
    """No TF32: the comparison in float32 is about the adapter."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_float32_matmul_precision(before[1])


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("released", all_released().values(), ids=lambda released: released.name)
def test_the_answered_call_is_the_model_s_own(released: Released, dtype: torch.dtype) -> None:
    """Captured graphs serve it (nothing refused, nothing eager), with the same types, fields and shapes, within rounding."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = released.build(DEPTH).to(device)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"not in this version of transformers: {error}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    inputs = released.inputs(device, dtype)
    with torch.inference_mode():
        want = released.call(model, inputs)
        with accelerate(model, **{**released.options, "mode": "eager", "packing": "greedy"}) as handle:
            handle.capture()
            got = released.call(model, inputs)
            again = released.call(model, inputs)
            stats = handle.stats()
    difference(got, want)  # types, fields, shapes
    assert relative_difference(got, want) <= BOUNDS[dtype]
    assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(again), strict=True))
    assert (stats["not_captured"], stats["miss_reasons"], stats["own_calls"]) == ([], {}, {})
    assert stats["graph_hits"] > 0
    del model, handle, got, want, again, inputs
    gc.collect()
    torch.cuda.empty_cache()
