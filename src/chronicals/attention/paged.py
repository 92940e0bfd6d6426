"""Attention over keys and values that lie in pages, by definition.

Pages have a fixed number of tokens; the pages of a sequence may lie anywhere (vLLM, Kwon et al.,
2023, arXiv 2309.06180). Shapes: N sequences, L pages in a row of the block table, P pages in all,
S tokens of a page, H query heads, K key heads, D and V widths of a key and a value.

    o_n = Σ_j softmax_j(scale · q_n · k_j) v_j        max(0, T_n - window) <= j < T_n

T_n is the number of keys of sequence n, whose last is the query's own. With a softcap or sinks the
scores change as in ``document_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_pages(x_PSKD: Tensor, places: Tensor) -> Tensor:
    """Gather keys or values ``[T, K, D]`` from pages.

    Args:
        x_PSKD: the pages.
        places: int64 ``[T]``, page · S + the token's place within its page.
    """
    return x_PSKD.flatten(0, 1).index_select(0, places)


def paged_attention_reference(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute the attention of one query of each sequence, ``[N, H, V]``.

    All shapes are static: nothing depends on the values of ``lengths_N``, and the host waits for
    nothing. Every page of the block table is read, also behind a sequence's end.

    Args:
        q_NHD: queries, each at the last token of its sequence.
        k_PSKD: pages of keys.
        v_PSKV: pages of values.
        pages_NL: int64, the pages of each sequence in order; entries behind its end name any page.
        lengths_N: int64, keys of each sequence, at least 1.
        sinks: ``[H]``, for each head the logit of an extra key without a value.
        scale: factor on the scores.
        window: a query attends to its own token and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
    """
    groups = q_NHD.shape[1] // k_PSKD.shape[2]
    k_NTKD, v_NTKV = (x[pages_NL].flatten(1, 2) for x in (k_PSKD, v_PSKV))
    q_NKGD = q_NHD.unflatten(1, (-1, groups))
    scores = torch.einsum("nkgd,ntkd->nkgt", q_NKGD, k_NTKD)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k_NTKD.shape[1], device=q_NHD.device)
    seen_NT = keys < lengths_N[:, None]
    if window is not None:
        seen_NT = seen_NT & (keys >= lengths_N[:, None] - window)
    scores = scores.masked_fill(~seen_NT[:, None, None], float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, groups, 1).expand(len(scores), -1, -1, -1)
        scores = torch.cat((scores, extra), -1)
    shares = torch.softmax(scores, -1)[..., : len(keys)].to(v_NTKV.dtype)
    # keys behind the end have no weight, but zero times a value that is not finite is not zero
    v_NTKV = v_NTKV.masked_fill(~seen_NT[:, :, None, None], 0.0)
    return torch.einsum("nkgt,ntkv->nkgv", shares, v_NTKV).flatten(1, 2)
