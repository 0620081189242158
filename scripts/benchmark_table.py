"""Markdown tables from the result files of `bench_backend.py`, `bench_runtime.py`, `bench_models.py`, `bench_packed_dense.py` and
`vit-compile bench`.

    python scripts/benchmark_table.py docs/benchmarks/*.json                              prints every table
    python scripts/benchmark_table.py docs/benchmarks/*.json --into docs/benchmarks.md README.md    updates the pages

A page has the tables between `<!-- tables -->` (the backend's), `<!-- runtime -->`, `<!-- models -->`, `<!-- dense -->` or
`<!-- bench -->` and `<!-- end -->`, or short ones between `<!-- summary -->` or `<!-- bench summary -->` and `<!-- end -->`.
Every number is read from the files. A file may say that a field of a peer is not valid, and why:
`"invalid": {"<peer>": {"bytes": "<reason>"}}`; the table then has a dash and the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.bench_section import bench_summary, bench_tables
from scripts.markdown import Row, conditions, head, line, milliseconds
from vit_compile.tools.bench.results import KIND

OURS = "vit_cudagraph full"
RIVALS = {"eager": "eager as shipped", "torch.compile": "torch.compile", "reduce-overhead": "reduce-overhead"}


class Result:
    """One result file: one tower."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        self.command: str = content["command"]
        self.environment: dict[str, Any] = content["environment"]
        self.invalid: dict[str, dict[str, str]] = content.get("invalid", {})
        self.tower: str = content["rows"][0]["tower"]
        self.peers: dict[str, list[Row]] = {}
        for row in content["rows"]:
            self.peers.setdefault(row["peer"], []).append(row)
        self.cases = {row["case"]: row["patches"] for row in content["rows"] if "case" in row}

    def ms(self, peer: str, case: str) -> float | None:
        """Milliseconds of a peer on a case, None where it did not run."""
        found = [row["ms"] for row in self.peers.get(peer, []) if row.get("case") == case]
        return found[0] if found else None

    def field(self, peer: str, name: str, text: str) -> str:
        """`text`, or a dash where the file says that the field is not valid."""
        return "-" if name in self.invalid.get(peer, {}) else text


def tower_table(result: Result) -> list[str]:
    """ms per case, setup, memory and difference of every peer."""
    titles = ["peer", *[f"{case} ({patches} patches)" for case, patches in result.cases.items()]]
    lines = head([*titles, "setup s", "MiB", "difference from eager"])
    for peer, rows in result.peers.items():
        if "error" in rows[0]:
            lines.append(line([peer, *["-"] * len(result.cases), "-", "-", f"failed: {rows[0]['error'].split(':')[0]}"]))
            continue
        differences = [row["difference"] for row in rows]
        lines.append(
            line(
                [
                    peer,
                    *[milliseconds(result.ms(peer, case)) for case in result.cases],
                    result.field(peer, "setup_s", f"{rows[0]['setup_s']:.1f}"),
                    result.field(peer, "bytes", f"{rows[0]['bytes'] / 2**20:.0f}"),
                    "0" if not any(differences) else f"{min(differences):.4f} to {max(differences):.4f}",
                ]
            )
        )
    return lines


def ratio_table(result: Result) -> list[str]:
    """Time of each rival over that of `OURS`, per case."""
    lines = head([f"their time / time of `{OURS}`", *result.cases])
    for peer, name in RIVALS.items():
        cells = []
        for case in result.cases:
            ours, theirs = result.ms(OURS, case), result.ms(peer, case)
            cells.append("-" if ours is None or theirs is None else f"{theirs / ours:.2f}")
        lines.append(line([name, *cells]))
    return lines


def served(result: Result) -> str:
    """Which graph served each case."""
    rows = [row for row in result.peers.get(OURS, []) if "case" in row]
    return "; ".join(f"{row['case']}: {row['served'].replace(': ', ', ')}" for row in rows)


def tables(results: list[Result]) -> str:
    """One section per tower."""
    lines: list[str] = []
    for result in results:
        lines += [f"## {result.tower}", "", conditions({"environment": result.environment, "command": result.command}), ""]
        lines += [*tower_table(result), "", *ratio_table(result), ""]
        lines += [f"Served by: {served(result)}.", ""] if served(result) else []
        for peer, reasons in result.invalid.items():
            lines += [f"No `{name}` for `{peer}`: {reason}" for name, reason in reasons.items()] + [""]
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """ms of four peers, every tower and case."""
    peers = [*RIVALS, OURS]
    lines = head(["tower", "images", *[f"{RIVALS.get(peer, peer)}, ms" for peer in peers]])
    for result in results:
        for case in result.cases:
            lines.append(line([result.tower, case, *[milliseconds(result.ms(peer, case)) for peer in peers]]))
    return "\n".join(lines) + "\n"


