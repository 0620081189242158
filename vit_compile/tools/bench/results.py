"""The result of a run: rows and environment, as one JSON file. Nothing here imports torch.

`docs/bench.md` says what each field means; `SCHEMA` changes when one changes its meaning.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from vit_compile.errors import OptionError

SCHEMA = 1
KIND = "vit-compile bench"
CPU_NOTE = "CPU numbers: they try the benchmark out and say nothing about a GPU."

OK, UNAVAILABLE, FAILED = "ok", "unavailable", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """Wall milliseconds of requests that were waited for one by one."""

    mean_ms: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Self:
        """Percentiles are interpolated, as NumPy does it by default."""
        median, late = np.percentile(times_ms, (50, 99))
        return cls(mean_ms=float(np.mean(times_ms)), p50_ms=float(median), p99_ms=float(late))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One peer on one case. None: does not apply, or was not measured."""

    peer: str
    case: str
    ours: bool
    status: str = OK
    reason: str = ""
    """Why it is unavailable, or how it failed; for a row that is "ok", what is worth knowing."""

    requests: int = 0
    """Served within the time; of `requests_wanted`."""
    requests_wanted: int = 0
    images: int = 0
    tokens: int = 0

    mean_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    back_to_back_ms: float | None = None
    images_per_s: float | None = None
    tokens_per_s: float | None = None

    host_ms: float | None = None
    host_share: float | None = None
    host_beyond_launch_ms: float | None = None
    wall_beyond_replay_ms: float | None = None

    padded_share: float | None = None
    hits: int | None = None
    misses: dict[str, int] | None = None
    eager_tokens: int | None = None
    replays: int | None = None

    setup_s: float | None = None
    startup_s: float | None = None
    warm_setup_s: float | None = None
    phase_seconds: dict[str, float] | None = None
    """Where set-up of a manager spent its time; see `runtime.phases`."""
    kernels: dict[str, str] | None = None
    """Attention kernel in graphs, by what the call looks like."""
    budgets: tuple[int, ...] | None = None
    graphs: int | None = None
    not_captured: dict[str, int] | None = None
    graph_bytes: int | None = None
    largest_graph_bytes: int | None = None
    reserved_bytes: int | None = None

    roofline_ms: float | None = None
    roofline_ratio: float | None = None

    difference: float | None = None
    difference_fp32: float | None = None
    within_tolerance: bool | None = None
    checked_requests: int = 0

    latencies_ms: tuple[float, ...] = ()
    """Of each request, in order."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values; numbers that JSON lacks (infinity, NaN) as text."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """What `as_dict` gave. Unknown fields are left out: a newer version may have written them.

        Raises:
            OptionError: a field has a value of another kind, or a row that is "ok" has no times.
        """
        known = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        values = {name: _read(value) if "float" in known[name] else value for name, value in given.items() if name in known}
        for name, value in values.items():
            _check(name, value, known[name])
        for name in ("latencies_ms", "budgets"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        row = cls(**values)
        if row.status == OK:
            row._check_times()
        return row

    def _check_times(self) -> None:
        """What every measured row has."""
        times = {"latencies_ms": self.latencies_ms, **{name: (getattr(self, name),) for name in ("mean_ms", "p50_ms", "p99_ms")}}
        for name, found in times.items():
            if not found or not all(time is not None and 0 < time < math.inf for time in found):
                raise OptionError(f"{self.peer}, {self.case}: {name} must have milliseconds above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A whole run."""

    command: str
    environment: Mapping[str, Any]
    tower: Mapping[str, Any]
    """`name`, `key`, `kind`, `small`, `dtype`, `parameters`."""

    traffic: Mapping[str, Any]
    """`name`, `requests`, `images`, `tokens`, `seed`, `fitted_to`, `is_single`."""

    settings: Mapping[str, Any]
    tolerance: float
    rows: Sequence[Row] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        """Measured without a GPU?"""
        return bool(self.environment.get("device_type") == "cpu")

    @property
    def failures(self) -> list[str]:
        """What makes the run a failure: one of this package's own peers broke, or is beyond tolerance."""
        found = []
        for row in self.rows:
            if row.ours and row.status == FAILED:
                found.append(f"{row.peer}, {row.case}: {row.reason}")
            elif row.ours and row.within_tolerance is False:
                found.append(f"{row.peer}, {row.case}: differs from eager by {row.difference:.3g}, more than {self.tolerance:g}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "note": CPU_NOTE if self.is_cpu else "",
            "command": self.command,
            "environment": dict(self.environment),
            "tower": dict(self.tower),
            "traffic": dict(self.traffic),
            "settings": dict(self.settings),
            "tolerance": self.tolerance,
            "failures": self.failures,
            "rows": [row.as_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """What `as_dict` gave.

        Raises:
            OptionError: it is no result of this command, or of another schema.
        """
        if given.get("kind") != KIND or given.get("schema") != SCHEMA:
            raise OptionError(
                f"kind {given.get('kind')!r}, schema {given.get('schema')!r}: expected {KIND!r}, schema {SCHEMA}; measure again."
            )
        values = {name: given[name] for name in _FILE}
        for name, kind in _FILE.items():
            _check(name, values[name], kind)
        for part, fields in _PARTS.items():
            for name, kind in fields.items():
                if name not in values[part]:
                    raise OptionError(f"{part} has no {name}.")
                _check(f"{name} of {part}", values[part][name], kind)
        rows = values.pop("rows")
        for row in rows:
            _check("a row", row, "Mapping")
        return cls(**values, rows=[Row.from_dict(row) for row in rows])


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value))


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", _is_int),
    "float": ("a number", _is_number),
    "list": ("a list", lambda value: isinstance(value, list)),
    "Mapping": ("an object", lambda value: isinstance(value, dict)),
    "dict[str, int]": ("an object of whole numbers", lambda value: isinstance(value, dict) and all(map(_is_int, value.values()))),
    "dict[str, float]": ("an object of numbers", lambda value: isinstance(value, dict) and all(map(_is_number, value.values()))),
    "dict[str, str]": (
        "an object of texts",
        lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    ),
    "tuple[int, ...]": ("a list of whole numbers", _is_list(_is_int)),
    "tuple[float, ...]": ("a list of numbers", _is_list(_is_number)),
}
"""By annotation: in words, and whether a value from JSON is one."""

