"""No adapter's forward waits for the host: a capture could not hold that. On a CPU, with fake CUDA tensors.

Every architecture with a model in `scripts/released` is run, so one that is added is covered without a word here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from scripts.released import Released, all_released
from vit_compile import _torch_compat as compat
from vit_compile.models.architecture import Architecture
from vit_compile.models.packed_grid import PackedGridTable
from vit_compile.models.registry import architectures
from vit_compile.runtime.host_reads import SIZED_BY_DATA, find_host_reads

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a build of torch with CUDA (a GPU they do not)"
)

EXPENSIVE = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")
}


@functools.cache
def _one_each() -> dict[str, Released]:
    """The first released model of each architecture."""
    found: dict[str, Released] = {}
    for model in all_released().values():
        found.setdefault(model.architecture, model)
    return found


class Cheap(compat.DispatchMode):
    """Products and convolutions give zeros: adapters run their towers while they are made, and here no number matters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in EXPENSIVE:
            return func(*args, **kwargs)
        meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
        options = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
        shaped = func(*meta, **options)
        if isinstance(shaped, torch.Tensor):
            return torch.zeros_like(shaped, device="cpu")
        return tuple(torch.zeros_like(part, device="cpu") for part in shaped)


@pytest.fixture
def zero_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are zeros: fake tensors have no values, and random ones take minutes. (What memory happens to hold would make
    adapters that compare themselves with their tower find a difference.)"""
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)
    for name in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


@pytest.mark.usefixtures("zero_weights")
@pytest.mark.parametrize("row", architectures(), ids=lambda row: row.name)
def test_no_forward_waits_for_the_host(row: Architecture) -> None:
    """What the language model gets, and every field of the model's own call: nothing is found on any path."""
    released = _one_each().get(row.name)
    if released is None:
        pytest.skip("scripts/released has no model of it")
    try:
        model = released.build(2)
    except (ImportError, AttributeError) as error:
        if ".".join(transformers.__version__.split(".")[:2]) in row.versions:
            raise
        pytest.skip(f"this version of transformers does not have it: {error}")
    for parameter in model.parameters():
        parameter.data.zero_()
    for fields in (None, "all"):
        with torch.no_grad(), Cheap():
            binding = row.bind(model, fields=fields)
        try:
            assert list(map(str, find_host_reads(binding.table))) == []
        finally:
            binding.undo()


def test_the_lint_can_find_what_a_tower_does() -> None:
    """A mask over the rows of a real tower's forward is found, with the line in the tower's own file."""
    from tests.towers import tiny_qwen2_5_vl

    class Masked(PackedGridTable):
        def forward(self, path: str, values: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            handle = self.tower.blocks[0].register_forward_pre_hook(lambda module, args: (args[0][args[0][:, 0] > 0], *args[1:]))
            try:
                return super().forward(path, values)
            finally:
                handle.remove()

    (found,) = find_host_reads(Masked(tiny_qwen2_5_vl()))
    assert found.why == SIZED_BY_DATA
    assert found.where.startswith(__file__)


def test_a_towers_own_host_reads_are_found() -> None:
    """Gemma 4 strips its padding by a mask: through its own forward that is found, at that line of transformers."""
    from tests.models.test_gemma4 import build
    from vit_compile.models.binding import original
    from vit_compile.models.gemma4 import bind

    binding = bind(build(), "Gemma4VisionModel", fields=None)
    table = binding.table
    table.forward = lambda path, values: original(table.tower, "forward")(  # type: ignore[attr-defined, method-assign]
        values["pixel_values"][None], values["position_ids"][None]
    )
    (found,) = find_host_reads(table)
    assert (found.why, found.op) == (SIZED_BY_DATA, "aten.index.Tensor")
    assert "modeling_gemma4.py" in found.where
