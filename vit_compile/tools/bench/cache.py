"""Inductor's cache of compiled code: one for each peer, empty at first, so that start-up does not depend on who ran before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Read at each use, also by the processes that compile for this one."""


@contextmanager
def cache_for(kind: str) -> Iterator[None]:
    """ "fresh": an empty cache for as long as this lasts; "shared": the user's own."""
    if kind == "shared":
        yield
        return
    before = {name: os.environ.get(name) for name in _VARIABLES}
    # Files of compiled code may still be open or mapped when it ends.
    with tempfile.TemporaryDirectory(prefix="vit_compile_bench_", ignore_cleanup_errors=True) as folder:
        for name in _VARIABLES:
            os.environ[name] = os.path.join(folder, name.split("_")[0].lower())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
