"""Backend of torch's variable-length attention, FlashAttention-2 (Dao, 2023), which torch contains."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from chronicals.attention.support import HALF_DTYPES, Backend, Mask, Support

# torch ≥ 2.12 needs an argument for grouped heads; 2.11 does not have it and supports them anyway.
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, _padding: int = 0) -> Tensor:
    seen = (-1 if mask.window is None else mask.window - 1, 0)
    spans = mask.spans
    bounds = spans.cu_q, spans.cu_k, spans.max_q, spans.max_k
    out = varlen_attn(q, k, v, *bounds, scale=mask.scale, window_size=seen, **GROUPED_HEADS)
    assert isinstance(out, Tensor)
    return out


FLASH_ATTENTION_2 = Backend(
    _attend,
    {
        "cuda": Support(
            HALF_DTYPES,
            dict.fromkeys((8, 9, 10, 11, 12), 256),
            multiple=8,
            softcap=False,
            sinks=False,
        )
    },
)
