"""Linear + activation in one operation: which pairs are rewritten, and that the numbers stay."""

from __future__ import annotations

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
from vit_compile.backend.passes.linear_activation import ACTIVATIONS, linear_activation

NAME = "activation_epilogue"
TOLERANCE = 1e-6


class Mlp(nn.Module):
    """fc1, an activation, fc2."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class ReadTwice(Mlp):
    """Somebody else reads the product, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.fc1(x)
        return self.fc2(self.activation(product)) + product.sum(-1, keepdim=True)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def run(model: Callable[..., Any], x: torch.Tensor, *, mark: bool = True) -> tuple[int, Any, str]:
    """Sites that the pass rewrites in the traced model, the rewritten graph's output, and its code."""
    seen: list[tuple[int, str]] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        report = passes.run_pass(gm, NAME)
        assert all("example_value" in node.meta for node in gm.graph.nodes if node.op.startswith("call"))
        seen.append((report.sites, gm.code))
        return gm.forward

    torch.compiler.reset()
    got = call(torch.compile(model, backend=backend), *(dynamic([x]) if mark else [x]))
    return sum(sites for sites, _ in seen), got, "".join(code for _, code in seen)


REWRITTEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh": (lambda: Mlp(tanh_gelu), (5, 8)),
    "module": (lambda: Mlp(nn.GELU(approximate="tanh")), (5, 8)),
    "relu": (lambda: Mlp(F.relu), (5, 8)),
    "relu module": (lambda: Mlp(nn.ReLU()), (5, 8)),
    "relu in place": (lambda: Mlp(nn.ReLU(inplace=True)), (5, 8)),
    "relu method": (lambda: Mlp(lambda x: x.relu()), (5, 8)),
    "operators": (lambda: Mlp(lambda x: torch.ops.aten.gelu.default(x, approximate="tanh")), (5, 8)),
    "batch": (lambda: Mlp(tanh_gelu), (3, 5, 8)),
    "one row": (lambda: Mlp(tanh_gelu), (1, 8)),
}
LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "exact": (lambda: Mlp(F.gelu), (5, 8)),
    "exact, in words": (lambda: Mlp(nn.GELU(approximate="none")), (5, 8)),
    "quick": (lambda: Mlp(lambda x: x * torch.sigmoid(1.702 * x)), (5, 8)),
    "silu": (lambda: Mlp(F.silu), (5, 8)),
    "no bias": (lambda: Mlp(tanh_gelu, bias=False), (5, 8)),
    "read twice": (lambda: ReadTwice(tanh_gelu), (5, 8)),
    "one vector": (lambda: Mlp(tanh_gelu), (8,)),
    "no linear in front": (lambda: Mlp(lambda x: F.relu(tanh_gelu(x) + 1), bias=False), (5, 8)),
}


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("case", REWRITTEN)
def test_pairs_become_one_operation(case: str, mark: bool) -> None:
    """What an epilogue computes exactly is rewritten, however it is spelled, and gives the two functions' numbers."""
    build, shape = REWRITTEN[case]
    model, x = seeded(build), image(*shape)
    sites, got, code = run(model, x, mark=mark and shape[0] > 1)
    assert sites == 1
    assert code.count("linear_activation") >= 1
    assert code.count("_nn.linear(") == 1
    assert largest_difference(got, call(model, x)) <= TOLERANCE


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_pairs_stay(case: str) -> None:
    """Another activation has no epilogue; without a bias, or where the product is read twice, there is nothing to fuse."""
    build, shape = LEFT_ALONE[case]
    model, x = seeded(build), image(*shape)
    sites, got, _ = run(model, x, mark=len(shape) > 1)
    assert sites == 0
    assert torch.equal(got, call(model, x))


def test_autocast_is_left_alone() -> None:
    """Under autocast the product has another dtype than its inputs: the operation would compute in the wrong one."""
    model, x = seeded(lambda: Mlp(tanh_gelu)), image(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        sites, got, _ = run(model, x)
        want = call(model, x)
    assert sites == 0
    assert got.dtype == want.dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)])
