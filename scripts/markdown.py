"""Parts of Markdown tables of result files."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(titles: list[str]) -> list[str]:
    return [line(titles), line(["---", *["---:"] * (len(titles) - 1)])]


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def conditions(content: Row) -> str:
    """Machine, versions and command, in one line."""
    machine = content["environment"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}"
    return f"{machine['device']}, {versions}. `{content['command']}`"
