"""A named sum on the device, from which losses and metrics are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One part of a loss, or a metric: ``sum`` divided by a count over the whole optimizer step.

    Attributes:
        sum: scalar on the device, over one Batch.
        coefficient: weight in the loss; 0 for a metric, which is only logged.
        per: name of the count that divides the sum, such as ``targets``, ``weight`` or ``packs``.
    """

    sum: Tensor
    coefficient: float = 1.0
    per: str = "targets"


Terms = Mapping[str, Term]
