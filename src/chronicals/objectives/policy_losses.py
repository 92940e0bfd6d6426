"""The losses of the GRPO family: what a token's loss is, and what divides the losses of a step.

A loss is a surrogate and a division; ``LOSSES`` has them by name. Each has its formula a second
time, over one answer in plain torch, by which ``verify`` checks the first.

With r the ratio of a token (``policy_gradient.py``) and A its answer's advantage:

    Clip         − min(min(r, δ) A, clip(r, 1 − ε_low, 1 + ε_high) A)
    CappedWeight − sg(min(r, 1 + ε_high)) A log π
    SoftGate     − 4/τ σ(τ (r − 1)) A,   τ = τ₊ if A > 0, else τ₋
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from chronicals.models import Term
from chronicals.objectives.drawn_answers import Answers, clipped_losses
from chronicals.objectives.policy_gradient import (
    PER_ANSWER,
    PER_TOKEN,
)


class Surrogate(ABC):
    """Base class of what is minimised at a token; ``given`` are the settings of the objective.

    Attributes:
        takes_bound: whether ``clip_bound`` has a meaning.
    """

    takes_bound: ClassVar[bool] = False

    @abstractmethod
    def losses(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of each token, ``[T]``.

        Args:
            given: settings.
            ratio: r.
            log_p: log π.
            advantage: A.
        """

    @abstractmethod
    def definition(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: float) -> Tensor:
        """Return the same of one answer's tokens by the formula."""

    def clipped(self, given: Any, ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
        """Return which ratios are held back, by the name of the metric."""
        return {}


class Clip(Surrogate):
    """The clipped ratio of PPO (Schulman et al., 2017, equation 7)."""

    takes_bound = True

    def losses(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of each token."""
        return clipped_losses(ratio, advantage, given.clip_low, given.high, given.clip_bound)

    def definition(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: float) -> Tensor:
        """Return the loss of each token of an answer."""
        clipped = ratio.clamp(1 - given.clip_low, 1 + given.high) * advantage
        bounded = ratio.clamp(max=given.clip_bound or torch.inf) * advantage
        return -torch.where(bounded < clipped, bounded, clipped)

    def clipped(self, given: Any, ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
        """Return which ratios are too low for bad answers, and too high for good ones."""
        low = (ratio < 1 - given.clip_low) & (advantage < 0)
        high = (ratio > 1 + given.high) & (advantage > 0)
        return {"clip/low": low, "clip/high": high}


class CappedWeight(Surrogate):
    """A capped weight on the log-probability, CISPO (MiniMax-M1, 2025, equations 4 and 5).

    No token loses its gradient. The ratio has no lower bound, as in the paper's experiments. TRL's
    ``epsilon_high`` is 1 + ε_high here.
    """

    def losses(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of each token."""
        return -ratio.clamp(max=1 + given.high).detach() * advantage * log_p

    def definition(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: float) -> Tensor:
        """Return the loss of each token of an answer."""
        weight = torch.where(ratio > 1 + given.high, 1 + given.high, ratio).detach()
        return -weight * advantage * log_p

    def clipped(self, given: Any, ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
        """Return which ratios are too high for good answers."""
        return {"clip/high": (ratio > 1 + given.high) & (advantage > 0)}


class SoftGate(Surrogate):
    """A soft gate instead of a clip, SAPO (Gao et al., 2025, equation 6)."""

    def losses(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of each token."""
        temperature = torch.where(advantage > 0, given.sapo_positive, given.sapo_negative)
        return -torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * advantage

    def definition(self, given: Any, ratio: Tensor, log_p: Tensor, advantage: float) -> Tensor:
        """Return the loss of each token of an answer."""
        gate = given.sapo_positive if advantage > 0 else given.sapo_negative
        return -4 / gate / (1 + (-gate * (ratio - 1)).exp()) * advantage


class Division(ABC):
    """The sum of a step's losses, and the count of the whole step that divides it."""

    @abstractmethod
    def term(self, given: Any, losses: Tensor, answers: Answers) -> Term:
        """Return the term of losses ``[T]``."""

    @abstractmethod
    def definition(self, given: Any, losses: Tensor) -> Term:
        """Return the term of one answer's losses."""


class ByTokens(Division):
    """The sum of all tokens over their number (DAPO, Yu et al., 2025, equation 12)."""

    def term(self, given: Any, losses: Tensor, answers: Answers) -> Term:
        """Return the sum over tokens."""
        return Term(answers.total(losses), per=PER_TOKEN)

    def definition(self, given: Any, losses: Tensor) -> Term:
        """Return the sum over the answer's tokens."""
        return Term(losses.sum(), per=PER_TOKEN)


class ByAnswers(Division):
    """The sum of the means of answers over their number (Shao et al., 2024, equation 3)."""

    def term(self, given: Any, losses: Tensor, answers: Answers) -> Term:
        """Return the sum of the means."""
        return Term(answers.means(losses).sum(), per=PER_ANSWER)

    def definition(self, given: Any, losses: Tensor) -> Term:
        """Return the mean over the answer's tokens."""
        return Term(losses.mean(), per=PER_ANSWER)


class ByBudget(Division):
    """The sum of all tokens over answers · max_new_tokens (Dr. GRPO, Liu et al., 2025, 3.2)."""

    def term(self, given: Any, losses: Tensor, answers: Answers) -> Term:
        """Return the sum over tokens, divided by the most that an answer has."""
        return Term(answers.total(losses) / given.max_new_tokens, per=PER_ANSWER)

    def definition(self, given: Any, losses: Tensor) -> Term:
        """Return the sum over the answer's tokens, divided by the most that it has."""
        return Term(losses.sum() / given.max_new_tokens, per=PER_ANSWER)


@dataclass(frozen=True)
class PolicyLoss:
    """A loss of the family.

    Attributes:
        surrogate: the loss of a token.
        division: what divides the losses of a step.
    """

    surrogate: Surrogate
    division: Division


LOSSES = {
    "dapo": PolicyLoss(Clip(), ByTokens()),
    "grpo": PolicyLoss(Clip(), ByAnswers()),
    "dr_grpo": PolicyLoss(Clip(), ByBudget()),
    "cispo": PolicyLoss(CappedWeight(), ByTokens()),
    "sapo": PolicyLoss(SoftGate(), ByAnswers()),
}
"""The losses by their names in a configuration."""
