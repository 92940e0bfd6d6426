"""One document after the other: torch's SDPA, or the plain form where that lacks softcap and sinks.

Runs everywhere and is the slowest: the bounds come to the host, and a plain document holds its whole score matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.attention.reference import attention_reference
from chronicals.attention.support import Backend, Support


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _longest: int, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, _room: int = 0,
) -> Tensor:  # fmt: skip
    bounds = _bounds(cu, len(q))
    out = [
        _one(q[start:end], k[start:end], v[start:end], scale, window, softcap, sinks)
        for start, end in zip(bounds, bounds[1:])
        if end > start
    ]
    return torch.cat(out) if out else q.clone()


def _bounds(cu: Tensor, tokens: int) -> list[int]:
    """On the host.

    Raises:
        ValueError: they do not cover the tokens, each once.
    """
    bounds: list[int] = cu.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(end < start for start, end in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens={bounds}: must rise from 0 to the {tokens} tokens of q")
    return bounds


def _one(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    q_HSD, k_KSD, v_KSD = (x.transpose(0, 1) for x in (q, k, v))
    length = q.shape[0]
    banded = window is not None and window < length
    plain = softcap is not None or sinks is not None
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril() if banded or plain else None
    if seen is not None and window is not None and banded:
        seen = seen.triu(1 - window)
    if plain:
        return attention_reference(q_HSD, k_KSD, v_KSD, seen, scale, softcap, sinks).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q_HSD[None], k_KSD[None], v_KSD[None], attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


BACKEND = Backend(attend, {"any": Support()})
