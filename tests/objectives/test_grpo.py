"""Losses over answers that the model draws, by their formulas."""

import pytest
import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.objectives import build_objective
from chronicals.objectives.advantages import (
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    without_variance,
)

NAN = float("nan")


def test_advantages_are_of_the_own_group():
    rewards = torch.tensor([[0.0, 1.0, 1.0, 2.0], [5.0, 5.0, 5.0, 9.0]], dtype=torch.float64)
    for scale, deviation in (
        ("group", rewards.std(1, keepdim=True)),
        ("batch", rewards.std()),
        ("none", 1 - 1e-4),
    ):
        expected = (rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)
        torch.testing.assert_close(group_advantages(rewards, scale), expected)
    others = torch.stack([(rewards.sum(1) - rewards[:, n]) / 3 for n in range(4)], 1)
    torch.testing.assert_close(leave_one_out_advantages(rewards, "none"), rewards - others)


def test_an_answer_without_a_reward_counts_nowhere():
    rewards = torch.tensor([[0.0, NAN, 2.0, 4.0]], dtype=torch.float64)
    left = rewards[:, [0, 2, 3]]
    for advantages in (group_advantages, leave_one_out_advantages):
        for scale in ("batch", "none"):
            found = advantages(rewards, scale)
            assert found[0, 1] == 0
            torch.testing.assert_close(found[:, [0, 2, 3]], advantages(left, scale))
    assert without_variance(torch.tensor([[1.0, NAN, 1.0], [1.0, NAN, 2.0]])).tolist() == [
        True,
        False,
    ]


def test_long_answers_are_penalised_softly():
    lengths = torch.tensor([10, 60, 80, 100])
    assert overlong_penalty(lengths, 100, 40).tolist() == [0.0, 0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"loss": "bnpo"}, "depends on how a step is divided"),
        ({"num_generations": 4}, "use answers"),
        ({"max_completion_length": 4}, "use max_new_tokens"),
        ({"epsilon": 0.1}, "use clip_low"),
        ({"num_iterations": 2}, "use iterations"),
        ({"clip_bound": 1.1}, "must exceed 1 \\+ clip_high"),
        ({"loss": "sapo", "clip_bound": 4.0}, "does not clip so"),
        ({"overlong_margin": 4}, "belongs to truncated='shape'"),
        ({"answers": 1}, "greater than or equal to 2"),
        ({"reference": "stored"}, "nothing can be stored"),
        ({"reference_model": "x"}, "no effect with beta=0"),
    ],
)
def test_wrong_settings_are_refused_by_name(section, words):
    with pytest.raises(ConfigurationError, match=words):
        build_objective(ChronicalsConfig(objective="grpo", grpo=section))
