"""The fence's Triton kernels against plain torch, in Triton's interpreter: no GPU is needed, but Triton is."""

from __future__ import annotations

from tests.attention.interpreted import check_interpreted

_PROCESS = """
import random
import torch
from vit_compile.attention import fence, fence_triton
random.seed(0)
torch.manual_seed(0)
for rows, heads, dim, lengths, capacity in (
    (14, 2, 8, [4, 5, 3], 5), (64, 3, 72, [40, 0, 17], 3), (5, 1, 80, [5], 1), (33, 2, 13, [16, 16, 1], 3), (7, 2, 8, [], 2)
):
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    cu_seqlens = torch.tensor([0, *ends, *([sum(lengths)] * (capacity - len(lengths)))], dtype=torch.int32)
    for trial in range(8):
        packed = torch.randn(rows, 3, heads, dim)
        k, v = (packed[:, i].clone() if trial % 2 else packed[:, i] for i in (1, 2))
        for _ in range(trial % 4):
            x, poison = random.choice((k, v)), random.choice((float("nan"), float("inf"), -float("inf")))
            x[random.randrange(rows), random.randrange(heads), random.randrange(dim)] = poison
        want_k, want_v, broken = fence.without_nan(k, v, cu_seqlens)
        got_k, got_v, segments = fence_triton.clean(k, v, cu_seqlens)
        assert torch.equal(got_k, want_k) and torch.equal(got_v, want_v)
        out = torch.randn(rows, heads, dim)
        want = out.masked_fill(broken[:, None, None], float("nan"))
        got = fence_triton.spoil(out.clone(), segments, cu_seqlens)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
print("the same")
"""


def test_the_kernels_do_what_plain_torch_does() -> None:
    """Strided inputs, empty segments, odd head dims, room left over, NaN and both infinities: the same cleaning and spoiling."""
    check_interpreted(_PROCESS)
