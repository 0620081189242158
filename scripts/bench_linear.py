"""Matrix products with odd widths: as they are, and in the ways to give them whole vectors of 16 bytes (pass `aligned_linear`).

    python scripts/bench_linear.py --out docs/benchmarks/linear.json
    python scripts/bench_linear.py --device cpu --rows 8                         a try without a GPU

Microseconds of a layer, bfloat16, each of `LAYERS` weights once in one captured graph, so that weights come from memory:

- as it is: `F.linear`;
- padded in every run: weight and bias are copied with zeros first, as the pass does it; an input of odd width comes padded,
  since the compiler writes it so;
- padded before: the same without the copies, which is the least that padding can take;
- into padded rows: the product is written into rows of whole vectors, without bias and without a copy of the weight (for odd
  outputs only; what reads it would have to add the bias).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F

from vit_compile.backend.cuda import seconds_captured
from vit_compile.runtime.graphs import median_ms

LAYERS = 16
VECTOR = 8
ROWS = (256, 1024, 5476, 11520)
SHAPES = {"gate, up": (1280, 3420), "down": (3420, 1280), "patches": (588, 1152)}
"""Qwen2.5-VL's MLP, and patches of 14 x 14 x 3 of a tower of width 1152: features in and out."""


def ways(rows: int, inner: int, outer: int, device: torch.device) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """For each way the calls of all layers."""
    more_inner, more_outer = -inner % VECTOR, -outer % VECTOR
    made: dict[str, list[Callable[[], torch.Tensor]]] = {}
    x = torch.randn(rows, inner, device=device).bfloat16()
    wide = F.pad(x, (0, more_inner))
    for _ in range(LAYERS):
        weight = (torch.randn(outer, inner, device=device) * inner**-0.5).bfloat16()
        bias = torch.randn(outer, device=device).bfloat16()
        shape, ends = (0, more_inner, 0, more_outer), (0, more_outer)
        before, bias_before = F.pad(weight, shape), F.pad(bias, ends)
        found: dict[str, Callable[[], torch.Tensor]] = {
            "as it is": lambda w=weight, b=bias: F.linear(x, w, b),
            "padded in every run": lambda w=weight, b=bias, s=shape, e=ends: F.linear(wide, F.pad(w, s), F.pad(b, e)),
            "padded before": lambda w=before, b=bias_before: F.linear(wide, w, b),
        }
        if more_outer and not more_inner:
            room = torch.empty(rows, outer + more_outer, device=device, dtype=x.dtype)[:, :outer]
            found["into padded rows"] = lambda w=weight, out=room: torch.mm(x, w.T, out=out)
        for name, call in found.items():
            made.setdefault(name, []).append(call)
    want = made["as it is"][-1]().float()
    for name, calls in made.items():
        got = calls[-1]()[:, :outer].float() + (bias if name == "into padded rows" else 0)
        error = float((got - want).norm() / want.norm())
        assert error < 0.01, f"{name}: relative difference {error:.1e}"
    return made


def microseconds(calls: list[Callable[[], torch.Tensor]], device: torch.device) -> float:
    """Of one call, all of them in one graph; on a CPU, one after another."""

    def run() -> None:
        for call in calls:
            call()

    seconds = seconds_captured(run, device) if device.type == "cuda" else median_ms(run, device) / 1e3
    return seconds * 1e6 / len(calls)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows: list[dict[str, Any]] = []
    for (name, (inner, outer)), count in itertools.product(SHAPES.items(), arguments.rows):
        torch.manual_seed(0)
        with torch.no_grad():
            times = {way: round(microseconds(calls, device), 2) for way, calls in ways(count, inner, outer, device).items()}
        rows.append({"layer": name, "rows": count, "in": inner, "out": outer, "microseconds": times})
        tflops = {way: f"{2e-6 * count * inner * outer / time:.0f}" for way, time in times.items()}
        print(f"{name}, {count} rows: {times} us, {tflops} TFLOP/s", flush=True)
    if arguments.out:
        from scripts.bench_models import write_rows

        write_rows(arguments.out, "linear", rows)


if __name__ == "__main__":
    main()
