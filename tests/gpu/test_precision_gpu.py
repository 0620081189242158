"""What half precision costs: with all passes and chosen kernels no more than the model's own code loses, times 1.1."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from scripts.bench_models import relative_difference
from scripts.released import Released, all_released
from tests.models.parity import difference
from vit_compile.models.accelerate import accelerate

pytest.importorskip("transformers")

TOWERS = ("Qwen3-VL-8B", "Qwen2.5-VL-7B", "DINOv2-base", "SigLIP-SO400M/14-384")
MARGIN = 1.1


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters only, as `from_pretrained` does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def built(released: Released, depth: int | None) -> tuple[Any, Any]:
    """In bfloat16, and the same weights in float32."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        half = cast(released.build(depth), torch.bfloat16)
    return half, cast(copy.deepcopy(half), torch.float32)


@pytest.mark.parametrize("name", TOWERS)
def test_no_more_is_lost_than_in_eager(name: str) -> None:
    """Distance to the same weights in float32: compiled, with epilogues, GEMM and chosen attention kernels, against eager."""
    released = all_released()[name]
    half, single = built(released, None)
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        want = released.call(single, released.inputs(device, torch.float32))
        inputs = released.inputs(device, torch.bfloat16)
        eager = relative_difference(released.call(half, inputs), want)
        with accelerate(half, **released.options) as handle:
            handle.capture()
            ours = relative_difference(released.call(half, inputs), want)
            stats = handle.stats()
    assert stats["graph_hits"] > 0
    assert stats["not_captured"] == []
    print(f"{name}: eager {eager:.5f}, accelerated {ours:.5f}")
    assert ours <= MARGIN * eager


@pytest.mark.parametrize("name", ["GLM-4.1V-9B"])
def test_computed_indices_are_compiled(name: str) -> None:
    """A tower that computes indices from its grids: nothing runs on made-up numbers, which would be out of range and end the
    process; with room for one segment and for more."""
    released = all_released()[name]
    half, _ = built(released, 1)
    inputs = released.inputs(torch.device("cuda"), torch.bfloat16)
    with torch.inference_mode():
        want = released.call(half, inputs)
        with accelerate(half, **{**released.options, "packing": "greedy"}) as handle:
            handle.capture()
            got = released.call(half, inputs)
            assert handle.stats()["miss_reasons"] == {}
    difference(got, want)
    assert relative_difference(got, want) <= 6e-2
