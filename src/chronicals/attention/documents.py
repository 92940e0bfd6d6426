"""Causal attention in which every token sees its own document only.

Shapes: T tokens, N documents, H query heads, K key/value heads, D head width.
``q_THD``, ``k_TKD``, ``v_TKD``; document n is ``cu_seqlens[n]:cu_seqlens[n + 1]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch ≥ 2.12 wants to be told of grouped heads; 2.11 has no such argument and takes them as they are.
GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def document_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention output ``[T, H, D]``.

    Args:
        cu_seqlens: int32 ``[N + 1]``, ending at T; repeated entries are empty documents.
        max_seqlen: bound on a document's length.
        scale: factor on the scores, ``D ** -0.5`` by default.
        window: a token sees itself and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        sinks: ``[H]``, a logit each head may spend its attention on.
        backend: one of ``BACKENDS``; chosen by ``choose_backend`` if None.
    """
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    backend = backend or choose_backend(q_THD.device, q_THD.dtype, softcap is not None, sinks is not None)
    return BACKENDS[backend](q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, scale, window, softcap, sinks)


def choose_backend(device: torch.device, dtype: torch.dtype, softcap: bool = False, sinks: bool = False) -> str:
    """``flash`` (torch's variable-length FlashAttention) where card, type and mask allow, else ``per-document``."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "flash" if capable and dtype in (torch.bfloat16, torch.float16) and not (softcap or sinks) else "per-document"


def _flash(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, window: int | None, *_: object) -> Tensor:
    left = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(left, 0), **GROUPED_HEADS)
    assert isinstance(out, Tensor)
    return out


def _per_document(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _longest: int, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """SDPA (or its plain form where SDPA lacks softcap and sinks), one document after the other."""
    bounds = cu.tolist()
    out = [
        _attend(q[start:end], k[start:end], v[start:end], scale, window, softcap, sinks)
        for start, end in zip(bounds, bounds[1:])
        if end > start
    ]
    return torch.cat(out)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    q_HSD, k_KSD, v_KSD = (x.transpose(0, 1) for x in (q, k, v))
    length = q.shape[0]
    banded = window is not None and window < length
    seen = (
        torch.ones(length, length, dtype=torch.bool, device=q.device).tril() if banded or softcap or sinks is not None else None
    )
    if seen is not None and banded:
        assert window is not None
        seen = seen.triu(1 - window)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            q_HSD[None], k_KSD[None], v_KSD[None], attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
        )[0]
        return out.transpose(0, 1)
    return attention_reference(q_HSD, k_KSD, v_KSD, seen, scale, softcap, sinks).transpose(0, 1)


def attention_reference(
    q_HSD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One document, whole score matrix: the definition."""
    groups = q_HSD.shape[0] // k_KSD.shape[0]
    k_HSD, v_HSD = (x.repeat_interleave(groups, 0) for x in (k_KSD, v_KSD))
    scores = (q_HSD @ k_HSD.transpose(1, 2)).to(torch.promote_types(q_HSD.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    shares = torch.softmax(scores, -1)[..., : k_HSD.shape[1]]
    return shares.to(v_HSD.dtype) @ v_HSD


BACKENDS: dict[str, Callable[..., Tensor]] = {"flash": _flash, "per-document": _per_document}
