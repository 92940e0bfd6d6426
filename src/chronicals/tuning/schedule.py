"""Runs of a trial: after how many tokens it is compared with others, and with what schedule.

The beginning of a cosine says little about its end, so a trial is compared after whole short
schedules: a run of a ninth of the tokens, one of a third, then the whole (``WholeSchedules``). A
learning rate that stays constant after the warm-up has a true beginning: there one run is compared
as it goes on, before it decays (``Trunk``). Both compare at equal tokens, never at equal steps,
because trials may differ in the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chronicals.config import ConfigurationError, Recipe
from chronicals.tuning.fields import SPEED
from chronicals.tuning.scores import TIMED_STEPS, UNTIMED_STEPS
from chronicals.tuning.settings import StudySettings
from chronicals.tuning.space import Choice, SearchSpace

WHOLE = "run"
"""Folder of a trial's whole run."""

LEAST_STEPS = 10
"""Steps of the shortest schedule from which something is told: fewer are hardly more than a warm-up
of a tenth and a first descent."""

REDUCTION = 3
"""Factor between the lengths of schedules: successive halving's usual one (Li et al., 2018, section
3.6, take 3 or 4)."""

TRUNK_UNITS = 8
"""Intervals of a run that is compared as it goes on."""


@dataclass(frozen=True)
class Budget:
    """Length and batch of a run with the user's own settings.

    Attributes:
        steps: optimizer steps.
        batch_size, gradient_accumulation_steps: fitted to the data.
        learning_rate: the peak.
    """

    steps: int
    batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float

    @property
    def packs(self) -> int:
        """Packs of a run; with the tokens of a pack, its tokens."""
        return self.steps * self.batch_size * self.gradient_accumulation_steps

    def batch_of(self, recipe: Recipe) -> dict[str, int]:
        """Return the batch of a trial: what was set, and of the rest what was fitted to the data.

        A run would fit it to what was set, and other trials then saw other numbers of tokens.
        """
        fitted = {
            name: getattr(self, name) for name in ("batch_size", "gradient_accumulation_steps")
        }
        return {
            name: getattr(recipe, name) if name in recipe.explicit else size
            for name, size in fitted.items()
        }

    def packs_a_step(self, recipe: Recipe) -> int:
        """Return the packs of a step of a trial on one process."""
        return math.prod(self.batch_of(recipe).values())

    def accumulation(self, batch_size: int) -> int:
        """Return the passes of a step with which another batch takes as many packs as the user's own.

        Raises:
            ConfigurationError: the batch does not divide them.
        """
        packs = self.batch_size * self.gradient_accumulation_steps
        if packs % batch_size:
            raise ConfigurationError(
                f"batch_size={batch_size}: does not divide the {packs} packs of a step; leave it out"
            )
        return packs // batch_size

    def steps_of(self, recipe: Recipe) -> int:
        """Return the steps of a trial that sees as many tokens as the user's own run."""
        return max(-(-self.packs // self.packs_a_step(recipe)), 1)


@dataclass(frozen=True)
class Leg:
    """One run of a trial.

    Attributes:
        name: of its folder.
        fields: of its recipe.
        ends_at: units of the schedule at its end.
        reports: units by the step whose evaluation is compared with others as the run goes on.
    """

    name: str
    fields: Mapping[str, Any]
    ends_at: int
    reports: Mapping[int, int] = field(default_factory=dict)


class TrialSchedule(Protocol):
    """Runs of the trials of a study.

    Attributes:
        units: units of a whole trial, after which it is complete.
    """

    @property
    def units(self) -> int:
        """Units of a whole trial, after which it is complete."""

    def legs(self, recipe: Recipe) -> Sequence[Leg]:
        """Return the runs of a trial, in their order."""


@dataclass(frozen=True)
class WholeSchedules:
    """Whole schedules, each ``REDUCTION`` times as long as the one before.

    Attributes:
        budget: of the user's own run.
        units: of the longest; the shortest has one.
    """

    budget: Budget
    units: int

    @classmethod
    def of(cls, budget: Budget, most_packs_a_step: int, pruned: bool) -> WholeSchedules:
        """Return as many schedules as are long enough, at most three."""
        steps = budget.packs // most_packs_a_step
        units = REDUCTION**2 if pruned else 1
        while units > 1 and steps // units < LEAST_STEPS:
            units //= REDUCTION
        return cls(budget, units)

    def legs(self, recipe: Recipe) -> Sequence[Leg]:
        """Return a run for each schedule; the last one is as long as the recipe says."""
        whole = self.budget.steps_of(recipe)
        batch = self.budget.batch_of(recipe)
        legs: list[Leg] = []
        units = 1
        while units < self.units:
            steps = max(round(whole * units / self.units), 1)
            fields: dict[str, Any] = {**batch, "max_steps": steps, "num_epochs": None}
            if "warmup_steps" in recipe.explicit:
                fields["warmup_ratio"] = min(recipe.warmup_steps / whole, 0.99)
            legs.append(Leg(f"short-{units}", fields, units))
            units *= REDUCTION
        return [*legs, Leg(WHOLE, {**batch, **whole_length(recipe, whole)}, self.units)]


@dataclass(frozen=True)
class Trunk:
    """One run, compared at equal tokens between its warm-up and its decay.

    Attributes:
        budget: of the user's own run.
        interval: packs between two evaluations, a multiple of those of any trial's step.
    """

    budget: Budget
    interval: int

    @classmethod
    def of(cls, budget: Budget, packs_a_step: Sequence[int]) -> Trunk:
        """Return the run with about ``TRUNK_UNITS`` evaluations.

        Args:
            budget: of the user's own run.
            packs_a_step: of all batches that trials may have.
        """
        together = math.lcm(*packs_a_step)
        interval = max(round(budget.packs / TRUNK_UNITS / together), 1) * together
        return cls(budget, interval)

    @property
    def units(self) -> int:
        """Evaluations up to the end of the run, which may be shorter than an interval after the last."""
        return max(-(-self.budget.packs // self.interval), 1)

    def legs(self, recipe: Recipe) -> Sequence[Leg]:
        """Return the run, whose evaluations between warm-up and decay are compared."""
        from chronicals.training.step.training_step import warmup_of

        whole = self.budget.steps_of(recipe)
        every = self.interval // self.budget.packs_a_step(recipe)
        config = recipe.config()
        end = whole
        if recipe.lr_scheduler == "wsd":
            end = math.floor(whole * (1 - recipe.wsd_decay_ratio))
        begin = warmup_of(config, whole)
        reports = {
            every * unit: unit
            for unit in range(1, self.units)
            if begin < every * unit <= end and every * unit < whole
        }
        batch = self.budget.batch_of(recipe)
        fields = {**batch, **whole_length(recipe, whole), "eval_steps": every}
        return [Leg(WHOLE, fields, self.units, reports)]


@dataclass(frozen=True)
class TimedSteps:
    """One short run without evaluations, whose steps are timed."""

    budget: Budget
    units: int = 1

    def legs(self, recipe: Recipe) -> Sequence[Leg]:
        """Return the run; a trial with another batch accumulates so that its steps are the same.

        Raises:
            ConfigurationError: its batch does not divide a step.
        """
        size = self.budget.batch_of(recipe)["batch_size"]
        fields = {
            "batch_size": size,
            "max_steps": UNTIMED_STEPS + TIMED_STEPS,
            "num_epochs": None,
            "gradient_accumulation_steps": self.budget.accumulation(size),
            "validation_split": 0.0,
            "validation_data": None,
            "save_steps": None,
        }
        return [Leg(WHOLE, fields, self.units)]


def whole_length(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return the fields by which a run is as long as the user's own."""
    return {"max_steps": steps} if recipe.max_steps is not None else {}


def schedule_of(budget: Budget, settings: StudySettings, space: SearchSpace) -> TrialSchedule:
    """Return the schedule of a study's trials."""
    if settings.metric == SPEED:
        return TimedSteps(budget)
    sizes = _packs_a_step(budget, space)
    own = space.recipe
    tuned = {"lr_scheduler", "wsd_decay_ratio"} & space.dimensions.keys()
    if settings.pruner != "none" and own.lr_scheduler in ("wsd", "constant") and not tuned:
        return Trunk.of(budget, sizes)
    return WholeSchedules.of(budget, max(sizes), settings.pruner != "none")


def _packs_a_step(budget: Budget, space: SearchSpace) -> list[int]:
    """Return the packs of a step of all batches in a space, and of the user's own."""
    values: list[list[int]] = []
    for name in ("batch_size", "gradient_accumulation_steps"):
        dimension = space.dimensions.get(name)
        sizes = {getattr(budget, name)}
        if isinstance(dimension, Choice):
            sizes |= {*dimension.values}
        elif dimension is not None:
            sizes |= {*range(int(dimension.low), int(dimension.high) + 1)}
        values.append(sorted(sizes))
    return [math.prod(sizes) for sizes in itertools.product(*values)]
