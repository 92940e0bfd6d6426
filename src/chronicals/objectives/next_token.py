"""Next-token prediction: supervised fine-tuning and pretraining.

Over the positions whose target y_t is trained,

    loss = − Σ_t w_t log p(y_t | x_≤t) / Σ_t w_t

w_t is 1 if a Batch has no weights. The denominator is that of the whole optimizer step, never of a
micro-batch (Radford et al., 2018, equation 1, as a mean).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.kernels import linear_cross_entropy
from chronicals.models import PresentedModel, Term, Terms
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Objective, Paper

SCORED_ROWS = 4096
"""Rows of logits that exist at a time while a model is evaluated."""


@register("sft", "pretraining")
class NextToken(Objective):
    """The summed cross-entropy of every trained target.

    A head that is understood computes it without whole logits.
    ``sft`` and ``pretraining`` differ only in the tokens that the data marks as trained.
    """

    of_tokens = True
    papers = (Paper("next-token prediction", "Radford et al., 2018, eq. 1"),)

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the cross-entropy of the Batch's targets, summed, and the model's own losses."""
        head = model.head
        states, auxiliary = model(batch)
        if head is None:
            # in fp32 at least, as a head computes logits
            logits = states.to(torch.promote_types(states.dtype, torch.float32))
            losses = F.cross_entropy(logits, batch.targets, reduction="none", ignore_index=IGNORED)
            total = (losses if batch.weights is None else losses * batch.weights).sum()
        else:
            total = linear_cross_entropy(
                states,
                head.table,
                batch.targets,
                bias=head.bias,
                adapter=head.adapter,
                rows=head.rows,
                scale=head.scale,
                softcap=head.softcap,
                weights=batch.weights,
                count=batch.trained,
                chunk_size=self.chunk_size,
            )
        return {"cross_entropy": Term(total, per="weight"), **auxiliary}

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the cross-entropy, and the ratio of targets that are the likeliest token."""
        head = model.head
        states = model.logits(batch) if head is None else model.hidden_states(batch)
        wide = torch.promote_types(states.dtype, torch.float32)
        total = torch.zeros((), device=states.device)
        correct = torch.zeros((), device=states.device)
        weights = [None] * len(batch) if batch.weights is None else batch.weights.split(SCORED_ROWS)
        for rows, targets, weight in zip(
            states.split(SCORED_ROWS), batch.targets.split(SCORED_ROWS), weights
        ):
            logits = rows.to(wide) if head is None else head.logits(rows)
            if weight is None:
                total += F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
            else:
                losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
                total += (losses * weight).sum()
            correct += (logits.argmax(-1) == targets).sum()
        return {
            "cross_entropy": Term(total, per="weight"),
            "token_accuracy": Term(correct, coefficient=0.0),
        }

    def definition(self, logits: Tensor, targets: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        """Return − log p of each target."""
        return -F.log_softmax(logits.float(), dim=-1).gather(-1, targets[:, None])[:, 0]
