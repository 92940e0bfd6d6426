"""That this process is alive, told to the others from where they found each other to its end, and
what it ended with.

One that loads for long is waited for, however long. One that has ended never comes: who waits for
it outside of a run, where no ``RankWatch`` looks, would do so for as long as a collective may take,
and ends instead.
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
"""Seconds between two looks."""

GRACE = 10.0
"""Seconds that a process has to end by itself once another has raised an error."""

LOST = 120.0
"""Seconds without a post after which a process, or its machine, is gone."""

GONE = "chronicals/gone"
"""Key of the store that there is once a process has ended, or was not heard of for too long."""


class Waiting:
    """Whether this process waits for others in a call of ``Mesh``.

    Attributes:
        since: when it began to (``time.monotonic``); None where it does not.
        in_run: whether a ``RankWatch`` looks after it.
    """

    since: float | None = None
    in_run = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Of the main thread, which takes part in collectives."""
        before = self.since
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = before


WAITING = Waiting()


class Gone(NamedTuple):
    """The first process that is gone.

    Attributes:
        how, words: that it ended, with its error if nobody caught one.
    """

    rank: int
    how: str
    words: str

    @classmethod
    def first(cls, store: dist.Store) -> Gone | None:
        return cls(*json.loads(store.get(GONE))) if store.check([GONE]) else None

    def tell(self, store: dist.Store) -> Gone:
        """All others, unless another was the first; returns that one."""
        return Gone(*json.loads(store.compare_set(GONE, "", json.dumps(self))))

    def said(self, when: str = "") -> str:
        return f"rank {self.rank} {self.how}{when}" + (
            f": {self.words}" if self.words else "; look at what it wrote"
        )


class Presence:
    """A thread that posts once a second, and ends this process where it waits, in no run, for
    one that is gone.
    """

    current: ClassVar[Presence | None] = None

    def __init__(self, rank: int, count: int, store: dist.Store):
        self.rank = rank
        self.count = count
        self.store = store
        self._own = store.clone()  # type: ignore[attr-defined]  # in the other the main thread may wait, as for new groups
        self._heard = {other: (-1, time.monotonic()) for other in range(count)}
        self._first: Gone | None = None
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stand, name="presence", daemon=True)

    @classmethod
    def begin(cls, rank: int, count: int) -> None:
        """Once for each store, by all that found each other over it."""
        store = dist.distributed_c10d._get_default_store()
        if count == 1 or (cls.current is not None and cls.current.store is store):
            return
        cls.current = cls(rank, count, store)
        cls.current._thread.start()
        atexit.register(cls.current.end)

    def end(self) -> None:
        """As the interpreter does; the others are told of the error that nobody caught, if there
        is one.
        """
        self._over.set()
        self._thread.join(GRACE)
        error = getattr(sys, "last_value", None)
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
            time.sleep(2 * PAUSE)  # the store may be this process's, and the others are to read it

    def _stand(self) -> None:
        found_at = 0.0
        for beat in itertools.count():
            if self._over.wait(PAUSE * (beat > 0)):
                return
            waiting = None if WAITING.in_run else WAITING.since
            if self._first is None:
                self._first = self._look(beat, waiting is not None)
                found_at = time.monotonic()
            elif waiting is not None and time.monotonic() - max(found_at, waiting) > GRACE:
                self._leave(self._first.said())

    def _look(self, beat: int, waits: bool) -> Gone | None:
        """Post, and where this process waits ask which is gone; the store ends with the first."""
        try:
            self._post(beat)
            return self._gone() if waits else None
        except RuntimeError as failure:
            return Gone(0, "is gone, and with it the store of the processes", str(failure))

    def _post(self, beat: int) -> None:
        now = time.monotonic()
        waiting = WAITING.since
        about = {
            "beat": beat,
            "place": "outside of train()",
            "for": now - self._began,
            "waits": None if waiting is None else now - waiting,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._own.set(_key(self.rank), json.dumps(about))

    def _gone(self) -> Gone | None:
        """Of those not heard of the first rank looks at every other, the others at the first."""
        if (first := Gone.first(self._own)) is not None:
            return first
        for other in range(1, self.count) if self.rank == 0 else [0]:
            about = present(self._own, other)
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
        """End this process, whose main thread waits for one that never comes."""
        logger.error("%s; this process (rank %d) waits for it and ends", reason, self.rank)
        logging.shutdown()
        os._exit(1)


def _key(rank: int) -> str:
    return f"chronicals/present/{rank}"


def present(store: dist.Store, rank: int) -> dict[str, Any] | None:
    """What a process posted last of itself while it is in no run; None where it never did."""
    return json.loads(store.get(_key(rank))) if store.check([_key(rank)]) else None
