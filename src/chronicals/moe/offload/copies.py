"""Copies of records from host memory into slots, beside the products of the device.

Two streams: what products wait for (demand) goes before what they will want (prefetch), which is
copied in pieces, so that a demanded record never waits for more than one piece of the bus's time.
Each slot has two events: ``filled``, for which products of its expert wait and no others, and
``read``, for which the next copy into it waits. Nothing is copied back, and in steady state nothing
is allocated. On the CPU the same code runs over streams that do everything at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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

    stream = None

    def wait_event(self, event: Any) -> None:
        """Return at once: what the event stands behind is done."""

    def context(self) -> AbstractContextManager[None]:
        """Return a context for copies."""
        return nullcontext()


class CardStream:
    """A stream of a card.

    Args:
        device: the card.
        urgent: its work goes before that of other streams where both wait.
    """

    def __init__(self, device: torch.device, urgent: bool):
        self.stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def wait_event(self, event: torch.cuda.Event) -> None:
        """Let later work of the stream wait for an event."""
        self.stream.wait_event(event)

    def context(self) -> AbstractContextManager[None]:
        """Return a context in which copies are of this stream."""
        return torch.cuda.stream(self.stream)


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
        self._rows = list(slots)
        self._on_card = device.type == "cuda"
        self._demand = self._stream(urgent=True)
        self._prefetch = self._stream(urgent=False)
        count = len(slots)
        self._began = [self.event() for _ in range(count)]
        self._filled = [self.event() for _ in range(count)]
        self._read = [self.event() for _ in range(count)]
        self._is_read = [False] * count
        self._is_awaited = [False] * count
        if self._on_card:
            # Memory of the slots may still be in use by work of the current stream.
            ready = self.event()
            ready.record(torch.cuda.current_stream(device))
            self._demand.wait_event(ready)
            self._prefetch.wait_event(ready)

    def _stream(self, urgent: bool) -> Any:
        return CardStream(self.device, urgent) if self._on_card else HostStream()

    def event(self) -> Any:
        """Return an event that can be timed."""
        return torch.cuda.Event(enable_timing=True) if self._on_card else HostEvent()

    def _current(self) -> Any:
        return torch.cuda.current_stream(self.device) if self._on_card else HostStream()

    @contextmanager
    def copying(self, prefetch: bool) -> Iterator[Callable[[Tensor, int], None]]:
        """Context manager that yields a function which copies a record into a slot.

        A copy comes after the products that read its slot before. The stream is entered once, with
        the first copy, and events are told their stream: asking torch for the current one takes as
        long as to launch a copy.

        Args:
            prefetch: no product waits for the copies yet.
        """
        stream = self._prefetch if prefetch else self._demand
        with ExitStack() as entered:
            is_entered = False

            def copy(record: Tensor, slot: int) -> None:
                nonlocal is_entered
                if not is_entered:
                    entered.enter_context(stream.context())
                    is_entered = True
                self._copy(record, slot, stream, prefetch)

            yield copy

    def _copy(self, record: Tensor, slot: int, stream: Any, prefetch: bool) -> None:
        """Copy a record into a slot on a stream, which is the current one."""
        if self._is_read[slot]:
            stream.wait_event(self._read[slot])
            self._is_read[slot] = False
        if self._is_awaited[slot]:  # an earlier copy into it, which nothing waited for
            stream.wait_event(self._filled[slot])
        into = self._rows[slot]
        if len(into) != len(record):
            into = into[: len(record)]
        if self.times:
            self._began[slot].record(stream.stream)
        if prefetch:
            pieces = into.split(PREFETCH_PIECE_BYTES), record.split(PREFETCH_PIECE_BYTES)
            for part, of_record in zip(*pieces):
                part.copy_(of_record, non_blocking=True)
        else:
            into.copy_(record, non_blocking=True)
        self._filled[slot].record(stream.stream)
        self._is_awaited[slot] = True

    def is_filled(self, slot: int) -> bool:
        """Return whether the last copy into a slot is done; the host does not wait."""
        return not self._is_awaited[slot] or bool(self._filled[slot].query())

    def wait_for(self, slots: list[int]) -> None:
        """Let products of the current stream wait until these slots are filled."""
        current = self._current()
        for slot in slots:
            if self._is_awaited[slot]:
                current.wait_event(self._filled[slot])
                self._is_awaited[slot] = False

    def were_read(self, slots: list[int]) -> None:
        """Note that the products of these slots were launched on the current stream."""
        current = torch.cuda.current_stream(self.device) if self._on_card else None
        for slot in slots:
            self._read[slot].record(current)
            self._is_read[slot] = True

    def timing(self, slot: int) -> Callable[[], float | None]:
        """Return a function that tells how long the last copy into a slot took, in µs.

        It returns None until the copy is done. Only with ``times``.
        """
        began, filled = self._began[slot], self._filled[slot]

        def microseconds() -> float | None:
            return began.elapsed_time(filled) * 1e3 if filled.query() else None

        return microseconds

    def finish(self) -> None:
        """Wait for all copies."""
        if self._on_card:
            torch.cuda.synchronize(self.device)
