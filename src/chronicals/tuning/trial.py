"""A trial: values of the tuned fields, and what came of them, kept as JSON in a folder of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from chronicals.standard_json import to_json

TRIAL_FILE = "trial.json"


class State(StrEnum):
    """State of a trial."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    TOO_LARGE = "too large"
    OUT_OF_MEMORY = "out of memory"
    DIVERGED = "diverged"
    REFUSED = "refused"
    FAILED = "failed"


IMPOSSIBLE = frozenset({State.TOO_LARGE, State.OUT_OF_MEMORY, State.DIVERGED, State.REFUSED})
"""States of trials whose values do not work: a result from which the sampler learns."""


@dataclass(frozen=True)
class Trial:
    """A trial.

    Attributes:
        number: of the trial in its study, from 0.
        params: values by dimension of the space.
        fields: of the recipe that they stand for; settings of sections as ``dpo.beta``.
        seed: of its runs.
        repeats: number of the trial that it repeats with another seed; None in the search.
        state: see ``State``.
        reports: scores by the share of a whole trial's tokens after which they were measured, in
            units of the schedule (``schedule.py``).
        value: the score; None unless complete.
        reason: what ended it, if it is not complete.
        began, ended: seconds since 1970.
    """

    number: int
    params: Mapping[str, Any]
    seed: int
    repeats: int | None = None
    state: State = State.RUNNING
    reports: Mapping[int, float] = field(default_factory=dict)
    value: float | None = None
    reason: str = ""
    began: float = 0.0
    ended: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.number:04d}"

    @property
    def last_score(self) -> float:
        """The score, or the last one that was reported of a trial that is not complete."""
        if self.value is not None:
            return self.value
        return self.reports[max(self.reports)]

    def write(self, folder: Path) -> None:
        """Write the trial into its folder, whole or not at all."""
        aside = folder / f".{TRIAL_FILE}.{os.getpid()}"
        aside.write_text(to_json(asdict(self), indent=1) + "\n")
        os.replace(aside, folder / TRIAL_FILE)

    @classmethod
    def read(cls, folder: Path) -> Trial:
        """Read the trial in a folder."""
        fields = json.loads((folder / TRIAL_FILE).read_text())
        fields["state"] = State(fields["state"])
        fields["reports"] = {int(unit): value for unit, value in fields["reports"].items()}
        return cls(**fields)
