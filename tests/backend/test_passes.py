"""The patch-embedding pass: which convolutions become a matrix product, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.backend.common import call, compiled, dynamic, largest_difference, traced
from vit_compile import counters
from vit_compile.backend import passes
from vit_compile.errors import OptionError
from vit_compile.options import DEFAULT_PASSES

TOLERANCE = 1e-5
NAME = "patch_embedding_gemm"


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A module with seeded weights; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def image(*shape: int) -> torch.Tensor:
    """Seeded pixels."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def run(model: Callable[..., Any], x: torch.Tensor, *, mark: bool = True) -> tuple[int, Any]:
    """Sites that the pass rewrites in the traced model, and the rewritten graph's output."""
    sites: list[int] = []
    outputs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        report = passes.run_pass(gm, NAME)
        assert report.name == NAME
        assert report.milliseconds >= 0
        sites.append(report.sites)
        assert all("example_value" in node.meta for node in gm.graph.nodes if node.op.startswith("call"))
        return gm.forward

    torch.compiler.reset()
    outputs.append(call(torch.compile(model, backend=backend), *(dynamic([x]) if mark else [x])))
    return sum(sites), outputs[0]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2d": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 16, 16)),
    "2d without bias": (lambda: nn.Conv2d(3, 8, 4, stride=4, bias=False), (2, 3, 16, 16)),
    "2d oblong kernel": (lambda: nn.Conv2d(3, 8, (4, 2), stride=(4, 2)), (2, 3, 16, 16)),
    "2d with remainders": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 19, 17)),
    "2d one patch": (lambda: nn.Conv2d(3, 8, 4, stride=4), (5, 3, 4, 4)),
    "2d one patch and a remainder": (lambda: nn.Conv2d(3, 8, 4, stride=4), (5, 3, 7, 5)),
    "2d one row of patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 4, 12)),
    "2d kernel 1": (lambda: nn.Conv2d(3, 8, 1), (2, 3, 5, 6)),
    "2d valid": (lambda: nn.Conv2d(3, 8, 4, stride=4, padding="valid"), (2, 3, 16, 16)),
    "3d": (lambda: nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (2, 3, 4, 8, 12)),
    "3d without bias": (lambda: nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=False), (2, 3, 4, 8, 12)),
    "3d one patch": (lambda: nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=False), (6, 3, 2, 4, 4)),
    "3d with remainders": (lambda: nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (2, 3, 5, 9, 15)),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stride": (lambda: nn.Conv2d(3, 8, 4, stride=2), (2, 3, 16, 16)),
    "padding": (lambda: nn.Conv2d(3, 8, 4, stride=4, padding=1), (2, 3, 16, 16)),
    "padding in one direction": (lambda: nn.Conv2d(3, 8, 4, stride=4, padding=(0, 2)), (2, 3, 16, 16)),
    "same": (lambda: nn.Conv2d(3, 8, 1, padding="same"), (2, 3, 8, 8)),
    "dilation": (lambda: nn.Conv2d(3, 8, 4, stride=4, dilation=2), (2, 3, 16, 16)),
    "groups": (lambda: nn.Conv2d(4, 8, 4, stride=4, groups=2), (2, 4, 16, 16)),
    "stride in one direction": (lambda: nn.Conv2d(3, 8, 4, stride=(4, 2)), (2, 3, 16, 16)),
    "3d time stride": (lambda: nn.Conv3d(3, 8, (2, 4, 4), stride=(1, 4, 4)), (2, 3, 4, 8, 8)),
    "1d": (lambda: nn.Conv1d(3, 8, 4, stride=4), (2, 3, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 4, stride=4), (2, 3, 4, 4)),
    "2d without a batch": (lambda: nn.Conv2d(3, 8, 4, stride=4), (3, 16, 16)),
}


@pytest.mark.parametrize("mark", [True, False], ids=["dynamic batch", "static"])
@pytest.mark.parametrize("case", CASES)
def test_patch_embeddings_are_rewritten(case: str, mark: bool) -> None:
    """Kernel = stride, nothing else: one site, the convolution's numbers, shape and dtype."""
    build, shape = CASES[case]
    model, x = seeded(build), image(*shape)
    sites, got = run(model, x, mark=mark)
    assert sites == 1
    assert largest_difference(got, call(model, x)) <= TOLERANCE


@pytest.mark.parametrize("case", REFUSED)
def test_other_convolutions_are_left_alone(case: str) -> None:
    """Anything that is not a patch embedding is not touched."""
    build, shape = REFUSED[case]
    model, x = seeded(build), image(*shape)
    sites, got = run(model, x, mark=False)
    assert sites == 0
    assert torch.equal(got, call(model, x))


