"""The tuner, over scripted runs: each a process, none longer than a moment."""

import json
import multiprocessing
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import tuner

from chronicals.config import ConfigurationError, Recipe
from chronicals.tuning import StudyFailed
from chronicals.tuning.trial import State

pytest.importorskip("optuna")


def ended(tuned):
    tuned.run()
    return tuned.study.trials()


@pytest.mark.slow
def test_a_study_finds_what_is_planted(tmp_path):
    tuned = tuner(tmp_path, trials=16, repeats=0)
    trials = ended(tuned)
    assert len(trials) == 16 and trials[0].params["learning_rate"] == 2e-4
    best = min(trials, key=lambda trial: trial.value or 9.0)
    assert best.value < trials[0].value
    assert 3e-4 < best.params["learning_rate"] < 4e-3
    assert all(trial.ended for trial in trials)
    pruned = [trial for trial in trials if trial.state == State.PRUNED]
    assert pruned and all(max(trial.reports) < 3 for trial in pruned)


@pytest.mark.slow
def test_weights_of_trials_are_removed_when_they_end(tmp_path):
    tuned = tuner(tmp_path, trials=2, repeats=0)
    trials = ended(tuned)
    for trial in trials:
        runs = [*tuned.study.folder_of(trial).glob("*/resume.yaml")]
        assert len(runs) == 2
        assert not [*tuned.study.folder_of(trial).glob("*/checkpoints")]
        assert not [*tuned.study.folder_of(trial).glob("*/model")]


@pytest.mark.slow
def test_the_best_run_again_with_other_seeds(tmp_path):
    trials = ended(tuner(tmp_path, trials=6, repeats=2, pruner="none"))
    repeats = [trial for trial in trials if trial.repeats is not None]
    assert {trial.seed for trial in repeats} == {43, 44}
    best = sorted(trials[:6], key=lambda trial: trial.value)[:3]
    assert {trial.repeats for trial in repeats} == {*(trial.number for trial in best), 0}
    assert all(trial.params == trials[trial.repeats].params for trial in repeats)


@pytest.mark.slow
def test_values_that_do_not_work_are_a_result(tmp_path):
    tune = {"learning_rate": [1e-3, 10.0, "log"]}
    trials = ended(tuner(tmp_path, tune, trials=8, repeats=0))
    diverged = [trial for trial in trials if trial.params["learning_rate"] > 0.1]
    assert diverged and all(trial.state == State.DIVERGED for trial in diverged)
    assert "not finite" in diverged[0].reason
    tune = {"lora_rank": [8, 1024]}
    lora = {"use_lora": True, "lora_rank": 8}
    trials = ended(tuner(tmp_path / "b", tune, lora, trials=4, repeats=0))
    assert {trial.params["lora_rank"]: trial.state for trial in trials} == {
        8: State.COMPLETE,
        1024: State.OUT_OF_MEMORY,
    }


@pytest.mark.slow
def test_own_settings_that_fail_end_the_study(tmp_path):
    own = {"learning_rate": 0.5}
    with pytest.raises(StudyFailed, match="trial 0, with your own settings, is diverged"):
        ended(tuner(tmp_path, fields=own, trials=4))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["cosine", "wsd"])
def test_a_metric_that_there_is_not_ends_the_study(tmp_path, scheduler):
    tuned = tuner(tmp_path, fields={"lr_scheduler": scheduler}, metric="speling", trials=4)
    with pytest.raises(StudyFailed, match="evaluations have cross_entropy, loss, perplexity"):
        tuned.run()
    assert [trial.state for trial in tuned.study.trials()] == [State.FAILED]
    assert not runs_alive(tmp_path)


@pytest.mark.slow
def test_a_study_goes_on_after_its_best_was_applied_to_the_recipe(tmp_path):
    first = ended(tuner(tmp_path, trials=3, repeats=0))
    applied = tuner(tmp_path, fields={"learning_rate": 3e-3}, trials=5, repeats=0)
    trials = ended(applied)
    assert len(trials) == 5 and trials[:3] == first
    assert "learning_rate: your own settings are those of trial 0" in [
        e.text for e in applied.poll()
    ]
    assert applied.export(tmp_path / "journal.log") == 5


@pytest.mark.slow
def test_another_study_is_not_mixed_with_the_one_that_is_there(tmp_path):
    ended(tuner(tmp_path, trials=2, repeats=0))
    with pytest.raises(ConfigurationError, match="other settings .learning_rate, weight_decay"):
        ended(tuner(tmp_path, {"weight_decay": [0.0, 0.1]}, trials=2, repeats=0))
    with pytest.raises(ConfigurationError, match="other settings .adam_beta1"):
        ended(tuner(tmp_path, fields={"adam_beta1": 0.8}, trials=2, repeats=0))
    assert len(ended(tuner(tmp_path, trials=3, repeats=0))) == 3


