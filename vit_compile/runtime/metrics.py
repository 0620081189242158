"""`EncoderMetricsCollector`: the statistics of encoder managers, as Prometheus metrics.

Nothing is counted here and traffic pays nothing: each scrape asks every manager for a snapshot and tells its numbers. Needs the
extra `metrics`, which is imported when a collector is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from vit_compile.errors import MissingDependencyError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX = "vit_compile_encoder"

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "items": ("Images and clips served.", ()),
    "graph_hits": ("Items on paths that were done by a replay.", ()),
    "graph_misses": ("Items on paths that were done eagerly, by reason.", ("reason",)),
    "tokens": ("Output tokens: replayed, eager, and the padding of replays.", ("kind",)),
    "replays": ("Replays of each graph that is held.", ("path", "token_budget", "axis_keys")),
    "capture_seconds": ("Time spent capturing graphs.", ()),
}
"""Help and labels by name; every metric has the label `encoder` before these, and a counter's name ends in `_total`."""

_GAUGES = {
    "graph_bytes": "Device memory of the graphs that are held.",
    "graphs": "Graphs that are held.",
    "hit_ratio": "Hits in hits and misses, since the statistics were reset.",
    "padded_ratio": "Padding in the rows that were replayed, since the statistics were reset.",
}


class HasSnapshot(Protocol):
    """What a collector reads: a manager, or its `EncoderStatistics`."""

    def snapshot(self) -> Mapping[str, Any]:
        """As `EncoderStatistics.snapshot` documents it. Called from the thread that scrapes."""
        ...


class EncoderMetricsCollector:
    """Tells Prometheus what encoder managers have counted.

    A manager is not kept alive: once it is gone, its numbers are gone from the output. Only an object that cannot be
    referenced weakly is held. One collector serves all managers of a registry; a second one has the same metric names.

    Args:
        managers: by name, which becomes the label `encoder`.

    Raises:
        MissingDependencyError: prometheus_client is missing.
    """

    def __init__(self, managers: Mapping[str, HasSnapshot]) -> None:
        _require()
        self._managers = {name: _weakly(manager) for name, manager in managers.items()}
        self._registries: list[CollectorRegistry] = []

    def register(self, registry: CollectorRegistry | None = None) -> None:
        """Add the collector to a registry.

        Args:
            registry: None: `prometheus_client.REGISTRY`, which the usual `/metrics` endpoints serve.

        Raises:
            ValueError: by prometheus_client: the registry has such a collector already.
        """
        from prometheus_client import REGISTRY

        chosen = REGISTRY if registry is None else registry
        chosen.register(self)
        self._registries.append(chosen)

    def unregister(self) -> None:
        """Take the collector out of every registry that `register` added it to. May be called again."""
        while self._registries:
            self._registries.pop().unregister(self)

    def describe(self) -> Iterator[Metric]:
        """The metrics without values: a registry looks here for clashes of names, and asks no manager."""
        yield from _families([])

    def collect(self) -> Iterator[Metric]:
        """One family for each metric; the values of one encoder are all of the same moment."""
        yield from _families(self._snapshots())

    def _snapshots(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(name, snapshot) of every manager that is still there."""
        # Apart from the generator, whose frame would keep the last manager alive between two of its values.
        alive = [(name, manager()) for name, manager in self._managers.items()]
        return [(name, manager.snapshot()) for name, manager in alive if manager is not None]


def _require() -> None:
    """Raises `MissingDependencyError` where prometheus_client cannot be imported."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"EncoderMetricsCollector needs prometheus_client ({error}): pip install 'vit_compile[metrics]'."
        ) from error


def _weakly(manager: HasSnapshot) -> Callable[[], HasSnapshot | None]:
    """A weak reference where the object allows one."""
    try:
        return weakref.ref(manager)
    except TypeError:
        return lambda: manager


def _families(snapshots: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    """All metric families, filled from (encoder, snapshot)."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, (text, labels) in _COUNTERS.items():
        counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["encoder", *labels])
        for encoder, snapshot in snapshots:
            for values, number in _counted(name, snapshot).items():
                counter.add_metric([encoder, *values], number)
        yield counter
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["encoder"])
        for encoder, snapshot in snapshots:
            gauge.add_metric([encoder], _gauged(name, snapshot))
        yield gauge


def _counted(name: str, snapshot: Mapping[str, Any]) -> Mapping[tuple[str, ...], float]:
    """A counter's values by label values."""
    match name:
        case "graph_misses":
            return {(code,): count for code, count in snapshot["miss_reasons"].items()}
        case "tokens":
            return {(kind,): count for kind, count in snapshot["tokens"].items()}
        case "replays":
            replays: dict[tuple[str, ...], float] = {}
            for graph in snapshot["graphs"]:
                labels = (graph["path"], str(graph["token_budget"]), ",".join(graph["axis_keys"]))
                # Keys that look alike as text share a series: Prometheus refuses a scrape that has one twice.
                replays[labels] = replays.get(labels, 0) + graph["replays"]
            return replays
        case _:
            return {(): snapshot[name]}


def _gauged(name: str, snapshot: Mapping[str, Any]) -> float:
    """A gauge's value."""
    match name:
        case "graphs":
            return len(snapshot["graphs"])
        case "hit_ratio":
            return float(snapshot["hit_rate"])
        case "padded_ratio":
            return float(snapshot["padded_share"])
        case _:
            return float(snapshot[name])
