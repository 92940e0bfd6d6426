"""The folder of a study, which is all that is kept of it.

``study.json`` says what is tuned. Each trial is a folder in ``trials/`` with ``trial.json``, the
folders of its runs and ``log.txt``, what they printed. A folder appears with its ``trial.json`` by
one rename, so that a process which is killed leaves a whole trial or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.config import ConfigurationError
from chronicals.saving import remove_folder
from chronicals.standard_json import to_json
from chronicals.training.run.lock import FolderInUse, locked
from chronicals.tuning.trial import TRIAL_FILE, Trial

STUDY_FILE = "study.json"
TRIALS = "trials"
LOG_FILE = "log.txt"


@dataclass(frozen=True)
class Study:
    """A study in a folder."""

    folder: Path

    @contextmanager
    def sole_tuner(self) -> Iterator[None]:
        """Return a context in which no other process works on the study.

        Raises:
            ConfigurationError: another one does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locked(self.folder):
                yield
        except FolderInUse:
            raise ConfigurationError(
                f"study={str(self.folder)!r}: another tuner is working there; wait until it ends, "
                "or name another folder"
            ) from None

    def begin(self, about: Mapping[str, Any]) -> None:
        """Keep what a study is about, or check that it goes on with the same.

        The number of trials may change: a study goes on to more.

        Args:
            about: description of the study, as JSON.

        Raises:
            ConfigurationError: the folder holds another study; the message names what differs.
        """
        (self.folder / TRIALS).mkdir(exist_ok=True)
        for left in (self.folder / TRIALS).glob(".*"):
            remove_folder(left)
        described = json.loads(to_json(about))
        differing = _differing(self.about() or described, described)
        if differing:
            raise ConfigurationError(
                f"study={str(self.folder)!r}: holds a study with other settings ("
                f"{', '.join(differing)}); name another folder"
            )
        aside = self.folder / f".{STUDY_FILE}"
        aside.write_text(to_json(described, indent=1) + "\n")
        os.replace(aside, self.folder / STUDY_FILE)

    def about(self) -> dict[str, Any]:
        """Return the description of the study; it is empty if the study has not begun."""
        file = self.folder / STUDY_FILE
        return json.loads(file.read_text()) if file.exists() else {}

    def trials(self) -> list[Trial]:
        """Return all trials, in their order."""
        folders = sorted((self.folder / TRIALS).glob("[0-9]*"))
        return [Trial.read(folder) for folder in folders if (folder / TRIAL_FILE).exists()]

    def folder_of(self, trial: Trial) -> Path:
        """Return the folder of a trial."""
        return self.folder / TRIALS / trial.name

    def add(self, trial: Trial) -> None:
        """Make the folder of a new trial."""
        aside = self.folder / TRIALS / f".{trial.name}"
        aside.mkdir()
        trial.write(aside)
        os.rename(aside, self.folder_of(trial))

    def keep(self, trial: Trial) -> None:
        """Write what has become of a trial."""
        trial.write(self.folder_of(trial))


def _differing(kept: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs between two studies, without the number of trials."""
    differing = set[str]()
    for part in described:
        before, now = kept.get(part, {}), described[part]
        differing |= {name for name in before | now if before.get(name) != now.get(name)}
    return sorted(differing - {"trials"})
