"""What passes between a model and the manager: inputs of a capture, and values of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vit_compile.runtime.graph_config import AxisKeys


@dataclass(slots=True)
class EncoderCudaGraphCaptureInputs:
    """Everything that a forward of fixed shape reads; the manager owns it for as long as the graph lives.

    Tensors named in `buffer_keys` are the graph's static buffers: allocated outside of inference mode, on the manager's device,
    holding values that are valid for a first run. Everything else (ints, constants) is fixed in the graph.
    """

    values: dict[str, Any]
    """Keyword values of `encoder_cudagraph_forward`."""

    state: Any = None
    """For models that fill their buffers themselves (`SupportsDirectFill`): whatever they need for it."""

    nbytes: int = 0
    """Bytes of the buffers that belong to this capture alone."""

    output_tokens: int | None = None
    """Tokens that the forward returns for these inputs. None: not known; at least those of any batch."""


@dataclass(slots=True)
class EncoderCudaGraphReplayBuffers:
    """Values of one batch, unpadded: the manager copies each to the front of its buffer and pads behind it."""

    values: dict[str, torch.Tensor]
    """By buffer key; on any device. Every buffer of the path must be there."""


@dataclass(frozen=True, slots=True)
class BudgetGraphMetadata:
    """One captured graph, as `EncoderCudaGraphManager.graphs()` describes it."""

    path: str
    token_budget: int
    max_items: int
    max_frames: int
    axis_keys: AxisKeys
    nbytes: int
    """Device memory that the capture added, its buffers included."""
    capture_seconds: float
    predicted_ms: float | None = None
    """Time of one replay with few long items, measured after capture; None where it was not measured."""
    replays: int = 0
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the input buffers."""
