"""Queues: a file for each card with the jobs that wait for it, one of which runs at a time."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chronicals.ui.jobs import Job, Jobs
from chronicals.ui.place import read_record, write_record


@dataclass
class Queues:
    """The queues of a place, and the keepers that this server started.

    Attributes:
        jobs: of the place.
        keepers: processes that are waited for, so that none stays as a zombie.
    """

    jobs: Jobs
    keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Folder with ``CARD.json``, names of jobs in the order of their start."""
        folder = self.jobs.place.kept / "queues"
        folder.mkdir(exist_ok=True)
        return folder

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Context in which no other server of this place changes a queue."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def add(self, job: Job) -> None:
        """Put a job at the end of the queue of its card."""
        with self._changing():
            file = self.folder / f"{job.card}.json"
            write_record(file, [*read_record(file, []), job.name])

    def waiting(self) -> dict[str, list[str]]:
        """Return the names of the jobs that wait, by card."""
        files = sorted(self.folder.glob("*.json"))
        return {file.stem: read_record(file, []) for file in files}

    def advance(self) -> None:
        """Start the next job of each card on which none runs."""
        self.keepers = [keeper for keeper in self.keepers if keeper.poll() is None]
        if not any(self.waiting().values()):
            return
        busy = {job.card for job in self.jobs.all() if job.is_alive}
        with self._changing():
            for card, names in self.waiting().items():
                if card not in busy and names:
                    self._start_next(card, names)

    def _start_next(self, card: str, names: list[str]) -> None:
        """Start the first of these jobs that was not stopped; the rest keeps waiting.

        The file is written after the start: a server that ends in between starts nothing twice,
        for a job is launched once.
        """
        rest = list(names)
        while rest:
            job = self.jobs.named(rest.pop(0))
            if job is None or job.state != "waiting":
                continue
            keeper = job.launch()
            if keeper is not None:
                self.keepers.append(keeper)
                break
        write_record(self.folder / f"{card}.json", rest)
