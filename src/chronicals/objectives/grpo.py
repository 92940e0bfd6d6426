"""GRPO: answers are compared with the others to their prompt, without a value model.

A loss (``policy_losses.py``) says what is minimised at a token and which count of the whole step
divides the sum:

    dapo, cispo    Σ of all tokens / tokens
    grpo, sapo     Σ of the means of answers / answers
    dr_grpo        Σ of all tokens / (answers · max_new_tokens)

At level ``sequence`` (GSPO) the ratio of a token is the geometric mean over its answer.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from chronicals.models import Term
from chronicals.objectives.advantages import Scale, group_advantages
from chronicals.objectives.drawn_answers import Answers
from chronicals.objectives.policy_gradient import (
    PER_ANSWER,
    PER_TOKEN,
    PolicyGradient,
    RolloutSettings,
)
from chronicals.objectives.policy_losses import LOSSES, PolicyLoss
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, settings

Loss = Literal["dapo", "grpo", "dr_grpo", "cispo", "sapo"]

PER_MICRO_BATCH = "bnpo"
"""A loss of TRL that this package refuses."""


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
            if self.clip_bound is not None and not LOSSES[self.loss].surrogate.takes_bound:
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
        losses = self._loss.surrogate.losses(given, ratio, log_p, advantage)
        clipped = self._loss.surrogate.clipped(given, ratio, advantage)
        shares = {name: self._share(which, answers) for name, which in clipped.items()}
        return losses, ratio, shares

    def reduced(self, losses: Tensor, answers: Answers) -> Term:
        """Return the sum of the losses, with the count that divides it."""
        return self._loss.division.term(self.settings, losses, answers)

    def answer_definition(
        self, log_p: Tensor, old: Tensor, advantage: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the ratio of each token of an answer by the formula."""
        given = self.settings
        ratio = (log_p - old).exp()
        if given.level == "sequence":
            ratio = ratio.prod().pow(1 / len(ratio)).expand_as(ratio)
        return self._loss.surrogate.definition(given, ratio, log_p, advantage), ratio

    def answer_term(self, losses: Tensor) -> Term:
        """Return the term of an answer's losses by the formula."""
        return self._loss.division.definition(self.settings, losses)

    @property
    def _loss(self) -> PolicyLoss:
        return LOSSES[self.settings.loss]

    def _share(self, which: Tensor, answers: Answers) -> Term:
        """Return the share of the ratios for which ``which`` is true: of tokens, or of answers."""
        if self.settings.level == "sequence":
            return Term(answers.means(which.float()).sum(), 0.0, PER_ANSWER)
        return Term(answers.total(which.float()), 0.0, PER_TOKEN)
