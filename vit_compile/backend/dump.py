"""Readable files of every stage, for `debug_dir`: what was traced, rewritten, cut, compiled, captured, and why not.

Layout of the folder: `index.md` (one page over everything), and one folder per traced graph with `traced.py`,
`after_<pass>.py`, `split.py`, `pieces/<hash>.py`, `generated/<hash>_*.py` and `bytecode_*.py`. Without a folder every
method does nothing.
"""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from torch import fx

from vit_compile import _torch_compat as compat
from vit_compile.backend.plain import PlainRunnable
from vit_compile.backend.split import Split
from vit_compile.errors import OptionError
from vit_compile.stats import Skip, counters

if TYPE_CHECKING:
    from vit_compile.backend.passes import PassReport
    from vit_compile.backend.runnable import Runnable

_lock = threading.Lock()
_folders: dict[str, Folder] = {}


@dataclass(slots=True)
class Folder:
    """One `debug_dir` of this process."""

    path: Path
    graphs: list[Dump] = field(default_factory=list)


class _Pending(threading.local):
    """The dump of the graph that this thread compiled last: the bytecode that comes next belongs to it."""

    dump: Dump | None = None


_pending = _Pending()


class Dump:
    """The dump of one traced graph."""

    def __init__(self, path: Path | None, folder: Folder | None = None) -> None:
        self.path, self.folder = path, folder
        self.lines: list[str] = []
        self._runnable: Callable[[], Runnable | PlainRunnable | None] = lambda: None
        self._page = ""

    @classmethod
    def open(cls, debug_dir: str | None) -> Dump:
        """The dump for a new graph in `debug_dir`; a dump that does nothing for None."""
        if debug_dir is None:
            return cls(None)
        with _lock:
            key = str(Path(debug_dir).resolve())
            if key not in _folders:
                _folders[key] = Folder(Path(key))
                if len(_folders) == 1:
                    compat.on_bytecode(_on_bytecode)
            folder = _folders[key]
            path = folder.path / f"graph_{len(folder.graphs)}"
            try:
                if path.exists():
                    shutil.rmtree(path)
                path.mkdir(parents=True)
            except OSError as error:
                raise OptionError(f"debug_dir={debug_dir!r}: no folder can be made there ({error}).") from error
            dump = cls(path, folder)
            folder.graphs.append(dump)
        _pending.dump = dump
        return dump

    def _write(self, name: str, text: str) -> None:
        if self.path is not None:
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text if text.endswith("\n") else text + "\n")

    def graph(self, name: str, gm: fx.GraphModule) -> None:
        """Write a graph as the Python that it stands for."""
        if self.path is not None:
            self._write(f"{name}.py", gm.print_readable(print_output=False, include_stride=True))

    def graph_pass(self, report: PassReport, gm: fx.GraphModule) -> None:
        """Write the graph after a pass and what the pass did."""
        self.lines.append(f"pass `{report.name}`: {report.sites} sites, {report.milliseconds:.1f} ms")
        self.graph(f"after_{report.name}", gm)

    def plain(self, runnable: PlainRunnable) -> None:
        """This graph went to the plain compiler."""
        self._runnable = weakref.ref(runnable)
        if self.path is not None:
            runnable.report.on_change = self.write_index
            self.write_index()

    def program(self, runnable: Runnable, cut: Split, skips: list[Skip]) -> None:
        """Write the cut, the pieces, their roles and the generated code."""
        self._runnable = weakref.ref(runnable)
        if self.path is None:
            return
        for skip in skips:
            runnable.report.skips[str(skip)] = 1
        self._write("split.py", cut.module.print_readable(print_output=False))
        for piece in runnable.library.pieces.values():
            header = f"# piece {piece.key}, used by {', '.join(piece.users)}\n"
            self._write(f"pieces/{piece.key}.py", header + piece.module.print_readable(print_output=False, include_stride=True))
            for number, source in enumerate(piece.generated):
                if Path(source).exists():
                    self._write(f"generated/{piece.key}_{number}.py", Path(source).read_text())
        runnable.report.on_change = self.write_index
        self.write_index()

    def page(self) -> str:
        """This graph's part of the index; the last one known once the graph is gone."""
        runnable = self._runnable()
        if runnable is not None or not self._page:
            self._page = _page(self, runnable)
        return self._page

    def write_index(self) -> None:
        """Write the folder's page again."""
        if self.folder is None:
            return
        with _lock:
            pages = [dump.page() for dump in self.folder.graphs]
            (self.folder.path / "index.md").write_text("# What vit_compile did\n\n" + "\n".join([*pages, _counts()]))


