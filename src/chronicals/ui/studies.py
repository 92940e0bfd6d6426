"""Studies of the tuner, read from their folders: ``study.json``, and a ``trial.json`` for each trial."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.ui.place import Place, read_record
from chronicals.ui.runs import DEEPEST, INNER_FOLDERS

STUDY = "study.json"
COMPLETE = "complete"


@dataclass(frozen=True)
class StudyFolder:
    """A study.

    Attributes:
        name: of its folder, relative to the root.
        folder: absolute path.
    """

    name: str
    folder: Path

    @property
    def about(self) -> dict[str, Any]:
        """The space, the settings and the user's own recipe."""
        return read_record(self.folder / STUDY, {})

    @property
    def maximizes(self) -> bool:
        """True if larger values of its metric are better, as the study itself says."""
        return self.about.get("settings", {}).get("direction") == "maximize"

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The trials in their order; those that are being written are left out."""
        files = sorted((self.folder / "trials").glob("[0-9]*/trial.json"))
        return [trial for file in files if (trial := read_record(file))]

    def best_first(self) -> list[dict[str, Any]]:
        """Return the complete trials of the search, the best first."""
        complete = [
            trial
            for trial in self.trials
            if trial["state"] == COMPLETE
            and trial["value"] is not None
            and trial["repeats"] is None
        ]
        return sorted(complete, key=lambda trial: trial["value"], reverse=self.maximizes)


def studies(place: Place) -> list[StudyFolder]:
    """Return the studies in a place, the last changed first."""
    found = [StudyFolder(place.name(folder), folder) for folder in study_folders(place.root)]
    return sorted(found, key=lambda study: (study.folder / STUDY).stat().st_mtime, reverse=True)


def study_folders(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """Return the folders of studies below a folder, without following links."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") or entry.name in INNER_FOLDERS
        if hidden or not entry.is_dir(follow_symlinks=False):
            continue
        if (Path(entry.path) / STUDY).is_file():
            yield Path(entry.path)
        elif deepest > 1:
            yield from study_folders(Path(entry.path), deepest - 1)
