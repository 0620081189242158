"""`TableEncoder`: the encoder contract for everything that is declared as an `EncoderTable`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import ProtocolError
from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs, EncoderCudaGraphReplayBuffers
from vit_compile.runtime.graph_config import AxisKeys, EncoderCudaGraphConfig, EncoderPathConfig
from vit_compile.runtime.inputs import check_request, check_rows
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize
from vit_compile.runtime.table_buffers import GraphBuffers, Layouts, SharedRows, Slices, exact_values
from vit_compile.runtime.table_items import CACHED_KEYS, MetadataCache, spec_of
from vit_compile.runtime.table_trials import GraphState, TableTrials
from vit_compile.runtime.weights import modules_of, tensors_of

ALL_SEGMENTS = 0
"""The key of the segment axis that stands for as many as a batch may have."""


@dataclass(frozen=True, slots=True)
class _Item:
    """One item of a request: what it is, and where its rows are."""

    key: Hashable
    modality: str
    starts: Mapping[str, int]
    """First row of the item in each input of its modality."""


class _Request(Mapping[str, Any]):
    """A request as it was parsed: the same inputs, and where each item is."""

    def __init__(self, mm_kwargs: Mapping[str, Any], items: list[_Item], specs: list[EncoderItemSpec]) -> None:
        self.inputs, self.entries, self.specs = mm_kwargs, items, specs

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


class TableEncoder:
    """An `EncoderTable` as a protocol object that fills its buffers itself.

    Args:
        table: the declaration.
        device, dtype: the encoder's, which requests are checked against.

    One manager uses one `TableEncoder`. Calls come under the manager's lock.
    """

    def __init__(self, table: EncoderTable, *, device: torch.device, dtype: torch.dtype) -> None:
        self.table, self.device, self.dtype = table, device, dtype
        self._data = {path: _data_buffers(table, path) for path in table.paths}
        self._shared: weakref.WeakValueDictionary[str, _Kept] = weakref.WeakValueDictionary()
        self._layouts = Layouts()
        # Functions of the table, not methods: a cache of its own methods would keep the encoder, and the tower, in a cycle.
        self._spec = functools.lru_cache(CACHED_KEYS)(functools.partial(spec_of, table, self._data))
        self._metadata = MetadataCache(table, self._data, dtype)
        self._trials = TableTrials(table, self._data, self._spec, self._metadata, device, dtype)
        self._axis = bool(table.segment_capacities) and any(_has_boundaries(p.buffers) for p in table.paths.values())
        _check_table(table, self._data)

    def encoder_modules(self) -> list[nn.Module]:
        """Modules whose weights the graphs read."""
        return modules_of(self.table)

    def encoder_tensors(self) -> Mapping[str, torch.Tensor]:
        """Further tensors that the graphs read."""
        return tensors_of(self.table)

    # --- declaration -------------------------------------------------------------------------------------------------

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """See `SupportsEncoderCudaGraph`."""
        table = self.table
        axes: tuple[AxisKeys, ...] = ((*sorted(set(table.segment_capacities)), ALL_SEGMENTS),) if self._axis else ()
        return EncoderCudaGraphConfig(
            modalities=tuple(table.modalities),
            buffer_keys=tuple(dict.fromkeys(name for path in table.paths.values() for name in path.buffers)),
            out_hidden_size=table.out_hidden_size,
            max_frames_per_video=table.max_frames_per_video,
            paths={
                name: EncoderPathConfig(
                    buffer_keys=tuple(path.buffers),
                    min_token_budget=path.min_token_budget,
                    allow_zero_tokens=path.allow_zero_tokens,
                )
                for name, path in table.paths.items()
            },
            capture_axes=axes,
            axis_keys_of_frames=self._segment_keys if axes else None,
            is_reachable=self._is_reachable,
            refusal=table.refusal,
        )

    def _segment_keys(self, frames: int, path: str) -> AxisKeys:
        if not _has_boundaries(self.table.paths[path].buffers):
            return (ALL_SEGMENTS,)
        return (next((key for key in sorted(self.table.segment_capacities) if key >= frames), ALL_SEGMENTS),)

    def _is_reachable(self, path: str, token_budget: int, axis_keys: AxisKeys, max_items: int, max_frames: int) -> bool:
        """A graph without a row serves nobody; one for so many segments serves who has more than the next tighter one takes. (A
        batch with more frames than output tokens takes a larger budget.)"""
        declared = self.table.paths[path]
        if declared.rows(token_budget) == 0:
            return False
        if not self._axis:
            return True
        (key,), most = axis_keys, max_frames or max_items
        assert isinstance(key, int), "keys of the segment axis are numbers"
        if not _has_boundaries(declared.buffers):
            return key == ALL_SEGMENTS
        tighter = [k for k in self.table.segment_capacities if key == ALL_SEGMENTS or k < key]
        return max(tighter, default=0) < min(most, token_budget)

    def forget_encoder_metadata(self) -> None:
        """See `SupportsDirectFill`."""
        self._metadata.clear()
        self._layouts.clear()

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """See `SupportsEncoderCudaGraph`."""
        return self.table.token_range

    # --- requests ----------------------------------------------------------------------------------------------------

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Mapping[str, Any]) -> Sequence[EncoderItemSpec]:
        """See `SupportsEncoderCudaGraph`."""
        return self._parse(mm_kwargs).specs

    def parse_encoder_request(self, mm_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `SupportsDirectFill`."""
        return self._parse(mm_kwargs)

    def _parse(self, mm_kwargs: Mapping[str, Any]) -> _Request:
        if isinstance(mm_kwargs, _Request):
            return mm_kwargs
        table = self.table
        mm_kwargs = table.prepare_request(mm_kwargs)
        given: dict[str, Any] = {}
        items: list[_Item] = []
        specs: list[EncoderItemSpec] = []
        for modality in check_request(mm_kwargs, {name: m.names for name, m in table.modalities.items()}):
            declared = table.modalities[modality]
            inputs = {name: mm_kwargs[name] for name in declared.names}
            # A batch that runs eagerly picks its items' own sizes: what cannot be indexed, or read twice, becomes a list.
            inputs |= {name: list(inputs[name]) for name in declared.per_item if _only_iterable(inputs[name])}
            given |= inputs
            starts = dict.fromkeys(declared.data, 0)
            keys = table.item_keys(modality, inputs)
            unfilled = [path for path, data in self._data.items() if not starts.keys() & set(data)]
            for key in keys:
                try:
                    spec, rows = self._spec(key)
                except TypeError as error:
                    raise ProtocolError(f"item key {key!r}: {error} (keys must be hashable, and sizes integers).") from error
                for path in unfilled:
                    if spec.tokens_on(path):
                        raise ProtocolError(f"item {key!r} has tokens on path {path!r}, for which {modality} brings no data.")
                items.append(_Item(key, modality, dict(starts)))
                specs.append(spec)
                for buffer in starts:
                    starts[buffer] += rows[buffer]
            for buffer, name in declared.data.items():
                self._check_data(name, mm_kwargs[name], buffer, starts[buffer], empty=not keys)
        return _Request(given, items, specs)

    def _check_data(self, name: str, value: Any, buffer: str, rows: int, *, empty: bool) -> None:
        if empty and (value.numel() == 0 if isinstance(value, torch.Tensor) else hasattr(value, "__len__") and len(value) == 0):
            return
        declared = self._buffer(buffer)
        check_rows(name, value, rows=rows, shape=declared.shape, dtype=declared.dtype or self.dtype, device=self.device)

    def _buffer(self, name: str) -> Buffer:
        return next(path.buffers[name] for path in self.table.paths.values() if name in path.buffers)

    def select_encoder_cudagraph_items(self, mm_kwargs: Mapping[str, Any], indices: Sequence[int]) -> Mapping[str, Any]:
        """See `SupportsEncoderCudaGraph`. Modalities without a chosen item are left out.

        Each input holds the items of its modality, and the result knows the order among modalities: it is not parsed again.
        """
        request = self._parse(mm_kwargs)
        chosen: dict[str, Any] = {}
        placed: dict[int, _Item] = {}
        for modality, declared in self.table.modalities.items():
            numbers = [i for i in indices if request.entries[i].modality == modality]
            if not numbers:
                continue
            first = next(i for i, item in enumerate(request.entries) if item.modality == modality)
            for buffer, name in declared.data.items():
                chosen[name] = torch.cat([self._slice(request, i, buffer) for i in numbers])
            for name in declared.per_item:
                values = request[name]
                of = [i - first for i in numbers]
                chosen[name] = values[of] if hasattr(values, "shape") else [values[i] for i in of]
            starts = dict.fromkeys(declared.data, 0)
            for i in numbers:
                key = request.entries[i].key
                placed[i] = _Item(key, modality, dict(starts))
                for buffer in starts:
                    starts[buffer] += self._spec(key)[1][buffer]
        return _Request(chosen, [placed[i] for i in indices], [request.specs[i] for i in indices])

    def _slice(self, request: _Request, index: int, buffer: str) -> torch.Tensor:
        item = request.entries[index]
        start, rows = item.starts[buffer], self._spec(item.key)[1][buffer]
        data: torch.Tensor = request[self.table.modalities[item.modality].data[buffer]]
        return data[start : start + rows]

    def _slices(self, request: _Request, indices: Sequence[int], path: str) -> Slices:
        """Rows of the items for each data buffer of a path; neighbours in one slice, items without rows left out."""
        found: dict[str, list[torch.Tensor]] = {}
        for buffer in self._data[path]:
            runs: list[tuple[str, int, int]] = []
            for index in indices:
                item = request.entries[index]
                name = self.table.modalities[item.modality].data.get(buffer)
                if name is None:
                    continue
                start = item.starts[buffer]
                stop = start + self._spec(item.key)[1][buffer]
                if runs and runs[-1][0] == name and runs[-1][2] == start:
                    runs[-1] = (name, runs[-1][1], stop)
                elif stop > start:
                    runs.append((name, start, stop))
            found[buffer] = [request[name][start:stop] for name, start, stop in runs]
        return found

    # --- buffers -----------------------------------------------------------------------------------------------------

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str,
        axis_keys: AxisKeys,
    ) -> EncoderCudaGraphCaptureInputs:
        """See `SupportsEncoderCudaGraph`."""
        declared, most = self.table.paths[path], max_frames_per_batch or max_batch_size
        key = axis_keys[0] if self._axis else ALL_SEGMENTS
        assert isinstance(key, int), "keys of the segment axis are numbers"
        kept = self._shared.get(path)
        buffers = GraphBuffers(
            declared,
            self._data[path],
            tokens=token_budget,
            # A segment has a row at least: more slots than rows would be a tax and nothing else.
            segments=min(most if key == ALL_SEGMENTS else key, most, declared.rows(token_budget)),
            device=device,
            dtype=dtype,
            shared=None if kept is None else kept.rows,
            layouts=self._layouts,
        )
        if kept is None or buffers.own_rows:
            kept = self._shared[path] = _Kept(buffers.shared)
        output_tokens = buffers.rows * declared.tokens_per_row // declared.spatial_merge_size**2
        return EncoderCudaGraphCaptureInputs(buffers.values(), GraphState(buffers, kept), buffers.nbytes, output_tokens)

    def fill_encoder_cudagraph_buffers(self, state: Any, mm_kwargs: Mapping[str, Any], indices: Sequence[int], path: str) -> bool:
        """See `SupportsDirectFill`."""
        request = self._parse(mm_kwargs)
        keys = tuple([request.entries[i].key for i in indices if request.specs[i].tokens_on(path)])
        buffers: GraphBuffers = state.buffers
        return buffers.fill(keys, self._slices(request, indices, path), self._metadata, path)

    def fill_encoder_cudagraph_trial(self, state: Any, path: str, tokens: int, kind: str | None, seed: int = 0) -> int:
        """See `SupportsPaddingTrial`: on the metadata of example items where the table has such, else on made-up metadata."""
        return self._trials.fill(state, path, tokens, kind, seed)

    def encoder_cudagraph_trial_values(self, state: Any, path: str) -> Sequence[Mapping[str, Any]]:
        """See `SupportsPaddingTrial`."""
        return self._trials.values(state, path)

    def encoder_cudagraph_trial_shows(self, state: Any) -> Collection[str]:
        """See `SupportsPaddingTrial`."""
        return self._trials.shows(state)

    def forget_encoder_cudagraph_trial(self, state: Any) -> None:
        """See `KeepsTrialData`."""
        state.trial = []

    def fill_encoder_cudagraph_layout(self, state: Any, path: str, tokens: int, least: int, most: int) -> int:
        """See `SupportsLayoutTiming`: with example items of the table."""
        return self._trials.fill_layout(state, path, tokens, least, most)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Mapping[str, Any], path: str, axis_keys: AxisKeys
    ) -> EncoderCudaGraphReplayBuffers:
        """See `SupportsEncoderCudaGraph`."""
        values = self._exact(mm_kwargs, path)
        return EncoderCudaGraphReplayBuffers({name: values[name] for name in self.table.paths[path].buffers})

    def _exact(self, mm_kwargs: Mapping[str, Any], path: str) -> dict[str, Any]:
        request = self._parse(mm_kwargs)
        indices = range(len(request.entries))
        keys = tuple([item.key for item, spec in zip(request.entries, request.specs, strict=True) if spec.tokens_on(path)])
        slices = self._slices(request, indices, path)
        return exact_values(self.table.paths[path], keys, slices, self._metadata, path, self.device, self.dtype)

    # --- forwards and what comes after -------------------------------------------------------------------------------

    def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
        """See `SupportsEncoderCudaGraph`."""
        return self.table.forward(path, values)

    def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        """See `SupportsEncoderCudaGraph`: the table's forward on exactly the rows of the batch, nothing padded."""
        return self.table.forward(path, self._exact(mm_kwargs, path))

    def postprocess_encoder_output(
        self, outputs: Mapping[str, torch.Tensor | None], specs: Sequence[EncoderItemSpec], mm_kwargs: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        """See `SupportsEncoderCudaGraph`."""
        request = self._parse(mm_kwargs)
        return self.postprocess_encoder_items(outputs, specs, mm_kwargs, range(len(request.entries)))

    def postprocess_encoder_items(
        self,
        outputs: Mapping[str, torch.Tensor | None],
        specs: Sequence[EncoderItemSpec],
        mm_kwargs: Mapping[str, Any],
        indices: Sequence[int],
    ) -> Sequence[torch.Tensor]:
        """See `SupportsDirectFill`."""
        request = self._parse(mm_kwargs)
        parts: dict[str, Sequence[torch.Tensor | None]] = {}
        for path, output in outputs.items():
            sizes = [spec.tokens_on(path) for spec in specs]
            if output is None:
                parts[path] = [None] * len(specs)
            else:
                split = output.split_with_sizes(sizes)
                parts[path] = [part if size else None for part, size in zip(split, sizes, strict=True)]
        if type(self.table).assemble is EncoderTable.assemble and len(parts) == 1:
            (only,) = parts.values()
            return [part for part in only if part is not None]
        return [
            self.table.assemble(request.entries[index].key, {path: of[number] for path, of in parts.items()})
            for number, index in enumerate(indices)
        ]


@dataclass(eq=False)
class _Kept:
    """Keeps shared data buffers for as long as a graph uses them."""

    rows: SharedRows


def _data_buffers(table: EncoderTable, path: str) -> tuple[str, ...]:
    """The buffers of a path that hold data of a request."""
    data = {buffer for modality in table.modalities.values() for buffer in modality.data}
    unknown = data - {name for p in table.paths.values() for name in p.buffers}
    if unknown:
        raise ProtocolError(f"{sorted(unknown)} of the modalities are no buffers of any path.")
    found = tuple(name for name in table.paths[path].buffers if name in data)
    if not found:
        raise ProtocolError(f"path {path!r} has no buffer that a modality fills.")
    return found


def _check_table(table: EncoderTable, data: Mapping[str, Sequence[str]]) -> None:
    """What a declaration can get wrong without an error later: one name for two values, half of the data, no segments."""
    for path, declared in table.paths.items():
        names = [*declared.buffers, *(buffer.bound for buffer in declared.buffers.values() if buffer.bound)]
        for name in set(names):
            if names.count(name) > 1:
                raise ProtocolError(f"path {path!r} has {name!r} twice among its buffers and bounds: name each once.")
        for modality, inputs in table.modalities.items():
            missing = [name for name in data[path] if name not in inputs.data]
            if 0 < len(missing) < len(data[path]):
                raise ProtocolError(f"{modality} fills some data buffers of path {path!r} but not {', '.join(missing)}.")
    if any(capacity < 1 for capacity in table.segment_capacities):
        raise ProtocolError(f"segment_capacities={tuple(table.segment_capacities)}: expected positive numbers of segments.")


def _only_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, list | tuple | str) and not hasattr(value, "shape")


def _has_boundaries(buffers: Mapping[str, Buffer]) -> bool:
    return any(buffer.role is Role.BOUNDARIES for buffer in buffers.values())


__all__ = ["ALL_SEGMENTS", "ItemSize", "TableEncoder"]