def test_every_size_of_a_dynamic_batch() -> None:
    """The rewritten graph serves any batch and never asks for another trace."""
    model = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4))
    traces = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        traces.append(passes.run_pass(gm, NAME).sites)
        return gm.forward

    ours = torch.compile(model, backend=backend)
    call(ours, *dynamic([image(4, 3, 16, 16)]))
    for batch in (2, 3, 9):
        x = image(batch, 3, 16, 16)
        assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE
    assert traces == [1]


def test_dynamic_sides() -> None:
    """Image sides that are symbols: remainders are cut off at run time."""
    model = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4))
    sites = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        sites.append(passes.run_pass(gm, NAME).sites)
        return gm.forward

    ours = torch.compile(model, backend=backend)
    for shape in ((2, 3, 16, 20), (3, 3, 17, 23), (2, 3, 8, 31)):
        x = image(*shape)
        for dim in (0, 2, 3):
            torch._dynamo.maybe_mark_dynamic(x, dim)
        assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE
    assert set(sites) == {1}


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_inputs(dims: int) -> None:
    """The memory format of the pixels changes nothing but time."""
    if dims == 2:
        model, x = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4)), image(2, 3, 16, 16).to(memory_format=torch.channels_last)
    else:
        model = seeded(lambda: nn.Conv3d(3, 8, 2, stride=2))
        x = image(2, 3, 4, 8, 8).to(memory_format=torch.channels_last_3d)
    sites, got = run(model, x)
    assert sites == 1
    assert largest_difference(got, call(model, x)) <= TOLERANCE


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten and transpose": lambda y: y.flatten(2).transpose(1, 2),
    "view": lambda y: y.view(y.shape[0], 8, -1),
    "view of everything": lambda y: y.view(-1),
    "view_as_complex": lambda y: torch.view_as_complex(y.view(y.shape[0], 8, -1, 2)).real,
    "permute": lambda y: y.permute(0, 2, 3, 1) * 2,
    "stride arithmetic": lambda y: y.as_strided((2, 4), (4, 1)),
    "reshape then view": lambda y: y.reshape(y.shape[0], 8, -1).view(y.shape[0], -1),
    "flatten then view": lambda y: y.flatten(2).view(y.shape[0], 2, 4, -1),
    "transpose then view": lambda y: y.flatten(2).transpose(1, 2).transpose(1, 2).view(y.shape[0], -1),
    "two readers": lambda y: y.flatten(2) + y.view(y.shape[0], 8, -1),
    "in place": lambda y: y.add_(1).view(-1),
    "add then view": lambda y: (y + 1).view(-1),
}


@pytest.mark.parametrize("name", READERS)
def test_what_follows_may_need_contiguous_memory(name: str) -> None:
    """Whoever reads the result gets it as the convolution's: a reader that needs contiguous memory is not broken."""
    conv = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4))

    def model(x: torch.Tensor) -> torch.Tensor:
        return READERS[name](conv(x))

    x = image(2, 3, 16, 8)
    sites, got = run(model, x, mark=False)
    assert sites == 1
    assert largest_difference(got, call(model, x)) <= TOLERANCE


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_what_crosses_into_a_later_piece_has_the_strides_it_was_compiled_for(compiler: str) -> None:
    """Patches that skip over an attention call reach the next piece with the layout that this piece was compiled for."""
    conv = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4))

    def model(x: torch.Tensor) -> torch.Tensor:
        y = conv(x).flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])[:, 0] * 2 + y

    ours = compiled(model, mode="piecewise", compiler=compiler, token_budgets=[4, 8])
    call(ours, *dynamic([image(3, 3, 16, 8)]))
    for batch in (4, 2, 7, 9):
        x = image(batch, 3, 16, 8)
        assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE


@pytest.mark.parametrize("dims", [2, 3])
def test_the_strides_of_an_output_are_the_convolutions(dims: int) -> None:
    """A convolution whose result leaves the graph keeps its memory layout."""
    model = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4) if dims == 2 else nn.Conv3d(3, 8, 2, stride=2))
    x = image(2, 3, 16, 16) if dims == 2 else image(2, 3, 4, 8, 8)
    _, got = run(model, x)
    assert got.stride() == call(model, x).stride()


def test_sites_are_counted() -> None:
    """Every convolution of a graph is looked at: two patch embeddings and one other give two."""
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 2, stride=2))
    )
    x = image(2, 3, 16, 16)
    sites, got = run(model, x)
    assert sites == 2
    assert largest_difference(got, call(model, x)) <= TOLERANCE


