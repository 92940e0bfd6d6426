"""Contrastive preference optimisation (Xu et al., 2024, arXiv 2401.08417, equations 3 to 5),
without a reference policy.

    − (1 − ε) log σ(h) − ε log σ(−h) + α L_NLL,   h = β (log π(y_w|x) − log π(y_l|x))

L_NLL is the mean cross-entropy of the chosen answers' tokens: over all tokens of a step, and not of
a pair.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from chronicals.models import Term, Terms
from chronicals.objectives.definitions import log_p, minus_log_sigmoid
from chronicals.objectives.dpo import dpo_losses
from chronicals.objectives.pairs import (
    PER_PAIR,
    PairObjective,
    Pairs,
    binary_entropy,
    nll_of_chosen,
    reward_metrics,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


@register("cpo")
class CPO(PairObjective):
    """An objective that raises the odds of the chosen answer over the rejected one, and its
    probability.
    """

    name = "cpo"
    papers = (Paper("CPO", "Xu et al., 2024, eq. 3 to 5"),)

    @settings
    class Settings:
        beta: float = Field(
            default=0.1, gt=0, description="Factor on the difference of the log-probabilities"
        )
        alpha: float = Field(
            default=1.0, ge=0, description="Weight of the cross-entropy of the chosen answers"
        )
        label_smoothing: float = Field(
            default=0.0, ge=0, lt=0.5, description="Share of pairs taken to be the wrong way round"
        )

    def lowest_loss(self) -> float:
        return binary_entropy(self.settings.label_smoothing)

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return None if the cross-entropy, which is flat nowhere, has a weight."""
        return None if self.settings.alpha else super().why_no_gradient(values)

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        given = self.settings
        losses = dpo_losses(
            given.beta * (pairs.chosen - pairs.rejected), "sigmoid", given.label_smoothing
        )
        return {
            self.name: Term(pairs.total(losses), per=PER_PAIR),
            **nll_of_chosen(pairs, given.alpha),
            **reward_metrics(pairs, given.beta * pairs.chosen, given.beta * pairs.rejected),
        }

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        given = self.settings
        better = log_p(chosen).sum()
        worse = log_p(rejected).sum()
        h = given.beta * (better - worse)
        share = given.label_smoothing
        return {
            "cpo": Term(
                (1 - share) * minus_log_sigmoid(h) + share * minus_log_sigmoid(-h), per="items"
            ),
            "cross_entropy": Term(-better, given.alpha, per="first_targets"),
        }
