"""``chronicals train --nproc 2``: processes on this machine, started by the command itself."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import tiny
from chronicals.cli.options import without_option
from chronicals.config import ConfigurationError
from chronicals.distributed import launch
from chronicals.distributed.launch import become_launcher
from chronicals.distributed.torchrun import TIME_TO_END, wait_for_processes
from chronicals.training.run.checkpoint import check_checkpoint, checkpoints
from process_groups import wait_until

pytestmark = [pytest.mark.of_file(3), pytest.mark.slow]


@pytest.fixture
def folder(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    return tmp_path


def started(folder, *more):
    given = [
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--batch-size",
        "1",
        "--gradient-accumulation-steps",
        "2",
    ]
    given += [
        "--max-seq-length",
        "128",
        "--max-steps",
        "3",
        "--mixed-precision",
        "fp32",
        "--report-samples",
        "0",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "chronicals.cli", "train", *given],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        text=True,
    )


def command(folder, *more):
    running = started(folder, *more)
    said, _ = running.communicate(timeout=240)
    return running.returncode, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be one card")
def test_two_train_together_what_one_does(folder):
    status, said = command(folder, "--nproc", "2", "--output-dir", "two")
    assert status == 0, said
    assert "2 processes that train together" in said and "OMP_NUM_THREADS" not in said
    status, said = command(
        folder, "--nproc=1", "--output-dir", "one", "--gradient-accumulation-steps", "4"
    )
    assert status == 0 and "that train together" not in said, said
    losses = []
    for name in ("two", "one"):
        lines = (
            json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        )
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be one card")
def test_an_error_of_one_is_the_commands(folder):
    status, said = command(folder, "--nproc", "2", "--output-dir", "two", "--learning-rate", "-1")
    assert status == 1 and "--learning-rate" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be one card")
def test_ctrl_c_saves_and_ends_in_words(folder):
    running = started(
        folder,
        "--nproc",
        "2",
        "--output-dir",
        "two",
        "--max-steps",
        "100000",
        "--learning-rate",
        "1e-6",
    )
    metrics = folder / "two" / "metrics.jsonl"
    assert wait_until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), 120)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 130 and "Traceback" not in said, said
    assert said.count("go on with chronicals train --resume --output-dir two") == 1, said
    (left,) = checkpoints(folder / "two")
    assert check_checkpoint(left) is None


def test_processes_have_time_to_save_and_a_second_signal_is_passed_on():
    """torchrun itself kills them after 30 seconds, and leaves them to themselves where it is
    interrupted again.
    """
    asked = []

    class Again(Exception):
        sigval = signal.SIGTERM

    class Context:
        def close(self, death_sig=None, timeout=30):
            asked.append((death_sig, timeout))
            if len(asked) == 1:
                raise Again

    wait_for_processes(Context, Again)
    Context().close(signal.SIGINT, 30)
    assert (
        asked == [(signal.SIGINT, TIME_TO_END), (signal.SIGTERM, TIME_TO_END)]
        and TIME_TO_END >= 600
    )


def test_it_becomes_torchrun(monkeypatch, let_return):
    began = []
    monkeypatch.setattr(launch.os, "execv", lambda program, words: began.append(words))
    let_return(torch.cuda, device_count=4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    become_launcher(4, ["train", "recipe.yaml"])
    launcher = ["-m", "chronicals.distributed.torchrun", "--standalone", "--nproc-per-node=4"]
    assert began[0][1:] == [*launcher, "-m", "chronicals.cli", "train", "recipe.yaml"]
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    become_launcher(1, ["train"])
    assert len(began) == 1
    with pytest.raises(
        ConfigurationError, match="nproc=5: this machine has 4 cards; give at most as many"
    ):
        become_launcher(5, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ConfigurationError, match="nproc=2: WORLD_SIZE=2 says that 2 processes were started already"
    ):
        become_launcher(2, [])


def test_the_processes_are_not_told_of_it():
    for given in (["--nproc", "2"], ["--nproc=2"]):
        assert without_option(["train", *given, "--model", "m"], "--nproc") == [
            "train",
            "--model",
            "m",
        ]
    assert without_option(["train", "--nprocs", "2"], "--nproc") == ["train", "--nprocs", "2"]
