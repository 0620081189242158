"""First table of docs/benchmarks.md: one tower, eager and compiled peers beside this backend, in one process.

    python scripts/bench_backend.py --tower qwen3-vl-8b --out docs/benchmarks/backend-qwen3-vl-8b.json

Every peer gets the same inputs on the device. `eager` is the tower as shipped (metadata computed in the call);
the compiled peers and ours get the metadata precomputed, which is the better case for each of them. Milliseconds are
medians of wall time with synchronisation; bytes are what torch's allocator holds more than before the peer was set up;
the difference from eager is the norm of the difference over the norm, next to that of eager with hoisted metadata.
On a machine without a GPU it runs a small preset that proves nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import nn

import vit_compile
from scripts.bench_towers import build_qwen2_5_vl, build_qwen3_vl, cast_parameters
from vit_compile.backend.encoder import encoders
from vit_compile.models import hf_attention
from vit_compile.models.vision_metadata import vision_metadata

Call = Callable[[], Any]


@dataclass
class Bench:
    """One tower: how to build its inputs, how to call it, and the options for this backend."""

    name: str
    cases: dict[str, dict[str, Any]]
    eager: Callable[..., Any]
    static: Callable[..., Any]
    options: dict[str, Any]
    output: Callable[[Any], torch.Tensor]
    dense: bool = False
    """Every image size is a shape of its own: the peers compile each one statically, which is their best case."""


def _packed_bench(name: str, build: Callable[[str], nn.Module], grids: dict[str, Any], budgets: list[int], device: str) -> Bench:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shipped = cast_parameters(build("sdpa"), device, dtype)
    tower = cast_parameters(build("sdpa"), device, dtype)
    tower.load_state_dict(shipped.state_dict())
    hf_attention.register()
    hf_attention.use_attention(tower)
    bound = max(t * h * w for case in grids.values() for t, h, w in case)
    width = tower.config.in_channels * tower.config.temporal_patch_size * tower.config.patch_size**2

    def call(pixels: torch.Tensor, **metadata: Any) -> torch.Tensor:
        return tower(pixels, **metadata).pooler_output

    cases = {}
    for label, case in grids.items():
        generator = torch.Generator().manual_seed(len(cases))
        rows = sum(t * h * w for t, h, w in case)
        pixels = torch.randn(rows, width, generator=generator).to(device, dtype)
        metadata = vision_metadata(tower, case, device=torch.device(device)) | {"max_seqlen": bound}
        grid = torch.tensor(case, device=device)
        cases[label] = {"eager": ((pixels,), {"grid_thw": grid}), "static": ((pixels,), metadata), "patches": rows}
    options = {"token_budgets": budgets, "spatial_merge_size": tower.config.spatial_merge_size}
    return Bench(name, cases, shipped, call, options, lambda out: getattr(out, "pooler_output", out))


def qwen3_vl(device: str, small: bool) -> Bench:
    """The vision tower of Qwen3-VL-8B, random weights."""
    grids = {"1 x 224": [(1, 14, 14)], "1 x 448": [(1, 28, 28)], "1 x 1024": [(1, 64, 64)], "8 x 448": [(1, 28, 28)] * 8}
    build = partial(build_qwen3_vl, small=small)
    return _packed_bench("Qwen3-VL-8B vision", build, grids, [64, 256, 1024, 1568], device)


def qwen2_5_vl(device: str, small: bool) -> Bench:
    """The vision tower of Qwen2.5-VL-7B, random weights. 1024 pixels become 1036, a multiple of 28, as its processor does."""
    grids = {"1 x 224": [(1, 16, 16)], "1 x 448": [(1, 32, 32)], "1 x 1024": [(1, 74, 74)], "8 x 448": [(1, 32, 32)] * 8}
    build = partial(build_qwen2_5_vl, small=small)
    return _packed_bench("Qwen2.5-VL-7B vision", build, grids, [64, 256, 1408, 2048], device)


def dinov2(device: str, small: bool, weights: str | None) -> Bench:
    """DINOv2 ViT-S/14, batch-first; trained weights (a safetensors file) if given. 1024 pixels become 1022, a multiple of 14."""
    from transformers import Dinov2Config, Dinov2Model

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = Dinov2Config(
        hidden_size=384, num_attention_heads=6, num_hidden_layers=2 if small else 12, image_size=518, patch_size=14
    )
    torch.manual_seed(0)
    model = Dinov2Model(config)
    if weights is not None:
        from safetensors.torch import load_file

        model.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
    model = cast_parameters(model, device, dtype)
    cases = {}
    for label, images, side in (("1 x 224", 1, 224), ("1 x 448", 1, 448), ("1 x 1024", 1, 1022), ("8 x 448", 8, 448)):
        pixels = torch.randn(images, 3, side, side, generator=torch.Generator().manual_seed(side)).to(device, dtype)
        call = ((pixels,), {})
        cases[label] = {"eager": call, "static": call, "patches": images * (side // 14) ** 2}
    name = f"DINOv2 ViT-S/14 ({'trained' if weights else 'random'} weights)"
    # Dense attention at its own size: every image size is a capture of its own, so there are no budgets.
    return Bench(
        name, cases, model, lambda x: model(x).last_hidden_state, {}, lambda out: getattr(out, "last_hidden_state", out), True
    )


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reserved() -> int:
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _median_ms(call: Call, seconds: float) -> tuple[float, int]:
    """Median wall time of a call in ms, and how many were timed."""
    for _ in range(5):
        call()
    _sync()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 10 or (time.perf_counter() < end and len(times) < 200):
        started = time.perf_counter()
        call()
        _sync()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), len(times)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def _peer(bench: Bench, peer: str) -> tuple[Callable[..., Any], str]:
    """The callable of a peer, and which of a case's inputs it takes."""
    if peer == "eager":
        return bench.eager, "eager"
    if peer == "eager, hoisted metadata":
        return bench.static, "static"
    dynamic = False if bench.dense else None
    if peer == "torch.compile":
        return torch.compile(bench.static, dynamic=dynamic), "static"
    if peer == "reduce-overhead":
        return torch.compile(bench.static, mode="reduce-overhead", dynamic=dynamic), "static"
    mode = peer.removeprefix("vit_cudagraph ")
    return torch.compile(bench.static, backend="vit_cudagraph", options={**bench.options, "mode": mode}), "static"


