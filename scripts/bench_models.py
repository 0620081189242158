"""Every architecture at a released vision size, one image: the model as shipped, and accelerated.

    python scripts/bench_models.py --out docs/benchmarks/models.json --command "python scripts/bench_models.py"
    python scripts/bench_models.py --only Qwen3-VL-8B --depth 2 --device cpu --dtype float32       a try without a GPU

Each model runs in a process of its own. With `--warm N`, N processes at a time first fill the compiler's caches, so that the
measured ones, which run alone, spend no time there; the set-up times are then those of warm caches, and the file says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

RUNS = 20
LIMIT_S = 150


def environment() -> dict[str, Any]:
    """Where it ran."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def tensors(output: Any) -> list[Any]:
    """All floating-point tensors in an output, in order."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [found for value in output.values() for found in tensors(value)]
    if isinstance(output, list | tuple):
        return [found for value in output for found in tensors(value)]
    return []


def relative_difference(got: Any, want: Any) -> float:
    """Largest norm of a difference over the norm, over the tensors of an output."""
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    assert pairs
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


def median_ms(call: Any, device: Any, runs: int) -> float:
    """Median wall time with synchronisation, after three calls that do not count."""
    import torch

    times = []
    for number in range(runs + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model, in this process."""
    import torch

    import vit_compile
    from scripts.released import all_released

    torch.set_float32_matmul_precision("high")
    released = all_released()[name]
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = released.build(arguments.depth).to(device)
    except (ImportError, AttributeError) as error:
        return {"model": name, "missing": str(error)}
    for parameter in model.parameters():  # parameters only: rotary tables stay in float32, as from_pretrained leaves them
        parameter.data = parameter.data.to(dtype)
    inputs = released.inputs(device, dtype)
    row: dict[str, Any] = {"model": name, "architecture": released.architecture, "image": released.image}
    with torch.inference_mode():
        want = released.call(model, inputs)
        if not arguments.fill_caches:
            row["eager_ms"] = median_ms(lambda: released.call(model, inputs), device, arguments.runs)
    before = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    started = time.perf_counter()
    options = dict(released.options)
    if arguments.compiler != "inductor":
        options |= {"compiler": arguments.compiler}
    with vit_compile.accelerate(model, **options) as handle, torch.inference_mode():
        handle.capture()
        row["setup_s"] = time.perf_counter() - started
        got = released.call(model, inputs)
        row["difference"] = relative_difference(got, want)
        if not arguments.fill_caches:
            row["accelerated_ms"] = median_ms(lambda: released.call(model, inputs), device, arguments.runs)
        stats = handle.stats()
        row["reserved_bytes"] = torch.cuda.memory_reserved() - before if device.type == "cuda" else 0
        row |= {
            "graphs": len(stats["graphs"]),
            "graph_bytes": stats["graph_bytes"],
            "hits": stats["graph_hits"],
            "misses": stats["miss_reasons"],
            "own_calls": stats["own_calls"],
            "not_captured": stats["not_captured"],
        }
    return row


def in_process(name: str, arguments: argparse.Namespace, *, fill_caches: bool) -> dict[str, Any]:
    """The same in a process of its own, with a time limit."""
    command = [sys.executable, __file__, "--one", name, "--device", arguments.device, "--dtype", arguments.dtype]
    command += ["--runs", str(arguments.runs), "--compiler", arguments.compiler]
    command += ["--depth", str(arguments.depth)] if arguments.depth else []
    command += ["--fill-caches"] if fill_caches else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "error": f"took longer than {arguments.limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"model"')]
    if lines:
        row: dict[str, Any] = json.loads(lines[-1])
        return row
    tail = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return {"model": name, "error": tail[-1][:400] if tail else f"exit status {done.returncode}"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="models by name; all of them without it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--depth", type=int, help="layers of the tower; all of them without it")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for one model")
    parser.add_argument("--warm", type=int, default=0, help="processes that fill the compiler's caches first")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds after which no further model is begun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--fill-caches", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)), flush=True)
        return
    from scripts.released import all_released

    started = time.perf_counter()
    names = arguments.only or list(all_released())
    if arguments.warm:
        with concurrent.futures.ThreadPoolExecutor(arguments.warm) as pool:
            for row in pool.map(lambda name: in_process(name, arguments, fill_caches=True), names):
                note = (
                    row.get("missing")
                    or row.get("error")
                    or f"{row['setup_s']:.1f} s, {row['own_calls']} {row['misses']} {row['not_captured'][:1]}"
                )
                print("caches:", row["model"], note, flush=True)
    rows = []
    for name in names:
        if time.perf_counter() - started > arguments.stop_after:
            print("out of time before", name, flush=True)
            break
        row = in_process(name, arguments, fill_caches=False)
        print(json.dumps(row), flush=True)
        if "missing" in row:  # an architecture that this version of transformers does not have
            continue
        rows.append(row)
        if arguments.out:
            content = {
                "kind": "models",
                "command": "python " + " ".join(["scripts/bench_models.py", *sys.argv[1:]]),
                "environment": environment(),
                "warm_caches": bool(arguments.warm),
                "models": rows,
            }
            arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
