"""Data parallel on GPUs: the cases of `tests/runtime/parallel_workers.py`, with features on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime import parallel_workers

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl", "gloo"])
def test_two_gpus(backend: str, tmp_path: Path) -> None:
    """Every case holds with numbers over the CPU and features over NCCL, with NCCL alone, and with Gloo alone."""
    parallel_workers.start(2, tmp_path, backend, "cuda")
