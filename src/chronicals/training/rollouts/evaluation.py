"""Evaluation of a model on prompts: a greedy answer to each, and the mean of their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.data import RowSource, filler_token
from chronicals.distributed import Mesh
from chronicals.generation import Answer, Engine, Request
from chronicals.models import embedding_table, input_device
from chronicals.objectives.policy_gradient import PolicyGradient
from chronicals.rewards import Rewards
from chronicals.training.preparation import readable_again
from chronicals.training.presented import present_for
from chronicals.training.rollouts.answer_packs import AnswerPacks
from chronicals.training.rollouts.draws import Draws, DrawSettings, PromptRows
from chronicals.training.rollouts.rollout_maker import RolloutMaker
from chronicals.training.rollouts.rollout_run import RolloutRun
from chronicals.training.rollouts.rollout_steps import HeldOutSteps
from chronicals.training.rollouts.scoring import Scoring
from chronicals.training.run.evaluation import Evaluation, evaluate, open_scored
from chronicals.training.step.optimizer import Precision


def evaluate_prompts(
    model: Any,
    tokenizer: Any,
    data: RowSource,
    config: ChronicalsConfig,
    objective: PolicyGradient,
    rewards: Rewards,
) -> Evaluation:
    """Return the mean reward of greedy answers to prompts.

    Args:
        model: the model, on its device.
        tokenizer: its tokenizer.
        data: the prompts.
        config: configuration of a training run on such prompts.
        objective: built of ``config``.
        rewards: score the answers.

    Raises:
        ConfigurationError: rows lack a column of a reward.
        DataError: the prompts cannot be read.
    """
    data = readable_again(data)
    store = open_scored(data, tokenizer, config, objective, model, objective.answer_tokens)
    run = RolloutRun.of(objective, tokenizer, rewards, (data, None), config, Mesh())
    rows = PromptRows(store, run.records[0])
    presented = present_for(objective, model, config)
    engine = Engine(model)

    def generate(requests: Sequence[Request]) -> list[list[Answer]]:
        with presented.attending_as_before():
            return engine.generate(requests)

    settings = DrawSettings.greedy(objective.settings)
    draws = Draws(generate, tokenizer, rows, settings, config.seed)
    scoring = Scoring(tokenizer, rows, rewards, Mesh())
    packs = AnswerPacks(config, filler_token(tokenizer, embedding_table(model).shape[0]))
    steps = HeldOutSteps(rows, RolloutMaker(objective, draws, scoring), packs)
    with presented.attending_documents():
        return evaluate(presented, objective, steps, Precision("fp32", input_device(model)))
