"""What a capture needs of an encoder: which graphs, their buffers, and afterwards their times and those of eager runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import nn

from vit_compile.runtime import known_costs
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.generic_buffers import GenericBuffers
from vit_compile.runtime.graph_config import EncoderCudaGraphConfig
from vit_compile.runtime.graphs import GraphKey, GraphSet, least_ms
from vit_compile.runtime.ladders import Ladders
from vit_compile.runtime.planner import EagerCost
from vit_compile.runtime.protocol import SupportsDirectFill, SupportsEncoderCudaGraph

TIMED_EAGER_RUNS = 3


class CaptureWork:
    """For one manager; holds nothing that a capture makes."""

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        declaration: EncoderCudaGraphConfig,
        ladders: Ladders,
        config: EncoderConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.declaration, self.ladders, self.config = model, declaration, ladders, config
        self.device, self.dtype = device, dtype

    def keys(self) -> list[GraphKey]:
        """Graphs that some batch can reach, path by path, largest first."""
        reachable = self.declaration.is_reachable
        room = (self.ladders.max_items, self.ladders.max_frames)
        return [
            GraphKey(path, budget, axes)
            for path in self.declaration.paths
            for budget in sorted(self.ladders.paths[path], reverse=True)
            if budget > 0
            for axes in product(*self.declaration.capture_axes)
            if reachable is None or reachable(path, budget, axes, *room)
        ]

    def inputs(self, key: GraphKey) -> EncoderCudaGraphCaptureInputs:
        """Buffers of a graph."""
        made = self.model.prepare_encoder_cudagraph_capture_inputs(
            key.token_budget,
            self.ladders.max_items,
            self.ladders.max_frames,
            self.device,
            self.dtype,
            key.path,
            key.axis_keys,
        )
        if not isinstance(self.model, SupportsDirectFill):
            keys = self.declaration.path_buffer_keys(key.path)
            made.state = GenericBuffers(made.values, keys, self.declaration.padding_logics)
            made.nbytes = made.nbytes or sum(made.values[name].nbytes for name in keys)
        return made

    def time(self, graphs: GraphSet, modules: Sequence[nn.Module]) -> dict[str, EagerCost]:
        """Time the graphs, and eager runs by path, as far as no times were loaded for an encoder like this one."""
        room = (self.ladders.max_items, self.ladders.max_frames)
        name = known_costs.fingerprint(modules, self.config, self.device, self.dtype, room)
        known = known_costs.loaded(name)
        graphs.time_graphs(known.graphs)
        eager: dict[str, EagerCost] = {}
        if graphs.recorder is not None:  # elsewhere a replay saves nothing, so eager is no rival
            eager = {path: EagerCost(*cost) for path, cost in known.eager.items() if path in self.declaration.paths}
            eager |= self._time_eager(graphs, [path for path in self.declaration.paths if path not in eager])
        times = {graph.label: graph.time for graph in graphs.graphs.values() if graph.time is not None}
        lines = {path: (cost.fixed_ms, cost.ms_per_token, cost.least_ms, cost.ms_per_square) for path, cost in eager.items()}
        known_costs.note(name, known_costs.Costs(times, lines))
        return eager

    def _time_eager(self, graphs: GraphSet, paths: Sequence[str]) -> dict[str, EagerCost]:
        """An eager run at the smallest and at the largest captured budget of each path, and a line through the two.

        Below the smallest nothing was measured, and the line may fall far below what launching takes.
        """
        found = {}
        for path in paths:
            captured = sorted((g for k, g in graphs.graphs.items() if k.path == path), key=lambda g: g.key.token_budget)
            if not captured:
                continue
            (low, (host_ms, low_ms)), (high, (_, high_ms)) = [
                (
                    graph.key.token_budget,
                    least_ms(
                        partial(self.model.encoder_cudagraph_forward, graph.inputs.values, path), self.device, TIMED_EAGER_RUNS
                    ),
                )
                for graph in (captured[0], captured[-1])
            ]
            slope = max(0.0, (high_ms - low_ms) / (high - low)) if high > low else 0.0
            # Attention costs an eager run at least what it costs a graph, by the squares of its segments.
            by_squares = max(graph.time.slope if graph.time is not None else 0.0 for graph in captured)
            found[path] = EagerCost(max(0.0, low_ms - slope * low), slope, host_ms, by_squares)
        return found
