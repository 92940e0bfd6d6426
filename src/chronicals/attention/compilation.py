"""Compilation of FlashAttention-4's kernels for a model, forward and backward.

The kernels go into the package's cache on disk.

This takes about ten seconds, imports included, so ``chronicals.precompilation`` runs ``main`` in a
process of its own.
"""

from __future__ import annotations

import torch

from chronicals.attention.documents import document_attention

MAX_COMPILE_TOKENS = 4096
"""Tokens of the longest document that is attended to; longer ones use the same kernels."""


def main(dtype: str, longest: str, heads: str, key_heads: str, width: str, softcap: str) -> None:
    """Run attention over one document, and its backward pass, on the card.

    Args are strings, since they come from a command line.

    Args:
        dtype: name of a torch dtype.
        longest: tokens of the longest document.
        heads: number of heads of the queries.
        key_heads: number of heads of keys and values.
        width: width of a head.
        softcap: 0 for none.
    """
    tokens = min(int(longest), MAX_COMPILE_TOKENS)
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