_FILE = {
    "command": "str",
    "environment": "Mapping",
    "tower": "Mapping",
    "traffic": "Mapping",
    "settings": "Mapping",
    "tolerance": "float",
    "rows": "list",
}
_PARTS = {
    "environment": {"device": "str", "device_type": "str", "ranks": "int"},
    "tower": {"name": "str", "key": "str", "small": "bool", "dtype": "str"},
    "traffic": {"name": "str", "is_single": "bool"},
}
"""What readers of a file count on."""


def _check(name: str, value: Any, annotation: str) -> None:
    kind = annotation.removesuffix(" | None")
    words, fits = _KINDS[kind]
    if not fits(value) and not (value is None and kind != annotation):
        shown = repr(value)
        raise OptionError(f"{name}: expected {words}, found {shown if len(shown) < 40 else shown[:36] + ' ...'}.")


def check_writable(folder: Path) -> None:
    """Refuses a folder for results that cannot be made or written to, by trying it out; nothing is left behind.

    Raises:
        OptionError: it cannot.
    """
    made: list[Path] = []
    try:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir()
            made.append(parent)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"cannot write to {folder}: {error.strerror or error}.") from error
    finally:
        for parent in reversed(made):
            with suppress(OSError):  # somebody else put something into it
                parent.rmdir()


def write_json(result: Result, path: Path) -> None:
    """One JSON object; the folder is made.

    Raises:
        OptionError: the file cannot be written.
    """
    text = json.dumps(result.as_dict(), indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}.") from error


def read_json(path: Path) -> Result:
    """A file that `write_json` made.

    Raises:
        OptionError: it cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise OptionError("not a JSON object.")
        return Result.from_dict(content)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}.") from error
    except KeyError as error:
        raise OptionError(f"{path} is no result of vit-compile bench: it has no {error}.") from error
    except RecursionError as error:
        raise OptionError(f"{path} is no result of vit-compile bench: it is nested too deeply.") from error
    except (ValueError, TypeError) as error:  # an OptionError is a ValueError too
        raise OptionError(f"{path} is no result of vit-compile bench: {' '.join(str(error).split())}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value
