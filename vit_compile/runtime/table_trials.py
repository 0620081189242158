"""What graphs of the table form are tried and timed with: example items with random rows, or made-up metadata without examples.

Rows are random numbers from a generator on the encoder's device: making millions of them on the host and copying them takes
longer than the replays. The items of a trial are kept from one fill to the next, as all fills of a trial want the same numbers,
until `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vit_compile.backend.roles import Role
from vit_compile.errors import ProtocolError
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.replay_times import squares_of
from vit_compile.runtime.table import EncoderTable
from vit_compile.runtime.table_buffers import GraphBuffers, Metadata, exact_values, random_values

_GARBAGE_SEED = 1 << 31
"""Added to the seed of a trial, so that garbage is not the real rows again. The CPU's generator takes 32 bits of a seed."""

SpecOf = Callable[[Hashable], tuple[EncoderItemSpec, Mapping[str, int]]]
"""An item's sizes, and the rows that it has of each data buffer."""


@dataclass(eq=False, slots=True)
class GraphState:
    """What the table form keeps for one graph."""

    buffers: GraphBuffers
    kept: object
    """Keeps the shared data buffers for as long as the graph uses them."""
    trial: list[tuple[Hashable, dict[str, torch.Tensor]]] = field(default_factory=list)
    """Items of the last trial, with their data."""
    seed: int = 0
    """From which that data was made."""


