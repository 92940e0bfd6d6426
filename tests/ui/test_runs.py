"""Runs and their curves, read from the folders of runs."""

import json
import os
import time

import pytest

from chronicals.config import ConfigurationError
from chronicals.ui.jobs import Jobs
from chronicals.ui.metrics import Metrics, smoothed, thinned
from chronicals.ui.panels import rewards_in_words
from chronicals.ui.place import Place
from chronicals.ui.runs import Runs, last_records, run_folders


@pytest.fixture
def runs(tmp_path):
    place = Place(tmp_path.resolve())
    return Runs(place, Jobs(place))


def write_run(root, name, steps=3, **values):
    folder = root / name
    folder.mkdir(parents=True)
    lines = [{"step": n, "loss": 5 / n, "time": 100.0 + n, **values} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_are_found_in_the_root_and_links_are_not_followed(runs, tmp_path):
    write_run(tmp_path, "a")
    folder = write_run(tmp_path, "deep/er/b")
    (folder / "resume.yaml").write_text("model: m\ndata: d\nobjective: dpo\n")
    write_run(tmp_path, "a/checkpoints/step-1/c")
    write_run(tmp_path, ".hidden/d")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = {run.name: run for run in runs.all()}
    assert found.keys() == {"a", "deep/er/b"}
    assert found["deep/er/b"].objective == "dpo"


def test_states_of_runs_from_a_terminal(runs, tmp_path):
    folder = write_run(tmp_path, "a")
    assert runs.named("a").state == "running"
    os.utime(folder / "metrics.jsonl", (0, 0))
    assert runs.named("a").state == "unfinished" and not runs.named("a").can_resume
    (folder / "resume.yaml").write_text("model: m\n")
    for step in (1, 10, 9):
        (folder / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    assert runs.named("a").can_resume
    assert runs.named("a").checkpoints == ["step-00000010", "step-00000009", "step-00000001"]
    (folder / "model").mkdir()
    assert runs.named("a").state == "finished" and not runs.named("a").can_resume


def test_many_checkpoints_do_not_slow_the_list(runs, tmp_path):
    folder = write_run(tmp_path, "a")
    for step in range(3000):
        (folder / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    began = time.perf_counter()
    assert len(list(run_folders(tmp_path))) == 1
    assert time.perf_counter() - began < 0.1
    assert len(runs.named("a").checkpoints) == 3000


def test_a_job_that_has_written_nothing_yet_is_a_run(runs):
    job = runs.jobs.create(runs.jobs.new_folder("sft"), "sft", ["train", "x"], "cpu", "runs/sft-1")
    assert [(run.name, run.state) for run in runs.all()] == [("runs/sft-1", "waiting")]
    assert runs.named("runs/sft-1").job == job
    assert runs.free_folder("sft") == "runs/sft-2"


@pytest.mark.parametrize("name", ["../x", "/etc", "nothing", ""])
def test_what_is_no_run_of_the_root_is_refused(runs, name):
    with pytest.raises(ConfigurationError):
        runs.named(name)


def test_curves_grow_with_their_file_and_a_torn_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    assert not metrics.read_on()
    path.write_text('{"step": 1, "loss": 3.0, "time": 10.0}\n{"step": 2, "lo')
    assert metrics.read_on() and metrics.curves == {"loss": [(1, 3.0)]}
    with path.open("a") as file:
        file.write(
            'ss": 2.0, "time": 12.5, "skipped": false}\nno json\n{"step": 3, "loss": null}\n'
        )
    assert metrics.read_on() and metrics.curves == {"loss": [(1, 3.0), (2, 2.0)]}
    assert not metrics.read_on()
    assert (metrics.step, metrics.value("loss"), metrics.value("x")) == (2, 2.0, None)
    assert (metrics.began, metrics.last) == (10.0, 12.5)


def test_a_resumed_run_replaces_its_curves_without_gap_or_repeat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in range(1, 6)))
    metrics = Metrics(path)
    metrics.read_on()
    aside = tmp_path / "aside"
    aside.write_text("".join(f'{{"step": {n}, "loss": 2.0}}\n' for n in range(1, 8)))
    os.replace(aside, path)
    assert metrics.read_on()
    assert metrics.curves["loss"] == [(n, 2.0) for n in range(1, 8)]
    path.write_text('{"step": 1, "loss": 4.0}\n')  # the same file, cut
    assert metrics.read_on() and metrics.curves["loss"] == [(1, 4.0)]
    path.unlink()
    assert metrics.read_on() and metrics.curves == {} and not metrics.read_on()


def test_ten_thousand_points_are_read_and_thinned_in_a_moment(tmp_path):
    folder = write_run(tmp_path, "a", steps=10_000, grad_norm=1.0)
    metrics = Metrics(folder / "metrics.jsonl")
    began = time.perf_counter()
    metrics.read_on()
    kept = thinned(metrics.curves["loss"])
    assert time.perf_counter() - began < 0.5
    assert len(kept) <= 1000 and kept[0] == (1, 5.0) and kept[-1] == (10_000, 5 / 10_000)


def test_thinning_keeps_what_stands_out():
    points = [(float(n), 1.0) for n in range(5000)]
    points[1234] = (1234.0, 90.0)
    points[4321] = (4321.0, -7.0)
    kept = thinned(points, 100)
    assert len(kept) <= 100 and {points[1234], points[4321]} <= set(kept)
    assert kept == sorted(kept) and thinned(points[:50], 100) == points[:50]


def test_the_mean_of_a_constant_is_the_constant_from_its_first_point():
    assert smoothed([(1, 3.0), (2, 3.0)]) == [(1, pytest.approx(3.0)), (2, pytest.approx(3.0))]
    assert smoothed([(1, 0.0), (2, 1.0)], share=0.5)[1][1] == pytest.approx(2 / 3)


def test_the_last_samples_are_read_and_a_torn_line_is_left_out(tmp_path):
    file = tmp_path / "samples.jsonl"
    assert last_records(file, 2) == []
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n{"pro')
    assert last_records(file, 2) == [{"prompt": "b"}, {"prompt": "c"}]


def test_rewards_of_an_answer_in_words():
    answer = {
        "text": "x",
        "complete": True,
        "reward": 1.25,
        "advantage": -0.5,
        "rewards": {"a": 1.25},
    }
    assert rewards_in_words(answer) == "reward 1.25 · advantage -0.5"
    several = {**answer, "reward": None, "rewards": {"a": 1.0, "b": None}}
    assert rewards_in_words(several) == "advantage -0.5 · a 1"