def test_the_operation(activation: str, shape: tuple[int, ...]) -> None:
    """The operation is the two functions one after the other, contiguous, for strided inputs and for none, too."""
    weight, bias = image(12, 8), image(12)
    reference = {"gelu_tanh": tanh_gelu, "relu": F.relu}[activation]
    for x in (image(*shape), image(*shape, 2)[..., 0]):
        got = linear_activation(x, weight, bias, activation)
        assert got.is_contiguous()
        assert got.shape == (*shape[:-1], 12)
        torch.testing.assert_close(got, reference(x @ weight.T + bias))


def test_the_operation_is_well_defined() -> None:
    """Fake tensors, aliasing and schema are as torch wants them."""
    torch.library.opcheck(
        torch.ops.vit_compile.linear_activation.default,
        (image(5, 8), image(12, 8), image(12), "gelu_tanh"),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


class WritesBetween(Mlp):
    """A residual stream that is written into between the layer and its activation."""

    def __init__(self, write: Callable[[torch.Tensor, nn.Linear], Any]) -> None:
        super().__init__(tanh_gelu)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.5
        product = self.fc1(h)
        self.write(h, self.fc1)
        return h + self.fc2(self.activation(product))


WRITES: dict[str, Callable[[torch.Tensor, nn.Linear], Any]] = {
    "add": lambda h, layer: h.add_(1),
    "view": lambda h, layer: h[:, :4].mul_(3),
    "relu": lambda h, layer: h.relu_(),
    "copy": lambda h, layer: h.copy_(h.flip(1)),
}


@pytest.mark.default_passes
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", WRITES)
def test_writes_between_layer_and_activation_come_after_the_product(case: str, compiler: str) -> None:
    """The product is of what the layer read, whatever is written there before its activation."""
    model = seeded(lambda: WritesBetween(WRITES[case]))
    function = compiled(model, compiler=compiler, token_budgets=[8])
    for rows in (8, 5):
        x = image(rows, 8)
        assert largest_difference(call(function, x), call(model, x)) <= TOLERANCE
    assert counters.pass_sites[NAME] > 0


def test_tensor_subclasses_are_left_alone() -> None:
    """A weight that computes in its own way (quantised ones do) is not handed to the operation."""
    from torch.testing._internal.two_tensor import TwoTensor

    model, x = seeded(lambda: Mlp(tanh_gelu)), image(5, 8)
    want = call(model, x)
    for name in ("weight", "bias"):
        plain = getattr(model.fc1, name).detach()
        setattr(model.fc1, name, nn.Parameter(TwoTensor(plain, plain), requires_grad=False))
    got = call(compiled(model, compiler="aot_eager"), x)
    got = got.a if isinstance(got, TwoTensor) else got
    assert largest_difference(got, want) <= TOLERANCE


@pytest.mark.default_passes
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_it_runs_in_the_backend(compiler: str, tmp_path: Path) -> None:
    """On by default, named in the dump with its sites, padded and replayed like any other operation."""
    model = seeded(lambda: nn.Sequential(Mlp(tanh_gelu), Mlp(tanh_gelu)))
    function = compiled(model, compiler=compiler, token_budgets=[8, 16], debug_dir=str(tmp_path))
    for rows in (8, 5, 13):
        x = image(rows, 8)
        assert largest_difference(call(function, x), call(model, x)) <= TOLERANCE
    assert f"pass `{NAME}`: 2 sites" in (tmp_path / "index.md").read_text()


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """`passes` names what runs."""
    model = seeded(lambda: Mlp(tanh_gelu))
    call(compiled(model, compiler="eager", passes=["patch_embedding_gemm"], debug_dir=str(tmp_path)), image(5, 8))
    assert NAME not in (tmp_path / "index.md").read_text()


@pytest.mark.default_passes
def test_every_layer_of_a_real_tower_is_rewritten() -> None:
    """Qwen3-VL's layers have the tanh form and are all rewritten; its mergers have the exact one and stay."""
    model = towers.tiny_vlm("qwen3_vl")
    tower = model.model.visual
    tanh = [module for module in tower.modules() if "tanh" in type(module).__name__.lower()]
    assert len(tanh) in (1, len(tower.blocks)), "one for each layer, or a shared one"
    with vit_compile.encoder_for(model, compiler="eager", token_budgets=(16,), max_items_per_batch=2) as encoder:
        assert encoder.is_captured()
    assert counters.pass_sites[NAME] % len(tower.blocks) == 0
    assert counters.pass_sites[NAME] > 0
