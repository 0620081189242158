"""The Prometheus collector: every number of every living manager, under stable names, also while traffic runs."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from vit_compile.errors import MissingDependencyError
from vit_compile.runtime.metrics import EncoderMetricsCollector
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.stats import Skip

prometheus_client = pytest.importorskip("prometheus_client")


class Manager:
    """As much of a manager as a collector sees."""

    def __init__(self) -> None:
        self.statistics = EncoderStatistics(0)

    def snapshot(self) -> dict[str, Any]:
        return self.statistics.snapshot()


class Unreferable:
    """Cannot be referenced weakly."""

    __slots__ = ("statistics",)

    def __init__(self) -> None:
        self.statistics = EncoderStatistics(0)

    def snapshot(self) -> dict[str, Any]:
        return self.statistics.snapshot()


def busy() -> Manager:
    """A manager with one of everything."""
    manager = Manager()
    statistics = manager.statistics
    statistics.captured("main", 128, ("wide", 2), nbytes=1000, seconds=1.5)
    statistics.captured("main", 64, ("wide", 2), nbytes=500, seconds=0.5)
    statistics.skipped("main", 256, ("wide", 2), Skip("out-of-memory", "256"))
    statistics.replay("main", 128, ("wide", 2), items=3, tokens=96)
    statistics.eager("main", "too-large", items=1, tokens=300)
    statistics.finished(4)
    return manager


def scraped(managers: Mapping[str, Any]) -> dict[str, float]:
    """Samples of the text that Prometheus gets, by name and labels as they are written there."""
    registry = prometheus_client.CollectorRegistry()
    EncoderMetricsCollector(managers).register(registry)
    text = prometheus_client.generate_latest(registry).decode()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs), "a series twice"
    return {name: float(value) for name, value in pairs}


def test_every_number_is_in_the_text() -> None:
    """Exactly these series, with these values, for one manager."""
    manager = busy()
    assert scraped({"vision": manager}) == {
        'vit_compile_encoder_items_total{encoder="vision"}': 4,
        'vit_compile_encoder_graph_hits_total{encoder="vision"}': 3,
        'vit_compile_encoder_graph_misses_total{encoder="vision",reason="too-large"}': 1,
        'vit_compile_encoder_tokens_total{encoder="vision",kind="replayed"}': 96,
        'vit_compile_encoder_tokens_total{encoder="vision",kind="eager"}': 300,
        'vit_compile_encoder_tokens_total{encoder="vision",kind="padding"}': 32,
        'vit_compile_encoder_replays_total{axis_keys="wide,2",encoder="vision",path="main",token_budget="128"}': 1,
        'vit_compile_encoder_replays_total{axis_keys="wide,2",encoder="vision",path="main",token_budget="64"}': 0,
        'vit_compile_encoder_capture_seconds_total{encoder="vision"}': 2.0,
        'vit_compile_encoder_graph_bytes{encoder="vision"}': 1500,
        'vit_compile_encoder_graphs{encoder="vision"}': 2,
        'vit_compile_encoder_hit_ratio{encoder="vision"}': 0.75,
        'vit_compile_encoder_padded_ratio{encoder="vision"}': 0.25,
    }


def test_what_only_grows_is_a_counter() -> None:
    """Totals are counters, what goes up and down is a gauge; each has a text, and each family comes once for all managers."""
    first, second = busy(), busy()
    families = list(EncoderMetricsCollector({"a": first, "b": second}).collect())
    assert len({family.name for family in families}) == len(families) == 10
    assert all(family.documentation for family in families)
    for family in families:
        assert {sample.labels["encoder"] for sample in family.samples} == {"a", "b"}
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)


def test_a_dead_manager_disappears() -> None:
    """The collector keeps no manager alive, in no scrape either; the others stay."""
    managers = {"gone": busy(), "here": busy()}
    registry = prometheus_client.CollectorRegistry()
    collector = EncoderMetricsCollector(managers)
    collector.register(registry)
    assert b'encoder="gone"' in prometheus_client.generate_latest(registry)
    scrape = iter(collector.collect())
    next(scrape)
    watched = weakref.ref(managers.pop("gone"))
    gc.collect()
    assert watched() is None
    text = prometheus_client.generate_latest(registry)
    assert b'encoder="gone"' not in text
    assert b'encoder="here"' in text
    remaining = weakref.ref(managers.pop("here"))
    gc.collect()
    assert remaining() is None
    assert b"encoder=" not in prometheus_client.generate_latest(registry)


def test_what_cannot_be_referenced_weakly_is_held() -> None:
    """Its numbers stay in the output."""
    collector = EncoderMetricsCollector({"slotted": Unreferable()})
    gc.collect()
    samples = [sample for family in collector.collect() for sample in family.samples]
    assert {sample.labels["encoder"] for sample in samples} == {"slotted"}


def test_keys_that_look_alike_share_a_series() -> None:
    """Prometheus refuses a scrape with a series twice: 1 and "1" are one label, and their replays are added."""
    manager = Manager()
    for axis_key, times in ((1, 2), ("1", 3)):
        manager.statistics.captured("main", 64, (axis_key,), nbytes=1, seconds=0.0)
        for _ in range(times):
            manager.statistics.replay("main", 64, (axis_key,), items=1, tokens=1)
    series = 'vit_compile_encoder_replays_total{axis_keys="1",encoder="vision",path="main",token_budget="64"}'
    assert scraped({"vision": manager})[series] == 5


def test_registering_and_taking_out() -> None:
    """A registry takes one collector; registering asks no manager; `unregister` undoes it everywhere and may be repeated."""

    class NotYet:
        def snapshot(self) -> dict[str, Any]:
            raise AssertionError("asked at registration")

    manager = NotYet()
    registries = [prometheus_client.CollectorRegistry(auto_describe=True) for _ in range(2)]
    collector = EncoderMetricsCollector({"vision": manager})
    for registry in registries:
        collector.register(registry)
    with pytest.raises(ValueError, match="vit_compile_encoder_items"):
        EncoderMetricsCollector({}).register(registries[0])
    collector.unregister()
    for registry in registries:
        assert prometheus_client.generate_latest(registry) == b""
        EncoderMetricsCollector({}).register(registry)
    collector.unregister()


def test_the_default_registry() -> None:
    """Without an argument it is the one that /metrics endpoints serve."""
    manager = busy()
    collector = EncoderMetricsCollector({"vision": manager})
    collector.register()
    try:
        assert prometheus_client.REGISTRY.get_sample_value("vit_compile_encoder_items_total", {"encoder": "vision"}) == 4
    finally:
        collector.unregister()
    assert prometheus_client.REGISTRY.get_sample_value("vit_compile_encoder_items_total", {"encoder": "vision"}) is None


def test_scraping_while_traffic_runs() -> None:
    """Graphs come and go, reasons appear: every scrape works, adds up, and no counter of a scrape runs backwards."""
    manager = Manager()
    done = threading.Event()
    failures: list[BaseException] = []

    def traffic() -> None:
        try:
            for round_ in itertools.count():
                if done.is_set():
                    return
                budget = 64 + round_ % 50
                manager.statistics.captured("main", budget, (), nbytes=1, seconds=0.0)
                manager.statistics.replay("main", budget, (), items=1, tokens=1)
                manager.statistics.eager("main", ("too-large", "disabled", "train-mode")[round_ % 3], items=1, tokens=1)
                if round_ % 70 == 0:
                    manager.statistics.cleared()
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        before = 0.0
        for _ in range(50):
            samples = scraped({"vision": manager})
            hits = samples['vit_compile_encoder_graph_hits_total{encoder="vision"}']
            replayed = samples['vit_compile_encoder_tokens_total{encoder="vision",kind="replayed"}']
            assert hits == replayed >= before
            before = hits
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert before > 0
    assert failures == []


def test_without_prometheus_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a collector is made, not when the module is imported and not at the first scrape."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'vit_compile\[metrics\]'"):
        EncoderMetricsCollector({})
