"""Which items share one replay, by predicted time: the plan that costs least among many.

Greedy packing fills batches; whether full batches are fast depends on the device, the ladder and the tower, and many small
replays can lose to one eager batch. Here the caller prices a batch, eager execution being one of its choices, and plans
compete by the sum of their prices:

1. greedy, without and with its look-ahead;
2. the best cut of the sorted items into runs (dynamic programming);
3. best fit, largest first, into bins of the size of one budget: runs cannot put a large item next to a small one, bins can.

The chosen plan is never dearer than greedy's, and obeys the same limits. It is not always the best of all partitions. Plans
are not remembered: a caller that sees the same sizes again keeps the plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from operator import add
from typing import Protocol

from vit_compile.planning.packing import Batch, Group, Item, Limits, Lineup

MAX_RUNS = 4096
"""Most runs that are all priced. With more, only those that fill a budget as far as it goes are."""
MAX_BINNED_ITEMS = 64
"""Most items for which bins of several sizes are tried; with more, only the largest size is."""
MAX_LEVELS = 12
"""Most sizes of bins that are tried, over all paths; also most budgets of a path that the runs of a large request fill."""


class Prices(Protocol):
    """What a batch costs. The same arguments must get the same answer."""

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, tuple[int | None, ...]]:
        """Least predicted time of serving these items in one batch. There is always an answer, as eager is always possible.

        Called often, so it should be cheap. It must depend on sizes, not on which of several equal items are meant.

        Args:
            indices: Which items, in the order in which they are laid out.
            tokens: Their output tokens on each path.
            frames: Their frames.

        Returns:
            Milliseconds, 0 or more, and per path the budget that reaches them (`None`: eager; 0: nothing on that path).
        """
        ...


def by_cost(items: Sequence[Item], limits: Limits, prices: Prices) -> list[Batch]:
    """The plan of least predicted time among those of greedy packing, all runs of the sorted items, and bins.

    Equal times: fewer batches win, then greedy's plan. A batch of several items obeys the limits, also one that runs
    eagerly; an item that exceeds them is alone.

    Args:
        items: Images or clips, in the caller's order.
        limits: What a batch may hold.
        prices: Decides time and budgets of a batch.

    Returns:
        Batches in the order of their smallest items; none for no items.

    Raises:
        BudgetError: An item has another number of paths than there are ladders.
    """
    lineup = Lineup(items, limits)
    best: list[Batch] | None = None
    least = 0.0
    for groups in _candidates(lineup, prices):
        total = 0.0
        chosen = []
        for group in groups:
            ms, budgets = prices.batch(*group)
            total += ms
            chosen.append(budgets)
            if best is not None and total > least:
                break
        else:
            if best is None or total < least or (total == least and len(groups) < len(best)):
                least = total
                best = [Batch(group[0], budgets) for group, budgets in zip(groups, chosen, strict=True)]
    return best or []


def predicted(plan: Sequence[Batch], items: Sequence[Item], prices: Prices) -> float:
    """Milliseconds that a plan takes, as the sum of its batches' prices, whatever budgets it names.

    Args:
        plan: Batches of `items`.
        items: What the plan was made for.
        prices: Decides the time of a batch.
    """
    total = 0.0
    for batch in plan:
        members = [items[index] for index in batch.indices]
        tokens = tuple([sum(counts) for counts in zip(*[item.tokens for item in members], strict=True)])
        # Not sum(): a plain running total has equal bits here, in by_cost and in the dynamic program.
        total += prices.batch(batch.indices, tokens, sum(item.frames for item in members))[0]
    return total


def _candidates(lineup: Lineup, prices: Prices) -> Iterator[list[Group]]:
    """Legal plans, in the order of preference at equal time and number of batches."""
    greedy = lineup.greedy_ends()
    yield lineup.groups(greedy)
    if len(lineup.order) < 2:
        return
    ahead = lineup.greedy_ends(look_ahead=True)
    if ahead != greedy:
        yield lineup.groups(ahead)
    cheapest = _cheapest_ends(lineup, prices)
    if cheapest not in (greedy, ahead):
        yield lineup.groups(cheapest)
    if len(set(lineup.sizes)) > 1:  # of equal items, every plan has a twin among the runs
        for path, level in _levels(lineup):
            yield _bins(lineup, path, level)


def _cheapest_ends(lineup: Lineup, prices: Prices) -> list[int]:
    """Where the runs end that cut the sorted items at least cost; of equal costs, with fewest runs."""
    count = len(lineup.order)
    reach = [lineup.reach(start) for start in range(count)]
    every = sum(reach) - sum(range(count)) <= MAX_RUNS
    ladders = [_thinned(ladder, MAX_LEVELS) for ladder in lineup.ladders]
    cost = [float("inf")] * (count + 1)
    fewest = [count + 1] * (count + 1)
    begin = list(range(-1, count))  # a run of one, where no price is a number
    cost[0], fewest[0] = 0.0, 0
    group, batch = lineup.group, prices.batch
    for start, furthest in enumerate(reach):
        if fewest[start] > count:
            continue
        base, runs = cost[start], fewest[start] + 1
        for end in range(start + 1, furthest + 1) if every else _filling(lineup, ladders, start, furthest):
            total = base + batch(*group(start, end))[0]
            if total < cost[end] or (total == cost[end] and runs < fewest[end]):
                cost[end], fewest[end], begin[end] = total, runs, start
    ends: list[int] = []
    end = count
    while end > 0:
        ends.append(end)
        end = begin[end]
    return ends[::-1]


def _filling(lineup: Lineup, ladders: Sequence[Sequence[int]], start: int, furthest: int) -> set[int]:
    """Ends of the runs of one item, and of those that would need a larger budget, or break a limit, with one item more."""
    ends = {start + 1}
    for sums, ladder in zip(lineup.sums, ladders, strict=False):  # frames have no ladder
        base = sums[start]
        ends.update([bisect_right(sums, base + budget, start + 1, furthest + 1) - 1 for budget in ladder])
    ends.discard(start)
    return ends


def _levels(lineup: Lineup) -> list[tuple[int, int]]:
    """`(path, budget)` of the bins that are worth a try."""
    tokens = [sums[-1] for sums in lineup.sums[:-1]]
    if len(lineup.order) > MAX_BINNED_ITEMS:
        path = tokens.index(max(tokens))
        return [(path, lineup.ladders[path][-1])]
    levels = []
    for path, ladder in enumerate(lineup.ladders):
        counts = sorted([size[path] for size in lineup.sizes if size[path]])
        # Smaller bins hold one item each, larger ones than the first that holds them all are the same to the items.
        least, most = bisect_left(ladder, sum(counts[:2])), bisect_left(ladder, tokens[path])
        if len(counts) > 1:
            worthwhile = ladder[least : most + 1]
            levels += [(path, level) for level in _thinned(worthwhile, max(1, MAX_LEVELS // len(lineup.ladders)))]
    return levels


def _bins(lineup: Lineup, path: int, level: int) -> list[Group]:
    """Best fit, largest first, into bins of `level` tokens on `path`, and as much as is allowed otherwise."""
    sizes = lineup.sizes
    members: list[list[int]] = []
    totals: list[tuple[int, ...]] = []
    rooms: list[tuple[int, int]] = []  # (room on the path, bin) of bins that take more, least room first
    for position in sorted(range(len(sizes)), key=lambda position: sizes[position][path], reverse=True):
        size = sizes[position]
        need = size[path]
        for at in range(bisect_left(rooms, (need, 0)), len(rooms)):
            room, chosen = rooms[at]
            sums = tuple(map(add, totals[chosen], size))
            if all(map(int.__le__, sums, lineup.caps)):
                del rooms[at]
                members[chosen].append(position)
                totals[chosen] = sums
                break
        else:
            room, chosen = level, len(members)
            members.append([position])
            totals.append(size)
        if room >= need and len(members[chosen]) < lineup.max_items:
            insort(rooms, (room - need, chosen))
    plan = sorted([(sorted(positions), sums) for positions, sums in zip(members, totals, strict=True)])
    return [(tuple([lineup.order[position] for position in positions]), sums[:-1], sums[-1]) for positions, sums in plan]


def _thinned(ladder: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` of the budgets, evenly over the ladder, and the largest among them."""
    count = len(ladder)
    return ladder if count <= most else [ladder[count * part // most - 1] for part in range(1, most + 1)]
