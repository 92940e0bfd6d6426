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
from chronicals.objectives.definitions import log_p, minus_log_sigmoid
from chronicals.objectives.pairs import (
    PER_PAIR,
    PairObjective,
    Pairs,
    nll_of_chosen,
    reward_metrics,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return log odds(y_w) − log odds(y_l), given mean log-probabilities ``[G]`` below 0."""
    return (chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))


def log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 − eˣ) for x below 0, without cancellation (Mächler, 2012, equation 7); 0 counts
    as the next smaller number.
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
        beta: float = Field(
            default=0.1, gt=0, description="λ: weight of the odds ratio beside the cross-entropy"
        )

    def why_no_gradient(self, values: Mapping[str, float]) -> None:
        """Return None: the cross-entropy is flat nowhere."""

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        beta = self.settings.beta
        chosen, rejected = pairs.mean_log_p()
        ratio = log_odds_ratio(chosen, rejected)
        losses = -F.logsigmoid(ratio)
        return {
            **nll_of_chosen(pairs, 1.0),
            self.name: Term(pairs.total(losses), beta, PER_PAIR),
            "log_odds_chosen": Term(pairs.total(ratio.detach()), 0.0, PER_PAIR),
            "log_odds_ratio": Term(-pairs.total(losses.detach()), 0.0, PER_PAIR),
            **reward_metrics(pairs, beta * chosen, beta * rejected),
        }

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        better, worse = (log_p(answer).double().mean().exp() for answer in (chosen, rejected))
        ratio = (better / (1 - better)) / (worse / (1 - worse))
        return {
            "cross_entropy": Term(-log_p(chosen).sum(), per="first_targets"),
            "odds_ratio": Term(
                minus_log_sigmoid(ratio.log()).float(), self.settings.beta, per="items"
            ),
        }
