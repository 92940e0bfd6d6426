"""Progress is seen by everybody, whatever logging they configured or not."""

import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chronicals.training.callbacks import ProgressBar
from chronicals.training.heard import OURS, heard
from chronicals.training.metrics import StepMetrics
from chronicals.training.run import Run

TESTS = Path(__file__).parent.parent
LINE = r"^step {}/40 · loss 2\.5000 · grad norm 1\.250 · lr 2\.00e-04 · epoch 0\.50 · 1,000 tokens/s · 39\.1% trainable{}$"


def unconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that never touched logging; pytest puts a handler of its own on the root when a test begins."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)


def steps(count: int, total: int = 40) -> None:
    bar = ProgressBar()
    run = Run(total, Path("run"), trainable_share=0.391)
    bar.run_began(run)
    for step in range(1, count + 1):
        bar.step_done(StepMetrics(step, 2.5, 1.25, 2e-4, 100, 50, 0.9, 1000.0, 0.5, False, 0.0))
    bar.run_ended(run)


def test_a_line_has_the_rate_the_epoch_and_the_time_left(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with heard():
        steps(4)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and re.match(LINE.format(1, ""), lines[0])
    assert re.match(LINE.format(2, r" · \d+:\d\d:\d\d left"), lines[1])


def test_the_last_step_is_told(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with heard():
        steps(43, total=43)
    assert capsys.readouterr().err.splitlines()[-1].startswith("step 43/43 · loss")


def test_what_a_user_configured_stays_as_it_is(monkeypatch, capsys):
    """At INFO they get the lines through their handler; at WARNING the progress alone is printed."""
    unconfigure(monkeypatch)
    told = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(told)])
    for level, logged in ((logging.INFO, 1), (logging.WARNING, 0)):
        root.setLevel(level)
        with heard():
            assert not OURS.handlers and OURS.level == logging.NOTSET
            steps(1)
        assert told.getvalue().count("step 1/40") == logged
        assert capsys.readouterr().err.count("step 1/40") == 1 - logged
        told.truncate(0)


def test_afterwards_logging_is_as_before(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with heard():
        OURS.info("within")
        OURS.debug("details")
    OURS.info("after")
    assert capsys.readouterr().err == "within\n" and not OURS.handlers and OURS.level == logging.NOTSET


def test_other_ranks_tell_warnings_alone(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with heard(first=False):
        OURS.info("twice")
        OURS.warning("wrong")
    assert capsys.readouterr().err == "wrong\n"


def test_a_script_that_configures_nothing_sees_its_run(tmp_path):
    program = f"import sys; sys.path[:0] = [{str(TESTS)!r}]; import runs, pathlib; runs.train(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("training: 6 steps")]
    assert len([line for line in lines if re.match(r"step \d/6 · loss", line)]) == 6
