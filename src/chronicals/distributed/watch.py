"""Watch over the ranks of a run: if one stops or hangs, all end within seconds and name it.

A collective waits for every rank. If one has failed, was killed or hangs, the others would wait for
the backend's timeout of minutes, and then report only a socket error. Here a thread of every
process posts once a second what the process is doing to the store, and reads the posts of the
others. A main thread that is blocked in a collective cannot be interrupted, so the thread ends the
process at once. Checkpoints survive that at any moment.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch.distributed as dist

from chronicals.distributed.mesh import Mesh
from chronicals.distributed.presence import GRACE, LOST, PAUSE, WAITING, Gone, last_post, post

logger = logging.getLogger(__name__)

_runs = itertools.count()
"""Counter for the keys of watches; equal on all ranks, which start them in the same order."""


class RankWatch:
    """Context manager of a run that ends this process if another rank fails, is lost or hangs.

    Args:
        patience: maximum seconds without progress of any rank in a ``step``. Progress is to begin a
            step or to finish a micro-batch.
        error: exception type to raise if another rank failed first.
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
            # A connection of its own: the main thread may block in the default store.
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
        # A collective or the store raised it; gloo raises RuntimeError.
        by_gloo = type(error) is RuntimeError and "gloo" in str(error)
        if error is not None and (isinstance(error, dist.DistError) or by_gloo):
            # Say how another rank ended, or else what all ranks are doing.
            reason = None
            with suppress(RuntimeError):  # the store may be gone, too
                reason = self._first_error(wait=GRACE)
            if reason is None:
                doing = "the other processes cannot be asked where they stand"
                with suppress(RuntimeError):
                    doing = _told(self._posts())
                reason = f"another process is gone: {doing}; {error}"
            raise self.error(reason) from error
        if error is not None:
            self._announce(f"{kind.__name__ if kind else ''}: {error}")
            return False
        # Rank 0 waits until all ranks are done: the store ends with it, and others may still be
        # reading its last post.
        try:
            self._store.set(f"{self._key}/parted/{self.ranks.rank}", "yes")
            ends = time.monotonic() + GRACE
            keys = [f"{self._key}/parted/{rank}" for rank in range(self.ranks.count)]
            while self.ranks.rank == 0 and not self._store.check(keys) and time.monotonic() < ends:
                time.sleep(0.02)
        except RuntimeError as failure:
            logger.debug("the other processes had gone: %s", failure)
        return False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager around optimizer step ``number``, in which ranks wait for each other."""
        with self.limited(f"in step {number}", "a step"):
            yield
        self._place = f"after step {number}", time.monotonic()

    @contextmanager
    def limited(self, doing: str, called: str | None = None) -> Iterator[None]:
        """Context manager around work of all ranks in which they wait for each other.

        Args:
            doing: description of the work for posts, such as "in step 3".
            called: name of the work for the message about a timeout, by default ``doing``.
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
        """Record progress within a step: a micro-batch is finished."""
        self._passed_at = time.monotonic()

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Context manager in a step around work of this rank, for which others wait with no limit."""
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

    # --- methods of the thread

    def _watch(self) -> None:
        reason = None
        since = 0.0
        for beat in itertools.count():
            if self._over.wait(PAUSE * (beat > 0)):
                return
            hung = None
            try:
                key = f"{self._key}/{self.ranks.rank}"
                place, began = self._place
                post(self._store, key, beat, place, began, self._waiting_since())
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
                )  # this process may host the store, and the others must read it first
                self._leave(hung)

    def _posted(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._key}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _waiting_since(self) -> float | None:
        """Return when the main thread began to wait for other ranks; None if it does not wait.

        Within a step it counts as waiting since its last progress.
        """
        return WAITING.since if self._limited is None else max(self._place[1], self._passed_at)

    def _hung(self) -> str | None:
        """Return a message if all ranks have waited for each other longer than ``patience``.

        None if not. A rank that is alive and does something else, such as a callback or writing a file, is
        waited for without a limit. The posts of the others are read only once this rank has waited
        for too long, and again when all ranks may have.
        """
        since = self._waiting_since()
        if since is None or time.monotonic() - max(since, self._all_waiting_since) <= self.patience:
            return None
        table = self._posts()
        now = time.monotonic()
        for rank, about in table.items():
            # Outside of steps a rank that has not posted yet is waited for: a script may have
            # created the process group and still be loading.
            busy = self._limited is None if about is None else about["waits"] is None
            if busy:
                if self._all_waiting_since < since:  # for the first time
                    logger.warning(
                        "rank_timeout=%g: waiting on: %s",
                        self.patience,
                        _told({rank: about}),
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

    def _lost(self) -> str | None:
        """Announce a rank that has not posted for ``LOST`` seconds, and return the message.

        None if there is no such rank. Rank 0 looks at every other rank and the others at rank 0.
        """
        # So the store is asked only a few times a second, however many ranks there are.
        for rank in range(1, self.ranks.count) if self.ranks.rank == 0 else [0]:
            beat, at = self._heard[rank]
            found = self._posted(rank) or last_post(self._store, rank)
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
            rank: self._posted(rank) or last_post(self._store, rank)
            for rank in range(self.ranks.count)
        }

    def _leave(self, reason: str) -> None:
        """End this process at once, since its main thread is blocked."""
        if self._over.is_set():
            return
        logger.error(
            "%s; this process (rank %d) ends, the last checkpoint is intact",
            reason,
            self.ranks.rank,
        )
        logging.shutdown()
        os._exit(1)

    # --- errors that ranks tell each other

    def _announce(self, words: str) -> None:
        """Record an error of this rank for the others, unless another rank recorded one first."""
        try:
            self._store.compare_set(f"{self._key}/error", "", json.dumps([self.ranks.rank, words]))
        except RuntimeError as failure:
            logger.debug("the other processes could not be told: %s", failure)

    def _first_error(self, wait: float = 0.0) -> str | None:
        """Return the error of the first other rank that stopped, in this run or before it.

        None if none did.

        Args:
            wait: seconds to wait for the error. The connections of a killed process break before it
                can report one.
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
    """Return in words what the ranks of ``table`` posted last."""
    standing = []
    for rank, about in table.items():
        if about is None:
            standing.append(f"rank {rank} has not begun")
            continue
        words = f"rank {rank} {_described(about)}"
        if about["waits"] is not None and about["for"] - about["waits"] >= 1:
            words += f", the last {about['waits']:.0f} s without getting on"
        standing.append(words)
    return "; ".join(standing)


def _described(about: dict[str, Any]) -> str:
    return (
        f"has been {about['place']} for {about['for']:.0f} s ({about['host']}, process "
        f"{about['pid']})"
    )
