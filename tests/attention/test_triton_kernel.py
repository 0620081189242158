"""The project's varlen kernel: its numbers in Triton's interpreter, and which problems it takes."""

from __future__ import annotations

import pytest
import torch

from tests.attention.interpreted import check_interpreted
from vit_compile.attention import reference, triton_kernel
from vit_compile.attention.admission import VARLEN_KERNELS
from vit_compile.attention.problem import VARLEN, Problem
from vit_compile.options import ATTENTION_KERNELS

_PROCESS = """
import random
import torch
from vit_compile.attention import reference, triton_kernel, varlen_triton
random.seed(0)
torch.manual_seed(0)

TILES = {tiles}

def run(q, k, v, boundaries, scale, slots, q_rows, keys):
    parts = triton_kernel.parts_of(v.shape[2])
    return varlen_triton.attention(
        q, k, v, boundaries, scale, parts=parts, slots=slots, q_rows=q_rows, keys=keys, warps=4, stages=2, tiles=TILES
    )

lengths_of = [[50], [50, 0, 17, 53], [0, 0, 33], [7, 0, 0, 0, 83, 0], [0], [16, 16, 1], [1] * 20, [64, 32]]
for number, dim in enumerate((16, 24, 40, 48, 64, 72, 80, 88, 96, 104, 128)):
    for lengths in (lengths_of[number % 8], random.choice(lengths_of)):
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        end, rows, heads = ends[-1], ends[-1] + random.choice((0, 1, 40)) + (ends[-1] == 0), random.choice((1, 2))
        boundaries = torch.tensor([0, *ends], dtype=torch.int32)
        packed = torch.randn(rows, 3, heads, dim, dtype=torch.float16)
        packed[end:] = float("nan")
        q, k, v = packed.unbind(1)
        q_rows, keys = random.choice((16, 32)), random.choice((16, 32))
        slots = 16 if len(lengths) <= 16 else 64
        out = run(q, k, v, boundaries, dim**-0.5, slots, q_rows, keys)
        assert out.is_contiguous() and out.shape == v.shape
        assert not out[end:].any(), (dim, lengths)
        if end:
            exact = [x[:end].double() for x in (q, k, v)]
            want = reference.forward(*exact, boundaries, max(lengths), dim**-0.5)
            assert (out[:end].double() - want).abs().max() < 3e-3, (dim, lengths)
        # Further columns of q and k are not looked at.
        wide_q, wide_k = (torch.cat([x, torch.full((rows, heads, 8), 3e4, dtype=x.dtype)], dim=2) for x in (q, k))
        assert torch.equal(run(wide_q, wide_k, v, boundaries, dim**-0.5, slots, q_rows, keys), out)
        # A broken segment breaks no bit of another one.
        full = [n for n, length in enumerate(lengths) if length]
        if len(full) > 1:
            broken = random.choice(full)
            here = slice(ends[broken] - lengths[broken], ends[broken])
            spoiled = packed.clone()
            spoiled[here] = float("nan")
            again = run(*spoiled.unbind(1), boundaries, dim**-0.5, slots, q_rows, keys)
            assert again[here].isnan().all()
            others = torch.ones(rows, dtype=torch.bool)
            others[here] = False
            assert torch.equal(again[others], out[others]), (dim, lengths, broken)
        # A whole block of keys that count for nothing.
        if full and lengths[full[0]] > 2 * keys:
            first = ends[full[0]] - lengths[full[0]]
            far = packed.clone()
            far[first:end, 0, :, 0], far[first : first + keys, 1] = 1.0, 0.0
            far[first : first + keys, 1, :, 0] = -float("inf")
            got = run(*far.unbind(1), boundaries, dim**-0.5, slots, q_rows, keys)
            segment = slice(first, ends[full[0]])
            want = torch.softmax(torch.einsum("qhd,khd->hqk", *(far[segment, n].double() for n in (0, 1))) * dim**-0.5, -1)
            want = torch.einsum("hqk,khd->qhd", want, far[segment, 2].double())
            assert (got[segment].double() - want).abs().max() < 3e-3
print("the same")
"""


@pytest.mark.parametrize("tiles", [False, True], ids=["pointers", "descriptors"])
def test_the_kernel_does_what_the_reference_does(tiles: bool) -> None:
    """Head dims of one and of two parts, empty segments, ends within a block, NaN behind the last one, further columns, broken
    neighbours bit for bit, blocks of -inf scores: the reference's numbers in float64, and zeros behind."""
    check_interpreted(_PROCESS.replace("{tiles}", str(tiles)))


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (16, (16, 0)),
        (24, (16, 16)),
        (40, (32, 16)),
        (64, (64, 0)),
        (72, (64, 16)),
        (88, (64, 32)),
        (120, (64, 64)),
        (128, (128, 0)),
    ],
)
def test_parts_of_a_head(head_dim: int, parts: tuple[int, int]) -> None:
    """Powers of two from 16 on that hold the head, the first within it."""
    assert triton_kernel.parts_of(head_dim) == parts
    assert sum(parts) >= head_dim >= parts[0]


