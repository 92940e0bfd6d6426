"""Runs of a trial, and the tokens after which it is compared with others."""

import pytest
from scripted import recipe

from chronicals.config import ConfigurationError
from chronicals.tuning.fields import SPEED
from chronicals.tuning.schedule import Budget, Trunk, WholeSchedules, schedule_of
from chronicals.tuning.settings import StudySettings
from chronicals.tuning.space import SearchSpace

BUDGET = Budget(steps=180, batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-4)


def schedule(tmp_path, tuned=None, budget=BUDGET, own=(), **settings):
    settings = StudySettings(**{"metric": "loss", **settings})
    made = recipe(tmp_path, **dict(own))
    made = made.fitted(  # as the tuner does
        batch_size=budget.batch_size,
        gradient_accumulation_steps=budget.gradient_accumulation_steps,
    )
    space = SearchSpace.of(tuned or {"learning_rate": [1e-5, 1e-3, "log"]}, made, settings.metric)
    return schedule_of(budget, settings, space), space


def test_a_cosine_is_compared_after_whole_short_schedules(tmp_path):
    made, space = schedule(tmp_path, own={"max_steps": 180, "warmup_steps": 18})
    legs = made.legs(space.recipe)
    assert [leg.ends_at for leg in legs] == [1, 3, 9] and made.units == 9
    assert [leg.fields.get("max_steps") for leg in legs] == [20, 60, 180]
    assert [leg.fields.get("warmup_ratio") for leg in legs] == [0.1, 0.1, None]
    assert all(not leg.reports for leg in legs)


def test_the_whole_run_is_as_long_as_the_recipe_says(tmp_path):
    made, space = schedule(tmp_path, own={"num_epochs": 2})
    *_, whole = made.legs(space.recipe)
    assert "max_steps" not in whole.fields and "num_epochs" not in whole.fields


@pytest.mark.parametrize("steps, units", [(9, 1), (29, 1), (30, 3), (89, 3), (90, 9)])
def test_a_schedule_has_steps_enough(tmp_path, steps, units):
    made, _ = schedule(tmp_path, budget=Budget(steps, 2, 2, 1e-4))
    assert isinstance(made, WholeSchedules) and made.units == units


def test_trials_see_the_same_tokens_whatever_their_batch(tmp_path):
    tuned = {"batch_size": [1, 2, 8]}
    made, space = schedule(tmp_path, tuned, own={"max_steps": 180})
    for size in (1, 2, 8):
        legs = made.legs(space.recipe_of({"batch_size": size}))
        packs = [leg.fields["max_steps"] * size * 2 for leg in legs]
        assert packs == [240, 720], size  # of 22 steps a ninth would be too few
        assert [leg.ends_at for leg in legs] == [1, 3]


def test_the_batch_of_a_trial_is_not_fitted_anew(tmp_path):
    for own in ({"max_steps": 180}, {"lr_scheduler": "wsd", "max_steps": 180}):
        made, space = schedule(tmp_path, {"batch_size": [1, 2, 8]}, own=own)
        for leg in made.legs(space.recipe_of({"batch_size": 8})):
            assert leg.fields["batch_size"] == 8 and leg.fields["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize("scheduler", ["wsd", "constant"])
def test_a_constant_rate_is_compared_as_it_goes_on(tmp_path, scheduler):
    """After the warm-up and before the decay, at equal tokens."""
    own = {"lr_scheduler": scheduler, "max_steps": 180, "warmup_ratio": 0.2}
    tuned = {"batch_size": [1, 2, 4]}
    made, space = schedule(tmp_path, tuned, own=own)
    assert isinstance(made, Trunk)
    compared = set()
    for size in (1, 2, 4):
        (leg,) = made.legs(space.recipe_of({"batch_size": size}))
        packs = {step * size * 2 for step in leg.reports}
        compared.add(tuple(sorted((step * size * 2, unit) for step, unit in leg.reports.items())))
        end = 720 * 0.8 if scheduler == "wsd" else 720
        assert all(0.2 * 720 < pack <= end for pack in packs)
        assert all(step % leg.fields["eval_steps"] == 0 for step in leg.reports)
        assert leg.ends_at == made.units
    assert len(compared) == 1 and len(*compared) >= 4


@pytest.mark.parametrize(
    "tuned", [{"lr_scheduler": ["wsd", "cosine"]}, {"wsd_decay_ratio": [0.1, 0.2]}]
)
def test_schedules_that_differ_are_compared_whole(tmp_path, tuned):
    made, _ = schedule(tmp_path, tuned, own={"lr_scheduler": "wsd"})
    assert isinstance(made, WholeSchedules)


def test_without_a_pruner_there_is_one_run(tmp_path):
    for own in ({}, {"lr_scheduler": "wsd"}):
        made, space = schedule(tmp_path, own=own, pruner="none")
        assert len(made.legs(space.recipe)) == 1


def test_timed_steps_are_the_same_whatever_the_batch(tmp_path):
    own = {"validation_split": 0.1, "eval_steps": 5}
    made, space = schedule(tmp_path, {"batch_size": [1, 4, 8]}, own=own, metric=SPEED)
    for size in (1, 4):
        (leg,) = made.legs(space.recipe_of({"batch_size": size}))
        assert leg.fields["gradient_accumulation_steps"] * size == 4
        assert leg.fields["max_steps"] >= 30 and leg.fields["validation_split"] == 0.0
    with pytest.raises(ConfigurationError, match="batch_size=8: does not divide the 4 packs"):
        made.legs(space.recipe_of({"batch_size": 8}))
