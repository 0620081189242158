"""Linear layers with odd widths: which are given zeros up to whole vectors, and that the numbers stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vit_compile
from tests import towers
from tests.backend.common import call, compiled, dynamic, largest_difference
from tests.backend.test_passes import image, seeded
from vit_compile import counters
from vit_compile.backend import passes
from vit_compile.backend.passes.aligned_linear import AlignedLinear
from vit_compile.options import DEFAULT_PASSES

NAME = "aligned_linear"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
HALF = list(TOLERANCE)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU as on a GPU."""
    monkeypatch.setitem(passes.PASSES, NAME, AlignedLinear(("cpu", "cuda")))


class Layers(nn.Module):
    """Linear layers of these widths, one after another."""

    def __init__(self, *widths: int, bias: bool = True, activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=bias) for i, o in itertools.pairwise(widths))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class Views(nn.Module):
    """What comes out of a layer is looked at in another shape, which takes its strides for granted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out.view(-1, 3, 4).as_strided((out.shape[0], 12), (12, 1)).view(-1)


def run(model: Callable[..., Any], x: torch.Tensor, *names: str) -> tuple[int, Any, list[tuple[int, ...]]]:
    """Layers that the pass rewrites in the traced model, the rewritten graph's output, and the shapes of weights in products."""
    seen: list[tuple[int, list[tuple[int, ...]]]] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        for name in names:
            passes.run_pass(gm, name)
        report = passes.run_pass(gm, NAME)
        assert all("example_value" in node.meta for node in gm.graph.nodes if node.op.startswith("call"))
        products = [node for node in gm.graph.nodes if "linear" in str(node.target) and node.op == "call_function"]
        seen.append((report.sites, [tuple(node.args[1].meta["example_value"].shape) for node in products]))
        return gm.forward

    torch.compiler.reset()
    got = call(torch.compile(model, backend=backend), *(dynamic([x]) if x.dim() > 1 else [x]))
    return sum(sites for sites, _ in seen), got, [shape for _, shapes in seen for shape in shapes]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_odd_widths_become_whole_vectors(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    """Outer and inner dimensions, with and without a bias: products see multiples of eight, and the numbers stay."""
    model, x = seeded(lambda: Layers(8, 12, 20, 7, 16, bias=bias)).to(dtype), image(*shape).to(dtype)
    sites, got, shapes = run(model, x)
    assert sites == 4
    assert sorted(shapes) == sorted([(16, 8), (24, 16), (8, 24), (16, 8)])
    want = call(model, x)
    assert got.dtype == want.dtype
    assert got.stride() == want.stride()
    assert largest_difference(got.float(), want.float()) <= TOLERANCE[dtype] * float(want.abs().max())


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "aligned": (lambda: Layers(8, 16, 24), (5, 8), torch.bfloat16),
    "float32": (lambda: Layers(8, 12, 20), (5, 8), torch.float32),
    "one vector": (lambda: Layers(8, 12), (8,), torch.bfloat16),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_others_stay(case: str) -> None:
    """Widths that fit, dtypes without such kernels and products of a single vector are not touched."""
    build, shape, dtype = LEFT_ALONE[case]
    model, x = seeded(build).to(dtype), image(*shape).to(dtype)
    sites, got, _ = run(model, x)
    assert sites == 0
    assert torch.equal(got, call(model, x))


@pytest.mark.parametrize("bias", [(), (1,), (13,)], ids=str)
def test_a_bias_for_all(bias: tuple[int, ...]) -> None:
    """`F.linear` takes one number for all features, too: only a bias of a number each is padded, others are left alone."""
    weight, added, x = image(13, 12).bfloat16(), image(*bias).bfloat16() if bias else torch.tensor(0.5).bfloat16(), image(5, 12)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, added)

    sites, got, _ = run(layer, x.bfloat16())
    assert sites == (1 if bias == (13,) else 0)
    assert largest_difference(got.float(), layer(x.bfloat16()).float()) <= 5e-2


