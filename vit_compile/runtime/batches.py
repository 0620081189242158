"""Running one batch: each path by a replay or eagerly, the first uses of a graph compared, features put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from vit_compile.backend.proof import bits_equal, difference_over_tolerance
from vit_compile.errors import ProtocolError
from vit_compile.runtime.captured import NOT_CAPTURED, CapturedEncoder
from vit_compile.runtime.generic_buffers import GenericBuffers
from vit_compile.runtime.graphs import EncoderGraph, GraphKey
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.planner import PlannedBatch
from vit_compile.runtime.protocol import SupportsDirectFill
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.stats import Skip, counters, logger, report_skip, skip_error

_FIRST_USE = {torch.float32: 10.0}
"""Tolerances of the backend's proof, which compares like with like, times this: here a compiled run stands beside an eager one
(TF32 in eager convolutions, other orders of summation)."""
_MAX_FAILED_COMPARISONS = 3


class BatchRunner:
    """Runs batches on one set of graphs. Every method runs under the manager's lock."""

    def __init__(self, captured: CapturedEncoder, statistics: EncoderStatistics) -> None:
        self._captured, self._graphs = captured, captured.set
        self._model, self._declaration = captured.model, captured.declaration
        self._statistics, self._strict = statistics, captured.config.strict
        self._direct = captured.model if isinstance(captured.model, SupportsDirectFill) else None
        self._paths = tuple(captured.declaration.paths)
        self.refused = False
        """A graph was taken out of the set: plans have to be made anew."""
        self._uncounted: list[Callable[[], None]] = []

    def run(
        self,
        request: Mapping[str, Any],
        specs: Sequence[EncoderItemSpec],
        indices: Sequence[int],
        batch: PlannedBatch,
        reason: Skip | None,
        *,
        may_borrow: bool,
    ) -> Sequence[torch.Tensor]:
        """Features of the items of one batch, in the order of `indices`.

        Args:
            request, specs: of the whole call.
            indices: the items of the batch.
            batch: how they run on each path.
            reason: why no graph may be replayed at all, or None.
            may_borrow: features may be views of graph memory, if one replay makes them.
        """
        members = [specs[index] for index in indices]
        selected: Mapping[str, Any] | None = None
        if self._direct is None:
            selected = self._model.select_encoder_cudagraph_items(request, indices)
        outputs: dict[str, torch.Tensor | None] = {}
        replays = sum(choice is not None for choice in batch.choices)
        borrow = may_borrow and replays == 1
        for path, choice, tokens in zip(self._paths, batch.choices, batch.tokens, strict=True):
            if choice is None:
                outputs[path] = None
                continue
            items = sum(member.tokens_on(path) > 0 for member in members)
            skip = reason if reason is not None else choice
            if isinstance(skip, GraphKey):
                graph = self._graphs.graphs.get(skip)
                if graph is None:  # refused by an earlier batch, or dropped by an adapter's method, in the middle of the call
                    skip = self._graphs.skips.get(skip, NOT_CAPTURED)
                elif self._fill(graph, request, selected, indices):
                    output = self._replay(graph)
                    if output.shape[0] < tokens:
                        raise ProtocolError(f"the graph {graph.label} gave {output.shape[0]} tokens for {tokens}.")
                    # The next replay, of whichever graph, may overwrite it.
                    features_here = output[:tokens] if borrow else output[:tokens].clone()
                    right = self._first_use(graph, request, specs, indices, features_here) if graph.unseen else None
                    if right is None:
                        self._count(self._statistics.replay, path, skip.token_budget, skip.axis_keys, items=items, tokens=tokens)
                        outputs[path] = features_here
                    else:
                        outputs[path] = right
                        self._count(self._statistics.eager, path, "padding-unsafe", items=items, tokens=tokens)
                    continue
                else:
                    skip = Skip("too-many-segments", f"{graph.label}: {items} items, {tokens} tokens")
                if self._strict:
                    raise skip_error(skip)
            if self._graphs.is_distrusted(path) and items > 1:
                outputs[path] = torch.cat(self._one_by_one(request, specs, indices, path))
            else:
                if selected is None:
                    selected = self._model.select_encoder_cudagraph_items(request, indices)
                outputs[path] = self._eager(selected, path, tokens)
            self._count(self._statistics.eager, path, skip.code, items=items, tokens=tokens)
            self._count(counters.add_skip, skip.code)
        return self._together(outputs, members, request, selected, indices)

    def _model_code(self) -> AbstractContextManager[Any]:
        """Around what runs the model's own code, of which the watch has to know."""
        watch = self._captured.watch
        return nullcontext() if watch is None else watch.running()

    def only_replays(self, plan: Sequence[PlannedBatch]) -> bool:
        """Is every batch of a plan a replay of graphs that have nothing to show any more?"""
        keys = [choice for batch in plan for choice in batch.choices if choice is not None]
        graphs = [self._graphs.graphs.get(key) if isinstance(key, GraphKey) else None for key in keys]
        return all(graph is not None and not graph.unseen for graph in graphs)

    def _count(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._uncounted.append(partial(function, *args, **kwargs))

    def counted(self, *, happened: bool = True) -> None:
        """What ran since the last time counts now, or not at all: its features were thrown away."""
        uncounted, self._uncounted = self._uncounted, []
        for count in uncounted if happened else ():
            count()

    def _together(
        self,
        outputs: Mapping[str, torch.Tensor | None],
        members: Sequence[EncoderItemSpec],
        request: Mapping[str, Any],
        selected: Mapping[str, Any] | None,
        indices: Sequence[int],
    ) -> Sequence[torch.Tensor]:
        """Features of the items from the outputs of the paths."""
        with self._model_code():
            if self._direct is not None:
                features = self._direct.postprocess_encoder_items(outputs, members, request, indices)
            else:
                assert selected is not None, "selected above for models that do not fill directly"
                features = self._model.postprocess_encoder_output(outputs, members, selected)
        if not isinstance(features, Sequence) or not all(isinstance(feature, torch.Tensor) for feature in features):
            raise ProtocolError(f"post-processing gave {type(features).__name__}: expected a list with a tensor for each item.")
        if len(features) != len(members):
            raise ProtocolError(f"post-processing gave {len(features)} features for {len(members)} items.")
        return features

    def _one_by_one(
        self, request: Mapping[str, Any], specs: Sequence[EncoderItemSpec], indices: Sequence[int], path: str
    ) -> list[torch.Tensor]:
        """Features on one path of each item that has some there, each run eagerly by itself."""
        mine = [(index, specs[index].tokens_on(path)) for index in indices if specs[index].tokens_on(path)]
        select = self._model.select_encoder_cudagraph_items
        return [self._eager(select(request, [index]), path, tokens) for index, tokens in mine]

    def _first_use(
        self,
        graph: EncoderGraph,
        request: Mapping[str, Any],
        specs: Sequence[EncoderItemSpec],
        indices: Sequence[int],
        got: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compare a batch that shows something new of a graph with each item alone; the right features where they differ.

        It waits for the device. A graph that differs is not used again; one whose items cannot run eagerly is trusted in the
        end. Features that are zero or not finite show nothing.
        """
        path = graph.key.path
        count = sum(specs[index].tokens_on(path) > 0 for index in indices)
        shows = {"use", *(["padding"] if len(got) < graph.key.token_budget else []), *(["company"] if count > 1 else [])}
        if not shows & graph.unseen:
            return None
        try:
            alone = self._one_by_one(request, specs, indices, path)
        except (ProtocolError, torch.OutOfMemoryError) as error:
            if isinstance(error, ProtocolError):
                raise
            return None
        except Exception as error:
            logger.warning("%s cannot be compared with eager runs of its items: %s", graph.label, error)
            graph.failed_comparisons += 1
            if graph.failed_comparisons >= _MAX_FAILED_COMPARISONS:
                graph.unseen.clear()
            return None
        kept = got.clone()
        same = bits_equal(graph.repeat()[: len(kept)], kept)
        parts = kept.split([len(item) for item in alone])
        factor = _FIRST_USE.get(kept.dtype, 1.0)
        pairs = list(zip(parts, [item.to(kept.dtype) for item in alone], strict=True))
        if same and all(difference_over_tolerance(part, item) <= factor for part, item in pairs):
            if all(bool(item.isfinite().all()) and bool(item.any()) for _, item in pairs):
                graph.unseen -= shows
            return None
        self._refuse(graph, f"{count} of its items together differ from what each gives alone")
        return torch.cat(alone)

    def _refuse(self, graph: EncoderGraph, why: str) -> None:
        """Do not use a graph again."""
        key, skip = graph.key, Skip("padding-unsafe", f"{graph.key}: {why}")
        self._graphs.graphs.pop(key, None)
        self._graphs.skips[key] = skip
        self._statistics.skipped(key.path, key.token_budget, key.axis_keys, skip)
        self.refused = True
        report_skip(skip, strict=self._strict)

    def _fill(
        self, graph: EncoderGraph, request: Mapping[str, Any], selected: Mapping[str, Any] | None, indices: Sequence[int]
    ) -> bool:
        path = graph.key.path
        if self._direct is not None:
            return self._direct.fill_encoder_cudagraph_buffers(graph.inputs.state, request, indices, path)
        assert selected is not None, "selected for models that do not fill directly"
        values = self._model.prepare_encoder_cudagraph_replay_buffers(selected, path, graph.key.axis_keys).values
        buffers: GenericBuffers = graph.inputs.state
        return buffers.fill(values)

    def _replay(self, graph: EncoderGraph) -> torch.Tensor:
        if graph.recorder is not None:
            return graph.replay()
        with self._model_code():  # without a device to record on, a replay is a run
            return graph.replay()

    def _eager(self, selected: Mapping[str, Any], path: str, tokens: int) -> torch.Tensor:
        with self._model_code():
            output = self._model.encoder_eager_forward(selected, path)
        width = self._declaration.out_hidden_size
        if not isinstance(output, torch.Tensor) or tuple(output.shape) != (tokens, width):
            found = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise ProtocolError(f"encoder_eager_forward gave {found} on path {path!r}: expected [{tokens}, {width}].")
        return output.clone()  # a tower may return memory that it uses again
