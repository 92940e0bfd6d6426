"""Log-probabilities of the targets of a Batch, and their sums by document."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.kernels import token_log_probability
from chronicals.models import PresentedModel, Terms


class TokenScores(NamedTuple):
    """Scores of the positions of a Batch.

    Attributes:
        log_p: log-probability of each target, fp32 ``[T]``; 0 where there is none.
        entropy: entropy of each prediction that has a target, fp32 ``[T]``; 0 elsewhere. Without a
            gradient unless it was asked for.
        auxiliary: further terms of the model.
    """

    log_p: Tensor
    entropy: Tensor
    auxiliary: Terms


def score_tokens(
    model: PresentedModel,
    batch: Batch,
    chunk_size: int,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Compute the log-probability and the entropy of every target.

    A head that is understood gives them in chunks; else they are from the model's own logits.

    Args:
        model: the model that predicts.
        batch: Batch with the targets.
        chunk_size: rows of logits that may exist at a time.
        temperature: divides the logits.
        entropy_gradient: the entropy has a gradient.
    """
    head = model.head
    states, auxiliary = model(batch)
    if head is None:
        ignored = batch.targets == IGNORED
        at_least_fp32 = torch.promote_types(states.dtype, torch.float32)
        scores = torch.log_softmax(states.to(at_least_fp32) / temperature, -1)
        log_p = scores.gather(1, batch.targets.masked_fill(ignored, 0)[:, None]).squeeze(1)
        log_p = log_p.masked_fill(ignored, 0.0)
        scores = scores if entropy_gradient else scores.detach()
        entropy = -(scores.exp() * scores).sum(-1)
        entropy = entropy.masked_fill(ignored, 0.0)
    else:
        log_p, entropy = token_log_probability(
            states,
            head.weight,
            batch.targets,
            bias=head.bias,
            adapter=head.adapter,
            # c · tanh(s x / c) / T is the capped logit of s / T and c / T
            scale=head.scale / temperature,
            softcap=None if head.softcap is None else head.softcap / temperature,
            chunk_size=chunk_size,
            entropy=True,
            count=len(batch) if batch.trained is None else batch.trained,
        )
    entropy = entropy if entropy_gradient else entropy.detach()
    return TokenScores(log_p, entropy, auxiliary)


def document_sums(values: Tensor, batch: Batch) -> Tensor:
    """Add up ``values`` ``[T]`` over the documents, ``[N]``: 0 for one without tokens.

    The order of the additions is fixed, and the host does not wait.
    """
    return torch.segment_reduce(
        values, "sum", offsets=batch.cu_seqlens.long(), unsafe=True, initial=0
    )
