"""Backend that runs one document after another.

Each runs by torch's SDPA, or by the reference if there is a softcap or sinks.

It runs everywhere and is the slowest: bounds are copied to the host, and the reference holds a
document's whole score matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.attention.support import Backend, Mask, Support


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, _padding: int = 0) -> Tensor:
    spans = mask.spans
    query_counts = _lengths(spans.cu_q, len(q))
    key_counts = query_counts
    if not spans.are_equal:
        key_counts = _lengths(spans.cu_k, len(k), "cu_seqlens_k", "k", more=True)
    for n, (queries, keys) in enumerate(zip(query_counts, key_counts, strict=True)):
        if queries > keys:
            raise ValueError(
                f"document {n} has {queries} queries and {keys} keys; give a key for each query"
            )
    # The gradient of a slice is a tensor as long as the whole pack, and there would be one for
    # each document; the gradient of a split is one concatenation.
    beyond = len(k) - sum(key_counts)
    documents = zip(
        q.split(query_counts),
        k.split([*key_counts, beyond]),
        v.split([*key_counts, beyond]),
    )
    out = [_one(*document, mask) for document in documents if len(document[0])]
    return torch.cat(out) if out else q.clone()


def _lengths(
    cu: Tensor, tokens: int, name: str = "cu_seqlens_q", of: str = "q", more: bool = False
) -> list[int]:
    """Return the numbers of tokens of the documents; the host waits for the bounds.

    Args:
        cu: int32 ``[N + 1]``.
        tokens: number of tokens of ``of``.
        name: name of ``cu``, for the message.
        of: name of the tensor whose tokens are divided, for the message.
        more: whether tokens may follow the last document.

    Raises:
        ValueError: the documents do not cover the tokens, each once.
    """
    bounds: list[int] = cu.tolist()
    ends = bool(bounds) and (bounds[-1] == tokens or (more and bounds[-1] < tokens))
    if not ends or bounds[0] != 0 or any(end < start for start, end in zip(bounds, bounds[1:])):
        raise ValueError(f"{name}={bounds}: must rise from 0 to the {tokens} tokens of {of}")
    return [end - start for start, end in zip(bounds, bounds[1:])]


def _one(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Compute the attention of one document's queries to its keys."""
    q_HQD, k_KSD, v_KSD = (x.transpose(0, 1) for x in (q, k, v))
    queries = len(q)
    keys = len(k)
    window = mask.window
    banded = window is not None and window < keys
    plain = mask.softcap is not None or mask.sinks is not None
    seen = None
    # A mask is not needed for one query, which attends to all its keys, nor for equal numbers of
    # queries and keys, for which SDPA has its own causal mask.
    if banded or plain or 1 < queries < keys:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if seen is not None and window is not None and banded:
        seen = seen.triu(keys - queries + 1 - window)
    if plain:
        return attention_reference(
            q_HQD, k_KSD, v_KSD, seen, mask.scale, mask.softcap, mask.sinks
        ).transpose(0, 1)
    causal = seen is None and queries == keys
    if q.is_cuda and (seen is not None or q.dtype == torch.float32):
        # FlashAttention has neither masks nor fp32, and of the others only torch's plain attention,
        # which holds the whole score matrix, lets query heads share keys.
        k_KSD, v_KSD = (x.repeat_interleave(len(q_HQD) // len(k_KSD), 0) for x in (k_KSD, v_KSD))
    out = F.scaled_dot_product_attention(
        q_HQD[None],
        k_KSD[None],
        v_KSD[None],
        attn_mask=seen,
        is_causal=causal,
        scale=mask.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def attention_reference(
    q_HQD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of Q queries to S keys, ``[H, Q, D]``, by definition.

    The whole score matrix of a document exists at once.

    Args:
        q_HQD: queries.
        k_KSD: keys of K heads, which are repeated to H.
        v_KSD: values of K heads, which are repeated to H.
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


PER_DOCUMENT = Backend(_attend, {"any": Support()})
