"""Load balancing: which packs of an optimizer step share a micro-batch, and which rank takes it.

Attention costs the sum of its documents' squared lengths, so packs of equal width may differ by an
order of magnitude. Costly packs are placed first, each into the least costly micro-batch that has
room (Graham's longest-processing-time rule with a cap on the number). Micro-batches are then sorted
by cost: ranks that wait for each other hold neighbours.
"""

from __future__ import annotations

import numpy as np

from chronicals.data.packs.compiled import compiled


@compiled
def balance(costs: np.ndarray, accumulation: int, ranks: int, batch_size: int) -> np.ndarray:
    """Places of the packs in the step, as ``[accumulation, ranks, batch_size]``.

    Args:
        costs: int64 ``[accumulation · ranks · batch_size]``, what attention costs in each pack of
            the step.

    Every place occurs once. Within a micro-batch places rise; ties go to the lower number, so a
    single micro-batch holds the step as it comes. The costlier neighbour goes to the first rank and
    to the last in turn.
    """
    bins = accumulation * ranks
    held = np.zeros(bins, np.int64)
    total = np.zeros(bins, np.int64)
    bin_of = np.empty(costs.size, np.int64)
    for place in np.argsort(-costs, kind="mergesort"):
        chosen = -1
        for candidate in range(bins):
            if held[candidate] < batch_size and (chosen < 0 or total[candidate] < total[chosen]):
                chosen = candidate
        bin_of[place] = chosen
        held[chosen] += 1
        total[chosen] += costs[place]
    first = np.empty(bins, np.int64)
    for turn, chosen in enumerate(np.argsort(-total, kind="mergesort")):
        micro = turn // ranks
        rank = turn % ranks
        first[chosen] = (
            micro * ranks + (rank if micro % 2 == 0 else ranks - 1 - rank)
        ) * batch_size
    places = np.empty(costs.size, np.int64)
    for place in range(costs.size):
        places[first[bin_of[place]]] = place
        first[bin_of[place]] += 1
    return places.reshape(accumulation, ranks, batch_size)
