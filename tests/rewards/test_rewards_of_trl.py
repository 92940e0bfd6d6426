"""TRL's own rewards, called by us and by its trainer."""

import functools
from types import SimpleNamespace

import pytest
import torch

import reward_examples
from chronicals.rewards import Scored

trl = pytest.importorskip("trl")
of_trl = pytest.importorskip("trl.rewards")

PROMPTS = [[{"role": "user", "content": "2 + 3"}]] * 4
TEXTS = ["<think>\na\n</think>\n5", "5", "<think>5", "<think>\nb\n</think>\nc\n"]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]
IDS = [[7] * count for count in (3, 8, 9, 12)]
COLUMNS = {"answer": ["5", None, "5", "5"], "level": [1, 2, 3, 4]}


def by_trl(functions):
    """What ``GRPOTrainer._calculate_rewards`` gives, fp32 ``[rows, rewards]``."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda values: values, is_main_process=False
        ),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=["first", "second", "third"],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
        args=SimpleNamespace(report_to=[]),
        _step=0,
    )
    rows = [
        {"prompt": prompt, **{name: column[row] for name, column in COLUMNS.items()}}
        for row, prompt in enumerate(PROMPTS)
    ]
    call = trl.GRPOTrainer._calculate_rewards.__wrapped__
    return call(trainer, rows, PROMPTS, COMPLETIONS, IDS)


@pytest.mark.slow
def test_functions_give_what_its_trainer_gets(rewards_of):
    functions = [
        functools.partial(of_trl.think_format_reward),  # here: a process would import torch
        of_trl.get_soft_overlong_punishment(10, 4),
        reward_examples.of_trl_for_messages,
    ]
    expected = by_trl(functions)
    rewards = rewards_of(*functions, "length(10, 4)", reward_timeout=5.0)
    outcome = rewards.score(Scored(PROMPTS, COMPLETIONS, IDS, COLUMNS, [0, 0, 1, 1]))
    assert outcome.failures == []
    ours = outcome.values.float()
    torch.testing.assert_close(ours[:, :3], expected, rtol=0, atol=0, equal_nan=True)
    assert ours[:, 3].tolist() == ours[:, 1].tolist() == [0.0, -0.5, -0.75, -1.0]
    assert expected[:, 0].tolist() == [1.0, 0.0, 0.0, 1.0] and expected[1, 2].isnan()
