"""One peer on all cases: set up, warmed up, timed, compared with eager, and given back.

Of each case, in this order:
1. Every request once, waited for before the next: wall time and host time. The layouts are as new to the peer as the traffic
   makes them; nothing but warm-up requests came before.
2. The same requests again without waiting in between: throughput.
3. Some of them once more, whose features are compared with eager's.

Between ranks, requests start together and the slowest rank counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch

from vit_compile.planning.traffic import Request
from vit_compile.planning.units import Grid
from vit_compile.tools.bench.cache import cache_for
from vit_compile.tools.bench.cases import Case, Traffic
from vit_compile.tools.bench.checking import References, difference, numbers
from vit_compile.tools.bench.counting import counted_between, stats_of
from vit_compile.tools.bench.flops import FlopFormula
from vit_compile.tools.bench.peer import Peer, PeerSpec, Setup
from vit_compile.tools.bench.peers_graphs import synchronize
from vit_compile.tools.bench.ranks import Ranks
from vit_compile.tools.bench.results import FAILED, UNAVAILABLE, Latencies, Row
from vit_compile.tools.bench.settings import BenchSettings
from vit_compile.tools.bench.workload import Inputs, Pixels, item_grids

LEAST_REQUESTS = 3
"""Of each case, however long they take."""
MAX_WAITING_BYTES = 4 << 30
"""Of inputs that lie ready for the requests that nobody waits for."""
REPLAYS_FROM = 3
"""Calls that tell which graphs serve a repeated request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all peers share."""

    settings: BenchSettings
    setup: Setup
    traffic: Traffic
    pixels: Pixels
    references: References
    flops: FlopFormula
    peak_flops: float | None
    """FLOP/s."""
    ranks: Ranks


def measure(bench: Bench, spec: PeerSpec) -> list[Row]:
    """A row for each case; never raises for what goes wrong inside a peer."""
    reason = spec.refuses(bench.setup)
    if reason is None and bench.ranks.size > 1 and not spec.in_groups:
        reason = "runs in one process: ranks share the items of a request through the manager only"
    if reason is not None:
        return [_without(spec, case, UNAVAILABLE, reason) for case in bench.traffic.cases]
    try:
        with torch.no_grad(), cache_for(bench.settings.cache):
            return _measured(bench, spec)
    except Exception as error:  # a peer that breaks is a result, and the others are still wanted
        if bench.ranks.size > 1:  # the other ranks would wait for this one
            raise
        text = " ".join(str(error).split())[:300]
        return [_without(spec, case, FAILED, f"{type(error).__name__}: {text}") for case in bench.traffic.cases]
    finally:
        _clean()


def _without(spec: PeerSpec, case: Case, status: str, reason: str) -> Row:
    return Row(peer=spec.name, case=case.label, ours=spec.ours, status=status, reason=reason)


def _measured(bench: Bench, spec: PeerSpec) -> list[Row]:
    _clean()
    before, started = _reserved(bench), time.perf_counter()
    peer = spec.make(bench.setup)
    try:
        synchronize(bench.setup.tower.device)
        setup_s = time.perf_counter() - started
        startup_s = setup_s + _warm_up(bench, spec, peer)
        gc.collect()
        # Peers that hold nothing can come out below zero: the allocator keeps whole blocks.
        start: dict[str, Any] = {"setup_s": setup_s, "startup_s": startup_s, "reserved_bytes": max(0, _reserved(bench) - before)}
        rows = [replace(_case_row(bench, spec, peer, case), **start) for case in bench.traffic.cases]
    finally:
        peer.close()
    del peer
    if spec.compiles and bench.settings.warm_start:
        warm = _warm_setup(bench, spec)
        rows = [replace(row, warm_setup_s=warm) for row in rows]
    return rows


def _warm_up(bench: Bench, spec: PeerSpec, peer: Peer) -> float:
    """Seconds of serving what comes before the measured requests."""
    served: Iterable[Inputs] = bench.setup.warmup
    if not bench.traffic.is_single:
        if spec.max_requests is not None:
            served = bench.setup.warmup[: len(bench.setup.warmup) // 2]  # each of them records
        if spec.rehearses:
            served = chain(served, _made(bench, *bench.traffic.cases))
    seconds = 0.0
    for inputs in served:
        prepared = peer.prepare(inputs)
        started = time.perf_counter()
        peer.call(prepared)
        synchronize(bench.setup.tower.device)
        seconds += time.perf_counter() - started
    return seconds


def _made(bench: Bench, *cases: Case) -> Iterator[Inputs]:
    return (bench.pixels.inputs(request, number) for case in cases for number, request in enumerate(case.requests))


def _warm_setup(bench: Bench, spec: PeerSpec) -> float:
    """Seconds of setting up once more, with the cache that the first time left; first calls count where they compile."""
    _clean()
    started = time.perf_counter()
    peer = spec.make(bench.setup)
    try:
        synchronize(bench.setup.tower.device)
        return time.perf_counter() - started + (0.0 if spec.ours else _warm_up(bench, spec, peer))
    finally:
        peer.close()


def _case_row(bench: Bench, spec: PeerSpec, peer: Peer, case: Case) -> Row:
    wanted = len(case.requests)
    if spec.max_requests is not None and not bench.traffic.is_single:
        wanted = min(wanted, spec.max_requests)
    stats = stats_of(peer)
    walls, hosts = _one_by_one(bench, peer, case, wanted)
    counted = counted_between(stats, stats_of(peer), peer)
    latencies = Latencies.of(walls)
    throughput = _back_to_back(bench, peer, case.requests[: len(walls)], latencies.mean_ms)
    done = [item_grids(request, bench.setup.tower)[0] for request in case.requests[: len(walls)]]
    beyond = _beyond_replay(bench, peer, case.requests[0], hosts, walls) if bench.traffic.is_single else {}
    row = Row(
        peer=spec.name,
        case=case.label,
        ours=spec.ours,
        reason=peer.served() if hasattr(peer, "served") else "",
        requests=len(done),
        requests_wanted=len(case.requests),
        images=sum(map(len, done)),
        tokens=sum(bench.setup.tower.tokens(grid) for grids in done for grid in grids),
        mean_ms=latencies.mean_ms,
        p50_ms=latencies.p50_ms,
        p99_ms=latencies.p99_ms,
        host_ms=sum(hosts) / len(hosts),
        host_share=sum(hosts) / sum(walls),
        latencies_ms=tuple(round(wall, 4) for wall in walls),
        **beyond,
        **throughput,
        **counted,
        **_roofline(bench, done, latencies.mean_ms),
    )
    return replace(row, **_checked(bench, peer, case, len(done)))


def _one_by_one(bench: Bench, peer: Peer, case: Case, wanted: int) -> tuple[list[float], list[float]]:
    """Wall and host milliseconds of each request, until the time is over."""
    device, ranks = bench.setup.tower.device, bench.ranks
    walls: list[float] = []
    hosts: list[float] = []
    end = time.perf_counter() + bench.settings.seconds
    with _still_heap():
        for number, request in enumerate(case.requests[:wanted]):
            if ranks.agree(number >= LEAST_REQUESTS and time.perf_counter() > end):
                break
            prepared = peer.prepare(bench.pixels.inputs(request, number))
            synchronize(device)
            ranks.barrier()
            started = time.perf_counter()
            output = peer.call(prepared)
            returned = time.perf_counter()
            synchronize(device)
            walls.append((time.perf_counter() - started) * 1e3)
            hosts.append((returned - started) * 1e3)
            del output
    return ranks.slowest(walls), ranks.slowest(hosts)


def _back_to_back(bench: Bench, peer: Peer, requests: Sequence[Request], expected_ms: float) -> dict[str, Any]:
    """Time and throughput of requests that nobody waits for: as many as half of the time, and the memory, allows."""
    affordable = max(LEAST_REQUESTS, int(bench.settings.seconds * 500 / expected_ms))
    sizes = accumulate(bench.pixels.nbytes(request) for request in requests[:affordable])
    count = max(1, sum(size <= MAX_WAITING_BYTES for size in sizes))
    waiting = [bench.pixels.inputs(request, number) for number, request in enumerate(requests[:count])]
    prepared = [peer.prepare(inputs) for inputs in waiting]
    with _still_heap():
        synchronize(bench.setup.tower.device)
        bench.ranks.barrier()
        started = time.perf_counter()
        for one in prepared:
            peer.call(one)
        synchronize(bench.setup.tower.device)
        (seconds,) = bench.ranks.slowest([time.perf_counter() - started])
    return {
        "back_to_back_ms": seconds * 1e3 / count,
        "images_per_s": sum(len(inputs.grids) for inputs in waiting) / seconds,
        "tokens_per_s": sum(sum(inputs.tokens) for inputs in waiting) / seconds,
    }


def _beyond_replay(bench: Bench, peer: Peer, request: Request, hosts: Sequence[float], walls: Sequence[float]) -> dict[str, Any]:
    """Median host and wall time of a call less those of nothing but its replays; nothing without a manager."""
    if not hasattr(peer, "replay_ms") or bench.ranks.size > 1:
        return {}
    before, prepared = stats_of(peer), peer.prepare(bench.pixels.inputs(request, 0))
    for _ in range(REPLAYS_FROM):
        peer.call(prepared)
    synchronize(bench.setup.tower.device)
    host_ms, wall_ms = peer.replay_ms(before, stats_of(peer), REPLAYS_FROM)
    return {
        "host_beyond_launch_ms": Latencies.of(hosts).p50_ms - host_ms,
        "wall_beyond_replay_ms": Latencies.of(walls).p50_ms - wall_ms,
    }


def _checked(bench: Bench, peer: Peer, case: Case, done: int) -> dict[str, Any]:
    """Largest differences from eager and from float32."""
    worst: list[float] = []
    exact: list[float] = []
    for number in numbers(case, min(bench.settings.check_requests, done), bench.traffic.is_single):
        reference = bench.references.get((case.label, number))
        if reference is None:
            break
        inputs = bench.pixels.inputs(case.requests[number], number)
        got = peer.features(peer.call(peer.prepare(inputs)), inputs)
        worst.append(difference(got, reference.eager))
        if reference.fp32 is not None:
            exact.append(difference(got, reference.fp32))
    if not worst:
        return {}
    within = all(one <= bench.settings.allowed_difference for one in worst)
    found = {"difference": _largest(worst), "within_tolerance": within, "checked_requests": len(worst)}
    return found | ({"difference_fp32": _largest(exact)} if exact else {})


def _largest(values: Sequence[float]) -> float:
    """NaN if there is one."""
    return next((value for value in values if value != value), max(values))


def _roofline(bench: Bench, requests: Sequence[Sequence[Grid]], mean_ms: float) -> dict[str, Any]:
    """Mean time that the needed FLOPs take at the peak, and how far from it the peer is. Ranks share the work."""
    if bench.peak_flops is None:
        return {}
    flops = sum(bench.flops(grids) for grids in requests) / len(requests)
    floor_ms = flops / (bench.peak_flops * bench.ranks.size) * 1e3
    return {"roofline_ms": floor_ms, "roofline_ratio": mean_ms / floor_ms}


@contextmanager
def _still_heap() -> Iterator[None]:
    """Python's collector looks at nothing that was there before, so that the size of this process does not slow it down."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _reserved(bench: Bench) -> int:
    """Bytes that torch's allocator holds, without what it could give back."""
    device = bench.setup.tower.device
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _clean() -> None:
    """What one peer compiled and cached is nothing to the next."""
    import vit_compile

    torch.compiler.reset()
    vit_compile.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
