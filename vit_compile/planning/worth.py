"""What a ladder does for requests, and what each of its graphs is worth.

A ladder is tried out by packing recorded requests one by one over it, as an encoder would, and pricing every replay. Prices are
output tokens where nothing was measured, so that padding is what costs, or milliseconds. A graph is worth what its absence
would add. Here a request is a list of output-token counts, one for each image or clip; frames are not limited.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vit_compile.errors import BudgetError
from vit_compile.planning import cost_plans, fitting, packing
from vit_compile.planning.units import listed, positive_int

Requests: TypeAlias = Sequence[Sequence[int]]
"""Output tokens of the items of each request."""
Ladder: TypeAlias = tuple[int, ...]
"""Budgets in output tokens, ascending."""

MAX_REFITS = 8
"""Rounds of fitting to what packing makes of the last ladder. Traffic of a chat service needs two."""
_LAST_RESORT = 1e6
"""Where eager runs have no price, packing avoids them at any."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices of one run, in one unit. The default is output tokens computed."""

    replay: Callable[[int], float] = float
    """Of a graph, by its budget; it never falls."""
    eager: Callable[[int], float] | None = None
    """Of an eager batch, by its tokens. None: not known; only what fits no graph runs eagerly, and it counts as if it were
    replayed without padding."""

    def eagerly(self, tokens: int) -> float:
        """Price of an eager batch, for sums."""
        return self.replay(tokens) if self.eager is None else self.eager(tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a ladder did for some requests."""

    replays: int
    tokens: int
    """Real output tokens of all replays."""
    computed_tokens: int
    """The same with padding: the budgets of all replays."""
    eager_items: int
    eager_tokens: int
    cost: float
    """Of all replays and eager batches, in the unit of the prices."""
    batches: Mapping[int, int]
    """Output tokens of a replay -> replays: the histogram for the next fit."""
    replays_of: Mapping[int, int]
    """Budget -> replays."""

    @property
    def padded_share(self) -> float | None:
        """Padding tokens / computed tokens of all replays, between 0 and 1. None: nothing was replayed."""
        return (self.computed_tokens - self.tokens) / self.computed_tokens if self.computed_tokens else None


@dataclass(frozen=True, slots=True)
class Worth:
    """What a ladder loses with one of its budgets; with all others there."""

    token_budget: int
    replays: int
    """How often it serves, while it is there."""
    added_cost: float
    """What the requests cost more without it. Where eager runs have no price: of those images that a graph still serves."""
    added_share: float
    """The same as a part of what they cost with it."""
    added_eager_items: int
    """Images and clips that no graph would serve."""
    added_eager_tokens: int = 0
    """Their output tokens."""


@dataclass(frozen=True, slots=True)
class Packer:
    """How requests become replays.

    Raises:
        BudgetError: `max_items` is not a positive integer.
    """

    max_items: int
    """Most items of a replay."""
    costs: Costs = Costs()
    by_cost: bool = True
    """Cheapest plan, as `EncoderConfig(packing="cost")`; False: greedy."""

    def __post_init__(self) -> None:
        positive_int("max_items", self.max_items)

    def serve(self, requests: Requests, ladder: Ladder) -> Outcome:
        """Packs each request by itself over a ladder; an empty one serves nothing.

        Raises:
            BudgetError: A ladder is not strictly ascending, or a number is out of range.
        """
        counts = Counter(tuple(sorted(request)) for request in requests)
        tokens = computed = eager_items = eager_tokens = 0
        cost = 0.0
        batches: Counter[int] = Counter()
        replays_of: Counter[int] = Counter()
        for request, times in counts.items():
            for indices, budget in self._batches(request, ladder):
                total = sum(request[index] for index in indices)
                if budget is None:
                    eager_items += times * len(indices)
                    eager_tokens += times * total
                    cost += times * self.costs.eagerly(total)
                elif budget:  # nothing runs for items of no tokens
                    tokens += times * total
                    computed += times * budget
                    cost += times * self.costs.replay(budget)
                    batches[total] += times
                    replays_of[budget] += times
        return Outcome(replays_of.total(), tokens, computed, eager_items, eager_tokens, cost, batches, replays_of)

    def _batches(self, request: Sequence[int], ladder: Ladder) -> list[tuple[tuple[int, ...], int | None]]:
        if not ladder:
            return [((index,), None) for index in range(len(request))]
        items = [packing.Item((count,)) for count in request]
        limits = packing.Limits((ladder,), self.max_items)
        if self.by_cost:
            plan = cost_plans.by_cost(items, limits, _Prices(ladder, self.costs))
        else:
            plan = packing.greedy(items, limits)
        return [(batch.indices, batch.budgets[0]) for batch in plan]

    def fit(self, requests: Requests, max_graphs: int, *, maximum: int, multiple_of: int = 1) -> Ladder:
        """The ladder for these requests: fitted to greedy batches, and then to those that packing makes of it, while that helps.

        Budgets are never below `max_items`, which an encoder would otherwise lower to the smallest of them.

        Raises:
            BudgetError: A number is out of range, there are no requests, or the maximum is no multiple or below `max_items`.
        """
        if maximum < self.max_items:
            raise BudgetError(
                f"max_items={self.max_items} is above the largest budget of {maximum}, and every item has a token or more: "
                "lower it, or raise the budget."
            )
        batches: Mapping[int, float] = fitting.histogram_from_trace(requests, maximum=maximum, max_items=self.max_items)
        best: Ladder = ()
        least = float("inf")
        for _ in range(1 + MAX_REFITS):
            ladder = self.fit_batches(batches, max_graphs, maximum=maximum, multiple_of=multiple_of)
            outcome = self.serve(requests, ladder)
            if outcome.cost >= least:
                break
            best, least, batches = ladder, outcome.cost, {total: float(count) for total, count in outcome.batches.items()}
        return best

    def fit_batches(self, batches: Mapping[int, float], max_graphs: int, *, maximum: int, multiple_of: int = 1) -> Ladder:
        """The ladder for replays of these sizes."""
        raised = [(max(total, self.max_items), weight) for total, weight in batches.items()]
        return fitting.fit(raised, max_graphs, maximum=maximum, multiple_of=multiple_of, cost=self.costs.replay)

    def fit_within(
        self,
        requests: Requests,
        max_graphs: int,
        *,
        maximum: int,
        multiple_of: int = 1,
        nbytes: Callable[[Ladder], int],
        max_bytes: int,
    ) -> Ladder:
        """As `fit`, for graphs that take no more than so many bytes.

        Fewer graphs are tried, and smaller maxima too, down to one that still holds every item that the maximum holds.

        Args:
            requests, max_graphs, maximum, multiple_of: As for `fit`.
            nbytes: Bytes of all graphs of a ladder.
            max_bytes: Most bytes.

        Raises:
            BudgetError: As for `fit`, or a graph for the largest item alone takes more.
        """
        ladder = self.fit(requests, max_graphs, maximum=maximum, multiple_of=multiple_of)
        largest = max((count for request in requests for count in request if count <= maximum), default=0)
        found: list[Ladder] = []
        refusal: BudgetError | None = None
        for top in [budget for budget in ladder if budget >= max(largest, self.max_items)]:
            first = self.fit(requests, max_graphs, maximum=top, multiple_of=multiple_of)
            batches = {total: float(count) for total, count in self.serve(requests, first).batches.items()}
            fewer = [self.fit_batches(batches, graphs, maximum=top, multiple_of=multiple_of) for graphs in range(1, len(first))]
            try:
                found.append(within_bytes(batches, [first, *fewer], self.costs, nbytes=nbytes, cap=max_bytes))
            except BudgetError as error:
                refusal = refusal or error  # of the smallest maximum
        if not found:
            assert refusal is not None, "the maximum itself is tried"
            raise refusal
        return min(found, key=lambda ladder: (self.serve(requests, ladder).cost, len(ladder)))

    def worth(self, requests: Requests, ladder: Ladder) -> list[Worth]:
        """What each budget is worth, the dearest loss first: images that no graph would serve, then cost.

        Raises:
            BudgetError: The ladder is empty or not strictly ascending.
        """
        listed("ladder", ladder, "output-token counts")
        whole = self.serve(requests, ladder)
        unpriced = self.costs.eager is None
        found = []
        for budget in ladder:
            rest = self.serve(requests, tuple(other for other in ladder if other != budget))
            added = rest.cost - whole.cost
            lost, lost_tokens = rest.eager_items - whole.eager_items, rest.eager_tokens - whole.eager_tokens
            if unpriced and lost:
                added = self._added_to_served(requests, ladder)
            share = added / whole.cost if whole.cost else 0.0
            found.append(Worth(budget, whole.replays_of.get(budget, 0), added, share, lost, lost_tokens))
        return sorted(
            found, key=lambda worth: (-worth.added_eager_items if unpriced else 0, -worth.added_cost, worth.token_budget)
        )

    def _added_to_served(self, requests: Requests, ladder: Ladder) -> float:
        """What the largest budget's absence adds to the price of those items that a smaller graph holds."""
        rest = ladder[:-1]
        if not rest:
            return 0.0
        held = [[count for count in request if count <= rest[-1]] for request in requests]
        return max(0.0, self.serve(held, rest).cost - self.serve(held, ladder).cost)


def within_bytes(
    batches: Mapping[int, float], ladders: Sequence[Ladder], costs: Costs, *, nbytes: Callable[[Ladder], int], cap: int
) -> Ladder:
    """The cheapest ladder that fits under a cap, among those given and what is left of each as budgets go, one by one.

    Each time the budget goes that costs least for the bytes that it frees; the largest stays.

    Args:
        batches: Output tokens of a replay -> weight; none above the largest budget.
        ladders: To begin with; all with the same largest budget.
        costs: Prices of replays.
        nbytes: Bytes of all graphs of a ladder.
        cap: Most bytes.

    Raises:
        BudgetError: Even the graph of the largest budget alone takes more.
    """
    cap = positive_int("max_bytes", cap)
    fitting_ladders = [rest for ladder in ladders for rest in _thinned(batches, ladder, costs, nbytes) if nbytes(rest) <= cap]
    if not fitting_ladders:
        top, least = ladders[0][-1], nbytes(ladders[0][-1:])
        raise BudgetError(
            f"max_bytes={cap}: the graph of {top} tokens alone takes {least} bytes: allow more, or lower the largest budget."
        )
    return min(fitting_ladders, key=lambda ladder: (_cost(batches, ladder, costs), len(ladder)))


def _thinned(batches: Mapping[int, float], ladder: Ladder, costs: Costs, nbytes: Callable[[Ladder], int]) -> list[Ladder]:
    """A ladder and what is left of it, down to its largest budget."""
    chain = [ladder]
    while len(ladder) > 1:
        here, taken = _cost(batches, ladder, costs), nbytes(ladder)
        rests = [tuple(other for other in ladder if other != budget) for budget in ladder[:-1]]
        ladder = min(rests, key=lambda rest: (_cost(batches, rest, costs) - here) / max(1, taken - nbytes(rest)))
        chain.append(ladder)
    return chain


def _cost(batches: Mapping[int, float], ladder: Ladder, costs: Costs) -> float:
    prices = [costs.replay(budget) for budget in ladder]
    return sum(weight * prices[bisect_left(ladder, total)] for total, weight in batches.items())


class _Prices:
    """What `cost_plans` asks: a batch takes the smallest budget that holds it, or runs eagerly where that is cheaper."""

    def __init__(self, ladder: Ladder, costs: Costs) -> None:
        self._ladder, self._eager = ladder, costs.eager
        self._replays = [costs.replay(budget) for budget in ladder]

    def batch(self, indices: Sequence[int], tokens: tuple[int, ...], frames: int) -> tuple[float, tuple[int | None, ...]]:
        total = tokens[0]
        if total == 0:
            return 0.0, (0,)
        eager = total * _LAST_RESORT if self._eager is None else self._eager(total)
        at = bisect_left(self._ladder, total)
        if at == len(self._ladder) or self._replays[at] > eager:
            return eager, (None,)
        return self._replays[at], (self._ladder[at],)
