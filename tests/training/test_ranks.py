"""Two processes train what one does in twice as many micro-batches, and either goes on where the other ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import runs
import tiny
from chronicals.config.config import laid_over

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU")

HERE = Path(__file__).parent
SETTINGS = {
    "batch_size": 1, "num_epochs": 1, "validation_split": 0.1, "eval_steps": 3, "save_steps": 2, "lr_scheduler": "constant",
    "warmup_steps": 0,
}  # fmt: skip
PROGRAM = """
import pathlib, torch, test_ranks
torch.set_num_threads(1)
test_ranks.train(pathlib.Path({folder!r}), 2, **{changes})
"""


def train(folder, accumulation, resume=False, **changes):
    settings = laid_over(SETTINGS, changes)
    return runs.train(folder, tiny.chat_rows(), resume=resume, gradient_accumulation_steps=accumulation, **settings)


def train_by_two(folder, _accumulation, **changes):
    """``train`` in two processes, each of which makes half of the micro-batches."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    program = PROGRAM.format(folder=str(folder), changes=changes)
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent / "src")))
    done = subprocess.run(
        [*started, sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 4)
    return folder


@pytest.mark.parametrize(("first", "then"), [(train_by_two, train), (train, train_by_two)])
def test_two_train_what_one_does(tmp_path, whole, first, then):
    """To the end of the epoch, whose last step is not full."""
    first(tmp_path, 4, max_steps=4)
    then(tmp_path, 4, resume=True)
    steps = torch.tensor(runs.trajectory(whole), dtype=torch.float64)
    assert len(steps) > 4
    torch.testing.assert_close(torch.tensor(runs.trajectory(tmp_path), dtype=torch.float64), steps, rtol=1e-3, atol=0.0)
    ours, theirs = runs.weights(tmp_path), runs.weights(whole)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
