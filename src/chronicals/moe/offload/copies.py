"""Copies of records from host memory into slots, beside the products of the device.

Two streams: what products wait for (demand) goes before what they will want (prefetch). Of that, few
records are copied in pieces, so that a demanded one never waits for more than one piece of the bus's
time.
A slot has at most two events: one behind its copy, for which products of its expert wait and no
others, and one behind its products, for which the next copy into it waits. Demanded copies that are
asked for together are waited for together, and share one event, as small prefetched ones do; so do
the products of a wave. Where
the host launches products only after their copies, these go on the stream of the products, which
then need not wait for any event. Nothing is copied back, and in steady state no memory is allocated.
On the CPU the same code runs over streams that do everything at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

PREFETCH_PIECE_BYTES = 2 << 20
"""Bytes of a piece of a prefetched record: 36 µs of a bus of 55 GB/s."""

MOST_IN_PIECES = 16
"""Prefetched records of a request that are copied in pieces, at most.

More are those of a pass of many tokens. There a wave demands up to 96 MB at a time, and waits 9 % longer
for the rest of a record of 9.4 MB at most; in NF4 pieces would be twice as many copies for the host.
"""

PREFETCH_GROUP_BYTES = 8 << 20
"""Bytes of prefetched records that are waited for together, but one record at least.

Products wait for at most 0.15 ms of copies of other experts. An event for each record, and its
wait, take the host as long as a copy of it: of experts in NF4, three records of 2.65 MB share one.
"""


class HostEvent:
    """An event of ``HostStream``: the time when it was recorded."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """Return True: what was before it is done."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds until another event."""
        return (end.at - self.at) * 1e3


class HostStream:
    """A stream whose work is done when it is asked for."""

    def wait_event(self, event: Any) -> None:
        """Return at once: what the event stands behind is done."""

    def synchronize(self) -> None:
        """Return at once: all work is done."""


class Rows:
    """Rows of a memory, whole and in pieces; making a view of one takes as long as to copy it.

    Args:
        memory: uint8 ``[n, bytes]``, of which no two rows overlap.
        ends: rows behind which a chunk of pinned memory ends, over which no copy may go.

    Attributes:
        size: bytes of a row.
        stride: bytes from one row to the next.
        ends: see above.
    """

    def __init__(self, memory: Tensor, ends: Collection[int] = ()):
        self.ends = ends
        self.size = memory.shape[1]
        self.stride = memory.stride(0)
        whole = (len(memory) - 1) * self.stride + self.size
        self._flat = memory.as_strided((whole,), (1,))
        self._whole = [(row,) for row in memory.unbind()]
        columns = memory.split(PREFETCH_PIECE_BYTES, dim=1)
        self._pieces = list(zip(*(column.unbind() for column in columns)))

    def parts(self, row: int, in_pieces: bool) -> tuple[Tensor, ...]:
        """Return a row, or its pieces, uint8 ``[bytes]`` each."""
        return self._pieces[row] if in_pieces else self._whole[row]

    def run(self, first: int, count: int) -> Tensor:
        """Return rows that follow one another with what lies between them, uint8 ``[bytes]``."""
        return self._flat.narrow(0, first * self.stride, (count - 1) * self.stride + self.size)


class Load(NamedTuple):
    """A copy of a record.

    Attributes:
        records: records of a layer.
        record: number of the record among them.
        slot: the slot that it is copied into.
    """

    records: Rows
    record: int
    slot: int


@dataclass(eq=False)
class _Timed:
    """A copy whose time is known later.

    Attributes:
        began, filled: events around it.
        records: number of records that it took.
    """

    began: Any
    filled: Any
    records: int
    _mean: float | None = None

    def microseconds(self) -> float | None:
        """Return the mean of its records, or None until it is done."""
        if self._mean is None and self.filled.query():
            self._mean = self.began.elapsed_time(self.filled) * 1e3 / self.records
        return self._mean


