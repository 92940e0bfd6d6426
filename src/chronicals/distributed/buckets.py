"""All-reduce of gradients in few collectives: small gradients are packed into flat buckets.

Every collective costs a launch, and a model with adapters has hundreds of small gradients. A bucket
costs one copy in and one copy out at memory bandwidth, which is many times the bandwidth between
GPUs. A gradient that fills a bucket by itself is summed in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 1 << 26
"""Maximum bytes of a bucket."""

IN_FLIGHT = 3
"""Maximum number of buckets in memory at a time."""


def buckets(gradients: Sequence[Tensor], size: int = BUCKET) -> list[list[Tensor]]:
    """Group gradients into buckets, in order: neighbours of one dtype, at most ``size`` bytes each.

    A gradient larger than ``size`` has a bucket of its own.
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
    """Replace every gradient by its sum over the ranks, in stream order.

    Args:
        gradients: the same number, order, shapes and dtypes on all ranks.
        size: maximum bytes of a bucket.
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
    """Wait for a bucket's all-reduce and copy the sums back into its gradients."""
    work.wait()
    if bucket:
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(
            bucket, [part.view(gradient.shape) for part, gradient in zip(parts, bucket)]
        )
