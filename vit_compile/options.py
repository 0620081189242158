"""The options of `backend="vit_cudagraph"`: one frozen dataclass, checked in one place.

`BackendOptions.from_dict` turns the `options={...}` that `torch.compile` hands over into this record; everything
behind it can rely on the values. The checks of single values serve other records of options too. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from vit_compile.errors import OptionError
from vit_compile.planning import units

MODES = ("auto", "full", "piecewise", "none")
PADDINGS = ("auto", "exact")
COMPILERS = ("inductor", "aot_eager", "eager")
OUTPUTS = ("copy", "borrow")
CHECKS = ("host", "full", "padded")
DEFAULT_PASSES = ("patch_embedding_gemm", "activation_epilogue", "aligned_linear")
PASS_NAMES = (*DEFAULT_PASSES, "padding_columns")
"""`padding_columns` is no default one: it gains in some graphs and loses in others."""
DEFAULT_MAX_GRAPHS = 32
ATTENTION_AUTO, ATTENTION_DEFAULT = "auto", "default"
ATTENTION_KERNELS = (
    ATTENTION_AUTO,
    ATTENTION_DEFAULT,
    "flash",
    "efficient",
    "dense",
    "cudnn-one-segment",
    "triton-64",
    "triton-128",
    "hopper",
    "active-flash",
    "fa4",
    "fa3",
    "fa2",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
)

_CHOICES = {
    "mode": MODES,
    "padding": PADDINGS,
    "compiler": COMPILERS,
    "outputs": OUTPUTS,
    "checks": CHECKS,
    "attention": ATTENTION_KERNELS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions:
    """How one compiled vision encoder is split, captured and replayed."""

    mode: str = "auto"
    """"full": one graph per capture size; "piecewise": a graph per piece between attentions; "none": compiled pieces
    without capture; "auto": full where every attention op allows it, else piecewise."""

    token_budgets: tuple[int, ...] | None = None
    """Capture sizes in output tokens (what the language model sees). None: capture the sizes that are seen, up to
    `max_graphs`, without padding. The helpers of `vit_compile.planning.budgets` build ladders."""

    spatial_merge_size: int = 1
    """Side of the square of patches that becomes one output token (Qwen-VL: 2)."""

    patches_per_row: int = 1
    """Patches in one row of the traced input: 1 for packed towers, patches per image for batch-first ones."""

    splitting_ops: tuple[str, ...] = ()
    """Names of further attention ops to split at ("namespace::op" or a function's name), beside the default set."""

    padding: str = "auto"
    """"auto": a smaller input is padded to the next capture size where that is proved safe; "exact": never padded."""

    compiler: str = "inductor"
    """What compiles the pieces."""

    compile_sizes: tuple[int, ...] = ()
    """Output-token sizes for which the pieces are compiled a second time, with static shapes."""

    passes: tuple[str, ...] | None = None
    """Graph passes to run, by name, in this order. None: `DEFAULT_PASSES`; (): none."""

    attention: str = ATTENTION_AUTO
    """Kernel of the attention calls in graphs of mode "full". "auto": the fastest, timed at capture for every size; "default":
    the one that calls without a graph take; else a kernel's name. Without effect on a CPU."""

    max_graphs: int = DEFAULT_MAX_GRAPHS
    """Most capture sizes held by one encoder; in piecewise mode one capture size is one chain of graphs."""

    max_graph_bytes: int | None = None
    """Most bytes of device memory that the captures of one encoder may take. None: no cap."""

    outputs: str = "copy"
    """"copy": outputs belong to the caller; "borrow": they alias graph memory and are valid until the next call."""

    debug_dir: str | None = None
    """Folder for readable dumps of every stage. None: no dumps."""

    checks: str = "host"
    """"host": check what can be checked without reading the device; "full": also read boundaries from the device, which
    synchronises on every call; "padded": as "host", for callers that pad rows themselves, so that boundaries on the host may
    end before the last row."""

    strict: bool = False
    """Raise `SkipError` instead of falling back."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name in ("spatial_merge_size", "patches_per_row", "max_graphs"):
            self._store(name, positive_int(name, getattr(self, name)))
        if self.max_graph_bytes is not None:
            self._store("max_graph_bytes", positive_int("max_graph_bytes", self.max_graph_bytes))
        check_flag("strict", self.strict)
        if self.token_budgets is not None:
            budgets = positive_ints("token_budgets", self.token_budgets)
            if not budgets:
                raise OptionError(
                    "token_budgets is empty: give at least one size in output tokens, or None to capture the sizes seen."
                )
            self._store("token_budgets", budgets)
        self._store("compile_sizes", positive_ints("compile_sizes", self.compile_sizes))
        self._store("splitting_ops", _names("splitting_ops", self.splitting_ops))
        if self.passes is not None:
            self._store("passes", pass_names(self.passes))
        if self.debug_dir is not None:
            self._store("debug_dir", _folder("debug_dir", self.debug_dir))
        self._check_combinations()

    def _store(self, name: str, value: object) -> None:
        """Keeps a normalised value; the record is frozen for everybody else."""
        object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        if self.mode == "none":
            captures_only = {
                "token_budgets": self.token_budgets is not None,
                "max_graphs": self.max_graphs != DEFAULT_MAX_GRAPHS,
                "max_graph_bytes": self.max_graph_bytes is not None,
                'outputs="borrow"': self.outputs == "borrow",
            }
            for name, given in captures_only.items():
                if given:
                    raise OptionError(
                        f'{name} is about captured graphs, and mode="none" captures nothing: drop it, or choose another mode.'
                    )
        if self.token_budgets is not None and len(self.token_budgets) > self.max_graphs:
            raise OptionError(
                f"{len(self.token_budgets)} token_budgets, but max_graphs={self.max_graphs}: give fewer or raise max_graphs."
            )
        # Fails here, before any tracing, when a size does not make whole rows.
        self.budget_rows()
        self.compile_rows()

    def rows(self, tokens: int) -> int:
        """Input rows (dimension 0 of the traced input) for a number of output tokens."""
        return units.rows_from_tokens(tokens, spatial_merge_size=self.spatial_merge_size, patches_per_row=self.patches_per_row)

    def budget_rows(self) -> tuple[int, ...]:
        """Capture sizes in input rows, ascending; empty when there are no budgets."""
        return tuple(self.rows(tokens) for tokens in self.token_budgets or ())

    def compile_rows(self) -> tuple[int, ...]:
        """`compile_sizes` in input rows, ascending."""
        return tuple(self.rows(tokens) for tokens in self.compile_sizes)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | None) -> BackendOptions:
        """Options from the dict that `torch.compile(options=...)` passes on; unknown keys are errors."""
        return cls(**checked_keys(given, [field.name for field in dataclasses.fields(cls)]))


def checked_keys(given: Mapping[str, Any] | None, known: Sequence[str]) -> dict[str, Any]:
    """`given` as keyword arguments. None is no options; an unknown key is an error with the nearest known one.

    Raises:
        OptionError: It is not a dict, or has a key that is not in `known`.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(f"options must be a dict, not {type(given).__name__}.")
    for key in given:
        if key not in known:
            raise OptionError(f"unknown option {key!r}.{did_you_mean(key, known)} Known options: {', '.join(known)}.")
    return dict(given)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ " Did you mean ...?" with the known name that is most like `name`; empty where none is."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuses whatever is not one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name}={value!r}: expected one of {', '.join(repr(a) for a in allowed)}.")