PEERS = ("eager", "eager, hoisted metadata", "torch.compile", "reduce-overhead", "vit_cudagraph piecewise", "vit_cudagraph full")


def run_peer(bench: Bench, peer: str, seconds: float, wanted: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Set a peer up on all cases, then time every case."""
    torch.compiler.reset()
    vit_compile.clear()
    vit_compile.counters.reset()
    before = _reserved()
    started = time.perf_counter()
    function, which = _peer(bench, peer)
    calls: dict[str, Call] = {}
    ours = peer.startswith("vit_cudagraph")
    for label, case in bench.cases.items():
        args, kwargs = case[which]
        if not peer.startswith("eager") and not bench.dense:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(value, 0)
        calls[label] = lambda args=args, kwargs=kwargs: function(*args, **kwargs)
    if ours and "token_budgets" in bench.options:
        args, kwargs = bench.cases["1 x 448"]["static"]
        vit_compile.warmup(function, *args, progress=False, **kwargs)
    for call in calls.values():
        for _ in range(3):
            call()
    _sync()
    setup = time.perf_counter() - started
    taken = _reserved() - before
    rows = []
    for label, call in calls.items():
        got = bench.output(call()).detach().clone()
        served = vit_compile.last_call() if ours else None
        milliseconds, count = _median_ms(call, seconds)
        wanted.setdefault(label, got)
        rows.append(
            {
                "tower": bench.name,
                "case": label,
                "patches": bench.cases[label]["patches"],
                "peer": peer,
                "ms": round(milliseconds, 3),
                "timed_calls": count,
                "setup_s": round(setup, 1),
                "bytes": taken,
                "difference": _relative(got, wanted[label]),
                "captures": {c.label: c.nbytes for e in encoders() for c in e.captures()} if ours else {},
                "served": f"{served.kind}: {served.graph or served.reason}" if served else "",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if ours:
        print(json.dumps(vit_compile.counters.snapshot()), flush=True)
    return rows


def main() -> int:
    """Run the chosen tower with all peers and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=("dinov2-s", "qwen2.5-vl-7b", "qwen3-vl-8b"), required=True)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--weights", help="safetensors file with trained DINOv2 weights")
    parser.add_argument("--seconds", type=float, default=2.0, help="most seconds of timing per case and peer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = device == "cpu"
    torch.set_float32_matmul_precision("high")
    builders: dict[str, Callable[[], Bench]] = {
        "dinov2-s": lambda: dinov2(device, small, options.weights),
        "qwen2.5-vl-7b": lambda: qwen2_5_vl(device, small),
        "qwen3-vl-8b": lambda: qwen3_vl(device, small),
    }
    with torch.inference_mode():
        bench = builders[options.tower]()
        rows: list[dict[str, Any]] = []
        wanted: dict[str, torch.Tensor] = {}
        for peer in options.peers:
            try:
                rows += run_peer(bench, peer, options.seconds, wanted)
            except Exception as error:
                print(f"{peer} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                rows.append({"tower": bench.name, "peer": peer, "error": f"{type(error).__name__}: {error}"[:500]})
            _write(options, rows, device, small)
    return 0


def _write(options: argparse.Namespace, rows: list[dict[str, Any]], device: str, small: bool) -> None:
    environment = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU (small preset: no statement about speed)",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "vit_compile": vit_compile.__version__,
        "small": small,
    }
    command = f"python scripts/bench_backend.py --tower {options.tower}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"command": command, "environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