def runtime_tables(contents: list[Row]) -> str:
    """Traffic and host time of the manager, one section per tower."""
    lines: list[str] = []
    for content in contents:
        traffic = content["traffic"]
        lines += [f"## {content['tower']}, requests", "", conditions(content), ""]
        lines += [f"{traffic['requests']} requests with {traffic['images']} images, {traffic['tokens']} output tokens.", ""]
        titles = ["packing, ladder", "total s", "mean ms", "P50 ms", "P99 ms", "padded share", "replays", "eager items"]
        lines += head([*titles, "graphs", "MiB", "capture s", "difference"])
        for row in content["rows"]:
            times = [f"{row['total_s']:.2f}", *[f"{row[name]:.1f}" for name in ("mean_ms", "p50_ms", "p99_ms")]]
            if "graphs" not in row:
                lines.append(line([f"{row['configuration']} ({row['requests']} of them)", *times, *["-"] * 7]))
                continue
            rest = [f"{row['padded_share']:.1%}", str(row["replays"]), str(sum(row["misses"].values())), str(row["graphs"])]
            rest += [f"{row['graph_bytes'] / 2**20:.0f}", f"{row['capture_s']:.1f}", f"{row['difference']:.4f}"]
            lines.append(line([row["configuration"], *times, *rest]))
        ladders = {row["configuration"].split(", ")[1]: row["ladder"] for row in content["rows"] if "ladder" in row}
        lines += ["", *[f"Ladder, {name}: {', '.join(map(str, ladder))}." for name, ladder in ladders.items()], ""]
        lines += head(["host time of one call, ms", "`execute`", "launching its graphs", "beyond", "replays"])
        for row in content["host"]:
            cells = [f"{row[name]:.3f}" for name in ("execute_host_ms", "launch_host_ms", "beyond_ms")]
            lines.append(line([row["case"], *cells, f"{row['replays_per_call']:g}"]))
        lines += ["", content["note"], ""] if "note" in content else [""]
    return "\n".join(lines)


def models_tables(contents: list[Row]) -> str:
    """Every architecture, one image: the model as shipped, and accelerated."""
    lines: list[str] = []
    for content in contents:
        lines += [conditions(content), ""]
        titles = ["model", "image", "eager as shipped, ms", "accelerated, ms", "ratio", "graphs", "MiB of graphs", "set-up s"]
        lines += head([*titles, "difference"])
        for row in content["models"]:
            if "error" in row:
                lines.append(line([row["model"], *["-"] * (len(titles) - 1), f"failed: {row['error'][:80]}"]))
                continue
            times = [milliseconds(row["eager_ms"]), milliseconds(row["accelerated_ms"])]
            ratio = f"{row['eager_ms'] / row['accelerated_ms']:.1f}"
            rest = [str(row["graphs"]), f"{row['graph_bytes'] / 2**20:.0f}", f"{row['setup_s']:.1f}", f"{row['difference']:.4f}"]
            lines.append(line([row["model"], row["image"], *times, ratio, *rest]))
        lines += ["", content["note"], ""] if "note" in content else [""]
    return "\n".join(lines)


def dense_tables(contents: list[Row]) -> str:
    """Photographs of native sizes through a dense tower, one by one and packed."""
    lines: list[str] = []
    for content in contents:
        lines += [conditions(content), ""]
        lines += [f"{content['photos']} photographs of {content['sizes']} sizes, {content['patches']} patches.", ""]
        titles = ["form", "dtype", "all photographs, ms", "set-up s", "MiB reserved", "graphs", "worst token's difference"]
        lines += head([*titles, "neighbours as in eager"])
        for row in content["rows"]:
            if "error" in row:
                lines.append(line([row["peer"], row["dtype"], *["-"] * (len(titles) - 2), f"failed: {row['error'][:80]}"]))
                continue
            cells = [row["peer"], row["dtype"], milliseconds(row["ms"]), f"{row['setup_s']:.1f}"]
            cells += [f"{row['reserved_bytes'] / 2**20:.0f}", str(row.get("graphs", "-")), f"{row['difference']:.1e}"]
            lines.append(line([*cells, "yes" if row["neighbours_as_eager"] else "no"]))
        lines += ["", content["note"], ""] if "note" in content else [""]
    return "\n".join(lines)


def updated(page: str, results: list[Result], others: dict[str, list[Row]], bench: list[Path]) -> str:
    """A page with its tables made anew."""
    made = {"tables": tables(results), "summary": summary(results), "runtime": runtime_tables(others.get("runtime", []))}
    made |= {"models": models_tables(others.get("models", [])), "dense": dense_tables(others.get("dense", []))}
    made |= {"bench": bench_tables(bench), "bench summary": bench_summary(bench)}
    for marker, content in made.items():
        text = f"<!-- {marker} -->\n\n{content.rstrip()}\n\n<!-- end -->"
        page = re.sub(rf"<!-- {marker} -->\n.*?<!-- end -->", lambda _, text=text: text, page, flags=re.DOTALL)
    return page


def main() -> None:
    """Print the tables, or write them into pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", nargs="+", type=Path, default=[], help="pages whose tables are made anew")
    options = parser.parse_args()
    contents = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.files)}
    results = [Result(path) for path, content in contents.items() if "kind" not in content]
    bench = [path for path, content in contents.items() if content.get("kind") == KIND]
    others: dict[str, list[Row]] = {}
    for content in contents.values():
        if "kind" in content:
            others.setdefault(content["kind"], []).append(content)
    if not options.into:
        print(tables(results))
        print(summary(results))
        print(runtime_tables(others.get("runtime", [])))
        print(models_tables(others.get("models", [])))
        print(dense_tables(others.get("dense", [])))
        print(bench_tables(bench))
    for page in options.into:
        page.write_text(updated(page.read_text(encoding="utf-8"), results, others, bench), encoding="utf-8")


if __name__ == "__main__":
    main()
