"""Identity preference optimisation (Azar et al., 2023, arXiv 2310.12036, equation 17).

    (h − 1 / 2τ)²,   h = log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)

Each log-ratio is a mean over its answer's tokens, so that long answers do not count more. This mean
is from the authors' implementation, not from the paper.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from chronicals.models import Term, Terms
from chronicals.objectives.pairs import PER_PAIR, PairObjective, Pairs, reward_metrics
from chronicals.objectives.reference import ReferenceSettings, WithReference
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings


def ipo_losses(h: Tensor, tau: float) -> Tensor:
    """Return the loss of each pair, given the difference ``[G]`` of the log-ratios by token."""
    return (h - 1 / (2 * tau)).square()


@register("ipo")
class IPO(PairObjective, WithReference):
    """An objective that holds the difference of both log-ratios at 1 / 2τ."""

    name = "ipo"
    papers = (Paper("IPO", "Azar et al., 2023, eq. 17"),)

    @settings
    class Settings(ReferenceSettings):
        """Section ``ipo`` of a configuration."""

        tau: float = Field(
            default=0.1, gt=0, description="How strongly the policy is held to the reference"
        )

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return the loss of the pairs and the metrics of their rewards."""
        tau = self.settings.tau
        chosen, rejected = pairs.log_ratios()
        losses = ipo_losses(chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens, tau)
        loss = Term(pairs.total(losses), per=PER_PAIR)
        return {self.name: loss, **reward_metrics(pairs, tau * chosen, tau * rejected)}

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """Return the loss of a pair by equation 17 in plain torch."""
        h = chosen.log_ratio().mean() - rejected.log_ratio().mean()
        return {"ipo": Term((h - 0.5 / self.settings.tau) ** 2, per="items")}
