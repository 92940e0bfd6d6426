"""Backend of cuDNN's attention for packs that are one long document, by torch's SDPA.

On an H200 its forward pass runs at about 600 TFLOP/s and its backward pass at 520, where torch's
FlashAttention-2 is at 325 (8B heads, 61,440 tokens). cuDNN makes a plan for each shape that it meets,
which takes seconds, so it is for documents that are long and, since each is a whole pack, all of one
length. Sums of its backward pass have no fixed order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from chronicals.attention.support import HALF_DTYPES, Backend, Mask, Spans, Support

LEAST_TOKENS = 1 << 14
"""Tokens of a document from which a plan of its own is worth its seconds."""

MOST_ELEMENTS = 1 << 31
"""Elements of the queries up to which it was run."""


def is_long_document(q: Tensor, spans: Spans) -> bool:
    """Return whether queries ``[Q, H, D]`` are those of one document that is worth a plan."""
    tokens = q.shape[0]
    return spans.are_one_document and tokens >= LEAST_TOKENS and q.numel() < MOST_ELEMENTS


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, _padding: int = 0) -> Tensor:
    q_BHTD, k_BKTD, v_BKTD = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=mask.scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def _is_here() -> bool:
    """Return whether torch was built with cuDNN."""
    return torch.backends.cudnn.is_available()


CUDNN = Backend(
    _attend,
    {
        "cuda": Support(
            HALF_DTYPES,
            {9: 128},
            multiple=8,
            window=False,
            softcap=False,
            sinks=False,
            spans=False,
            packs=False,
            deterministic=False,
        )
    },
    _is_here,
    "a torch that was built with cuDNN",
)
