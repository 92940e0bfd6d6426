"""The tuner, over scripted runs: each a process, none longer than a moment."""

import json
import multiprocessing
import os
import random
import time

import pytest
from scripted import tuner

from chronicals.config import ConfigurationError
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
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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


SHORT = {"trials": 12, "repeats": 1}


def run_to_its_end(folder):
    tuner(folder, **SHORT).run()


@pytest.mark.slow
def test_killed_at_random_moments_it_is_the_study_that_was_not_killed(tmp_path):
    """No trial is lost, done twice, or left running; nor is a process."""
    whole = ended(tuner(tmp_path / "whole", **SHORT))
    rng = random.Random(5)
    fork = multiprocessing.get_context("fork")
    kills = 0
    while True:
        process = fork.Process(target=run_to_its_end, args=(tmp_path / "killed",))
        process.start()
        process.join(rng.uniform(0.05, 0.6) if kills < 20 else 60)
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
    trials = tuner(tmp_path / "killed", **SHORT).study.trials()
    assert what_came(trials) == what_came(whole)
    folders = [path.name for path in (tmp_path / "killed" / "study" / "trials").iterdir()]
    assert sorted(folders) == [trial.name for trial in trials]
    assert State.RUNNING not in {trial.state for trial in trials}


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
    about = json.loads((tuned.study.folder / "study.json").read_text())
    assert about["space"]["learning_rate"] == [1e-5, 0.1, "log"]
