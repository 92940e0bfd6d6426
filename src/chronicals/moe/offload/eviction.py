"""Policies that choose the expert that gives up its slot when another one needs it.

A policy gives each expert in a slot a rank; the one with the least goes first. Where the layers
together choose more experts than there are slots, those that a pass brings in leave before all
others, the latest first, whatever the policy: they would otherwise push out everything, and be gone
themselves when their layer comes again (a scan).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from typing import ClassVar

Expert = tuple[int, int]
"""Number of a layer among the layers with experts, and of an expert in it."""


class EvictionPolicy(ABC):
    """The experts in slots, by rank.

    Attributes:
        name: how it is asked for.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._ranks: dict[Expert, tuple] = {}
        self._heap: list[tuple[tuple, Expert]] = []
        self._clock = 0

    @abstractmethod
    def rank(self, expert: Expert, now: int) -> tuple:
        """Return the rank of an expert that is used at time ``now``; tuples of one length."""

    def use(self, expert: Expert, passing: bool = False) -> None:
        """Note that an expert in a slot is used, or was brought into one.

        Args:
            expert: the expert.
            passing: it is brought in by a pass over more experts than slots can keep.
        """
        self._clock += 1
        rank = (0, -self._clock) if passing else (1, *self.rank(expert, self._clock))
        self._ranks[expert] = rank
        heapq.heappush(self._heap, (rank, expert))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, expert) for expert, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def victims(self, kept: Collection[Expert]) -> Generator[Expert]:
        """Yield the experts to evict, one after another, and forget the rank of each.

        Close the iterator before the policy is asked for others.

        Args:
            kept: experts that stay; may grow meanwhile.
        """
        aside = []
        try:
            while self._heap:
                rank, expert = heapq.heappop(self._heap)
                if self._ranks.get(expert) != rank:
                    continue  # an older rank
                if expert in kept:
                    aside.append((rank, expert))
                    continue
                del self._ranks[expert]
                yield expert
        finally:
            for entry in aside:
                heapq.heappush(self._heap, entry)


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the expert that was used longest ago."""

    name = "lru"

    def rank(self, expert: Expert, now: int) -> tuple:
        """Return the time of its last use."""
        return (now,)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evict the expert that was used least often since loading; of several the oldest."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._uses = Counter[Expert]()

    def rank(self, expert: Expert, now: int) -> tuple:
        """Return the number of its uses, in slots and before, and the time of the last."""
        self._uses[expert] += 1
        return self._uses[expert], now


class ByTrace(EvictionPolicy):
    """Evict the expert that a trace chose least often, so that what stays does not change.

    Args:
        loads: how often a trace chose each expert.
    """

    name = "static"

    def __init__(self, loads: Mapping[Expert, int]):
        super().__init__()
        self.loads = dict(loads)

    def rank(self, expert: Expert, now: int) -> tuple:
        """Return the number of tokens of the trace that chose it."""
        return self.loads.get(expert, 0), -now


POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (LeastRecentlyUsed, LeastFrequentlyUsed, ByTrace)
}
"""Policies by name."""
