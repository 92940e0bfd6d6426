"""Term: a named sum on the device, of which losses and metrics are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One part of a loss, or a metric; its value is ``sum`` over the count of the whole optimizer
    step.

    Attributes:
        sum: scalar on the device, over one Batch.
        coefficient: its weight in the loss; 0 for a metric, which is shown and not minimised.
        per: what the sum is divided by: the name of a count of the step, such as ``targets``,
            ``weight`` or ``packs``.
    """

    sum: Tensor
    coefficient: float = 1.0
    per: str = "targets"


Terms = Mapping[str, Term]
