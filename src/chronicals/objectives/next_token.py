"""Next-token prediction: supervised fine-tuning and pretraining.

    loss = − (1 / n) Σ_t log p(y_t | x_≤t)        over the n positions whose target y_t is trained

n counts the whole optimizer step, never a micro-batch (Radford et al., 2018, equation 1, as a mean).
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
from chronicals.objectives.terms import Term, Terms

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
            losses = F.cross_entropy(_wide(model.logits(batch)), batch.targets, reduction="none", ignore_index=IGNORED)
            return {"cross_entropy": Term((losses if batch.weights is None else losses * batch.weights).sum())}
        total = linear_cross_entropy(
            model.hidden_states(batch), head.weight, batch.targets, bias=head.bias, adapter=head.adapter, scale=head.scale,
            softcap=head.softcap, weights=batch.weights, count=batch.trained, chunk_size=self.chunk_size,
        )  # fmt: skip
        return {"cross_entropy": Term(total)}

    def counts(self, step: Counts) -> Mapping[str, int]:
        return {"cross_entropy": step.targets}

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Mapping[str, Tensor]:
        """Sums of ``cross_entropy`` and of ``correct`` (targets that are the likeliest token)."""
        head = model.head
        states = model.logits(batch) if head is None else model.hidden_states(batch)
        sums = {name: torch.zeros((), device=states.device) for name in ("cross_entropy", "correct")}
        for rows, targets in zip(states.split(ROWS), batch.targets.split(ROWS)):
            logits = _wide(rows) if head is None else head.logits(rows)
            sums["cross_entropy"] += F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
            sums["correct"] += (logits.argmax(-1) == targets).sum()
        return sums


def _wide(logits: Tensor) -> Tensor:
    """In fp32 at least, as through the head."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
