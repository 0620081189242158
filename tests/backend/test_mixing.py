"""What the graph alone says about rows that see each other: cases in which one call's data hides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

import vit_compile
from tests.backend.common import call, compiled, largest_difference
from vit_compile import counters

T = torch.Tensor
TABLE = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))


def run(model: Callable[[T, T], T], warm: tuple[T, T], calls: list[tuple[T, T]], tolerance: float = 1e-5) -> None:
    """Warm up with one call, then every other one must equal eager, whatever served it."""
    ours = compiled(model, token_budgets=[16, 64])
    with torch.no_grad():
        vit_compile.warmup(ours, *warm, progress=False)
        for args in calls:
            want = model(*args)
            assert largest_difference(call(ours, *args), want) <= tolerance * max(1.0, float(want.abs().max()))


def rows(count: int, seed: int = 0) -> T:
    """Seeded normal rows [count, 8]."""
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


INTEGERS: dict[str, Callable[[T, T], T]] = {
    "minimum": lambda x, p: x + TABLE[p - p.min()],
    "maximum": lambda x, p: x + TABLE[p.max() - p],
    "minimum of columns": lambda x, p: x + TABLE[(p[:, None] - p[:, None].amin(0))[:, 0]],
    "all": lambda x, p: torch.where((p > 3).all(), x, 2 * x),
    "sorted values": lambda x, p: x + TABLE[p.sort().values],
    "argsort of keys": lambda x, p: x[p.argsort()],
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_are_joined_over_rows(name: str) -> None:
    """Integers cannot be poisoned with anything: a reduction or a sort of them is refused by the graph alone."""
    warm = (rows(12), torch.arange(12))
    later = [(rows(n, n), torch.randperm(n, generator=torch.Generator().manual_seed(n)) + 10) for n in (12, 7, 30)]
    run(INTEGERS[name], warm, [*later, (rows(9), torch.arange(9) * 100)])


COUNTS: dict[str, Callable[[T, T], T]] = {
    "power": lambda x, p: x * (x.shape[0] ** -0.02),
    "rational": lambda x, p: x * (1000 / (1000.0 + x.shape[0])),
    "alpha": lambda x, p: torch.add(x, x, alpha=x.shape[0] ** -0.7),
    "fill": lambda x, p: x.masked_fill(p[:, None] > 5, x.shape[0] * 1e-2),
    "full": lambda x, p: x + torch.full((1,), float(x.shape[0])),
    "sum of ones": lambda x, p: x * torch.ones(x.shape[0]).sum() ** -0.02,
    "end marker": lambda x, p: torch.cat([x[:-1], x[-1:] + 0.5]),
    "reversed positions": lambda x, p: x * torch.arange(x.shape[0]).flip(0)[:, None],
    "any": lambda x, p: x + (x == 0).any(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("zeros", [False, True])
def test_counts_in_any_guise(name: str, dtype: torch.dtype, zeros: bool) -> None:
    """A number of rows that gets into the numbers is found in any precision, and also when warm-up rows are all zero."""
    warm = (torch.zeros(12, 8, dtype=dtype) if zeros else rows(12).to(dtype), torch.arange(12))
    calls = [(rows(n, n).to(dtype), torch.arange(n)) for n in (12, 7, 30, 50)]
    run(COUNTS[name], warm, calls, 1e-5 if dtype is torch.float32 else 1e-2)


def test_negative_indices_count_from_the_real_end() -> None:
    """-1 is the last real row, also in a padded replay; permutations of rows are padded all the same."""
    linear = nn.Linear(8, 8).requires_grad_(False)

    def model(x: T, i: T) -> T:
        return cast(T, linear(x)[i] * 2)

    warm = (rows(12), torch.arange(12))
    calls = []
    for n in (12, 7, 30):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        calls += [(rows(n, n), order), (rows(n, n), order - n)]
    run(model, warm, calls)
    assert counters.padded_replays == len(calls)


def test_labels_are_not_indices_of_rows() -> None:
    """Integers that index another dimension than the rows are padded with zeros, which stay in range."""
    run(
        lambda x, label: (x * 2)[torch.arange(x.shape[0]), label][:, None] + x,
        (rows(12), torch.arange(12) % 8),
        [(rows(n, n), torch.arange(n) % 8) for n in (12, 7, 30)],
    )
    assert counters.padded_replays == 3
    assert not counters.skips
