"""The experts in slots: how they come and go, and what is noted of it.

Copies of a graph's experts are asked for while the device waits, so that what is noted of them is
noted later, by a call of its own. It changes no later choice: experts that a layer chose keep their
slots whatever was noted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from chronicals.moe.offload.copies import CopyEngine, Load, Rows
from chronicals.moe.offload.errors import record_error
from chronicals.moe.offload.events import EventLog
from chronicals.moe.offload.eviction import EvictionPolicy, Expert
from chronicals.moe.offload.layers import LayerRecords
from chronicals.moe.offload.slab import HostSlab
from chronicals.moe.offload.slot_table import SlotTable

Copy = Callable[[list[Load]], None]
"""A function that copies records into slots."""


class Loaded(NamedTuple):
    """Experts whose copies were asked for.

    Attributes:
        experts: the experts.
        slots: their slots.
        victims: the experts that gave these up.
    """

    experts: Sequence[Expert]
    slots: Sequence[int]
    victims: Sequence[Expert]


NOTHING_LOADED = Loaded((), (), ())


class Residents:
    """The experts in slots.

    Args:
        layers: records of all layers.
        slab: the records.
        slots: number of slots.
        policy: chooses the experts that give up their slots.
        copies: tells how long copies took.
        log: counts and lines.

    Attributes:
        table: which expert is in which slot.
    """

    def __init__(
        self,
        layers: Sequence[LayerRecords],
        slab: HostSlab,
        slots: int,
        policy: EvictionPolicy,
        copies: CopyEngine,
        log: EventLog,
    ):
        self.table = SlotTable([layer.count for layer in layers], slots, policy)
        self._layers = layers
        self._slab = slab
        self._policy = policy
        self._copies = copies
        self._log = log
        self._early: set[Expert] = set()
        self._records = [
            Rows(
                slab.records(layer.first, layer.count, layer.layout.bytes),
                slab.chunk_ends(layer.first, layer.count),
            )
            for layer in layers
        ]

    def close(self) -> None:
        """Let go of the records."""
        self._records = []

    def check_record(self, layer: int, expert: int) -> None:
        """Raise ExpertRecordError if a record is not what was loaded."""
        records = self._layers[layer]
        wrong = self._slab.check(records.first + expert)
        if wrong is not None:
            raise record_error(records.path, expert, wrong)

    def load(
        self,
        experts: Sequence[Expert],
        kept: Collection[Expert],
        copy: Copy,
        spared: Collection[Expert] = (),
    ) -> Loaded:
        """Copy the records of experts into slots that others give up.

        Args:
            experts: the experts.
            kept: experts that keep their slots.
            copy: copies records into slots.
            spared: experts that keep theirs as long as there are others.

        Returns:
            Those for which there were slots, the first ones; they are to be noted by
            ``note_misses`` or ``note_early``.

        Raises:
            ExpertRecordError: a record is not what was loaded.
        """
        for layer, expert in experts:
            self.check_record(layer, expert)
        slots, victims = self.table.emptied(len(experts), kept, spared)
        held = experts[: len(slots)]
        if held:
            copy([Load(self._records[layer], e, slot) for (layer, e), slot in zip(held, slots)])
            self.table.put(held, slots)
        return Loaded(held, slots, victims)

    def demand(
        self,
        experts: Sequence[Expert],
        kept: Collection[Expert],
        copy: Copy,
        spared: Collection[Expert] = (),
    ) -> Loaded:
        """Copy the records of experts that products wait for, as ``load`` does: all of them."""
        loaded = self.load(experts, kept, copy, spared)
        assert len(loaded.experts) == len(experts), "experts that products wait for have slots"
        return loaded

    def note_hits(self, experts: Sequence[Expert]) -> None:
        """Note that chosen experts were in slots."""
        self._log.hit(experts)
        self._log.used(self._early.intersection(experts))
        self._early.difference_update(experts)
        self._policy.use(*experts)

    def note_misses(self, loaded: Loaded, passing: bool) -> None:
        """Note that chosen experts were copied.

        Args:
            loaded: the experts.
            passing: the slots could not keep as many experts of all layers.
        """
        self._log.miss(loaded.experts)
        self._note_copies(loaded)
        self._policy.use(*loaded.experts, passing=passing)

    def note_early(self, loaded: Loaded, passing: bool) -> None:
        """Note that experts were copied before a layer chose them; ``passing`` as above."""
        self._note_copies(loaded)
        self._early.update(loaded.experts)
        self._policy.use(*loaded.experts, passing=passing)
        self._log.prefetch(loaded.experts)

    def _note_copies(self, loaded: Loaded) -> None:
        """Note copies, and the experts that gave up their slots to them."""
        self._early.difference_update(loaded.victims)
        self._log.evict(loaded.victims)
        for (layer, expert), slot in zip(loaded.experts, loaded.slots):
            size = self._layers[layer].layout.bytes
            self._log.load(layer, expert, size, self._copies.timing(slot))
