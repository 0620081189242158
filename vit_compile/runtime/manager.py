"""`EncoderCudaGraphManager`: from the images of a request to their features, by replays of captured graphs.

Guarantees:
- features come back in input order, in memory that no later call touches (`outputs="copy"`);
- what has no graph runs eagerly and is counted with a reason, while its neighbours replay;
- a call is checked before any work; after an error the manager is as it was;
- any thread may call any method; a replay runs on the caller's stream, ordered after the one before;
- no call waits for the device, if sizes come from the host and data from the device (data in pinned host memory is waited for).

Gradients are not recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from vit_compile.errors import InputError, ModalityError, OptionError, ProtocolError
from vit_compile.runtime.capture_inputs import BudgetGraphMetadata
from vit_compile.runtime.capture_work import CaptureWork
from vit_compile.runtime.captured import CapturedEncoder
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.data_parallel import DataParallel
from vit_compile.runtime.item_spec import EncoderItemSpec
from vit_compile.runtime.ladders import resolve
from vit_compile.runtime.protocol import SupportsDirectFill, SupportsEncoderCudaGraph
from vit_compile.runtime.serving import GraphServer
from vit_compile.runtime.statistics import EncoderStatistics
from vit_compile.runtime.table import EncoderTable
from vit_compile.runtime.table_encoder import TableEncoder


class EncoderCudaGraphManager:
    """Captures a vision encoder at its token budgets and serves requests from the graphs.

    Args:
        model: a `SupportsEncoderCudaGraph`, or an `EncoderTable`.
        config: None means all defaults.
        device: where the encoder runs.
        dtype: of its buffers; inputs of another dtype are converted only where that loses nothing. With a group also of the
            features.
        group: a process group over whose ranks the items of each call are spread. Every rank calls `execute` with the same
            request. None: this process alone.

    The constructor does no GPU work; `capture()` does.

    Raises:
        ProtocolError: the model lacks a method, or declares something impossible.
        BudgetError, OptionError: the configuration does not fit the model.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph | EncoderTable,
        config: EncoderConfig | None = None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device, self.dtype = _usable(device, dtype), dtype
        self.config = EncoderConfig() if config is None else config
        if not isinstance(self.config, EncoderConfig):
            raise OptionError(
                f"config is {type(config).__name__}: expected an EncoderConfig; EncoderConfig.from_dict takes dicts."
            )
        self.model = TableEncoder(model, device=self.device, dtype=dtype) if isinstance(model, EncoderTable) else _checked(model)
        self.declaration = self.model.get_encoder_cudagraph_config()
        self.ladders = resolve(self.config, self.declaration, self.model.get_encoder_cudagraph_budget_range())
        self._direct = self.model if isinstance(self.model, SupportsDirectFill) else None
        self._lock = threading.RLock()
        self._statistics = EncoderStatistics(self.config.log_every)
        work = CaptureWork(self.model, self.declaration, self.ladders, self.config, self.device, dtype)
        self._captured = CapturedEncoder(work, self._statistics)
        may_borrow = self.config.outputs == "borrow" and group is None
        self._server = GraphServer(self._captured, self._statistics, may_borrow=may_borrow)
        self._parallel: DataParallel | None = None
        if group is not None:
            self._parallel = DataParallel(group, device=self.device, dtype=dtype, width=self.declaration.out_hidden_size)

    # --- life cycle --------------------------------------------------------------------------------------------------

    def capture(self, *, progress: bool = False) -> None:
        """Capture every graph, largest first, and time them. Does nothing if there are graphs; where none could be captured, a
        further call tries again.

        Args:
            progress: show a progress bar on stderr.

        What cannot be captured is left out with the reason (`snapshot()["not_captured"]`), and everything else works.

        Raises:
            SkipError: something could not be captured, and `strict=True`; nothing is captured then.
            ProtocolError: the model's inputs or forward are not what the contract says.
        """
        with self._lock:
            if not self.is_captured() and self.config.enabled and self.declaration.refusal is None:
                with self._on_device():
                    if self.capture_done():
                        self._captured.clear()  # what is known of the failed one
                    self._captured.capture(progress)

    def clear(self) -> None:
        """Drop every graph and give its memory back. Calls run eagerly until the next `capture()`."""
        with self._lock, self._on_device():
            self._captured.clear()

    def __enter__(self) -> EncoderCudaGraphManager:
        """Captures."""
        try:
            self.capture()
        except BaseException:
            self.clear()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Clears."""
        self.clear()

    # --- serving -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Features of every item of a request.

        Args:
            mm_kwargs: the inputs of one or more modalities, as the model's processor makes them. They are only read, and may
                be overwritten by later work on the current stream.

        Returns:
            One tensor [tokens, out_hidden_size] for each item, in input order, modality by modality where there are
            several (in the order of the declaration). Owned by the caller; those of one batch are views of one copy, so
            clone what is kept long. With `outputs="borrow"`, and where one replay served the call, they are views of graph
            memory that are valid until the next call. No items: an empty list.

        Raises:
            InputError, GridError: the request is wrong; nothing ran.
            ModalityError: the model does not encode this, or nothing at all.
            SkipError: something would run eagerly, and `strict=True`.
            ParallelError: another rank of the group failed.
        """
        started = time.perf_counter()
        try:
            request, specs = self._parsed(mm_kwargs)
        except BaseException:
            if self._parallel is not None:
                self._parallel.report_failure()
            raise
        if self._parallel is None:
            mine: Sequence[int] = range(len(specs))
            features = self._local(request, specs, mine)
        else:  # also without items: every rank counts its calls, so that one that fell behind is noticed
            taken: list[int] = []

            def run_local(indices: Sequence[int]) -> list[torch.Tensor]:
                taken[:] = indices
                return self._local(request, specs, indices)

            features = self._parallel.execute([spec.input_size for spec in specs], run_local)
            mine = taken
        if specs:
            self._statistics.finished(len(mine), time.perf_counter() - started)
        return features

    def _parsed(self, mm_kwargs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[EncoderItemSpec]]:
        """The request, checked, and the sizes of its items."""
        if self.declaration.refusal is not None:
            raise ModalityError(f"this model is not served: {self.declaration.refusal}")
        if not isinstance(mm_kwargs, Mapping):
            raise InputError(f"the request is {type(mm_kwargs).__name__}: expected a dict of inputs by name.")
        with self._lock:
            request = mm_kwargs if self._direct is None else self._direct.parse_encoder_request(mm_kwargs)
            specs = self.model.get_encoder_cudagraph_item_specs(request)
        if not isinstance(specs, Sequence):
            raise ProtocolError(f"get_encoder_cudagraph_item_specs gave {type(specs).__name__}: expected a list.")
        return request, specs

    def _local(self, request: Mapping[str, Any], specs: Sequence[EncoderItemSpec], indices: Sequence[int]) -> list[torch.Tensor]:
        """Features of these items, in their order, from this process's graphs."""
        if not indices:
            return []
        with self._lock, self._on_device():
            return self._server.features(request, specs, indices)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # --- what there is -----------------------------------------------------------------------------------------------

    def supports_modality(self, modality: str) -> bool:
        """Does the model encode this ("image", "video")? False for all where the model is refused."""
        return self.declaration.refusal is None and modality in self.declaration.modalities

    def is_captured(self) -> bool:
        """Did `capture()` run, with a graph to show for it?"""
        with self._lock:
            return self.capture_done() and bool(self._captured.set.graphs)

    def capture_done(self) -> bool:
        """Did `capture()` come to its end since the manager was made or cleared, with or without a graph to show for it?"""
        with self._lock:
            return self._captured.planner is not None

    def get_num_graphs_to_capture(self) -> int:
        """How many graphs `capture()` will try to make."""
        wanted = self.config.enabled and self.declaration.refusal is None
        return min(len(self._captured.work.keys()), self.config.max_graphs) if wanted else 0

    def graphs(self) -> tuple[BudgetGraphMetadata, ...]:
        """The captured graphs, in the order of capture."""
        with self._lock:
            rows = {(g["path"], g["token_budget"], tuple(g["axis_keys"])): g for g in self.snapshot()["graphs"]}
            return tuple(
                BudgetGraphMetadata(
                    path=key.path,
                    token_budget=key.token_budget,
                    max_items=self.ladders.max_items,
                    max_frames=self.ladders.max_frames,
                    axis_keys=key.axis_keys,
                    nbytes=graph.nbytes,
                    capture_seconds=graph.milliseconds / 1e3,
                    predicted_ms=graph.predicted_ms,
                    replays=rows[key.path, key.token_budget, tuple(map(str, key.axis_keys))]["replays"],
                    buffers={
                        name: tuple(value.shape)
                        for name, value in graph.inputs.values.items()
                        if name in self.declaration.buffer_keys
                    },
                )
                for key, graph in self._captured.set.graphs.items()
            )

    def get_cumulative_stats(self) -> dict[str, Any]:
        """`graph_hits`, `graph_misses`, `hit_rate`, `num_budgets`, `token_budgets` since the manager was made."""
        budgets = sorted({budget for ladder in self.ladders.paths.values() for budget in ladder if budget})
        return self._statistics.cumulative(budgets)

    def snapshot(self) -> dict[str, Any]:
        """Everything that is counted, as a plain dict; see `EncoderStatistics.snapshot`.

        Also `attention`: the kernel of each attention call in graphs, with times and refusals (`KernelChoices.rows`), and
        `phase_seconds`: where the time of all captures went (`phases.PHASES`).
        """
        return {
            **self._statistics.snapshot(),
            "attention": self._captured.kernels.rows(),
            "phase_seconds": dict(self._captured.set.phases.seconds),
        }


def _usable(device: torch.device | str, dtype: object) -> torch.device:
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device={str(found)!r}, but torch sees no CUDA device here.")
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: expected a torch.dtype, such as torch.bfloat16.")
    return found


def _checked(model: object) -> SupportsEncoderCudaGraph:
    if isinstance(model, SupportsEncoderCudaGraph):
        return model
    methods = [name for name in vars(SupportsEncoderCudaGraph) if "encoder" in name]
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    raise ProtocolError(f"{type(model).__name__} is no SupportsEncoderCudaGraph: it lacks {', '.join(missing)}.")
