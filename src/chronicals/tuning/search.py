"""Choice of the next trial, and of those that are given up: optuna, asked about all trials so far.

Each question builds a study in memory from the trials' folders, so that optuna keeps nothing which
a killed process could lose, double or leave running. Its seed is that of the study plus the number
of trials: a sampler that began again with the same seed would ask for the same values again
(optuna, issue 3255).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chronicals.config import ConfigurationError
from chronicals.tuning.settings import StudySettings
from chronicals.tuning.space import Choice, Dimension, SearchSpace
from chronicals.tuning.trial import IMPOSSIBLE, State, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.trial import Trial as OptunaTrial
    from optuna.trial import TrialState

STUDY_NAME = "chronicals"
"""Name of the study in memory, always the same: Hyperband draws a trial's bracket from it."""

STARTUP_TRIALS = 5
"""Complete trials before the first is pruned."""

LEAST_COMPARED = 3
"""Trials with a report at the same tokens that a median needs: that of one or two prunes the better
half of all trials (optuna, issue 2441)."""


MOST_DRAWS = 20
"""Draws after which a space of few values is searched for one that was not tried."""

SEEDS_APART = 100_003
"""Distance of the seeds of two draws for the same trial: a prime above any number of trials."""


def check_installed() -> None:
    """Check that optuna is installed.

    Raises:
        ConfigurationError: it is not; the message has the command that installs it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigurationError(
            "optuna is not installed, which chooses what is tried: pip install 'chronicals[tune]'"
        )


@dataclass(frozen=True)
class Search:
    """The search of a study.

    Attributes:
        space: the dimensions.
        settings: of the study.
        seed: of the user's recipe.
        units: units of a whole trial, at the last of which a trial is complete.
    """

    space: SearchSpace
    settings: StudySettings
    seed: int
    units: int

    def next_params(self, trials: Sequence[Trial]) -> dict[str, Any] | None:
        """Return the values of the next trial, which no trial had; None if all were tried.

        The first trial has the user's own.

        Args:
            trials: of the search so far, which have all ended.
        """
        from optuna.samplers import TPESampler

        if not trials:
            return self.space.own()
        tried = [trial.params for trial in trials]
        for again in range(MOST_DRAWS):
            study = self.study(trials)
            study.sampler = TPESampler(seed=self.seed + len(trials) + SEEDS_APART * again)
            asked = study.ask(self.distributions())
            params = {
                name: _value(dimension, asked.params[name])
                for name, dimension in self.space.dimensions.items()
            }
            if params not in tried:
                return params
        return next((params for params in self.space.all() if params not in tried), None)

    def gives_up(self, trials: Sequence[Trial], trial: Trial) -> bool:
        """Return whether a running trial is behind the others at its last report.

        Args:
            trials: of the search before it.
            trial: the running trial.
        """
        if self.settings.pruner == "none" or not trial.reports:
            return False
        return bool(self._replayed(self.study(trials), trial).should_prune())

    def pruner(self) -> BasePruner:
        """Return optuna's pruner."""
        from optuna.pruners import HyperbandPruner, MedianPruner

        if self.settings.pruner == "hyperband":
            return HyperbandPruner(min_resource=1, max_resource=self.units, reduction_factor=3)
        return MedianPruner(n_startup_trials=STARTUP_TRIALS, n_min_trials=LEAST_COMPARED)

    def study(self, trials: Sequence[Trial]) -> Study:
        """Return optuna's study of these trials, in memory.

        Each is asked for, reported and told as it went, because Hyperband notes with a trial what
        its reports were worth. One whose values do not work is told as pruned, from which the
        sampler learns, with a violated constraint, which says why; a failed one it would forget.
        """
        import optuna
        from optuna.samplers import RandomSampler

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            study_name=STUDY_NAME,
            direction="maximize" if self.settings.maximizes else "minimize",
            sampler=RandomSampler(seed=self.seed),  # the values are there already
            pruner=self.pruner(),
        )
        for trial in trials:
            replayed = self._replayed(study, trial)
            if trial.state == State.PRUNED:
                replayed.should_prune()
            state = self._state(trial)
            value = trial.value if state == optuna.trial.TrialState.COMPLETE else None
            study.tell(replayed, value, state)
        return study

    def _replayed(self, study: Study, trial: Trial) -> OptunaTrial:
        """Return a trial as a running one of a study, which was asked about all reports but the last."""
        inside = self.space.holds(trial.params)
        if inside:
            labels = {
                name: dimension.label(trial.params[name])
                for name, dimension in self.space.dimensions.items()
            }
            study.enqueue_trial(labels)
        replayed = study.ask(self.distributions() if inside else {})
        for number, (unit, score) in enumerate(sorted(trial.reports.items()), 1):
            replayed.report(score, unit)
            if number < len(trial.reports):
                replayed.should_prune()
        if trial.state in IMPOSSIBLE:
            replayed.set_constraint("works", 1.0)
        return replayed

    def _state(self, trial: Trial) -> TrialState:
        """Return optuna's state of a trial that has ended.

        A trial outside of the space, which the user's own may be, has a number and no values.
        """
        from optuna.trial import TrialState

        if trial.state == State.FAILED or not self.space.holds(trial.params):
            return TrialState.FAIL
        return TrialState.COMPLETE if trial.state == State.COMPLETE else TrialState.PRUNED

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return optuna's distribution of each dimension."""
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        found: dict[str, BaseDistribution] = {}
        for name, dimension in self.space.dimensions.items():
            if isinstance(dimension, Choice):
                found[name] = CategoricalDistribution(dimension.labels)
            elif dimension.whole:
                low, high = int(dimension.low), int(dimension.high)
                found[name] = IntDistribution(low, high, log=dimension.scale == "log")
            else:
                low_end, high_end = float(dimension.low), float(dimension.high)
                found[name] = FloatDistribution(low_end, high_end, log=dimension.scale == "log")
        return found


def _value(dimension: Dimension, label: Any) -> Any:
    """Return optuna's value of a dimension as a recipe has it."""
    if isinstance(dimension, Choice):
        return dimension.values[dimension.labels.index(label)]
    return label


def by_score(settings: StudySettings, trials: Sequence[Trial]) -> list[Trial]:
    """Return the complete trials, best first."""
    complete = [trial for trial in trials if trial.state == State.COMPLETE]
    sign = -1.0 if settings.maximizes else 1.0
    return sorted(complete, key=lambda trial: sign * (trial.value or 0.0))


def importances(search: Search, trials: Sequence[Trial]) -> Mapping[str, float]:
    """Return each dimension's share of what the score depends on, largest first.

    It is PED-ANOVA's (Watanabe, Bansal and Hutter, 2023), optuna's default.
    """
    from optuna.importance import get_param_importances

    inside = [trial for trial in trials if search.space.holds(trial.params)]
    with warnings.catch_warnings(action="ignore"):
        return get_param_importances(search.study(inside))
