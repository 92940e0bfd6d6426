"""Simple preference optimisation (Meng et al., 2024, arXiv 2405.14734, equation 6), without a
reference policy.

    − log σ(β log π(y_w|x) / |y_w| − β log π(y_l|x) / |y_l| − γ)

|y| is the number of tokens of an answer; β log π(y|x) / |y| is its reward, γ the margin aimed at.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from chronicals.models import Term, Terms
from chronicals.objectives.definitions import log_p, minus_log_sigmoid
from chronicals.objectives.pairs import PER_PAIR, PairObjective, Pairs, reward_metrics
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


def simpo_losses(chosen: Tensor, rejected: Tensor, gamma: float) -> Tensor:
    """Return the loss of each pair, given the rewards ``[G]`` of both answers."""
    return -F.logsigmoid(chosen - rejected - gamma)


@register("simpo")
class SimPO(PairObjective):
    """An objective that raises the mean log-probability of the chosen answer's tokens over that of
    the rejected one's, by a margin.
    """

    name = "simpo"
    papers = (Paper("SimPO", "Meng et al., 2024, eq. 6"),)
    by_token = True

    @settings
    class Settings:
        beta: float = Field(
            default=2.0, gt=0, description="Factor on the mean log-probability of a token"
        )
        gamma: float = Field(default=1.0, ge=0, description="Margin between both rewards")

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        chosen, rejected = (self.settings.beta * mean for mean in pairs.mean_log_p())
        loss = Term(pairs.total(simpo_losses(chosen, rejected, self.settings.gamma)), per=PER_PAIR)
        return {self.name: loss, **reward_metrics(pairs, chosen, rejected)}

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        better, worse = (self.settings.beta * log_p(answer).mean() for answer in (chosen, rejected))
        return {"simpo": Term(minus_log_sigmoid(better - worse - self.settings.gamma), per="items")}
