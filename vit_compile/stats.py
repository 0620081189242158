"""What happened, as values: skips, counters and the record of the last call.

Everything the package decides (a capture, a replay, a fallback) is counted here, so that tests and users can state
exactly what a block of code causes. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vit_compile.errors import CounterError, OptionError, SkipError

logger = logging.getLogger("vit_compile")

SKIP_CODES: dict[str, str] = {
    "gradients": "gradients are wanted: the whole graph runs through the plain compiler and stays differentiable",
    "rng": "the graph draws random numbers (dropout in train mode, for example), which a replay would freeze",
    "host-read": "the graph reads a tensor on the host (.item(), .tolist(), nonzero), which a capture forbids",
    "host-device-copy": "the graph copies between host and device, which a capture would freeze or forbid",
    "input-mutation": "the graph writes into one of its inputs, which a replay on its own buffers would lose",
    "input-layout": "an input overlaps itself in memory (an expanded tensor), so that no buffer can stand in for it",
    "unsupported-value": "a value other than a tensor or an integer crosses between pieces",
    "attention-kernel": "the attention kernel that was asked for cannot serve a graph, which takes the default one",
    "attention-forbids-full": "an attention op plans on the host, so that it cannot be part of one captured graph",
    "splitting-op-unmatched": "a name in splitting_ops matches nothing in the graph",
    "too-large": "the input has more rows or tokens than the largest capture size",
    "not-a-budget": 'padding="exact" and the input\'s size is not a capture size',
    "padding-unsafe": "padded rows were seen to change real rows, so only exact sizes replay",
    "padding-unproved": "there was no way to pad this graph's inputs, so only exact sizes replay",
    "duck-shape": "one symbol stands for two different counts, so that neither can be padded alone",
    "guard-forbids-size": "the traced graph's guards do not hold at the capture size",
    "row-scale-changed": "two inputs no longer have the same ratio of rows as when the graph was traced",
    "max-graphs": "max_graphs capture sizes are held already",
    "max-graph-bytes": "the capture would take more than max_graph_bytes",
    "out-of-memory": "the device ran out of memory while capturing this size",
    "capture-failed": "capturing this size failed",
    "mode-none": 'mode="none" captures nothing',
    "not-captured": "the encoder's graphs were not captured yet, or were cleared",
    "disabled": "graphs are switched off in the encoder's configuration",
    "train-mode": "the encoder is in train mode, in which a graph would freeze dropout and statistics",
    "too-many-frames": "an item has more frames than a batch may have",
    "too-many-segments": "a batch has more attention segments than the graph has room for",
    "no-axis-key": "no key of a capture axis fits the batch",
    "own-call": "an accelerated model's call asked for more than features, or for what the encoder refuses: its own code answers",
    "eager-cheaper": "running this batch eagerly was predicted to be faster than any graph",
}


@dataclass(frozen=True, slots=True)
class Skip:
    """Why something was not captured, not padded or not replayed."""

    code: str
    """One of `SKIP_CODES`."""

    detail: str
    """What it concerns: the op, the piece, the size."""

    def __post_init__(self) -> None:
        assert self.code in SKIP_CODES, f"unknown skip code {self.code!r}"

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """How one call of a compiled graph was served."""

    kind: str
    """"exact" or "padded" replay; "uncaptured": compiled pieces without a graph; "plain": the plain compiled path."""

    rows: int | None
    """Real rows of the call, where the graph has a row dimension."""

    graph: str | None
    """Label of the captured graph that served it, such as "full 256 rows"; None when there was none."""

    reason: str | None
    """Why there was no graph; None when there was one."""

    captured_now: bool
    """This call also captured the graph."""


COUNTS = (
    "graphs_seen",
    "pieces",
    "distinct_pieces",
    "piece_compiles",
    "captures",
    "recaptures",
    "exact_replays",
    "padded_replays",
    "uncaptured_calls",
    "plain_calls",
    "attention_calls_outside_graphs",
)


class Counters:
    """Process-wide counters with `expect()`; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()
        self._sites: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` events of one of `COUNTS`."""
        assert name in COUNTS, f"unknown counter {name!r}"
        with self._lock:
            self._counts[name] += amount

    def add_skip(self, code: str) -> None:
        """Count one skip."""
        with self._lock:
            self._skips[code] += 1

    def add_sites(self, name: str, amount: int) -> None:
        """Count sites that the graph pass `name` rewrote."""
        with self._lock:
            self._sites[name] += amount

    def __getattr__(self, name: str) -> int:
        if name in COUNTS:
            with self._lock:
                return self._counts[name]
        raise AttributeError(f"no counter {name!r}; there are: {', '.join(COUNTS)}, skips")

    @property
    def skips(self) -> dict[str, int]:
        """Skips by code, a copy."""
        with self._lock:
            return {code: count for code, count in self._skips.items() if count}

    @property
    def pass_sites(self) -> dict[str, int]:
        """Sites that each graph pass rewrote, by its name, also where there were none; a copy."""
        with self._lock:
            return dict(self._sites)

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        """All counts by name, the skips by code under "skips", rewritten sites under "pass_sites"; a copy."""
        with self._lock:
            counts: dict[str, int | dict[str, int]] = {name: self._counts[name] for name in COUNTS}
            counts["skips"] = {code: count for code, count in self._skips.items() if count}
            counts["pass_sites"] = dict(self._sites)
            return counts

    def reset(self) -> None:
        """Set everything to zero."""
        with self._lock:
            self._counts.clear()
            self._skips.clear()
            self._sites.clear()

    @contextmanager
    def expect(self, *, skips: dict[str, int] | None = None, **deltas: int) -> Iterator[None]:
        """Raise `CounterError` unless the block changes the named counters by exactly these amounts.

        Args:
            skips: expected changes by skip code; codes that are not named must not change. None: skips are not looked at.
            **deltas: expected changes by counter name; counters that are not named are not looked at.
        """
        for name in deltas:
            if name not in COUNTS:
                raise OptionError(f"no counter {name!r}; there are: {', '.join(COUNTS)}, skips.")
            if isinstance(deltas[name], bool) or not isinstance(deltas[name], int):
                raise OptionError(f"{name}={deltas[name]!r}: expected an integer, the change of the counter.")
        before, skips_before = {name: getattr(self, name) for name in deltas}, self.skips
        yield
        wrong = [
            f"{name}: expected {delta:+d}, got {getattr(self, name) - before[name]:+d}"
            for name, delta in deltas.items()
            if getattr(self, name) - before[name] != delta
        ]
        if skips is not None:
            after = self.skips
            for code in sorted(set(after) | set(skips)):
                got, want = after.get(code, 0) - skips_before.get(code, 0), skips.get(code, 0)
                if got != want:
                    wrong.append(f"skip {code}: expected {want:+d}, got {got:+d}")
        if wrong:
            raise CounterError("; ".join(wrong))


counters = Counters()
_local = threading.local()
_logged: set[str] = set()


def skip_error(skip: Skip) -> SkipError:
    """What is raised instead of a fallback under `strict`."""
    return SkipError(f"{skip} ({SKIP_CODES[skip.code]}; strict=True)")


def report_skip(skip: Skip, *, strict: bool) -> None:
    """Count a skip, log it once per code and process, and raise it under `strict`."""
    counters.add_skip(skip.code)
    if strict:
        raise skip_error(skip)
    if skip.code not in _logged:
        _logged.add(skip.code)
        logger.warning("skip %s (%s); further ones of this kind are only counted", skip, SKIP_CODES[skip.code])


def record_call(record: CallRecord) -> None:
    """Keep the record of this thread's last call."""
    _local.last = record


def forget_call() -> None:
    """Drop the record of this thread's last call: what comes next may not leave one."""
    _local.last = None


def last_call() -> CallRecord | None:
    """How this thread's last call of a compiled graph was served; None before the first."""
    last: CallRecord | None = getattr(_local, "last", None)
    return last