class TableTrials:
    """Trials of one encoder's graphs.

    Args:
        table: the declaration.
        data: names of the data buffers of each path.
        spec_of: sizes by item key.
        metadata: of items, by key and path.
        device, dtype: the encoder's.
    """

    def __init__(
        self,
        table: EncoderTable,
        data: Mapping[str, Sequence[str]],
        spec_of: SpecOf,
        metadata: Metadata,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._table, self._data, self._spec_of, self._metadata = table, data, spec_of, metadata
        self._device, self._dtype = device, dtype

    def fill(self, state: GraphState, path: str, tokens: int, kind: str | None, seed: int) -> int:
        """See `SupportsPaddingTrial.fill_encoder_cudagraph_trial`."""
        keys = self._fitting_keys(state, path, tokens, seed)
        if keys:
            real = sum(self._spec_of(key)[0].tokens_on(path) for key in keys)
        else:
            state.trial = []
            real = self._made_up(state.buffers, path, tokens, self._generator(seed))
        if kind is not None:
            state.buffers.poison(kind, self._generator(seed + _GARBAGE_SEED))
        return real

    def fill_layout(self, state: GraphState, path: str, tokens: int, least: int, most: int) -> int:
        """See `SupportsLayoutTiming.fill_encoder_cudagraph_layout`."""
        if not any(buffer.role is Role.BOUNDARIES for buffer in self._table.paths[path].buffers.values()):
            return 0  # its time depends on no layout
        keys = self._example_keys(state.buffers, path, tokens, least=least, most=most)
        if not keys or not self._fill_items(state, path, keys, 0):
            return 0
        specs = [self._spec_of(key)[0] for key in keys]
        return sum(squares_of(spec.tokens_on(path), spec.frames) for spec in specs)

    def values(self, state: GraphState, path: str) -> Sequence[Mapping[str, Any]]:
        """See `SupportsPaddingTrial.encoder_cudagraph_trial_values`."""
        declared = self._table.paths[path]
        if state.trial:
            return [self._alone(path, key, rows) for key, rows in state.trial]
        if any(buffer.role is Role.PER_SEGMENT for buffer in declared.buffers.values()):
            return []  # how many entries belong to made-up segments only the adapter knows
        return [state.buffers.unpadded_trial()]

    def _alone(self, path: str, key: Hashable, rows: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        slices = {name: [part.clone()] for name, part in rows.items()}  # a forward may write into what it gets
        return exact_values(self._table.paths[path], (key,), slices, self._metadata, path, self._device, self._dtype)

    def shows(self, state: GraphState) -> Collection[str]:
        """See `SupportsPaddingTrial.encoder_cudagraph_trial_shows`."""
        if not state.trial:
            return ()
        # On a graph for one segment nobody has company.
        return ("use", "padding", "company") if len(state.trial) > 1 or state.buffers.segments == 1 else ("use", "padding")

    def _fitting_keys(self, state: GraphState, path: str, tokens: int, seed: int) -> list[Hashable]:
        """Items that are in the buffers now; none without examples."""
        unequal = self._unequal_keys(state.buffers, path, tokens)
        if unequal and self._fill_items(state, path, unequal, seed):
            return unequal
        keys = self._equal_keys(state.buffers, path, tokens)
        if keys and not self._fill_items(state, path, keys, seed):
            raise ProtocolError(f"example items {keys!r} do not fit the graph of {tokens} tokens that they were made for.")
        return keys

    def _equal_keys(self, buffers: GraphBuffers, path: str, tokens: int) -> list[Hashable]:
        """Two items in so many tokens; where items are large, two in the whole graph with padding behind; else one."""
        keys = self._example_keys(buffers, path, tokens, least=1, most=2)
        if len(keys) < 2:
            declared = self._table.paths[path]
            whole = buffers.rows * declared.tokens_per_row // declared.spatial_merge_size**2
            two = self._example_keys(buffers, path, whole - 1, least=2, most=2)
            return two or keys
        return keys

    def _unequal_keys(self, buffers: GraphBuffers, path: str, tokens: int) -> list[Hashable]:
        """A small item, one about twice as large, and a small one again: a leak may need a third item, or several sizes."""
        small = self._example_keys(buffers, path, tokens // 4, least=1, most=1)
        large = self._example_keys(buffers, path, tokens // 2, least=1, most=1)
        keys = [*small, *large, *small] if small and large else []
        specs = [self._spec_of(key)[0] for key in keys]
        fits, sizes = sum(spec.frames for spec in specs) <= buffers.segments, {spec.tokens_on(path) for spec in specs}
        # A single token would be a trace of its own: torch.compile takes a size of 1 as a constant.
        return keys if fits and len(sizes) > 1 and min(sizes) > 1 else []

    def _example_keys(self, buffers: GraphBuffers, path: str, tokens: int, *, least: int, most: int) -> list[Hashable]:
        """Equal items that fit, as many as there is room for; none where the table gives no such that has something on this
        path."""
        for count in range(min(most, buffers.segments), least - 1, -1):
            key = self._table.example_key_on(path, tokens // count) if tokens // count else None
            if key is not None:
                spec = self._spec_of(key)[0]
                if 0 < spec.tokens_on(path) <= tokens // count and spec.frames * count <= buffers.segments:
                    return [key] * count
        return []

    def _fill_items(self, state: GraphState, path: str, keys: Sequence[Hashable], seed: int) -> bool:
        """Items with random rows into the buffers; False where they do not fit."""
        if state.seed != seed or [key for key, _ in state.trial] != keys:
            generator = self._generator(seed)
            state.trial = []  # before others are made
            state.trial, state.seed = [(key, self._random_rows(path, key, generator)) for key in keys], seed
        state.buffers.forget_contents()
        slices = {name: [rows[name] for _, rows in state.trial] for name in self._data[path]}
        return state.buffers.fill(tuple(keys), slices, self._metadata, path)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(seed)

    def _random_rows(self, path: str, key: Hashable, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = {}
        for name in self._data[path]:
            buffer, rows = self._table.paths[path].buffers[name], self._spec_of(key)[1][name]
            made[name] = random_values((rows, *buffer.shape), buffer.dtype or self._dtype, generator)
        return made

    def _made_up(self, buffers: GraphBuffers, path: str, tokens: int, generator: torch.Generator) -> int:
        """Half as many segments as there is room for, so that a count of them shows."""
        declared = self._table.paths[path]
        step = declared.spatial_merge_size**2
        real = max(1, min(declared.rows(tokens), buffers.rows))
        real = max(step, real // step * step)
        buffers.fill_for_trial(real, max(1, buffers.segments // 2), generator)
        return real * declared.tokens_per_row // step