@pytest.mark.slow
def test_two_tuners_do_not_share_a_study(tmp_path):
    tuned = tuner(tmp_path, trials=2)
    with (
        tuned.study.sole_tuner(),
        pytest.raises(ConfigurationError, match="another tuner is working there"),
    ):
        tuned.run()


def alive(pid):
    """A killed process that the system has not collected yet is not alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def runs_alive(folder):
    pids = [int(file.read_text() or 0) for file in folder.rglob("pid")]
    return [pid for pid in pids if pid and alive(pid)]


@pytest.mark.slow
def test_a_stopped_study_leaves_nothing_running_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPTED_SECONDS", "0.3")
    tuned = tuner(tmp_path, trials=3, repeats=0)
    tuned.start()
    while not [*tmp_path.rglob("pid")]:
        time.sleep(0.01)
    tuned.stop()
    assert not tuned.is_running() and not runs_alive(tmp_path)
    assert [trial.state for trial in tuned.study.trials()] == [State.RUNNING]
    events = tuned.poll()
    assert [event.text for event in events if event.kind == "status"] == ["running", "stopped"]
    assert tuned.poll() == []
    monkeypatch.setenv("SCRIPTED_SECONDS", "0")
    tuned.start()
    while tuned.is_running():
        time.sleep(0.01)
    assert [trial.state for trial in tuned.study.trials()] == [State.COMPLETE] * 3
    events = tuned.poll()
    assert [event.text for event in events if event.kind == "status"] == ["running", "finished"]
    told = [event.trial.number for event in events if event.kind == "trial"]
    assert {*told} == {0, 1, 2}


def what_came(trials):
    """Everything about trials but when they ran."""
    return [
        (t.number, dict(t.params), t.seed, t.repeats, t.state, dict(t.reports), t.value)
        for t in trials
    ]


SHORT = {"trials": 10, "repeats": 1}


OUTLASTS_KILLS = {"trials": 24, "repeats": 1}
"""A study that goes on for longer than twenty kills take, on a fast machine, too."""


def run_to_its_end(folder):
    tuner(folder, **OUTLASTS_KILLS).run()


@pytest.mark.slow
def test_killed_at_random_moments_it_is_the_study_that_was_not_killed(tmp_path):
    """No trial is lost, done twice, or left running; nor is a process."""
    whole = ended(tuner(tmp_path / "whole", **OUTLASTS_KILLS))
    rng = random.Random(5)
    fork = multiprocessing.get_context("fork")
    kills = 0
    while True:
        process = fork.Process(target=run_to_its_end, args=(tmp_path / "killed",))
        process.start()
        process.join(rng.uniform(0.05, 0.4) if kills < 20 else 60)
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
        until = time.monotonic() + 5
        while runs_alive(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
        assert not runs_alive(tmp_path)
    assert process.exitcode == 0 and kills == 20
    trials = tuner(tmp_path / "killed", **OUTLASTS_KILLS).study.trials()
    assert what_came(trials) == what_came(whole)
    folders = [path.name for path in (tmp_path / "killed" / "study" / "trials").iterdir()]
    assert sorted(folders) == [trial.name for trial in trials]
    assert State.RUNNING not in {trial.state for trial in trials}


@pytest.mark.slow
def test_a_report_that_nobody_has_judged_yet_is_judged_first(tmp_path):
    """The tuner was killed between a report and what follows from it."""
    tuned = tuner(tmp_path, trials=14, repeats=0)
    trials = ended(tuned)
    last = max(t.number for t in trials if t.state == State.PRUNED)
    for trial in trials[last:]:
        shutil.rmtree(tuned.study.folder_of(trial))
    reported = replace(trials[last], state=State.RUNNING, reason="", ended=None)
    tuned.study.add(reported)
    again = ended(tuner(tmp_path, trials=14, repeats=0))
    assert what_came(again) == what_came(trials)
    assert not [*tuned.study.folder_of(reported).glob("run")]


@pytest.mark.slow
def test_what_a_kill_left_of_a_new_folder_is_removed(tmp_path):
    ended(tuner(tmp_path, trials=2, repeats=0))
    left = tmp_path / "study" / "trials" / ".0002"
    left.mkdir()
    (left / "trial.json").write_text('{"torn')
    trials = ended(tuner(tmp_path, trials=3, repeats=0))
    assert [trial.number for trial in trials] == [0, 1, 2] and not left.exists()


@pytest.mark.slow
def test_all_trials_share_seed_and_held_out_rows(tmp_path):
    tuned = tuner(tmp_path, trials=3, repeats=1, fields={"seed": 7})
    ended(tuned)
    import yaml

    read = [yaml.safe_load(file.read_text()) for file in tmp_path.rglob("resume.yaml")]
    assert {one["validation_seed"] for one in read} == {7}
    assert {one["seed"] for one in read} == {7, 8}
    assert not any("tune" in one and one["tune"] for one in read)
    assert all(trial.fields == trial.params for trial in tuned.study.trials())
    about = json.loads((tuned.study.folder / "study.json").read_text())
    assert about["space"]["learning_rate"] == [1e-5, 0.1, "log"]
    assert about["settings"]["direction"] == "minimize"


@pytest.mark.slow
def test_the_fastest_settings_compute_the_same_steps(tmp_path):
    tune = {"batch_size": [1, 2, 4], "use_fp8": [True, False], "metric": "tokens_per_second"}
    own = {"batch_size": 2, "use_fp8": False, "validation_split": 0.0}
    tuned = tuner(tmp_path, tune, own, trials=10)
    trials = ended(tuned)
    assert len(trials) == 6  # all combinations
    for trial in trials:
        if trial.params["use_fp8"]:
            assert trial.state == State.REFUSED and "its loss deviates by 5.0%" in trial.reason
        else:
            assert trial.value == 100.0 * trial.params["batch_size"]
    assert {trial.repeats for trial in trials} == {None}
    about = json.loads((tuned.study.folder / "study.json").read_text())
    assert about["settings"]["direction"] == "maximize"
    results = tuned.results()
    assert results.is_better and results.best[0].trial.params["batch_size"] == 4
    said = tuned.apply(tmp_path / "recipe.yaml")
    assert "batch_size=4" in said and "gradient_accumulation_steps=1" in said


@pytest.mark.slow
def test_a_run_with_a_constant_rate_is_given_up_as_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPTED_SECONDS", "0.02")
    own = {"lr_scheduler": "wsd", "learning_rate": 1e-3}
    tuned = tuner(tmp_path, fields=own, trials=14, repeats=0)
    trials = ended(tuned)
    pruned = [trial for trial in trials if trial.state == State.PRUNED]
    assert pruned
    for trial in pruned:
        folder = tuned.study.folder_of(trial)
        assert [path.name for path in folder.iterdir() if path.is_dir()] == ["run"]
        assert not runs_alive(folder) and max(trial.reports) < 8
    best = min(trial.value for trial in trials if trial.value is not None)
    assert min(min(trial.reports.values()) for trial in pruned) > best


@pytest.mark.slow
def test_what_the_plan_drops_is_not_run(tmp_path, monkeypatch):
    def too_large(recipe):
        return "it would hold 99 GiB" if recipe.weight_decay > 0.25 else None

    monkeypatch.setattr("chronicals.tuning.execution.why_too_large", too_large)
    tuned = tuner(tmp_path, trials=6, repeats=0)
    trials = ended(tuned)
    dropped = [trial for trial in trials if trial.params["weight_decay"] > 0.25]
    assert dropped and {trial.state for trial in dropped} == {State.TOO_LARGE}
    assert not any([*tuned.study.folder_of(trial).glob("run")] for trial in dropped)
    assert len(trials) - len(dropped) == 6  # they do not count


@pytest.mark.slow
def test_a_space_in_which_nothing_fits_comes_to_an_end(tmp_path, monkeypatch):
    def too_large(recipe):
        return None if recipe.weight_decay == 0.0 else "it would hold 99 GiB"

    monkeypatch.setattr("chronicals.tuning.execution.why_too_large", too_large)
    trials = ended(tuner(tmp_path, trials=4, repeats=0))
    assert [trial.state for trial in trials] == [State.COMPLETE, *[State.TOO_LARGE] * 4]


@pytest.mark.slow
def test_the_best_settings_are_written_into_the_recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    text = "model: m\ndata: d\nvalidation_split: 0.1\nseed: 42  # mine\n"
    file.write_text(text)
    tuned = tuner(tmp_path, trials=10, repeats=1)
    ended(tuned)
    said = tuned.apply(file)
    best = tuned.results().best[0]
    assert said.startswith(f"written to {file}: learning_rate=")
    lines = file.read_text().removeprefix(text).splitlines()
    assert len(lines) == 4 and lines[0] == lines[2]
    number, own = best.trial.number, tuned.results().own
    assert lines[0] == f"# tuned: study study, trial {number}, loss {best} (before: {own})"
    written = Recipe.from_yaml(file)
    assert {name: getattr(written, name) for name in best.trial.params} == best.trial.params
    assert written.explicit == {"model", "data", "validation_split", "seed", *best.trial.params}


@pytest.mark.slow
def test_settings_that_are_no_better_are_not_written(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: d\nvalidation_split: 0.1\n")
    before = file.read_text()
    tuned = tuner(tmp_path, fields={"learning_rate": 1e-3, "weight_decay": 0.1}, trials=3)
    ended(tuned)
    assert tuned.apply(file).startswith("nothing is written: ")
    assert file.read_text() == before
