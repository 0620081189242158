"""Attention kernels chosen at capture, the activation's epilogue and saved caches, on a real GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vit_compile
from tests import towers
from tests.gpu.test_runtime_gpu import TOLERANCE, exact, managed, reference, request, worst
from tests.gpu.test_varlen_gpu import END, LENGTHS, cu, expected, qkv
from vit_compile.attention import admission, choice, fence, kernels, one_segment, triton_kernel
from vit_compile.attention.problem import DENSE, VARLEN, Problem, varlen_problem
from vit_compile.attention.varlen import varlen_attention
from vit_compile.backend.cuda import seconds_captured
from vit_compile.backend.passes.linear_activation import linear_activation
from vit_compile.options import PASS_NAMES
from vit_compile.runtime import known_costs

CUDA = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]
__all__ = ["exact"]  # the fixture of the runtime's tests


def runs(dtype: torch.dtype, dim: int, fence_from: int = 2) -> tuple[dict[str, Any], dict[str, str]]:
    """Admissible kernels for the layout of these tests."""
    return admission.candidates(varlen_problem(qkv(dim, dtype)[0], cu(LENGTHS), 300), CUDA, fence_from=fence_from, every=True)


@pytest.mark.parametrize("dim", [64, 72, 80, 128])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_every_admissible_kernel_keeps_the_contract(dtype: torch.dtype, dim: int) -> None:
    """Numbers, NaN that stays in its segment bit for bit, strided inputs, a finite tail: whoever is admitted keeps them."""
    found, refused = runs(dtype, dim)
    assert found, refused
    inputs, boundaries, scale = qkv(dim, dtype), cu(LENGTHS), dim**-0.5
    want = expected(inputs, boundaries, scale)[:END]
    packed = torch.stack(inputs, dim=1)
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        x[400] = float("nan")
        x[END:] = float("nan")
    for name, run in found.items():
        clean = run(*inputs, boundaries, 300, scale)
        limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
        torch.testing.assert_close(clean[:END].double().cpu(), want, atol=limit, rtol=0, msg=name)
        strided = run(*packed.unbind(1), boundaries, 300, scale)
        assert torch.equal(strided[:END], clean[:END]), name
        broken = run(*poisoned, boundaries, 300, scale)
        assert torch.equal(broken[:300], clean[:300]), name
        assert torch.equal(broken[500:END], clean[500:END]), name
        assert broken[300:500].isnan().any(), name


@pytest.mark.parametrize("dim", [64, 72, 80, 88, 120])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 100, 256, 1024, 3000])
def test_cudnn_with_one_segment(rows: int, dtype: torch.dtype, dim: int) -> None:
    """Any end up to all rows: the numbers of the reference; padding of q and k may hold anything, that of v anything finite,
    and no bit of a real row changes; the tail is finite; it can be captured, and two captures give the same bits."""
    (q, k, v), scale = qkv(dim, dtype, rows), dim**-0.5
    for end in {1, rows // 2, rows - rows // 9, rows} - {0}:
        boundaries = torch.tensor([0, end], dtype=torch.int32, device=CUDA)
        want = expected([x[:end] for x in (q, k, v)], boundaries, scale)[:end]
        packed = torch.stack([q, k, v], dim=1)
        packed[end:] = 1.0
        clean = one_segment.cudnn(*packed.unbind(1), boundaries, rows, scale)
        limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        torch.testing.assert_close(clean[:end].double().cpu(), want, atol=limit, rtol=0)
        assert clean.is_contiguous()
        assert clean.shape == q.shape
        assert bool(clean.isfinite().all())
        packed[end:, :2], packed[end:, 2] = float("nan"), 3e4
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            spoiled = one_segment.cudnn(*packed.unbind(1), boundaries, rows, scale)
        for _ in range(2):
            spoiled.zero_()
            graph.replay()
            assert torch.equal(spoiled[:end], clean[:end])
        assert bool(spoiled.isfinite().all())


@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", HALF)
def test_cudnn_with_one_segment_is_admitted(dtype: torch.dtype, dim: int) -> None:
    """By its trial here; where a NaN may lie in the padding behind the fence, but for float16, where v is cleaned anyway."""
    problem = Problem(VARLEN, str(dtype).removeprefix("torch."), (1024, 16, dim), 1, 1024)
    assert "cudnn-one-segment" in admission.candidates(problem, CUDA, fence_from=2)[0]
    fence = "" if dtype == torch.float16 else admission.FENCED
    assert "cudnn-one-segment" + fence in admission.candidates(problem, CUDA, fence_from=1)[0]


def own_kernels() -> list[str]:
    """Names of the project's own kernels that run here."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == triton_kernel.HOPPER_CAPABILITY
    return [*triton_kernel.BLOCKS, *([triton_kernel.HOPPER] if hopper else [])]