@pytest.mark.parametrize("name", list(triton_kernel.BLOCKS))
def test_which_problems_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision where the device has it, head dims of whole vectors, segments that there is code for; it can be named."""
    monkeypatch.setattr(triton_kernel, "_triton", lambda: object())
    why_not = VARLEN_KERNELS[name].why_not

    def problem(dtype: str = "bfloat16", dim: int = 72, segments: int = 4) -> Problem:
        return Problem(VARLEN, dtype, (100, 16, dim), segments, 100)

    assert name in ATTENTION_KERNELS
    assert why_not(problem(), (9, 0)) is None
    assert why_not(problem("float16", 128, 4096), (8, 0)) is None
    for refused, capability in (
        (problem("float32"), (9, 0)),
        (problem(), (7, 5)),
        (problem(dim=8), (9, 0)),
        (problem(dim=68), (9, 0)),
        (problem(dim=136), (9, 0)),
        (problem(segments=4097), (9, 0)),
    ):
        assert why_not(refused, capability)
    monkeypatch.setattr(triton_kernel, "_triton", lambda: None)
    assert why_not(problem(), (9, 0))


def test_which_problems_the_hopper_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other own kernels take, on Hopper alone, with room for few segments, and where its module imports."""
    monkeypatch.setattr(triton_kernel, "_module", lambda name: object())
    why_not = VARLEN_KERNELS["hopper"].why_not

    def problem(dtype: str = "bfloat16", dim: int = 72, segments: int = 64) -> Problem:
        return Problem(VARLEN, dtype, (100, 16, dim), segments, 100)

    assert "hopper" in ATTENTION_KERNELS
    assert why_not(problem(), (9, 0)) is None
    assert why_not(problem("float16", 128, 1), (9, 0)) is None
    for other in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert why_not(problem(), other)
    for refused in (problem("float32"), problem(dim=8), problem(dim=136), problem(segments=65)):
        assert why_not(refused, (9, 0))
    monkeypatch.setattr(triton_kernel, "_gluon", lambda: None)
    assert why_not(problem(), (9, 0))


def test_a_triton_that_does_not_import_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong: the kernel is refused, and others serve; what is odd is logged."""
    for error, logged in ((ImportError("no Triton"), False), (RuntimeError("no driver"), True)):

        def broken(name: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(triton_kernel.importlib, "import_module", broken)
        caplog.clear()
        triton_kernel._module.cache_clear()
        assert triton_kernel._triton() is None
        assert triton_kernel._gluon() is None
        assert bool(caplog.records) == logged
    triton_kernel._module.cache_clear()


def test_more_segments_than_the_hopper_kernel_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be taken for rows behind the last one: another kernel serves them."""
    monkeypatch.setattr(triton_kernel, "_gluon", lambda: pytest.fail("it has room for 64"))
    monkeypatch.setattr(triton_kernel.kernels, "forward", reference.forward)
    q = torch.randn(70, 1, 16)
    boundaries = torch.arange(71, dtype=torch.int32)
    assert torch.equal(triton_kernel.hopper(q, q, q, boundaries, 1, 0.25), q), "segments of one row"


def test_shared_rows_are_copied_for_descriptors() -> None:
    """A descriptor need not take a stride of 0; anything else stays where it is."""
    x = torch.randn(1, 2, 16)
    assert triton_kernel._describable(x) is x
    for expanded in (x.expand(5, 2, 16), x[:, :1].expand(1, 4, 16)):
        made = triton_kernel._describable(expanded)
        assert torch.equal(made, expanded)
        assert made.is_contiguous()


def test_a_scale_that_is_not_positive_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel scales the largest score, which is the largest of the scaled ones for positive scales alone."""
    called: list[float] = []
    monkeypatch.setattr(triton_kernel.kernels, "forward", lambda q, *rest: called.append(rest[-1]) or q)
    q = torch.zeros(4, 1, 24)
    boundaries = torch.tensor([0, 4], dtype=torch.int32)
    for scale in (-1.0, 0.0, 1e-45, float("nan")):
        for run in (triton_kernel.runner("triton-64"), triton_kernel.hopper):
            assert run(q, q, q[..., :16], boundaries, 4, scale).shape[2] == 16
    assert called[:6] == [-1.0, -1.0, 0.0, 0.0, 1e-45, 1e-45]
    assert len(called) == 8
