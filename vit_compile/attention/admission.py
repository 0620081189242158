"""Which kernels may serve an attention problem: what each promises, and what it is seen to keep.

Whoever is not known from the tests in this very role is tried on its device before it is used: against the
reference in float32, and with NaN in a segment between two others. A wrong one is refused; one that does not isolate serves
graphs with room for one segment, and others behind a fence (`fence.py`), whose cost is then part of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.attention import current_flash_attention_impl

from vit_compile.attention import kernels, one_segment, packages, reference, triton_kernel
from vit_compile.attention.fence import fenced
from vit_compile.attention.problem import VARLEN, WIDE, Problem
from vit_compile.attention.tail import zero_tail_
from vit_compile.errors import first_line

FENCED = "+fence"
PROBE_LENGTHS = (300, 200, 0, 1, 199, 800)
PROBE_SLOTS = 10
"""Segments of a few blocks and of many, an empty one, one of a single row, and slots that nobody uses: all of that is in real
graphs."""
PROBE_ROWS = 2048
PROBE_HEADS = 2
PROBE_TOLERANCE, FLOAT32_TOLERANCE = 4.0, 2e-5
"""Allowed relative error of a kernel, in units of the dtype's epsilon, and at least so much."""
OUT_OF_MEMORY = "out of memory"
"""A refusal that holds for this time alone."""
DENSE_MEMORY_ROWS = 4096
"""`dense` holds a matrix of rows x rows: beyond this it is never a choice."""

Run = Callable[..., torch.Tensor]
Refusal = str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute attention."""

    name: str
    run: Run
    """varlen: `run(q, k, v, cu_seqlens, max_seqlen, scale)`; dense: `run(q, k, v, is_causal, scale)`, [N,H,L,D] each."""
    why_not: Callable[[Problem, tuple[int, int]], Refusal | None]
    """Of a problem and a device's capability: why it cannot serve it, or None."""
    trusted: bool = False
    """Correct and isolating by the project's own tests: it is not tried on the device."""
    finite_tail: bool = False
    """varlen: rows past the last boundary come out finite where the inputs are; others leave them unwritten."""
    one_segment: bool = False
    """varlen: it takes one segment only, and is tried with one."""

    wide_run: Run | None = None
    """varlen: the same on q and k that have the columns of `one_segment`."""

    slower_than: str = ""
    """Another kernel beside which it is no candidate: of all shapes that were timed it was faster on few, and by 4 % at most,
    while trying and timing it took a twentieth of a start (docs/design/0008)."""

    least_rows: int = 0
    """With fewer rows it is no candidate: there it never was the fastest, and a compile would be for nothing."""

    code_for: Callable[[int], int] | None = None
    """varlen: the room for segments of the code that serves so many. What is tried is the code that will serve."""

    def complete(self, problem: Problem) -> Run:
        """What serves a problem. varlen: on q and k as they come, and with nothing of an allocator's leftovers in the tail."""
        if problem.kind != VARLEN:
            return self.run
        run = self.run
        if problem.variant == WIDE:
            run = functools.partial(_without_columns, run) if self.wide_run is None else self.wide_run
        return run if self.finite_tail else functools.partial(_with_zero_tail, run)


