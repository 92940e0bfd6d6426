"""Every pack is placed once, by the rule as written, so that micro-batches and ranks have like
costs.
"""

import numpy as np
import pytest

from chronicals.data import plan_packs
from chronicals.data.packs.strategies import balanced_packs

SHAPES = [(1, 1, 1), (1, 1, 8), (8, 1, 1), (4, 1, 4), (2, 2, 3), (3, 4, 5), (1, 4, 7), (5, 2, 1)]
"""Accumulation, ranks, batch size."""

MIXES = {
    "skewed": lambda count: np.random.lognormal(3, 2, count),
    "few costly": lambda count: np.random.choice([1, 2, 1000], count, p=[0.6, 0.3, 0.1]),
    "alike": lambda count: np.full(count, 7),
    "with empty ones": lambda count: np.random.choice([0, 5, 6], count),
}


def by_the_rule(costs, accumulation, ranks, batch_size):
    """Micro-batches as lists of places, ``[accumulation][ranks]``."""
    held = [[] for _ in range(accumulation * ranks)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        room = [places for places in held if len(places) < batch_size]
        min(room, key=lambda places: sum(costs[p] for p in places)).append(place)
    held.sort(key=lambda places: -sum(costs[p] for p in places))
    steps = [held[micro * ranks : (micro + 1) * ranks] for micro in range(accumulation)]
    return [
        [sorted(places) for places in (step if n % 2 == 0 else step[::-1])]
        for n, step in enumerate(steps)
    ]


def is_balanced(costs, places):
    """Whether micro-batches differ by no more than the costliest pack, and those of one
    micro-step are neighbours.
    """
    totals = costs[places].sum(2)
    return np.ptp(totals) <= costs.max() and (totals[:-1].min(1) >= totals[1:].max(1)).all()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES)
def test_packs_are_placed_by_the_rule(shape, mix):
    for _ in range(20):
        costs = MIXES[mix](np.prod(shape)).astype(np.int64)
        placed = balanced_packs(costs, *shape)
        assert placed.tolist() == by_the_rule(costs.tolist(), *shape)
        assert sorted(placed.ravel()) == list(range(costs.size))
        assert is_balanced(costs, placed)


def test_a_single_micro_batch_is_the_step_as_it_comes():
    costs = MIXES["skewed"](16).astype(np.int64)
    assert balanced_packs(costs, 1, 1, 16).ravel().tolist() == list(range(16))


@pytest.mark.parametrize("shape", [(8, 1, 4), (2, 4, 4), (1, 8, 8)])
def test_balance_is_four_times_better_than_in_order_and_the_check_sees_the_difference(shape):
    lengths = np.random.lognormal(np.log(400), 0.8, 20_000).clip(1, 2048).astype(np.int64)
    of_packs = np.random.permutation(
        [(lengths[pack] ** 2).sum() for pack in plan_packs(lengths, 2048)]
    )
    placed = []
    plain = []
    balanced_by_chance = 0
    for costs in of_packs[: 50 * np.prod(shape)].reshape(50, -1):
        in_order = np.arange(costs.size).reshape(shape)
        for found, places in ((placed, balanced_packs(costs, *shape)), (plain, in_order)):
            totals = costs[places].sum(2)
            found.append(totals.max() / totals.mean() - 1)
        balanced_by_chance += is_balanced(costs, in_order)
    assert np.mean(placed) <= min(0.25 * np.mean(plain), 0.1)
    assert balanced_by_chance <= 25
