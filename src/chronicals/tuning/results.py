"""Results of a study: the best trials over several seeds, beside the user's own settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from chronicals.tuning.fields import SPEED
from chronicals.tuning.search import by_score
from chronicals.tuning.settings import StudySettings
from chronicals.tuning.trial import State, Trial

REPEATED = 3
"""Best trials that run again with other seeds."""

T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Student's t that one mean in twenty exceeds by chance, for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Result:
    """A trial with its scores over all seeds.

    Attributes:
        trial: the trial of the search.
        scores: by seed, that of the search first.
    """

    trial: Trial
    scores: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean of the scores."""
        return statistics.fmean(self.scores.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation of the scores; None for a single one."""
        return statistics.stdev(self.scores.values()) if len(self.scores) > 1 else None

    def __str__(self) -> str:
        if self.spread is None:
            return f"{self.mean:.4f}" if abs(self.mean) < 1000 else f"{self.mean:,.0f}"
        return f"{self.mean:.4f} ± {self.spread:.4f}"


@dataclass(frozen=True)
class Results:
    """Results of a study.

    Attributes:
        own: the user's own settings.
        best: the best trials, best first by the mean over all seeds.
        settings: of the study.
    """

    own: Result
    best: Sequence[Result]
    settings: StudySettings

    @property
    def is_better(self) -> bool:
        """True if the best settings differ from the user's own by more than chance does."""
        return self.why_no_different() is None

    def why_no_different(self) -> str | None:
        """Return why the best settings are no better than the user's own; None if they are.

        Both have the same seeds, rows and order, so their scores are compared in pairs: the mean of
        the differences with its standard error, by Student's t.
        """
        first = self.best[0]
        if first.trial.number == self.own.trial.number:
            return "your own settings are the best"
        seeds = first.scores.keys() & self.own.scores.keys()
        sign = 1.0 if self.settings.maximizes else -1.0
        gains = [sign * (first.scores[seed] - self.own.scores[seed]) for seed in sorted(seeds)]
        mean = statistics.fmean(gains)
        if len(gains) < 2:
            if self.settings.metric == SPEED and mean > 0:
                return None  # the same steps, whose median time hardly depends on chance
            return "one seed does not tell what chance does; repeat with others (repeats)"
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        if mean > T_95[min(len(gains) - 1, len(T_95)) - 1] * error:
            return None
        return f"the best are no different from yours, by {len(gains)} seeds each"


def results_of(settings: StudySettings, trials: Sequence[Trial]) -> Results | None:
    """Return what a study has found so far; None before the user's own settings have a score.

    Args:
        settings: of the study.
        trials: all of them, also those that repeat others.
    """
    searched = [trial for trial in trials if trial.repeats is None]
    ranked = by_score(settings, searched)
    if not searched or searched[0].value is None:
        return None

    def with_scores(trial: Trial) -> Result:
        again = (one for one in trials if one.repeats == trial.number)
        scores = {one.seed: one.value for one in (trial, *again) if one.state == State.COMPLETE}
        return Result(trial, {seed: value for seed, value in scores.items() if value is not None})

    best = [with_scores(trial) for trial in ranked[:REPEATED]]
    best.sort(key=lambda result: result.mean, reverse=settings.maximizes)
    return Results(with_scores(searched[0]), best, settings)