def _with_zero_tail(
    run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    return zero_tail_(run(q, k, v, cu_seqlens, max_seqlen, scale), cu_seqlens)


def _without_columns(
    run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    return run(q[..., : v.shape[-1]], k[..., : v.shape[-1]], v, cu_seqlens, max_seqlen, scale)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a kernel was seen to do."""

    wrong: Refusal | None
    isolates: bool


def _flash_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    if not kernels.flash_usable():
        return "torch has no FlashAttention-2 here, or another implementation is active"
    chosen = kernels.choose(problem.torch_dtype, problem.head_dim, capability, flash_usable=True)
    return None if chosen == "flash" else f"head dim {problem.head_dim} in {problem.dtype}"


def _active_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    active = current_flash_attention_impl()
    if active in (None, "FA2"):
        return "no other implementation is activated"
    half = problem.torch_dtype in kernels.HALF_DTYPES
    return None if half and problem.head_dim <= kernels.FLASH_MAX_HEAD_DIM else f"head dim {problem.head_dim} in {problem.dtype}"


def _efficient_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    chosen = kernels.choose(problem.torch_dtype, problem.head_dim, capability, flash_usable=False)
    return None if chosen == "efficient" else f"{problem.dtype} on a device of capability {capability[0]}.{capability[1]}"


def _dense_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    rows = problem.shape[0]
    return None if rows <= DENSE_MEMORY_ROWS else f"{rows} rows: its memory grows with their square"


def _one_segment_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    if problem.segments != 1:
        return f"room for {problem.segments} segments"
    if capability < one_segment.CAPABILITY:
        return f"a device of capability {capability[0]}.{capability[1]}"
    takes = one_segment.takes(problem.torch_dtype, problem.head_dim)
    return None if takes else f"head dim {problem.head_dim} in {problem.dtype}"


def _package_why_not(name: str) -> Callable[[Problem, tuple[int, int]], Refusal | None]:
    return lambda problem, capability: packages.why_not(name, problem.torch_dtype, problem.head_dim, capability)


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float
) -> torch.Tensor:
    return kernels.dense(q, k, v, cu_seqlens, scale)


# Called directly: `sdpa_kernel` switches backends for the whole process, other threads included.
def _sdpa_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
    result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    out: torch.Tensor = result[0]
    return out


def _sdpa_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, is_causal, False, scale=scale
    )[0]
    return out


def _sdpa_efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, is_causal, scale=scale)[
        0
    ]
    return out


def _half_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    if problem.torch_dtype not in kernels.HALF_DTYPES or capability < (8, 0):
        return f"{problem.dtype} on a device of capability {capability[0]}.{capability[1]}"
    return None if problem.head_dim % 8 == 0 and problem.head_dim <= kernels.SDPA_MAX_HEAD_DIM else f"head dim {problem.head_dim}"


def _sdpa_efficient_why_not(problem: Problem, capability: tuple[int, int]) -> Refusal | None:
    vector = kernels.VECTOR_BYTES // problem.torch_dtype.itemsize
    return _efficient_why_not(problem, capability) or (f"head dim {problem.head_dim}" if problem.head_dim % vector else None)


VARLEN_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("flash", kernels.flash, _flash_why_not, trusted=True),
        Kernel("efficient", kernels.efficient, _efficient_why_not, slower_than="flash"),
        Kernel("dense", _dense, _dense_why_not, trusted=True, finite_tail=True, slower_than="flash"),
        Kernel(
            "cudnn-one-segment",
            one_segment.cudnn,
            _one_segment_why_not,
            finite_tail=True,
            one_segment=True,
            wide_run=one_segment.cudnn_of_wide,
        ),
        *(
            Kernel(
                name,
                run,
                triton_kernel.why_not,
                finite_tail=True,
                wide_run=run,
                least_rows=triton_kernel.LEAST_ROWS.get(name, 0),
                code_for=triton_kernel.slots_for,
            )
            for name, run in ((name, triton_kernel.runner(name)) for name in triton_kernel.BLOCKS)
        ),
        Kernel(
            triton_kernel.HOPPER,
            triton_kernel.hopper,
            triton_kernel.hopper_why_not,
            finite_tail=True,
            wide_run=triton_kernel.hopper,
            least_rows=triton_kernel.LEAST_ROWS[triton_kernel.HOPPER],
            code_for=lambda segments: triton_kernel.HOPPER_SLOTS,
        ),
        Kernel("active-flash", kernels.flash, _active_why_not),
        *(Kernel(name, packages.runner(name), _package_why_not(name)) for name in ("fa4", "fa3", "fa2")),
    )
}
DENSE_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("sdpa-flash", _sdpa_flash, _half_why_not, trusted=True),
        Kernel("sdpa-cudnn", _sdpa_cudnn, _half_why_not, trusted=True),
        Kernel("sdpa-efficient", _sdpa_efficient, _sdpa_efficient_why_not, trusted=True),
    )
}
"""torch's own: the items of a batch are never operands of one another's arithmetic. What does not take a problem raises."""


def candidates(
    problem: Problem, device: torch.device, *, fence_from: int, every: bool = False
) -> tuple[dict[str, Run], dict[str, Refusal]]:
    """Kernels that may serve a problem on a device, by name, and why the others may not.

    Args:
        fence_from: room for so many segments or more takes a fence around a kernel that lets a NaN cross. 1: always, also a
            NaN in padding is kept away; 2: padding is known to be finite, and a single segment has no neighbour; 0: never.
        every: also those that would not be chosen in any case.
    """
    found: dict[str, Run] = {}
    refused: dict[str, Refusal] = {}
    for name, kernel in kernels_for(problem).items():
        pointless = None if every else _pointless(kernel, problem, found)
        if pointless is not None:
            refused[name] = pointless
            continue
        admitted, why = _admission(kernel, problem, device, fence_from)
        if why is not None:
            refused[name] = why
        if admitted is not None:
            found[admitted.name] = admitted.complete(problem)
    return found, refused


def _pointless(kernel: Kernel, problem: Problem, found: Mapping[str, Run]) -> Refusal | None:
    """Why a kernel would not be chosen in any case: it costs no trial and no compile. Who asks for it by name still gets it."""
    if kernel.slower_than in found:
        return f"not timed: no gain beside {kernel.slower_than}"
    if problem.kind == VARLEN and problem.shape[0] < kernel.least_rows:
        return f"not timed: no gain below {kernel.least_rows} rows"
    return None


def admit(name: str, problem: Problem, device: torch.device, *, fence_from: int) -> tuple[str | None, Refusal | None]:
    """The name under which one kernel is among the `candidates`, its own or that behind the fence; and why not its own.

    No other kernel is tried, which may take a compile each.
    """
    kernel = kernels_for(problem).get(name.removesuffix(FENCED))
    if kernel is None:
        return None, f"{name!r} is not known here"
    admitted, why = _admission(kernel, problem, device, fence_from)
    return None if admitted is None else admitted.name, why


def kernels_for(problem: Problem) -> dict[str, Kernel]:
    """All kernels of a problem's kind, by name."""
    return VARLEN_KERNELS if problem.kind == VARLEN else DENSE_KERNELS


def _admission(kernel: Kernel, problem: Problem, device: torch.device, fence_from: int) -> tuple[Kernel | None, Refusal | None]:
    """The kernel, or itself behind the fence, or None; and why it may not serve as it is, or None."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    why = kernel.why_not(problem, capability)
    if why is None and not kernel.trusted:
        seen = probe(kernel, problem, device)
        why = seen.wrong
        if why is None and not seen.isolates and 0 < fence_from <= max(1, problem.segments):
            behind = _fenced(kernel)
            isolates = probe(behind, problem, device).isolates
            return behind if isolates else None, "a NaN of one segment reaches another's rows; behind a fence only"
    return (kernel, None) if why is None else (None, why)


def run_of(name: str, problem: Problem) -> Run:
    """What serves a problem, by a kernel's name, also one behind the fence, which may leave NaN in the tail."""
    kernel = kernels_for(problem)[name.removesuffix(FENCED)]
    return (_fenced(kernel) if name.endswith(FENCED) else kernel).complete(problem)


@functools.cache  # so that a trial is not repeated
def _fenced(kernel: Kernel) -> Kernel:
    run, name = fenced(kernel.run), kernel.name + FENCED
    return Kernel(name, run, kernel.why_not, one_segment=kernel.one_segment, code_for=kernel.code_for)


def probe(kernel: Kernel, problem: Problem, device: torch.device) -> Probe:
    """Try a varlen kernel on a few segments, of a problem's dtype and head dim, and again with NaN in the second one and behind
    the last.

    One for a single segment is tried on one, and with NaN behind it. What is seen is remembered, but for a lack of memory.
    """
    slots = PROBE_SLOTS if kernel.code_for is None else kernel.code_for(problem.segments)
    try:
        return _probe(kernel, problem.torch_dtype, problem.head_dim, slots, device)
    except torch.OutOfMemoryError:
        return Probe(OUT_OF_MEMORY, isolates=False)


@functools.cache
def _probe(kernel: Kernel, dtype: torch.dtype, head_dim: int, slots: int, device: torch.device) -> Probe:
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (PROBE_ROWS, PROBE_HEADS, head_dim)
    inputs = [torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for _ in range(3)]
    lengths = (sum(PROBE_LENGTHS),) if kernel.one_segment else PROBE_LENGTHS
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    end = ends[-1]
    first, second = (end, end) if kernel.one_segment else ends[:2]
    unused = 0 if kernel.one_segment else slots - len(ends)
    cu_seqlens = torch.tensor([0, *ends, *[end] * unused], dtype=torch.int32, device=device)
    scale, longest = head_dim**-0.5, max(lengths)
    try:
        clean = kernel.run(*inputs, cu_seqlens, longest, scale)[:end]
        q, k, v = (x.float() for x in inputs)
        want = reference.forward(q, k, v, cu_seqlens, longest, scale)[:end]
        pairs = [(got, right) for got, right in zip(clean.float().split(lengths), want.split(lengths), strict=True) if len(right)]
        # NaN is an error, wherever it stands.
        error = float(torch.stack([(got - right).norm() / right.norm() for got, right in pairs]).max())
        if not error <= max(PROBE_TOLERANCE * torch.finfo(dtype).eps, FLOAT32_TOLERANCE):
            return Probe(f"its numbers are wrong here: relative error {error:.1e}", isolates=False)
        for x in inputs:
            x[first:second] = float("nan")
            x[end:] = float("nan")
        spoiled = kernel.run(*inputs, cu_seqlens, longest, scale)[:end]
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        return Probe(f"fails here: {type(problem).__name__}: {first_line(problem)}", isolates=False)
    others = torch.cat([torch.arange(first, device=device), torch.arange(second, end, device=device)])
    return Probe(None, isolates=torch.equal(clean[others], spoiled[others]))
