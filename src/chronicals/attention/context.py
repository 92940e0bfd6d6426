"""Attention over documents that are split across several ranks (context parallelism).

Each of c ranks has two chunks of every split document, n tokens in all, with all heads. It also has
whole documents, to which it attends by itself. Split documents are attended to in one of two ways.

First, heads are exchanged (DeepSpeed-Ulysses; Jacobs et al., 2023, section 3): an all-to-all gives
every rank all c n tokens of 1 / c of the heads, attention runs as on one rank, and another
all-to-all returns the outputs:

    q, k, v  [n, H, D]  →  [c n, H/c, D]  →  attention  →  [c n, H/c, D]  →  [n, H, D]

With H query and K key heads a rank sends (2 H + 2 K) · D · n · (c − 1) / c values in a layer
forward, and as many backward.

Second, keys and values of all ranks are gathered (as in Llama 3; Dubey et al., 2024, section
3.3.2). Each of the rank's chunks attends to its document up to the chunk's end, by a causal mask
aligned at the end. One chunk is from the front of a document and one from its back, so all ranks
have the same work. Gradients of keys and values are reduce-scattered in fp32. A rank receives 2 K ·
D · n · (c − 1) values forward and sends as many backward; c need not divide the number of heads.
Gathered tensors are not saved; the backward pass gathers them again. For long documents a few key
heads are gathered at a time.

Over several machines both are combined: ranks of a machine exchange heads, and each gathers keys of
its share of the heads from the ranks in the same position on the other machines. Windows, softcaps
and sinks work as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.batch import SharedKeys, SplitDocuments

GATHER_BYTES = 1 << 30
"""Bytes of keys and values gathered at a time, but at least one head's. (Those of a million tokens
with 8 heads are 4 GiB.)
"""

DocumentAttend = Callable[..., Tensor]
"""A function of ``(q, k, v, cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k, *of_heads)``
that returns the attention output, as ``document_attention`` does.
"""


def attend_split(
    attend: DocumentAttend,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    split: SplitDocuments,
    *of_heads: Tensor,
) -> Tensor:
    """Compute the attention of this rank's tokens; all ranks of the group must call it together.

    Args:
        attend: attention on one rank.
        q_THD: queries of this rank's tokens, those of split documents first.
        k_TKD: keys of the same tokens.
        v_TKD: values of the same tokens.
        split: how documents are split.
        *of_heads: tensors with a value for each head, ``[H]``, such as sinks.

    Returns:
        ``[T, H, D]``, as wide as the values.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
    """
    n = split.tokens
    heads = q_THD.shape[1]
    groups = k_TKD.shape[1]
    inner = split.context.inner
    if reason := why_not_divided(heads, groups, inner):
        raise ValueError(reason)
    q, k, v = (x if n == len(q_THD) else x[:n] for x in (q_THD, k_TKD, v_TKD))
    head_values = of_heads
    if inner > 1:
        if groups % inner:
            # Fewer key heads than ranks: each rank's query heads belong to one key head, which
            # other ranks get as well.
            k, v = (x.repeat_interleave(inner // groups, dim=1) for x in (k, v))
        q, k, v = (_Exchange.apply(x, split, True) for x in (q, k, v))
        head_values = tuple(values.chunk(inner)[split.context.rank % inner] for values in of_heads)
    if split.keys is None:
        together = attend(q, k, v, split.cu_seqlens, split.max_seqlen, None, None, *head_values)
    else:
        together = _to_gathered(attend, q, k, v, split, split.keys, *head_values)
    if inner > 1:
        together = _Exchange.apply(together, split, False)
    del q, k, v  # those of exchanged heads, before whole documents are attended to
    if n == len(q_THD):
        return together
    alone = attend(
        q_THD[n:], k_TKD[n:], v_TKD[n:], split.whole, split.max_whole, None, None, *of_heads
    )
    return torch.cat((together, alone))


def _to_gathered(
    attend: DocumentAttend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: SplitDocuments,
    keys: SharedKeys,
    *of_heads: Tensor,
) -> Tensor:
    """Compute the attention of this rank's queries to the keys and values of all ranks.

    These are gathered some heads at a time.
    """
    heads = q.shape[1]
    groups = k.shape[1]
    a_head = len(keys.index) * (k.shape[2] + v.shape[2]) * k.element_size()
    at_once = max(1, GATHER_BYTES // a_head)
    ratio = heads // groups
    outs = []
    for first in range(0, groups, at_once):
        of_k = slice(first, first + at_once)
        of_q = slice(first * ratio, (first + at_once) * ratio)
        shards = k[:, of_k], v[:, of_k]
        gathered = [_Gather.apply(x, split) for x in shards]
        with _saving_shards(shards, gathered, split):
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
def _saving_shards(
    shards: Sequence[Tensor], gathered: Sequence[Tensor], split: SplitDocuments
) -> Iterator[None]:
    """Save this rank's shard for backward instead of the gathered tensor, inside the ``with`` block.

    No effect under other saved-tensor hooks, such as those of activation recomputation, which keeps
    a layer's tensors only while the layer computes.

    Args:
        shards: this rank's keys and values.
        gathered: those of all ranks, in the same order.
        split: how documents are split.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        yield
        return

    pairs = list(zip(shards, gathered))

    def pack(x: Tensor) -> Tensor | _Shard:
        for shard, whole in pairs:
            if (
                x.data_ptr() == whole.data_ptr()
                and x.shape == whole.shape
                and x.stride() == whole.stride()
            ):
                return _Shard(shard.detach(), split)
        return x

    def unpack(saved: Tensor | _Shard) -> Tensor:
        return _gathered(saved.x_QKD, saved.split) if isinstance(saved, _Shard) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    pairs.clear()  # autograd keeps ``pack``, which would keep the gathered tensors


