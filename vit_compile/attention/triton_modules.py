"""Modules with Triton kernels: used where they run, and left for plain torch where they do not."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)


def runnable(name: str, try_out: Callable[[Any], object], instead: str) -> Any:
    """The module, once `try_out` has run its kernels on the current device; None where that fails.

    Args:
        name: of the module; importing it needs Triton.
        try_out: gets the module.
        instead: for the log, what plain torch does then.
    """
    try:
        module = importlib.import_module(name)
        try_out(module)
        torch.cuda.synchronize()
    except Exception as error:  # no Triton, no C compiler, or a driver that Triton does not know: slower, but the same result
        log.warning("Triton cannot run here (%s): %s by plain torch, which is slower.", error, instead)
        return None
    return module
