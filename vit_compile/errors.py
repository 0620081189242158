"""The catalogue of errors.

Every error that a user can meet is a class here, with a fixed `code` under which it is counted and explained in
`docs/troubleshooting.md`. A message says what was given, what is allowed, and what to do. `assert` is left to internal
invariants. This module imports nothing from torch.
"""

from __future__ import annotations

from typing import ClassVar


class VitCompileError(Exception):
    """Base class: `except VitCompileError` catches everything this package raises on purpose."""

    code: ClassVar[str] = "error"


class OptionError(VitCompileError, ValueError):
    """An option is unknown, has the wrong type or value, or contradicts another one."""

    code = "option"


class BudgetError(VitCompileError, ValueError):
    """A budget or ladder cannot be built: not positive, inverted, or not a whole number of patches or rows."""

    code = "budget"


class BoundariesError(VitCompileError, ValueError):
    """`cu_seqlens` does not start at 0, decreases, or does not end at the number of real rows."""

    code = "boundaries"


class BoundError(VitCompileError, ValueError):
    """`max_seqlen` is below the longest segment: attention kernels would skip rows without an error."""

    code = "bound"


class InputMismatchError(VitCompileError, TypeError):
    """A tensor has another dtype, device or rank than the traced graph was made for."""

    code = "input-mismatch"


class SplitError(VitCompileError, RuntimeError):
    """Splitting went wrong: an attention op was left inside a piece (an internal fault, never ignored)."""

    code = "split"


class CaptureError(VitCompileError, RuntimeError):
    """A capture produced something unusable, such as an empty graph."""

    code = "capture"


class SkipError(VitCompileError, RuntimeError):
    """Raised instead of falling back when `strict=True`; the text carries the `Skip`'s code and detail."""

    code = "skip"


class WarmupError(VitCompileError, RuntimeError):
    """`warmup` was given something that is not compiled with this backend, or the call compiled nothing."""

    code = "warmup"


class CounterError(VitCompileError, AssertionError):
    """`counters.expect(...)` saw other numbers than the block promised."""

    code = "counter"


class MissingDependencyError(VitCompileError, ImportError):
    """An optional package is needed; the text names the extra that brings it."""

    code = "missing-dependency"


class ModelError(VitCompileError, ValueError):
    """A model cannot be loaded or is not a vision encoder that this command can run."""

    code = "model"


class ImageError(VitCompileError, ValueError):
    """An image file is missing, unreadable or empty."""

    code = "image"


class GridError(VitCompileError, ValueError):
    """A patch grid (t, h, w) is not three positive integers, or its sides are not whole numbers of merge blocks."""

    code = "grid"


class TraceError(VitCompileError, ValueError):
    """A trace of requests cannot be read, written or made: a bad line, no requests, an unknown preset."""

    code = "trace"


class ProtocolError(VitCompileError, TypeError):
    """A model breaks the encoder contract: a missing method, a wrong number of axis keys, features of a wrong shape."""

    code = "protocol"


class InputError(VitCompileError, ValueError):
    """A request cannot be encoded: rows that do not match the grids, a wrong dtype or device, a missing or unknown input."""

    code = "input"


class ModalityError(VitCompileError, ValueError):
    """The model does not encode this modality, or none at all; the text says why."""

    code = "modality"


class ParallelError(VitCompileError, RuntimeError):
    """A rank of a data-parallel group failed, so that all of them stop; the text names the rank."""

    code = "parallel"


def first_line(error: BaseException) -> str:
    """What an error says, in one line, for messages that quote it; empty where it says nothing."""
    return (str(error).splitlines() or [""])[0]
