"""The bookkeeping of recordings, with a stand-in for the device: what is kept, for how long, and on which stream."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from vit_compile.backend import cuda
from vit_compile.backend.cuda import Recorder, check_recorded
from vit_compile.errors import CaptureError

DEVICE = torch.device("cpu")


class FakeStream:
    """Orders nothing; identity is all that counts."""

    def __init__(self, *_: Any) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        """Note whom this stream waits for."""
        self.waited_for.append(other)


class FakeGraph:
    """A graph that notes its pool; `empty` makes it warn as one without kernels does."""

    alive: ClassVar[weakref.WeakSet[FakeGraph]] = weakref.WeakSet()
    recording = False
    empty = False

    def __init__(self) -> None:
        self.pool: Any = None
        FakeGraph.alive.add(self)

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        """Start; one at a time, and only in the mode that leaves other threads alone."""
        assert capture_error_mode == "thread_local"
        assert not FakeGraph.recording
        assert not gc.isenabled(), "a collection in the middle of a recording would invalidate it"
        FakeGraph.recording, self.pool = True, pool

    def capture_end(self) -> None:
        """Stop."""
        FakeGraph.recording = False
        if FakeGraph.empty:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything of `torch.cuda` that a recorder touches."""
    caller = FakeStream()
    pools = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: caller)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    cuda._idle_streams.clear()
    FakeGraph.empty = FakeGraph.recording = False
    yield
    cuda._idle_streams.clear()


def record(recorder: Recorder, result: int = 1) -> Any:
    """One recording in a session of its own."""
    with recorder.session():
        return recorder.record(lambda: result)


def test_graphs_of_one_encoder_share_a_pool_and_go_together() -> None:
    """A dropped graph is not destroyed while others of its stream may replay: it would take their cuBLAS workspace along."""
    recorder = Recorder(DEVICE)
    first, value = record(recorder)
    second, _ = record(recorder)
    assert value == 1
    assert first.pool == second.pool
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is not None
    recorder.abandon_pool()
    del second
    gc.collect()
    assert gone() is None
    assert not FakeGraph.alive


def test_a_pool_is_kept_alive_by_a_graph_of_its_own() -> None:
    """Before the first recording there is an anchor in the pool; after `abandon_pool` there is another pool."""
    recorder = Recorder(DEVICE)
    first, _ = record(recorder)
    assert sorted(graph.pool for graph in FakeGraph.alive) == [first.pool, first.pool]
    before = first.pool
    recorder.abandon_pool()
    again, _ = record(recorder)
    assert again.pool != before


@pytest.mark.parametrize("broken", [True, False])
def test_a_recording_that_breaks_off_leaves_the_recorder_usable(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes on, nothing stays in recording mode, and earlier graphs stay. The next recording has a new pool where the
    recording was invalidated; else, as after a lack of memory, the same, in which it finds what the broken one took."""
    recorder = Recorder(DEVICE)
    first, _ = record(recorder)
    end = FakeGraph.capture_end

    def ends_badly(graph: FakeGraph) -> None:
        end(graph)
        raise RuntimeError("operation failed due to a previous error during capture")

    def breaks() -> None:
        if broken:
            monkeypatch.setattr(FakeGraph, "capture_end", ends_badly)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), recorder.session():
        recorder.record(breaks)
    monkeypatch.setattr(FakeGraph, "capture_end", end)
    assert not FakeGraph.recording
    assert gc.isenabled()
    second, _ = record(recorder)
    assert (second.pool != first.pool) == broken
    assert first in FakeGraph.alive


def test_an_empty_graph_is_told() -> None:
    """No kernel: None instead of a graph, which `check_recorded` turns into an error (hazard 23)."""
    recorder = Recorder(DEVICE)
    record(recorder)
    FakeGraph.empty = True
    graph, _ = record(recorder)
    assert graph is None
    with pytest.raises(CaptureError, match="empty"):
        check_recorded(graph, "a piece")


def test_live_recorders_have_streams_of_their_own_and_dead_ones_hand_theirs_on() -> None:
    """A stream keeps a workspace for ever, so a model that goes leaves its stream to the next one; never two at a time."""
    with Recorder(DEVICE).session() as used_before:
        pass
    gc.collect()
    one, two = Recorder(DEVICE), Recorder(DEVICE)
    with one.session() as first:
        pass
    with two.session() as second:
        pass
    with one.session() as first_again:
        pass
    assert first is used_before
    assert first_again is first
    assert second is not first


def test_a_session_is_ordered_with_the_callers_stream() -> None:
    """The side stream waits for the caller before, the caller for the side stream after, also after an error."""
    recorder = Recorder(DEVICE)
    caller: Any = torch.cuda.current_stream()
    waited: list[Any] = []

    def fails() -> None:
        with recorder.session() as side:
            waited.extend(side.waited_for)  # type: ignore[attr-defined]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert waited == [caller]
    assert len(caller.waited_for) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_stays_away_until_the_last_one_is_done(enabled: bool) -> None:
    """Uses that overlap, as those of two threads do, keep it off until the last ends, however they nest; then it is as before."""
    first, second, third = (contextlib.ExitStack() for _ in range(3))
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        first.enter_context(cuda.no_garbage_collection)
        second.enter_context(cuda.no_garbage_collection)
        first.close()
        assert not gc.isenabled()
        third.enter_context(cuda.no_garbage_collection)
        second.close()
        assert not gc.isenabled()
        with contextlib.suppress(RuntimeError), third:
            raise RuntimeError("a failing recording")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
