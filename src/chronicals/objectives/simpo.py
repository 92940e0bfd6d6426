"""Simple preference optimisation, without a reference policy.

By equation 6 of Meng et al. (2024, arXiv 2405.14734), the loss of a pair is

    − log σ(β log π(y_w|x) / |y_w| − β log π(y_l|x) / |y_l| − γ)

|y| is the number of tokens of an answer; β log π(y|x) / |y| is its reward, γ the margin aimed at.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from chronicals.models import Term, Terms
from chronicals.objectives.pairs import (
    PER_PAIR,
    PairObjective,
    Pairs,
    minus_log_sigmoid,
    reward_metrics,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


def simpo_losses(chosen: Tensor, rejected: Tensor, gamma: float) -> Tensor:
    """Return the loss of each pair, given the rewards ``[G]`` of both answers."""
    return -F.logsigmoid(chosen - rejected - gamma)


@register("simpo")
class SimPO(PairObjective):
    """An objective that raises the chosen answer's mean log-probability a token, by a margin."""

    name = "simpo"
    papers = (Paper("SimPO", "Meng et al., 2024, eq. 6"),)
    by_token = True

    @settings
    class Settings:
        """Section ``simpo`` of a configuration."""

        beta: float = Field(
            default=2.0, gt=0, description="Factor on the mean log-probability of a token"
        )
        gamma: float = Field(default=1.0, ge=0, description="Margin between both rewards")

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return the loss of the pairs and the metrics of their rewards."""
        beta = self.settings.beta
        chosen = beta * (pairs.chosen / pairs.chosen_tokens)
        rejected = beta * (pairs.rejected / pairs.rejected_tokens)
        loss = Term(pairs.total(simpo_losses(chosen, rejected, self.settings.gamma)), per=PER_PAIR)
        return {self.name: loss, **reward_metrics(pairs, chosen, rejected)}

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """Return the loss of a pair by equation 6 in plain torch."""
        better = self.settings.beta * chosen.log_p().mean()
        worse = self.settings.beta * rejected.log_p().mean()
        return {"simpo": Term(minus_log_sigmoid(better - worse - self.settings.gamma), per="items")}
