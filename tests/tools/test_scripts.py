"""The scripts under scripts/, which reach into the package where its public names do not go."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_what_it_uses(name: str) -> None:
    """What a script imports and looks up when it starts is there: most of them run on a GPU only."""
    pytest.importorskip("transformers")
    assert importlib.import_module(f"scripts.{name}")
