"""Odds ratio preference optimisation (Hong et al., 2024, arXiv 2403.07691).

It needs no reference policy.

    L_SFT + λ L_OR                                               equation 6
    L_OR = − log σ(log odds(y_w|x) − log odds(y_l|x))             equation 7
    odds(y|x) = P / (1 − P),  log P = log π(y|x) / |y|            equations 3 and 4

L_SFT is the mean cross-entropy of the chosen answers' tokens, over all tokens of a step and not
within each pair.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from chronicals.models import Term, Terms
from chronicals.objectives.pairs import (
    PER_CHOSEN_TOKEN,
    PER_PAIR,
    PairObjective,
    Pairs,
    minus_log_sigmoid,
    reward_metrics,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return log odds(y_w) − log odds(y_l), given mean log-probabilities ``[G]`` below 0."""
    return (chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))


def log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 − eˣ) for x below 0, without cancellation (Mächler, 2012, equation 7).

    0 counts as the next smaller number.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453  # − log 2: where both forms are as exact
    return torch.where(near, (-torch.expm1(x.where(near, -0.5))).log(), torch.log1p(-x.exp()))


@register("orpo")
class ORPO(PairObjective):
    """Fine-tuning on the chosen answers that also keeps the odds of the rejected ones low."""

    name = "odds_ratio"
    papers = (Paper("ORPO", "Hong et al., 2024, eq. 6 and 7"),)
    by_token = True
    full_learning_rate = 8e-6
    adapter_learning_rate = 1e-4

    @settings
    class Settings:
        """Section ``orpo`` of a configuration."""

        beta: float = Field(
            default=0.1, gt=0, description="λ: weight of the odds ratio beside the cross-entropy"
        )

    def why_no_gradient(self, values: Mapping[str, float]) -> None:
        """Return None: the cross-entropy is flat nowhere."""

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return both losses of the pairs, their log odds, and the metrics of their rewards."""
        beta = self.settings.beta
        chosen = pairs.chosen / pairs.chosen_tokens
        rejected = pairs.rejected / pairs.rejected_tokens
        ratio = log_odds_ratio(chosen, rejected)
        losses = -F.logsigmoid(ratio)
        return {
            "cross_entropy": Term(-pairs.total(pairs.chosen), per=PER_CHOSEN_TOKEN),
            self.name: Term(pairs.total(losses), beta, PER_PAIR),
            "log_odds_chosen": Term(pairs.total(ratio.detach()), 0.0, PER_PAIR),
            "log_odds_ratio": Term(-pairs.total(losses.detach()), 0.0, PER_PAIR),
            **reward_metrics(pairs, beta * chosen, beta * rejected),
        }

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """Return both losses of a pair by equations 3 to 7, with odds in fp64."""
        better = chosen.log_p().double().mean().exp()
        worse = rejected.log_p().double().mean().exp()
        ratio = (better / (1 - better)) / (worse / (1 - worse))
        return {
            "cross_entropy": Term(-chosen.log_p().sum(), per="first_targets"),
            "odds_ratio": Term(
                minus_log_sigmoid(ratio.log()).float(), self.settings.beta, per="items"
            ),
        }
