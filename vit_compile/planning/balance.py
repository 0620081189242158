"""Balance: which rank of a data-parallel group works on which items."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from vit_compile.planning import units


def longest_first(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Share items out by size, the largest first, each to the rank that has the least so far.

    No rank gets more than 4/3 - 1/(3 ranks) of the least that the fullest rank must have (R. L. Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969). Equal items keep their order and equal ranks go by number, so that every rank
    that computes this gets the same answer.

    Args:
        sizes: Work of each item, above 0, in any one unit (patches, tiles).
        ranks: Ranks of the group, 1 or more.

    Returns:
        Indices of each rank's items, ascending; an empty list for a rank without items.

    Raises:
        BudgetError: `ranks` is not a positive integer.
    """
    shares: list[list[int]] = [[] for _ in range(units.positive_int("ranks", ranks))]
    loads = [(0, rank) for rank in range(len(shares))]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + sizes[index], rank))
    return [sorted(share) for share in shares]
