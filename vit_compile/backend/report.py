"""What happened to one traced graph, for the dumps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vit_compile.stats import Skip


@dataclass(slots=True)
class Report:
    """What happened to one traced graph, for the dumps."""

    captures: list[str] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    on_change: Callable[[], None] | None = None

    def note_call(self, kind: str, skip: Skip | None = None) -> None:
        """Count a call and its skip; the dump is written again when a kind is new."""
        new = kind not in self.calls or (skip is not None and str(skip) not in self.skips)
        self.calls[kind] = self.calls.get(kind, 0) + 1
        if skip is not None:
            self.skips[str(skip)] = self.skips.get(str(skip), 0) + 1
        if new and self.on_change is not None:
            self.on_change()
