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
    nothing. Every page of the block table is read, also behind a sequence's end. Everything is
    computed in at least fp32, but the weights are rounded to the values' dtype, before they are
    divided by their sum: so do the kernels of training, with whose log-probabilities those of
    generation are compared.

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
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    k_NTKD, v_NTKV = (x[pages_NL].flatten(1, 2).to(wide) for x in (k_PSKD, v_PSKV))
    q_NKGD = q_NHD.unflatten(1, (-1, groups)).to(wide)
    scores = torch.einsum("nkgd,ntkd->nkgt", q_NKGD, k_NTKD) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k_NTKD.shape[1], device=q_NHD.device)
    seen_NT = keys < lengths_N[:, None]
    if window is not None:
        seen_NT = seen_NT & (keys >= lengths_N[:, None] - window)
    scores = scores.masked_fill(~seen_NT[:, None, None], float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        extra = sinks.to(wide).view(1, -1, groups, 1)
        highest = torch.maximum(highest, extra)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(extra - highest)
    # keys behind the end have no weight, but zero times a value that is not finite is not zero
    v_NTKV = v_NTKV.masked_fill(~seen_NT[:, :, None, None], 0.0)
    rounded = weights.to(v_PSKV.dtype).to(wide)
    out = torch.einsum("nkgt,ntkv->nkgv", rounded, v_NTKV) / total
    return out.flatten(1, 2).to(q_NHD.dtype)
