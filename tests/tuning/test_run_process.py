"""Processes of runs, and the files that they write."""

import json
import os
import sys

import pytest

from chronicals.training.errors import TrainingError
from chronicals.training.run.lock import locked
from chronicals.tuning.run_process import MetricsTail, RunProcess, wait_until_free
from chronicals.tuning.trial import State


def test_a_torn_line_waits_until_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.look() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.look() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.look() == [{"step": 1}, {"step": 2}]


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(9)))
    tail = MetricsTail(path)
    assert len(tail.look()) == 9
    (tmp_path / "new").write_text('{"step": 0}\n')
    os.replace(tmp_path / "new", path)
    assert tail.look() == [{"step": 0}]


def outcome(tmp_path, program):
    process = RunProcess(tmp_path, tmp_path / "log.txt", [sys.executable, "-c", program])
    while not process.ended():
        pass
    process.stop(save=False)  # it has ended already
    return process.failure()


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("error out of memory on cuda:0 (80 GiB)", State.OUT_OF_MEMORY),
        ("To start it all the same, set --no-check-memory", State.OUT_OF_MEMORY),
        ("error step 3: gradient norm nan, loss nan: not finite.", State.DIVERGED),
        ("error held-out loss after step 9: nan, not a number", State.DIVERGED),
        ("error weight_decay: -1: must be positive", State.FAILED),
    ],
)
def test_what_a_run_failed_by(tmp_path, said, state):
    found, words = outcome(tmp_path, f"print({said!r}); raise SystemExit(1)")
    assert (found, words) == (state, said)


def test_a_run_that_was_killed_ran_out_of_host_memory(tmp_path):
    found, words = outcome(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert found == State.OUT_OF_MEMORY and "host memory" in words


def test_words_of_an_earlier_attempt_do_not_count(tmp_path):
    (tmp_path / "log.txt").write_text("out of memory\n")
    assert outcome(tmp_path, "raise SystemExit(1)") == (State.FAILED, "ended with status 1")
    assert outcome(tmp_path, "print(1)") is None


def test_a_run_waits_until_the_one_before_has_let_go(tmp_path, monkeypatch):
    held = locked(tmp_path)
    held.__enter__()
    looks = []

    def let_go(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr("chronicals.tuning.run_process.time.sleep", let_go)
    wait_until_free(tmp_path)
    assert len(looks) == 3
    monkeypatch.setattr("chronicals.tuning.run_process.FREE_SECONDS", 0.0)
    with locked(tmp_path), pytest.raises(TrainingError, match="another process writes this run"):
        wait_until_free(tmp_path)