def check_flag(name: str, value: object) -> None:
    """Refuses whatever is not a bool, also what is only like one."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r}: expected True or False.")


def positive_int(name: str, value: object) -> int:
    """`value` as a plain integer above 0."""
    # Integral and not operator.index: NumPy integers are taken; bool and tensors are not.
    if isinstance(value, bool) or not isinstance(value, Integral) or value <= 0:
        raise OptionError(f"{name}={value!r}: expected a positive integer.")
    return int(value)


def natural_int(name: str, value: object) -> int:
    """`value` as a plain integer, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise OptionError(f"{name}={value!r}: expected an integer, 0 or more.")
    return int(value)


def positive_ints(name: str, values: object) -> tuple[int, ...]:
    """The values as plain integers above 0, sorted, without repeats."""
    items = listed(name, values, "positive integers")
    return tuple(sorted({positive_int(f"item of {name}", item) for item in items}))


def _names(name: str, values: object) -> tuple[str, ...]:
    """In the given order, without repeats."""
    items = listed(name, values, "names")
    for item in items:
        if not isinstance(item, str) or not item.strip():
            raise OptionError(f"{name} contains {item!r}: expected non-empty names.")
    return tuple(dict.fromkeys(items))


def pass_names(values: object) -> tuple[str, ...]:
    """Names of graph passes."""
    names = _names("passes", values)
    for name in names:
        check_choice("passes", name, PASS_NAMES)
    return names


def listed(name: str, values: object, what: str) -> tuple[Any, ...]:
    """The values of a list; text, a dict or a lone value is refused."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise OptionError(f"{name}={values!r}: expected a list of {what}.")
    return tuple(values)


def _folder(name: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise OptionError(f"{name}={value!r}: expected a folder's path, or None for no dumps.")
    return path
