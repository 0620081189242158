"""Everything in this folder needs a CUDA device and is skipped, with a reason, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without a device."""
    reason = "no CUDA device: torch has no CUDA build" if torch.version.cuda is None else "no CUDA device"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def poison_allocator() -> Callable[[], None]:
    """A function that fills the free memory of the caching allocator with NaN, so that unwritten rows show."""

    def poison() -> None:
        # Small blocks (below 1 MiB) and large ones come from separate pools; each block is split to serve later requests.
        blocks = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(64)]
        blocks += [torch.full((1 << 15,), float("nan"), device="cuda") for _ in range(256)]
        torch.cuda.synchronize()
        del blocks

    return poison
