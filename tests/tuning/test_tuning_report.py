"""Report and export of a study."""

import math

import pytest

from chronicals.config import ConfigurationError, Recipe
from chronicals.tuning.journal import export
from chronicals.tuning.report import LEAST_FOR_IMPORTANCE, write_report
from chronicals.tuning.search import Search
from chronicals.tuning.settings import StudySettings
from chronicals.tuning.space import Choice, Interval, SearchSpace
from chronicals.tuning.study import Study
from chronicals.tuning.trial import State, Trial

optuna = pytest.importorskip("optuna")

TUNE = {"learning_rate": [1e-5, 1e-2, "log"], "lr_scheduler": ["cosine", "linear"]}


def study(tmp_path, complete):
    """A study with so many complete trials, one that was pruned and one that did not fit."""
    made = Study(tmp_path / "found")
    made.folder.mkdir()
    made.begin({"space": TUNE})
    recipe = Recipe(model="m", data="d")
    search = Search(SearchSpace.of(TUNE, recipe, "loss"), StudySettings(metric="loss"), 42, 3)
    trials = []
    for number in range(complete):
        params = search.next_params(trials)
        value = abs(math.log10(params["learning_rate"]) + 3)
        reports = {1: value + 1, 3: value}
        trials.append(
            Trial(number, params, 42, None, State.COMPLETE, reports, value, began=1.0, ended=3.5)
        )
    params = {"learning_rate": 1e-4, "lr_scheduler": "linear"}
    trials += [
        Trial(complete, params, 42, state=State.PRUNED, reports={1: 9.0}, reason="<b>", ended=1.0),
        Trial(complete + 1, params, 42, state=State.OUT_OF_MEMORY, reason="full", ended=1.0),
        Trial(complete + 2, trials[0].params, 43, 0, State.COMPLETE, {3: 1.5}, 1.5, ended=1.0),
    ]
    for trial in trials:
        made.add(trial)
    return made, search


def page(tmp_path, complete):
    write_report(*study(tmp_path, complete))
    return (tmp_path / "found" / "report.html").read_text()


@pytest.mark.slow
def test_the_report_has_all_trials_and_what_is_best(tmp_path):
    text = page(tmp_path, 4)
    assert "6 (4 complete, 1 pruned, 1 out of memory)" in text
    assert "score of each trial" in text and "values and score of each trial" in text
    assert "6 (repeats 0)" in text and "full" in text
    assert "<b>" not in text and "&lt;b&gt;" in text
    assert f"Shown from {LEAST_FOR_IMPORTANCE} complete trials on; there are 4" in text
    assert not (tmp_path / "found" / ".report.html").exists()


@pytest.mark.slow
def test_importance_is_shown_from_enough_trials(tmp_path):
    text = page(tmp_path, LEAST_FOR_IMPORTANCE)
    assert "Shown from" not in text
    rows = text.partition("share of what the score depends on")[2]
    assert rows.index("learning_rate") < rows.index("lr_scheduler")


def test_a_study_without_a_score_has_a_report(tmp_path):
    made = Study(tmp_path)
    made.begin({})
    space = SearchSpace.of(TUNE, Recipe(model="m", data="d"), "loss")
    write_report(made, Search(space, StudySettings(metric="loss"), 42, 1))
    assert "there are 0" in (tmp_path / "report.html").read_text()


def test_heights_of_values():
    rate = Interval(1e-4, 1e-2, "log")
    assert rate.height(1e-3) == pytest.approx(0.5)
    assert Interval(0.0, 4.0, "linear").height(1.0) == 0.25
    assert Choice(("a", "b", "c")).height("c") == 1.0
    assert math.isnan(Choice(("a", "b")).height("z")) and math.isnan(rate.height(None))
    assert math.isnan(rate.height(0.0))


@pytest.mark.slow
def test_optuna_reads_the_export(tmp_path):
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    made, search = study(tmp_path, 6)
    file = tmp_path / "study.log"
    assert export(made, search, file) == 8
    read = optuna.load_study(
        study_name="found", storage=JournalStorage(JournalFileBackend(str(file)))
    )
    assert read.best_value == min(t.value for t in made.trials() if t.repeats is None and t.value)
    assert [trial.state.name for trial in read.trials[-2:]] == ["PRUNED", "PRUNED"]
    assert [trial.constraints.get("works", 0.0) for trial in read.trials[-2:]] == [0.0, 1.0]
    assert read.trials[6].intermediate_values == {1: 9.0}
    with pytest.raises(ConfigurationError, match="exists already"):
        export(made, search, file)
