"""``samples.jsonl``: prompts of each rollout with their answers and rewards, to be read by people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SAMPLES_FILE = "samples.jsonl"

PROMPTS_KEPT = 2
"""Prompts of a rollout whose answers are written: all of them would soon be larger than the model."""


class SamplesFile:
    """The samples of a run, a line a prompt; the first rank writes them.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path):
        self.path = folder / SAMPLES_FILE
        self._is_begun = False

    def write(self, rollout: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of a rollout; lines of later ones are of a run that was killed, and go."""
        if not self._is_begun:
            kept = [line for line in read_samples(self.path.parent) if line["rollout"] < rollout]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
            self._is_begun = True
        with self.path.open("a") as file:
            for sample in samples:
                file.write(json.dumps({"rollout": rollout, **sample}) + "\n")


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Return the samples in the folder of a run; a torn last line is left out."""
    path = folder / SAMPLES_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    samples = []
    for line in lines:
        try:
            samples.append(json.loads(line))
        except ValueError:
            continue
    return samples
