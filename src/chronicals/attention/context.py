"""Attention over documents whose tokens several ranks share (DeepSpeed-Ulysses; Jacobs et al., 2023, section 3).

Each of c ranks has T / c of the tokens, with all heads. An all-to-all gives every rank all T tokens of 1 / c of the heads,
attention runs as it does on one rank, and another brings its outputs back to their tokens:

    q, k, v  [T/c, H, D]  →  [T, H/c, D]  →  attention  →  [T, H/c, D]  →  [T/c, H, D]

A rank sends (2 H + 2 K) · D · T/c · (c − 1)/c values in a layer, of H query and K key heads, forward and as many backward.
Documents, windows and softcaps are those of one rank, and the work is the same on all, whatever the documents' lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.batch import Context


def attend_in_context(
    attend: Callable[..., Tensor], q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: Context, *of_heads: Tensor
) -> Tensor:  # fmt: skip
    """Attention output of this rank's tokens, ``[T/c, H, D]``, or as wide as the values.

    Args:
        attend: ``(q, k, v, *of_heads)`` of all tokens and some heads to their output.
        q_QHD, k_TKD, v_TKD: of this rank's tokens.
        of_heads: ``[H]`` each, as sinks.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
    """
    heads, groups, count = q_QHD.shape[1], k_TKD.shape[1], context.count
    if reason := why_not_divided(heads, groups, count):
        raise ValueError(reason)
    if groups % count:  # each rank's query heads belong to one key head, which others have as well
        k_TKD, v_TKD = (x.repeat_interleave(count // groups, dim=1) for x in (k_TKD, v_TKD))
    q, k, v = (_Exchange.apply(x, context, True) for x in (q_QHD, k_TKD, v_TKD))
    own = (values.chunk(count)[context.rank] for values in of_heads)
    out: Tensor = _Exchange.apply(attend(q, k, v, *own), context, False)
    return out


def why_not_divided(heads: int, groups: int, count: int) -> str | None:
    """What keeps attention with so many query and key heads from being divided among ``count`` ranks."""
    if heads % count == 0 and (groups % count == 0 or count % groups == 0):
        return None
    return f"{heads} query and {groups} key heads cannot be divided among {count} ranks"


class _Exchange(torch.autograd.Function):
    """``[T/c, H, D]`` of all heads to ``[T, H/c, D]`` of all tokens, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, to_heads: bool) -> Tensor:
        ctx.context, ctx.to_heads = context, to_heads
        return _to_heads(x, context) if to_heads else _to_tokens(x, context)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (_to_tokens if ctx.to_heads else _to_heads)(dy, ctx.context), None, None


def _to_heads(x_THD: Tensor, context: Context) -> Tensor:
    parts = x_THD.unflatten(1, (context.count, -1)).transpose(0, 1).contiguous()  # [c, T/c, H/c, D], by the rank they go to
    return _sent(parts, context).flatten(0, 1)


def _to_tokens(x_THD: Tensor, context: Context) -> Tensor:
    parts = x_THD.contiguous().unflatten(0, (context.count, -1))
    return _sent(parts, context).transpose(0, 1).flatten(1, 2)


def _sent(parts: Tensor, context: Context) -> Tensor:
    """Part n to rank n; in place n what rank n sent."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=context.group)
    return received
