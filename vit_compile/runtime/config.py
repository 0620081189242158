"""`EncoderConfig`: how the graphs of one encoder are sized, captured and used; one frozen dataclass, checked in one place.

What depends on the model (its budget range, its paths) is checked when the two meet, in `vit_compile.runtime.ladders`. Nothing
here imports torch: a server can check a configuration before it loads anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vit_compile.errors import OptionError
from vit_compile.options import (
    ATTENTION_AUTO,
    ATTENTION_KERNELS,
    COMPILERS,
    OUTPUTS,
    check_choice,
    check_flag,
    checked_keys,
    listed,
    natural_int,
    pass_names,
    positive_int,
    positive_ints,
)

PACKINGS = ("cost", "greedy")
MODES = ("compiled", "eager")
DEFAULT_COMPILER = "inductor"
DEFAULT_MAX_GRAPHS = 128
SEGMENT_CAPACITIES = (64,)
"""As many as the project's kernel for Hopper takes, and more than most batches of images have; clips go on to the graphs for
all segments. With that kernel tighter ones gained nothing, and each costs start-up 0.8 s for every budget
(docs/design/0009-speed.md). Empty slots cost FlashAttention-2, which serves where Triton does not run, more: 8 segments of 784
rows take it 154 us in 8 slots and 772 in 640 (docs/benchmarks/attention-kernels.json)."""

_CHOICES = {"packing": PACKINGS, "mode": MODES, "compiler": COMPILERS, "outputs": OUTPUTS, "attention": ATTENTION_KERNELS}
_FLAGS = ("isolate", "look_ahead", "enabled", "verify", "strict")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """How one encoder's graphs are sized, captured and replayed."""

    token_budgets: tuple[int, ...] | None = None
    """Sizes of the graphs, in output tokens. None: doubling over the model's budget range. The helpers of
    `vit_compile.planning.budgets` build ladders, also fitted ones."""

    path_token_budgets: Mapping[str, tuple[int, ...]] | None = field(default=None, hash=False)
    """Ladders of single paths, by the path's name; they win over everything else. 0 stands for "skip this path", where the
    model allows it. None: every path's ladder is inferred."""

    max_items_per_batch: int | None = None
    """Most images and clips of one replay. None: as many of the model's smallest budget as fit its largest, but never more
    than the smallest budget on the ladder."""

    max_frames_per_batch: int | None = None
    """Most frames of one replay, an image being one; sizes the boundary buffers. 0: clips run eagerly. None:
    `max_items_per_batch` clips of the model's greatest length."""

    packing: str = "cost"
    """Which items share a replay. "cost": whatever is predicted to be fastest, eager execution being one of the choices;
    "greedy": smallest first, as many as fit the largest budget."""

    look_ahead: bool = False
    """For "greedy": also close a batch where two small graphs beat a large one. "cost" always considers that."""

    mode: str = "compiled"
    """What is captured. "compiled": the forward through `torch.compile`; "eager": the forward as it is written."""

    compiler: str = DEFAULT_COMPILER
    """What compiles the forward: "inductor", "aot_eager" or "eager". Not with mode="eager"."""

    passes: tuple[str, ...] | None = None
    """Graph passes of the compiled forward, by name, in this order. None: the default ones; (): none. Not with mode="eager"."""

    attention: str = ATTENTION_AUTO
    """Kernel of the attention calls in the graphs. "auto": the fastest, timed at capture for every graph; "default": the one
    that eager calls take; else a kernel's name. Without effect on a CPU."""

    isolate: bool = True
    """A NaN or Inf in one image never reaches another one's features. False: kernels that let it cross are used without a
    fence, where they are faster."""

    enabled: bool = True
    """False: no graphs at all, everything runs eagerly; the other options wait until it is True again."""

    max_graphs: int = DEFAULT_MAX_GRAPHS
    """Most graphs of the encoder, over all paths, budgets and capture axes."""

    max_graph_bytes: int | None = None
    """Most bytes of device memory that the graphs may take, buffers included. None: no cap."""

    outputs: str = "copy"
    """"copy": features belong to the caller; "borrow": they alias graph memory and are valid until the next call."""

    log_every: int = 100
    """Items after which hits and misses are logged. 0: never."""

    verify: bool = True
    """Try every graph at capture: items together and padded against each alone, and garbage in the padding. Where the model
    gives no example items, the first batches of a graph are compared as well. One that fails is not used, and what it would
    have served runs eagerly, item by item."""

    strict: bool = False
    """Raise `SkipError` instead of running eagerly."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._store("max_graphs", positive_int("max_graphs", self.max_graphs))
        self._store("log_every", natural_int("log_every", self.log_every))
        if self.max_graph_bytes is not None:
            self._store("max_graph_bytes", positive_int("max_graph_bytes", self.max_graph_bytes))
        if self.max_items_per_batch is not None:
            self._store("max_items_per_batch", positive_int("max_items_per_batch", self.max_items_per_batch))
        if self.max_frames_per_batch is not None:
            self._store("max_frames_per_batch", natural_int("max_frames_per_batch", self.max_frames_per_batch))
        if self.token_budgets is not None:
            budgets = positive_ints("token_budgets", self.token_budgets)
            if not budgets:
                raise OptionError(
                    "token_budgets is empty: give at least one size in output tokens, or None to infer them from the model."
                )
            self._store("token_budgets", budgets)
        if self.path_token_budgets is not None:
            self._store("path_token_budgets", _path_ladders("path_token_budgets", self.path_token_budgets))
        if self.passes is not None:
            self._store("passes", pass_names(self.passes))
        self._check_combinations()

    def _store(self, name: str, value: object) -> None:
        """Keeps a normalised value; the record is frozen for everybody else."""
        object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        if self.look_ahead and self.packing != "greedy":
            raise OptionError(
                f'look_ahead=True is for packing="greedy", and packing={self.packing!r} always looks ahead: drop it, or choose '
                '"greedy".'
            )
        for name, given in (("compiler", self.compiler != DEFAULT_COMPILER), ("passes", bool(self.passes))):
            if self.mode == "eager" and given:
                raise OptionError(
                    f'{name}={getattr(self, name)!r} would do nothing, since mode="eager" captures the forward uncompiled: drop '
                    'it, or choose mode="compiled".'
                )
        in_paths = sum(budget > 0 for ladder in (self.path_token_budgets or {}).values() for budget in ladder)
        for name, count in (("token_budgets", len(self.token_budgets or ())), ("budgets in path_token_budgets", in_paths)):
            if count > self.max_graphs:
                raise OptionError(f"{count} {name}, but max_graphs={self.max_graphs}: give fewer or raise max_graphs.")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | None) -> EncoderConfig:
        """A configuration from a dict with the names of the fields; unknown keys are errors."""
        return cls(**checked_keys(given, [f.name for f in dataclasses.fields(cls)]))

    @classmethod
    def from_vllm(cls, given: Mapping[str, Any] | None) -> EncoderConfig:
        """A configuration from vLLM's option names.

        Every option that is given either acts or is told to do nothing: what it became is logged at INFO, and
        `vit_compile.runtime.vllm_options.explain_vllm` returns it. Options that are not given keep the defaults of this class.

        Raises:
            OptionError: An option is unknown, has a wrong type or value, or contradicts another one.
        """
        # Here and not at the top: that module makes configurations, so it needs this one.
        from vit_compile.runtime.vllm_options import config_from_vllm

        return config_from_vllm(given)


def _path_ladders(name: str, ladders: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(ladders, Mapping):
        raise OptionError(f"{name}={ladders!r}: expected a dict from a path's name to its ladder.")
    if not ladders:
        raise OptionError(f"{name} is empty: name at least one path, or leave it out to infer all ladders.")
    checked = {}
    for path, ladder in ladders.items():
        if not isinstance(path, str) or not path.strip():
            raise OptionError(f"{name} contains the path {path!r}: expected non-empty names.")
        own = f"{name}[{path!r}]"
        sizes = sorted({natural_int(f"item of {own}", item) for item in listed(own, ladder, "output-token counts")})
        if not any(sizes):
            raise OptionError(f"{own}={tuple(sizes)}: give at least one size above 0, in output tokens.")
        checked[path] = tuple(sizes)
    return checked
