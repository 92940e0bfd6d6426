"""Every event of a run is told, ``stop`` ends it, and progress is seen by everybody, whatever
logging they configured.
"""

import io
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import runs
import tiny
from chronicals.training import Callback, ChronicalsTrainer, Interrupted
from chronicals.training.run.progress import PACKAGE_LOGGER, ProgressBar, heard
from chronicals.training.run.run_state import Run
from chronicals.training.step.metrics import StepMetrics

TESTS = Path(__file__).parent.parent
LINE = r"^step {}/40 · loss 2\.5000{} · grad norm 1\.250 · lr 2\.00e-04 · 1,000 tokens/s · epoch 0\.50$"


def unconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that never touched logging; pytest puts a handler of its own on the root
    when a test begins.
    """
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
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("step 43/43 · loss") and " left" not in last


def test_what_a_user_configured_stays_as_it_is(monkeypatch, capsys):
    """At INFO they get the lines through their handler; at WARNING the progress alone is
    printed.
    """
    unconfigure(monkeypatch)
    told = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(told)])
    for level, logged in ((logging.INFO, 1), (logging.WARNING, 0)):
        root.setLevel(level)
        with heard():
            assert not PACKAGE_LOGGER.handlers and PACKAGE_LOGGER.level == logging.NOTSET
            steps(1)
        assert told.getvalue().count("step 1/40") == logged
        assert capsys.readouterr().err.count("step 1/40") == 1 - logged
        told.truncate(0)


def test_afterwards_logging_is_as_before(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with heard():
        PACKAGE_LOGGER.info("within")
        PACKAGE_LOGGER.debug("details")
    PACKAGE_LOGGER.info("after")
    assert (
        capsys.readouterr().err == "within\n"
        and not PACKAGE_LOGGER.handlers
        and PACKAGE_LOGGER.level == logging.NOTSET
    )


def test_other_ranks_tell_warnings_alone(monkeypatch, capsys):
    unconfigure(monkeypatch)
    with heard(first=False):
        PACKAGE_LOGGER.info("twice")
        PACKAGE_LOGGER.warning("wrong")
    assert capsys.readouterr().err == "wrong\n"


@pytest.mark.slow
def test_a_script_that_configures_nothing_sees_its_run(tmp_path):
    program = (
        f"import sys; sys.path[:0] = [{str(TESTS)!r}]; import runs, pathlib; "
        f"runs.train(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("training: 6 steps")]
    assert len([line for line in lines if re.match(r"step \d/6 · loss", line)]) == 6


class Told(Callback):
    """Keeps the events of a run; ``act`` is called with the number of each step that is done."""

    def __init__(self, act=lambda step: None):
        self.events = []
        self.act = act

    def run_began(self, run):
        self.events.append(("run_began", run.step))

    def step_done(self, metrics):
        self.events.append(("step_done", metrics.step))
        self.act(metrics.step)

    def evaluated(self, step, evaluation):
        self.events.append(("evaluated", step))

    def saved(self, step, folder):
        assert (folder / "state.json").exists()
        self.events.append(("saved", step))

    def run_ended(self, run):
        self.events.append((run.outcome, run.error))


@pytest.mark.slow
def test_every_event_is_told_in_order(tmp_path):
    told = Told()
    runs.train(
        tmp_path, callbacks=[told], max_steps=3, validation_split=0.2, eval_steps=2, save_steps=2
    )
    written = told.events.index(("saved", 2))  # by a thread
    assert told.events[:written].count(("evaluated", 2)) == 1 and told.events.pop(written)
    steps = [("step_done", 1), ("step_done", 2), ("evaluated", 2), ("step_done", 3)]
    assert told.events == [
        ("run_began", 0),
        *steps,
        ("evaluated", 3),
        ("saved", 3),
        ("finished", None),
    ]


@pytest.mark.slow
def test_what_ended_a_run_is_told(tmp_path):
    def fail(step):
        raise ValueError("full")

    told = Told(fail)
    with pytest.raises(ValueError, match="full"):
        runs.train(tmp_path, callbacks=[told])
    assert told.events[-1] == ("failed", "ValueError: full")


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in a callback", "in a thread"])
def test_stop_ends_a_run_with_a_checkpoint(tmp_path, elsewhere):
    def stop(step):
        if step == 2:
            if elsewhere:
                thread = threading.Thread(target=trainer.stop)
                thread.start()
                thread.join()
            else:
                trainer.stop()

    told = Told(stop)
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path), callbacks=[told]
    )
    with pytest.raises(Interrupted, match=r"stopped as asked after step 3; .*resume"):
        trainer.train(tiny.chat_rows())
    assert (
        told.events[-2:] == [("saved", 3), ("interrupted", told.events[-1][1])]
        and "stopped as asked" in told.events[-1][1]
    )
    assert trainer.train(tiny.chat_rows(), resume=True).steps == 6


@pytest.mark.slow
def test_stop_without_a_checkpoint_writes_none(tmp_path):
    told = Told(lambda step: trainer.stop(save=False))
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path), callbacks=[told]
    )
    with pytest.raises(Interrupted):
        trainer.train(tiny.chat_rows())
    assert [event for event, _ in told.events] == [
        "run_began",
        "step_done",
        "step_done",
        "interrupted",
    ]
