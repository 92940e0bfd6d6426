"""Compiles FlashAttention-4's kernels for a model, forward and backward, into the package's cache
on disk.

The compilation takes about ten seconds, imports included; ``chronicals.precompilation`` runs ``main``
as a process of its own.
"""

from __future__ import annotations

import torch

from chronicals.attention.documents import document_attention

MOST_TOKENS = 4096


def main(dtype: str, longest: str, heads: str, key_heads: str, width: str, softcap: str) -> None:
    """Attention over one document, and its gradients, on the card; all arguments as they are on a
    command line.

    Args:
        dtype: of torch, by name.
        longest: tokens of the longest document.
        heads, key_heads, width: heads of the queries, heads of keys and values, width of a head.
        softcap: 0 for none.
    """
    tokens = min(int(longest), MOST_TOKENS)
    card = torch.device("cuda")
    q, k, v = (
        torch.zeros(
            tokens, int(n), int(width), device=card, dtype=getattr(torch, dtype), requires_grad=True
        )
        for n in (heads, key_heads, key_heads)
    )
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=card)
    out = document_attention(
        q, k, v, bounds, tokens, softcap=float(softcap) or None, backend="flash-attn-4"
    )
    out.float().sum().backward()
