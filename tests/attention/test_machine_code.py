"""Machine code of the project's kernels: what is taken from Triton's cache, and what another cache makes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vit_compile.attention import machine_code

HASH = "0123456789abcdef" * 4
FILES = {"_kernel.json": b'{"shared": 0}', "_kernel.cubin": b"\x7fELF"}


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests launched does not count."""
    monkeypatch.setattr(machine_code, "_launched", {})


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Path]]:
    """A cache of the shape that Triton's has: groups of files by hash and by the name of the description."""
    groups: dict[str, dict[str, Path]] = {}

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def get_group(self, file: str) -> dict[str, Path] | None:
            return groups.get(f"{self.name}/{file}")

        def put(self, data: bytes, file: str, *, binary: bool) -> str:
            assert binary
            (tmp_path / self.name).mkdir(exist_ok=True)
            (tmp_path / self.name / file).write_bytes(data)
            return str(tmp_path / self.name / file)

        def put_group(self, file: str, group: dict[str, str]) -> None:
            groups[f"{self.name}/{file}"] = {name: Path(path) for name, path in group.items()}

    cache = SimpleNamespace(get_cache_manager=Entry)
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    return groups


def launched(folder: Path, name: str = HASH, **more: bytes) -> Any:
    """What a launch gives, with its files in a folder."""
    folder.mkdir(exist_ok=True)
    files = FILES | {f"_kernel.{stage}": text for stage, text in more.items()}
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return SimpleNamespace(hash=name, metadata_group={file: str(folder / file) for file in files})


def test_description_and_code_are_collected(tmp_path: Path) -> None:
    """Of every kernel that was launched, once; what it was on its way stays behind, and so does a kernel that is gone."""
    for _ in range(2):
        machine_code.note(launched(tmp_path / "here", ttir=b"module {}", ptx=b".version"))
    machine_code.note(launched(tmp_path / "gone", "f" * 64))
    (tmp_path / "gone" / "_kernel.cubin").unlink()
    assert machine_code.collected() == {HASH: FILES}


@pytest.mark.parametrize("given", [None, SimpleNamespace(), SimpleNamespace(hash=HASH, metadata_group=None)])
def test_a_launch_without_code(given: Any) -> None:
    """Triton's interpreter compiles nothing, and another Triton may say nothing: there is nothing to collect."""
    machine_code.note(given)
    assert machine_code.collected() == {}


def test_entries_are_placed(entries: dict[str, dict[str, Path]]) -> None:
    """All files of an entry, under its hash, as one group; a second time nothing is written, unless somebody removed a file."""
    assert machine_code.place({HASH: FILES}) == 1
    (group,) = entries.values()
    assert {name: path.read_bytes() for name, path in group.items()} == FILES
    group["_kernel.cubin"].write_bytes(b"its own")
    assert machine_code.place({HASH: FILES}) == 1
    assert group["_kernel.cubin"].read_bytes() == b"its own"
    del group["_kernel.cubin"]
    assert machine_code.place({HASH: FILES}) == 1
    (group,) = entries.values()
    assert group["_kernel.cubin"].read_bytes() == FILES["_kernel.cubin"]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("../../elsewhere", FILES),
        (HASH[:-1], FILES),
        (HASH, {"_kernel.cubin": b""}),
        (HASH, {**FILES, "other.json": b"{}"}),
        (HASH, {"../_kernel.json": b"{}"}),
        (HASH, {**FILES, "sub/_kernel.cubin": b""}),
        (HASH, {}),
        (HASH, {"_kernel.json": b"{}"}),
        (HASH, {**FILES, "_kernel.cubin": b""}),
        (HASH, {**FILES, "_kernel.json": b"{"}),
        (HASH, {**FILES, "_kernel.json": b"\xff"}),
        (HASH, {**FILES, "_kernel.json": b"[]"}),
    ],
    ids=[
        *("no hash", "short", "no description", "two", "outside", "in a folder", "empty"),
        *("no code", "empty code", "cut off", "no text", "no dict"),
    ],
)
def test_what_is_no_entry_is_left_out(name: str, files: dict[str, bytes], entries: dict[str, Any], tmp_path: Path) -> None:
    """A damaged or made-up file reaches no path but that of an entry; the others are placed."""
    good = "a" * 64
    assert machine_code.place({name: files, good: FILES}) == 1
    assert [key.partition("/")[0] for key in entries] == [good]
    assert [path.name for path in tmp_path.iterdir()] == [good]


def test_a_cache_that_cannot_be_written(
    entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is a warning, and a compile later."""

    def refuse(name: str) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sys.modules["triton.runtime.cache"], "get_cache_manager", refuse)
    assert machine_code.place({HASH: FILES}) == 0
    assert "Permission denied" in caplog.text


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cache to put anything into."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton.runtime.cache", raising=False)
    assert machine_code.place({HASH: FILES}) == 0


def test_triton_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: what one cache had, a compile with another one finds, byte for byte."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("vit_compile.attention.varlen_gluon")
    from tests.attention.test_hopper_kernel import compiled

    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one"))
    made = compiled(16, "bf16")
    machine_code.note(made)
    found = machine_code.collected()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "two"))
    assert machine_code.place(found) == 1
    again = compiled(16, "bf16")
    assert hits == [False, True]
    assert again.asm["cubin"] == made.asm["cubin"]
    assert again.metadata == made.metadata
