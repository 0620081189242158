"""Every test starts from nothing: no compiled graph, no capture, no count."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import vit_compile

torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings
logging.getLogger("torch.__trace").disabled = True  # else a failure prints thousands of empty lines


@pytest.fixture(autouse=True)
def _from_nothing() -> Iterator[None]:
    """Forget what earlier tests compiled, captured and counted."""
    torch.compiler.reset()
    vit_compile.clear()
    vit_compile.counters.reset()
    yield
    torch.compiler.reset()
    vit_compile.clear()
