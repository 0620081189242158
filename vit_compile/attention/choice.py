"""Which attention kernel serves which call inside the graphs of one encoder.

At capture a first run is only observed: it says which attention problems the graph has. `settle` then times every admissible
kernel on each of them, as part of a captured graph, and the fastest serves the runs under `active()`, the recorded one among
them. Outside of these two contexts, and on a CPU, calls take the default kernel. What was measured is kept for the process by
device and problem, so that a further encoder, a recapture or a loaded cache does not measure again.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from vit_compile.attention import admission, one_segment
from vit_compile.attention.fence import Varlen
from vit_compile.attention.problem import VARLEN, WIDE, Problem, dense_problem, layouts, rest_of_layer, varlen_problem
from vit_compile.errors import first_line
from vit_compile.options import ATTENTION_AUTO, ATTENTION_DEFAULT
from vit_compile.stats import Skip, report_skip


class Timer(Protocol):
    """Seconds that one of several captured repetitions of a call takes on the device; raises where it cannot be captured."""

    def __call__(self, call: Callable[[], object], device: torch.device, give_up_s: float = ...) -> float:
        """Time `call`; one that takes longer than `give_up_s` needs no precise answer."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel for one problem, and why."""

    kernel: str
    microseconds: dict[str, float] = field(default_factory=dict)
    """Of one call, by kernel. A varlen problem is timed with several `layouts`, and this is the geometric mean of what a layer
    takes with each of them, less what it takes beside attention (`rest_of_layer`): whoever makes a layer faster in one layout
    by the factor by which it makes it slower in another is as good."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why other kernels could not serve it."""


HOPELESS = 2.0
LEAST_S = 1e-9
"""A clock that shows no time at all is no reason for an error."""

Key = tuple[str, Problem, int]
_known: dict[Key, Choice] = {}
_lock = threading.Lock()
_local = threading.local()


def current() -> KernelChoices | None:
    """The choices under which this thread runs, or None."""
    found: KernelChoices | None = getattr(_local, "current", None)
    return found


def known() -> dict[Key, Choice]:
    """What this process has measured or loaded: device's name, problem, `fence_from` -> choice; a copy."""
    with _lock:
        return dict(_known)


def learn(found: dict[Key, Choice]) -> None:
    """Take over what another process measured on the same kind of device; what is known already stays."""
    with _lock:
        for key, choice in found.items():
            _known.setdefault(key, choice)


def forget() -> None:
    """Forget all measurements of this process. Encoders keep the kernels that they have."""
    with _lock:
        _known.clear()


