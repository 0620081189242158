"""`EncoderCudaGraphConfig`: what a model declares about itself, once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from vit_compile.errors import ProtocolError
from vit_compile.runtime.item_spec import DEFAULT_PATH, EncoderItemSpec

PaddingLogic: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""`(buffer, values)`: write the values to the front of the buffer, and whatever pads it behind them. May not synchronise."""

AxisKeys: TypeAlias = tuple[Hashable, ...]
"""One key for each capture axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderPathConfig:
    """One independent set of graphs: most models have one, tiled towers with a thumbnail have two."""

    buffer_keys: tuple[str, ...] | None = None
    """Input buffers that this path reads. None: all of them."""

    min_token_budget: int | None = None
    """Where this path's ladder begins, in output tokens; it ends at the common maximum. None: the common minimum."""

    allow_zero_tokens: bool = False
    """May a batch have nothing for this path? It is skipped then, and the ladder shows a 0."""


@dataclass(frozen=True, kw_only=True)
class EncoderCudaGraphConfig:
    """The static part of a model's contract, returned by `get_encoder_cudagraph_config`."""

    modalities: tuple[str, ...]
    """What the model encodes, such as ("image", "video")."""

    buffer_keys: tuple[str, ...]
    """Names of the tensors among the forward's values that change from call to call."""

    out_hidden_size: int
    """Width of the features of one token, deepstack levels included."""

    padding_logics: Mapping[str, PaddingLogic] = field(default_factory=dict)
    """How a buffer is filled, by name. One that is not named gets the values at its front and zeros behind."""

    max_frames_per_video: int = 1
    """Frames of the longest clip that the model takes; sizes the boundary buffers where the user gives no number."""

    paths: Mapping[str, EncoderPathConfig] = field(default_factory=lambda: {DEFAULT_PATH: EncoderPathConfig()})
    """Paths by name, in the order in which they run. At least one."""

    capture_axes: tuple[AxisKeys, ...] = ()
    """Further dimensions of the graph set: for each axis the keys for which graphs are captured."""

    select_axis_keys: Callable[[Sequence[EncoderItemSpec], str], AxisKeys | None] | None = None
    """`(specs of a batch, path)`: one key for each axis, or None where no graph fits the batch. Needed with axes, unless the
    next one is given."""

    axis_keys_of_frames: Callable[[int, str], AxisKeys] | None = None
    """`(frames of a batch, path)`: the same where nothing but the frames counts. Planning is much quicker with it."""

    is_reachable: Callable[[str, int, AxisKeys, int, int], bool] | None = None
    """`(path, token_budget, axis_keys, max_items, max_frames)`: can any batch need this graph? None: all of them."""

    refusal: str | None = None
    """Why the model cannot be served at all (its output count depends on the data, for example). Refuses all modalities."""

    def __post_init__(self) -> None:
        if not self.modalities:
            raise ProtocolError("the model declares no modality.")
        if not self.paths:
            raise ProtocolError("the model declares no path: leave `paths` out, or name at least one.")
        if self.out_hidden_size <= 0 or self.max_frames_per_video < 0:
            raise ProtocolError(
                f"out_hidden_size={self.out_hidden_size}, max_frames_per_video={self.max_frames_per_video}: expected a positive "
                "width, and a number of frames of 0 or more."
            )
        if any(not axis for axis in self.capture_axes):
            raise ProtocolError(f"capture_axes={self.capture_axes!r}: every axis needs at least one key.")
        if self.capture_axes and self.select_axis_keys is None and self.axis_keys_of_frames is None:
            raise ProtocolError("the model declares capture axes but no select_axis_keys to choose among them.")
        for name in {*self.padding_logics, *(key for path in self.paths.values() for key in path.buffer_keys or ())}:
            if name not in self.buffer_keys:
                raise ProtocolError(f"{name!r} is not one of buffer_keys={self.buffer_keys}.")

    def path_buffer_keys(self, path: str) -> tuple[str, ...]:
        """Buffers that one path reads."""
        own = self.paths[path].buffer_keys
        return self.buffer_keys if own is None else own
