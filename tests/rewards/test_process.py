"""The process of a reward: what it prints, and that it ends with all that it started."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest

import chronicals
from chronicals.rewards.process import RewardProcess
from process_groups import members, wait_until

SOURCE = str(Path(chronicals.__file__).parent.parent)
TESTS = str(Path(__file__).parent.parent)
SECONDS = 5.0
"""Within which processes are gone."""

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture
def process():
    """Starts the process of an example."""
    started = []

    def start(name):
        started.append(RewardProcess(f"reward_examples:{name}", None))
        assert "needed" in started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.end()


def rows(count=2):
    return {"completions": ["a"] * count}


def test_a_function_does_not_run_in_the_trainers_process(process):
    (value, _) = process("process_of_it").ask(rows(), 5.0)["values"]
    assert value != os.getpid()


def test_what_it_prints_is_not_the_trainers(process, capfd):
    printing = process("printing")
    assert printing.ask(rows(), 5.0)["values"] == [1.0, 1.0]
    assert capfd.readouterr() == ("", "")
    assert wait_until(lambda: printing._said.count(b"\n") == 3, SECONDS)


@needs_proc
@pytest.mark.slow
def test_processes_that_a_hanging_function_started_end_with_it(process):
    hanging = process("starting_others")
    group = hanging._process.pid
    with pytest.raises(ChildProcessError, match="no answer within 0.4 s"):
        hanging.ask(rows(), 0.4)
    assert wait_until(lambda: not members(group), SECONDS)


@pytest.mark.slow
def test_a_question_that_nobody_reads_is_given_up(process):
    """Longer than what a connection holds, to a process that is stopped."""
    stopped = process("letters")
    os.killpg(stopped._process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match="no answer within 0.3 s"):
        stopped.ask({"completions": ["x" * (1 << 24)]}, 0.3)
    assert time.monotonic() - began < SECONDS
    assert stopped.ask(rows(), 5.0)["values"] == [1.0, 1.0]


@needs_proc
def test_it_ends_with_the_trainer():
    program = (
        "import time; from chronicals.rewards.process import RewardProcess; "
        "process = RewardProcess('reward_examples:letters', None); process.start(); "
        "print(process._process.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, TESTS])},
        stdout=subprocess.PIPE,
        text=True,
    )
    group = int(trainer.stdout.readline())
    assert members(group)
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: not members(group), SECONDS)


def test_a_bar_of_progress_does_not_grow_without_end(process):
    process_ = process("showing_progress")
    assert process_.ask(rows(), 5.0)["values"] == [1.0, 1.0]
    with pytest.raises(ChildProcessError, match=r"it ended with status 4: .* 19999$"):
        process_.ask({"completions": ["die"]}, 5.0)
    assert len(process_._said) == 4096


def test_values_of_numpy_are_sent_as_numbers(process):
    asked = {"completions": ["a", "b"], "difficulty": [np.int64(3), np.float32(0.5)]}
    assert process("asking_for").ask(asked, 5.0)["values"] == [3.0, 0.5]


def test_a_value_that_cannot_be_sent_is_named_with_its_column(process):
    with pytest.raises(
        TypeError, match="the column 'difficulty' has a value of date, which cannot"
    ):
        process("asking_for").ask({"completions": ["a"], "difficulty": [date.today()]}, 5.0)


def test_a_thread_that_asks_a_closed_process_does_not_start_it_anew(process):
    closed = process("letters")
    closed.close()
    with pytest.raises(ChildProcessError, match="the run has ended"):
        closed.ask(rows(), 5.0)


@needs_proc
def test_a_wait_ends_when_the_process_is_closed(process):
    hanging = process("starting_others")
    group = hanging._process.pid
    closing = threading.Timer(0.2, hanging.close)
    closing.start()
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match="it was ended|it ended with status -9"):
        hanging.ask(rows(), 60.0)
    assert time.monotonic() - began < SECONDS
    assert wait_until(lambda: not members(group), SECONDS)


@needs_proc
def test_nothing_stays_behind(process):
    before = len(os.listdir("/dev/fd"))
    ended = process("letters")
    group = ended._process.pid
    ended.end()
    ended.end()
    assert wait_until(lambda: not members(group), SECONDS)
    assert len(os.listdir("/dev/fd")) == before


def test_a_process_starts_without_torch():
    """In milliseconds: neither the package nor this room imports it."""
    program = (
        "import sys, chronicals.rewards.worker; "
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": SOURCE}
    )


def test_a_file_is_found_by_its_path_and_imports_its_neighbours(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 3.0\n")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom beside import FACTOR\n\n\n"
        "@dataclass\nclass Scores:\n    factor: float = FACTOR\n\n\n"
        "def scaled(completions):\n    return [Scores().factor] * len(completions)\n"
    )
    process = RewardProcess(f"{tmp_path / 'mine.py'}:scaled", None)
    assert process.start() == {"needed": [], "taken": ["completions"]}
    assert process.ask(rows(), 5.0)["values"] == [3.0, 3.0]
    process.end()
