"""Ladders are tried out as an encoder would use them, and a graph is worth what its absence costs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_compile.errors import BudgetError
from vit_compile.planning import budgets
from vit_compile.planning.worth import Costs, Ladder, Packer, within_bytes

REQUESTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=12)
LADDERS = st.sets(st.integers(4, 32), min_size=1, max_size=5).map(lambda found: tuple(sorted(found)))


def filled(request: list[int], top: int, max_items: int) -> list[list[int]]:
    """Greedy packing, written as it is described: smallest first, as many as fit."""
    batches: list[list[int]] = []
    for count in sorted(request):
        if batches and len(batches[-1]) < max_items and sum(batches[-1]) + count <= top:
            batches[-1].append(count)
        else:
            batches.append([count])
    return batches


def smallest(ladder: Ladder, tokens: int) -> int:
    """The budget that serves so many tokens."""
    return min(budget for budget in ladder if budget >= tokens)


@given(REQUESTS, LADDERS, st.integers(1, 4))
def test_greedy_outcomes_are_those_of_a_walk(requests: list[list[int]], ladder: Ladder, max_items: int) -> None:
    """Every number of an outcome is what filling batches by hand gives."""
    found = Packer(max_items, by_cost=False).serve(requests, ladder)
    batches = [batch for request in requests for batch in filled(request, ladder[-1], max_items)]
    served = [sum(batch) for batch in batches if sum(batch) <= ladder[-1]]
    eager = [batch for batch in batches if sum(batch) > ladder[-1]]
    assert found.replays == len(served)
    assert found.batches == Counter(served)
    assert found.replays_of == Counter(smallest(ladder, total) for total in served)
    assert found.tokens == sum(served)
    assert found.computed_tokens == sum(smallest(ladder, total) for total in served)
    assert (found.eager_items, found.eager_tokens) == (len(eager), sum(map(sum, eager)))
    assert found.cost == found.computed_tokens + found.eager_tokens
    assert (found.padded_share is None) == (not served)
    assert 0 <= (found.padded_share or 0) < 1


@given(REQUESTS, LADDERS, st.integers(1, 4))
def test_cost_packing_never_computes_more_than_greedy(requests: list[list[int]], ladder: Ladder, max_items: int) -> None:
    """It serves every item that fits, eager only what does not, for at most greedy's tokens."""
    found = Packer(max_items).serve(requests, ladder)
    greedy = Packer(max_items, by_cost=False).serve(requests, ladder)
    counts = [count for request in requests for count in request]
    assert found.eager_items == sum(count > ladder[-1] for count in counts)
    assert found.tokens + found.eager_tokens == sum(counts)
    assert found.computed_tokens <= greedy.computed_tokens
    assert found.cost <= greedy.cost
    assert sum(budget * times for budget, times in found.replays_of.items()) == found.computed_tokens


def test_two_small_replays_beat_one_large_one() -> None:
    """Cost packing keeps a 3 and a 5 apart over (4, 6, 16): 10 tokens, where greedy computes 16 for both."""
    assert Packer(8).serve([[5, 3]], (4, 6, 16)).replays_of == {4: 1, 6: 1}
    assert Packer(8, by_cost=False).serve([[5, 3]], (4, 6, 16)).replays_of == {16: 1}
    fixed = Costs(replay=lambda budget: 20.0 + budget)  # a replay costs something by itself
    assert Packer(8, fixed).serve([[5, 3]], (4, 6, 16)).replays_of == {16: 1}


def test_eager_runs_where_it_is_cheaper() -> None:
    """With a price for eager execution the cheaper of both is taken and summed; items too large are priced by it too."""
    costs = Costs(replay=lambda budget: float(budget), eager=lambda tokens: 10.0 + tokens)
    found = Packer(4, costs).serve([[3], [17], [40]], (4, 32))
    assert found.replays_of == {4: 1}
    assert found.eager_items == 2
    assert found.cost == 4 + (10 + 17) + (10 + 40)


def test_every_item_of_an_eager_batch_counts() -> None:
    """Two images that run eagerly together, five requests of them: ten eager items, five batches in the cost."""
    found = Packer(4, Costs(replay=lambda budget: 100.0, eager=lambda tokens: 10.0)).serve([[3, 2]] * 5, (4, 32))
    assert (found.replays, found.eager_items, found.eager_tokens, found.cost) == (0, 10, 25, 50)


def test_nothing_is_replayed_for_nothing() -> None:
    """Requests without items or tokens, and a ladder without budgets, replay nothing and divide by nothing."""
    empty = Packer(4).serve([[], [0]], (8,))
    assert (empty.replays, empty.cost, empty.padded_share) == (0, 0.0, None)
    bare = Packer(4).serve([[3, 4]], ())
    assert (bare.replays, bare.eager_items, bare.cost) == (0, 2, 7.0)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=8), st.integers(1, 3))