def _counts() -> str:
    rows = [f"| {name} | {value} |" for name, value in counters.snapshot().items() if name != "skips"]
    return "\n".join(["## Counters of this process", "", "| counter | value |", "|---|---|", *rows, ""])


def _page(dump: Dump, runnable: Runnable | PlainRunnable | None) -> str:
    assert dump.path is not None, "only dumps with a folder are listed"
    lines = [f"## {dump.path.name}", "", *[f"- {line}" for line in dump.lines]]
    if runnable is None:
        return "\n".join([*lines, "- tracing or compiling did not finish", ""])
    if isinstance(runnable, PlainRunnable):
        lines += ["- mode: plain compiler, no pieces and no captures"]
    else:
        lines += _program_lines(runnable)
    report = runnable.report
    lines += [f"- calls: {', '.join(f'{count} {kind}' for kind, count in report.calls.items()) or 'none yet'}"]
    lines += [f"- files: {', '.join(sorted(str(p.relative_to(dump.path)) for p in dump.path.rglob('*.py')))}", ""]
    lines += ["### Captures", "", *[f"- {line}" for line in report.captures or ["none yet"]], ""]
    lines += ["### Skips", "", *[f"- {text} (x{count})" for text, count in report.skips.items()]]
    lines += [] if report.skips else ["- none"]
    return "\n".join([*lines, ""])


def _program_lines(runnable: Runnable) -> list[str]:
    program, roles, options = runnable.program, runnable.roles, runnable.options
    budgets = ", ".join(f"{t} tokens = {options.rows(t)} rows" for t in options.token_budgets or ()) or "none: sizes as seen"
    pieces = runnable.library.pieces.values()
    count = sum(len(piece.users) for piece in pieces)
    attention = len(program.attention_steps)
    off = runnable.unsafe or roles.conflict or f"padding={options.padding!r}, budgets: {budgets}"
    lines = [
        f"- mode: {runnable.mode} (asked: {options.mode}); compiler: {options.compiler}; outputs: {options.outputs}",
        f"- budgets: {budgets}",
        f"- steps: {len(program.steps)} = {count} pieces ({len(pieces)} distinct) + {attention} attention calls",
        f"- padding: {'on, proved at capture' if runnable.may_pad else f'off ({off})'}",
        "",
        "### Pieces",
        "",
        "| hash | used by | compile ms |",
        "|---|---|---|",
        *[f"| {piece.key} | {', '.join(piece.users)} | {piece.compile_ms:.0f} |" for piece in pieces],
        "",
        "### Attention",
        "",
        "| step | op | boundaries | bound |",
        "|---|---|---|---|",
    ]
    for step in program.attention_steps:
        call = step.attention
        assert call is not None
        boundaries = ", ".join(program.slot_names[slot] for slot in call.boundaries) or "none"
        bounds = ", ".join(str(b.literal if b.literal is not None else b.size) for b in call.bounds) or "none"
        lines.append(f"| {step.name} | {call.op.name} | {boundaries} | {bounds} |")
    lines += ["", "### Roles of the inputs", "", "| input | role | traced as |", "|---|---|---|"]
    lines += [f"| {role.name} | {role.role.value} | {role.spec} |" for role in roles.inputs]
    lines += ["", f"{len(program.static_args)} weights are read where they lie, never copied.", ""]
    return lines


def _on_bytecode(old: CodeType, new: CodeType) -> None:
    """Dynamo has rewritten a frame: decompile it next to the graph that was compiled for it."""
    dump, _pending.dump = _pending.dump, None
    if dump is None or dump.path is None:
        return
    name = f"bytecode_{old.co_name}"
    try:
        import depyf

        text = str(depyf.decompile(new))
    except ImportError:
        text = f"# install vit_compile[inspect] to decompile the bytecode of {old.co_qualname}\n"
    except Exception as error:  # depyf does not know every instruction; the run goes on
        text = f"# depyf could not decompile {old.co_qualname}: {type(error).__name__}: {error}\n"
    dump._write(f"{name}.py", text)
    dump.write_index()
