"""Peers with this package's graphs: the manager in its own mode and in that of the documented method, and the Dynamo backend."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vit_compile.models.accelerate import accelerate, encoder_for
from vit_compile.models.hf_attention import encoding
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graphs import timed
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.tools.bench.ladders import Ladder
from vit_compile.tools.bench.peer import Setup
from vit_compile.tools.bench.peers_eager import CompiledDense, Hoisted
from vit_compile.tools.bench.workload import Inputs

_LAUNCHES = 20


class _Managed:
    """What peers with an encoder manager have in common."""

    manager: EncoderCudaGraphManager

    def stats(self) -> Mapping[str, Any]:
        """See `Observed`."""
        return self.manager.snapshot()

    def budgets(self) -> tuple[int, ...]:
        """See `Observed`."""
        return self.manager.ladders.paths["main"]

    def replay_ms(self, before: Mapping[str, Any], after: Mapping[str, Any], calls: int) -> tuple[float, float]:
        """See `Observed`."""
        earlier = {_key(graph): graph["replays"] for graph in before["graphs"]}
        # Graphs are held by key; the snapshot, which is public, knows how often each was replayed.
        held = {
            (key.path, key.token_budget, tuple(map(str, key.axis_keys))): g
            for key, g in self.manager._captured.set.graphs.items()
        }
        host = wall = 0.0
        for graph in after["graphs"]:
            replays = graph["replays"] - earlier.get(_key(graph), 0)
            if replays and _key(graph) in held:
                with encoding():  # where there is no CUDA, a replay is a run of the forward
                    times = timed(held[_key(graph)].replay, self.manager.device, _LAUNCHES)
                hosts, walls = zip(*times, strict=True)
                host += replays * statistics.median(hosts)
                wall += replays * statistics.median(walls)
        return host / max(1, calls), wall / max(1, calls)


def _key(graph: Mapping[str, Any]) -> tuple[str, int, tuple[str, ...]]:
    return graph["path"], graph["token_budget"], tuple(graph["axis_keys"])


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ManagedPacked(_Managed):
    """`encoder_for` a packed tower: pixels on the device and grids on the host in, features out."""

    def __init__(self, setup: Setup, config: EncoderConfig, capacities: tuple[int, ...]) -> None:
        self.manager = encoder_for(setup.tower.module, config=config, group=setup.group, segment_capacities=capacities)
        self.manager.capture()

    def prepare(self, inputs: Inputs) -> Any:
        """A request."""
        request: dict[str, Any] = {}
        if inputs.image_rows is not None:
            request |= {"pixel_values": inputs.image_rows, "image_grid_thw": inputs.image_grids}
        if inputs.clip_rows is not None:
            request |= {"pixel_values_videos": inputs.clip_rows, "video_grid_thw": inputs.clip_grids}
        return request

    def call(self, prepared: Any) -> Any:
        """See `Peer`."""
        return self.manager.execute(prepared)

    def features(self, output: Any, inputs: Inputs) -> list[torch.Tensor]:
        """See `Peer`."""
        return list(output)

    def close(self) -> None:
        """See `Peer`."""
        self.manager.clear()  # the tower has its configs back when the manager goes


class ManagedDense(_Managed):
    """`accelerate(...).encode` of a dense tower: images of any sizes in one call, pooled outputs included."""

    def __init__(self, setup: Setup, config: EncoderConfig, capacities: tuple[int, ...]) -> None:
        self._handle = accelerate(
            setup.tower.module, config=config, capture="explicit", group=setup.group, segment_capacities=capacities
        )
        self.manager = self._handle.manager
        self._handle.capture()

    def prepare(self, inputs: Inputs) -> Any:
        """A batch, or a list of images where sizes differ."""
        return inputs.batches[0].pixels if len(inputs.batches) == 1 else inputs.images

    def call(self, prepared: Any) -> Any:
        """See `Peer`."""
        return self._handle.encode(prepared)

    def features(self, output: Any, inputs: Inputs) -> list[torch.Tensor]:
        """See `Peer`."""
        return [item.last_hidden_state[0] for item in output]

    def close(self) -> None:
        """See `Peer`."""
        self._handle.close()


def _managed(setup: Setup, ladder: Ladder, capacities: tuple[int, ...], **options: Any) -> ManagedPacked | ManagedDense:
    config = EncoderConfig(
        token_budgets=ladder.budgets,
        max_items_per_batch=ladder.max_items,
        max_frames_per_batch=ladder.max_frames,
        log_every=0,
        **options,
    )
    return (ManagedPacked if setup.tower.kind == "packed" else ManagedDense)(setup, config, capacities)


def make_full(setup: Setup) -> ManagedPacked | ManagedDense:
    """All defaults: compiled, planned by cost, on the fitted ladder."""
    return _managed(setup, setup.ladder, setup.capacities, compiler=setup.compiler)


def make_capture_of_eager(setup: Setup) -> ManagedPacked | ManagedDense:
    """The documented method: the forward as it is written, greedy packing, powers of two, one number of slots, and
    FlashAttention for all of it."""
    return _managed(setup, setup.powers, (), mode="eager", packing="greedy", attention="default")


class BackendPacked(Hoisted):
    """`torch.compile(backend="vit_cudagraph")` of a packed tower's static forward, its budgets captured beforehand."""

    def __init__(self, setup: Setup, mode: str) -> None:
        import vit_compile

        longest = max(h * w for inputs in setup.warmup for _, h, w in inputs.grids)
        options = {
            "mode": mode,
            "compiler": setup.compiler,
            "token_budgets": setup.ladder.budgets,
            "spatial_merge_size": setup.tower.geometry.merge_size,
        }
        super().__init__(setup.tower, lambda call: _with_backend(call, options), mark=True, bound=longest)
        pixels, metadata = self.prepare(max(setup.warmup, key=lambda inputs: len(inputs.grids)))
        vit_compile.warmup(self.function, pixels, progress=False, **metadata)

    def served(self) -> str:
        """In words, how the last call was served."""
        return _last_call()

    def close(self) -> None:
        """See `Peer`."""
        import vit_compile

        super().close()
        vit_compile.clear()


class BackendDense(CompiledDense):
    """The same of a dense tower, where every image size is a capture of its own."""

    def __init__(self, setup: Setup, mode: str) -> None:
        options = {"mode": mode, "compiler": setup.compiler}
        super().__init__(setup.tower, lambda call: _with_backend(call, options), mark=False)

    def served(self) -> str:
        """In words, how the last call was served."""
        return _last_call()

    def close(self) -> None:
        """See `Peer`."""
        import vit_compile

        vit_compile.clear()


def _last_call() -> str:
    """How the backend served the call before."""
    import vit_compile

    record = vit_compile.last_call()
    return "the backend was not reached" if record is None else f"{record.kind}: {record.graph or record.reason}"


def _with_backend(call: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return torch.compile(call, backend="vit_cudagraph", options=options)


def make_backend_full(setup: Setup) -> BackendPacked | BackendDense:
    """One graph per size, attention included."""
    return (BackendPacked if setup.tower.kind == "packed" else BackendDense)(setup, "full")


def make_backend_piecewise(setup: Setup) -> BackendPacked | BackendDense:
    """Graphs between attentions."""
    return (BackendPacked if setup.tower.kind == "packed" else BackendDense)(setup, "piecewise")


def refuses_mixed(setup: Setup) -> str | None:
    """Of the backend's peers."""
    if not setup.is_single:
        return 'for repeated requests ("--traffic single:..."): mixed traffic goes through the manager, which is vit-full'
    return None
