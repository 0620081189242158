"""The table of docs/passes.md: sites that each graph pass rewrites, in two layers of every architecture at its released sizes.

python scripts/passes_table.py [--only NAME ...]     prints it
python scripts/passes_table.py --write               puts it between `<!-- passes -->` and `<!-- end -->` of docs/passes.md

Each model is traced once, on the CPU, in a process of its own: minutes for all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "passes.md"
sys.path.insert(0, str(ROOT))

DEPTH = 2
LIMIT_S = 600


def smallest(options: dict[str, Any]) -> dict[str, Any]:
    """The options with one budget for each path: tracing needs no more."""
    found = {**options, "compiler": "eager", "verify": False, "packing": "greedy"}
    if found.get("token_budgets"):
        found["token_budgets"] = (min(found["token_budgets"]),)
    if found.get("path_token_budgets"):
        found["path_token_budgets"] = {path: (min(filter(None, ladder)),) for path, ladder in found["path_token_budgets"].items()}
    return found


def sites(name: str) -> dict[str, Any]:
    """Sites by pass, of one model in this process."""
    import torch

    import vit_compile
    from scripts.released import all_released
    from vit_compile.backend import passes
    from vit_compile.backend.passes.aligned_linear import AlignedLinear

    released = all_released()[name]
    row: dict[str, Any] = {"model": name, "architecture": released.architecture}
    if released.options.get("mode") == "eager":
        return {**row, "why": "captured as written"}
    try:
        model = released.build(DEPTH)
    except (ImportError, AttributeError):
        return {**row, "why": "its library is not installed"}
    # In half precision and as on CUDA, where the pass for odd widths works.
    passes.PASSES["aligned_linear"] = AlignedLinear(("cpu",))
    model = model.bfloat16()
    with torch.no_grad(), vit_compile.encoder_for(model, **smallest(dict(released.options))) as encoder:
        if not encoder.is_captured():
            return {**row, "why": "; ".join(map(str, encoder.snapshot()["not_captured"]))}
    graphs = vit_compile.counters.graphs_seen
    return {**row, "graphs": graphs, "sites": vit_compile.counters.pass_sites}


def in_process(name: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "architecture": "?", "why": f"not traced in {LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"model": name, "architecture": "?", "why": done.stderr.strip().splitlines()[-1]}


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    from vit_compile.options import DEFAULT_PASSES

    lines = [
        "| model | architecture | " + " | ".join(f"`{name}`" for name in DEFAULT_PASSES) + " |",
        "| --- | --- |" + " ---: |" * len(DEFAULT_PASSES),
    ]
    for row in rows:
        counted = [str(row["sites"].get(name, 0)) if "sites" in row else row["why"] for name in DEFAULT_PASSES]
        lines.append(f"| {row['model']} | {row['architecture']} | " + " | ".join(counted) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="models by name; all of them without it")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(sites(arguments.one)))
        return
    from scripts.released import all_released

    rows, known = [], list(all_released())
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        parser.error(f"no such models: {', '.join(unknown)}; known are {', '.join(known)}")
    for name in arguments.only or known:
        rows.append(in_process(name))
        print(rows[-1], file=sys.stderr, flush=True)
    text = table(rows)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        if arguments.only:  # the others stay as they are
            made = {line.split(" | ")[0]: line for line in text.splitlines()[2:]}
            old = re.search(r"<!-- passes -->\n\n?(.*?)\n\n?<!-- end -->", page, flags=re.DOTALL)
            assert old is not None, "the page has no table"
            text = "\n".join(made.get(line.split(" | ")[0], line) for line in old[1].splitlines())
        PAGE.write_text(
            re.sub(
                r"(<!-- passes -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL
            ),
            encoding="utf-8",
        )
    else:
        print(text)


if __name__ == "__main__":
    main()
