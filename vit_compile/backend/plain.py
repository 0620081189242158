"""Stand-ins for graphs that are not cut and captured: the plain compiled path, and the refusal of a wrong option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vit_compile.backend.report import Report
from vit_compile.errors import VitCompileError
from vit_compile.options import BackendOptions
from vit_compile.stats import CallRecord, Skip, counters, record_call, report_skip


class PlainRunnable:
    """A graph that must not be captured at all: compiled as a whole by the plain compiler, counted at every call."""

    def __init__(self, call: Callable[..., Any], skip: Skip, options: BackendOptions) -> None:
        self.call, self.skip, self.options = call, skip, options
        self.report = Report()

    def __call__(self, *args: Any) -> Any:
        """Outputs of the graph; differentiable where the plain compiler is."""
        report_skip(self.skip, strict=self.options.strict)
        outputs = self.call(*args)
        counters.add("plain_calls")
        self.report.note_call("plain", self.skip)
        record_call(CallRecord("plain", None, None, str(self.skip), False))
        return outputs


class Refusal:
    """Raises the error that was found while compiling, at every call: Dynamo would wrap it in one of its own."""

    def __init__(self, error: VitCompileError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        """Raise a fresh copy of the error."""
        raise type(self.error)(*self.error.args)
