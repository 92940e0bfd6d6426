"""Copies of records from host memory into slots, beside the products of the device.

Two streams: what products wait for (demand) goes before what they will want (prefetch), which is
copied in pieces, so that a demanded record never waits for more than one piece of the bus's time.
A slot has at most two events: one behind its copy, for which products of its expert wait and no
others, and one behind its products, for which the next copy into it waits. Demanded copies that are
asked for together are waited for together, and share one event; so do the products of a wave. Where
the host launches products only after their copies, these go on the stream of the products, which
then need not wait for any event. Nothing is copied back, and in steady state no memory is allocated.
On the CPU the same code runs over streams that do everything at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

PREFETCH_PIECE_BYTES = 2 << 20
"""Bytes of a piece of a prefetched record: 36 µs of a bus of 55 GB/s."""


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


Load = tuple[Tensor, int]
"""A record, uint8 ``[bytes]``, and the slot that it is copied into."""


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
        self._rows: dict[int, tuple[Tensor, ...]] = {}
        self._on_card = device.type == "cuda"
        self._demand = self._stream(urgent=True)
        self._prefetch = self._stream(urgent=False)
        self._awaited: dict[int, Any] = {}
        self._read: dict[int, Any] = {}
        self._timed: dict[int, tuple[Any, Any]] = {}
        if self._on_card:
            # Memory of the slots may still be in use by work of the current stream.
            ready = self.recorded(self.current())
            self._demand.wait_event(ready)
            self._prefetch.wait_event(ready)

    def _stream(self, urgent: bool) -> Any:
        if not self._on_card:
            return HostStream()
        return torch.cuda.Stream(self.device, priority=-1 if urgent else 0)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which copies are of a stream."""
        return torch.cuda.stream(stream) if self._on_card else nullcontext()

    def recorded(self, stream: Any) -> Any:
        """Return an event behind the work of a stream; with ``times`` it can be timed."""
        event = torch.cuda.Event(enable_timing=self.times) if self._on_card else HostEvent()
        event.record(stream)
        return event

    def current(self) -> Any:
        """Return the current stream. torch takes 10 µs to tell it, as long as a copy is launched."""
        return torch.cuda.current_stream(self.device) if self._on_card else HostStream()

    def copy(self, loads: Sequence[Load], prefetch: bool = False) -> None:
        """Copy records beside products, which ``wait_for`` them.

        A copy comes after the products that read its slot before.

        Args:
            loads: the records and their slots.
            prefetch: no product waits for the copies yet.
        """
        stream = self._prefetch if prefetch else self._demand
        piece = PREFETCH_PIECE_BYTES if prefetch else None
        groups = [[load] for load in loads] if prefetch else [loads]
        with self._on(stream):
            for group in groups:
                for record, slot in group:
                    self._copy(record, slot, stream, piece)
                filled = self.recorded(stream)
                self._awaited.update((slot, filled) for _, slot in group)

    def copy_before_products(self, loads: Sequence[Load], stream: Any) -> None:
        """Copy records on the stream of products that are launched next.

        Args:
            loads: the records and their slots.
            stream: the current stream, as ``current`` returns it.
        """
        for record, slot in loads:
            self._copy(record, slot, stream)

    def _copy(self, record: Tensor, slot: int, stream: Any, piece: int | None = None) -> None:
        """Copy a record into a slot.

        Args:
            record: the record.
            slot: the slot.
            stream: the stream, which is the current one.
            piece: bytes of each copy; None for one copy.
        """
        # behind the products that read the slot, and a copy into it that nothing waited for
        for events in (self._read, self._awaited):
            event = events.pop(slot, None)
            if event is not None:
                stream.wait_event(event)
        into = self._row(slot, record.numel())
        began = self.recorded(stream) if self.times else None
        if piece is None:
            into.copy_(record, non_blocking=True)
        else:
            for part, of_record in zip(into.split(piece), record.split(piece)):
                part.copy_(of_record, non_blocking=True)
        if self.times:
            self._timed[slot] = began, self.recorded(stream)

    def _row(self, slot: int, size: int) -> Tensor:
        """Return the first bytes of a slot. Views of all slots are made once for each size."""
        rows = self._rows.get(size)
        if rows is None:
            rows = self._rows[size] = self._slots[:, :size].unbind()
        return rows[slot]

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

        It returns None until the copy is done. Without ``times`` there is no such function.
        """
        if not self.times:
            return None
        began, filled = self._timed[slot]
        return lambda: began.elapsed_time(filled) * 1e3 if filled.query() else None

    def finish(self) -> None:
        """Wait for all copies."""
        if self._on_card:
            torch.cuda.synchronize(self.device)
