"""Next-token prediction: supervised fine-tuning and pretraining.

    loss = − Σ_t w_t log p(y_t | x_≤t) / Σ_t w_t        over the positions whose target y_t is trained

w_t is 1 where a Batch has no weights. The denominator is that of the whole optimizer step, never of a micro-batch (Radford et
al., 2018, equation 1, as a mean).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.data.loader import Counts
from chronicals.kernels import linear_cross_entropy
from chronicals.models import PresentedModel
from chronicals.objectives.terms import Count, Term, Terms

ROWS = 4096
"""Rows of logits that exist at a time while a model is scored."""

CHUNK = 4352
"""The same while it is trained, unless told otherwise."""


class NextToken:
    """Cross-entropy of every trained target, summed; through the head without whole logits where it is understood.

    Args:
        chunk_size: rows of logits that exist at a time.
    """

    def __init__(self, chunk_size: int = CHUNK):
        self.chunk_size = chunk_size

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        head = model.head
        if head is None:
            return {"cross_entropy": Term(_weighted(_wide(model.logits(batch)), batch.targets, batch.weights))}
        total = linear_cross_entropy(
            model.hidden_states(batch), head.weight, batch.targets, bias=head.bias, adapter=head.adapter, scale=head.scale,
            softcap=head.softcap, weights=batch.weights, count=batch.trained, chunk_size=self.chunk_size,
        )  # fmt: skip
        return {"cross_entropy": Term(total)}

    def counts(self, step: Counts) -> Mapping[str, Count]:
        return {"cross_entropy": step.targets if step.weight is None else step.weight}

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Mapping[str, Tensor]:
        """Sums of ``cross_entropy``, with its weights, and of ``correct`` (targets that are the likeliest token)."""
        head = model.head
        states = model.logits(batch) if head is None else model.hidden_states(batch)
        sums = {name: torch.zeros((), device=states.device) for name in ("cross_entropy", "correct")}
        weights = [None] * len(batch) if batch.weights is None else batch.weights.split(ROWS)
        for rows, targets, weight in zip(states.split(ROWS), batch.targets.split(ROWS), weights):
            logits = _wide(rows) if head is None else head.logits(rows)
            if weight is None:
                sums["cross_entropy"] += F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
            else:
                sums["cross_entropy"] += _weighted(logits, targets, weight)
            sums["correct"] += (logits.argmax(-1) == targets).sum()
        return sums


def _weighted(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cross-entropy summed over the targets that are not ignored, each with its weight."""
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return (losses if weights is None else losses * weights).sum()


def _wide(logits: Tensor) -> Tensor:
    """In fp32 at least, as through the head."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
