"""The process of a run of a trial: ``chronicals train``, which ends with the tuner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chronicals.bound_process import BoundProcess
from chronicals.training.errors import TrainingError
from chronicals.training.run.callbacks import metrics_line
from chronicals.training.run.lock import FolderInUse, locked
from chronicals.tuning.trial import State

PROGRAM = (sys.executable, "-m", "chronicals.cli")
"""The command line, as a program."""

GRACE_SECONDS = 120.0
"""Seconds in which a run that was asked to end finishes its step and writes its checkpoint."""

FREE_SECONDS = 30.0
"""Seconds in which a process that is being killed, and its driver, let go of a run's folder."""

LINES_OF_AN_ERROR = 4
"""Last lines of a log that are told of a run that failed."""

SIGNS = {
    State.OUT_OF_MEMORY: ("out of memory", "check-memory"),
    State.DIVERGED: ("not finite", "not a number"),
}
"""Words in the error of a run by what they say of its settings (``training.run.guard``)."""


class MetricsTail:
    """The lines of a ``metrics.jsonl`` that is written, of which each look reads only new ones.

    A run that goes on replaces the file, after which it is read anew.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._inode = 0
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        """Return all whole lines."""
        if not self.path.exists():
            return self.lines
        with self.path.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._read:
                self.lines = []
                self._read = 0
            self._inode = now.st_ino
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        self.lines += [metrics_line(line) for line in whole.splitlines()]
        return self.lines


class RunProcess:
    """A run of a trial, from its folder: it begins, or goes on from its newest checkpoint.

    Args:
        folder: of the run, with its recipe.
        log: file to which its output is added.
        program: the command line, as a program and its first arguments.
    """

    def __init__(self, folder: Path, log: Path, program: Sequence[str] = PROGRAM):
        self.folder = folder
        self.log = log
        command = [*program, "train", "--resume", "--output-dir", str(folder)]
        with log.open("ab") as output:
            self._begins_at = output.tell()
            self._process = BoundProcess(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def ended(self) -> bool:
        """Return whether the run has ended."""
        return self._process.poll() is not None

    def stop(self, save: bool) -> None:
        """End the run, and wait until it has ended.

        Args:
            save: whether it may finish its step and write a checkpoint.
        """
        if self.ended():
            return
        with suppress(ProcessLookupError):
            if save:
                os.killpg(self._process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_SECONDS)
                    return
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def failure(self) -> tuple[State, str] | None:
        """Return what a run that has ended failed by, and its words; None if it did not fail."""
        status = self._process.returncode
        if status == 0:
            return None
        if status == -signal.SIGKILL:
            return State.OUT_OF_MEMORY, "killed, as the system does when host memory is full"
        with self.log.open(errors="replace") as text:
            text.seek(self._begins_at)
            lines = [line.rstrip() for line in text if line.strip()]
        said = "\n".join(lines[-LINES_OF_AN_ERROR:])
        lower = said.lower()
        for state, signs in SIGNS.items():
            if any(sign.lower() in lower for sign in signs):
                return state, said
        return State.FAILED, said or f"ended with status {status}"


def wait_until_free(folder: Path) -> None:
    """Wait until no process writes a run: one that a killed tuner left ends in a moment.

    Raises:
        TrainingError: somebody else does, who does not end.
    """
    until = time.monotonic() + FREE_SECONDS
    while True:
        try:
            with locked(folder):
                return
        except FolderInUse:
            if time.monotonic() > until:
                raise TrainingError(
                    f"{folder}: another process writes this run; end it, then go on"
                ) from None
        time.sleep(0.05)


def settings_of_runs(folder: Path, seed: int, held_out_seed: int) -> Mapping[str, Any]:
    """Return the fields that all runs of trials have: they leave a score, and little else.

    Args:
        folder: of the run.
        seed: of the trial.
        held_out_seed: of the rows that are held out, the same for all trials.
    """
    return {
        "output_dir": folder,
        "seed": seed,
        "validation_seed": held_out_seed,
        "eval_steps": None,
        "early_stopping_patience": None,
        "keep": "last",
        "save_total_limit": 1,
        "report_samples": 0,
        "trackers": [],
        "overwrite": False,
        "tune": {},
    }