class KernelChoices:
    """The kernels of one encoder.

    Args:
        wanted: "auto": time the admissible kernels and take the fastest. "default": time nothing. A kernel's name: take that
            one wherever it is admissible.
        device: of the encoder. Without CUDA nothing is chosen.
        timer: see `Timer`.
        fence_from: see `admission.candidates`.
        strict: raise `SkipError` where the wanted kernel is not admissible.
    """

    def __init__(
        self, wanted: str, device: torch.device, timer: Timer | None, *, fence_from: int = 1, strict: bool = False
    ) -> None:
        self.wanted, self.device, self.fence_from, self.strict = wanted, device, fence_from, strict
        self._timer = timer
        self._chosen: dict[Problem, Choice] = {}
        self._seen: dict[Problem, None] | None = None
        self.strides: dict[Problem, tuple[int, ...]] = {}
        """Of the default's output, by dense problem."""

    @property
    def enabled(self) -> bool:
        """Is there anything to choose?"""
        return self.wanted != ATTENTION_DEFAULT and self._timer is not None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Note the problems of the attention calls in this block, which take the default kernel."""
        self._seen = {} if self._seen is None else self._seen
        with self._as_current():
            yield

    @contextmanager
    def active(self) -> Iterator[None]:
        """Attention calls in this block take the chosen kernels."""
        self._seen = None
        with self._as_current():
            yield

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        before = current()
        _local.current = self if self.enabled else None
        try:
            yield
        finally:
            _local.current = before

    def kernel(self, problem: Problem) -> str | None:
        """The kernel for a call, None for the default; notes the problem while observing."""
        if self._seen is not None:
            self._seen[problem] = None
            return None
        choice = self._chosen.get(problem)
        return choice.kernel or None if choice is not None else None

    def settle(self) -> None:
        """Choose for every problem that was observed and has no choice yet."""
        seen, self._seen = self._seen or {}, None
        # Triton launches on the current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for problem in seen:
                if problem not in self._chosen:
                    self._chosen[problem] = self._choose(problem)

    def rows(self) -> list[dict[str, Any]]:
        """The choices as plain dicts, fit for JSON: the problem's fields, `kernel` ("" for the default), `microseconds`,
        `refused`."""
        return [
            {
                **problem.as_dict(),
                "kernel": choice.kernel,
                "microseconds": dict(choice.microseconds),
                "refused": dict(choice.refused),
            }
            for problem, choice in self._chosen.items()
        ]

    def _choose(self, problem: Problem) -> Choice:
        if self.wanted != ATTENTION_AUTO:
            return self._pinned(problem)
        key = (device_name(self.device), problem, self.fence_from)
        with _lock:
            found = _known.get(key)
        if found is None or not self._is_here(found.kernel, problem):
            assert self._timer is not None, "disabled without a timer"
            found = measure(problem, self.device, self._timer, fence_from=self.fence_from)
            # What failed here and now may work the next time.
            if found.kernel and admission.OUT_OF_MEMORY not in found.refused.values():
                with _lock:
                    _known[key] = found
        return found

    def _is_here(self, name: str, problem: Problem) -> bool:
        """Can a remembered kernel be used in this process? A package may be missing that was there when it was measured."""
        return not name or admission.admit(name, problem, self.device, fence_from=self.fence_from)[0] == name

    def _pinned(self, problem: Problem) -> Choice:
        """The wanted kernel, also behind the fence; a name of the other kind of attention leaves this kind to the default."""
        if self.wanted not in admission.kernels_for(problem):
            return Choice("")
        name, why = admission.admit(self.wanted, problem, self.device, fence_from=self.fence_from)
        refused = {} if why is None else {self.wanted: why}
        if name is None:
            detail = f"{self.wanted} for {problem.shape} in {problem.dtype}: {why}"
            report_skip(Skip("attention-kernel", detail), strict=self.strict)
        return Choice(name or "", refused=refused)


def measure(problem: Problem, device: torch.device, timer: Timer, *, fence_from: int) -> Choice:
    """Time the admissible kernels on a problem; the fastest wins. One that fails, or cannot be captured, is refused.

    Of one that is `HOPELESS` times slower than another, the time is rough.
    """
    runs, refused = admission.candidates(problem, device, fence_from=fence_from)
    calls = _varlen_calls(problem, device) if problem.kind == VARLEN else _dense_calls(problem, device)
    found: dict[str, list[float]] = {}
    best = [math.inf] * len(calls)
    for name, run in runs.items():
        try:
            seconds = [
                timer(functools.partial(run, *call), device, HOPELESS * least) for call, least in zip(calls, best, strict=True)
            ]
        except torch.OutOfMemoryError:
            refused[name] = admission.OUT_OF_MEMORY
        except Exception as error:
            refused[name] = f"fails here: {type(error).__name__}: {first_line(error)}"
        else:
            found[name] = seconds
            best = list(map(min, best, seconds))
    rest = rest_of_layer(problem) * best[0] if found and len(calls) > 1 else 0.0
    times = {
        name: (statistics.geometric_mean([max(time, LEAST_S) + rest for time in seconds]) - rest) * 1e6
        for name, seconds in found.items()
    }
    fastest = min(times, key=lambda name: times[name]) if times else ""
    return Choice(fastest, {name: round(time, 2) for name, time in times.items()}, refused)


def varlen_kernel(q: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *, wide: bool = False) -> Varlen | None:
    """The kernel that was chosen for a varlen call, None for the default.

    With `wide` (q is without the further columns all the same) it takes q and k with them.
    """
    choices = current()
    if choices is None or q.numel() == 0 or max_seqlen <= 0 or cu_seqlens.shape[0] < 2:
        return None
    problem = varlen_problem(q, cu_seqlens, max_seqlen, wide=wide)
    name = choices.kernel(problem)
    return admission.run_of(name, problem) if name else None


def dense_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`scaled_dot_product_attention` through the kernel that was chosen for it, where one was."""
    choices = current()
    call = _dense_call(*args, **kwargs) if choices is not None else None
    if choices is None or call is None:
        return F.scaled_dot_product_attention(*args, **kwargs)
    problem, (query, key, value, is_causal, scale) = call
    name = choices.kernel(problem)
    if name is None:
        out = F.scaled_dot_product_attention(*args, **kwargs)
        choices.strides.setdefault(problem, out.stride())
        return out
    out = admission.run_of(name, problem)(query, key, value, is_causal, scale)
    strides = choices.strides.get(problem, out.stride())
    # What comes after was compiled for the strides of the default.
    return out if out.stride() == strides else out.new_empty_strided(out.shape, strides).copy_(out)


def _dense_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Problem, tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool, float | None]] | None:
    """What a dense call asks for, and its arguments; None for one with a mask, dropout or other ranks: that is torch's alone."""
    if attn_mask is not None or dropout_p or enable_gqa or query.dim() != 4 or value.shape != key.shape:
        return None
    if key.shape[:2] != query.shape[:2] or key.shape[-1] != query.shape[-1]:
        return None
    return dense_problem(query, key, causal=is_causal), (query, key, value, is_causal, scale)


Call = tuple[Any, ...]


def _varlen_calls(problem: Problem, device: torch.device) -> list[Call]:
    q, k, v = _random(problem.shape, problem.torch_dtype, device)
    scale = problem.head_dim**-0.5
    made: list[Call] = []
    for boundaries in layouts(problem):
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
        of_q, of_k = one_segment.widened(q, k, cu_seqlens) if problem.variant == WIDE else (q, k)
        made.append((of_q, of_k, v, cu_seqlens, problem.max_seqlen, scale))
    return made


def _dense_calls(problem: Problem, device: torch.device) -> list[Call]:
    batch, heads, rows, dim = problem.shape
    q, _, _ = _random((batch, rows, heads, dim), problem.torch_dtype, device)
    k, v, _ = _random((batch, problem.max_seqlen, heads, dim), problem.torch_dtype, device)
    # Towers project to [batch, rows, heads, dim] and hand out a transposed view.
    return [(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), problem.variant == "causal", dim**-0.5)]


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype) for _ in range(3)]


def device_name(device: torch.device) -> str:
    """A device's kind, as it is remembered: what is measured on one holds for others of the same name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
