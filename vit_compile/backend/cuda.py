"""Recording CUDA graphs: one side stream and one memory pool per encoder, `thread_local` error mode.

Only torch's public `CUDAGraph` is used. Recording never leaves a stream in capture mode, whatever fails.
"""

from __future__ import annotations

import gc
import math
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from vit_compile.attention.choice import KernelChoices
from vit_compile.errors import CaptureError
from vit_compile.options import ATTENTION_DEFAULT

T = TypeVar("T")
TIMED_CALLS = 8
"""Repetitions in a graph that is timed: at most these, and about `TIMED_S` seconds of them."""
TIMED_S = 2e-3
TIMED_REPLAYS = 5
LAUNCH_S = 1e-3
"""What launching the kernels of one call may take on a busy host: a shorter time outside of a graph says nothing."""
LONG_S = 1e-2
"""A call that takes longer is measured precisely enough by one replay; more would only delay the start with large budgets."""
# `warnings.catch_warnings` is process wide, and cuBLAS / cuDNN initialise lazily: one recording at a time.
_recording = threading.Lock()
# Streams of recorders that are gone. A stream keeps a cuBLAS workspace of tens of MiB, so streams are used again.
_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    idle = _idle_streams[device]
    return idle.pop() if idle else torch.cuda.Stream(device)


class Recorder:
    """Records graphs for one device into one pool, on a stream that no other live recorder uses. No GPU work by itself.

    Every graph is kept until the pool is abandoned. From torch 2.12 on, destroying a graph frees the cuBLAS workspace of
    the stream that it was recorded on, which the other graphs of that stream still write into: so they go together.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._kept: list[torch.cuda.CUDAGraph] = []
        self.last_replay: torch.cuda.Event | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self.kernels = KernelChoices(ATTENTION_DEFAULT, device, None)
        """Attention kernels of what is recorded; whoever owns the recorder puts its own choices here."""
        self._index: int | None = None

    @property
    def index(self) -> int:
        """The device's number; a device without one is the current device of the first use."""
        if self._index is None:
            current = torch.cuda.current_device() if self.device.type == "cuda" else 0
            self._index = current if self.device.index is None else self.device.index
        return self._index

    @property
    def pool(self) -> Any:
        """The memory pool shared by all graphs of this encoder; asked for inside a `session`.

        A pool dies with its last graph and cannot be used again, so a graph of its own keeps it alive.
        """
        if self._pool is None:
            pool = torch.cuda.graph_pool_handle()
            with torch.inference_mode(False), torch.no_grad():
                scratch = torch.zeros(1, device=self.device)
            anchor = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self.device)
            anchor.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                scratch.add_(1)
            finally:
                anchor.capture_end()
            self._pool = pool
            self._kept.append(anchor)
        return self._pool

    def abandon_pool(self) -> None:
        """Let go of the pool and of all graphs: only when no capture of this recorder is in use any more."""
        self._pool = None
        self._kept.clear()

    @contextmanager
    def session(self) -> Iterator[torch.cuda.Stream]:
        """Work on the side stream, ordered after the caller's stream and before what the caller does next."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = _take_stream(self.device)
                weakref.finalize(self, _idle_streams[self.device].append, self._stream).atexit = False
            caller = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self._stream):
                    yield self._stream
            finally:
                caller.wait_stream(self._stream)

    def choose_kernels(self, run: Callable[[], object]) -> None:
        """Run what will be recorded once, and choose a kernel for each of its attention calls."""
        if self.kernels.enabled:
            self.observe(run)
            self.kernels.settle()

    def observe(self, run: Callable[[], object]) -> None:
        """Run what will be recorded once, and note its attention calls for `kernels.settle` if there is something to choose."""
        with self.session(), self.kernels.observing() if self.kernels.enabled else nullcontext():
            run()

    def record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph | None, T]:
        """Record `function` inside a `session`; it must have run on this stream before, with the same sizes.

        Returns:
            The graph (None when no kernel was launched) and the function's result, whose tensors live in the pool.
        """
        graph = torch.cuda.CUDAGraph()
        with _recording, no_garbage_collection, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pool = self.pool
            torch.cuda.synchronize(self.device)
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
                graph.capture_end()
            except BaseException:
                self._abort(graph)
                raise
        self._kept.append(graph)
        empty = any("graph is empty" in str(w.message).lower() for w in caught)
        return (None if empty else graph), result

    def _abort(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a broken recording so that the stream can be used again.

        One that ends well, as after a lack of memory, leaves what it took in the pool, for smaller graphs to use.
        """
        self._kept.append(graph)
        try:
            graph.capture_end()
        except Exception:  # it reports its cause a second time here
            self._pool = None  # it may still count as recording; graphs recorded so far keep it

    def before_replay(self) -> None:
        """Order the caller's stream after the previous replay, whose buffers the next one reuses."""
        if self.last_replay is not None:
            stream = torch.cuda.current_stream(self.index)
            if stream != self._last_stream:  # on one stream they are in order anyway
                stream.wait_event(self.last_replay)

    def after_replay(self) -> None:
        """Mark the point after which buffers may be reused."""
        if self.last_replay is None:
            self.last_replay = torch.cuda.Event()
        self._last_stream = torch.cuda.current_stream(self.index)
        self.last_replay.record(self._last_stream)


