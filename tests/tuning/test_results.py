"""What a study found: means over seeds, and whether chance explains the difference."""

import pytest

from chronicals.tuning.fields import SPEED
from chronicals.tuning.results import results_of
from chronicals.tuning.settings import StudySettings
from chronicals.tuning.trial import State, Trial


def trials(*scores):
    """Trials of the search, and their repeats: a row of scores by seed for each."""
    searched = [
        Trial(number, {}, 42, state=State.COMPLETE, value=row[0])
        for number, row in enumerate(scores)
    ]
    repeats = [
        Trial(0, {}, 42 + seed, repeats=number, state=State.COMPLETE, value=value)
        for number, row in enumerate(scores)
        for seed, value in enumerate(row[1:], 1)
    ]
    return [*searched, *repeats]


def found(*scores, **settings):
    return results_of(StudySettings(**{"metric": "loss", **settings}), trials(*scores))


def test_a_difference_in_all_seeds_is_one():
    results = found((2.0, 2.1, 1.9), (1.5, 1.61, 1.4))
    assert results.is_better
    first = results.best[0]
    assert first.trial.number == 1 and str(first) == "1.5033 ± 0.1050"


def test_a_difference_that_seeds_explain_is_none():
    results = found((2.0, 2.1, 1.9), (1.9, 2.12, 1.93))
    assert results.why_no_different() == "the best are no different from yours, by 3 seeds each"


def test_the_best_over_all_seeds_is_first():
    results = found((2.0, 2.0, 2.0), (1.0, 1.9, 1.9), (1.2, 1.3, 1.1))
    assert [result.trial.number for result in results.best] == [2, 1, 0]


def test_own_settings_may_be_the_best():
    assert found((1.0, 1.0), (2.0, 2.0)).why_no_different() == "your own settings are the best"


def test_one_seed_tells_nothing_of_chance_but_a_speed_does():
    assert "one seed does not tell" in found((2.0,), (1.0,)).why_no_different()
    assert found((100.0,), (120.0,), metric=SPEED).is_better


def test_larger_may_be_better():
    results = found((0.5, 0.52, 0.49), (0.8, 0.82, 0.79), metric="rewards/accuracies")
    assert results.is_better and results.best[0].trial.number == 1


@pytest.mark.parametrize("states", [[], [State.RUNNING], [State.FAILED]])
def test_nothing_is_found_before_own_settings_have_a_score(states):
    running = [Trial(number, {}, 42, state=state) for number, state in enumerate(states)]
    assert results_of(StudySettings(metric="loss"), running) is None


def test_a_repeat_that_failed_is_no_score():
    failed = Trial(9, {}, 44, repeats=1, state=State.FAILED)
    results = results_of(StudySettings(metric="loss"), [*trials((2.0, 2.1), (1.0, 1.1)), failed])
    assert len(results.best[0].scores) == 2
