"""Start-up of a tower, each time in a process of its own: with empty caches, with `load_cache` alone, and after a restart.

    python scripts/bench_startup.py --out docs/benchmarks/startup.json
    python scripts/bench_startup.py --small --device cpu --compiler aot_eager                        a try without a GPU

1. cold: empty cache folders of Inductor and Triton; `save_cache` at the end.
2. loaded: empty folders again, as on another machine of the same kind, and `load_cache` of that file.
3. restarted: the folders of 1., and `load_cache`.

Seconds of making the encoder and capturing it; imports and weights are not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

BUDGETS = (16, 256, 448, 640, 864, 1184, 1264, 1680, 2064, 2672, 3584, 4096)
"""A ladder fitted to requests of the trace of chat, of those in docs/benchmarks.md."""
LIMIT_S = 300
STARTS = ("cold", "loaded", "restarted")
"""The first one writes what the others load, and is always made."""


def set_up(arguments: argparse.Namespace) -> dict[str, Any]:
    """One start, in this process."""
    import torch

    import vit_compile
    from vit_compile.models.accelerate import encoder_for
    from vit_compile.tools.bench.towers import load_tower

    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tower = load_tower(arguments.tower, small=arguments.small, weights=None, model=None, device=device, dtype=dtype)
    torch.zeros(1, device=device)
    started = time.perf_counter()
    report = vit_compile.load_cache(arguments.load) if arguments.load else None
    options: dict[str, Any] = {"token_budgets": arguments.budgets, "max_items_per_batch": arguments.items}
    if arguments.capacities is not None:
        options["segment_capacities"] = tuple(arguments.capacities)
    with torch.inference_mode():
        encoder = encoder_for(tower.module, compiler=arguments.compiler, **options)
        encoder.capture()
    seconds = time.perf_counter() - started
    snapshot = encoder.snapshot()
    if arguments.save:
        vit_compile.save_cache(arguments.save)
    return {
        "seconds": seconds,
        "phase_seconds": snapshot["phase_seconds"],
        "graphs": len(snapshot["graphs"]),
        "not_captured": len(snapshot["not_captured"]),
        "kernels": {f"{row['shape'][0]} rows, {row['segments']} segments": row["kernel"] for row in snapshot["attention"]},
        "loaded": None if report is None else str(report).removeprefix(f"{arguments.load}: "),
    }


def start(name: str, caches: Path, extra: list[str]) -> dict[str, Any]:
    """One start, in a process of its own, with the caches in this folder."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--one", *extra]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    row: dict[str, Any] = {"start": name, **json.loads(done.stdout.splitlines()[-1])}
    print(f"{name}: {row['seconds']:.1f} s, {row['graphs']} graphs, {row['phase_seconds']}", flush=True)
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", default="qwen3-vl-8b")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--budgets", type=lambda text: tuple(map(int, text.split(","))), default=BUDGETS)
    parser.add_argument("--items", type=int, default=16, help="images a batch may have")
    parser.add_argument("--capacities", type=int, nargs="*", default=None, help="default: the encoder's own")
    parser.add_argument("--starts", nargs="*", default=STARTS, choices=STARTS, help="beside the cold one; default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(set_up(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second, saved = Path(folder) / "first", Path(folder) / "second", str(Path(folder) / "saved")
        how = {"cold": (first, ["--save", saved]), "loaded": (second, ["--load", saved]), "restarted": (first, ["--load", saved])}
        rows = [start(name, *how[name]) for name in STARTS if name == "cold" or name in arguments.starts]
    if arguments.out:
        from scripts.bench_models import write_rows

        write_rows(arguments.out, "startup", rows)


if __name__ == "__main__":
    main()
