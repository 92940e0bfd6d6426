"""What the definitions of objectives over answers are written in, for ``verify``: nothing here is
on the path of training.

A definition sees whole logits of one item's documents, and writes its formula out; only settings
are shared with the objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chronicals.objectives.reference import REFERENCE
from chronicals.objectives.terms import ScoredDocument


def document_of(item: Sequence[ScoredDocument], side: int) -> ScoredDocument:
    return next(document for document in item if document.side == side)


def log_p(document: ScoredDocument) -> Tensor:
    """fp32 ``[n]``: log π of each target."""
    return _of_targets(document.logits, document)


def log_ratio(document: ScoredDocument) -> Tensor:
    """fp32 ``[n]``: log π/π_ref of each target."""
    return log_p(document) - _of_targets(document.frozen[REFERENCE], document)


def minus_log_sigmoid(x: Tensor) -> Tensor:
    """− log σ(x) = log(1 + e⁻ˣ)."""
    return torch.logaddexp(torch.zeros_like(x), -x)


def _of_targets(logits: Tensor, document: ScoredDocument) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, document.targets[:, None])[:, 0]
