"""Liveness of processes between the first rendezvous and their end, over the store.

A process that loads a model for long is waited for, however long. A process that has ended never
comes; others that wait for it outside of a run, where no ``RankWatch`` looks, would block until the
collective's timeout. They end instead, and say how the first process ended.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

logger = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds between two posts of a process, and between two looks at the others."""

GRACE = 10.0
"""Seconds in which a process may end by itself after another has failed."""

LOST = 120.0
"""Seconds without a post after which a process, or its machine, counts as lost."""

GONE = "chronicals/gone"
"""Key of the store that is set once a process has ended or is lost."""


class Waiting:
    """State of this process: whether it waits for other ranks in a call of ``Mesh``.

    Attributes:
        since: when it began to wait (``time.monotonic``); None if it does not wait.
        in_run: True if a ``RankWatch`` is active.
    """

    since: float | None = None
    in_run = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Context manager around a wait of the main thread, which takes part in collectives."""
        before = self.since
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = before


WAITING = Waiting()


class Gone(NamedTuple):
    """The first process that ended or was lost.

    Attributes:
        how: verb phrase that follows "rank N" in messages.
        words: its error, if nobody caught one, else empty.
    """

    rank: int
    how: str
    words: str

    @classmethod
    def first(cls, store: dist.Store) -> Gone | None:
        """Read the first process that is gone from the store; None if there is none."""
        return cls(*json.loads(store.get(GONE))) if store.check([GONE]) else None

    def tell(self, store: dist.Store) -> Gone:
        """Record this process as gone, unless another was recorded before; return the record."""
        return Gone(*json.loads(store.compare_set(GONE, "", json.dumps(self))))

    def said(self, when: str = "") -> str:
        """Return the message for the user."""
        return f"rank {self.rank} {self.how}{when}" + (
            f": {self.words}" if self.words else "; look at what it wrote"
        )


class Presence:
    """Thread that posts once a second that this process is alive.

    It ends this process if, outside of a run, it waits for a process that is gone.
    """

    current: ClassVar[Presence | None] = None

    def __init__(self, rank: int, count: int, store: dist.Store):
        self.rank = rank
        self.count = count
        self.store = store
        # A connection of its own: the main thread may block in the other, as for new groups.
        self._own = store.clone()  # type: ignore[attr-defined]
        self._heard = {other: (-1, time.monotonic()) for other in range(count)}
        self._first: Gone | None = None
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stand, name="presence", daemon=True)

    @classmethod
    def begin(cls, rank: int, count: int) -> None:
        """Start the thread, once for each store; all processes of the store must call it."""
        store = dist.distributed_c10d._get_default_store()
        if count == 1 or (cls.current is not None and cls.current.store is store):
            return
        cls.current = cls(rank, count, store)
        cls.current._thread.start()
        atexit.register(cls.current.end)

    def end(self) -> None:
        """Stop the thread, as the interpreter exits, and tell the others an uncaught exception."""
        self._over.set()
        self._thread.join(GRACE)
        error = getattr(sys, "last_value", None)  # the interpreter sets it if nobody caught one
        words = "" if error is None else f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):
            self._first = self._first or Gone(self.rank, "ended", words).tell(self._own)
        if (
            words
            and self._first is not None
            and self._first.rank != self.rank
            and (self._first.words or "?") not in words
        ):
            logger.error("%s", self._first.said())
        if words and self.rank == 0:
            time.sleep(2 * PAUSE)  # rank 0 may host the store, and the others must read it

    def _stand(self) -> None:
        found_at = 0.0
        for beat in itertools.count():
            if self._over.wait(PAUSE * (beat > 0)):
                return
            waiting = None if WAITING.in_run else WAITING.since
            if self._first is None:
                try:
                    key = f"chronicals/present/{self.rank}"
                    post(self._own, key, beat, "outside of train()", self._began, WAITING.since)
                    self._first = None if waiting is None else self._gone()
                except RuntimeError as failure:  # the store ends with rank 0
                    how = "is gone, and with it the store of the processes"
                    self._first = Gone(0, how, str(failure))
                found_at = time.monotonic()
            elif waiting is not None and time.monotonic() - max(found_at, waiting) > GRACE:
                self._leave(self._first.said())

    def _gone(self) -> Gone | None:
        """Return a process that is gone, or None.

        Rank 0 looks at every other process and the others at rank 0.
        """
        first = Gone.first(self._own)
        if first is not None:
            return first
        # So the store is asked only a few times a second, however many ranks there are.
        for other in range(1, self.count) if self.rank == 0 else [0]:
            about = last_post(self._own, other)
            (beat, at) = self._heard[other]
            if about is None or about["beat"] != beat:
                self._heard[other] = (-1 if about is None else about["beat"]), time.monotonic()
            elif time.monotonic() - at > LOST:
                where = f"{about['host']}, process {about['pid']}"
                return Gone(
                    other, "is gone", f"it was not heard of for {LOST:g} seconds ({where})"
                ).tell(self._own)
        return None

    def _leave(self, reason: str) -> None:
        """End this process at once, since its main thread blocks for ever."""
        logger.error("%s; this process (rank %d) waits for it and ends", reason, self.rank)
        logging.shutdown()
        os._exit(1)


def post(
    store: dist.Store, key: str, beat: int, place: str, began: float, waiting: float | None
) -> None:
    """Post that this process is alive, and what it does.

    Args:
        store: the store of the processes.
        key: key of the post, which replaces the one before.
        beat: number of the post.
        place: what the process does, for messages.
        began: when that began (``time.monotonic``).
        waiting: when the main thread began to wait for other ranks; None if it does not wait.
    """
    now = time.monotonic()
    about = {
        "beat": beat,
        "place": place,
        "for": now - began,
        "waits": None if waiting is None else now - waiting,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    store.set(key, json.dumps(about))


def last_post(store: dist.Store, rank: int) -> dict[str, Any] | None:
    """Return the last post of a process outside of a run, or None if it never posted."""
    key = f"chronicals/present/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else None
