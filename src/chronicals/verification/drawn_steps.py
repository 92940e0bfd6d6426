"""Steps of a verified run whose answers its model draws, and their answers for the plain arms.

Answers, rewards and advantages are the run's; a definition computes the loss of these anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import RowSource, TokenStore
from chronicals.distributed import Mesh
from chronicals.models.router_loss import SWITCH, asks_for_router_loss
from chronicals.objectives.policy_gradient import DRAWN, OLD, PolicyGradient
from chronicals.objectives.terms import AnswerFacts
from chronicals.training.rollouts.rollout_run import RolloutRun, check_rollouts, rewards_of
from chronicals.training.rollouts.rollout_steps import RolloutSteps
from chronicals.training.session import Session
from chronicals.verification.reference import Item, MaskedDocument


class DrawnSteps:
    """Steps of drawn answers.

    Args:
        run: prompts and rewards.

    Attributes:
        steps: of the run, once ``begin`` was called.
    """

    steps: RolloutSteps

    def __init__(self, run: RolloutRun):
        self.run = run

    @classmethod
    @contextmanager
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        config: ChronicalsConfig,
        objective: PolicyGradient,
        data: RowSource,
    ) -> Iterator[DrawnSteps]:
        """Return a context with the steps, whose rewards end with it.

        Raises:
            ConfigurationError: the model cannot draw, a reward cannot be had, or the model has a
                router loss, which is of packs that the plain arms do not know.
        """
        check_rollouts(config, Mesh(), model, objective.answer_tokens)
        if asks_for_router_loss(model):
            raise ConfigurationError(
                f"objective={config.objective!r}: the model has a router loss ({SWITCH}=True), a "
                "mean over packs of drawn answers, which the plain arms do not know; verify with "
                f"{SWITCH}=False"
            )
        rewards = rewards_of(objective, config, Mesh())
        assert rewards is not None
        with rewards:
            sources = (data, None)
            yield cls(RolloutRun.of(objective, tokenizer, rewards, sources, config, Mesh()))

    def begin(self, session: Session, store: TokenStore, padding_token_id: int) -> None:
        """Make the steps, inside ``stepping`` of the session."""
        made = self.run.steps(session, store, padding_token_id, nullcontext, writes_samples=False)
        self.steps = made(session.config)

    def items(self, state: Mapping[str, Any] | None) -> list[list[Item]]:
        """Return the trained answers of the step that begins at ``state``, behind their prompts."""
        items: list[Item] = []
        for group in self.steps.groups(state):
            for answer in group.answers:
                if not answer.is_trained:
                    continue
                ids = np.concatenate((group.prompt, answer.tokens)).astype(np.int32)
                trained = np.zeros(len(ids), np.uint8)
                trained[len(group.prompt) :] = 1
                facts = AnswerFacts(
                    answer.advantage, answer.of_tokens[DRAWN], answer.of_tokens.get(OLD)
                )
                items.append([MaskedDocument(ids, trained, answer=facts)])
        return [items]
