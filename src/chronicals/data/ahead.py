"""Steps assembled ahead of their consumer, by a thread that does without the GIL.

A thread that needs the GIL gets it after ``sys.getswitchinterval()`` (5 ms) when others run Python, many times what a step
takes to assemble. So the thread enters compiled code once and stays there until it is told to stop. It shares an array of
signals with its consumer, read with acquire and written with release, and a ring of orders: the packs of a step in, the
facts about its micro-batches out. Its memory is the consumer's: a block for each step, allocated afresh, so that what was
handed out is never written again.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from chronicals.data.assembly import Documents, Shape, assemble
from chronicals.data.compiled import compiled
from chronicals.data.instructions import load_acquire, sleep_microseconds, store_release

SUBMITTED, BUILT, STOP, WRONG, ENDED = range(5)
"""Signals: steps ordered and steps done since the start; then: end now; 1 + a document that cannot be read; has ended."""

SHORTEST_NAP, LONGEST_NAP = 20, 1000
"""Microseconds between two looks at the signals; a nap doubles while nothing happens."""

PATIENCE = 50
"""Looks in one call that waits without the GIL; between calls Python sees interrupts."""


@compiled
def _read(signals: np.ndarray, index: int) -> int:
    return load_acquire(signals, index)


@compiled
def _write(signals: np.ndarray, index: int, value: int) -> None:
    store_release(signals, index, value)


@compiled(nogil=True)
def _wait(signals: np.ndarray, built: int) -> None:
    """Until so many steps are built or the thread has ended, but not for ever."""
    for _ in range(PATIENCE):
        if load_acquire(signals, BUILT) >= built or load_acquire(signals, ENDED):
            return
        sleep_microseconds(np.uint32(SHORTEST_NAP))


@compiled(nogil=True)
def _work(
    signals: np.ndarray, addresses: np.ndarray, packs: np.ndarray, facts: np.ndarray, documents: Documents, shape: Shape
) -> None:
    """The thread: take the next order of the ring, assemble it, say so; nap where there is none."""
    built, nap = 0, SHORTEST_NAP
    while not load_acquire(signals, STOP):
        if load_acquire(signals, SUBMITTED) == built:
            sleep_microseconds(np.uint32(nap))
            nap = min(2 * nap, LONGEST_NAP)
            continue
        slot, nap = built % len(addresses), SHORTEST_NAP
        wrong = assemble(addresses[slot], packs[slot], facts[slot], documents, shape)
        if wrong:
            store_release(signals, WRONG, wrong)
            break
        built += 1
        store_release(signals, BUILT, built)
    store_release(signals, ENDED, 1)


class UnreadableDocument(Exception):
    """A document lies outside the file or does not fit in its pack; ``document`` is its number."""

    def __init__(self, document: int):
        super().__init__(document)
        self.document = document


class StepsAhead:
    """A thread that assembles steps in the order in which they are submitted; ``close`` it when done.

    Args:
        depth: most steps that may be submitted and not yet taken.
    """

    def __init__(self, documents: Documents, shape: Shape, depth: int):
        self.depth = depth
        self._submitted = self._taken = 0
        self._signals = np.zeros(5, np.int64)
        self._addresses = np.zeros((depth, 2), np.int64)
        self._packs = np.zeros((depth, shape.batches * shape.packs), np.int64)
        self._facts = np.zeros((depth, shape.batches, 3), np.int64)
        self._error: BaseException | None = None
        # A daemon, so that a generator nobody closed does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(documents, shape), name="batches", daemon=True)
        self._thread.start()

    def _run(self, documents: Documents, shape: Shape) -> None:
        try:
            _work(self._signals, self._addresses, self._packs, self._facts, documents, shape)
        except BaseException as error:
            self._error = error
            _write(self._signals, ENDED, 1)

    def submit(self, packs: np.ndarray, addresses: tuple[int, int]) -> None:
        """Order a step: its packs, and its memory, which must stay until the step is taken or the thread closed."""
        assert self._submitted - self._taken < self.depth
        slot = self._submitted % self.depth
        self._packs[slot], self._addresses[slot] = packs, addresses
        self._submitted += 1
        _write(self._signals, SUBMITTED, self._submitted)

    def take(self) -> list[list[int]]:
        """Wait for the next step and return the facts about its micro-batches.

        Raises:
            UnreadableDocument: assembly met one; steps before it were given out.
        """
        while _read(self._signals, BUILT) <= self._taken:
            if _read(self._signals, ENDED) and _read(self._signals, BUILT) <= self._taken:
                raise self._error or UnreadableDocument(int(self._signals[WRONG]) - 1)
            _wait(self._signals, self._taken + 1)
        self._taken += 1
        return self._facts[(self._taken - 1) % self.depth].tolist()

    def close(self) -> None:
        """End the thread; afterwards nothing is written into the memory that it was given."""
        _write(self._signals, STOP, 1)
        while self._thread.is_alive() and not _read(self._signals, ENDED):
            time.sleep(SHORTEST_NAP * 1e-6)
        if not sys.is_finalizing():  # when the interpreter ends, other threads do not get the GIL that ending takes
            self._thread.join()