def test_a_fit_to_single_images_is_the_best_ladder(counts: list[int], graphs: int) -> None:
    """With one image a request nothing can be packed, and no ladder that ends at the maximum computes fewer tokens."""
    requests = [[count] for count in counts]
    ladder = Packer(1).fit(requests, graphs, maximum=14)
    tried = [(*some, 14) for number in range(graphs) for some in combinations(range(1, 14), number)]
    assert Packer(1).serve(requests, ladder).cost == min(sum(smallest(one, count) for count in counts) for one in tried)


@settings(max_examples=60)
@given(REQUESTS, st.integers(1, 5), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2, 4]))
def test_refits_only_help(requests: list[list[int]], graphs: int, max_items: int, step: int) -> None:
    """A fit costs at most what a fit to greedy batches costs; budgets are multiples from the most items to the maximum."""
    packer = Packer(max_items)
    ladder = packer.fit(requests, graphs, maximum=32, multiple_of=step)
    greedy = budgets.histogram_from_trace(requests, maximum=32, max_items=max_items)
    raised = [(max(total, max_items), weight) for total, weight in greedy.items()]
    once = budgets.fit(raised, graphs, maximum=32, multiple_of=step)
    assert packer.serve(requests, ladder).cost <= packer.serve(requests, once).cost
    assert len(ladder) <= graphs
    assert ladder[-1] == 32
    assert ladder[0] >= max_items
    assert all(budget % step == 0 for budget in ladder)


def test_a_refit_follows_what_packing_makes() -> None:
    """Greedy batches of 9, 7, 4, 5 and 4 ask for a budget of 7; packing over it takes 9 apart, and the refit asks for 5."""
    requests = [[4, 5, 7], [4], [2, 3, 4]]
    packer = Packer(2)
    greedy = budgets.histogram_from_trace(requests, maximum=16, max_items=2)
    assert greedy == {4: 2.0, 5: 1.0, 7: 1.0, 9: 1.0}
    assert packer.fit_batches(greedy, 2, maximum=16) == (7, 16)
    assert packer.serve(requests, (7, 16)).cost == 42  # six replays of 7
    assert packer.fit(requests, 2, maximum=16) == (5, 16)
    assert packer.serve(requests, (5, 16)).cost == 36  # 4, 4, 4 and 2 + 3 at 5; 5 + 7 at 16


def test_no_budget_is_below_the_most_items() -> None:
    """An encoder would lower its most items to the smallest budget, so single images of 1 and 2 tokens get a budget of 5."""
    assert Packer(5).fit([[1], [2], [30]], 3, maximum=32) == (5, 30, 32)


def test_more_items_than_tokens_are_refused() -> None:
    """A replay of the largest budget cannot hold more items than tokens."""
    with pytest.raises(BudgetError, match="max_items=9 is above the largest budget of 8"):
        Packer(9).fit([[1]], 2, maximum=8)
    with pytest.raises(BudgetError, match="max_items=0"):
        Packer(0)


def test_a_graph_is_worth_what_its_absence_costs() -> None:
    """Worked by hand: ten images of 4 tokens, four of 8 and one of 16 over (4, 8, 16), 88 tokens with all of them."""
    requests = [[4]] * 10 + [[8]] * 4 + [[16]]
    found = Packer(1).worth(requests, (4, 8, 16))
    assert [(worth.token_budget, worth.replays, worth.added_cost, worth.added_eager_items) for worth in found] == [
        (16, 1, 0.0, 1),
        (4, 10, 40.0, 0),
        (8, 4, 32.0, 0),
    ]
    assert [worth.added_share for worth in found] == [0, 40 / 88, 32 / 88]


@settings(max_examples=100)
@given(REQUESTS, LADDERS, st.integers(1, 4))
def test_no_loss_is_negative(requests: list[list[int]], ladder: Ladder, max_items: int) -> None:
    """Whatever goes eager without a budget is named by its items and tokens, and adds nothing below zero."""
    for worth in Packer(max_items).worth(requests, ladder):
        rest = [budget for budget in ladder if budget != worth.token_budget]
        lost = [count for request in requests for count in request if (max(rest) if rest else 0) < count <= ladder[-1]]
        assert worth.added_cost >= 0
        assert (worth.added_eager_items, worth.added_eager_tokens) == (len(lost), sum(lost))


