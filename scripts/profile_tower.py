"""Where the time of one call goes: kernels of a replay, gaps, and each step on the host.

    python scripts/profile_tower.py --tower qwen3-vl-8b --cases 1x224,1x1024,8x448
    python scripts/profile_tower.py --tower dinov2-s --cases 1x224,16x224
    python scripts/profile_tower.py --small --device cpu --compiler eager                      a try without a GPU

For each case: wall time, back to back, the sum of kernel times (torch's profiler, with the largest), and the time of the steps of
`execute` on the host, the device being idle before.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from vit_compile.models.accelerate import accelerate, encoder_for
from vit_compile.options import DEFAULT_PASSES, PASS_NAMES
from vit_compile.runtime import batches, graphs, manager, planner, table_buffers, weights
from vit_compile.tools.bench import towers
from vit_compile.tools.bench.peers_graphs import synchronize

RUNS = 40
PASSES = {
    "default": DEFAULT_PASSES,
    "all": PASS_NAMES,
    "none": (),
    **{f"without-{name}": tuple(other for other in DEFAULT_PASSES if other != name) for name in DEFAULT_PASSES},
}
STEPS: dict[str, tuple[Any, str]] = {
    "parse the request": (manager.EncoderCudaGraphManager, "_parsed"),
    "plan": (planner.Planner, "plan"),
    "weights moved": (weights.WeightWatch, "moved"),
    "weights replaced": (weights.WeightWatch, "replaced"),
    "train mode": (weights.WeightWatch, "training"),
    "fill buffers": (table_buffers.GraphBuffers, "fill"),
    "launch": (graphs.EncoderGraph, "replay"),
    "batch, fill and launch included": (batches.BatchRunner, "run"),
    "weights after the launch": (weights.WeightWatch, "is_for"),
}


def steps_ms(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Median host milliseconds of each step, over calls that find the device idle."""
    spent: dict[str, float] = {}
    found: dict[str, list[float]] = {name: [] for name in ("whole call", *STEPS)}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

        return step

    patches = [mock.patch.object(owner, name, timed(step, getattr(owner, name))) for step, (owner, name) in STEPS.items()]
    for patch in patches:
        patch.start()
    try:
        for _ in range(RUNS):
            synchronize(device)
            spent.clear()
            started = time.perf_counter()
            call()
            found["whole call"].append(time.perf_counter() - started)
            for name in STEPS:
                found[name].append(spent.get(name, 0.0))
    finally:
        for patch in patches:
            patch.stop()
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def walls(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Median wall and host milliseconds of calls with synchronisation, and of calls back to back."""
    host, wall = (statistics.median(times) for times in zip(*graphs.timed(call, device, RUNS), strict=True))
    started = time.perf_counter()
    for _ in range(RUNS):
        call()
    synchronize(device)
    behind = (time.perf_counter() - started) / RUNS
    return {"wall": wall, "host": host, "back to back": behind * 1e3}


def kernels_ms(call: Callable[[], Any], runs: int = 3) -> dict[str, tuple[float, int]]:
    """Milliseconds and number of launches by kernel, of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    return {event.key[:90]: (event.device_time_total / runs / 1e3, event.count // runs) for event in events}


def request(tower: Any, count: int, side: int, device: torch.device) -> tuple[Any, int]:
    """Equal images, their side rounded down to whole merge blocks, and their output tokens."""
    step = tower.geometry.patch_size * tower.geometry.merge_size
    blocks = max(1, side // step)
    patches = blocks * tower.geometry.merge_size
    tokens = count * tower.tokens((1, patches, patches))
    if tower.kind == "dense":
        return torch.randn(count, 3, blocks * step, blocks * step, device=device, dtype=torch.bfloat16), tokens
    pixels = torch.randn(count * patches**2, tower.row_width, device=device, dtype=torch.bfloat16)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, patches, patches]] * count)}, tokens


def served(tower: Any, options: dict[str, Any]) -> tuple[Any, Callable[[Any], Any], Callable[[], None]]:
    """The captured manager, what takes a request, and how to end it."""
    if tower.kind == "dense":
        handle = accelerate(tower.module, capture="explicit", **options)
        handle.capture()
        return handle.manager, handle.encode, handle.close
    encoder = encoder_for(tower.module, **options)
    encoder.capture()
    return encoder, encoder.execute, encoder.clear


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", default="qwen3-vl-8b", help="one of vit-compile bench")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cases", default="1x224,1x448,1x1024,8x448,20x336", help="COUNTxSIDE")
    parser.add_argument("--passes", nargs="*", default=["default"], choices=PASSES)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--mode", default="compiled")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--top", type=int, default=12, help="kernels that are printed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.mode == "eager" and arguments.passes != ["default"]:
        parser.error("--mode eager runs no passes: leave --passes out")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: try --small --device cpu --compiler eager")
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", arguments.cases):
        parser.error(f"--cases {arguments.cases!r}: expected COUNTxSIDE with commas, such as 1x224,8x448")
    device, rows = torch.device(arguments.device), []
    tower = towers.load_tower(
        arguments.tower, small=arguments.small, weights=None, model=None, device=device, dtype=torch.bfloat16
    )
    sizes = [tuple(map(int, case.split("x"))) for case in arguments.cases.split(",")]
    requests = {f"{count} x {side}": request(tower, count, side, device) for count, side in sizes}
    budgets = tuple(sorted({tokens for _, tokens in requests.values()}))
    sizing = {"token_budgets": budgets, "max_items_per_batch": max(count for count, _ in sizes), "attention": arguments.attention}
    for name in arguments.passes:
        started = time.perf_counter()
        options = {"mode": "eager"} if arguments.mode == "eager" else {"passes": PASSES[name], "compiler": arguments.compiler}
        with torch.inference_mode():
            encoder, serve, end = served(tower, {**sizing, **options})
            print(
                f"passes {name}: set-up {time.perf_counter() - started:.1f} s, {encoder.snapshot()['phase_seconds']}", flush=True
            )
            for case, (made, _) in requests.items():
                call = partial(serve, made)
                for _ in range(5):
                    call()
                row = {"passes": name, "case": case, **walls(call, device), "steps": steps_ms(call, device)}
                row["kernels"] = kernels_ms(call) if device.type == "cuda" else {}
                rows.append(row)
                total = sum(ms for ms, _ in row["kernels"].values())
                print(
                    case,
                    {key: round(row[key], 3) for key in ("wall", "host", "back to back")},
                    f"kernels {total:.3f}",
                    flush=True,
                )
                print("  host:", ", ".join(f"{step} {ms:.3f}" for step, ms in row["steps"].items()), flush=True)
                for key, (ms, count) in list(row["kernels"].items())[: arguments.top]:
                    print(f"  {ms:8.3f} ms {count:4} x {key}", flush=True)
            if arguments.out:
                snapshot = {"passes": name, "attention": encoder.snapshot()["attention"]}
                rows.append(json.loads(json.dumps(snapshot, default=str)))
            end()
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
