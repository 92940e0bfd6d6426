"""The definition of attention, for one document and with its whole score matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    q_HQD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of Q queries to S keys, ``[H, Q, D]``.

    Args:
        k_KSD, v_KSD: keys and values of K heads, which are repeated to H.
        seen: bool ``[Q, S]``, the keys that each query attends to; all if None.
        scale: factor on the scores.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        sinks: ``[H]``, the logit of an extra key without a value, one for each head.
    """
    groups = q_HQD.shape[0] // k_KSD.shape[0]
    k_HSD, v_HSD = (x.repeat_interleave(groups, 0) for x in (k_KSD, v_KSD))
    scores = (q_HQD @ k_HSD.transpose(1, 2)).to(
        torch.promote_types(q_HQD.dtype, torch.float32)
    ) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat(
            (scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)), -1
        )
    shares = torch.softmax(scores, -1)[..., : k_HSD.shape[1]]
    return shares.to(v_HSD.dtype) @ v_HSD
