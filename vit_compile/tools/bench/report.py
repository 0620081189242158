"""A result as a picture and as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vit_compile.errors import OptionError
from vit_compile.tools.bench import plot
from vit_compile.tools.bench.peers import PEERS
from vit_compile.tools.bench.results import CPU_NOTE, OK, Result
from vit_compile.tools.bench.table import COLUMNS, cases_of, graphs, title, without

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1500px; padding: 0 1em; color: #222; }
img { max-width: 100%; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3em 0.6em; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.note { background: #fff3cd; padding: 0.6em 1em; } .failed { background: #f8d7da; padding: 0.6em 1em; }
code { overflow-wrap: anywhere; }
"""


def file_name(result: Result) -> str:
    """Tower and traffic, as a file may be called; no ending."""
    small = "-small" if result.tower["small"] else ""
    ranks = result.environment["ranks"]
    group = f"-x{ranks}" if ranks > 1 else ""
    return re.sub(r"[^\w.-]+", "-", f"{result.tower['key']}{small}-{result.traffic['name']}{group}").strip("-")


def check_files(base: Path) -> None:
    """Refuses a place where files of other kinds are in the way, before anything is measured.

    Raises:
        OptionError: a folder has the name of one of the files.
    """
    for path in _paths(base):
        if path.is_dir():
            raise OptionError(f"cannot write {path}: it is a folder.")


def _paths(base: Path) -> list[Path]:
    return [base.with_name(f"{base.name}.{ending}") for ending in ("json", "png", "html")]


def write(result: Result, base: Path) -> list[Path]:
    """`base`.png and `base`.html; returns all files of the result, the JSON file first.

    Raises:
        OptionError: one cannot be written.
    """
    paths = _paths(base)
    try:
        plot.picture(result, paths[1])
        paths[2].write_text(page(result, paths[1].read_bytes()), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {base}: {error.strerror or error}.") from error
    return paths


def page(result: Result, png: bytes) -> str:
    """The HTML page with the picture inside."""
    heading = html.escape(title(result))
    parts = [f"<h1>{heading}</h1>", f"<p><code>{html.escape(result.command)}</code></p>"]
    parts += [f'<p class="note">{CPU_NOTE}</p>'] if result.is_cpu else []
    parts += [f'<p class="failed">{html.escape(failure)}</p>' for failure in result.failures]
    parts.append(f'<img alt="bars and latency distributions" src="data:image/png;base64,{base64.b64encode(png).decode()}">')
    for case in cases_of(result):
        parts += [f"<h2>{html.escape(case)}</h2>", _rows(result, case)]
    parts += [_list("Served by", graphs(result)), _list("Without numbers", without(result))]
    parts += [_list("Peers", (f"{name}: {spec.summary}" for name, spec in PEERS.items()))]
    parts += [_pairs("Traffic", result.traffic), _pairs("Environment", result.environment), _pairs("Settings", result.settings)]
    head = f'<meta charset="utf-8"><title>{heading}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _rows(result: Result, case: str) -> str:
    rows = [row for row in result.rows if row.case == case and row.status == OK]
    head = _line("th", ["peer", *(name.replace("-\n", "").replace("\n", " ") for name, _ in COLUMNS)])
    return f"<table>{head}{''.join(_line('td', [row.peer, *(cell(row) for _, cell in COLUMNS)]) for row in rows)}</table>"


def _line(kind: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _list(name: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h2>{name}</h2><ul>{items}</ul>" if items else ""


def _pairs(name: str, values: Mapping[str, Any]) -> str:
    return f"<h2>{name}</h2><table>{''.join(_line('td', [key, str(value)]) for key, value in values.items())}</table>"
