"""What an encoder manager counted while it was timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_compile.tools.bench.peer import Peer


def stats_of(peer: Peer) -> Mapping[str, Any] | None:
    """A snapshot of the peer's manager, if it has one."""
    found: Mapping[str, Any] | None = peer.stats() if hasattr(peer, "stats") else None
    return found


def counted_between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, peer: Any) -> dict[str, Any]:
    """What the manager counted in between, and the graphs that it holds."""
    if before is None or after is None:
        return {}
    tokens = {name: after["tokens"][name] - before["tokens"][name] for name in ("replayed", "eager", "padding")}
    reasons = {code: count - before["miss_reasons"].get(code, 0) for code, count in after["miss_reasons"].items()}
    skipped = [graph["code"] for graph in after["not_captured"]]
    computed = tokens["replayed"] + tokens["padding"]
    return {
        "hits": after["graph_hits"] - before["graph_hits"],
        "misses": {code: count for code, count in reasons.items() if count},
        "padded_share": tokens["padding"] / computed if computed else 0.0,
        "eager_tokens": tokens["eager"],
        "replays": after["replays"] - before["replays"],
        "budgets": peer.budgets(),
        "graphs": len(after["graphs"]),
        "not_captured": {code: skipped.count(code) for code in dict.fromkeys(skipped)},
        "graph_bytes": after["graph_bytes"],
        "largest_graph_bytes": max((graph["nbytes"] for graph in after["graphs"]), default=0),
        "phase_seconds": {phase: round(seconds, 3) for phase, seconds in after["phase_seconds"].items()},
        "kernels": {_problem(row): row["kernel"] or "default" for row in after["attention"]},
    }


def _problem(row: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, row["shape"]))
    return f"{shape}, {row['segments']} segments" if row["kind"] == "varlen" else f"{shape}, dense"
