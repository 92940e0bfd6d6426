"""Parts of the definitions of objectives over answers, with which ``verify`` compares a run;
training does not use them.

A definition gets the whole logits of one item's documents, and writes its formula out; it shares
only the settings with the objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chronicals.objectives.reference import REFERENCE
from chronicals.objectives.terms import ScoredDocument


def document_of(item: Sequence[ScoredDocument], side: int) -> ScoredDocument:
    """Return the item's document of this side."""
    return next(document for document in item if document.side == side)


def log_p(document: ScoredDocument) -> Tensor:
    """Return log π of each target, fp32 ``[n]``."""
    return _of_targets(document.logits, document)


def log_ratio(document: ScoredDocument) -> Tensor:
    """Return log π/π_ref of each target, fp32 ``[n]``."""
    return log_p(document) - _of_targets(document.frozen[REFERENCE], document)


def minus_log_sigmoid(x: Tensor) -> Tensor:
    """Return − log σ(x) = log(1 + e⁻ˣ)."""
    return torch.logaddexp(torch.zeros_like(x), -x)


def _of_targets(logits: Tensor, document: ScoredDocument) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, document.targets[:, None])[:, 0]
