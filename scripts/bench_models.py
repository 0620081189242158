"""Every architecture at a released vision size, one image: the model as shipped, and accelerated.

    python scripts/bench_models.py --out docs/benchmarks/models.json --jobs 4
    python scripts/bench_models.py --only Qwen3-VL-8B --depth 2 --device cpu --dtype float32       a try without a GPU

Each model runs in a process of its own. With `--jobs N`, N models are set up side by side; then each is timed, with the others
of its round waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

RUNS = 20
LIMIT_S = 150
READY = "set up, waiting for its turn"


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


def write_rows(path: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    """A result file of this process's command."""
    content = {"kind": kind, "command": "python " + " ".join(sys.argv), "environment": environment(), "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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
        wait_for_turn()
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


def wait_for_turn() -> None:
    """Set up: hold until the parent says that nothing else runs."""
    print(READY, flush=True)
    sys.stdin.readline()


class Child:
    """One model in a process of its own, with a time limit for setting up and one for timing."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.limit = name, arguments.limit
        command = [sys.executable, __file__, "--one", name, "--device", arguments.device, "--dtype", arguments.dtype]
        command += ["--runs", str(arguments.runs), "--compiler", arguments.compiler]
        command += ["--depth", str(arguments.depth)] if arguments.depth else []
        command += ["--as-written"] if arguments.as_written else []
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
            start_new_session=True,  # compilers that it starts are stopped with it
        )
        self.late = False
        self.row: dict[str, Any] | None = None

    def _stop(self) -> None:
        self.late = self.process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def read(self) -> None:
        """Follow its output until it is set up, or has ended; waiting for its turn does not count as time."""
        assert self.process.stdout is not None
        timer = threading.Timer(self.limit, self._stop)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith('{"model"'):
                    with suppress(ValueError):  # cut off
                        self.row = json.loads(line)
                if line.startswith(READY):
                    break
        finally:
            timer.cancel()

    def finish(self) -> dict[str, Any]:
        """Let it time itself; its row, or why there is none."""
        if self.process.poll() is None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.write("\n")
                self.process.stdin.flush()
        self.read()
        try:
            code = self.process.wait(self.limit)
        except subprocess.TimeoutExpired:
            self._stop()
            code = self.process.wait()
        if self.row is not None:
            return self.row
        if self.late:
            return {"model": self.name, "error": f"took longer than {self.limit} s"}
        self.errors.seek(0)
        tail = [line for line in self.errors.read().strip().splitlines() if line.strip()]
        return {"model": self.name, "error": tail[-1][:400] if tail else f"exit status {code}"}


def one_round(names: list[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Set these up side by side, then time them one after the other."""
    children = [Child(name, arguments) for name in names]
    readers = [threading.Thread(target=child.read) for child in children]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for child in children:
        yield child.finish()


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
    parser.add_argument("--jobs", type=int, default=1, help="models that are set up side by side; one is timed at a time")
    parser.add_argument("--as-written", action="store_true", help="capture the models' own code, not compiled")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
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
    for start in range(0, len(names), arguments.jobs):
        for row in one_round(names[start : start + arguments.jobs], arguments):
            print(json.dumps(row), flush=True)
            if "missing" in row:  # an architecture that this version of transformers does not have
                continue
            rows.append(row)
            if arguments.out:
                arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
