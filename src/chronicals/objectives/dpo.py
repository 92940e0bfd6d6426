"""Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290), with loss variants.

Equation 7 defines

    h = β (log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x))

and the losses of a pair are

    sigmoid       − (1 − ε) log σ(h) − ε log σ(−h)
    robust        ((1 − ε) (− log σ(h)) + ε log σ(−h)) / (1 − 2ε)
    hinge         max(0, 1 − h)
    sigmoid_norm  − log σ(h'), where h' divides each log-ratio by its answer's number of tokens

``sigmoid`` is equation 7 if ε = 0, and "conservative DPO" (Mitchell, 2023) if ε > 0. ``robust`` is
equation 9 of Chowdhury et al. (2024, arXiv 2403.00409), ``hinge`` is SLiC (Zhao et al., 2023, arXiv
2305.10425), and ``sigmoid_norm`` is that of Tülu 3 (Lambert et al., 2024, arXiv 2411.15124).

β log π/π_ref of an answer is its reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from chronicals.models import Term, Terms
from chronicals.objectives.pairs import (
    PER_PAIR,
    PairObjective,
    Pairs,
    binary_entropy,
    minus_log_sigmoid,
    reward_metrics,
    why_flat,
)
from chronicals.objectives.reference import ReferenceSettings, WithReference
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Paper, ScoredDocument, settings

Loss = Literal["sigmoid", "hinge", "robust", "sigmoid_norm"]


def dpo_losses(h: Tensor, loss: Loss, label_smoothing: float) -> Tensor:
    """Return the loss of each pair.

    Args:
        h: β times the difference of the log-ratios, ``[G]``; for ``sigmoid_norm`` of the log-ratios
            by token.
        loss: which variant.
        label_smoothing: ε, the assumed share of pairs that are the wrong way round.
    """
    wrong = label_smoothing
    if loss == "hinge":
        return torch.relu(1 - h)
    if loss == "robust":
        return (-(1 - wrong) * F.logsigmoid(h) + wrong * F.logsigmoid(-h)) / (1 - 2 * wrong)
    return -(1 - wrong) * F.logsigmoid(h) - wrong * F.logsigmoid(-h)


@register("dpo")
class DPO(PairObjective, WithReference):
    """An objective that raises the odds of the chosen answer, relative to a reference policy."""

    name = "dpo"
    papers = (
        Paper("DPO", "Rafailov et al., 2023, eq. 7"),
        Paper("conservative DPO (cDPO)", "Mitchell, 2023"),
        Paper("robust DPO", "Chowdhury et al., 2024, eq. 9"),
        Paper("hinge loss (SLiC)", "Zhao et al., 2023"),
        Paper("length-normalised DPO", "Lambert et al., 2024 (Tülu 3)"),
    )

    @settings
    class Settings(ReferenceSettings):
        """Section ``dpo`` of a configuration."""

        beta: float = Field(
            default=0.1, gt=0, description="How strongly the policy is held to the reference"
        )
        loss: Loss = Field(default="sigmoid", description="The loss of a pair")
        label_smoothing: float = Field(
            default=0.0,
            ge=0,
            lt=0.5,
            description="Share of pairs taken to be the wrong way round (sigmoid and robust)",
        )

        def __post_init__(self) -> None:
            if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
                raise ValueError(
                    f"loss={self.loss!r} has no label_smoothing; leave it out, or take 'sigmoid' "
                    "or 'robust'"
                )

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return a reason if the loss of every pair is at its lowest value, where it is flat.

        The hinge is flat beyond its margin; the robust loss with smoothing has no lower bound.
        """
        share = self.settings.label_smoothing
        if self.settings.loss == "robust" and share:
            return None
        return why_flat(values["loss"], binary_entropy(share))

    def terms(self, pairs: Pairs) -> dict[str, Term]:
        """Return the loss of the pairs and the metrics of their rewards."""
        given = self.settings
        chosen, rejected = pairs.log_ratios()
        difference = chosen - rejected
        if given.loss == "sigmoid_norm":
            difference = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
        losses = dpo_losses(given.beta * difference, given.loss, given.label_smoothing)
        return {
            self.name: Term(pairs.total(losses), per=PER_PAIR),
            **reward_metrics(pairs, given.beta * chosen, given.beta * rejected),
        }

    def pair_definition(self, chosen: ScoredDocument, rejected: ScoredDocument) -> Terms:
        """Return the loss of a pair by the formula in plain torch."""
        given = self.settings
        better = chosen.log_ratio()
        worse = rejected.log_ratio()
        if given.loss == "sigmoid_norm":
            h = given.beta * (better.mean() - worse.mean())
        else:
            h = given.beta * (better.sum() - worse.sum())
        right = minus_log_sigmoid(h)
        wrong = minus_log_sigmoid(-h)
        share = given.label_smoothing
        losses = {
            "sigmoid": (1 - share) * right + share * wrong,
            "robust": ((1 - share) * right - share * wrong) / (1 - 2 * share),
            "hinge": (1 - h).clamp(min=0),
            "sigmoid_norm": right,
        }
        return {"dpo": Term(losses[given.loss], per="items")}
