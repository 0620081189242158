"""The result of a run: rows and environment, as one JSON file. Nothing here imports torch.

`docs/bench.md` says what each field means; `SCHEMA` changes when one changes its meaning.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
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

    padded_share: float | None = None
    hits: int | None = None
    misses: dict[str, int] | None = None
    eager_tokens: int | None = None
    replays: int | None = None

    setup_s: float | None = None
    startup_s: float | None = None
    warm_setup_s: float | None = None
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
        """What `as_dict` gave. Unknown fields are left out: a newer version may have written them."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: _read(value) for name, value in given.items() if name in known}
        for name in ("latencies_ms", "budgets"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


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
        names = ("command", "environment", "tower", "traffic", "settings", "tolerance")
        return cls(**{name: given[name] for name in names}, rows=[Row.from_dict(row) for row in given["rows"]])


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
    except (ValueError, KeyError, TypeError) as error:  # an OptionError is a ValueError too
        raise OptionError(f"{path} is no result of vit-compile bench: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
