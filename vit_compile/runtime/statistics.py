"""`EncoderStatistics`: what an encoder manager counts, and the one line that it logs now and then.

The unit of a hit and of a miss is one item on one path: a hit was done by a replay, a miss eagerly, for a reason. An item that
has nothing on a path is neither there. Every total is the sum of what is kept per graph and per reason, so totals and parts
cannot disagree. Every method may be called from any thread. Nothing here needs torch, and nothing here decides anything.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vit_compile.stats import SKIP_CODES, Skip

logger = logging.getLogger("vit_compile")

GraphKey: TypeAlias = tuple[str, int, tuple[Hashable, ...]]
"""Path, token budget and axis keys of one graph."""


@dataclass(slots=True)
class _Work:
    """What one graph, or one reason on one path, has done since the last reset."""

    runs: int = 0
    items: int = 0
    tokens: int = 0

    def add(self, items: int, tokens: int) -> None:
        self.runs += 1
        self.items += items
        self.tokens += tokens


@dataclass(slots=True)
class _Graph:
    """A graph that is held now."""

    nbytes: int
    capture_seconds: float
    predicted_ms: float | None = None
    eager_ms: float | None = None


class EncoderStatistics:
    """Counts of one encoder manager.

    Work is kept by graph key, so a graph that is captured again goes on counting where it was.

    Args:
        log_every: a line is logged each time the number of items served reaches a multiple of this. 0: never.
    """

    def __init__(self, log_every: int) -> None:
        assert log_every >= 0, f"log_every={log_every}: expected 0 or more"
        self.log_every = log_every
        # Re-entrant: a signal handler may ask for a snapshot while the main thread is counting.
        self._lock = threading.RLock()
        self._replayed: defaultdict[GraphKey, _Work] = defaultdict(_Work)
        self._missed: defaultdict[tuple[str, str], _Work] = defaultdict(_Work)
        self._graphs: dict[GraphKey, _Graph] = {}
        self._not_captured: dict[GraphKey, Skip] = {}
        self._calls = 0
        self._items = 0
        self._seconds = 0.0
        self._recaptures = 0
        self._capture_seconds = 0.0

    def replay(self, path: str, token_budget: int, axis_keys: tuple[Hashable, ...], *, items: int, tokens: int) -> None:
        """Count one replay: `items` hits, `tokens` real tokens, and the rest of the budget as padding.

        Counted too where the graph was cleared meanwhile: the items were served.
        """
        assert 0 <= tokens <= token_budget, f"{tokens} tokens in a replay of {token_budget}"
        with self._lock:
            self._replayed[path, token_budget, axis_keys].add(items, tokens)

    def eager(self, path: str, reason: str, *, items: int, tokens: int) -> None:
        """Count `items` misses on a path, and their tokens, under a reason of `SKIP_CODES`."""
        assert reason in SKIP_CODES, f"unknown skip code {reason!r}"
        with self._lock:
            self._missed[path, reason].add(items, tokens)

    def finished(self, items: int, seconds: float | None = None) -> None:
        """Count one call that served `items`, and log the line if that reached or passed a multiple of `log_every`.

        Args:
            items: of the request.
            seconds: host time of the call. None: not measured.
        """
        with self._lock:
            before = self._items
            self._calls += 1
            self._items += items
            self._seconds += seconds or 0.0
            due = self.log_every > 0 and before // self.log_every != self._items // self.log_every
            if not due or not logger.isEnabledFor(logging.INFO):
                return
            traffic = self._traffic()
        logger.info("%s", _line(traffic))  # after the lock: a slow handler holds up nobody else's counting

    def captured(self, path: str, token_budget: int, axis_keys: tuple[Hashable, ...], *, nbytes: int, seconds: float) -> None:
        """A graph is held now, takes this much device memory, and took this long."""
        key = (path, token_budget, axis_keys)
        with self._lock:
            self._not_captured.pop(key, None)
            self._graphs[key] = _Graph(nbytes, seconds)
            self._capture_seconds += seconds

    def skipped(self, path: str, token_budget: int, axis_keys: tuple[Hashable, ...], skip: Skip) -> None:
        """A graph was not captured, and is not held, for this reason."""
        key = (path, token_budget, axis_keys)
        with self._lock:
            self._graphs.pop(key, None)
            self._not_captured[key] = skip

    def recaptured(self) -> None:
        """All graphs were captured anew, since the weights are others."""
        with self._lock:
            self._recaptures += 1

    def cleared(self) -> None:
        """No graph is held any more, and why some never were is forgotten; what they did stays counted."""
        with self._lock:
            self._graphs.clear()
            self._not_captured.clear()

    def calibrated(
        self, path: str, token_budget: int, axis_keys: tuple[Hashable, ...], ms: float, eager_ms: float | None = None
    ) -> None:
        """One replay of a graph was measured to take this long, and so many tokens would take `eager_ms` eagerly.

        Without effect where the graph is not held.
        """
        with self._lock:
            graph = self._graphs.get((path, token_budget, axis_keys))
            if graph is not None:
                graph.predicted_ms, graph.eager_ms = ms, eager_ms

    def cumulative(self, token_budgets: Sequence[int]) -> dict[str, Any]:
        """The documented summary: graph_hits, graph_misses, hit_rate, num_budgets and token_budgets.

        Args:
            token_budgets: the manager's ladder.
        """
        with self._lock:
            traffic = self._traffic()
        return {
            "graph_hits": traffic["graph_hits"],
            "graph_misses": traffic["graph_misses"],
            "hit_rate": traffic["hit_rate"],
            "num_budgets": len(token_budgets),
            "token_budgets": list(token_budgets),
        }

    def snapshot(self) -> dict[str, Any]:
        """Everything at one moment: a copy in plain dicts, lists, strings and numbers, fit for JSON.

        Traffic, zero after `reset`:

        - `calls`, `items`: of `execute`; `seconds`: host time of the calls that were timed.
        - `graph_hits`, `graph_misses`: items on paths; `hit_rate`: hits in both, 0.0 when there are none.
        - `miss_reasons`: {code: items}, which add up to `graph_misses`.
        - `misses`: the same by path: [{`path`, `code`, `items`, `tokens`}].
        - `tokens`: {`replayed`, `eager`, `padding`}; `padded_share`: padding in the rows that were replayed, 0.0 when none were.
        - `replays`: of all graphs, those included that are not held any more.

        Graphs, untouched by `reset`:

        - `recaptures`; `capture_seconds`: of all captures so far, also of graphs that are gone.
        - `graph_bytes`: of the graphs held now.
        - `graphs`: held now: [{`path`, `token_budget`, `axis_keys`, `nbytes`, `capture_seconds`, `predicted_ms`, `eager_ms`,
          `replays`, `items`, `tokens`, `padded_share`}]; axis keys as strings, the two times (of a replay, and of as many tokens
          eagerly: their quotient is what a full replay gains) None where they were not measured, and the last
          four are traffic.
        - `not_captured`: [{`path`, `token_budget`, `axis_keys`, `code`, `detail`}].
        """
        with self._lock:
            snapshot = self._traffic()
            snapshot["recaptures"] = self._recaptures
            snapshot["capture_seconds"] = self._capture_seconds
            snapshot["graph_bytes"] = sum(graph.nbytes for graph in self._graphs.values())
            snapshot["graphs"] = [self._described(key, graph) for key, graph in self._graphs.items()]
            snapshot["not_captured"] = [
                {**_named(key), "code": skip.code, "detail": skip.detail} for key, skip in self._not_captured.items()
            ]
        return snapshot

    def reset(self) -> None:
        """Set the traffic to zero. What is known of graphs and captures stays."""
        with self._lock:
            self._replayed.clear()
            self._missed.clear()
            self._calls = 0
            self._items = 0
            self._seconds = 0.0

    def _traffic(self) -> dict[str, Any]:
        """The first half of a snapshot. The caller holds the lock."""
        hits = sum(work.items for work in self._replayed.values())
        replayed = sum(work.tokens for work in self._replayed.values())
        padding = sum(budget * work.runs - work.tokens for (_, budget, _), work in self._replayed.items())
        reasons: Counter[str] = Counter()
        for (_, reason), work in self._missed.items():
            reasons[reason] += work.items
        misses = reasons.total()
        return {
            "calls": self._calls,
            "items": self._items,
            "seconds": self._seconds,
            "graph_hits": hits,
            "graph_misses": misses,
            "hit_rate": _share(hits, hits + misses),
            "miss_reasons": dict(reasons),
            "misses": [
                {"path": path, "code": reason, "items": work.items, "tokens": work.tokens}
                for (path, reason), work in self._missed.items()
            ],
            "tokens": {
                "replayed": replayed,
                "eager": sum(work.tokens for work in self._missed.values()),
                "padding": padding,
            },
            "padded_share": _share(padding, replayed + padding),
            "replays": sum(work.runs for work in self._replayed.values()),
        }

    def _described(self, key: GraphKey, graph: _Graph) -> dict[str, Any]:
        """One graph of a snapshot. The caller holds the lock."""
        work = self._replayed.get(key, _Work())
        rows = work.runs * key[1]
        return {
            **_named(key),
            "nbytes": graph.nbytes,
            "capture_seconds": graph.capture_seconds,
            "predicted_ms": graph.predicted_ms,
            "eager_ms": graph.eager_ms,
            "replays": work.runs,
            "items": work.items,
            "tokens": work.tokens,
            "padded_share": _share(rows - work.tokens, rows),
        }


def _named(key: GraphKey) -> dict[str, Any]:
    """A graph's key for a snapshot."""
    path, token_budget, axis_keys = key
    return {"path": path, "token_budget": token_budget, "axis_keys": [str(axis_key) for axis_key in axis_keys]}


def _share(part: int, whole: int) -> float:
    """0.0 of nothing."""
    return part / whole if whole else 0.0


def _line(traffic: dict[str, Any]) -> str:
    """What is logged: totals since the last reset."""
    tokens = traffic["tokens"]
    reasons = ", ".join(f"{code} {count}" for code, count in sorted(traffic["miss_reasons"].items()))
    timed = f" ({traffic['seconds']:.3f} s)" if traffic["seconds"] else ""
    return (
        f"encoder: {traffic['items']} items in {traffic['calls']} calls{timed}; "
        f"{traffic['graph_hits']} hits, {traffic['graph_misses']} misses (hit rate {traffic['hit_rate']:.1%}); "
        f"{traffic['replays']} replays, {traffic['padded_share']:.1%} padding; "
        f"tokens: {tokens['replayed']} replayed, {tokens['eager']} eager, {tokens['padding']} padding; "
        f"misses: {reasons or 'none'}"
    )
