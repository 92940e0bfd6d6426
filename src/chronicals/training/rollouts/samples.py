"""``samples.jsonl``: prompts with their answers in the course of a run, to be read by people.

A line has the number of its rollout, with the rewards of the answers, or that of its step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

SAMPLES_FILE = "samples.jsonl"

PROMPTS_KEPT = 2
"""Prompts of a rollout whose answers are written: all of them would soon be larger than the model."""


class SamplesFile:
    """The samples of a run, a line a prompt; the first rank writes them.

    Args:
        folder: of the run.
        counted: what the number of a line counts.
    """

    def __init__(self, folder: Path, counted: Literal["rollout", "step"] = "rollout"):
        self.path = folder / SAMPLES_FILE
        self.counted = counted
        self._is_begun = False

    def write(self, number: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of a rollout or step; lines of later ones are of a killed run, and go."""
        if not self._is_begun:
            earlier = read_samples(self.path.parent)
            kept = [line for line in earlier if line.get(self.counted, number) < number]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
            self._is_begun = True
        with self.path.open("a") as file:
            for sample in samples:
                file.write(json.dumps({self.counted: number, **sample}) + "\n")


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
