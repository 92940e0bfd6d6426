"""Jobs: commands that the page starts as processes of their own, and their records.

A job is a folder: ``job.json`` (what is run, where, on which card), ``output.log``, and what the
keeper writes about its beginning and its end. Nothing else is known of it, so a server that starts
anew knows as much as the one before.
"""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chronicals.ui.keeper import ENDED, JOB, OUTPUT, STARTED
from chronicals.ui.place import Place, read_record, write_record
from chronicals.ui.processes import ask_to_stop, is_running

JobState = Literal["waiting", "starting", "running", "finished", "stopped", "failed"]

LAUNCHED = "launched"
"""File that the first to start a job creates; nobody starts it a second time."""

STOP = "stop"
"""File of a job that was asked to stop."""

SECONDS_TO_START = 60.0
"""A job without a word of its keeper for so long was lost with the machine. A keeper imports no
torch, and takes under a second."""

INTERRUPTED = 130
"""Exit code of a command that was asked to stop, and has saved its checkpoint."""


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a process that runs a command of ours."""
    return [sys.executable, "-m", "chronicals.cli", *arguments]


def typed_command(arguments: Sequence[str]) -> str:
    """Return a command of ours as it is typed in a terminal."""
    return shlex.join(["chronicals", *arguments])


@dataclass(frozen=True)
class Job:
    """A command that was asked for.

    Attributes:
        folder: of its record.
        kind: what it is for: the name of an objective, or of a command.
        arguments: of the command, without the program.
        card: number of the card it waits for, or ``cpu``.
        output: folder or file that it writes, relative to the root; empty if none.
        created: seconds since 1970.
    """

    folder: Path
    kind: str
    arguments: list[str]
    card: str
    output: str = ""
    created: float = field(default=0.0)

    @classmethod
    def of(cls, folder: Path) -> Job | None:
        """Return the job of a record; None if the folder has none."""
        record = read_record(folder / JOB)
        if not isinstance(record, dict):
            return None
        names = ("kind", "arguments", "card", "output", "created")
        return cls(folder, **{name: record[name] for name in names})

    @property
    def name(self) -> str:
        """Name of the record."""
        return self.folder.name

    @property
    def shown(self) -> str:
        """The command as it is typed in a terminal."""
        return typed_command(self.arguments)

    @property
    def log(self) -> Path:
        """File with the output of the command."""
        return self.folder / OUTPUT

    @property
    def code(self) -> int | None:
        """Exit code of the command; None before its end, or if the end was not seen."""
        return read_record(self.folder / ENDED, {}).get("code")

    @property
    def state(self) -> JobState:
        """State of the job now, by its files and by its process."""
        ended = read_record(self.folder / ENDED)
        if ended is not None:
            if ended["code"] == 0:
                return "finished"
            asked_to_stop = ended["code"] == INTERRUPTED or (self.folder / STOP).exists()
            return "stopped" if asked_to_stop else "failed"
        started = read_record(self.folder / STARTED)
        if started is not None:
            # The keeper outlives the command for the moment in which it writes down the end.
            running = any(
                is_running(started[name], started[f"{name}_began"]) for name in ("pid", "keeper")
            )
            return "running" if running else "failed"
        try:
            launched = (self.folder / LAUNCHED).stat().st_mtime
        except OSError:
            return "stopped" if (self.folder / STOP).exists() else "waiting"
        return "starting" if time.time() - launched < SECONDS_TO_START else "failed"

    @property
    def is_alive(self) -> bool:
        """True from its start to its end."""
        return self.state in ("starting", "running")

    def reason(self) -> str:
        """Return the last words of a job that failed: the lines from its last error on."""
        lines = last_lines(self.log)
        for number in range(len(lines) - 1, -1, -1):
            if lines[number].startswith(("error", "Error", "Traceback")):
                return "\n".join(lines[number:])
        return "\n".join(lines[-3:])

    def stop(self) -> None:
        """Ask the job to stop: a run finishes its step and saves. A waiting job never starts."""
        (self.folder / STOP).touch()
        started = read_record(self.folder / STARTED)
        if started is not None:
            ask_to_stop(started["pid"], started["pid_began"])

    def launch(self) -> subprocess.Popen[bytes] | None:
        """Start the keeper, unless somebody did; return its process, to be waited for."""
        try:
            os.close(os.open(self.folder / LAUNCHED, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return None
        return subprocess.Popen(
            [sys.executable, "-m", "chronicals.ui.keeper", str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


LAST_BYTES = 1 << 16
"""Bytes at the end of an output that are looked through for the reason of a failure."""


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a file that have text."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


@dataclass(frozen=True)
class Jobs:
    """The jobs of a place."""

    place: Place

    @property
    def folder(self) -> Path:
        """Folder with a folder for each job."""
        folder = self.place.kept / "jobs"
        folder.mkdir(exist_ok=True)
        return folder

    def all(self) -> list[Job]:
        """Return all jobs, the newest first."""
        found = [Job.of(folder) for folder in self.folder.iterdir()]
        return sorted((job for job in found if job), key=lambda job: job.created, reverse=True)

    def named(self, name: str) -> Job | None:
        """Return the job of this name; None if there is none."""
        if Path(name).name != name:
            return None
        return Job.of(self.folder / name)

    def new_folder(self, kind: str) -> Path:
        """Make the folder of a job to come, named by the time and the kind."""
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        for number in range(1000):
            folder = self.folder / (f"{now}-{kind}" + (f"-{number}" if number else ""))
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
        raise FileExistsError(folder)

    def create(
        self,
        folder: Path,
        kind: str,
        arguments: Sequence[str],
        card: str,
        output: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Write down a job, which the queue of its card starts.

        Args:
            folder: from ``new_folder``.
            kind: see ``Job``, as for the next three.
            arguments: of the command, without the program.
            card: number of a card, or ``cpu``.
            output: folder or file that the command writes.
            environment: variables of the process beside those of this one.
        """
        visible = {} if card == "cpu" else {"CUDA_VISIBLE_DEVICES": card}
        record = {
            "kind": kind,
            "arguments": list(arguments),
            "command": command_of(arguments),
            "root": str(self.place.root),
            "card": card,
            "output": output,
            "created": time.time(),
            "environment": {"PYTHONUNBUFFERED": "1", **visible, **(environment or {})},
        }
        write_record(folder / JOB, record)
        job = Job.of(folder)
        assert job is not None
        return job