@pytest.mark.parametrize("functional", [F.conv2d, torch.conv2d, torch.ops.aten.conv2d.default])
def test_every_spelling_of_the_function(functional: Any) -> None:
    """Functions and operators, with positional and keyword arguments."""
    weight, bias = image(8, 3, 4, 4), image(8)
    x = image(2, 3, 16, 16)
    spellings: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: functional(x, weight, bias, [4, 4]),
        lambda x: functional(x, weight, stride=[4, 4]),
        lambda x: functional(x, weight, None, [4, 4], [0, 0], [1, 1], 1),
    ]
    for spelling in spellings:
        sites, got = run(spelling, x)
        assert sites == 1
        assert largest_difference(got, spelling(x)) <= TOLERANCE


def test_integer_strides() -> None:
    """`F.conv2d(..., stride=4)` gives a plain integer for all sides."""
    weight = image(8, 3, 4, 4)
    x = image(2, 3, 16, 16)
    sites, got = run(lambda x: F.conv2d(x, weight, stride=4), x)
    assert sites == 1
    assert largest_difference(got, F.conv2d(x, weight, stride=4)) <= TOLERANCE


def test_half_precision() -> None:
    """bfloat16 stays bfloat16, within its precision."""
    model = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4)).bfloat16()
    x = image(2, 3, 16, 16).bfloat16()
    sites, got = run(model, x)
    assert sites == 1
    assert largest_difference(got, call(model, x)) <= 0.05


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_lone_convolution(compiler: str) -> None:
    """A model that is one convolution compiles, also where Inductor makes no cache artefact for it, pass on or off."""
    for names in (None, ()):
        model = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4))
        ours = compiled(model, compiler=compiler, token_budgets=[4, 8], passes=names)
        call(ours, *dynamic([image(3, 3, 16, 16)]))
        for batch in (4, 2, 7, 9):
            x = image(batch, 3, 16, 16)
            assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE
        torch.compiler.reset()


def test_a_lone_convolution_between_attentions() -> None:
    """The same for a piece that is nothing but a convolution that the pass leaves alone."""
    conv = seeded(lambda: nn.Conv2d(4, 4, 3, padding=1))

    def model(x: torch.Tensor) -> torch.Tensor:
        y = conv(F.scaled_dot_product_attention(x, x, x))
        return F.scaled_dot_product_attention(y, y, y)

    ours = compiled(model, compiler="inductor", mode="piecewise", token_budgets=[4, 8])
    call(ours, *dynamic([image(3, 4, 6, 8)]))
    for batch in (4, 2, 9):
        x = image(batch, 4, 6, 8)
        assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE


def test_passes_can_be_switched_off() -> None:
    """`passes=()` runs none, None runs all, a list runs those; the numbers agree."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.Linear(128, 4)))
    x = image(4, 3, 16, 16)
    assert passes.selected(None) == DEFAULT_PASSES
    assert passes.selected(()) == ()
    for names in (None, (), (NAME,)):
        torch.compiler.reset()
        assert largest_difference(call(compiled(model, passes=names), x), call(model, x)) <= TOLERANCE


def test_the_pass_really_runs_in_the_backend(tmp_path: Any) -> None:
    """With the pass no convolution is left in the cut graph; without it there is one."""
    model = seeded(lambda: nn.Conv2d(3, 8, 4, stride=4))
    for names, expected in ((None, False), ((), True)):
        torch.compiler.reset()
        folder = tmp_path / str(expected)
        call(compiled(model, passes=names, debug_dir=folder), image(4, 3, 16, 16))
        assert ("conv2d" in (folder / "graph_0" / "split.py").read_text()) is expected


def test_a_pass_that_does_not_exist_is_an_option_error() -> None:
    """The error lists the passes there are."""
    with pytest.raises(OptionError, match=NAME):
        call(compiled(nn.Linear(2, 2), passes=["fuse_everything"]), torch.zeros(3, 2))


def test_a_rewritten_tower_is_padded_and_proved() -> None:
    """The rewrite keeps rows apart, so padding stays allowed."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2)))
    ours = compiled(model, token_budgets=[4, 8])
    call(ours, *dynamic([image(3, 3, 16, 16)]))
    for batch in (2, 5, 8):
        x = image(batch, 3, 16, 16)
        assert largest_difference(call(ours, x), call(model, x)) <= TOLERANCE
    assert counters.padded_replays == 3


def test_the_pass_leaves_the_graph_traceable(tmp_path: Any) -> None:
    """The graph after the pass prints as Python (the dump), with shapes on the new nodes."""
    model = seeded(lambda: nn.Conv3d(3, 8, 2, stride=2))
    found = traced(model, *dynamic([image(3, 3, 4, 4, 4)]), passes=(NAME,))
    text = found.gm.print_readable(print_output=False)
    assert "linear" in text
    assert "conv3d" not in text
