"""Load balancing: which packs of an optimizer step share a micro-batch, and which rank takes it.

Attention costs the sum of its documents' squared lengths, so packs of equal width may differ by an
order of magnitude. Costly packs are placed first, each into the least costly micro-batch that has
room (Graham's longest-processing-time rule with a cap on the number). Micro-batches are then sorted
by cost, so that ranks that wait for each other hold neighbours.
"""

from __future__ import annotations

import numpy as np

from chronicals.data.packs.compiled import compiled


@compiled
def balance(costs: np.ndarray, accumulation: int, ranks: int, batch_size: int) -> np.ndarray:
    """Return the packs of each micro-batch, int64 ``[accumulation, ranks, batch_size]``.

    Every pack occurs once. Within a micro-batch their numbers rise; ties go to the lower number, so
    a single micro-batch holds the step as it comes. The costlier neighbour goes to the first rank
    and to the last in turn.

    Args:
        costs: int64 ``[accumulation · ranks · batch_size]``, what attention costs in each pack of
            the step.
    """
    bins = accumulation * ranks
    packs_in = np.zeros(bins, np.int64)
    total = np.zeros(bins, np.int64)
    bin_of = np.empty(costs.size, np.int64)
    for pack in np.argsort(-costs, kind="mergesort"):
        chosen = -1
        for candidate in range(bins):
            has_room = packs_in[candidate] < batch_size
            if has_room and (chosen < 0 or total[candidate] < total[chosen]):
                chosen = candidate
        bin_of[pack] = chosen
        packs_in[chosen] += 1
        total[chosen] += costs[pack]
    next_place = np.empty(bins, np.int64)
    for turn, chosen in enumerate(np.argsort(-total, kind="mergesort")):
        micro = turn // ranks
        rank = turn % ranks
        if micro % 2 == 1:
            rank = ranks - 1 - rank
        next_place[chosen] = (micro * ranks + rank) * batch_size
    packs = np.empty(costs.size, np.int64)
    for pack in range(costs.size):
        packs[next_place[bin_of[pack]]] = pack
        next_place[bin_of[pack]] += 1
    return packs.reshape(accumulation, ranks, batch_size)
