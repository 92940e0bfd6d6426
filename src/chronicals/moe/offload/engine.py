"""The engine: records of all experts in host memory, slots on the device, and what moves between.

A pass over a layer takes its chosen experts in the order of their numbers, in waves. While products
of one wave run, the missing experts of the next are copied; behind the last wave come those that a
predictor expects in the next layer. A wave waits for the copies of its own experts alone.

    slots S:    the experts of a wave, of the next wave, and what the eviction policy keeps
    waves:      missing experts of at most ``WAVE_BYTES``, and at most half the slots

Neither budget, policy, predictor nor order changes a result: every expert's rows go through the
same products of the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.moe.offload.copies import CopyEngine
from chronicals.moe.offload.cpu_share import MOST_TOKENS, CpuShare
from chronicals.moe.offload.errors import record_error
from chronicals.moe.offload.events import EventLog, LayerCounts
from chronicals.moe.offload.eviction import EvictionPolicy, Expert
from chronicals.moe.offload.prediction import Predictor
from chronicals.moe.offload.slab import HostSlab
from chronicals.quantization.expert_records import InMemory, Places, RecordLayout, StackFormat

WAVE_BYTES = 96 << 20
"""Bytes of the missing experts of a wave, at most, but one expert at least.

They take a bus of 55 GB/s 1.8 ms. The host takes about 1 ms to launch the products of a wave in both
passes, so with fewer bytes copies would wait for it; with more, the products of a layer's first wave
wait longer, since nothing runs beside its copies.
"""

DENSE_BYTES = 512 << 20
"""Bytes of dequantised values of a wave, at most, but those of one expert at least."""

MOST_COMING = 16
"""Copies that are on their way at a time while shared experts stand in."""

SPARE_SLOTS = 2
"""Slots beside the k experts of a token, at least: for copies beside its products."""


@dataclass(frozen=True)
class LayerRecords:
    """The experts of a layer.

    Attributes:
        path: path of their module in the model.
        formats: of its weights and biases, by name.
        layout: of its records.
        first: number of the first expert's record in the slab.
        each: k, experts of a token.
    """

    path: str
    formats: Mapping[str, StackFormat]
    layout: RecordLayout
    first: int
    each: int

    @property
    def count(self) -> int:
        """The number E of experts."""
        return next(iter(self.formats.values())).count


class WaveLimits(NamedTuple):
    """Limits of a wave: experts, and missing ones among them."""

    experts: int
    missing: int


def slot_bytes_of(layers: Sequence[LayerRecords]) -> int:
    """Return the bytes of a slot: of the largest record."""
    return max(layer.layout.bytes for layer in layers)


def least_slots_of(layers: Sequence[LayerRecords]) -> int:
    """Return the slots that are needed: the k experts of a token and ``SPARE_SLOTS`` more."""
    return max(layer.each for layer in layers) + SPARE_SLOTS


class ExpertEngine:
    """The experts of a model.

    Args:
        layers: its layers with experts, in their order.
        slab: their records.

    Attributes:
        slots: number of slots; 0 before ``open``.
        device: device of the slots; None before ``open``.
        log: counts and lines.
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
        self.policy: EvictionPolicy
        self.predictor: Predictor | None = None
        self._copies: CopyEngine
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[int, dict[str, dict[str, Tensor]]] = {}
        self._slot_of: dict[Expert, int] = {}
        self._free: list[int] = []
        self._fetched: set[Expert] = set()
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
        cpu_share: bool = False,
    ) -> None:
        """Make the slots on a device.

        Args:
            slots: their number, at least ``least_slots_of``; more than there are experts are not made.
            device: the device of the products.
            policy: chooses the experts that give up their slots.
            predictor: says which experts are wanted next.
            io: file for lines of events.
            cpu_share: the CPU computes a share of the missing experts.
        """
        assert slots >= least_slots_of(self.layers)
        self.slots = min(slots, self.experts)
        self.device = device
        self.policy = policy
        self.predictor = predictor
        self.log.file = io
        self.cpu = CpuShare(self.slot_bytes) if cpu_share else None
        self.log.times_copies = cpu_share
        if device.type == "cuda" and not self.slab.pinned:
            self.slab.pin()
        with torch.inference_mode(False):
            self._memory = torch.empty(
                self.slots, self.slot_bytes, dtype=torch.uint8, device=device
            )
        times = cpu_share or io is not None
        self._copies = CopyEngine(device, self._memory, times)
        self._slot_of = {}
        self._free = list(range(self.slots))[::-1]
        self._fetched = set()
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
        if self.device is not None:
            self._copies.finish()
        self.log.close()
        self._views = {}
        self._buffers = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.slab.close()

    def begin_layer(self, layer: int, bounds: Tensor, x: Tensor) -> list[int]:
        """Return the bounds of a dispatch on the host, and note what the predictor says.

        This is the one time in a pass over a layer that the host waits for the device.
        """
        read: list[int] = self.to_be_read(layer, bounds, x).tolist()
        return self.note_read(layer, read)

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

    def note_read(self, layer: int, read: list[int]) -> list[int]:
        """Return the bounds, given what was ``to_be_read``, and note what the predictor says."""
        if layer == 0:
            self.log.step()
        count = self.layers[layer].count
        bounds, told = read[: count + 1], read[count + 1 :]
        seconds = self.log.read_timings()
        self._by_cpu = frozenset()
        if self.cpu is not None and seconds is not None:
            self.cpu.copy_took(seconds)
        if self.predictor is not None:
            chosen = [e for e in range(count) if bounds[e] < bounds[e + 1]]
            self._expected = self.predictor.expect(layer, chosen, told)
        else:
            self._expected = []
        return bounds

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
        queue = [e for e in range(count) if bounds[e] < bounds[e + 1] and e not in by_cpu]
        first = 0
        passing = len(queue) * len(self.layers) > self.slots
        waiting = deque(queue)
        limits = self._limits_of(self.layers[layer])
        wave = self._take(layer, waiting, [], passing, limits)
        while wave:
            following = self._take(layer, waiting, wave, passing, limits)
            end = following[0] if following else count
            if not following:
                self._prefetch(layer, wave, backward)
            slots = [self._slot_of[layer, e] for e in wave]
            self._wait(layer, slots)
            numbers = [-1] * (end - first)
            for expert, slot in zip(wave, slots):
                numbers[expert - first] = slot
            for expert in by_cpu & set(range(first, end)):
                numbers[expert - first] = slots[0]  # what their rows get is replaced
            yield range(first, end), Places.of(numbers, self._memory.device)
            self._copies.were_read(slots)
            first, wave = end, following

    def missing(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """Return those of the chosen experts of a layer that products would have to wait for."""
        slots = [self._slot_of.get((layer, expert)) for expert in chosen]
        return [
            expert
            for expert, slot in zip(chosen, slots)
            if slot is None or not self._copies.is_filled(slot)
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
        for expert in missing:
            self.log.miss(layer, expert)
        self._coming = [
            key
            for key in self._coming
            if key in self._slot_of and not self._copies.is_filled(self._slot_of[key])
        ]
        passing = len(chosen) * len(self.layers) > self.slots
        kept = {(layer, expert) for expert in chosen} | set(self._coming)
        wanted = [(layer, expert) for expert in missing]
        if layer + 1 < len(self.layers):
            wanted += [(layer + 1, expert) for expert in self._expected]
        with (
            closing(self.policy.victims(kept)) as victims,
            self._copies.copying(prefetch=True) as copy,
        ):
            for key in wanted:
                if key in self._slot_of:
                    continue
                slot = self._emptied(victims) if len(self._coming) < MOST_COMING else None
                if slot is None:
                    return
                self._load(key, slot, copy)
                kept.add(key)
                self._coming.append(key)
                self._fetched.add(key)
                self.policy.use(key, passing)
                self.log.prefetch(*key)

    def share_with_cpu(self, layer: int, bounds: Sequence[int], tokens: int) -> list[int]:
        """Return the missing experts of a pass that the CPU computes; waves leave them out.

        Args:
            layer: number of the layer.
            bounds: rows of its experts.
            tokens: of the pass.
        """
        if self.cpu is None or tokens > MOST_TOKENS:
            return []
        chosen = [e for e in range(len(bounds) - 1) if bounds[e] < bounds[e + 1]]
        missing = [e for e in chosen if (layer, e) not in self._slot_of]
        share = self.cpu.of_missing(missing)
        for expert in share:
            self.log.miss(layer, expert)
            self.log.layers[layer].by_cpu += 1
            wrong = self.slab.check(self.layers[layer].first + expert)
            if wrong is not None:
                raise record_error(self.layers[layer].path, expert, wrong)
        self._by_cpu = frozenset(share)
        return share

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
        prepares them. 0 where the CPU computes a share, or shared experts stand in.
        """
        if self.cpu is not None or self.stands_in:
            return 0
        most = self.slots // max(layer.each for layer in self.layers)
        for layer, views in zip(self.layers, self._views.values()):
            for name, form in layer.formats.items():
                in_place = form.tokens_in_place(views[name])
                most = most if in_place is None else min(most, in_place)
        return most

    def bring(self, layer: int, read: list[int]) -> list[int]:
        """Bring all experts of a layer with rows into slots, for products of a graph.

        The products of the layer before are done: the host has read what was computed from them. So
        no copy has to wait for one, and those that are launched next wait for all copies.

        Args:
            layer: number of the layer.
            read: what was ``to_be_read``, on the host.

        Returns:
            The slot of each expert, -1 for those without rows.
        """
        bounds = self.note_read(layer, read)
        count = self.layers[layer].count
        chosen = [e for e in range(count) if bounds[e] < bounds[e + 1]]
        waiting = deque(chosen)
        passing = len(chosen) * len(self.layers) > self.slots
        wave = self._take(layer, waiting, [], passing, WaveLimits(count, count))
        assert not waiting, "a graph's experts have slots all at once"
        self._prefetch(layer, wave, backward=False)
        numbers = [-1] * count
        for expert in wave:
            numbers[expert] = self._slot_of[layer, expert]
        self._wait(layer, [numbers[expert] for expert in wave])
        return numbers

    def _limits_of(self, layer: LayerRecords) -> WaveLimits:
        """Return what a wave of a layer may have."""
        dense = sum(form.dense_bytes for form in layer.formats.values())
        experts = max(1, DENSE_BYTES // dense) if dense else self.slots
        return WaveLimits(experts, max(1, WAVE_BYTES // layer.layout.bytes))

    def _take(
        self,
        layer: int,
        waiting: deque[int],
        running: Sequence[int],
        passing: bool,
        limits: WaveLimits,
    ) -> list[int]:
        """Take the experts of a wave, and ask for the copies of missing ones.

        Args:
            layer: number of the layer.
            waiting: chosen experts that were not taken; what is taken leaves them.
            running: experts of the wave whose products run meanwhile.
            passing: the slots could not keep as many experts of all layers.
            limits: what the wave may have.
        """
        room = self.slots - len(running)
        if len(waiting) > room:
            room = self.slots // 2  # so that the wave behind it has as many
        most = min(limits.experts, room)
        taken: list[int] = []
        loads = 0
        kept = {(layer, e) for e in running}
        wanted = kept | {(layer, e) for e in waiting}
        with closing(self.policy.victims(wanted)) as victims, self._copies.copying(False) as copy:
            while waiting and len(taken) < most:
                key = layer, waiting[0]
                if key not in self._slot_of:
                    if loads == limits.missing:
                        break
                    slot = self._emptied(victims)
                    if slot is None:  # only experts that this layer wants later are left
                        victims.close()
                        with closing(self.policy.victims(kept)) as others:
                            slot = self._emptied(others)
                    if slot is None:
                        break
                    self._load(key, slot, copy)
                    loads += 1
                    self.log.miss(*key)
                    self.policy.use(key, passing)
                else:
                    self.log.hit(*key)
                    if key in self._fetched:
                        self._fetched.discard(key)
                        self.log.layers[layer].used += 1
                    self.policy.use(key)
                taken.append(waiting.popleft())
                kept.add(key)
        return taken

    def _emptied(self, victims: Iterator[Expert]) -> int | None:
        """Return a slot for another expert: a free one, or else that of the next victim.

        None if there is none of either.
        """
        if self._free:
            return self._free.pop()
        victim = next(victims, None)
        if victim is None:
            return None
        self._fetched.discard(victim)
        self.log.evict(*victim)
        return self._slot_of.pop(victim)

    def _load(self, key: Expert, slot: int, copy: Callable[[Tensor, int], None]) -> None:
        """Copy an expert's record into a slot.

        Args:
            key: the expert.
            slot: number of the slot.
            copy: copies a record into a slot.

        Raises:
            ExpertRecordError: the record is not what was loaded.
        """
        layer, expert = key
        records = self.layers[layer]
        number = records.first + expert
        wrong = self.slab.check(number)
        if wrong is not None:
            self._free.append(slot)
            raise record_error(records.path, expert, wrong)
        size = records.layout.bytes
        copy(self.slab.record(number, size), slot)
        self._slot_of[key] = slot
        self.log.load(layer, expert, size, self._copies.timing(slot))

    def _prefetch(self, layer: int, running: Sequence[int], backward: bool) -> None:
        """Ask for the experts that are expected next, where slots are free of better ones."""
        if self.predictor is None or self.stands_in:
            return
        target = layer - 1 if backward else layer + 1
        if not 0 <= target < len(self.layers):
            return
        expected = self.predictor.last(target) if backward else self._expected
        kept = {(layer, e) for e in running} | self._fetched
        room = max(0, self.slots - len(running) - 1)
        with (
            closing(self.policy.victims(kept)) as victims,
            self._copies.copying(prefetch=True) as copy,
        ):
            for expert in expected[:room]:
                key = target, expert
                if key in self._slot_of:
                    continue
                slot = self._emptied(victims)
                if slot is None:
                    return
                self._load(key, slot, copy)
                kept.add(key)
                self._fetched.add(key)
                self.policy.use(key)
                self.log.prefetch(*key)

    def _wait(self, layer: int, slots: list[int]) -> None:
        """Let products wait for their slots, and time that where lines are written."""
        if self.log.file is None:
            self._copies.wait_for(slots)
            return
        before, after = self._copies.event(), self._copies.event()
        current = None
        if self.device is not None and self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
        before.record(current)
        self._copies.wait_for(slots)
        after.record(current)
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
