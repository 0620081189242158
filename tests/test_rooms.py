"""The rooms of docs/design/0001-rooms.md: imports go down, planning is free of torch, private torch names have one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vit_compile import errors

ROOT = Path(__file__).parents[1]
PACKAGE = "vit_compile"

LEVELS = [
    {"errors"},
    {"planning"},
    {"options", "stats", "_torch_compat"},
    {"attention"},
    {"backend"},
    {"runtime"},
    {"models"},
    {"__init__"},
    {"tools"},
]
"""From the ground up. A module may import its own level and those below."""

LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FREE = {"errors", "options", "stats", "planning"}
COMPAT = "_torch_compat"


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, relative imports made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def room_of(dotted: str) -> str:
    """The room of a name in the package; a name that the face re-exports belongs to the face."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL_OF else "__init__"


def is_private(dotted: str) -> bool:
    """Whether a dotted torch name has a private part; operators (`torch.ops.namespace._name`) are not Python internals."""
    head, *rest = dotted.split(".")
    if head != "torch" or rest[:1] == ["ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in rest)


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain that starts at torch, also under another name."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        attributes: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            attributes.append(inner.attr)
            inner = inner.value
        if attributes and isinstance(inner, ast.Name) and inner.id in known:
            yield inner.lineno, ".".join([known[inner.id], *reversed(attributes)])


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Every broken rule in one module's source, as `module:line: what`."""
    room = module.split(".")[1] if "." in module else "__init__"
    if room not in LEVEL_OF:
        return [f"{module}: not in a room; place it in LEVELS and in docs/design/0001-rooms.md"]
    tree = ast.parse(source)
    found = []
    for line, name in imports(tree, module, is_package):
        if name.split(".")[0] == PACKAGE and LEVEL_OF[room_of(name)] > LEVEL_OF[room]:
            found.append(f"{module}:{line}: imports upwards: {name}")
        if room in TORCH_FREE and (name.split(".")[0] == "torch" or room_of(name) == COMPAT):
            found.append(f"{module}:{line}: must stay free of torch: {name}")
        if room != COMPAT and is_private(name):
            found.append(f"{module}:{line}: private torch name: {name}")
    if room != COMPAT:
        found += [f"{module}:{line}: private torch name: {name}" for line, name in torch_names(tree) if is_private(name)]
    return found


def modules() -> list[tuple[str, Path]]:
    """(dotted name, file) of every module in the package."""
    names = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=[module for module, _ in modules()])
def test_every_module_keeps_to_its_room(module: str, path: Path) -> None:
    """No module imports upwards, brings torch where it must not be, or uses a private torch name outside its home."""
    assert violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("vit_compile.errors", "from vit_compile.planning import units"),
        ("vit_compile.planning.packing", "from vit_compile import options"),
        ("vit_compile.options", "import vit_compile.backend.entry"),
        ("vit_compile.attention.op", "from vit_compile.backend.split import split"),
        ("vit_compile.backend.entry", "from ..runtime import manager"),
        ("vit_compile.backend.entry", "def f():\n    from vit_compile.models import hf"),
        ("vit_compile.backend.entry", "from vit_compile import warmup"),
        ("vit_compile.backend.entry", "import vit_compile"),
        ("vit_compile.runtime.manager", "if TYPE_CHECKING:\n    from vit_compile.tools.cli import main"),
        ("vit_compile.models.hf", "from vit_compile.tools import report"),
        ("vit_compile", "from vit_compile.tools.cli import main"),
    ],
)
def test_an_upward_import_is_found(module: str, line: str) -> None:
    """Imports upwards are found in every form: absolute, relative, through the face, in a function, for types only."""
    assert [v for v in violations(line, module) if "imports upwards" in v]


def test_a_relative_import_in_a_package_file_is_found() -> None:
    """In an `__init__.py`, one dot is the package itself."""
    assert violations("from ..tools import cli", "vit_compile.backend", is_package=True)
    assert violations("from . import split", "vit_compile.backend", is_package=True) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("vit_compile.planning.units", "import torch"),
        ("vit_compile.planning.units", "import torch.nn as nn"),
        ("vit_compile.planning.units", "def f():\n    from torch import Tensor"),
        ("vit_compile.options", "import torch"),
        ("vit_compile.errors", "from torch.cuda import OutOfMemoryError"),
        ("vit_compile.stats", "from vit_compile import _torch_compat"),
    ],
)
def test_torch_in_a_torch_free_room_is_found(module: str, line: str) -> None:
    """Torch is found in planning, errors, options and stats, also when it comes through the compatibility module."""
    assert [v for v in violations(line, module) if "free of torch" in v]


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch._guards import TracingContext",
        "from torch import _subclasses",
        "from torch.utils._pytree import tree_map",
        "import torch\ntorch._functorch.config",
        "import torch\nx = torch._C._cuda_getDevice()",
        "import torch as th\nth._ops",
        "from torch import fx\nfx.graph._Namespace()",
        "import torch\ntorch.fx.experimental._config.enable = True",
    ],
)
def test_a_private_torch_name_is_found(line: str) -> None:
    """Private torch names are found as imports, as attributes and under other names, except in their one home."""
    assert [v for v in violations(line, "vit_compile.backend.split") if "private torch name" in v]
    assert violations(line, "vit_compile._torch_compat") == []


def test_a_module_without_a_room_is_found() -> None:
    """A new top-level module fails until somebody has decided where it belongs."""
    assert violations("", "vit_compile.helpers") == [
        "vit_compile.helpers: not in a room; place it in LEVELS and in docs/design/0001-rooms.md"
    ]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("vit_compile.backend.split", "import torch\ntorch.ops.aten._to_copy.default"),
        ("vit_compile.backend.split", "import torch\ntorch.__version__\ntorch.fx.GraphModule"),
        ("vit_compile.backend.split", "from vit_compile import _torch_compat\n_torch_compat.fake_mode()"),
        ("vit_compile.backend.split", "from vit_compile.planning import units\nfrom vit_compile.backend import sizes"),
        ("vit_compile.planning.budgets", "from . import units"),
        ("vit_compile.tools.cli", "import vit_compile\nfrom vit_compile import warmup"),
        ("vit_compile", "from vit_compile.runtime.manager import EncoderCudaGraphManager"),
        ("vit_compile.backend.pieces", "self._torch = 1\nself.torch._private"),
    ],
)
def test_what_is_allowed_passes(module: str, line: str) -> None:
    """Operators, dunder names, one's own room and rooms below are free."""
    assert violations(line, module) == []


def test_every_error_has_a_row_in_the_troubleshooting_page() -> None:
    """Each code of the catalogue is explained once, under its class, and the page explains no code that does not exist."""
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.VitCompileError)]
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Skips")[0]
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted([f"| `{c.code}`", f"`{c.__name__}`"] for c in classes)
    assert len({c.code for c in classes}) == len(classes)
