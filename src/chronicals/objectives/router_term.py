"""An objective, and beside its terms the router loss that the model's class adds to its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from chronicals.batch import Batch
from chronicals.data.loader import Counts
from chronicals.models import PresentedModel, RouterLoss, in_trained_documents
from chronicals.objectives.terms import Count, Objective, Term, Terms

NAME = "router_loss"


class WithRouterLoss:
    """The terms of ``objective``, and the mean of ``loss`` over the packs of the step; see ``chronicals.models.router_loss``.

    Args:
        width: tokens of a pack.
    """

    def __init__(self, objective: Objective, loss: RouterLoss, width: int):
        self.objective, self.loss, self.width = objective, loss, width

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        with model.recording_routers() as recorded:
            terms = self.objective(model, batch)
        counted = in_trained_documents(batch)
        (total,) = (self.loss.sum_over_packs(logits, counted, self.width) for logits in recorded)
        return {**terms, NAME: Term(total, self.loss.coefficient)}

    def counts(self, step: Counts) -> Mapping[str, Count]:
        return {**self.objective.counts(step), NAME: step.packs}

    def score(self, model: PresentedModel, batch: Batch) -> Mapping[str, Tensor]:
        return self.objective.score(model, batch)


def with_router_loss(objective: Objective, model: PresentedModel, width: int) -> Objective:
    """``objective`` itself for a model without one."""
    return objective if model.router_loss is None else WithRouterLoss(objective, model.router_loss, width)