def seconds_captured(call: Callable[[], object], device: torch.device, give_up_s: float = math.inf) -> float:
    """Seconds of one call among several in a captured graph: the best of `TIMED_REPLAYS` replays.

    Args:
        call: what to time; it is called before, and must be ready to be captured.
        device: where it runs.
        give_up_s: a call that takes longer than this outside of a graph, and longer than launching could, is not captured; that
            time is the answer then.

    Whatever the call raises, in a capture or before, is raised.
    """
    recorder = Recorder(device)
    with recorder.session() as stream:
        call()
        limit = max(give_up_s, LAUNCH_S)
        rough = _seconds(call, stream)
        for _ in range(2):  # a host that was busy with something else says nothing about the call
            rough = min(rough, _seconds(call, stream)) if rough > min(limit, LONG_S) else rough
        if rough > limit:
            return rough
        count = min(TIMED_CALLS, max(1, int(TIMED_S / rough)))

        def calls() -> None:
            for _ in range(count):
                call()

        graph = check_recorded(recorder.record(calls)[0], "an attention kernel")
        first = _seconds(graph.replay, stream)
        if first > LONG_S * count:
            return first / count
        return min(_seconds(graph.replay, stream) for _ in range(TIMED_REPLAYS)) / count


def _seconds(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.synchronize()
    started.record(stream)
    call()
    ended.record(stream)
    ended.synchronize()
    return max(float(started.elapsed_time(ended)), 1e-3) / 1e3


class _Collector:
    """The garbage collector, kept away by several threads at once."""

    def __init__(self) -> None:
        self._lock, self._users, self._was_enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._was_enabled:
                gc.enable()


no_garbage_collection = _Collector()
"""Around recordings, since a graph or tensor that the collector destroys in the middle of one invalidates it; and around traces,
which make millions of objects that live on, so that it takes a tenth of their time and finds nothing."""


class _Unowned:
    """Describes device memory to `torch.as_tensor` without keeping its owner alive."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it allocated.

    Pool memory that one graph no longer needs can then serve the next, in the order in which they replay. Valid while
    the graph whose memory it is exists, and until another graph of the pool replays.
    """
    if not tensor.is_cuda or tensor.untyped_storage().nbytes() == 0:
        return tensor
    storage = tensor.untyped_storage()
    raw = torch.as_tensor(_Unowned(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    size = tensor.element_size()
    usable = raw[: raw.numel() // size * size].view(tensor.dtype)
    return torch.as_strided(usable, tensor.shape, tensor.stride(), tensor.storage_offset())


def part_of(arena: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over the bytes of `arena` from `offset` on, with a storage offset of 0.

    Dynamo makes a storage offset a symbol, and so traces anew for other ones. Valid while the arena exists.

    Args:
        arena: uint8 [bytes].
        offset: in bytes, a multiple of the dtype's size.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not arena.is_cuda or nbytes == 0:
        raw = torch.from_numpy(arena.numpy()[offset : offset + nbytes]) if nbytes else arena.new_empty(0)
    else:
        raw = torch.as_tensor(_Unowned(arena.data_ptr() + offset, nbytes), device=arena.device)
    return raw.view(dtype).view(shape)


def reserved_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds on the device."""
    return torch.cuda.memory_reserved(device)


def check_recorded(graph: torch.cuda.CUDAGraph | None, what: str) -> torch.cuda.CUDAGraph:
    """An empty graph replays nothing and returns stale numbers: an error."""
    if graph is None:
        raise CaptureError(f"the graph of {what} is empty: nothing was launched on the capturing stream or device.")
    return graph