def test_no_features_are_left_alone() -> None:
    """A weight without rows or columns has nothing to pad."""
    for shape in ((0, 12), (12, 0)):
        weight = torch.zeros(shape).bfloat16()
        sites, got, _ = run(lambda x, w=weight: F.linear(x, w), image(5, shape[1]).bfloat16())
        assert sites == 0
        assert got.shape == (5, shape[0])


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself the pass is for CUDA: elsewhere there are no such kernels."""
    monkeypatch.setitem(passes.PASSES, NAME, AlignedLinear())
    sites, _, _ = run(seeded(lambda: Layers(8, 12)).bfloat16(), image(5, 8).bfloat16())
    assert sites == 0


def test_autocast_is_left_alone() -> None:
    """Under autocast the weights have another dtype than the product."""
    model, x = seeded(lambda: Layers(8, 12)), image(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(model, x)[0] == 0


def test_strides_that_others_rely_on() -> None:
    """The product comes out contiguous, as it did: a view of another shape holds the same values."""
    model, x = seeded(Views).bfloat16(), image(5, 8).bfloat16()
    sites, got, _ = run(model, x)
    assert sites == 1
    torch.testing.assert_close(got, call(model, x), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_behind_the_epilogue(approximate: str) -> None:
    """A layer whose activation runs in its epilogue is padded like others, and keeps the activation."""
    model = seeded(lambda: Layers(8, 12, 16, activation=lambda x: F.gelu(x, approximate=approximate))).bfloat16()
    x = image(5, 8).bfloat16()
    sites, got, shapes = run(model, x, "activation_epilogue")
    assert sites == 2
    assert sorted(shapes) == [(16, 8), (16, 16)]
    want = call(model, x)
    assert largest_difference(got.float(), want.float()) <= 2e-2 * float(want.abs().max())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    """Zeros that are appended meet zeros only: rows that were finite are, and the others are what they were."""
    model, x = seeded(lambda: Layers(12, 12, activation=lambda x: x)).bfloat16(), image(5, 12).bfloat16()
    x[2, 3] = value
    _, got, _ = run(model, x)
    assert torch.equal(got.isfinite(), call(model, x).isfinite())


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_weights_that_are_written_to_are_followed(compiler: str) -> None:
    """No padded copy outlives a call: after an update in place, as by `load_state_dict`, the numbers are the new weight's."""
    model = seeded(lambda: Layers(8, 12, 8)).bfloat16()
    function = compiled(model, compiler=compiler, token_budgets=[8], passes=[NAME])
    x = image(5, 8).bfloat16()
    before = call(function, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(2)
    want = call(model, x)
    assert largest_difference(before.float(), want.float()) > 0.1
    assert largest_difference(call(function, x).float(), want.float()) <= 2e-2 * float(want.abs().max())


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_gated_tower(compiler: str) -> None:
    """Qwen2.5-VL's kind of MLP with an odd width, all three layers of a block: features as without the pass, up to rounding."""
    tower = towers.odd_qwen2_5_vl(depth=2).bfloat16()
    request = {"pixel_values": towers.pixels(96).bfloat16(), "image_grid_thw": [(1, 8, 12)]}
    features = []
    for names in (DEFAULT_PASSES, tuple(name for name in DEFAULT_PASSES if name != NAME)):
        counters.reset()
        with vit_compile.encoder_for(tower, token_budgets=(48,), compiler=compiler, packing="greedy", passes=names) as encoder:
            features.append(encoder.execute(request)[0].float())
            assert encoder.snapshot()["graph_hits"] == 1
        assert counters.pass_sites.get(NAME, 0) == (6 if NAME in names else 0)
    with_pass, without = features
    assert float((with_pass - without).norm() / without.norm()) < 0.02


@pytest.mark.default_passes
def test_it_runs_in_the_backend(tmp_path: Path) -> None:
    """On by default, and named in the dump with its sites."""
    assert NAME in DEFAULT_PASSES
    model = seeded(lambda: Layers(8, 12, 16)).bfloat16()
    function = compiled(model, compiler="aot_eager", token_budgets=[8], debug_dir=str(tmp_path))
    for rows in (8, 5):
        x = image(rows, 8).bfloat16()
        assert largest_difference(call(function, x).float(), call(model, x).float()) <= 2e-2
    assert f"pass `{NAME}`: 2 sites" in (tmp_path / "index.md").read_text()