@dataclass(frozen=True)
class _Shard:
    """This rank's part of a gathered tensor."""

    x_QKD: Tensor
    split: SplitDocuments


def why_not_divided(heads: int, groups: int, count: int) -> str | None:
    """Return why attention cannot be divided among ``count`` ranks by heads, or None if it can.

    Args:
        heads: number of query heads.
        groups: number of key heads.
        count: number of ranks.
    """
    if heads % count == 0 and (groups % count == 0 or count % groups == 0):
        return None
    return f"{heads} query and {groups} key heads cannot be divided among {count} ranks"


class _Exchange(torch.autograd.Function):
    """All-to-all from ``[n, H, D]`` to ``[c n, H/c, D]``, or back.

    The first are all heads of this rank's tokens, the second some heads of all ranks' tokens, in
    the order of the documents.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: SplitDocuments, to_heads: bool) -> Tensor:
        ctx.split = split
        ctx.to_heads = to_heads
        return _exchanged(x, split, to_heads)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchanged(dy, ctx.split, not ctx.to_heads), None, None


def _exchanged(x: Tensor, split: SplitDocuments, to_heads: bool) -> Tensor:
    """Exchange parts of ``x`` among the ranks, as ``_Exchange`` describes it."""
    inner = split.context.inner
    if to_heads:
        parts = x.unflatten(1, (inner, -1)).transpose(0, 1).contiguous()  # [c, n, H/c, D]
    else:
        x = x.contiguous() if split.back is None else x.index_select(0, split.back)
        parts = x.unflatten(0, (inner, -1))
    # Part n goes to rank n, and the received part n comes from rank n.
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=split.context.inner_group)
    del parts  # before what was received is copied in another order
    if not to_heads:
        return received.transpose(0, 1).flatten(1, 2)
    tokens = received.flatten(0, 1)
    return tokens if split.order is None else tokens.index_select(0, split.order)


class _Gather(torch.autograd.Function):
    """Gather keys or values of all ranks, ``[n, K, D]`` of this one.

    The result ``[keys, K, D]`` has those that the rank's queries attend to.

    The backward pass adds the gradients of each gathered token in fp32, first in the order of the
    rank's chunks and then over the ranks.
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
        shard = total.new_empty(len(total) // split.context.outer, *total.shape[1:])
        dist.reduce_scatter_tensor(shard, total, group=split.context.outer_group)
        return shard.to(dy.dtype), None


def _gathered(x_QKD: Tensor, split: SplitDocuments) -> Tensor:
    """Return the keys or values of all ranks in the order in which this rank attends to them."""
    assert split.keys is not None
    gathered = x_QKD.new_empty(split.context.outer * len(x_QKD), *x_QKD.shape[1:])
    dist.all_gather_into_tensor(gathered, x_QKD.contiguous(), group=split.context.outer_group)
    return gathered.index_select(0, split.keys.index)
