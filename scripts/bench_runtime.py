"""Second table of docs/benchmarks.md: the manager on production-shaped requests, and its host time.

    python scripts/bench_runtime.py --tower qwen3-vl-8b --trace servegen_chat.json --out docs/benchmarks/runtime-qwen3-vl-8b.json

The trace is a file of two histograms: output tokens of an image, and images of a request. Ladders are fitted to 4000 requests
drawn with one seed and measured on others drawn with another. Every configuration serves the same requests, pixels on the
device, sizes on the host. `ms` is wall time with synchronisation after every request. Host time: the time `execute` takes on
the host with an idle device before it, less that of launching the same graph; the median of many calls.
On a machine without a GPU it runs a small preset that proves nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

import vit_compile
from scripts.bench_towers import build_qwen2_5_vl, build_qwen3_vl, cast_parameters
from vit_compile.models.packed_grid import PackedGridTable
from vit_compile.planning import budgets
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.manager import EncoderCudaGraphManager

Grid = tuple[int, int, int]
TOWERS = {
    "qwen3-vl-8b": ("Qwen3-VL-8B vision", build_qwen3_vl, 16),
    "qwen2.5-vl-7b": ("Qwen2.5-VL-7B vision", build_qwen2_5_vl, 14),
}
MAX_ITEMS = 16
MINIMUM, MAXIMUM, SMALL_MAXIMUM = 16, 4096, 128
FITTED_GRAPHS = 12


def draw(trace: dict[str, Any], count: int, seed: int) -> list[list[Grid]]:
    """Requests of at least one image: token counts by the histogram, uniform within a bucket, random aspect ratios up to 4."""
    chance = random.Random(seed)
    edges = trace["image_tokens_upper_edges_pdf"]
    lows = [1, *[edge + 1 for edge, _ in edges[:-1]]]
    counts = {int(number): weight for number, weight in trace["images_per_request_pdf"].items() if int(number) > 0}
    requests = []
    for _ in range(count):
        number = chance.choices(list(counts), list(counts.values()))[0]
        buckets = chance.choices(range(len(edges)), [weight for _, weight in edges], k=number)
        requests.append([_grid(chance.randint(lows[bucket], edges[bucket][0]), chance) for bucket in buckets])
    return requests


def _grid(tokens: int, chance: random.Random) -> Grid:
    """Patches of an image with about so many tokens, never more."""
    height = max(1, min(tokens, round(math.sqrt(tokens * 2 ** chance.uniform(-2, 2)))))
    return (1, 2 * height, 2 * max(1, tokens // height))


def tokens(grid: Grid) -> int:
    """Output tokens of an image."""
    return grid[1] * grid[2] // 4


def ladders(trace: dict[str, Any], maximum: int) -> dict[str, tuple[int, ...]]:
    """Powers of two, and one fitted to other requests than those that are measured."""
    drawn = [[tokens(grid) for grid in request] for request in draw(trace, 4000, seed=1)]
    histogram = budgets.histogram_from_trace(drawn, maximum=maximum, max_items=MAX_ITEMS)
    return {
        "powers of two": budgets.power_of_two(MINIMUM, maximum),
        "fitted": budgets.fit(histogram, FITTED_GRAPHS, maximum=maximum, multiple_of=MINIMUM),
    }


class Pixels:
    """Patches for a request, cut from one block of random numbers on the device."""

    def __init__(self, width: int, device: str, dtype: torch.dtype) -> None:
        self.block = torch.randn(1 << (15 if device == "cpu" else 18), width, device=device).to(dtype)

    def request(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """A request with a copy of its own."""
        rows = sum(t * h * w for t, h, w in grids)
        return {"pixel_values": self.block[:rows].clone(), "image_grid_thw": list(grids)}


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(function: Any) -> float:
    """Wall ms with synchronisation."""
    _sync()
    started = time.perf_counter()
    function()
    _sync()
    return (time.perf_counter() - started) * 1e3


def _host(function: Any, runs: int) -> float:
    """Median host ms of a call that begins with an idle device, without waiting for it."""
    times = []
    for _ in range(runs):
        _sync()
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1e3)
    _sync()
    return statistics.median(times)


def host_rows(manager: EncoderCudaGraphManager, pixels: Pixels, patch: int, runs: int) -> list[dict[str, Any]]:
    """Host time per `execute` beyond the launch of its graphs: layouts seen before, and new ones."""
    side = 14 if manager.device.type == "cpu" else 336 // patch // 2 * 2
    cases: dict[str, list[list[Grid]]] = {
        "1 image, same size again": [[(1, 224 // patch // 2 * 2, 224 // patch // 2 * 2)]] * runs,
        "1 image, a new size each call": [[(1, 2 + 2 * (i % 40), 2 + 2 * (i // 40))] for i in range(40, 40 + runs)],
        "20 images, same sizes again": [[(1, side, side)] * 20] * runs,
        "20 images, in a new order each call": [
            random.Random(i).sample([(1, side - 2 * (k % 5), side - 2 * (k // 5)) for k in range(20)], 20) for i in range(runs)
        ],
    }
    rows = []
    for case, calls in cases.items():
        made = [pixels.request(grids) for grids in calls]
        for request in made[:3]:
            manager.execute(request)
        before = manager.snapshot()
        whole = []
        for request in made[3:]:
            _sync()
            started = time.perf_counter()
            manager.execute(request)
            whole.append((time.perf_counter() - started) * 1e3)
        after = manager.snapshot()
        served = [
            (graph["replays"] - earlier["replays"], held)
            for graph, earlier, held in zip(after["graphs"], before["graphs"], manager._captured.set.graphs.values(), strict=True)
            if graph["replays"] > earlier["replays"]
        ]
        launch = sum(count * _host(held.replay, 20) for count, held in served) / len(whole)
        execute = statistics.median(whole)
        rows.append(
            {
                "case": case,
                "execute_host_ms": round(execute, 4),
                "launch_host_ms": round(launch, 4),
                "beyond_ms": round(execute - launch, 4),
                "replays_per_call": round((after["replays"] - before["replays"]) / len(whole), 2),
                "misses": after["graph_misses"] - before["graph_misses"],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Bench:
    """One tower and its requests."""

    def __init__(self, tower: str, trace: dict[str, Any], requests: int, device: str) -> None:
        self.small = device == "cpu"
        if self.small:  # a CPU does not get through large images
            edges = trace["image_tokens_upper_edges_pdf"]
            trace["image_tokens_upper_edges_pdf"] = [edge for edge in edges if edge[0] <= SMALL_MAXIMUM // 2]
        self.device, self.dtype = device, torch.float32 if self.small else torch.bfloat16
        self.name, build, self.patch = TOWERS[tower]
        build = partial(build, small=self.small)
        torch.manual_seed(0)
        self.shipped = cast_parameters(build("sdpa"), device, self.dtype)
        self.tower = cast_parameters(build("sdpa"), device, self.dtype)
        self.tower.load_state_dict(self.shipped.state_dict())
        config = self.tower.config
        self.pixels = Pixels(config.in_channels * config.temporal_patch_size * config.patch_size**2, device, self.dtype)
        self.grids = draw(trace, requests, seed=2)

    def manager(self, ladder: Sequence[int], capacities: Sequence[int], **config: Any) -> tuple[EncoderCudaGraphManager, float]:
        """A captured manager, and the seconds that took."""
        torch.compiler.reset()
        table = PackedGridTable(self.tower, token_range=(MINIMUM, MAXIMUM), segment_capacities=capacities)
        settings = {"token_budgets": tuple(ladder), "max_items_per_batch": MAX_ITEMS, "max_frames_per_batch": 0, "log_every": 0}
        settings |= {"mode": "eager"} if self.small else {}
        made = EncoderCudaGraphManager(table, EncoderConfig(**settings, **config), device=self.device, dtype=self.dtype)
        started = time.perf_counter()
        made.capture()
        _sync()
        return made, time.perf_counter() - started

    def eager(self, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """The tower as shipped, on the whole request."""
        made = self.pixels.request(grids)
        output = self.shipped(made["pixel_values"], grid_thw=torch.tensor(list(grids), device=self.device))
        levels = getattr(output, "deepstack_features", None) or []
        return list(torch.cat([output.pooler_output, *levels], dim=1).split([tokens(grid) for grid in grids]))

    def eager_row(self, count: int) -> dict[str, Any]:
        """ms per request of the tower as shipped."""
        for grids in self.grids[:3]:
            self.eager(grids)
        times = [_timed(partial(self.eager, grids)) for grids in self.grids[:count]]
        return {"configuration": "Hugging Face eager", "requests": count, **_summary(times)}

    def traffic_row(self, name: str, manager: EncoderCudaGraphManager, seconds: float) -> dict[str, Any]:
        """All requests through one manager."""
        worst = 0.0
        for grids in self.grids[:20]:
            got, want = manager.execute(self.pixels.request(grids)), self.eager(grids)
            worst = max(worst, *[relative(g, w) for g, w in zip(got, want, strict=True)])
        manager._statistics.reset()
        times = []
        for grids in self.grids:
            request = self.pixels.request(grids)
            times.append(_timed(partial(manager.execute, request)))
        found = manager.snapshot()
        return {
            "configuration": name,
            "requests": len(times),
            **_summary(times),
            "padded_share": round(found["padded_share"], 4),
            "replays": found["replays"],
            "hits": found["graph_hits"],
            "misses": found["miss_reasons"],
            "graphs": len(manager.graphs()),
            "graph_bytes": found["graph_bytes"],
            "largest_graph_bytes": max(graph.nbytes for graph in manager.graphs()),
            "capture_s": round(seconds, 1),
            "difference": worst,
            "ladder": list(manager.ladders.paths["main"]),
        }


def _summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "total_s": round(sum(times) / 1e3, 3),
        "mean_ms": round(statistics.mean(times), 3),
        "p50_ms": round(statistics.median(times), 3),
        "p99_ms": round(ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)], 3),
    }


def main() -> int:
    """Measure one tower and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=tuple(TOWERS), required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--eager-requests", type=int, default=100)
    parser.add_argument("--one-capacity", action="store_true", help="also one graph per budget: no tighter segment capacities")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    trace = json.loads(options.trace.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    host: list[dict[str, Any]] = []
    with torch.no_grad():
        bench = Bench(options.tower, trace, options.requests, device)
        rows.append(bench.eager_row(min(options.eager_requests, options.requests)))
        print(json.dumps(rows[-1]), flush=True)
        for name, ladder in ladders(trace, SMALL_MAXIMUM if bench.small else MAXIMUM).items():
            for packing in ("greedy", "cost"):
                for capacities in ((1, 4), ()) if options.one_capacity and packing == "cost" and name == "fitted" else ((1, 4),):
                    manager, seconds = bench.manager(ladder, capacities, packing=packing)
                    label = f"{packing}, {name}" + ("" if capacities else ", one segment capacity")
                    rows.append(bench.traffic_row(label, manager, seconds))
                    print(json.dumps(rows[-1]), flush=True)
                    if packing == "cost" and capacities and name == "fitted":
                        host = host_rows(manager, bench.pixels, bench.patch, 8 if bench.small else 100)
                    manager.clear()
                    del manager
                    gc.collect()
                    _write(options, bench, rows, host)
    return 0


def _write(options: argparse.Namespace, bench: Bench, rows: list[dict[str, Any]], host: list[dict[str, Any]]) -> None:
    environment = {
        "device": "CPU (small preset: no statement about speed)" if bench.small else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "vit_compile": vit_compile.__version__,
        "small": bench.small,
    }
    command = f"python scripts/bench_runtime.py --tower {options.tower} --trace {options.trace.name}"
    images = [tokens(grid) for grids in bench.grids for grid in grids]
    traffic = {"requests": len(bench.grids), "images": len(images), "tokens": sum(images), "source": "ServeGen, chat"}
    content = {"kind": "runtime", "command": command, "environment": environment, "tower": bench.name, "traffic": traffic}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**content, "host": host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
