"""Runs: the folders that training writes, found in the root."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.recipe import METRICS_FILE, RESUME_FILE
from chronicals.ui.jobs import Job, Jobs, last_lines
from chronicals.ui.place import Place

RunState = Literal["waiting", "starting", "running", "finished", "stopped", "failed", "unfinished"]

REPORT = "report.html"
SAMPLES = "samples.jsonl"
MODEL = "model"
CHECKPOINTS = "checkpoints"

INNER_FOLDERS = {"model", "checkpoints", "tokens", "tensorboard", "wandb", "export", "untrained"}
"""Folders of a run in which no other run is looked for; they may hold thousands of entries."""

DEEPEST = 4
"""Folders between the root and a run."""

SECONDS_OF_SILENCE = 60.0
"""A run that was started in a terminal counts as running for so long after its last line: its
process is not known. Trainers log steps and evaluations, which take less on most machines."""


@dataclass(frozen=True)
class RunEntry:
    """A folder that training wrote, or a job that is to write it.

    Attributes:
        name: path of the folder from the root.
        folder: absolute path.
        job: the newest job that writes there; None for a run from a terminal.
    """

    name: str
    folder: Path
    job: Job | None = None

    @property
    def state(self) -> RunState:
        """State of the run, by its job, or without one by its files."""
        if self.job is not None:
            return self.job.state
        if (self.folder / MODEL).exists():
            return "finished"
        recent = time.time() - self.changed < SECONDS_OF_SILENCE
        return "running" if recent else "unfinished"

    @property
    def changed(self) -> float:
        """Time of the last line of its metrics, in seconds since 1970."""
        try:
            return (self.folder / METRICS_FILE).stat().st_mtime
        except OSError:
            return self.job.created if self.job else 0.0

    @property
    def checkpoints(self) -> list[str]:
        """Names of its checkpoints, the newest first."""
        try:
            found = [entry.name for entry in os.scandir(self.folder / CHECKPOINTS)]
        except OSError:
            return []
        return sorted((name for name in found if name.startswith("step-")), reverse=True)

    @property
    def can_resume(self) -> bool:
        """True if it was not finished, has a recipe and a checkpoint, and no process."""
        idle = self.state in ("stopped", "failed", "unfinished")
        return idle and (self.folder / RESUME_FILE).exists() and bool(self.checkpoints)

    @property
    def objective(self) -> str:
        """Name of its objective; empty if its recipe cannot be read."""
        if self.job is not None and self.job.kind != "resume":
            return self.job.kind
        file = self.folder / RESUME_FILE
        try:
            return _objective_in(file, file.stat().st_mtime_ns)
        except (ConfigurationError, OSError):
            return ""


@functools.lru_cache(maxsize=1024)
def _objective_in(file: Path, changed: int) -> str:
    """Return the objective of a recipe as it was written at a time."""
    return Recipe.read_yaml(file).get("objective", "sft")


@dataclass(frozen=True)
class Runs:
    """The runs of a place, and the jobs that write them."""

    place: Place
    jobs: Jobs

    def all(self) -> list[RunEntry]:
        """Return all runs, the last changed first."""
        jobs: dict[str, Job] = {}
        for job in reversed(self.jobs.all()):  # of several the newest stays
            if job.output and job.arguments[0] == "train":
                jobs[job.output] = job
        names = {self.place.name(folder) for folder in run_folders(self.place.root)}
        found = [
            RunEntry(name, self.place.root / name, jobs.get(name)) for name in names | jobs.keys()
        ]
        return sorted(found, key=lambda run: run.changed, reverse=True)

    def named(self, name: str) -> RunEntry:
        """Return the run in a folder.

        Raises:
            ConfigurationError: the path leads out of the root, or there is no run.
        """
        folder = self.place.inside(name)
        writers = (job for job in self.jobs.all() if job.output == name)
        job = next((job for job in writers if job.arguments[0] == "train"), None)
        if job is None and not is_run(folder):
            raise ConfigurationError(f"{name!r}: holds no run")
        return RunEntry(self.place.name(folder), folder, job)

    def free_folder(self, objective: str) -> str:
        """Return a name for the folder of a new run: ``runs/sft-1``."""
        taken = {job.output for job in self.jobs.all()}
        number = 1
        while (
            f"runs/{objective}-{number}" in taken
            or (self.place.root / "runs" / f"{objective}-{number}").exists()
        ):
            number += 1
        return f"runs/{objective}-{number}"


def last_records(file: Path, count: int) -> list[dict[str, Any]]:
    """Return the last whole lines of JSON in a file; none if there is no file."""
    records = []
    for line in last_lines(file)[-count - 1 :]:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)][-count:]


def is_run(folder: Path) -> bool:
    """Return whether training wrote a folder."""
    return (folder / METRICS_FILE).is_file() or (folder / RESUME_FILE).is_file()


def run_folders(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """Return the folders of runs below a folder, without following links."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        name = entry.name
        if name.startswith(".") or name in INNER_FOLDERS or not entry.is_dir(follow_symlinks=False):
            continue
        if is_run(Path(entry.path)):
            yield Path(entry.path)
        if deepest > 1:
            yield from run_folders(Path(entry.path), deepest - 1)
