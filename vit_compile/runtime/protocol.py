"""`SupportsEncoderCudaGraph`: what a model offers so that `EncoderCudaGraphManager` can capture and replay it.

The manager knows no model: it asks for sizes, inputs of fixed shape, a forward, and the way back from features to items.
Write the methods yourself, or declare a table (`vit_compile.runtime.table`) and get them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from vit_compile.runtime.capture_inputs import EncoderCudaGraphCaptureInputs, EncoderCudaGraphReplayBuffers
from vit_compile.runtime.graph_config import AxisKeys, EncoderCudaGraphConfig
from vit_compile.runtime.item_spec import EncoderItemSpec


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """The contract. `mm_kwargs` are the keyword arguments of one request, as the model's processor makes them.

    Weights are watched in every `nn.Module` and tensor among the object's attributes (modules also in lists and dicts), or in
    what its `encoder_modules()` and `encoder_tensors()` return where there are such methods.
    """

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The static declaration. Called once, by the manager's constructor; no GPU work."""
        ...

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """(smallest, largest) useful budget in output tokens. Called once, by the constructor."""
        ...

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Mapping[str, Any]) -> Sequence[EncoderItemSpec]:
        """Sizes of every item, in the order in which features are to come back. Called first in every `execute`.

        Checks the request and raises before any work. May read sizes from a device tensor, once; nothing else may.
        """
        ...

    def select_encoder_cudagraph_items(self, mm_kwargs: Mapping[str, Any], indices: Sequence[int]) -> Mapping[str, Any]:
        """The request that holds only these items, in this order; may be none. Called for each batch that is not direct."""
        ...

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
        """Static buffers and constants for one graph. Called once per graph by `capture()`, largest budget first.

        Args:
            token_budget: output tokens of the graph; above 0.
            max_batch_size: most items of a batch.
            max_frames_per_batch: most frames of a batch; 0 where there are no clips.
            axis_keys: one key for each capture axis.
        """
        ...

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Mapping[str, Any], path: str, axis_keys: AxisKeys
    ) -> EncoderCudaGraphReplayBuffers:
        """Unpadded values of the path's buffers for a batch. Called before each replay that is not direct. No host reads."""
        ...

    def encoder_cudagraph_forward(self, values: Mapping[str, Any], path: str) -> torch.Tensor:
        """The fixed-shape forward that is compiled and captured: features [tokens, width] of the whole budget.

        Rows of real items come first, in the order of the items. No host reads, no copies between host and device.
        """
        ...

    def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        """The model's own forward of a batch on one path: features [tokens, width], exactly the items' tokens, new memory."""
        ...

    def postprocess_encoder_output(
        self, outputs: Mapping[str, torch.Tensor | None], specs: Sequence[EncoderItemSpec], mm_kwargs: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        """Features of every item of a batch, in its order, from the outputs of the paths.

        Args:
            outputs: [tokens, width] of each path, real rows only; None where the batch has nothing on a path. They are
                this call's own (with `outputs="borrow"` graph memory), so views of them may be handed on.
            specs: of the batch.
            mm_kwargs: of the batch.
        """
        ...


@runtime_checkable
class SupportsDirectFill(Protocol):
    """Optional: a model that fills its static buffers itself, straight from the whole request.

    Saves the selected request and the replay values in between. The manager uses it where it is there.
    """

    def parse_encoder_request(self, mm_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with whatever was found out about it, so that it is parsed once: passed on as `mm_kwargs` from here on."""
        ...

    def forget_encoder_metadata(self) -> None:
        """Drop whatever was computed from weights and kept. Called by `clear()`, and before replaced weights are captured."""
        ...

    def fill_encoder_cudagraph_buffers(self, state: Any, mm_kwargs: Mapping[str, Any], indices: Sequence[int], path: str) -> bool:
        """Put these items into the buffers behind `EncoderCudaGraphCaptureInputs.state`, padding included.

        Runs on the caller's stream, ordered after the previous replay. Returns False, with nothing written that matters,
        where the items do not fit (too many segments): the batch then runs eagerly.
        """
        ...

    def postprocess_encoder_items(
        self,
        outputs: Mapping[str, torch.Tensor | None],
        specs: Sequence[EncoderItemSpec],
        mm_kwargs: Mapping[str, Any],
        indices: Sequence[int],
    ) -> Sequence[torch.Tensor]:
        """`postprocess_encoder_output` for items of the whole request."""
        ...


@runtime_checkable
class SupportsPaddingTrial(Protocol):
    """Optional: a model whose padding can be tried out at capture, with garbage that must not matter."""

    def fill_encoder_cudagraph_trial(self, state: Any, path: str, tokens: int, kind: str | None, seed: int = 0) -> int:
        """Made-up data for about so many output tokens into the buffers: whole items, and padding behind them if there is room.

        Args:
            state: of `EncoderCudaGraphCaptureInputs`.
            kind: garbage in the padding: "small", "large" (finite) or "nan"; None for clean padding.
            seed: the same data for the same number, whatever the kind.

        Returns:
            Output tokens that are real.
        """
        ...

    def encoder_cudagraph_trial_values(self, state: Any, path: str) -> Sequence[Mapping[str, Any]]:
        """What the last clean `fill_encoder_cudagraph_trial` put in, without padding: for each item the values of a forward
        of its rows alone. Empty where that cannot be told."""
        ...

    def encoder_cudagraph_trial_shows(self, state: Any) -> Collection[str]:
        """What the last trial showed with metadata as real items have it: "use", "padding", "company" of several items.

        What is not named is compared on the first batches of the graph.
        """
        ...


@runtime_checkable
class KeepsTrialData(Protocol):
    """Optional, beside `SupportsPaddingTrial`: a model that keeps the data of a trial from one fill to the next."""

    def forget_encoder_cudagraph_trial(self, state: Any) -> None:
        """The trial of this graph is over: let go of what was kept. What is in the buffers stays."""
        ...


@runtime_checkable
class SupportsLayoutTiming(Protocol):
    """Optional, beside `SupportsPaddingTrial`: a model whose graphs can be timed with few long and with many short items, for
    times that depend on the layout of a batch (`vit_compile.runtime.replay_times`)."""

    def fill_encoder_cudagraph_layout(self, state: Any, path: str, tokens: int, least: int, most: int) -> int:
        """Made-up data of equal items into the buffers, with clean padding: as many as there is room for, and together about
        as many output tokens as given.

        Args:
            state: of `EncoderCudaGraphCaptureInputs`.
            tokens: of all items together, at most.
            least, most: how many items.

        Returns:
            The sum over all items of `tokens**2 / frames`, see `replay_times.squares_of`; 0 where so few or so many do not fit,
            or where no layout matters.
        """
        ...
