"""Jobs: processes that outlive who started them, and what is known of them from files."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from chronicals.ui.jobs import JOB, LAUNCHED, STARTED, Job, Jobs, command_of, typed_command
from chronicals.ui.place import Place, read_record, write_record
from chronicals.ui.processes import ask_to_stop, is_running, start_time
from chronicals.ui.queues import Queues


@pytest.fixture
def jobs(tmp_path):
    return Jobs(Place(tmp_path.resolve()))


def job_that_runs(jobs, code, card="cpu", output="") -> Job:
    """A job whose command is a line of Python."""
    job = jobs.create(jobs.new_folder("test"), "test", ["train"], card, output)
    record = read_record(job.folder / JOB)
    write_record(job.folder / JOB, {**record, "command": [sys.executable, "-c", code]})
    return job


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_job_writes_its_output_and_its_end_to_files(jobs):
    job = job_that_runs(jobs, "import os; print('a' * 2**20); print(os.environ['X'], os.getcwd())")
    record = read_record(job.folder / JOB)
    write_record(job.folder / JOB, {**record, "environment": {"X": "y"}})
    assert job.state == "waiting"
    job.launch().wait(20)
    assert job.state == "finished" and job.code == 0
    assert job.log.read_text().splitlines()[-1] == f"y {jobs.place.root}"
    assert job.log.stat().st_size > 2**20


@pytest.mark.slow
def test_a_failed_job_tells_its_reason(jobs):
    code = "import sys; print('step 1'); print('error data: no such file'); sys.exit(1)"
    job = job_that_runs(jobs, code)
    job.launch().wait(20)
    assert job.state == "failed" and job.reason() == "error data: no such file"


@pytest.mark.slow
def test_a_command_that_is_not_there_fails_and_says_so(jobs):
    job = job_that_runs(jobs, "")
    record = read_record(job.folder / JOB)
    write_record(job.folder / JOB, {**record, "command": ["/no/such/program"]})
    job.launch().wait(20)
    assert job.state == "failed" and "/no/such/program" in job.reason()


@pytest.mark.slow
def test_a_job_outlives_the_process_that_started_it(jobs):
    job = job_that_runs(jobs, "import time; time.sleep(30)")
    starter = (
        "import os, signal; from pathlib import Path; from chronicals.ui.jobs import Job\n"
        f"Job.of(Path({str(job.folder)!r})).launch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", starter], check=False, start_new_session=True)
    assert ended.returncode == -signal.SIGKILL
    until(lambda: job.state == "running")
    job.stop()
    until(lambda: job.state == "stopped")


@pytest.mark.slow
def test_the_keeper_stays_when_its_group_is_interrupted_and_the_command_is_told(jobs):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True); time.sleep(30)"
    )
    job = job_that_runs(jobs, code)
    keeper = job.launch()
    until(lambda: job.log.exists() and b"ready" in job.log.read_bytes())
    os.killpg(keeper.pid, signal.SIGTERM)
    keeper.wait(20)
    assert job.code == 130 and job.state == "stopped"


def test_a_number_that_was_given_anew_is_another_process():
    began = start_time(os.getpid())
    assert is_running(os.getpid(), began)
    assert not is_running(os.getpid(), "1") and not ask_to_stop(os.getpid(), "1")
    process = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: start_time(process.pid) is None)  # a zombie has ended
    process.wait()


def test_a_job_whose_end_nobody_saw_has_failed(jobs):
    job = job_that_runs(jobs, "")
    gone = {"pid": 1, "pid_began": "0", "keeper": 1, "keeper_began": "0", "time": 0.0}
    write_record(job.folder / STARTED, gone)
    assert job.state == "failed" and job.code is None
    other = job_that_runs(jobs, "")
    (other.folder / LAUNCHED).touch()
    assert other.state == "starting"
    os.utime(other.folder / LAUNCHED, (0, 0))
    assert other.state == "failed"


def test_a_job_is_launched_once(jobs):
    job = job_that_runs(jobs, "")
    (job.folder / LAUNCHED).touch()
    assert job.launch() is None


def test_the_command_that_is_shown_is_the_one_that_runs(jobs):
    job = jobs.create(jobs.new_folder("sft"), "sft", ["train", "a b.yaml"], "1")
    record = json.loads((job.folder / JOB).read_text())
    assert job.shown == typed_command(["train", "a b.yaml"]) == "chronicals train 'a b.yaml'"
    assert record["command"] == command_of(["train", "a b.yaml"])
    assert record["command"][1:3] == ["-m", "chronicals.cli"]
    assert record["environment"]["CUDA_VISIBLE_DEVICES"] == "1"


def test_names_of_jobs_are_no_paths(jobs):
    job = job_that_runs(jobs, "")
    assert jobs.named(job.name) == job
    for name in ("..", ".", "", f"../jobs/{job.name}", "x"):
        assert jobs.named(name) is None


@pytest.mark.slow
def test_a_card_has_one_job_at_a_time_and_the_others_wait_in_order(jobs):
    queues = Queues(jobs)
    made = [
        job_that_runs(jobs, "import time; time.sleep(30)", card) for card in ("0", "0", "0", "1")
    ]
    for job in made:
        queues.add(job)
    made[1].stop()  # before it began: it never runs
    queues.advance()
    queues.advance()
    assert [job.is_alive for job in made] == [True, False, False, True]
    assert queues.waiting()["0"] == [made[1].name, made[2].name]
    anew = Queues(jobs)  # another server finds the same
    until(lambda: made[0].state == "running")
    made[0].stop()
    until(lambda: made[0].state == "stopped")
    anew.advance()
    assert made[1].state == "stopped" and made[2].is_alive and anew.waiting()["0"] == []
    until(lambda: made[2].state == "running" and made[3].state == "running")
    for job in made[2:]:
        job.stop()
        until(lambda job=job: job.state == "stopped")
