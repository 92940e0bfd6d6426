"""The engine: records of all experts in host memory, slots on the device, and what moves between.

A pass over a layer takes its chosen experts in the order of their numbers, in waves. While products
of one wave run, the missing experts of the next are copied; behind the last wave come those that a
predictor expects in the next layer. A wave waits for the copies of its own experts, and of small ones
that were copied with them.

    slots S:    the experts of a wave, of the next wave, and what the eviction policy keeps
    waves:      missing experts of at most ``WAVE_BYTES``, dequantised values of at most
                ``DENSE_BYTES``, and at most half the slots

Neither budget, policy, predictor nor order changes a result: every expert's rows go through the
same products of the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chronicals.moe.offload.copies import CopyEngine
from chronicals.moe.offload.cpu_products import CpuProducts
from chronicals.moe.offload.cpu_share import MOST_TOKENS, CpuShare
from chronicals.moe.offload.errors import record_error
from chronicals.moe.offload.events import EventLog, LayerCounts
from chronicals.moe.offload.eviction import EvictionPolicy, Expert
from chronicals.moe.offload.layers import (
    LayerRecords,
    WaveLimits,
    least_slots_of,
    slot_bytes_of,
)
from chronicals.moe.offload.prediction import Predictor
from chronicals.moe.offload.residents import NOTHING_LOADED, Copy, Loaded, Residents
from chronicals.moe.offload.slab import HostSlab
from chronicals.moe.offload.slot_table import ABSENT
from chronicals.quantization.expert_records import InMemory, Places

MOST_COMING = 16
"""Copies that are on their way at a time while shared experts stand in."""


def with_rows(bounds: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """Return the experts that have rows, in their order, given ``Dispatch.bounds``."""
    ends = np.asarray(bounds)
    found: list[int] = (ends[1:] > ends[:-1]).nonzero()[0].tolist()
    return found


class Brought(NamedTuple):
    """The experts of a layer that a decode step chose.

    Attributes:
        chosen: the experts with rows.
        missing: those that were in no slot.
        by_cpu: missing ones that the CPU computes.
        loaded: the other missing ones, which were copied.
    """

    chosen: list[int]
    missing: list[int]
    by_cpu: list[int]
    loaded: Loaded


class ExpertEngine:
    """The experts of a model.

    Args:
        layers: its layers with experts, in their order.
        slab: their records.

    Attributes:
        slots: number of slots; 0 before ``open``.
        device: device of the slots; None before ``open``.
        log: counts and lines.
        residents: the experts in slots; none before ``open``.
        is_closed: True once the records are gone.
        stands_in: shared experts stand in for missing ones, for whose copies no product waits.
    """

    def __init__(self, layers: Sequence[LayerRecords], slab: HostSlab):
        self.layers = list(layers)
        self.slab = slab
        self.slots = 0
        self.device: torch.device | None = None
        self.is_closed = False
        self.stands_in = False
        self.log = EventLog([LayerCounts() for _ in layers])
        self.predictor: Predictor | None = None
        self.residents: Residents
        self._copies: CopyEngine
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[int, dict[str, dict[str, Tensor]]] = {}
        self._expected: list[int] = []
        self._coming: list[Expert] = []
        self._by_cpu: frozenset[int] = frozenset()
        self.cpu: CpuShare | None = None
        self._buffers: dict[tuple, Tensor] = {}

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return slot_bytes_of(self.layers)

    @property
    def experts(self) -> int:
        """Number of experts of all layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slots."""
        return self._memory.nbytes

    def open(
        self,
        slots: int,
        device: torch.device,
        policy: EvictionPolicy,
        predictor: Predictor | None = None,
        io: Path | None = None,
        cpu: CpuProducts | None = None,
    ) -> None:
        """Make the slots on a device.

        Args:
            slots: their number, at least ``least_slots_of``; more than there are experts are not made.
            device: the device of the products.
            policy: chooses the experts that give up their slots.
            predictor: says which experts are wanted next.
            io: file for lines of events.
            cpu: products by which the CPU computes a share of the missing experts; None for none.
        """
        assert slots >= least_slots_of(self.layers)
        self.slots = min(slots, self.experts)
        self.device = device
        self.predictor = predictor
        self.log.file = io
        self.cpu = None if cpu is None else CpuShare(self.slot_bytes, cpu)
        if device.type == "cuda" and not self.slab.pinned:
            self.slab.pin()
        with torch.inference_mode(False):
            self._memory = torch.empty(
                self.slots, self.slot_bytes, dtype=torch.uint8, device=device
            )
        times = cpu is not None or io is not None
        self._copies = CopyEngine(device, self._memory, times)
        self.residents = Residents(
            self.layers, self.slab, self.slots, policy, self._copies, self.log
        )
        self._coming = []
        self._views = {}
        for number, layer in enumerate(self.layers):
            for form in layer.formats.values():
                form.to(device)
            self._views[number] = layer.layout.views(self._memory)

    def verify(self) -> None:
        """Compare all records with their checksums.

        Raises:
            ExpertRecordError: one is not what was loaded.
        """
        wrong = self.slab.check_all()
        for layer in self.layers:
            for expert in range(layer.count):
                if layer.first + expert in wrong:
                    raise record_error(layer.path, expert, wrong[layer.first + expert])

    def close(self) -> None:
        """Free slots and records; the model's experts cannot run any more."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.predictor is not None:
            self.predictor.close()
        if self.cpu is not None:
            self.cpu.products.close()
        if self.device is not None:
            self._copies.finish()
            self.residents.close()
        self.log.close()
        self._views = {}
        self._buffers = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.slab.close()

    def begin_layer(self, layer: int, bounds: Tensor, x: Tensor) -> list[int]:
        """Return the bounds of a dispatch on the host, and note what the predictor says.

        This is the one time in a pass over a layer that the host waits for the device.
        """
        read = self.to_be_read(layer, bounds, x).numpy(force=True)
        self.expect(layer, self.note_read(layer, read), read)
        on_host: list[int] = read[: self.layers[layer].count + 1].tolist()
        return on_host

    def to_be_read(self, layer: int, bounds: Tensor, x: Tensor) -> Tensor:
        """Return what the host has to know of a layer on the device, int32: ``bounds`` comes first.

        Behind it are the experts of the next layer that the predictor names, if it names them there.
        """
        wanted = None
        if self.predictor is not None and layer + 1 < len(self.layers):
            wanted = self.predictor.ask(layer, x)
        if wanted is None:
            return bounds
        return torch.cat((bounds, wanted.to(bounds.dtype).reshape(-1)))

    def note_read(self, layer: int, read: NDArray[np.int32]) -> list[int]:
        """Return the experts with rows, given what was ``to_be_read`` on the host."""
        self._begin_notes(layer)
        self._by_cpu = frozenset()
        return with_rows(read[: self.layers[layer].count + 1])

    def _begin_notes(self, layer: int) -> None:
        """Note that a pass over a layer begins, and how long copies took that are done."""
        if layer == 0:
            self.log.step()
        seconds = self.log.read_timings()
        if self.cpu is not None and seconds is not None:
            self.cpu.copy_took(seconds)

    def expect(self, layer: int, chosen: Sequence[int], read: NDArray[np.int32]) -> None:
        """Note which experts the predictor expects in the next layer.

        Args:
            layer: number of the layer.
            chosen: its experts with rows.
            read: what was ``to_be_read``, on the host.
        """
        if self.predictor is not None:
            told: list[int] = read[self.layers[layer].count + 1 :].tolist()
            self._expected = self.predictor.expect(layer, chosen, told)

    def waves(
        self, layer: int, bounds: Sequence[int], backward: bool
    ) -> Iterator[tuple[range, Places]]:
        """Yield the experts of a layer with rows, when products may read them.

        Args:
            layer: number of the layer.
            bounds: rows of its experts, as in ``Dispatch.bounds``.
            backward: for a backward pass, in which the layer before is wanted next.

        Yields:
            The range of experts, and the slot of each.
        """
        count = self.layers[layer].count
        by_cpu = frozenset() if backward else self._by_cpu
        waiting = [(layer, expert) for expert in with_rows(bounds) if expert not in by_cpu]
        first = 0
        passing = self._passes(waiting)
        limits = self.layers[layer].limits
        stream = self.current_stream
        copy = partial(self._copies.demand, current=stream)
        wave = self._take(waiting, [], passing, limits, copy)
        while wave:
            following = self._take(waiting, wave, passing, limits, copy)
            end = following[0][1] if following else count
            if not following:
                self._prefetch(layer, wave, backward, stream)
            slots = [self.residents.table.slot(key) for key in wave]
            began = self._mark(stream)
            self._copies.wait_for(slots, stream)
            self._note_wait(layer, began, stream)
            numbers = [-1] * (end - first)
            for (_, expert), slot in zip(wave, slots):
                numbers[expert - first] = slot
            for expert in by_cpu & set(range(first, end)):
                numbers[expert - first] = slots[0]  # what their rows get is replaced
            yield range(first, end), Places.of(numbers, self._memory.device)
            self._copies.were_read(slots, stream)
            first, wave = end, following

    def missing(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """Return those of the chosen experts of a layer that products would have to wait for."""
        return [
            expert
            for expert, slot in zip(chosen, self.residents.table.of_layer(layer, chosen))
            if slot == ABSENT or not self._copies.is_filled(slot)
        ]

    def fetch_for_later(self, layer: int, chosen: Sequence[int], missing: Sequence[int]) -> None:
        """Ask for copies of missing experts, and of those that are expected in the next layer.

        At most ``MOST_COMING`` copies are on their way at a time, and none is given up: with more,
        a slow bus would fall behind ever further, and no expert would come before its slot is taken
        for another one.

        Args:
            layer: number of the layer, whose products were launched.
            chosen: the experts that tokens chose.
            missing: those of them that were not there.
        """
        self.log.miss([(layer, expert) for expert in missing])
        self._coming = [
            key
            for key in self._coming
            if key in self.residents.table
            and not self._copies.is_filled(self.residents.table.slot(key))
        ]
        wanted = [(layer, expert) for expert in missing]
        if layer + 1 < len(self.layers):
            wanted += [(layer + 1, expert) for expert in self._expected]
        kept = {*((layer, expert) for expert in chosen), *self._coming, *wanted}
        absent = [key for key in dict.fromkeys(wanted) if key not in self.residents.table]
        most = max(0, MOST_COMING - len(self._coming))
        passing = self._passes(chosen)
        self._coming += self._fetch_early(absent[:most], kept, self.current_stream, passing)

    def has_cpu_share(self, tokens: int) -> bool:
        """Return whether the CPU computes some of the missing experts of a pass without gradients."""
        return self.cpu is not None and tokens <= MOST_TOKENS

    def share_with_cpu(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """Return the missing experts of a pass that the CPU computes; waves leave them out.

        Args:
            layer: number of the layer.
            chosen: its experts with rows.
        """
        slots = self.residents.table.of_layer(layer, chosen)
        share = self._divided(layer, [e for e, slot in zip(chosen, slots) if slot == ABSENT])
        self._note_share(layer, share)
        self._by_cpu = frozenset(share)
        return share

    def _divided(self, layer: int, missing: Sequence[int]) -> list[int]:
        """Return those of the missing experts of a layer that the CPU computes."""
        assert self.cpu is not None
        share = self.cpu.of_missing(layer, missing)
        for expert in share:
            self.residents.check_record(layer, expert)
        return share

    def _note_share(self, layer: int, experts: Sequence[int]) -> None:
        """Note that the CPU computes missing experts of a layer."""
        self.log.miss([(layer, expert) for expert in experts])
        self.log.layers[layer].by_cpu += len(experts)

    def host_memory_of(self, layer: int, experts: Sequence[int]) -> dict[str, InMemory]:
        """Return the records of some experts as the CPU reads them, by name of the weight."""
        records = self.layers[layer]
        views = records.layout.views(self.slab.records(records.first, records.count))
        places = Places.of(experts, torch.device("cpu"))
        return {
            name: InMemory(
                views[name], places, lambda shape, dtype: torch.empty(shape, dtype=dtype)
            )
            for name in records.formats
        }

    @property
    def most_tokens_in_graphs(self) -> int:
        """Tokens of a decode step, at most, that graphs can take.

        Their experts are all in slots at once, and products read them there, so that ``bring``
        prepares them. 0 where shared experts stand in.
        """
        if self.stands_in:
            return 0
        most = self.slots // max(layer.each for layer in self.layers)
        for layer, views in zip(self.layers, self._views.values()):
            for name, form in layer.formats.items():
                in_place = form.tokens_in_place(views[name])
                most = most if in_place is None else min(most, in_place)
        return most

    def is_one_wave(self, layer: int, tokens: int) -> bool:
        """Return whether all experts of a pass are in slots at once, where products read them."""
        records = self.layers[layer]
        if min(tokens * records.each, records.count) > self.slots:
            return False
        views = self._views[layer]
        limits = [form.tokens_in_place(views[name]) for name, form in records.formats.items()]
        return all(most is None or tokens <= most for most in limits)

    @property
    def current_stream(self) -> Any:
        """The current stream of the device, as ``bring`` takes it."""
        return self._copies.current()

    def bring(
        self,
        layer: int,
        read: NDArray[np.int32],
        slots: NDArray[np.int32],
        stream: Any,
        shares: bool = False,
    ) -> Brought:
        """Bring the experts of a layer with rows into slots, for products of a graph.

        The device waits for this: what it does not need is left to ``note``. The products of the
        layer before are done: the host has read what was computed from them. So no copy has to wait
        for one, and those that are launched next on the stream wait for all copies.

        Args:
            layer: number of the layer.
            read: what was ``to_be_read``, on the host.
            slots: ``[E]`` or longer; the slots of experts with rows are written to it.
            stream: the current stream.
            shares: the CPU computes some of the missing experts, which are not brought.

        Raises:
            ExpertRecordError: a record is not what was loaded.
        """
        chosen = with_rows(read[: self.layers[layer].count + 1])
        held = self.residents.table.of_layer(layer, chosen)
        missing = [e for e, slot in zip(chosen, held) if slot == ABSENT] if ABSENT in held else []
        began = self._mark(stream)
        by_cpu: list[int] = []
        loaded = NOTHING_LOADED
        if missing:
            by_cpu = self._divided(layer, missing) if shares else []
            wanted = [(layer, expert) for expert in missing if expert not in by_cpu]
            copy = partial(self._copies.copy_before_products, stream=stream)
            loaded = self.residents.demand(wanted, [(layer, e) for e in chosen], copy)
            held = self.residents.table.of_layer(layer, chosen)
        self._copies.wait_for(held, stream)
        self._note_wait(layer, began, stream)
        any_slot = max([0, *held])  # for rows of the CPU's experts, which are replaced
        for expert, slot in zip(chosen, held):  # a few numbers: faster one by one than as a list
            slots[expert] = any_slot if slot == ABSENT else slot
        return Brought(chosen, missing, by_cpu, loaded)

    def note(self, layer: int, brought: Brought, read: NDArray[np.int32], stream: Any) -> None:
        """Note what ``bring`` did, and ask for the experts that are expected in the next layer.

        The products of a graph are launched already, so that they do not wait for this. They read
        other slots than those of the next layer's experts; those of the layers before are done.

        Args:
            layer: number of the layer.
            brought: what ``bring`` returned.
            read: what was ``to_be_read``, on the host.
            stream: the current stream.
        """
        self._begin_notes(layer)
        chosen, missing, by_cpu, loaded = brought
        keys = [(layer, expert) for expert in chosen]
        if missing:
            absent = set(missing)
            there = [key for key in keys if key[1] not in absent]
            self.residents.note_hits(there)
            self._note_share(layer, by_cpu)
            self.residents.note_misses(loaded, self._passes(chosen))
        else:
            self.residents.note_hits(keys)
        self.expect(layer, chosen, read)
        self._prefetch(layer, keys, False, stream)

    def _passes(self, chosen: Sequence[object]) -> bool:
        """Return whether the slots could not keep as many experts of all layers."""
        return len(chosen) * len(self.layers) > self.slots

    def _take(
        self,
        waiting: list[Expert],
        running: Sequence[Expert],
        passing: bool,
        limits: WaveLimits,
        copy: Copy,
    ) -> list[Expert]:
        """Take the experts of a wave, and ask for the copies of missing ones.

        Args:
            waiting: chosen experts that were not taken; what is taken leaves them.
            running: experts of the wave whose products run meanwhile.
            passing: the slots could not keep as many experts of all layers.
            limits: what the wave may have.
            copy: copies records into slots.
        """
        room = self.slots - len(running)
        if len(waiting) > room:
            room = self.slots // 2  # so that the wave behind it has as many
        there: list[Expert] = []
        missing: list[Expert] = []
        for expert in waiting[: min(limits.experts, room)]:
            if expert in self.residents.table:
                there.append(expert)
            elif len(missing) < limits.missing:
                missing.append(expert)
            else:
                break
        wave = waiting[: len(there) + len(missing)]
        del waiting[: len(wave)]
        self.residents.note_hits(there)
        if missing:
            # Experts that this layer wants later leave only if no others are left.
            loaded = self.residents.demand(missing, {*running, *wave}, copy, waiting)
            self.residents.note_misses(loaded, passing)
        return wave

    def _prefetch(self, layer: int, running: Sequence[Expert], backward: bool, stream: Any) -> None:
        """Ask for the experts that are expected next, where slots are free of better ones.

        What was expected of layers before and not chosen gives up its slot as any other expert.
        """
        if self.predictor is None or self.stands_in:
            return
        target = layer - 1 if backward else layer + 1
        if not 0 <= target < len(self.layers):
            return
        expected = self.predictor.last(target) if backward else self._expected
        room = max(0, self.slots - len(running) - 1)
        wanted = [(target, expert) for expert in expected[:room]]
        missing = [expert for expert in dict.fromkeys(wanted) if expert not in self.residents.table]
        if missing:
            self._fetch_early(missing, {*running, *wanted}, stream)

    def _fetch_early(
        self,
        missing: list[Expert],
        kept: Collection[Expert],
        stream: Any,
        passing: bool = False,
    ) -> Sequence[Expert]:
        """Ask for copies of experts that no product waits for yet; return those experts.

        Args:
            missing: the experts, which are in no slot, the likeliest first.
            kept: experts that keep their slots.
            stream: the current stream.
            passing: the slots could not keep as many experts of all layers.
        """
        copy = partial(self._copies.prefetch, current=stream)
        loaded = self.residents.load(missing, kept, copy)
        self.residents.note_early(loaded, passing)
        return loaded.experts

    def _mark(self, stream: Any) -> Any:
        """Return an event behind the work of the current stream; None where no lines are written."""
        return None if self.log.file is None else self._copies.recorded(stream)

    def _note_wait(self, layer: int, before: Any, stream: Any) -> None:
        """Note what the current stream waited since an event of ``_mark``."""
        if before is None:
            return
        after = self._mark(stream)
        self.log.stall(layer, lambda: before.elapsed_time(after) * 1e3 if after.query() else None)

    def memory_of(self, layer: int, places: Places) -> dict[str, InMemory]:
        """Return the records of a layer as its formats read them, by name of the weight."""
        views = self._views[layer]
        return {
            name: InMemory(views[name], places, self.buffer) for name in self.layers[layer].formats
        }

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for dequantised matrices ``[m, N, K]``, shared by all calls of N and K."""
        count, *sizes = shape
        key = *sizes, dtype
        found = self._buffers.get(key)
        if found is None or len(found) < count:
            with torch.inference_mode(False):
                found = torch.empty(shape, dtype=dtype, device=self.device)
            self._buffers[key] = found
        return found[:count]
