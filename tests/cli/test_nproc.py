"""``chronicals train --nproc 2``: processes on this machine, started by the command itself."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tiny
from chronicals.cli.options import without_option
from chronicals.config import ConfigurationError
from chronicals.distributed import launch
from chronicals.distributed.launch import become_launcher


@pytest.fixture
def folder(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()))
    return tmp_path


def command(folder, *more):
    given = ["--model", "base", "--data", "rows.jsonl", "--batch-size", "1", "--gradient-accumulation-steps", "2"]
    given += ["--max-seq-length", "128", "--max-steps", "3", "--mixed-precision", "fp32", "--report-samples", "0", *more]
    ended = subprocess.run(
        [sys.executable, "-m", "chronicals.cli", "train", *given], cwd=folder, capture_output=True, text=True, timeout=240,
        env={**{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be one card")
def test_two_train_together_what_one_does(folder):
    status, said = command(folder, "--nproc", "2", "--output-dir", "two")
    assert status == 0, said
    assert "2 processes that train together" in said and "OMP_NUM_THREADS" not in said
    status, said = command(folder, "--nproc=1", "--output-dir", "one", "--gradient-accumulation-steps", "4")
    assert status == 0 and "that train together" not in said, said
    losses = []
    for name in ("two", "one"):
        lines = (json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 3


def test_an_error_of_one_is_the_commands(folder):
    status, said = command(folder, "--nproc", "2", "--output-dir", "two", "--learning-rate", "-1")
    assert status == 1 and "--learning-rate" in said


def test_it_becomes_torchrun(monkeypatch):
    began = []
    monkeypatch.setattr(launch.os, "execv", lambda program, words: began.append(words))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    become_launcher(4, ["train", "recipe.yaml"])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    assert began[0][1:] == [*launcher, "-m", "chronicals.cli", "train", "recipe.yaml"]
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    become_launcher(1, ["train"])
    assert len(began) == 1
    with pytest.raises(ConfigurationError, match="nproc=5: this machine has 4 cards; give at most as many"):
        become_launcher(5, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="nproc=2: WORLD_SIZE=2 says that 2 processes were started already"):
        become_launcher(2, [])


def test_the_processes_are_not_told_of_it():
    for given in (["--nproc", "2"], ["--nproc=2"]):
        assert without_option(["train", *given, "--model", "m"], "--nproc") == ["train", "--model", "m"]
    assert without_option(["train", "--nprocs", "2"], "--nproc") == ["train", "--nprocs", "2"]
