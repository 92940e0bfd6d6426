"""Load balancing: which packs of an optimizer step share a micro-batch, and which rank takes it.

Attention costs the sum of its documents' squared lengths, so packs of equal width may differ by an
order of magnitude. Costly packs are placed first, each into the least costly micro-batch that has
room (Graham's longest-processing-time rule with a cap on the number). Micro-batches are then sorted
by cost, so that ranks that wait for each other hold neighbours. The costs, and what else a step
counts, are sums over the documents of each pack.
"""

from __future__ import annotations

import numpy as np

from chronicals.data.making.documents import MISMATCHED_SIDE, UNJUDGED
from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN, TokenStore
from chronicals.data.packs.assembly import PackedDocuments
from chronicals.data.packs.compiled import compiled
from chronicals.data.packs.dealing import Dealing
from chronicals.data.packs.parts import SPLIT
from chronicals.data.packs.step_memory import WEIGHT_COLUMN

_SUMMED = ("targets", "tokens", "documents", "items", "first_targets")
"""Names of the sums; ``first_targets`` are those of the first documents of items."""


@compiled
def balanced_packs(costs: np.ndarray, accumulation: int, ranks: int, batch_size: int) -> np.ndarray:
    """Return the packs of each micro-batch, int64 ``[accumulation, ranks, batch_size]``.

    Every pack occurs once. Within a micro-batch their numbers rise; ties go to the lower number, so
    a single micro-batch holds the step as it comes. The costlier neighbour goes to the first rank
    and to the last in turn.

    Args:
        costs: int64 ``[accumulation · ranks · batch_size]``, what attention costs in each pack of
            the step.
        accumulation: micro-batches of a rank in the step.
        ranks: number of ranks.
        batch_size: packs of a micro-batch.
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


class PackSums:
    """Sums by pack. The number after the last pack stands for an empty one.

    Args:
        store: the documents.
        documents: which pack holds which of them.
        dealing: who has which document, if several ranks share a pack.

    Attributes:
        costs: int64 ``[packs + 1]``, what attention costs: the sum of squared lengths of documents,
            without the square of the prompt that they stand behind. Of several ranks that share a
            pack it is the cost of the slowest, as if all had as much.
    """

    def __init__(self, store: TokenStore, documents: PackedDocuments, dealing: Dealing | None):
        self._packed = documents.packed
        self._offsets = documents.offsets
        each = np.ones(len(store), np.int64)
        first = each
        if store.items is not None:
            first = (store.columns[SIDE_COLUMN] == 0).astype(np.int64)
        values = store.targets, store.lengths, each, first, first * store.targets
        self._sums = np.stack([self._in_packs(column) for column in values], axis=1)
        attended = (store.lengths + store.before) ** 2 - store.before**2
        if dealing is None:
            self.costs = self._in_packs(attended)
        else:
            # The sum of the rank that has the most, times the ranks; all have the same of a split
            # document.
            rank_of = dealing.rank_of[:-1]
            count = dealing.context.count
            split = self._in_packs(np.where(rank_of == SPLIT, attended, 0))
            whole = [
                self._in_packs(np.where(rank_of == rank, attended, 0)) for rank in range(count)
            ]
            self.costs = split + count * np.max(whole, axis=0)
        self._good = None
        if LABEL_COLUMN in store.columns:
            labels = store.columns[LABEL_COLUMN]
            mismatched = (store.columns[SIDE_COLUMN] == MISMATCHED_SIDE) & (labels != UNJUDGED)
            self._good = self._in_packs(first * (labels == 1))
            self._mismatched = self._in_packs(mismatched.astype(np.int64))
        self._weights = None
        if WEIGHT_COLUMN in store.columns:
            weights = store.columns[WEIGHT_COLUMN].astype(np.float64)
            self._weights = self._in_packs(weights * store.targets)

    def counts(self, packs: np.ndarray, slots: int) -> dict[str, int | float]:
        """Return what a step holds, by the names of ``steps.StepCounts``.

        Args:
            packs: of the step, all ranks.
            slots: positions of the step.
        """
        counts: dict[str, int | float] = dict(zip(_SUMMED, self._sums[packs].sum(0).tolist()))
        counts["packs"] = int((packs < len(self._offsets) - 2).sum())
        counts["slots"] = slots
        if self._good is not None:
            counts["good_items"] = int(self._good[packs].sum())
            counts["bad_items"] = counts["items"] - counts["good_items"]
            counts["mismatched_items"] = int(self._mismatched[packs].sum())
        if self._weights is not None:
            counts["weight"] = float(self._weights[packs].sum())
        return counts

    def _in_packs(self, values: np.ndarray) -> np.ndarray:
        """Return ``[packs + 1]``, sums over the documents of each pack of a value of documents."""
        zero = np.zeros(1, values.dtype)
        running = np.concatenate([zero, np.cumsum(values[self._packed])])
        return np.diff(running[self._offsets])
