"""Gather keys and values for documents that share a prompt, whose tokens are stored once.

Shapes: T tokens, K keys of all documents, S answers to a prompt, H heads, D head width.

    y[i] = x[index[i]]        dx[t] = Σ_j dy[places[j, t]]  over the valid places

The backward pass gathers, too, so sums have one order. Bytes a layer, for keys and for values: 2·(T
+ K)·H·D forward; backward with at most (S + 1)·T in place of K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.batch import SharedKeys


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x_THD.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy_KHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        total = dy_KHD.new_zeros(1, dtype=torch.promote_types(dy_KHD.dtype, torch.float32))
        for place in places.unbind():
            of_place = dy_KHD.index_select(0, place.clamp(min=0))
            total = total + torch.where((place >= 0)[:, None, None], of_place, 0.0)
        return total.to(dy_KHD.dtype), None, None


def gather_keys(x_THD: Tensor, keys: SharedKeys) -> Tensor:
    """Gather keys or values ``[K, H, D]`` in the order of ``keys.cu_seqlens``.

    On a card K may exceed ``keys.cu_seqlens[-1]``, which the host does not know; attention does not
    read the rest.
    """
    index = keys.index
    if not index.is_cuda:
        index = index[: int(keys.cu_seqlens[-1])]
    gathered: Tensor = _Gather.apply(x_THD, index, keys.places)
    return gathered
