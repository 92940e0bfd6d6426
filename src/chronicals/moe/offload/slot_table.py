"""The slots of experts, as the host knows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chronicals.moe.offload.eviction import EvictionPolicy, Expert

ABSENT = -1
"""Slot of an expert that is in none."""


class SlotTable:
    """The slots of the experts of all layers.

    Args:
        counts: number of experts of each layer.
        slots: number of slots, all of them free.
        policy: chooses the experts that give up their slots; it is told of uses by others.

    Attributes:
        slots: the slot of each expert by layer, ``ABSENT`` for those in none.
    """

    def __init__(self, counts: Sequence[int], slots: int, policy: EvictionPolicy):
        self.slots = [[ABSENT] * count for count in counts]
        self._free = list(range(slots))[::-1]
        self._policy = policy

    def __contains__(self, expert: Expert) -> bool:
        """Return whether an expert is in a slot, or on its way there."""
        layer, number = expert
        return self.slots[layer][number] != ABSENT

    def slot(self, expert: Expert) -> int:
        """Return the slot of an expert, or ``ABSENT``."""
        layer, number = expert
        return self.slots[layer][number]

    def of_layer(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Return the slots of some experts of a layer, ``ABSENT`` for those in none."""
        slots = self.slots[layer]
        return [slots[expert] for expert in experts]

    def put(self, experts: Sequence[Expert], slots: Sequence[int]) -> None:
        """Note that experts come into slots, which are of no others."""
        for (layer, number), slot in zip(experts, slots, strict=True):
            self.slots[layer][number] = slot

    def emptied(
        self, count: int, kept: Collection[Expert], spared: Collection[Expert] = ()
    ) -> tuple[list[int], list[Expert]]:
        """Return slots for other experts, at most so many: free ones, and those of victims.

        They are in order, so that records that follow one another are one copy.

        Args:
            count: slots that are wanted.
            kept: experts that keep their slots.
            spared: experts that keep theirs as long as there are others.

        Returns:
            The slots, and the experts that gave them up.
        """
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        wanted = count - len(slots)
        victims = self._policy.evict(wanted, {*kept, *spared})
        if len(victims) < wanted:
            victims += self._policy.evict(wanted - len(victims), kept)
        for layer, number in victims:
            slots.append(self.slots[layer][number])
            self.slots[layer][number] = ABSENT
        return sorted(slots), victims
