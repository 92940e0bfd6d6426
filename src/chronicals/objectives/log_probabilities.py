"""Log-probabilities of the answers of a Batch, by document."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.kernels import token_log_probability
from chronicals.models import PresentedModel, Terms


class TokenScores(NamedTuple):
    """Attributes:
    log_p: fp32 ``[T]``, of each target; 0 where there is none.
    entropy: fp32 ``[T]``, of each prediction that has a target, without a gradient; 0 elsewhere.
    auxiliary: further terms of the model.
    """

    log_p: Tensor
    entropy: Tensor
    auxiliary: Terms


def score_tokens(model: PresentedModel, batch: Batch, chunk_size: int) -> TokenScores:
    """Through the head without whole logits, where it is understood.

    Args:
        chunk_size: rows of logits that may exist at a time.
    """
    head = model.head
    states, auxiliary = model(batch)
    if head is None:
        log_p, entropy = _of_logits(states, batch.targets)
    else:
        log_p, entropy = token_log_probability(
            states,
            head.weight,
            batch.targets,
            bias=head.bias,
            adapter=head.adapter,
            scale=head.scale,
            softcap=head.softcap,
            chunk_size=chunk_size,
            entropy=True,
            count=len(batch) if batch.trained is None else batch.trained,
        )
    return TokenScores(log_p, entropy.detach(), auxiliary)


def _of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    ignored = targets == IGNORED
    scores = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    log_p = scores.gather(1, targets.masked_fill(ignored, 0)[:, None]).squeeze(1)
    entropy = -(scores.detach().exp() * scores.detach()).sum(-1)
    return log_p.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def document_sums(values: Tensor, batch: Batch) -> Tensor:
    """``[N]``: the sum of ``values`` ``[T]`` over each document, 0 for one without tokens; in
    one order, without waiting.
    """
    return torch.segment_reduce(
        values, "sum", offsets=batch.cu_seqlens.long(), unsafe=True, initial=0
    )


def document_targets(batch: Batch, dtype: torch.dtype) -> Tensor:
    """``[N]``: how many targets each document has."""
    return document_sums((batch.targets != IGNORED).to(dtype), batch)
