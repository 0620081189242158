"""Machine code of the project's Triton kernels, to be carried from Triton's cache into that of another machine.

A compile takes half a second to three seconds. Triton names an entry of its cache by a hash over the kernel's source, its own
files, the target and all options, so that an entry is found where it fits, and nowhere else.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Files = dict[str, bytes]
"""An entry by file name: what describes a kernel, and its code."""

_HASH = re.compile(r"[0-9a-f]{64}")
_DESCRIPTION = ".json"
_STAGES = {".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn"}
"""What a kernel was on its way, which nobody needs to run it: Triton itself can be told not to keep it."""

_launched: dict[str, dict[str, str]] = {}
_lock = threading.Lock()


def note(launched: Any) -> None:
    """Remember a kernel of which `collected` is to have the code.

    Args:
        launched: what a launch `kernel[grid](...)` gives. Triton's interpreter compiles nothing and gives None.
    """
    name, files = getattr(launched, "hash", None), getattr(launched, "metadata_group", None)
    if name is not None and name not in _launched and isinstance(files, Mapping):
        with _lock:
            _launched[name] = {file: str(path) for file, path in files.items()}


def collected() -> dict[str, Files]:
    """The entries of all kernels that this process launched, by hash, as far as they are still in Triton's cache."""
    with _lock:
        known = dict(_launched)
    found = {}
    for name, paths in known.items():
        try:
            found[name] = {file: Path(path).read_bytes() for file, path in paths.items() if Path(file).suffix not in _STAGES}
        except OSError:  # somebody emptied the cache: a later start compiles this one
            continue
    return found


def place(entries: Mapping[str, Files]) -> int:
    """Put entries into Triton's cache; what is there stays.

    Returns:
        How many are there now. None without Triton; an entry that is not one, or cannot be written, is left out.
    """
    try:
        cache = importlib.import_module("triton.runtime.cache")
    except ImportError:
        return 0
    return sum(_placed(cache, name, files) for name, files in entries.items())


def _placed(cache: Any, name: str, files: Files) -> bool:
    description = _description(name, files)
    if description is None:
        return False
    try:
        entry = cache.get_cache_manager(name)
        if not set(files) <= set(entry.get_group(description) or ()):  # nothing, or what somebody removed files of
            entry.put_group(description, {file: entry.put(data, file, binary=True) for file, data in files.items()})
    except Exception as error:  # a folder that cannot be written, or another Triton: this kernel is compiled, as it was before
        log.warning("a compiled kernel cannot be put into Triton's cache: %s: %s", type(error).__name__, error)
        return False
    return True


def _description(name: str, files: Files) -> str | None:
    """The file that describes a kernel, if this is an entry with code: Triton would take any, and fail when it runs it."""
    described = [file for file in files if file.endswith(_DESCRIPTION)]
    if not _HASH.fullmatch(name) or len(described) != 1 or any(Path(file).name != file for file in files):
        return None
    try:
        is_one = isinstance(json.loads(files[described[0]]), dict)
    except ValueError:
        return None
    return described[0] if is_one and all(files.values()) and len(files) > 1 else None
