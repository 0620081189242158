"""The table of docs/models.md, from the registry.

python scripts/models_table.py             prints it
python scripts/models_table.py --write     puts it between `<!-- table -->` and `<!-- end -->` of docs/models.md
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT))

from vit_compile.models.architecture import Architecture  # noqa: E402
from vit_compile.models.registry import architectures  # noqa: E402


def code_lines(path: Path) -> int:
    """Lines with code: no blank ones, comments, docstrings or imports, and not the rows of the table."""
    source = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        rows = isinstance(node, ast.Assign | ast.AnnAssign) and "ROWS" in ast.unparse(node).partition("=")[0]
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if rows or text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for n, line in enumerate(lines, 1) if n not in skipped)


def adapter(row: Architecture) -> tuple[str, int]:
    """Name of the adapter's module, and its lines of code."""
    path = Path(inspect.getfile(row.binder))
    return path.stem, code_lines(path)


def yes(value: bool) -> str:
    return "yes" if value else ""


def cells(row: Architecture) -> list[str]:
    """One row of the table."""
    module, lines = adapter(row)
    classes = ", ".join(f"`{name}`" for name in row.classes) or "by its published structure"
    classes += " (remote code)" if row.remote_code else ""
    return [
        row.name,
        classes,
        yes("image" in row.modalities),
        yes("video" in row.modalities),
        yes(len(row.paths) > 1),
        ", ".join(f"`{name}`" for name in row.buffers),
        row.tokens,
        ", ".join(row.versions),
        f"`{module}`, {lines}",
    ]


def table() -> str:
    """All rows, and below it what is to be known of each."""
    titles = [
        "architecture",
        "classes",
        "image",
        "video",
        "dual path",
        "buffers",
        "output tokens",
        "transformers",
        "adapter, lines",
    ]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join(["---"] * len(titles)) + " |"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in architectures()]
    limits = [f"- **{row.name}**: {' '.join(row.limits)}" for row in architectures() if row.limits]
    return "\n".join([*lines, "", "### Limits", "", *limits])


def page(text: str) -> str:
    """The page with the table as it is now."""
    return re.sub(
        r"(<!-- table -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", text, flags=re.DOTALL
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
