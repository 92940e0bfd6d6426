"""Terms: a loss as named sums. Who knows the counts of the whole step divides, once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.data.loader import Counts
from chronicals.models import PresentedModel


@dataclass(frozen=True)
class Term:
    """One part of a loss.

    Attributes:
        sum: scalar on the device, summed over whatever the term counts.
        coefficient: its weight in the loss.
    """

    sum: Tensor
    coefficient: float = 1.0


Terms = Mapping[str, Term]

Count = int | float | Tensor
"""What a term's sum is divided by; a scalar on the device where steps are CUDA graphs."""


class Objective(Protocol):
    """``(model, batch) → Terms``, and what each term is to be divided by."""

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms: ...

    def counts(self, step: Counts) -> Mapping[str, Count]:
        """For each term its count over the whole optimizer step: all micro-batches, all ranks."""

    def score(self, model: PresentedModel, batch: Batch) -> Mapping[str, Tensor]:
        """Sums for evaluation, at least the objective's own terms."""


def divide(terms: Terms, counts: Mapping[str, Count]) -> Tensor:
    """``Σ coefficient · sum / count``: the only place where a loss is divided. What nothing was counted for stays as it is."""
    parts = [term.sum * (term.coefficient / _not_zero(counts[name])) for name, term in terms.items()]
    return torch.stack(parts).sum()


def _not_zero(count: Count) -> Count:
    """One in the place of zero; a sum of weights may well be less."""
    return torch.where(count == 0, 1.0, count) if isinstance(count, Tensor) else count or 1
