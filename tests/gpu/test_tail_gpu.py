"""Clearing rows past the last boundary on a GPU: the Triton kernel and its fallback."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.towers import boundaries
from vit_compile.attention import tail

pytest.importorskip("triton", reason="Triton is not installed: plain torch clears the rows")

from vit_compile.attention import tail_triton

ROWS = 1024


@pytest.mark.parametrize("end", [0, 1, 63, 64, 65, 1000, 1023, 1024])
@pytest.mark.parametrize("clear", [tail_triton.zero_tail, tail.zero_tail_in_torch_])
def test_both_ways_to_clear(clear: Callable[[torch.Tensor, torch.Tensor], object], end: int) -> None:
    """The Triton kernel and plain torch clear exactly the rows past the end, wherever it falls in a block of rows."""
    for dtype, shape in ((torch.bfloat16, (ROWS, 3, 72)), (torch.float32, (ROWS, 16, 80)), (torch.float16, (ROWS, 1, 7))):
        out = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        out[:end] = 1
        clear(out, boundaries([end]).cuda())
        assert (out[:end] == 1).all()
        assert not out[end:].any()


def test_clearing_does_not_compile_again_for_a_new_size() -> None:
    """One compile serves all sizes and alignments: a new one inside a capture must not compile."""
    compiled = tail_triton._zero_tail_kernel.device_caches[torch.cuda.current_device()][0]
    tail_triton.zero_tail(torch.ones(64, 4, 64, device="cuda"), boundaries([5]).cuda())
    before = len(compiled)
    for rows, dim, lengths in ((1, 1, [1]), (16, 16, [1]), (1000, 72, [3, 4]), (4096, 80, list(range(40)))):
        tail_triton.zero_tail(torch.ones(rows, 4, dim, device="cuda"), boundaries([0, *lengths]).cuda()[1:])
    assert len(compiled) == before


def test_the_default_way_to_clear_is_triton() -> None:
    """On a GPU machine the slower fallback is not what runs."""
    tail.zero_tail_(torch.ones(8, 1, 8, device="cuda"), boundaries([4]).cuda())
    assert tail._triton_launcher() is tail_triton.zero_tail


def test_a_broken_triton_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where Triton cannot run, the rows are cleared all the same, and it is said once."""

    def broken(out: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(tail, "_import_launcher", lambda: broken)
    monkeypatch.setattr(tail, "_triton_works", True)
    for _ in range(2):
        out = tail.zero_tail_(torch.ones(8, 1, 8, device="cuda"), boundaries([4]).cuda())
        assert out.sum() == 32
    assert len([record for record in caplog.records if "no C compiler" in record.message]) == 1
