"""Attention to documents that several ranks have parts of.

Each of c ranks has two chunks of every such document, n tokens in all, with all heads, and its
other documents whole, to which it attends alone. For what is split there are two ways. Heads are
exchanged (DeepSpeed-Ulysses; Jacobs et al., 2023, section 3): an all-to-all gives every rank all c
n tokens of 1 / c of the heads, attention runs as it does on one rank, and another all-to-all brings
its outputs back:

    q, k, v  [n, H, D]  →  [c n, H/c, D]  →  attention  →  [c n, H/c, D]  →  [n, H, D]

A rank sends (2 H + 2 K) · D · n · (c − 1) / c values in a layer, of H query and K key heads,
forward and as many backward.

Or keys and values of all ranks are gathered (as in Llama 3; Dubey et al., 2024, section 3.3.2), and
each of the rank's chunks attends to its document up to the chunk's end, a causal mask aligned at
the end. One chunk is from the front of a document and one from its back, so all ranks see as many
keys. Gradients of keys and values are reduce-scattered in fp32. A rank receives 2 K · D · n · (c −
1) values forward and sends as many backward, whatever H is and whether c divides it. What is
gathered is not kept for the backward pass, which gathers it again, and of long documents it is a
few key heads at a time.

Ranks of several machines do both: those of a machine exchange heads, and keys are gathered, a share
of the heads each, from the ranks in the same place on the others. Windows, softcaps and sinks are
those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.batch import Context, SharedKeys, SplitDocuments

GATHER_BYTES = 1 << 30
"""Bytes of keys and values that are gathered at a time, at least those of one head; all of a
million tokens of 8 heads are 4 GiB."""

DocumentAttend = Callable[..., Tensor]
"""``(q, k, v, cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k, *of_heads)`` to the
output, as ``document_attention``.
"""


def attend_split(
    attend: DocumentAttend,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    split: SplitDocuments,
    *of_heads: Tensor,
) -> Tensor:
    """Attention output of this rank's tokens, ``[T, H, D]``, or as wide as the values; all ranks
    that share call it alike.

    Args:
        q_THD, k_TKD, v_TKD: of this rank's tokens, those of split documents first.
        of_heads: ``[H]`` each, as sinks.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
    """
    n = split.tokens
    if n == len(q_THD):
        return _together(attend, q_THD, k_TKD, v_TKD, split, *of_heads)
    together = _together(attend, q_THD[:n], k_TKD[:n], v_TKD[:n], split, *of_heads)
    alone = attend(
        q_THD[n:], k_TKD[n:], v_TKD[n:], split.whole, split.max_whole, None, None, *of_heads
    )
    return torch.cat((together, alone))


def _together(
    attend: DocumentAttend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: SplitDocuments,
    *of_heads: Tensor,
) -> Tensor:
    """Output for this rank's tokens of split documents, ``[n, H, D]``."""
    heads = q.shape[1]
    groups = k.shape[1]
    inner = split.context.inner
    if reason := why_not_divided(heads, groups, inner):
        raise ValueError(reason)
    own = of_heads
    if inner > 1:
        if (
            groups % inner
        ):  # each rank's query heads belong to one key head, which others have as well
            k, v = (x.repeat_interleave(inner // groups, dim=1) for x in (k, v))
        q, k, v = (_Exchange.apply(x, split, True) for x in (q, k, v))
        own = tuple(values.chunk(inner)[split.context.rank % inner] for values in of_heads)
    if split.keys is None:
        out = attend(q, k, v, split.cu_seqlens, split.max_seqlen, None, None, *own)
    else:
        out = _to_gathered(attend, q, k, v, split, split.keys, *own)
    return _Exchange.apply(out, split, False) if inner > 1 else out


def _to_gathered(
    attend: DocumentAttend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: SplitDocuments,
    keys: SharedKeys,
    *of_heads: Tensor,
) -> Tensor:
    """Output of queries that attend to the keys and values of all ranks, some heads at a time."""
    heads = q.shape[1]
    groups = k.shape[1]
    a_head = len(keys.index) * (k.shape[2] + v.shape[2]) * k.element_size()
    at_once = max(1, GATHER_BYTES // a_head)
    ratio = heads // groups
    outs = []
    for first in range(0, groups, at_once):
        of_k = slice(first, first + at_once)
        of_q = slice(first * ratio, (first + at_once) * ratio)
        own = k[:, of_k], v[:, of_k]
        gathered = [_Gather.apply(x, split) for x in own]
        with _kept_as(own, gathered, split):
            some = (values[of_q] for values in of_heads)
            outs.append(
                attend(
                    q[:, of_q],
                    *gathered,
                    split.cu_seqlens,
                    split.max_seqlen,
                    keys.cu_seqlens,
                    keys.max_seqlen,
                    *some,
                )
            )
        del gathered
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


@contextmanager
def _kept_as(
    own: Sequence[Tensor], gathered: Sequence[Tensor], split: SplitDocuments
) -> Iterator[None]:
    """Within: of what was gathered the backward pass keeps what it was gathered from. Not where
    others decide what is kept, as recomputation does, for which a layer's are there only while
    it computes."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        yield
        return

    pairs = list(zip(own, gathered))

    def pack(x: Tensor) -> Tensor | _Own:
        for mine, whole in pairs:
            if (
                x.data_ptr() == whole.data_ptr()
                and x.shape == whole.shape
                and x.stride() == whole.stride()
            ):
                return _Own(mine.detach(), split)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        yield
    pairs.clear()  # autograd keeps the function


@dataclass(frozen=True)
class _Own:
    """Of the tokens of this rank what was gathered from all."""

    x_QKD: Tensor
    split: SplitDocuments


def _unpacked(kept: Tensor | _Own) -> Tensor:
    return _gathered(kept.x_QKD, kept.split) if isinstance(kept, _Own) else kept


def why_not_divided(heads: int, groups: int, count: int) -> str | None:
    """What keeps attention with so many query and key heads from being divided among ``count``
    ranks.
    """
    if heads % count == 0 and (groups % count == 0 or count % groups == 0):
        return None
    return f"{heads} query and {groups} key heads cannot be divided among {count} ranks"


class _Exchange(torch.autograd.Function):
    """``[n, H, D]`` of all heads to ``[c n, H/c, D]`` of the tokens of c ranks, document after
    document, or back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: SplitDocuments, to_heads: bool) -> Tensor:
        ctx.split = split
        ctx.to_heads = to_heads
        return _to_heads(x, split) if to_heads else _to_tokens(x, split)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (_to_tokens if ctx.to_heads else _to_heads)(dy, ctx.split), None, None


def _to_heads(x_QHD: Tensor, split: SplitDocuments) -> Tensor:
    parts = (
        x_QHD.unflatten(1, (split.context.inner, -1)).transpose(0, 1).contiguous()
    )  # [c, n, H/c, D]
    found = _sent(parts, split.context).flatten(0, 1)
    return found if split.order is None else found.index_select(0, split.order)


def _to_tokens(x_THD: Tensor, split: SplitDocuments) -> Tensor:
    x_THD = x_THD.contiguous() if split.back is None else x_THD.index_select(0, split.back)
    return (
        _sent(x_THD.unflatten(0, (split.context.inner, -1)), split.context)
        .transpose(0, 1)
        .flatten(1, 2)
    )


def _sent(parts: Tensor, context: Context) -> Tensor:
    """Part n to rank n; in place n what rank n sent."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=context.inner_group)
    return received


class _Gather(torch.autograd.Function):
    """Keys or values ``[n, K, D]`` that this rank has to those that its queries attend to, ``[keys,
    K, D]``.

    Backward each gathered token's gradients are added up in fp32 in the order of the chunks, and
    then over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x_QKD: Tensor, split: SplitDocuments) -> Tensor:
        ctx.split = split
        return _gathered(x_QKD, split)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        split = ctx.split
        wide = torch.promote_types(dy.dtype, torch.float32)
        first, second = (
            torch.where(
                (place >= 0)[:, None, None], dy.index_select(0, place.clamp(min=0)), 0.0
            ).to(wide)
            for place in split.keys.places.unbind()
        )
        total = first.add_(second)
        own = total.new_empty(len(total) // split.context.outer, *total.shape[1:])
        dist.reduce_scatter_tensor(own, total, group=split.context.outer_group)
        return own.to(dy.dtype), None


def _gathered(x_QKD: Tensor, split: SplitDocuments) -> Tensor:
    assert split.keys is not None
    gathered = x_QKD.new_empty(split.context.outer * len(x_QKD), *x_QKD.shape[1:])
    dist.all_gather_into_tensor(gathered, x_QKD.contiguous(), group=split.context.outer_group)
    return gathered.index_select(0, split.keys.index)