@pytest.mark.parametrize("name", own_kernels())
@pytest.mark.parametrize("dim", [24, 64, 72, 88, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_the_own_kernel(dtype: torch.dtype, dim: int, name: str) -> None:
    """Segments around the sizes of its blocks, empty ones, room for any number of them, any length of the tail: the reference's
    numbers, zeros behind, NaN behind changes no bit, and a captured graph follows its boundaries."""
    scale, limit = dim**-0.5, {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    run = admission.VARLEN_KERNELS[name].run
    for lengths, room in (
        ([1], 1),
        ([63, 64, 65, 0, 127, 128, 129, 1], 8),
        ([0, 0, 700, 0], 16),
        ([17] * 40, 64),
        ([255, 256, 257, 383, 384, 385], 6),
        ([5] * 90, 1000),
        ([3, 200], 4096 if dim == 72 else 2),  # each room that there is code for is a compile
        ([0], 3),
    ):
        if name == triton_kernel.HOPPER and room > triton_kernel.HOPPER_SLOTS:
            continue
        end = sum(lengths)
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        boundaries = torch.tensor([0, *ends, *[end] * (room - len(lengths))], dtype=torch.int32, device=CUDA)
        for behind in (0, 1, 300):
            rows = max(1, end + behind)
            packed = torch.stack(qkv(dim, dtype, rows), dim=1)
            out = run(*packed.unbind(1), boundaries, rows, scale)
            if end:
                want = expected([x[:end] for x in packed.unbind(1)], boundaries, scale)[:end]
                torch.testing.assert_close(out[:end].double().cpu(), want, atol=limit, rtol=0)
            assert out.is_contiguous()
            assert not out[end:].any()
            packed[end:] = float("nan")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run(*packed.unbind(1), boundaries, rows, scale)
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, out)
            if end > 1:
                kept = boundaries.clone()
                boundaries.fill_(end)
                boundaries[0] = 0
                packed[end:] = 0
                graph.replay()
                want = expected([x[:end] for x in packed.unbind(1)], boundaries[:2], scale)[:end]
                torch.testing.assert_close(captured[:end].double().cpu(), want, atol=limit, rtol=0)
                boundaries.copy_(kept)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", [*own_kernels(), "cudnn-one-segment"])
def test_a_device_that_is_not_the_current_one(name: str) -> None:
    """Kernels are tried, timed and run on the device of their operands, whichever is current."""
    other = torch.device("cuda", 1)
    q, k, v = (x.to(other) for x in qkv(72, torch.bfloat16, 500))
    boundaries = torch.tensor([0, 400], dtype=torch.int32, device=other)
    made = choice.KernelChoices(name, other, seconds_captured, fence_from=2)
    with torch.cuda.device(0):
        with made.observing():
            varlen_attention(q, k, v, boundaries, 500, 72**-0.5)
        made.settle()
        assert [row["kernel"] for row in made.rows()] == [name]
        with made.active(), torch.cuda.device(other):
            out = varlen_attention(q, k, v, boundaries, 500, 72**-0.5)
    want = expected([x[:400] for x in (q, k, v)], boundaries, 72**-0.5)[:400]
    torch.testing.assert_close(out[:400].double().cpu(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_the_fence(dtype: torch.dtype, dim: int) -> None:
    """Around a kernel that needs none it changes no bit of what is clean; broken segments are NaN, others keep their bits; in a
    graph it sees the values of each replay."""
    run = kernels.flash if dtype in HALF else kernels.efficient
    inputs, boundaries, scale = qkv(dim, dtype), cu(LENGTHS), dim**-0.5
    want = run(*inputs, boundaries, 300, scale)[:END]
    behind = fence.fenced(run)
    assert torch.equal(behind(*inputs, boundaries, 300, scale)[:END], want)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        behind(*inputs, boundaries, 300, scale)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = behind(*inputs, boundaries, 300, scale)
    for value in (float("nan"), float("inf")):
        kept = inputs[2][400].clone()
        inputs[2][400] = value
        graph.replay()
        assert torch.equal(out[:300], want[:300])
        assert out[300:500].isnan().all()
        assert torch.equal(out[500:END], want[500:])
        inputs[2][400] = kept
        graph.replay()
        assert torch.equal(out[:END], want)


def test_flash_attn_4_is_there_or_says_why() -> None:
    """Where it is installed it is admitted behind the fence, and as it is with room for one segment."""
    found, refused = runs(torch.bfloat16, 72)
    if "fa4" not in found and "fa4+fence" not in found:
        pytest.skip(f"fa4: {refused['fa4']}")
    single = Problem("varlen", "bfloat16", (1024, 16, 72), 1, 1024)
    assert "fa4" in admission.candidates(single, CUDA, fence_from=2)[0]


@pytest.mark.parametrize("dtype", HALF)
def test_the_fastest_is_measured(dtype: torch.dtype) -> None:
    """Every candidate gets a time, and the choice has the least; what is slower than another by experience is none."""
    problem = Problem("varlen", str(dtype).removeprefix("torch."), (1024, 16, 72), 4, 1024)
    found = choice.measure(problem, CUDA, seconds_captured, fence_from=2)
    assert found.kernel == min(found.microseconds, key=lambda name: found.microseconds[name])
    assert all(0.5 < time < 1e5 for time in found.microseconds.values()), found.microseconds
    assert "flash" in found.microseconds
    assert {found.refused["efficient"], found.refused["dense"]} == {"not timed: no gain beside flash"}


def test_without_flash_the_others_are_measured() -> None:
    """float32 has no FlashAttention: the memory-efficient kernel is timed, and the dense one where its memory allows."""
    problem = Problem("varlen", "float32", (1024, 16, 72), 4, 1024)
    found = choice.measure(problem, CUDA, seconds_captured, fence_from=2)
    assert {"efficient", "dense"} <= set(found.microseconds)


@pytest.mark.parametrize("dtype", HALF)
def test_dense_attention_is_measured(dtype: torch.dtype) -> None:
    """torch's own backends for a batch of tiles; their numbers agree."""
    problem = Problem(DENSE, str(dtype).removeprefix("torch."), (4, 16, 729, 72), 0, 729)
    found = choice.measure(problem, CUDA, seconds_captured, fence_from=2)
    assert found.kernel in found.microseconds
    q, k, v = (torch.randn(4, 729, 16, 72, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for name in found.microseconds:
        got = admission.run_of(name, problem)(q, k, v, False, None)
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=0, msg=name)


@pytest.mark.parametrize(
    "attention", ["auto", "default", "flash", "efficient", "dense", "cudnn-one-segment", *own_kernels(), "fa4"]
)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_manager_serves_with_every_kernel(mode: str, attention: str) -> None:
    """Features are the tower's with every kernel, the choice is in the snapshot, and what cannot serve is told."""
    dtype = torch.bfloat16
    manager, _, twin = managed(dtype=dtype, mode=mode, attention=attention)
    with manager:
        for images in ([(1, 8, 8)], [(1, 4, 4), (1, 6, 8), (1, 2, 2)]):
            made = request(images, dtype=dtype)
            assert worst(manager.execute(made), reference(twin, made)) <= TOLERANCE[dtype]
        rows = manager.snapshot()["attention"]
        if attention == "default":
            assert rows == []
        else:
            assert rows
        if attention == "auto":
            assert all(row["kernel"] in row["microseconds"] for row in rows)
        if attention in own_kernels():
            assert {row["kernel"] for row in rows} == {attention}, rows


@pytest.mark.parametrize("capacities", [(1,), ()])
def test_the_manager_serves_with_padding_columns(capacities: tuple[int, ...]) -> None:
    """With the pass: every kernel still gives the tower's features, and the choice is made for the wide form."""
    dtype = torch.bfloat16
    sizes = {"capacities": capacities, "passes": PASS_NAMES}
    for attention in ("auto", "default", "flash", "cudnn-one-segment", *own_kernels()):
        manager, _, twin = managed(dtype=dtype, mode="compiled", attention=attention, **sizes)
        with manager:
            for images in ([(1, 8, 8)], [(1, 4, 4), (1, 6, 8), (1, 2, 2)]):
                made = request(images, dtype=dtype)
                assert worst(manager.execute(made), reference(twin, made)) <= TOLERANCE[dtype]
            rows = manager.snapshot()["attention"]
            assert all(row["variant"] == "wide" for row in rows)
            assert bool(rows) == (attention != "default")


def test_odd_widths_become_whole_vectors() -> None:
    """All three layers of every MLP are padded, features are the tower's, with padding and company, and follow a weight that is
    written to in place."""
    vit_compile.counters.reset()
    dtype = torch.bfloat16
    manager, table, twin = managed(towers.odd_qwen2_5_vl, dtype, mode="compiled")
    with manager:
        assert vit_compile.counters.pass_sites["aligned_linear"] == 3 * len(twin.blocks)
        for _ in range(2):
            for images in ([(1, 8, 8)], [(1, 4, 4), (1, 6, 8), (1, 2, 2)]):
                made = request(images, dtype=dtype)
                assert worst(manager.execute(made), reference(twin, made)) <= TOLERANCE[dtype]
            for tower in (table.tower, twin):
                for block in tower.blocks:
                    block.mlp.down_proj.weight.data.mul_(1.5)
        assert manager.snapshot()["miss_reasons"] == {}
        assert manager.snapshot()["recaptures"] == 0


@pytest.mark.parametrize("attention", ["auto", "default"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_features_do_not_depend_on_the_company(mode: str, attention: str) -> None:
    """In one graph an image's features are the same bits, whoever shares the batch, wherever it lies in it.

    A budget has one graph where it has one segment capacity; with a fixed kernel also those of all capacities agree.
    """
    dtype = torch.bfloat16
    capacities = () if attention == "auto" else (1, 4)
    manager, _, _ = managed(dtype=dtype, mode=mode, attention=attention, token_budgets=(64,), capacities=capacities)
    grid = (1, 8, 8)
    pixels = towers.pixels(64, 5).to("cuda", dtype)

    def among(before: list[Any], after: list[Any]) -> torch.Tensor:
        others = request([*before, *after], dtype=dtype, seed=9)["pixel_values"] if before or after else pixels[:0]
        rows = sum(t * h * w for t, h, w in before)
        made = {"pixel_values": torch.cat([others[:rows], pixels, others[rows:]]), "image_grid_thw": [*before, grid, *after]}
        return manager.execute(made)[len(before)]

    with manager:
        alone = among([], [])
        for before, after in (([(1, 4, 4)], []), ([], [(1, 8, 8)]), ([(1, 2, 2), (1, 6, 4)], [(1, 4, 8)])):
            assert torch.equal(among(before, after), alone), (before, after)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 17, 1024])
def test_the_epilogue(rows: int, activation: str, dtype: torch.dtype) -> None:
    """Within the rounding of the dtype of what float64 gives, and not further from it than the two functions are, times 1.1."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device="cuda").to(dtype) for shape in ((rows, 64), (96, 64), (96,))
    )
    function = {"gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "relu": F.relu}[activation]
    want = function(F.linear(x.double(), weight.double(), bias.double()))
    got, two = linear_activation(x, weight, bias, activation), function(F.linear(x, weight, bias))
    distance, plain = ((value.double() - want).norm() / want.norm() for value in (got, two))
    assert distance <= 1.1 * plain + 1e-6
    assert linear_activation(x[:0], weight, bias, activation).shape == (0, 96)


@pytest.mark.default_passes
def test_the_epilogue_is_one_kernel_in_a_tower() -> None:
    """The pass fires in every layer, and bf16 features are no further from float32 than eager's, times 1.1."""
    vit_compile.counters.reset()
    manager, _, twin = managed(dtype=torch.bfloat16, mode="compiled")
    _, _, precise = managed(dtype=torch.float32, mode="eager")
    with manager:
        assert vit_compile.counters.pass_sites["activation_epilogue"] > 0
        made = request([(1, 8, 8), (1, 4, 4)], dtype=torch.bfloat16)
        exact_features = reference(precise, {**made, "pixel_values": made["pixel_values"].float()})
        ours = worst(manager.execute(made), exact_features)
        eager = worst(reference(twin, made), exact_features)
    assert ours <= 1.1 * eager


@pytest.mark.default_attention
def test_a_saved_cache_saves_the_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second encoder takes kernels and times from the file, compiles no kernel of the project's own, and serves the same."""
    first, _, _ = managed(dtype=torch.bfloat16, mode="compiled", packing="cost")
    report = vit_compile.save_cache(tmp_path / "cache")
    assert report.pieces > 0
    assert report.kernels > 0
    assert report.encoders == 1
    assert report.binaries > 0
    rows = first.snapshot()["attention"]
    first.clear()
    choice.forget()
    known_costs.forget()
    # As on another machine: an empty cache of Triton, and nothing compiled in this process.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    triton = importlib.import_module("triton")
    modules = [
        importlib.import_module(f"vit_compile.attention.{name}")
        for name in ("varlen_triton", "varlen_gluon", "tail_triton", "fence_triton")
    ]
    ours = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    for kernel in [value for module in modules for name, value in vars(module).items() if name in ours]:
        kernel.device_caches.clear()
    seen: dict[str, list[bool]] = {}

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        seen.setdefault(src.name, []).append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    assert vit_compile.load_cache(tmp_path / "cache").binaries == report.binaries
    monkeypatch.setattr(choice, "measure", None)
    second, _, twin = managed(dtype=torch.bfloat16, mode="compiled", packing="cost")
    with second:
        assert second.snapshot()["attention"] == rows
        hits = {name: found for name, found in seen.items() if name in ours}
        assert hits
        assert all(map(all, hits.values())), hits
        made = request([(1, 8, 8), (1, 4, 4)], dtype=torch.bfloat16)
        assert worst(second.execute(made), reference(twin, made)) <= TOLERANCE[torch.bfloat16]
