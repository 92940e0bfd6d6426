"""Backend of FlexAttention: its abilities, without the import of ``flex.py``, which takes a second."""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.attention.support import HALF_DTYPES, Backend, Spans, Support


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    padding: int = 0,
) -> Tensor:
    from chronicals.attention.backends import flex

    return flex.attend(q, k, v, spans, scale, window, softcap, sinks, padding)


BACKEND = Backend(
    attend,
    {
        "cuda": Support(
            HALF_DTYPES | {torch.float32}, dict.fromkeys((8, 9, 10, 11, 12), 256), multiple=16
        ),
        "cpu": Support(
            HALF_DTYPES | {torch.float32}, {0: 256}, multiple=16, sinks=False, forward_only=True
        ),
    },
)
