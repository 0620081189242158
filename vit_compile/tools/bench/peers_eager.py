"""Peers without graphs: the tower as shipped, with hoisted metadata, and through `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vit_compile._torch_compat import mark_dynamic
from vit_compile.models.hf_attention import use_attention
from vit_compile.models.vision_metadata import vision_metadata
from vit_compile.tools.bench.peer import Setup, dense_arguments, dense_features, packed_features, packed_outputs
from vit_compile.tools.bench.towers import Tower
from vit_compile.tools.bench.workload import Inputs

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class EagerPacked:
    """A packed tower as shipped: one forward for the images of a request, one for its clips, `grid_thw` on the device."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower

    def prepare(self, inputs: Inputs) -> Any:
        """Rows and grids of each forward."""
        parts = ((inputs.image_rows, inputs.image_grids), (inputs.clip_rows, inputs.clip_grids))
        return [(rows, torch.tensor(grids, device=self._tower.device)) for rows, grids in parts if rows is not None]

    def call(self, prepared: Any) -> Any:
        """See `Peer`."""
        return [packed_outputs(self._tower.module(pixels, grid_thw=grid)) for pixels, grid in prepared]

    def features(self, output: Any, inputs: Inputs) -> list[torch.Tensor]:
        """See `Peer`."""
        return packed_features([torch.cat(level) for level in zip(*output, strict=True)], inputs)

    def close(self) -> None:
        """Nothing is held."""


class EagerDense:
    """A dense tower as shipped: one forward for all images of one size, so one for each image of mixed traffic."""

    def __init__(self, tower: Tower) -> None:
        self._call = dense_call(tower)

    def prepare(self, inputs: Inputs) -> Any:
        """Batches."""
        return [batch.pixels for batch in inputs.batches]

    def call(self, prepared: Any) -> Any:
        """See `Peer`."""
        return [self._call(pixels) for pixels in prepared]

    def features(self, output: Any, inputs: Inputs) -> list[torch.Tensor]:
        """See `Peer`."""
        return dense_features([last for last, *_ in output], inputs)

    def close(self) -> None:
        """Nothing is held."""


def make_eager(setup: Setup) -> EagerPacked | EagerDense:
    """As shipped."""
    return EagerPacked(setup.tower) if setup.tower.kind == "packed" else EagerDense(setup.tower)


def packed_call(tower: Tower) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The tower on precomputed metadata, all that the language model gets of it."""

    def call(pixels: torch.Tensor, **metadata: Any) -> tuple[torch.Tensor, ...]:
        return packed_outputs(tower.module(pixels, **metadata))

    return call


def dense_call(tower: Tower) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The tower on a batch [n,3,H,W]: last hidden state, and the pooled output where there is one."""
    module, arguments = tower.module, dense_arguments(tower)

    def call(pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = module(pixels, **arguments)
        pooled = getattr(output, "pooler_output", None)
        return (output.last_hidden_state,) if pooled is None else (output.last_hidden_state, pooled)

    return call


class Hoisted:
    """A packed tower on metadata that was computed before the clock starts, with this package's varlen attention.

    That is the better case for whoever is compared: a real call has to pay for the metadata of a layout that is new.

    Args:
        tower: its attention is switched until `close`.
        wrap: what makes the callable, such as `torch.compile`.
        mark: mark rows dynamic.
        bound: `max_seqlen` of every call. None: the longest segment of each.
    """

    def __init__(self, tower: Tower, wrap: Wrap, *, mark: bool, bound: int | None = None) -> None:
        self._tower, self._mark, self._bound = tower, mark, bound
        self._attention = tower.module.config._attn_implementation
        use_attention(tower.module)
        self.function = wrap(packed_call(tower))

    def prepare(self, inputs: Inputs) -> Any:
        """Rows, and metadata on the device."""
        rows = inputs.rows
        metadata = vision_metadata(self._tower.module, inputs.grids, device=self._tower.device)
        if self._bound is not None:
            metadata["max_seqlen"] = self._bound
        if self._mark:
            for value in (rows, *metadata.values()):
                if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > 1:
                    mark_dynamic(value, 0)
        return rows, metadata

    def call(self, prepared: Any) -> Any:
        """See `Peer`."""
        pixels, metadata = prepared
        return self.function(pixels, **metadata)

    def features(self, output: Any, inputs: Inputs) -> list[torch.Tensor]:
        """See `Peer`."""
        return packed_features(output, inputs)

    def close(self) -> None:
        """The tower's own attention."""
        self._tower.module.config._attn_implementation = self._attention


class CompiledDense(EagerDense):
    """A dense tower through a compiler, batch by batch.

    Args:
        tower, wrap, mark: see `Hoisted`.
        reuses: each call overwrites the outputs of the one before, so those of several batches have to be copied.
    """

    def __init__(self, tower: Tower, wrap: Wrap, *, mark: bool, reuses: bool = False) -> None:
        self.function = self._call = wrap(dense_call(tower))
        self._mark, self._reuses = mark, reuses

    def prepare(self, inputs: Inputs) -> Any:
        """Batches, their sizes marked dynamic."""
        batches = super().prepare(inputs)
        for pixels in batches if self._mark else ():
            for dim in (0, 2, 3):
                if pixels.shape[dim] > 1:
                    mark_dynamic(pixels, dim)
        return batches

    def call(self, prepared: Any) -> Any:
        """See `Peer`."""
        if self._reuses and len(prepared) > 1:
            return [tuple(part.clone() for part in self._call(pixels)) for pixels in prepared]
        return super().call(prepared)


def compiled(setup: Setup, wrap: Wrap, *, mark: bool, reuses: bool = False) -> Hoisted | CompiledDense:
    """The tower through a compiler."""
    if setup.tower.kind == "packed":
        return Hoisted(setup.tower, wrap, mark=mark)
    return CompiledDense(setup.tower, wrap, mark=mark, reuses=reuses)


def make_hoisted(setup: Setup) -> Hoisted:
    """Not compiled."""
    return Hoisted(setup.tower, lambda call: call, mark=False)


def refuses_dense(setup: Setup) -> str | None:
    """Of the hoisted peer."""
    return None if setup.tower.kind == "packed" else "a dense tower takes nothing but pixels: there is no metadata to hoist"


def make_compile(setup: Setup) -> Hoisted | CompiledDense:
    """`torch.compile` with dynamic sizes from the first call on."""
    return compiled(setup, lambda call: torch.compile(call, backend=setup.compiler), mark=True)


def make_reduce_overhead(setup: Setup) -> Hoisted | CompiledDense:
    """`mode="reduce-overhead"`; repeated requests are compiled for their own sizes, which is its best case."""
    dynamic = False if setup.is_single else None
    return compiled(setup, lambda call: _reduce_overhead(call, dynamic), mark=not setup.is_single, reuses=True)


def _reduce_overhead(call: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    made = torch.compile(call, mode="reduce-overhead", dynamic=dynamic)

    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # the output before is not needed any more
        return made(*args, **kwargs)

    return step


def refuses_without_recordings(setup: Setup) -> str | None:
    """Of `reduce-overhead`."""
    if setup.tower.device.type != "cuda":
        return "it records CUDA graphs: without a GPU it is torch.compile"
    return None if setup.compiler == "inductor" else "it exists for Inductor only"
