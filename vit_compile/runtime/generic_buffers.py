"""Buffers of models that write the contract out: replay values are copied to the front, and padded as the model says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vit_compile.backend.padding import PaddedBuffer
from vit_compile.backend.roles import Role
from vit_compile.errors import ProtocolError
from vit_compile.runtime.graph_config import PaddingLogic
from vit_compile.runtime.inputs import lossless


class GenericBuffers:
    """The static buffers of one graph, by key. Buffers without a padding rule of the model's are zero behind their values."""

    def __init__(self, values: Mapping[str, Any], keys: Sequence[str], logics: Mapping[str, PaddingLogic]) -> None:
        self._logics = logics
        self._buffers: dict[str, PaddedBuffer] = {}
        for key in keys:
            if not isinstance(values.get(key), torch.Tensor):
                raise ProtocolError(f"prepare_encoder_cudagraph_capture_inputs gave no tensor for the buffer {key!r}.")
            dim = 0 if values[key].dim() else -1
            self._buffers[key] = PaddedBuffer(key, values[key], Role.ROWS, dim)

    def fill(self, values: Mapping[str, Any]) -> bool:
        """Copy and pad; False where a value has more entries than its buffer.

        Raises:
            ProtocolError: a value is missing, or has another shape or a dtype that would lose precision.
        """
        for key, buffer in self._buffers.items():
            value = values.get(key)
            if not isinstance(value, torch.Tensor):
                raise ProtocolError(f"prepare_encoder_cudagraph_replay_buffers gave no tensor for the buffer {key!r}.")
            if value.shape[1:] != buffer.tensor.shape[1:] or value.dim() != buffer.tensor.dim():
                raise ProtocolError(f"buffer {key!r} is {list(buffer.tensor.shape)} and its value {list(value.shape)}.")
            if not lossless(value.dtype, buffer.tensor.dtype):
                raise ProtocolError(f"buffer {key!r} is {buffer.tensor.dtype} and its value {value.dtype}: that loses precision.")
            if value.dim() and value.shape[0] > buffer.tensor.shape[0]:
                return False
        for key, buffer in self._buffers.items():
            logic = self._logics.get(key)
            if logic is not None:
                logic(buffer.tensor, values[key])
            else:
                buffer.dirty = -1  # graphs may share the memory, so what is behind the values is anybody's
                buffer.fill(values[key])
        return True
