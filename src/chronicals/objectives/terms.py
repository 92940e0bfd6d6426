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


class Objective(Protocol):
    """``(model, batch) → Terms``, and what each term is to be divided by."""

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms: ...

    def counts(self, step: Counts) -> Mapping[str, int]:
        """For each term its count over the whole optimizer step: all micro-batches, all ranks."""

    def score(self, model: PresentedModel, batch: Batch) -> Mapping[str, Tensor]:
        """Sums for evaluation, at least the objective's own terms."""


def divide(terms: Terms, counts: Mapping[str, int | Tensor]) -> Tensor:
    """``Σ coefficient · sum / count``: the only place where a loss is divided. Counts may be scalars on the device."""
    parts = [term.sum * (term.coefficient / _at_least_one(counts[name])) for name, term in terms.items()]
    return torch.stack(parts).sum()


def _at_least_one(count: int | Tensor) -> int | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
