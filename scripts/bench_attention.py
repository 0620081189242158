"""Attention kernels on the shapes of vision encoders: library kernels, and the project's own with every way to cut its work.

    python scripts/bench_attention.py --out docs/benchmarks/attention.json
    python scripts/bench_attention.py --kernels                                   without the ways to cut the work

Needs a GPU. Every call is timed among several in a captured graph. Kernels are compiled in processes side by side first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

CUTS = (
    (128, 64, 8, 2, False),
    (128, 64, 8, 3, False),
    (128, 64, 4, 2, False),
    (128, 64, 4, 3, False),
    (128, 32, 4, 3, False),
    (128, 128, 8, 2, False),
    (64, 64, 4, 2, False),
    (64, 64, 4, 3, False),
    (64, 64, 8, 2, False),
    (64, 32, 4, 3, False),
    (64, 128, 4, 2, False),
    (32, 64, 4, 2, False),
    (32, 32, 4, 3, False),
    (128, 64, 8, 3, True),
    (128, 64, 4, 2, True),
    (128, 64, 4, 3, True),
    (128, 64, 4, 4, True),
    (128, 32, 4, 4, True),
    (64, 64, 4, 2, True),
    (64, 64, 4, 3, True),
    (64, 128, 4, 2, True),
    (64, 128, 4, 3, True),
    (32, 64, 4, 3, True),
)
"""Rows of q of a program, keys at a time, warps, stages, whether keys are loaded by descriptors."""
Cut = tuple[int, int, int, int, bool]


class Case(NamedTuple):
    """Equal segments."""

    head_dim: int
    heads: int
    segments: int
    rows: int
    slots: int

    def __str__(self) -> str:
        return f"{self.head_dim} x {self.heads} heads: {self.segments} x {self.rows}, {self.slots} slots"


CASES = (
    Case(72, 16, 1, 196, 1),
    Case(72, 16, 1, 784, 1),
    Case(72, 16, 1, 4096, 1),
    Case(72, 16, 8, 784, 8),
    Case(72, 16, 8, 784, 640),
    Case(72, 16, 20, 400, 20),
    Case(72, 16, 1, 4096, 16),
    Case(72, 16, 1, 196, 196),
    Case(72, 16, 16, 729, 16),
    Case(80, 16, 64, 64, 64),
    Case(80, 16, 1, 4096, 1),
    Case(80, 16, 4, 1024, 4),
    Case(64, 6, 1, 261, 1),
    Case(64, 6, 16, 261, 16),
    Case(64, 16, 8, 1024, 8),
)


def operands(case: Case) -> tuple[Any, ...]:
    """q, k and v as views of one product, and boundaries."""
    import torch

    torch.manual_seed(0)
    total = case.segments * case.rows
    packed = torch.randn(total, 3, case.heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    ends = [case.rows * number for number in range(case.segments + 1)] + [total] * (case.slots - case.segments)
    return (*packed.unbind(1), torch.tensor(ends, dtype=torch.int32, device="cuda"))


def own(case: Case, cut: Cut) -> Callable[[], Any]:
    """The project's kernel, its work cut in one way."""
    from vit_compile.attention import triton_kernel
    from vit_compile.attention.varlen_triton import attention

    q, k, v, boundaries = operands(case)
    q_rows, keys, warps, stages, tiles = cut
    slots, parts, scale = triton_kernel.slots_for(case.slots), triton_kernel.parts_of(case.head_dim), case.head_dim**-0.5
    how = {"q_rows": q_rows, "keys": keys, "warps": warps, "stages": stages, "tiles": tiles}
    return lambda: attention(q, k, v, boundaries, scale, parts=parts, slots=slots, **how)


def compile_all(cut: Cut) -> None:
    """In a process of its own: what is compiled is found on disk by the next."""
    for case in CASES:
        own(case, cut)()


def measure(case: Case, cuts: tuple[Cut, ...]) -> dict[str, Any]:
    """Microseconds of one call by kernel, with the tight bound and (for FlashAttention-2) with that of a graph."""
    import torch

    from vit_compile.attention import admission
    from vit_compile.attention.problem import varlen_problem
    from vit_compile.backend.cuda import seconds_captured

    device, scale = torch.device("cuda"), case.head_dim**-0.5
    q, k, v, boundaries = operands(case)
    runs, refused = admission.candidates(varlen_problem(q, boundaries, case.rows), device, fence_from=2, every=True)
    want = runs["flash"](q, k, v, boundaries, case.rows, scale).float()
    row: dict[str, Any] = {"case": str(case), "microseconds": {}, "refused": refused, "failed": {}}

    def take(name: str, call: Callable[[], Any]) -> None:
        try:
            error = float((call().float() - want).norm() / want.norm())
            assert error < 0.01, f"relative difference {error:.1e} from FlashAttention-2"
            row["microseconds"][name] = round(seconds_captured(call, device) * 1e6, 2)
        except Exception as problem:
            row["failed"][name] = str(problem)[:200]

    for name, run in runs.items():
        take(name, lambda run=run: run(q, k, v, boundaries, case.rows, scale))
    total = case.segments * case.rows
    take("flash, loose bound", lambda: runs["flash"](q, k, v, boundaries, total, scale))
    for cut in cuts:
        take(f"own {cut}", own(case, cut))
    row["tflop"] = 4 * case.segments * case.rows**2 * case.heads * case.head_dim / 1e12
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="library kernels and the ways that are kept, nothing else")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cuts = () if arguments.kernels else CUTS
    if cuts:
        with ProcessPoolExecutor(len(cuts), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_all, cuts))
    rows = []
    for case in CASES:
        rows.append(measure(case, cuts))
        times = sorted(rows[-1]["microseconds"].items(), key=lambda item: item[1])
        print(case, ", ".join(f"{name} {time}" for name, time in times), rows[-1]["failed"] or "", flush=True)
    if arguments.out:
        from scripts.bench_models import write_rows

        write_rows(arguments.out, "attention", rows)


if __name__ == "__main__":
    main()
