"""RLOO: REINFORCE whose baseline is the mean reward of the other answers to the prompt.

    − Σ_i min(r_i A_i, clip(r_i, 1 − ε_low, 1 + ε_high) A_i) / answers
    A_i = R_i − mean of R_j over the other answers

r_i is the ratio of the whole answer, the product over its tokens. The divergence from the reference
is taken from the reward, as one number for the answer (Ahmadian et al., 2024, section 2.2):

    R_i = reward − β Σ_t (log π_old(y_t) − log π_ref(y_t))
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from chronicals.models import Term
from chronicals.objectives.advantages import leave_one_out_advantages
from chronicals.objectives.drawn_answers import Answers, clipped_losses
from chronicals.objectives.policy_gradient import (
    PER_ANSWER,
    PolicyGradient,
    RolloutSettings,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, settings


@register("rloo")
class RLOO(PolicyGradient):
    """An objective that raises the probability of answers better than the mean of the others."""

    name = "policy"
    penalises_in_loss: ClassVar[bool] = False
    papers = (Paper("RLOO", "Ahmadian et al., 2024, section 3.2"),)

    @settings
    class Settings(RolloutSettings):
        """Section ``rloo`` of a configuration."""

        kl: Literal["k1"] = Field(
            default="k1", description="Estimator of the divergence, which is part of the reward"
        )
        scale: Literal["batch", "none"] = Field(
            default="none", description="Whether the step's deviation divides the advantages"
        )

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages over the mean of the other answers."""
        return leave_one_out_advantages(rewards, self.settings.scale)

    def losses(
        self, log_ratio: Tensor, log_p: Tensor, advantage: Tensor, answers: Answers
    ) -> tuple[Tensor, Tensor, dict[str, Term]]:
        """Return each answer's loss and ratio at its tokens, and how many ratios are clipped."""
        given = self.settings
        ratio = answers.of_tokens(answers.sums(log_ratio)).exp()
        losses = clipped_losses(ratio, advantage, given.clip_low, given.high)
        low = (ratio < 1 - given.clip_low) & (advantage < 0)
        high = (ratio > 1 + given.high) & (advantage > 0)
        shares = {"clip/low": low, "clip/high": high}
        return (
            losses,
            ratio,
            {
                name: Term(answers.means(which.float()).sum(), 0.0, PER_ANSWER)
                for name, which in shares.items()
            },
        )

    def answer_definition(
        self, log_p: Tensor, old: Tensor, advantage: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the ratio of an answer at each of its tokens by the formula."""
        given = self.settings
        ratio = (log_p.sum() - old.sum()).exp()
        clipped = ratio.clamp(1 - given.clip_low, 1 + given.high) * advantage
        loss = -torch.where(ratio * advantage < clipped, ratio * advantage, clipped)
        return loss.expand_as(log_p), ratio.expand_as(log_p)

    def answer_term(self, losses: Tensor) -> Term:
        """Return the term of an answer by the formula."""
        return Term(losses.mean(), per=PER_ANSWER)

    def reduced(self, losses: Tensor, answers: Answers) -> Term:
        """Return the sum over answers; each of its tokens has the same loss."""
        return Term(answers.means(losses).sum(), per=PER_ANSWER)
