"""Runs whose answers the model draws."""

import pytest

import rollouts
from chronicals.training.run.callbacks import read_metrics


def metrics(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_the_reward_of_a_trivial_task_rises(objective, tmp_path):
    rewards = rollouts.Rewards()
    rollouts.train(
        tmp_path,
        rewards=rewards,
        objective=objective,
        section={"answers": 8},
        max_steps=16,
        learning_rate=1e-2,
    )
    lines = metrics(tmp_path)
    assert len(rewards.calls) == len(lines) == 16
    first, last = (sum(line["reward"] for line in part) for part in (lines[:4], lines[-4:]))
    assert last > 2 * first
    assert all(line["gap/largest"] < 1e-5 for line in lines)
