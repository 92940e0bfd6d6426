"""No process waits for ever for one that stopped: all end within seconds, and each says which one
was the first and why.

A collective waits until every process takes part. Where one has raised an error, was killed or
hangs, the others would wait for as long as the backend does, minutes, and then name a socket. Here
every process has a thread that posts once a second where it stands to the store over which the
processes found each other, and reads where the others stand. A process whose main thread waits in a
collective can only be ended from that thread, by leaving at once; checkpoints survive that at any
moment.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist

from chronicals.distributed.mesh import Mesh
from chronicals.distributed.presence import GRACE, LOST, PAUSE, WAITING, Gone, present

logger = logging.getLogger(__name__)

_runs = itertools.count()
"""Numbers of the watches, the same in all processes, which begin them in the same order."""


class RankWatch:
    """Within ``with``: this process ends with the others.

    Args:
        patience: seconds in which one of all processes must get on with a ``step``: begin it, or be
            done with a micro-batch.
        error: what is raised where another process raised an error first.
    """

    def __init__(self, ranks: Mesh, patience: float, error: type[Exception]):
        self.ranks = ranks
        self.patience = patience
        self.error = error
        self._place: tuple[str, float] = "before the first step", time.monotonic()
        self._limited: str | None = None
        self._passed_at = 0.0
        self._all_waiting_since = 0.0
        self._over = threading.Event()

    def __enter__(self) -> RankWatch:
        if self.ranks.count > 1:
            WAITING.in_run = True
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._key = f"chronicals/watch/{next(_runs)}"
            self._heard = {rank: (-1, time.monotonic()) for rank in range(self.ranks.count)}
            self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> Literal[False]:
        if self.ranks.count == 1:
            return False
        self._over.set()
        self._thread.join()
        WAITING.in_run = False
        if isinstance(error, Exception) and _is_of_a_collective(error):
            raise self.error(self._reason(error)) from error
        if error is None:
            self._part()
        else:
            self._announce(f"{kind.__name__ if kind else ''}: {error}")
        return False

    def _part(self) -> None:
        """Leave together: the store ends with the first process, and the others may still be
        asking for its last word.
        """
        try:
            self._store.set(f"{self._key}/parted/{self.ranks.rank}", "yes")
            ends = time.monotonic() + GRACE
            keys = [f"{self._key}/parted/{rank}" for rank in range(self.ranks.count)]
            while self.ranks.rank == 0 and not self._store.check(keys) and time.monotonic() < ends:
                time.sleep(0.02)
        except RuntimeError as failure:
            logger.debug("the other processes had gone: %s", failure)

    def _reason(self, failure: Exception) -> str:
        """Why a collective failed: what another process ended with, or where all stand."""
        try:
            told = self._first_error(wait=GRACE)
        except RuntimeError:
            told = None
        return told or f"another process is gone: {self._table()}; {failure}"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Within: the optimizer step ``number``, which waits for the other processes."""
        with self.limited(f"in step {number}", "a step"):
            yield
        self._place = f"after step {number}", time.monotonic()

    @contextmanager
    def limited(self, doing: str, called: str | None = None) -> Iterator[None]:
        """Within: work that all processes do, and in which they wait for each other.

        Args:
            doing: what this process is said to be doing.
            called: the work, where it took too long; ``doing`` by default.
        """
        before, _ = self._place
        self._place = (doing, time.monotonic())
        self._limited = called or doing
        try:
            yield
        finally:
            self._place = (before, time.monotonic())
            self._limited = None

    def passed(self) -> None:
        """Within a step: a micro-batch is done, which took its time and did not hang."""
        self._passed_at = time.monotonic()

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Within a step: work for which this process needs no other; they wait, however long."""
        before = self._place
        limited = self._limited
        self._place = (doing, time.monotonic())
        self._limited = None
        try:
            yield
        finally:
            self._place = before
            self._limited = limited
            self.passed()

    # --- the thread
    # ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        reason = None
        since = 0.0
        for beat in itertools.count():
            if self._over.wait(PAUSE * (beat > 0)):
                return
            hung = None
            try:
                self._post(beat)
                found = self._first_error() or self._lost()
                hung = self._hung()
            except RuntimeError as failure:
                found = reason or f"the store of the processes is gone, and so is rank 0: {failure}"
            if found is None or reason is None:
                reason = found
                since = time.monotonic()
            elif time.monotonic() - since > GRACE:
                self._leave(reason)
            if hung is not None:
                self._announce(hung)
                self._over.wait(
                    2 * PAUSE
                )  # the store may be this process's, and the others are to read it
                self._leave(hung)

    def _post(self, beat: int) -> None:
        place, began = self._place
        now = time.monotonic()
        waiting = self._waiting_since()
        about = {
            "beat": beat,
            "place": place,
            "for": now - began,
            "waits": None if waiting is None else now - waiting,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._store.set(f"{self._key}/{self.ranks.rank}", json.dumps(about))

    def _posted(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._key}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _waiting_since(self) -> float | None:
        """Since when the main thread has waited for other processes, as it does within a step
        from where it last got on; None where it does not."""
        return WAITING.since if self._limited is None else max(self._place[1], self._passed_at)

    def _hung(self) -> str | None:
        """Where all stand, if all have waited for each other for too long.

        One that is alive elsewhere, in a callback or writing a file, is waited for, however long it
        takes. The others are asked only when this process has waited for too long, and again when
        that may have come true of all.
        """
        since = self._waiting_since()
        if since is None or time.monotonic() - max(since, self._all_waiting_since) <= self.patience:
            return None
        table = self._posts()
        now = time.monotonic()
        for rank, about in table.items():
            if self._is_waited_for(about):
                if self._all_waiting_since < since:  # for the first time
                    logger.warning(
                        "rank_timeout=%g: waiting on: rank %d %s",
                        self.patience,
                        rank,
                        _standing(about),
                    )
                self._all_waiting_since = now
                return None
        self._all_waiting_since = now - min(
            (about["waits"] for about in table.values() if about is not None), default=0.0
        )
        if now - self._all_waiting_since <= self.patience:
            return None
        return (
            f"rank_timeout={self.patience:g}: {self._limited or 'waiting for each other'} took "
            f"longer: {_told(table)}"
        )

    def _is_waited_for(self, about: dict[str, Any] | None) -> bool:
        """Whether a process is alive elsewhere; outside of steps also one that was never heard
        of, as where a script made the process group and still loads."""
        return self._limited is None if about is None else about["waits"] is None

    def _lost(self) -> str | None:
        """Which process has not posted for too long; told to all. The first looks at every
        other, the others at the first, so that the store is asked a few times a process and
        second."""
        for rank in range(1, self.ranks.count) if self.ranks.rank == 0 else [0]:
            (beat, at) = self._heard[rank]
            found = self._posted(rank) or present(self._store, rank)
            if found is None:
                continue
            if found["beat"] != beat:
                self._heard[rank] = found["beat"], time.monotonic()
            elif time.monotonic() - at > LOST:
                reason = (
                    f"rank {rank} is gone: it {_described(found)}, and was not heard of for "
                    f"{LOST:g} seconds"
                )
                self._announce(reason)
                return reason
        return None

    def _posts(self) -> dict[int, dict[str, Any] | None]:
        return {
            rank: self._posted(rank) or present(self._store, rank)
            for rank in range(self.ranks.count)
        }

    def _table(self) -> str:
        """Where every process stands."""
        try:
            return _told(self._posts())
        except RuntimeError:
            return "the other processes cannot be asked where they stand"

    def _leave(self, reason: str) -> None:
        """End this process, whose main thread waits for others."""
        if self._over.is_set():
            return
        logger.error(
            "%s; this process (rank %d) ends, the last checkpoint is intact",
            reason,
            self.ranks.rank,
        )
        logging.shutdown()
        os._exit(1)

    # --- errors
    # ----------------------------------------------------------------------------------------------------------

    def _announce(self, words: str) -> None:
        """Tell the others of an error of this process, unless one of them was the first to have
        one.
        """
        try:
            self._store.compare_set(f"{self._key}/error", "", json.dumps([self.ranks.rank, words]))
        except RuntimeError as failure:
            logger.debug("the other processes could not be told: %s", failure)

    def _first_error(self, wait: float = 0.0) -> str | None:
        """What another process ended with, in this run or before it began it.

        Args:
            wait: seconds to wait for it: the connections of a process that was killed break before
                it can say why, or never.
        """
        ends = time.monotonic() + wait
        key = f"{self._key}/error"
        while True:
            if self._store.check([key]):
                rank, words = json.loads(self._store.get(key))
                return None if rank == self.ranks.rank else f"rank {rank} stopped: {words}"
            gone = Gone.first(self._store)
            if gone is not None and self._posted(gone.rank) is None:
                return gone.said(" before it began to train")
            if time.monotonic() >= ends:
                return None
            time.sleep(0.1)


def _told(table: dict[int, dict[str, Any] | None]) -> str:
    return "; ".join(f"rank {rank} {_standing(about)}" for rank, about in table.items())


def _standing(about: dict[str, Any] | None) -> str:
    if about is None:
        return "has not begun"
    got_on = about["waits"] is not None and about["for"] - about["waits"] >= 1
    return _described(about) + (
        f", the last {about['waits']:.0f} s without getting on" if got_on else ""
    )


def _described(about: dict[str, Any]) -> str:
    return (
        f"has been {about['place']} for {about['for']:.0f} s ({about['host']}, process "
        f"{about['pid']})"
    )


def _is_of_a_collective(error: Exception) -> bool:
    """Whether it is that a collective or the store failed; gloo raises a plain RuntimeError."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and "gloo" in str(error)
    )
