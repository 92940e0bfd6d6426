"""Policies that choose the expert that gives up its slot when another one needs it.

A policy keeps the experts in slots in an order, and the first one goes first. Where the layers
together choose more experts than there are slots, those that a pass brings in leave before all
others, the latest first, whatever the policy: they would otherwise push out everything, and be gone
themselves when their layer comes again (a scan).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from itertools import islice
from typing import ClassVar

Expert = tuple[int, int]
"""Number of a layer among the layers with experts, and of an expert in it."""


class EvictionPolicy(ABC):
    """The experts in slots, in the order in which they give them up.

    Attributes:
        name: how it is asked for.
    """

    name: ClassVar[str]

    @abstractmethod
    def use(self, *experts: Expert, passing: bool = False) -> None:
        """Note that experts in slots are used, or were brought into them, one after another.

        Args:
            *experts: the experts.
            passing: they are brought in by a pass over more experts than slots can keep.
        """

    @abstractmethod
    def evict(self, count: int, kept: Collection[Expert]) -> list[Expert]:
        """Return so many experts that give up their slots, the first first, and forget them.

        They are fewer if all others are in ``kept``.
        """


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the expert that was used longest ago."""

    name = "lru"

    def __init__(self) -> None:
        self._order = OrderedDict[Expert, None]()

    def use(self, *experts: Expert, passing: bool = False) -> None:
        """Move experts to the end of the order, or to its beginning if they are passing."""
        for expert in experts:
            self._order[expert] = None
            self._order.move_to_end(expert, last=not passing)

    def evict(self, count: int, kept: Collection[Expert]) -> list[Expert]:
        """Return the first experts of the order."""
        found = list(islice((expert for expert in self._order if expert not in kept), count))
        for expert in found:
            del self._order[expert]
        return found


class ByRank(EvictionPolicy):
    """Evict the expert with the least rank."""

    def __init__(self) -> None:
        self._ranks: dict[Expert, tuple] = {}
        self._heap: list[tuple[tuple, Expert]] = []
        self._clock = 0

    @abstractmethod
    def rank(self, expert: Expert, now: int) -> tuple:
        """Return the rank of an expert that is used at time ``now``; tuples of one length."""

    def use(self, *experts: Expert, passing: bool = False) -> None:
        """Give experts their ranks of now; those that are passing have less than all others."""
        for expert in experts:
            self._clock += 1
            rank = (0, -self._clock) if passing else (1, *self.rank(expert, self._clock))
            self._ranks[expert] = rank
            heapq.heappush(self._heap, (rank, expert))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, expert) for expert, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def evict(self, count: int, kept: Collection[Expert]) -> list[Expert]:
        """Return the experts with the least ranks."""
        found: list[Expert] = []
        aside = []
        while self._heap and len(found) < count:
            rank, expert = heapq.heappop(self._heap)
            if self._ranks.get(expert) != rank:
                continue  # an older rank
            if expert in kept:
                aside.append((rank, expert))
                continue
            del self._ranks[expert]
            found.append(expert)
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found


class LeastFrequentlyUsed(ByRank):
    """Evict the expert that was used least often since loading; of several the oldest."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._uses = Counter[Expert]()

    def rank(self, expert: Expert, now: int) -> tuple:
        """Return the number of its uses, in slots and before, and the time of the last."""
        self._uses[expert] += 1
        return self._uses[expert], now


class ByTrace(ByRank):
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
