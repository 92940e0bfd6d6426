"""Tuner: tries settings of a run on its own data, each in a run of its own, and says which are best."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from chronicals.config import ConfigurationError, Recipe
from chronicals.training.errors import TrainingError
from chronicals.tuning.applying import write_fields
from chronicals.tuning.default_space import default_metric, default_space
from chronicals.tuning.execution import Execution
from chronicals.tuning.fields import SPEED
from chronicals.tuning.journal import export
from chronicals.tuning.mixture import make_model, sizes_of
from chronicals.tuning.report import shown_value, write_report
from chronicals.tuning.results import REPEATED, Results, results_of
from chronicals.tuning.run_process import PROGRAM
from chronicals.tuning.schedule import Budget, TrialSchedule, schedule_of
from chronicals.tuning.search import Search, by_score, check_installed
from chronicals.tuning.settings import divided
from chronicals.tuning.space import SearchSpace
from chronicals.tuning.study import Study
from chronicals.tuning.trial import State, Trial

MOST_FAILURES = 3
"""Failures in a row, for other reasons than its values, that end a study."""


@dataclass(frozen=True)
class Event:
    """Something that happened in a study.

    Attributes:
        kind: ``log`` is a line for people; ``status`` is what the tuner does: running, stopped,
            finished, or failed with its error; ``trial`` is that a trial began, was scored, or ended.
        text: the line, or the status.
        trial: the trial, as it is now.
    """

    kind: Literal["log", "status", "trial"]
    text: str
    trial: Trial | None = None


class StudyFailed(TrainingError):
    """A study cannot go on; its trials stay."""


class Tuner:
    """Tuner of a recipe.

    Args:
        recipe: the user's own settings, with what is tuned in ``tune``; or the path of its file.
        study: folder of the study; beside the recipe's ``output_dir`` by default. A study that is
            there goes on.
        tune: dimensions and settings that win over those of the recipe.
        program: the command line, as a program and its first arguments.
        budget: measures the length of a run; by default from its data.

    Raises:
        ConfigurationError: optuna is missing, nothing is held out, a field does not exist or cannot
            be tuned, or a range is wrong; the message has a line for each.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path,
        study: str | Path | None = None,
        tune: Mapping[str, Any] | None = None,
        *,
        program: Sequence[str] = PROGRAM,
        budget: Callable[[Recipe], Budget] | None = None,
    ):
        check_installed()
        if not isinstance(recipe, Recipe):
            recipe = Recipe.given(file=Path(recipe))
        settings, given = divided({**recipe.tune, **(tune or {})})
        metric = settings.metric or default_metric(recipe.objective)
        self.settings = replace(settings, metric=metric)  # type: ignore[type-var]
        self.recipe = Recipe(
            **{name: getattr(recipe, name) for name in recipe.explicit if name != "tune"}
        )
        if metric != SPEED and not (self.recipe.validation_data or self.recipe.validation_split):
            raise ConfigurationError(
                f"metric={metric!r}: nothing is held out to compare trials by; set validation_data "
                "or validation_split"
            )
        dimensions = given or default_space(self.recipe, metric)
        self.space = SearchSpace.of(dimensions, self.recipe, metric)
        beside = self.recipe.output_dir
        folder = beside.with_name(f"{beside.name}-study") if study is None else Path(study)
        self.study = Study(folder.expanduser().absolute())
        self.program = program
        self._measure = budget
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._units = 1  # of the schedule, once that is known
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin the study, or go on with it, in a thread; it does nothing while one runs."""
        if self.is_running():
            return
        self._stopping.clear()
        self.error = None
        self._thread = threading.Thread(target=self._run_and_tell, name="tuner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the study for now, after the step of the running trial, and wait until it has ended.

        The trial writes a checkpoint, with which it goes on when the study does.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def is_running(self) -> bool:
        """Return whether the study is running."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Run the study to its end, or until ``stop`` is called from another thread.

        Raises:
            ConfigurationError: the folder holds another study, or a setting is wrong.
            StudyFailed: the user's own settings fail, or trial after trial does.
        """
        with self.study.sole_tuner():
            self._tell("status", "running")
            schedule = self._prepare()
            self._units = schedule.units
            execution = Execution(
                self.study,
                self.space,
                schedule,
                self.settings.metric,
                self.program,
                self._stopping,
                self._tell_of,
            )
            search = self._search_of(schedule)
            try:
                self._search(search, execution)
                self._repeat(execution)
            finally:
                write_report(self.study, search)
            self._tell("status", "stopped" if self._stopping.is_set() else "finished")

    def _run_and_tell(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = error
            self._tell("status", f"failed: {error}")

    def results(self) -> Results | None:
        """Return what the study has found so far; None before your own settings have a score."""
        return results_of(self.settings, self.study.trials())

    def apply(self, file: str | Path) -> str:
        """Write the best settings into a recipe, with study, trial and score in a comment.

        Args:
            file: the recipe, of which other lines stay; without one the whole recipe is written.

        Returns:
            What was written, in words, or why nothing was.
        """
        results = self.results()
        reason = "no trial is complete" if results is None else results.why_no_different()
        if results is None or reason is not None:
            return f"nothing is written: {reason}"
        file = Path(file)
        best = results.best[0]
        if not file.exists():
            self.recipe.to_yaml(file)
        budget = Budget(**self.study.about()["budget"])
        fields = self.space.fields(best.trial.params)
        if self.settings.metric == SPEED and "batch_size" in fields:
            fields["gradient_accumulation_steps"] = budget.accumulation(fields["batch_size"])
        sizes = sizes_of(best.trial.params)
        if sizes:
            folder = self.study.folder / f"model-{best.trial.name}"
            make_model(self.recipe, sizes, folder, self.recipe.seed)
            fields["model"] = str(folder)
        words = (
            f"study {self.study.folder.name}, trial {best.trial.number}, {self.settings.metric} "
            f"{best} (before: {results.own})"
        )
        write_fields(file, fields, words)
        return f"written to {file}: {', '.join(f'{name}={fields[name]!r}' for name in fields)}"

    def export(self, file: str | Path) -> int:
        """Write the trials of the search as optuna's journal, and return how many there are.

        ``optuna-dashboard FILE`` shows it.

        Raises:
            ConfigurationError: the file exists already.
        """
        return export(self.study, self._search_of(self._prepare()), Path(file))

    def _tell(
        self, kind: Literal["log", "status", "trial"], text: str, trial: Trial | None = None
    ) -> None:
        self._events.put(Event(kind, text, trial))

    def _as_begun(self) -> None:
        """Give tuned fields the values that they had when the study began.

        ``apply`` may have written others into the recipe since.
        """
        begun = self.study.about().get("recipe")
        if begun is None:
            return
        tuned = {*self.space.fields(self.space.own())}
        if "batch_size" in tuned:
            tuned.add("gradient_accumulation_steps")
        now = {name: self.recipe.to_dict()[name] for name in tuned & self.recipe.explicit}
        changed = {name for name in tuned if now.get(name) != begun.get(name)}
        if not changed:
            return
        fields = {name: getattr(self.recipe, name) for name in self.recipe.explicit - changed}
        fields |= {name: begun[name] for name in changed & begun.keys()}
        self.recipe = Recipe(**fields)
        self.space = replace(self.space, recipe=self.recipe)
        self._tell("log", f"{', '.join(sorted(changed))}: your own settings are those of trial 0")

    def _prepare(self) -> TrialSchedule:
        """Return the schedule of the trials, and keep what the study is about.

        The length of the user's own run is measured once.
        """
        self._as_begun()
        own = {name: self.recipe.to_dict()[name] for name in sorted(self.recipe.explicit)}
        settings = asdict(self.settings)  # type: ignore[call-overload]
        direction = "maximize" if self.settings.maximizes else "minimize"
        about = {
            "space": self.space.to_json(),
            "settings": {**settings, "direction": direction},
            "recipe": own,
        }
        kept = self.study.about()
        if "budget" in kept:
            budget = Budget(**kept["budget"])
        else:
            from chronicals.tuning.budget import budget_of

            budget = (self._measure or budget_of)(self.recipe)
        self.study.begin({**about, "budget": asdict(budget)})
        measured = {name: value for name, value in asdict(budget).items() if name != "steps"}
        fitted = {name: measured[name] for name in measured.keys() - self.recipe.explicit}
        self.recipe = self.recipe.fitted(**fitted)
        self.space = replace(self.space, recipe=self.recipe)
        return schedule_of(budget, self.settings, self.space)

    def _search_of(self, schedule: TrialSchedule) -> Search:
        return Search(self.space, self.settings, self.recipe.seed, schedule.units)

    def _search(self, search: Search, execution: Execution) -> None:
        """Carry out the trials of the search that are not there yet."""
        while not self._stopping.is_set():
            trials = self._searched()
            if trials and trials[-1].state == State.RUNNING:
                *before, trial = trials
            elif self._is_enough(trials):
                return
            else:
                before = trials
                params = search.next_params(trials)
                if params is None:
                    self._tell("log", "every combination of the values was tried")
                    return
                trial = self._begin(params, self.recipe.seed)
            ended = execution.carry_out(trial, partial(search.gives_up, before))
            self._tell_of(ended)
            self._check_that_trials_work([*before, ended])

    def _is_enough(self, trials: Sequence[Trial]) -> bool:
        """Return whether the search is over.

        Trials that the plan dropped cost nothing and do not count; but if as many were dropped,
        hardly anything in the space fits.
        """
        dropped = sum(trial.state == State.TOO_LARGE for trial in trials)
        return max(len(trials) - dropped, dropped) >= self.settings.trials

    def _searched(self) -> list[Trial]:
        return [trial for trial in self.study.trials() if trial.repeats is None]

    def _repeat(self, execution: Execution) -> None:
        """Run the best trials and the user's own again, with other seeds."""
        if self.settings.metric == SPEED:
            return
        best = by_score(self.settings, self._searched())
        chosen = {trial.number: trial for trial in best[:REPEATED]}
        chosen |= {trial.number: trial for trial in best if trial.number == 0}
        for seed in range(self.recipe.seed + 1, self.recipe.seed + 1 + self.settings.repeats):
            for number, trial in chosen.items():
                if self._stopping.is_set():
                    return
                there = {(t.repeats, t.seed): t for t in self.study.trials()}
                repeat = there.get((number, seed)) or self._begin(trial.params, seed, number)
                if repeat.state == State.RUNNING:
                    ended = execution.carry_out(repeat, None)
                    self._tell_of(ended)

    def _begin(self, params: Mapping[str, Any], seed: int, repeats: int | None = None) -> Trial:
        number = len(self.study.trials())
        fields = self.space.flat_fields(params)
        trial = Trial(number, params, seed, repeats, began=time.time(), fields=fields)
        self.study.add(trial)
        self._tell_of(trial)
        return trial

    def _tell_of(self, trial: Trial) -> None:
        """Tell what a trial does, or what has become of it."""
        metric = self.settings.metric
        if trial.value is not None:
            words = f"{metric} {trial.value:.6g}"
        elif trial.state != State.RUNNING:
            words = f"{trial.state}: {trial.reason.strip().splitlines()[-1]}"
        elif trial.reports:
            last = max(trial.reports)
            share = f"{last / self._units:.0%}"
            words = f"{metric} {trial.reports[last]:.6g} after {share} of the tokens"
        else:
            words = ", ".join(
                f"{name} {shown_value(value)}" for name, value in trial.params.items()
            )
            if trial.repeats is not None:
                words = f"trial {trial.repeats} again with seed {trial.seed}"
        self._tell("trial", f"trial {trial.number}: {words}", trial)

    def _check_that_trials_work(self, trials: Sequence[Trial]) -> None:
        """Check that the user's own settings work, and that not trial after trial fails.

        Raises:
            StudyFailed: they do not.
        """
        own = trials[0]
        if own.state not in (State.RUNNING, State.COMPLETE):
            raise StudyFailed(f"trial 0, with your own settings, is {own.state}: {own.reason}")
        last = trials[-MOST_FAILURES:]
        if len(last) == MOST_FAILURES and all(trial.state == State.FAILED for trial in last):
            raise StudyFailed(
                f"{MOST_FAILURES} trials in a row failed, the last one (trial {last[-1].number}) "
                f"with: {last[-1].reason}"
            )
