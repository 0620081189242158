"""Trying to record: what becomes of errors, and of the memory that they hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from vit_compile.backend.recording import record
from vit_compile.errors import ProtocolError
from vit_compile.stats import Skip


class Held:
    """Stands for a tensor."""


def test_what_ran_out_of_memory_holds_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache is emptied, nothing that the error's frames held is alive any more, be it in a cycle: else the next budgets,
    which would fit, run out of memory as well."""
    seen: list[weakref.ref[Held]] = []
    alive: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.extend(ref() is not None for ref in seen))

    def make() -> Any:
        tensor = Held()
        seen.append(weakref.ref(tensor))
        held: dict[str, Any] = {"tensor": tensor}
        held["cycle"] = held
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        except torch.OutOfMemoryError as error:
            held["error"] = error
            raise

    gc.disable()
    try:
        made = record(make, (), "a graph")
    finally:
        gc.enable()
    assert isinstance(made, Skip)
    assert (made.code, "2.00 GiB" in made.detail) == ("out-of-memory", True)
    assert alive == [False]


def test_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong adapter is an error; anything else is a skip that says what it was."""

    def failing(error: Exception) -> Any:
        def make() -> Any:
            raise error

        return make

    with pytest.raises(ProtocolError):
        record(failing(ProtocolError("no")), (), "a graph")
    made = record(failing(ValueError("because")), (), "a graph")
    assert made == Skip("capture-failed", "a graph: ValueError: because")