class CopyEngine:
    """Copies records into slots.

    Args:
        device: the device of the slots.
        slots: their memory, uint8 ``[S, bytes]``.
        times: note when each copy began, for ``timing``.
    """

    def __init__(self, device: torch.device, slots: Tensor, times: bool = False):
        self.device = device
        self.times = times
        self._slots = slots
        self._stride = slots.stride(0)
        self._rows: dict[int, Rows] = {}
        self._on_card = device.type == "cuda"
        self._demand = self._stream(urgent=True)
        self._prefetch = self._stream(urgent=False)
        self._awaited: dict[int, Any] = {}
        self._read: dict[int, Any] = {}
        self._timed: dict[int, _Timed] = {}
        if self._on_card:
            # Memory of the slots may still be in use by work of the current stream.
            ready = self.recorded(self.current())
            self._demand.wait_event(ready)
            self._prefetch.wait_event(ready)

    def _stream(self, urgent: bool) -> Any:
        if not self._on_card:
            return HostStream()
        return torch.cuda.Stream(self.device, priority=-1 if urgent else 0)

    @contextmanager
    def _on(self, stream: Any, current: Any) -> Iterator[None]:
        """A context in which copies are of a stream, inside a known current one.

        torch's own context asks for the current stream, which takes longer than a copy's launch.
        """
        if self._on_card:
            torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            if self._on_card:
                torch.cuda.set_stream(current)

    def recorded(self, stream: Any) -> Any:
        """Return an event behind the work of a stream; with ``times`` it can be timed."""
        event = torch.cuda.Event(enable_timing=self.times) if self._on_card else HostEvent()
        event.record(stream)
        return event

    def current(self) -> Any:
        """Return the current stream. torch takes 10 µs to tell it, as long as a copy is launched."""
        return torch.cuda.current_stream(self.device) if self._on_card else HostStream()

    def demand(self, loads: Sequence[Load], current: Any) -> None:
        """Copy records beside products, which ``wait_for`` them.

        A copy comes after the products that read its slot before.

        Args:
            loads: the records and their slots.
            current: the current stream, as ``current`` returns it.
        """
        self._copy_beside([loads], self._demand, current, in_pieces=False)

    def prefetch(self, loads: Sequence[Load], current: Any) -> None:
        """Copy records that no product waits for yet, behind those that are demanded.

        Args:
            loads: the records and their slots.
            current: the current stream, as ``current`` returns it.
        """
        in_pieces = len(loads) <= MOST_IN_PIECES
        self._copy_beside(_groups(loads), self._prefetch, current, in_pieces)

    def _copy_beside(
        self, groups: Sequence[Sequence[Load]], stream: Any, current: Any, in_pieces: bool
    ) -> None:
        """Copy records on a stream of copies; those of a group are waited for together."""
        waited = set[Any]()
        with self._on(stream, current):
            for group in groups:
                self._copy(group, stream, in_pieces, waited, self._copy_timed)
                filled = self.recorded(stream)
                for load in group:
                    self._awaited[load.slot] = filled

    def copy_before_products(self, loads: Sequence[Load], stream: Any) -> None:
        """Copy records on the stream of products that are launched next.

        They are timed together, since the device waits while the host asks for each event.

        Args:
            loads: the records and their slots.
            stream: the current stream, as ``current`` returns it.
        """
        began = self.recorded(stream) if self.times else None
        self._copy(loads, stream, False, set(), self._copy_run)
        self._note_time(began, loads, stream)

    def _copy(
        self,
        loads: Sequence[Load],
        stream: Any,
        in_pieces: bool,
        waited: set[Any],
        copy_run: Callable[[Sequence[Load], Any, bool], None],
    ) -> None:
        """Copy records into slots on a stream, which is the current one.

        Records and slots that follow one another are one copy.

        Args:
            loads: the records and their slots.
            stream: the stream.
            in_pieces: each record is several copies.
            waited: events that the stream waits for already; new ones are added.
            copy_run: copies records that follow one another.
        """
        run: list[Load] = []
        follower = None
        for load in loads:
            records, record, slot = load
            # behind the products that read the slot, and a copy into it that nothing waited for
            for events in (self._read, self._awaited):
                event = events.pop(slot, None)
                if event is not None and event not in waited:
                    if run:  # which does not wait for it
                        copy_run(run, stream, in_pieces)
                        run = []
                    stream.wait_event(event)
                    waited.add(event)
            if run and load != follower:
                copy_run(run, stream, in_pieces)
                run = []
            run.append(load)
            joins = not in_pieces and records.stride == self._stride and record not in records.ends
            follower = (records, record + 1, slot + 1) if joins else None
        if run:
            copy_run(run, stream, in_pieces)

    def _copy_timed(self, run: Sequence[Load], stream: Any, in_pieces: bool) -> None:
        """Copy records as ``_copy_run`` does, and time it if copies are timed."""
        began = self.recorded(stream) if self.times else None
        self._copy_run(run, stream, in_pieces)
        self._note_time(began, run, stream)

    def _note_time(self, began: Any, loads: Sequence[Load], stream: Any) -> None:
        """Note that copies end here which began at an event; None if they are not timed."""
        if began is not None:
            timed = _Timed(began, self.recorded(stream), len(loads))
            self._timed.update((load.slot, timed) for load in loads)

    def _copy_run(self, run: Sequence[Load], stream: Any, in_pieces: bool) -> None:
        """Copy records that follow one another into slots that do."""
        records, record, slot = run[0]
        slots = self._slots_of(records.size)
        if len(run) > 1:
            slots.run(slot, len(run)).copy_(records.run(record, len(run)), non_blocking=True)
        else:
            into = slots.parts(slot, in_pieces)
            for part, of_record in zip(into, records.parts(record, in_pieces)):
                part.copy_(of_record, non_blocking=True)

    def _slots_of(self, size: int) -> Rows:
        """Return the first bytes of all slots, for records of that size."""
        if size not in self._rows:
            self._rows[size] = Rows(self._slots[:, :size])
        return self._rows[size]

    def is_filled(self, slot: int) -> bool:
        """Return whether the last copy into a slot is done; the host does not wait."""
        return slot not in self._awaited or bool(self._awaited[slot].query())

    def wait_for(self, slots: Sequence[int], stream: Any) -> None:
        """Let products of the current stream wait until these slots are filled."""
        for event in {self._awaited.pop(slot) for slot in slots if slot in self._awaited}:
            stream.wait_event(event)

    def were_read(self, slots: Sequence[int], stream: Any) -> None:
        """Note that the products of these slots were launched on the current stream."""
        read = self.recorded(stream)
        self._read.update((slot, read) for slot in slots)

    def timing(self, slot: int) -> Callable[[], float | None] | None:
        """Return a function that tells how long the last copy into a slot took, in µs.

        It returns None until the copy is done; of records that were copied together it tells the
        mean. Without ``times`` there is no such function.
        """
        return self._timed[slot].microseconds if self.times else None

    def finish(self) -> None:
        """Wait for all copies."""
        if self._on_card:
            torch.cuda.synchronize(self.device)


def _groups(loads: Sequence[Load]) -> list[Sequence[Load]]:
    """Return prefetched records in groups that are waited for together."""
    each = max(1, PREFETCH_GROUP_BYTES // loads[0].records.size)
    return [loads[first : first + each] for first in range(0, len(loads), each)]
