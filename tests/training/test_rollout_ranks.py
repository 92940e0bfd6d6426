"""Two processes draw, reward and train what one does; a group is never divided."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mixtures
import rollouts
import runs
import tiny
import two_processes
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.training.rollouts.rollout_run import check_rollouts
from chronicals.training.rollouts.samples import read_samples

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
)

PROGRAM = """
import pathlib, torch, test_rollout_ranks
torch.set_num_threads(1)
test_rollout_ranks.train(pathlib.Path({folder!r}), {variant!r})
"""

VARIANTS = {
    "several updates": {
        "section": {"updates": 2, "iterations": 2, "prompts": 2, "importance": "token_truncate"}
    },
    "LoRA with a reference": {
        "section": {"beta": 0.1, "loss": "grpo", "level": "sequence", "redraws": 1},
        "use_lora": True,
        "lora_rank": 4,
    },
    "RLOO": {"objective": "rloo", "section": {"scale": "batch"}, "learning_rate": 1e-3},
    "a mixture with an anchor": {"router": {"anchor": 0.5, "anchor_tokens": 150}},
}


def model_of(variant):
    """A native mixture where routers are anchored, else a tiny Llama."""
    if "router" in VARIANTS[variant]:
        return mixtures.mixture(random=False, vocab_size=300, num_hidden_layers=2)
    return tiny.llama()


def by_length(completions, **columns):
    """Rewards of which many are equal, so that groups are drawn again."""
    return [float(len(text) // 6) for text in completions]


def train(folder, variant):
    """Train; only the first process has rewards."""
    rewards = rollouts.Rewards((by_length,))
    given = {"batch_size": 1, "max_seq_length": 96, "max_steps": 5, "report_samples": 0}
    model = model_of(variant)
    return rollouts.train(folder, model=model, rewards=rewards, **{**given, **VARIANTS[variant]})


def train_by_two(folder, variant):
    """Train in two processes."""
    program = PROGRAM.format(folder=str(folder), variant=variant)
    started = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    paths = [str(Path(__file__).parent), two_processes.PATHS]
    done = subprocess.run(
        [sys.executable, "-m", *started, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_take_the_trajectory_of_one(variant, tmp_path):
    train(tmp_path / "one", variant)
    train_by_two(tmp_path / "two", variant)
    one, two = (runs.trajectory(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=2e-4, atol=2e-6)
    left, right = (read_samples(tmp_path / name / "run") for name in ("one", "two"))
    assert [line["prompt"] for line in left] == [line["prompt"] for line in right]
    for mine, other in zip(left, right, strict=True):
        assert [a["text"] for a in mine["answers"]] == [a["text"] for a in other["answers"]]


def test_divided_weights_are_refused_by_name(tmp_path):
    config = rollouts.config(tmp_path, sharding="weights")
    check_rollouts(config, Mesh(), tiny.llama(), 8)
    with pytest.raises(ConfigurationError, match="sharding='weights': .*sharding='optimizer'"):
        check_rollouts(config, Mesh(0, 2), tiny.llama(), 8)
