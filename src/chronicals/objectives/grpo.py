"""GRPO: answers are compared with the others to their prompt, without a value model.

With r_t the ratio of a token (``policy_gradient.py``) and A its answer's advantage, the loss of a
token is

    grpo, dr_grpo, dapo   − min(min(r, δ) A, clip(r, 1 − ε_low, 1 + ε_high) A)
    cispo                 − sg(min(r, 1 + ε_high)) A log π
    sapo                  − 4/τ σ(τ (r − 1)) A,   τ = τ₊ if A > 0, else τ₋

At level ``sequence`` (GSPO) r is the geometric mean over the tokens of the answer. The losses are
divided by counts of the whole step:

    dapo, cispo    Σ of all tokens / tokens
    grpo, sapo     Σ of the means of answers / answers
    dr_grpo        Σ of all tokens / (answers · max_new_tokens)
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from chronicals.models import Term
from chronicals.objectives.advantages import Scale, group_advantages
from chronicals.objectives.policy_gradient import (
    PER_ANSWER,
    PER_TOKEN,
    Answers,
    PolicyGradient,
    RolloutSettings,
    clipped_losses,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, settings

Loss = Literal["dapo", "grpo", "dr_grpo", "cispo", "sapo"]

PER_MICRO_BATCH = "bnpo"
"""A loss of TRL that this package refuses."""


def cispo_losses(ratio: Tensor, log_p: Tensor, advantage: Tensor, high: float) -> Tensor:
    """Return − sg(min(r, 1 + ε_high)) A log π (MiniMax-M1, 2025, equations 4 and 5).

    No token loses its gradient. The ratio has no lower bound, as in the paper's experiments. TRL's
    ``epsilon_high`` is 1 + ε_high here.
    """
    return -ratio.clamp(max=1 + high).detach() * advantage * log_p


def sapo_losses(ratio: Tensor, advantage: Tensor, positive: float, negative: float) -> Tensor:
    """Return − 4/τ σ(τ (r − 1)) A, a soft gate instead of a clip (Gao et al., 2025, equation 6).

    Args:
        ratio: r.
        advantage: A.
        positive: τ of good answers.
        negative: τ of the others.
    """
    temperature = torch.where(advantage > 0, positive, negative)
    return -torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * advantage


@register("grpo")
class GRPO(PolicyGradient):
    """An objective that raises the probability of answers better than the others of their group."""

    name = "policy"
    papers = (
        Paper("GRPO", "Shao et al., 2024 (DeepSeekMath), equation 3"),
        Paper("Dr. GRPO", "Liu et al., 2025, section 3.2"),
        Paper("DAPO", "Yu et al., 2025, equations 8 to 13"),
        Paper("GSPO", "Zheng et al., 2025, equations 5 to 7"),
        Paper("CISPO", "MiniMax-M1, 2025, equations 4 and 5"),
        Paper("SAPO", "Gao et al., 2025, equation 6"),
        Paper("two-sided clipping", "INTELLECT-2, 2025, section 3.4"),
        Paper("truncated importance sampling", "Yao et al., 2025"),
    )

    @settings
    class Settings(RolloutSettings):
        """Section ``grpo`` of a configuration."""

        loss: Loss = Field(default="dapo", description="The loss of a token, and what divides it")
        level: Literal["token", "sequence"] = Field(
            default="token", description="Ratios of tokens, or of whole answers (GSPO)"
        )
        clip_bound: float | None = Field(
            default=None, gt=1, description="Bound of the ratio on both sides of the clip"
        )
        scale: Scale = Field(
            default="group", description="Whose deviation of rewards divides the advantages"
        )
        sapo_positive: float = Field(
            default=1.0, gt=0, description="Temperature of sapo for good answers"
        )
        sapo_negative: float = Field(
            default=1.05, gt=0, description="Temperature of sapo for the others"
        )

        @field_validator("loss", mode="before")
        @classmethod
        def _divided_by_the_step(cls, value: object) -> object:
            """Refuse a loss that depends on how a step is divided."""
            if value == PER_MICRO_BATCH:
                raise PydanticCustomError(
                    "per_micro_batch",
                    "divides by the tokens of each micro-batch, so that the result depends on how "
                    "a step is divided; take 'dapo', which divides by the tokens of the whole step",
                )
            return value

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.clip_bound is not None and self.loss in ("cispo", "sapo"):
                raise ValueError(
                    f"clip_bound={self.clip_bound}: loss={self.loss!r} does not clip so; leave it "
                    "out"
                )
            if self.clip_bound is not None and self.clip_bound <= 1 + self.high:
                raise ValueError(
                    f"clip_bound={self.clip_bound}: must exceed 1 + clip_high = "
                    f"{1 + self.high:g}; raise it, or leave it out"
                )

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages over the mean of the group."""
        return group_advantages(rewards, self.settings.scale)

    def losses(
        self, log_ratio: Tensor, log_p: Tensor, advantage: Tensor, answers: Answers
    ) -> tuple[Tensor, Tensor, dict[str, Term]]:
        """Return the loss and the ratio of each token, and how many ratios are clipped."""
        given = self.settings
        if given.level == "sequence":
            log_ratio = answers.of_tokens(answers.means(log_ratio))
        ratio = log_ratio.exp()
        if given.loss == "cispo":
            losses = cispo_losses(ratio, log_p, advantage, given.high)
        elif given.loss == "sapo":
            losses = sapo_losses(ratio, advantage, given.sapo_positive, given.sapo_negative)
        else:
            losses = clipped_losses(ratio, advantage, given.clip_low, given.high, given.clip_bound)
        low = (ratio < 1 - given.clip_low) & (advantage < 0)
        high = (ratio > 1 + given.high) & (advantage > 0)
        shares = (
            {"clip/high": high} if given.loss == "cispo" else {"clip/low": low, "clip/high": high}
        )
        if given.loss == "sapo":
            shares = {}
        return losses, ratio, {name: self._share(which, answers) for name, which in shares.items()}

    def answer_definition(
        self, log_p: Tensor, old: Tensor, advantage: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the ratio of each token of an answer by the formula."""
        given = self.settings
        ratio = (log_p - old).exp()
        if given.level == "sequence":
            ratio = ratio.prod().pow(1 / len(ratio)).expand_as(ratio)
        clipped = ratio.clamp(1 - given.clip_low, 1 + given.high) * advantage
        bounded = ratio.clamp(max=given.clip_bound or torch.inf) * advantage
        gate = given.sapo_positive if advantage > 0 else given.sapo_negative
        losses = {
            "cispo": -ratio.clamp(max=1 + given.high).detach() * advantage * log_p,
            "sapo": -4 / gate / (1 + (-gate * (ratio - 1)).exp()) * advantage,
        }
        return losses.get(given.loss, -torch.where(bounded < clipped, bounded, clipped)), ratio

    def answer_term(self, losses: Tensor) -> Term:
        """Return the term of an answer's losses by the formula."""
        given = self.settings
        by_name = {
            "dapo": (losses.sum(), PER_TOKEN),
            "cispo": (losses.sum(), PER_TOKEN),
            "grpo": (losses.mean(), PER_ANSWER),
            "sapo": (losses.mean(), PER_ANSWER),
            "dr_grpo": (losses.sum() / given.max_new_tokens, PER_ANSWER),
        }
        total, per = by_name[given.loss]
        return Term(total, per=per)

    def _share(self, which: Tensor, answers: Answers) -> Term:
        """Return the share of the ratios for which ``which`` is true: of tokens, or of answers."""
        if self.settings.level == "sequence":
            return Term(answers.means(which.float()).sum(), 0.0, PER_ANSWER)
        return Term(answers.total(which.float()), 0.0, PER_TOKEN)

    def reduced(self, losses: Tensor, answers: Answers) -> Term:
        """Return the sum of the losses; see the module's docstring."""
        given = self.settings
        if given.loss in ("grpo", "sapo"):
            return Term(answers.means(losses).sum(), per=PER_ANSWER)
        if given.loss == "dr_grpo":
            return Term(answers.total(losses) / given.max_new_tokens, per=PER_ANSWER)
        return Term(answers.total(losses), per=PER_TOKEN)
