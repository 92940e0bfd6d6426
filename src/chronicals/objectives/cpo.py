"""Contrastive preference optimisation, without a reference policy.

By equations 3 to 5 of Xu et al. (2024, arXiv 2401.08417),

    − (1 − ε) log σ(h) − ε log σ(−h) + α L_NLL,   h = β (log π(y_w|x) − log π(y_l|x))

L_NLL is the mean cross-entropy of the chosen answers' tokens: over all tokens of a step, and not of
a pair.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from chronicals.models import Term, Terms
from chronicals.objectives.dpo import dpo_losses
from chronicals.objectives.pairs import (
    PER_CHOSEN_TOKEN,
    PER_PAIR,
    PairObjective,
    Pairs,
    binary_entropy,
    minus_log_sigmoid,
    reward_metrics,
    why_flat,
)
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


@register("cpo")
class CPO(PairObjective):
    """An objective that raises the odds of the chosen answer, and its probability."""

    name = "cpo"
    papers = (Paper("CPO", "Xu et al., 2024, eq. 3 to 5"),)

    @settings
    class Settings:
        """Section ``cpo`` of a configuration."""

        beta: float = Field(
            default=0.1, gt=0, description="Factor on the difference of the log-probabilities"
        )
        alpha: float = Field(
            default=1.0, ge=0, description="Weight of the cross-entropy of the chosen answers"
        )
        label_smoothing: float = Field(
            default=0.0, ge=0, lt=0.5, description="Share of pairs taken to be the wrong way round"
        )

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return None if the cross-entropy, which is flat nowhere, has a weight."""
        if self.settings.alpha:
            return None
        return why_flat(values["loss"], binary_entropy(self.settings.label_smoothing))

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return both losses of the pairs and the metrics of their rewards."""
        given = self.settings
        losses = dpo_losses(
            given.beta * (pairs.chosen - pairs.rejected), "sigmoid", given.label_smoothing
        )
        return {
            self.name: Term(pairs.total(losses), per=PER_PAIR),
            "cross_entropy": Term(-pairs.total(pairs.chosen), given.alpha, PER_CHOSEN_TOKEN),
            **reward_metrics(pairs, given.beta * pairs.chosen, given.beta * pairs.rejected),
        }

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """Return both losses of a pair by equations 3 to 5 in plain torch."""
        given = self.settings
        better = chosen.log_p().sum()
        worse = rejected.log_p().sum()
        h = given.beta * (better - worse)
        share = given.label_smoothing
        return {
            "cpo": Term(
                (1 - share) * minus_log_sigmoid(h) + share * minus_log_sigmoid(-h), per="items"
            ),
            "cross_entropy": Term(-better, given.alpha, per="first_targets"),
        }
