"""Matrix products that sum in fp32 and round once, and two calls beside each other.

The products round alike on a card and on the CPU.

A product whose number of tiles is no multiple of the multiprocessors leaves some of them idle in
its last wave. A second product on a stream of lower priority fills these and takes no others. On
streams of equal priority the two would take turns, which gains nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def product(left: Tensor, right: Tensor, kind: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return ``scale · left @ right``, ``[M, N]`` of dtype ``kind``.

    The sum is fp32 and is rounded once, to ``kind``. A card can only write its operands' dtype or
    fp32; any other ``kind`` is cast from the operands' dtype.
    """
    if not left.is_cuda:
        wide = torch.promote_types(left.dtype, torch.float32)
        return torch.mm(left.to(wide), right.to(wide)).mul_(scale).to(kind)
    options: dict[str, Any] = (
        {"out_dtype": kind} if left.dtype != kind and kind == torch.float32 else {}
    )
    if scale == 1.0:
        return torch.mm(left, right, **options).to(kind)
    out = left.new_empty(
        (left.shape[0], right.shape[1]), dtype=options.get("out_dtype", left.dtype)
    )
    return torch.addmm(out, left, right, **options, beta=0, alpha=scale, out=out).to(kind)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``left @ right`` into ``out``, whose rows may be strided."""
    if left.is_cuda:
        torch.mm(left, right, out=out)
    else:
        out.copy_(product(left, right, out.dtype))


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x Wᵀ``, ``[..., N]``, with W ``[N, K]``.

    Args:
        x: ``[..., K]``.
        weight: of the dtype of x.
        dtype: of the result, that of x or fp32; by default that of x.
    """
    if dtype is None or dtype == x.dtype:
        return F.linear(x, weight)
    return product(x.flatten(0, -2), weight.t(), dtype).unflatten(0, x.shape[:-1])


def add_product_(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` to ``out`` ``[M, N]``, in their dtype or in fp32, and return it."""
    if out.dtype == left.dtype:
        return out.addmm_(left, right)
    if not left.is_cuda:
        return out.add_(product(left, right, out.dtype))
    options: dict[str, Any] = {"out_dtype": out.dtype}
    return torch.addmm(out, left, right, **options, out=out)


HIGH_PRIORITY = -1
"""CUDA priority of a stream beside which another may work."""

LOWEST_PRIORITY = 0
"""The lowest CUDA priority, which is the default."""


def at_once(first: Callable[[], None], beside: Callable[[], None], device: torch.device) -> None:
    """Run both calls; work enqueued later on the current stream sees both finished.

    They overlap if the current stream has ``HIGH_PRIORITY`` or a higher one. Otherwise, and on the
    CPU, they run one after the other, with the same results.

    Args:
        first: runs on the current stream.
        beside: runs on a stream of the lowest priority, on the multiprocessors that ``first``
            leaves idle. It must not write what ``first`` reads or writes, nor read what it writes.
        device: the device of both.
    """
    current = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if current is None or current.priority > HIGH_PRIORITY:
        first()
        beside()
        return
    other = stream_of_priority(device, LOWEST_PRIORITY)
    other.wait_stream(current)
    try:
        with torch.cuda.stream(other):
            beside()
        first()
    finally:
        current.wait_stream(other)


@functools.cache
def stream_of_priority(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Return a stream of a card, the same for the same priority."""
    return torch.cuda.Stream(device, priority=priority)
