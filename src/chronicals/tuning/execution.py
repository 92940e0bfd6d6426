"""A trial carried out: its runs one after the other, and what came of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.config import laid_over
from chronicals.config.recipe import METRICS_FILE, RESUME_FILE
from chronicals.saving import remove_folder
from chronicals.tuning.feasibility import why_too_large
from chronicals.tuning.fields import SPEED
from chronicals.tuning.mixture import MODEL_FOLDER, make_model, sizes_of
from chronicals.tuning.run_process import MetricsTail, RunProcess, settings_of_runs, wait_until_free
from chronicals.tuning.schedule import WHOLE, Leg, TrialSchedule
from chronicals.tuning.scores import NoScore, held_out_score, speed_of, why_other_steps
from chronicals.tuning.space import SearchSpace
from chronicals.tuning.study import LOG_FILE, Study
from chronicals.tuning.trial import State, Trial

POLL_SECONDS = 0.05
"""Seconds between two looks at a run."""


GivesUp = Callable[[Trial], bool]
"""Says of a running trial, after a report, whether it is behind the others."""


@dataclass(frozen=True)
class Execution:
    """Carries out the trials of a study.

    Attributes:
        study: the folder.
        space: of the study.
        schedule: of the study's trials.
        metric: by which they are compared.
        program: the command line, as a program and its first arguments.
        stopping: set when the tuner is to end.
        told: called with a trial when it has a new report.
    """

    study: Study
    space: SearchSpace
    schedule: TrialSchedule
    metric: str
    program: Sequence[str]
    stopping: threading.Event
    told: Callable[[Trial], None]

    def carry_out(self, trial: Trial, gives_up: GivesUp | None) -> Trial:
        """Return a trial after its runs; it is still running if the tuner was stopped before.

        Args:
            trial: a running trial, which goes on from where an earlier tuner left it.
            gives_up: None for a trial that is not compared, of which the whole run alone is made.
        """
        trial = self._judged(trial, gives_up)
        try:
            recipe = self._recipe(trial)
            legs = self.schedule.legs(recipe)
            begun = any(self.study.folder_of(trial).glob(f"*/{RESUME_FILE}"))
            too_large = None if begun else why_too_large(recipe)
        except ConfigurationError as error:  # values that do not agree with each other
            return self._ended(replace(trial, state=State.REFUSED, reason=str(error)), ())
        if too_large is not None:
            return self._ended(replace(trial, state=State.TOO_LARGE, reason=too_large), ())
        for leg in legs if gives_up is not None else legs[-1:]:
            if trial.state != State.RUNNING:
                break
            if leg.ends_at in trial.reports and leg.name != WHOLE:
                continue
            try:
                trial = self._run(trial, recipe, leg, gives_up)
            except NoScore as error:
                trial = replace(trial, state=State.FAILED, reason=str(error))
            if self.stopping.is_set() and trial.state == State.RUNNING:
                return trial
        return self._ended(trial, legs)

    def _recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of a trial, with a model of its own if its sizes are tuned.

        Raises:
            ConfigurationError: its values do not agree with each other.
        """
        recipe = self.space.recipe_of(trial.params)
        sizes = sizes_of(trial.params)
        if not sizes:
            return recipe
        model = self.study.folder_of(trial) / MODEL_FOLDER
        make_model(self.space.recipe, sizes, model, trial.seed)
        return recipe.replace(model=str(model))

    def _ended(self, trial: Trial, legs: Sequence[Leg]) -> Trial:
        """Keep a trial that has ended; weights and checkpoints of its runs are removed."""
        trial = replace(trial, ended=time.time())
        self.study.keep(trial)
        remove_folder(self.study.folder_of(trial) / MODEL_FOLDER)
        for leg in legs:
            for name in ("checkpoints", "model"):
                remove_folder(self.study.folder_of(trial) / leg.name / name)
        return trial

    def _run(self, trial: Trial, recipe: Recipe, leg: Leg, gives_up: GivesUp | None) -> Trial:
        """Return a trial after one of its runs, or when it was given up or stopped before.

        Raises:
            NoScore: the run has no score of this metric.
        """
        folder = self.study.folder_of(trial)
        own = {name: getattr(recipe, name) for name in recipe.explicit}
        fields = {
            **settings_of_runs(folder / leg.name, trial.seed, recipe.held_out_seed),
            **leg.fields,
        }
        Recipe(**laid_over(own, fields)).write_to(folder / leg.name)
        wait_until_free(folder / leg.name)
        tail = MetricsTail(folder / leg.name / METRICS_FILE)
        process = RunProcess(folder / leg.name, folder / LOG_FILE, self.program)
        try:
            while not process.ended():
                if self.stopping.wait(POLL_SECONDS):
                    process.stop(save=True)
                    return trial
                trial = self._with_reports(trial, leg, tail.look(), gives_up)
                if trial.state != State.RUNNING:
                    self.study.keep(trial)
                    return trial
        finally:
            process.stop(save=False)
        failure = process.failure()
        if failure is not None:
            state, reason = failure
            return replace(trial, state=state, reason=reason)
        trial = self._with_reports(trial, leg, tail.look(), gives_up)
        if trial.state != State.RUNNING:
            return trial
        return self._scored(trial, leg, tail.lines, gives_up)

    def _with_reports(
        self,
        trial: Trial,
        leg: Leg,
        lines: Sequence[Mapping[str, Any]],
        gives_up: GivesUp | None,
    ) -> Trial:
        """Return a trial with its new reports, up to the one at which it is given up."""
        for line in lines:
            unit = leg.reports.get(line["step"])
            if unit is None or unit in trial.reports or "eval_loss" not in line:
                continue
            trial = self._report(trial, unit, held_out_score(line, self.metric), gives_up)
            if trial.state != State.RUNNING:
                break
        return trial

    def _report(self, trial: Trial, unit: int, score: float, gives_up: GivesUp | None) -> Trial:
        """Return a trial with a report, which may give it up."""
        trial = replace(trial, reports={**trial.reports, unit: score})
        self.study.keep(trial)
        self.told(trial)
        return self._judged(trial, gives_up)

    def _judged(self, trial: Trial, gives_up: GivesUp | None) -> Trial:
        """Return a trial, given up if its last report is behind those of others."""
        last = max(trial.reports, default=self.schedule.units)
        if gives_up is None or last == self.schedule.units or not gives_up(trial):
            return trial
        share = last / self.schedule.units
        reason = f"behind the others after {share:.0%} of the tokens"
        return replace(trial, state=State.PRUNED, reason=reason)

    def _scored(
        self,
        trial: Trial,
        leg: Leg,
        lines: Sequence[Mapping[str, Any]],
        gives_up: GivesUp | None,
    ) -> Trial:
        """Return a trial after a run that did not fail; it is complete after its whole run.

        Raises:
            NoScore: the run left no score.
        """
        if self.metric == SPEED:
            return self._timed(trial, leg, lines)
        evaluations = [line for line in lines if "eval_loss" in line]
        if not evaluations:
            raise NoScore("the run made no evaluation")
        trial = self._report(
            trial, leg.ends_at, held_out_score(evaluations[-1], self.metric), gives_up
        )
        if leg.name != WHOLE:
            return trial
        return replace(trial, state=State.COMPLETE, value=trial.reports[leg.ends_at])

    def _timed(self, trial: Trial, leg: Leg, lines: Sequence[Mapping[str, Any]]) -> Trial:
        """Return a trial with its speed, or refused if its steps are not those of trial 0."""
        speed = speed_of(lines)
        first = self.study.folder_of(replace(trial, number=0)) / leg.name / METRICS_FILE
        different = why_other_steps(lines, MetricsTail(first).look())
        if different is not None:
            return replace(trial, state=State.REFUSED, reason=different)
        return replace(trial, state=State.COMPLETE, value=speed)
