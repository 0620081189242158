"""Images in, features out: the encoder contract, the table form, and the manager that captures and replays.

The names of this room, for engine authors; loaded on first use, so that a configuration can be checked without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_compile.backend.roles import Role
    from vit_compile.runtime.capture_inputs import (
        BudgetGraphMetadata,
        EncoderCudaGraphCaptureInputs,
        EncoderCudaGraphReplayBuffers,
    )
    from vit_compile.runtime.config import EncoderConfig
    from vit_compile.runtime.graph_config import EncoderCudaGraphConfig, EncoderPathConfig
    from vit_compile.runtime.inputs import host_grids, host_rows
    from vit_compile.runtime.item_spec import EncoderItemSpec
    from vit_compile.runtime.manager import EncoderCudaGraphManager
    from vit_compile.runtime.metrics import EncoderMetricsCollector
    from vit_compile.runtime.protocol import SupportsDirectFill, SupportsEncoderCudaGraph, SupportsPaddingTrial
    from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, TablePath, single_path

_HOMES = {
    "BudgetGraphMetadata": "runtime.capture_inputs",
    "Buffer": "runtime.table",
    "EncoderConfig": "runtime.config",
    "EncoderCudaGraphCaptureInputs": "runtime.capture_inputs",
    "EncoderCudaGraphConfig": "runtime.graph_config",
    "EncoderCudaGraphManager": "runtime.manager",
    "EncoderCudaGraphReplayBuffers": "runtime.capture_inputs",
    "EncoderItemSpec": "runtime.item_spec",
    "EncoderMetricsCollector": "runtime.metrics",
    "EncoderPathConfig": "runtime.graph_config",
    "EncoderTable": "runtime.table",
    "ItemSize": "runtime.table",
    "Modality": "runtime.table",
    "Role": "backend.roles",
    "SupportsDirectFill": "runtime.protocol",
    "SupportsEncoderCudaGraph": "runtime.protocol",
    "SupportsPaddingTrial": "runtime.protocol",
    "TablePath": "runtime.table",
    "host_grids": "runtime.inputs",
    "host_rows": "runtime.inputs",
    "single_path": "runtime.table",
}

__all__ = [
    "BudgetGraphMetadata",
    "Buffer",
    "EncoderConfig",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphManager",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "EncoderMetricsCollector",
    "EncoderPathConfig",
    "EncoderTable",
    "ItemSize",
    "Modality",
    "Role",
    "SupportsDirectFill",
    "SupportsEncoderCudaGraph",
    "SupportsPaddingTrial",
    "TablePath",
    "host_grids",
    "host_rows",
    "single_path",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"vit_compile.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
