"""Hugging Face towers through `vit_compile::varlen_attention`.

A tower looks up its attention by name at each call. With a name that contains "flash" it passes segment boundaries and
bounds to one call, where the other names make it read the boundaries on the host and loop over the segments. This file
registers such a name and switches a tower to it; no tower code is copied.

Dense towers call the same function without boundaries and get scaled dot product attention, mask included.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vit_compile.attention.varlen import varlen_attention
from vit_compile.errors import MissingDependencyError, ModelError

ATTENTION_NAME = "vit_compile_flash"
"""The registered name; towers look for "flash" in it."""


class _Holder(threading.local):
    """Of this thread's forward: its boundaries, as many towers drop keyword arguments on the way to their attention, and
    whether it is an encoder's."""

    def __init__(self) -> None:
        self.segments: tuple[torch.Tensor, int] | None = None
        self.encoding = False


_holder = _Holder()


@contextmanager
def packed_segments(cu_seqlens: torch.Tensor, max_seqlen: int) -> Iterator[None]:
    """Attention inside keeps to these segments, in towers that pass no boundaries on (dense ones, for example).

    Args:
        cu_seqlens: int32 [S+1], offsets in rows.
        max_seqlen: no segment is longer.

    Dynamo traces it, and afterwards nothing is left behind. It holds for the calling thread. Boundaries that a tower does pass
    on win.
    """
    before = _holder.segments
    _holder.segments = (cu_seqlens, max_seqlen)
    try:
        yield
    finally:
        _holder.segments = before


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer.

    Args:
        module: the attention module that calls.
        query, key, value: [1,H,T,D] with boundaries, [N,H,T,D] without.
        attention_mask: for dense attention only.
        scaling: factor on the scores; None means D**-0.5.
        dropout, is_causal: passed on to dense attention; refused with boundaries.
        cu_seq_lens_q: segment boundaries, int32 [S+1]; None selects dense attention.
        max_length_q: bound on the longest segment in rows; None means T, which is always enough.
        kwargs: whatever the tower did not consume; dense attention gets it, varlen attention ignores it.

    Returns:
        ([1,T,H,D] or [N,T,H,D], None).

    Raises:
        ModelError: boundaries together with more than one batch item, dropout or causal attention; packed segments of
            `packed_segments` together with a mask.
    """
    if cu_seq_lens_q is None and _holder.segments is not None:
        cu_seq_lens_q, max_length_q = _holder.segments
        if attention_mask is not None:
            raise ModelError(f"{type(module).__name__} builds an attention mask, which packed rows have no use for.")
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out, None
    if query.shape[0] != 1:
        raise ModelError(f"{ATTENTION_NAME} got boundaries and {query.shape[0]} batch items: pack all rows into one item.")
    if dropout:
        raise ModelError(f"{ATTENTION_NAME} has no dropout (got {dropout}): set the tower's attention_dropout to 0, or use sdpa.")
    if is_causal:
        raise ModelError(f"{ATTENTION_NAME} is not causal: use another attention for {type(module).__name__}.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    boundaries = cu_seq_lens_q if cu_seq_lens_q.dtype == torch.int32 else cu_seq_lens_q.to(torch.int32)
    bound = query.shape[2] if max_length_q is None else max_length_q
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return varlen_attention(q, k, v, boundaries, bound, scale)[None], None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers, attention and mask. Idempotent.

    Without the mask function a tower that builds a padding mask would silently get none and attend to its padding.

    Raises:
        MissingDependencyError: transformers is missing or too old.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise MissingDependencyError(
            f"Hugging Face towers need transformers 5.17 or newer ({error}): pip install 'vit_compile[hf]'."
        ) from error
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def use_attention(tower: torch.nn.Module) -> None:
    """Switch a vision tower to `ATTENTION_NAME`; registers it first.

    Args:
        tower: the vision tower itself (for example `model.model.visual`), not the model around it.

    What to know:
        - The config object is changed, and it may be shared: other models built from it switch as well.
        - Setting a parent's config afterwards (`model.set_attn_implementation(...)`) pushes its choice down and undoes this.
        - `tower.set_attn_implementation(ATTENTION_NAME)` does not work: transformers takes any name with "flash" in it
          for a package and tries to import that. Hence this function.
        - `save_pretrained` does not store it.
        - Undo with `tower.config._attn_implementation = "sdpa"`.

    Raises:
        ModelError: no config, or the config of a whole vision-language model.
        MissingDependencyError: transformers is missing or too old.
    """
    config: Any = getattr(tower, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise ModelError(f"{type(tower).__name__} has no transformers config: use_attention takes a Hugging Face vision tower.")
    if getattr(config, "vision_config", None) is not None:
        raise ModelError(
            f"{type(tower).__name__} is a whole model, and this would change its text part too: pass its vision tower "
            "(for example model.model.visual or model.vision_model)."
        )
    register()
    config._attn_implementation = ATTENTION_NAME


class AttentionSwitch:
    """A vision tower on `ATTENTION_NAME` through config objects of its own, so that whoever shares its config notices nothing.

    Those share their values with the original ones: what is set on either is set on both, the attention included, which the
    tower has again where the switch does not apply. Deep copies and pickles of the tower have the original config.

    Args:
        towers: the modules whose attention is switched, children included.

    Raises:
        ModelError: none of them has a transformers config.
        MissingDependencyError: transformers is missing or too old.
    """

    def __init__(self, *towers: torch.nn.Module) -> None:
        register()
        self._everywhere = True
        own: dict[int, Any] = {}
        self._switched: list[tuple[torch.nn.Module, Any, Any]] = []
        for module in (module for tower in towers for module in tower.modules()):
            config = vars(module).get("config")
            if config is None or not hasattr(config, "_attn_implementation"):
                continue
            if id(config) not in own:
                own[id(config)] = _own_view(config, self)
            self._switched.append((module, config, own[id(config)]))
            module.config = own[id(config)]
        if not self._switched:
            raise ModelError(f"{', '.join(type(tower).__name__ for tower in towers)} has no transformers config.")

    def confine(self) -> None:
        """From now on the switch applies inside `encoding()` only: whatever else calls the tower gets its config's attention."""
        self._everywhere = False

    @property
    def applies(self) -> bool:
        """Here and now?"""
        return self._everywhere or _holder.encoding

    def undo(self) -> None:
        """Give every module the config that it had, unless somebody has given it another one since."""
        for module, config, view in self._switched:
            if vars(module).get("config") is view:
                module.config = config
        self._switched = []


