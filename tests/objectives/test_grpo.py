"""Losses over answers that the model draws, by their formulas."""

import pytest
import torch

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.objectives import build_objective
from chronicals.objectives.advantages import (
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    summed_advantages,
    summed_rewards,
    without_variance,
)
from chronicals.objectives.drawn_answers import Answers, divergence, importance_weights

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


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_gradient_of_each_estimate_is_that_of_the_divergence(kl):
    """In the mean over tokens that an older policy drew, weighed as they were drawn."""
    draw = torch.Generator().manual_seed(0)
    logits, before, other = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    log_p = logits.log_softmax(-1)
    reference = other.log_softmax(-1)
    old = before.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits)
    log_p = logits.log_softmax(-1)
    ratio = (log_p - old).exp()
    estimates = divergence(log_p, reference, ratio, kl)
    (found,) = torch.autograd.grad((old.exp() * estimates).sum(), logits)
    torch.testing.assert_close(found, exact)
    plain = divergence(log_p, reference, ratio, kl, weighted=False)
    if kl == "k3":
        torch.testing.assert_close(plain, estimates / ratio)


def batch_of(lengths):
    """Documents whose tokens are all trained but the last of each."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    targets = torch.ones(sum(lengths), dtype=torch.long)
    targets[bounds[1:].long() - 1] = IGNORED
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(targets.clamp(min=0), targets, positions, bounds, max(lengths))


def test_importance_weights_are_truncated_or_masked_by_token_or_answer():
    answers = Answers(batch_of([3, 4]))
    differences = torch.tensor([0.5, 1.0, 9.0, -0.2, 0.1, 0.4, 9.0], dtype=torch.float64)
    drawn = torch.zeros(7, dtype=torch.float64)
    weight = differences.exp().where(answers.trained, 1.0)
    cap = 2.0
    of_token = {
        "token_truncate": weight.clamp(max=cap),
        "token_mask": weight.where(weight <= cap, 0.0),
    }
    for how, expected in of_token.items():
        found, cut = importance_weights(differences, drawn, answers, how, cap)
        torch.testing.assert_close(found, expected)
        assert cut.tolist() == (weight > cap).tolist()
    whole = torch.tensor([1.5] * 3 + [0.3] * 4, dtype=torch.float64).exp()
    found, cut = importance_weights(differences, drawn, answers, "sequence_truncate", cap)
    assert cut.tolist() == [True] * 3 + [False] * 4
    torch.testing.assert_close(found, whole.clamp(max=cap))
    found, _ = importance_weights(differences, drawn, answers, "sequence_mask", cap)
    torch.testing.assert_close(found, whole.where(whole <= cap, 0.0))


def test_rewards_are_normalised_in_the_group_before_they_are_summed():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, 2, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 50.0])
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    each = (values - values.mean(1, keepdim=True)) / (values.std(1, keepdim=True) + 1e-4)
    sums = (each * weights).sum(-1)
    expected = (sums - sums.mean()) / (sums.std() + 1e-4)
    torch.testing.assert_close(summed_advantages(values, weights), expected)
    values[0, 1] = NAN
    values[0, 2, 0] = NAN
    sums = summed_rewards(values, weights)
    assert sums[0, 1].isnan() and sums[0, 2] == 0.5 * values[0, 2, 1]
