"""Every architecture at a released vision size, one image: the model as shipped, and accelerated.

    python scripts/bench_models.py --out docs/benchmarks/models.json --command "python scripts/bench_models.py"
    python scripts/bench_models.py --only Qwen3-VL-8B --depth 2 --device cpu --dtype float32       a try without a GPU

Each model runs in a process of its own. With `--jobs N`, N models are set up at a time, and one of them is timed at a time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    from vit_compile.runtime import graphs

    for _ in range(2):
        call()
    return graphs.median_ms(call, device, runs)


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
    before = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    started = time.perf_counter()
    options = {**released.options, **({"mode": "eager"} if arguments.as_written else {})}
    if arguments.compiler != "inductor" and options.get("mode") != "eager":
        options |= {"compiler": arguments.compiler}
    with vit_compile.accelerate(model, **options) as handle, torch.inference_mode():
        handle.capture()
        row["setup_s"] = time.perf_counter() - started
        got = released.call(model, inputs)
        row["difference"] = relative_difference(got, want)
        with alone(arguments.lock):
            row["accelerated_ms"] = median_ms(lambda: released.call(model, inputs), device, arguments.runs)
            stats = handle.stats()
            row["reserved_bytes"] = torch.cuda.memory_reserved() - before if device.type == "cuda" else 0
            handle.close()
            row["eager_ms"] = median_ms(lambda: released.call(model, inputs), device, arguments.runs)
        row |= {
            "captured": "as written" if options.get("mode") == "eager" else "compiled",
            "graphs": len(stats["graphs"]),
            "graph_bytes": stats["graph_bytes"],
            "hits": stats["graph_hits"],
            "misses": stats["miss_reasons"],
            "own_calls": stats["own_calls"],
            "not_captured": stats["not_captured"],
        }
    return row


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """No other process of this benchmark is timed meanwhile."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def in_process(name: str, arguments: argparse.Namespace, lock: Path) -> dict[str, Any]:
    """The same in a process of its own, with a time limit."""
    command = [sys.executable, __file__, "--one", name, "--device", arguments.device, "--dtype", arguments.dtype]
    command += ["--runs", str(arguments.runs), "--compiler", arguments.compiler, "--lock", str(lock)]
    command += ["--depth", str(arguments.depth)] if arguments.depth else []
    command += ["--as-written"] if arguments.as_written else []
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
    parser.add_argument("--jobs", type=int, default=1, help="models that are set up at a time; one is timed at a time")
    parser.add_argument("--as-written", action="store_true", help="capture the models' own code, not compiled")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)), flush=True)
        return
    from scripts.released import all_released

    names, rows = arguments.only or list(all_released()), []
    content = {
        "kind": "models",
        "command": "python " + " ".join(["scripts/bench_models.py", *sys.argv[1:]]),
        "environment": environment(),
        "models": rows,
    }
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        lock = Path(folder) / "lock"
        for row in pool.map(lambda name: in_process(name, arguments, lock), names):
            print(json.dumps(row), flush=True)
            if "missing" in row:  # an architecture that this version of transformers does not have
                continue
            rows.append(row)
            if arguments.out:
                arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