@contextmanager
def encoding() -> Iterator[None]:
    """Confined switches apply inside, for the calling thread.

    Enter it outside of what is compiled: Dynamo of torch 2.11 reads properties as they were before the trace.
    """
    before = _holder.encoding
    _holder.encoding = True
    try:
        yield
    finally:
        _holder.encoding = before


def _own_view(config: Any, switch: AttentionSwitch) -> Any:
    """A config with the values of another, and `ATTENTION_NAME` where the switch applies. Its copies and pickles are those of
    the original."""
    kind: Any = type(config)
    inherited: Any = getattr(kind, "_attn_implementation", None)
    is_property = isinstance(inherited, property)  # as in every config of transformers

    def attention(self: Any) -> Any:
        if switch.applies:
            return ATTENTION_NAME
        return inherited.fget(self) if is_property else vars(self).get("_attn_implementation")

    def set_attention(self: Any, value: Any) -> None:
        if is_property:
            inherited.fset(self, value)
        else:
            vars(self)["_attn_implementation"] = value

    def copied(self: Any) -> Any:
        return copy.copy(config)

    def reduced(self: Any, protocol: Any) -> Any:
        return operator.getitem, ([config], 0)  # deep copies and pickles: the original's, without this package

    members = {
        "_attn_implementation": property(attention, set_attention),
        "__copy__": copied,
        "__reduce_ex__": reduced,
        "__module__": kind.__module__,
    }
    own: Any = object.__new__(type(kind.__name__, (kind,), members))
    object.__setattr__(own, "__dict__", vars(config))
    return own