def test_padding_saved_by_going_eager_is_no_gain() -> None:
    """By hand over (16, 64): without 64 an image of 36 goes eager, 28 tokens of padding less; two of 12 take 32 for 64 still."""
    found = {worth.token_budget: worth for worth in Packer(4).worth([[36], [12, 12]], (16, 64))}
    assert (found[64].added_cost, found[64].added_eager_items, found[64].added_eager_tokens) == (0, 1, 36)
    merged = {worth.token_budget: worth for worth in Packer(4).worth([[20], [9, 9, 9]], (10, 28))}
    assert (merged[28].added_cost, merged[28].added_eager_tokens) == (2, 20)  # 3 x 10 instead of 28


def test_with_a_price_for_eager_cost_alone_decides() -> None:
    """The largest graph is worth its one image's eager time, and comes after those that cost more to be without."""
    costs = Costs(replay=lambda budget: float(budget), eager=lambda tokens: 20.0 + tokens)
    found = Packer(1, costs).worth([[4]] * 10 + [[8]] * 4 + [[16]], (4, 8, 16))
    assert [(worth.token_budget, worth.added_cost) for worth in found] == [(4, 40.0), (8, 32.0), (16, 20.0)]


def test_the_only_graph_is_worth_all_images() -> None:
    """Without it everything runs eagerly; without a ladder there is nothing to judge."""
    (only,) = Packer(4).worth([[4, 4], [3]], (8,))
    assert (only.token_budget, only.replays, only.added_eager_items) == (8, 2, 3)
    with pytest.raises(BudgetError, match="ladder is empty"):
        Packer(4).worth([[4]], ())


# --- under a cap in bytes


def total(ladder: Ladder) -> int:
    """Bytes where each graph takes its tokens."""
    return sum(ladder)


def test_budgets_go_by_what_they_cost_for_the_bytes_they_free() -> None:
    """By hand: of (4, 8, 12, 16) first 12 goes (+4 tokens for 12 bytes), then 8 (+24 for 8 bytes), then 4 (+32 for 4)."""
    batches = {4: 8.0, 8: 3.0, 12: 1.0, 16: 1.0}
    ladder = (4, 8, 12, 16)
    for cap, want in ((40, ladder), (39, (4, 8, 16)), (28, (4, 8, 16)), (27, (4, 16)), (20, (4, 16)), (19, (16,)), (16, (16,))):
        assert within_bytes(batches, [ladder], Costs(), nbytes=total, cap=cap) == want
    with pytest.raises(BudgetError, match="max_bytes=15: the graph of 16 tokens alone takes 16 bytes"):
        within_bytes(batches, [ladder], Costs(), nbytes=total, cap=15)


def test_a_ladder_made_for_fewer_graphs_may_win() -> None:
    """Of two starts, the one whose remains cost less under the cap is taken; of equal ones the shorter."""
    batches = {4: 8.0, 6: 8.0, 16: 1.0}
    assert within_bytes(batches, [(4, 6, 16), (6, 16)], Costs(), nbytes=total, cap=22) == (6, 16)
    assert within_bytes(batches, [(4, 16)], Costs(), nbytes=total, cap=22) == (4, 16)
    assert within_bytes({16: 1.0}, [(4, 16)], Costs(), nbytes=total, cap=99) == (16,)


@settings(max_examples=60)
@given(REQUESTS, st.integers(1, 5), st.integers(33, 120))
def test_a_fit_within_bytes_fits(requests: list[list[int]], graphs: int, cap: int) -> None:
    """The cap holds; every item that the maximum would serve is served; no cheaper than without the cap is claimed."""
    packer = Packer(2)
    ladder = packer.fit_within(requests, graphs, maximum=32, nbytes=total, max_bytes=cap)
    served = packer.serve(requests, ladder)
    assert total(ladder) <= cap
    assert len(ladder) <= graphs
    assert served.eager_items == sum(count > 32 for request in requests for count in request)
    assert served.cost <= packer.serve(requests, (32,)).cost


def test_a_cap_lowers_the_maximum_to_what_images_need() -> None:
    """Images of 8 are served under a cap of 30, though the maximum of 64 alone takes 64; under one of 7 they cannot be."""
    requests = [[8, 8], [8], [4], [8] * 6]
    ladder = Packer(8).fit_within(requests, 4, maximum=64, nbytes=total, max_bytes=30)
    assert 8 in ladder
    assert total(ladder) <= 30
    assert Packer(8).serve(requests, ladder).eager_items == 0
    with pytest.raises(BudgetError, match="max_bytes=7: the graph of 8 tokens alone takes 8 bytes"):
        Packer(8).fit_within(requests, 4, maximum=64, nbytes=total, max_bytes=7)
