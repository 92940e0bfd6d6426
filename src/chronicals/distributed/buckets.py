"""Gradients summed over the ranks by few collectives: small ones lie one behind the other in flat
buckets.

A collective takes its launch beside its bytes, and a model with adapters has hundreds of small
gradients. A bucket costs a copy in and a copy out, at the bandwidth of the memory, which is many
times that of what joins the cards. A gradient that fills a bucket by itself is summed where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 1 << 26
"""Bytes of a bucket at most."""

IN_FLIGHT = 3
"""Buckets that exist at a time."""


def buckets(gradients: Sequence[Tensor], size: int = BUCKET) -> list[list[Tensor]]:
    """The gradients in order, those together that are in one bucket: neighbours of one dtype, no
    more than ``size`` bytes.
    """
    found = list[list[Tensor]]()
    room = 0
    for gradient in gradients:
        if not found or gradient.nbytes > room or gradient.dtype != found[-1][0].dtype:
            found.append([])
            room = size
        found[-1].append(gradient)
        room -= gradient.nbytes
    return found


@torch.no_grad()
def sum_over_ranks(gradients: Sequence[Tensor], size: int = BUCKET) -> None:
    """Replace every gradient by the sum over the ranks, in the order of the device's work.

    Args:
        gradients: on all ranks as many, in the same order, alike in shape and dtype.
        size: bytes of a bucket at most.
    """
    flying: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
    for bucket in buckets(gradients, size):
        if len(flying) == IN_FLIGHT:
            _land(*flying.popleft())
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
        flying.append(([] if alone else bucket, flat, dist.all_reduce(flat, async_op=True)))
    while flying:
        _land(*flying.popleft())


def _land(bucket: list[Tensor], flat: Tensor, work: dist.Work) -> None:
    """Wait for a sum, and copy it to where the gradients are."""
    work.wait()
    if bucket:
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(
            bucket, [part.view(gradient.shape) for part, gradient in zip(parts, bucket)]
        )
