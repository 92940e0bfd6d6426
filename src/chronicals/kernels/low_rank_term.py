"""The term that an adapter adds to a tile of a grouped product, ``u B[e]ᵀ``.

u ``[S, R]`` are rows times the adapter's first matrix, B ``[E, N, R]`` its second one, of experts e.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.launch import next_power_of_2, shared_memory, tl, triton

MAX_ADAPTER_COLUMNS = 256
"""Columns of an adapter that a tile holds at once, at most: as many as fit in shared memory beside
the tile's narrowest result.
"""

MAX_ADAPTER_COLUMNS_SMALL = 64
"""The same for cards with at most 64 KiB of shared memory, as a T4, which multiplies in fp32."""


class LowRankTerm(NamedTuple):
    """The adapter's part of a product: ``u_SR B[e]ᵀ``, with B ``[E, N, R]``."""

    u_SR: Tensor
    up_ENR: Tensor


@triton.jit
def low_rank_term(
    total,
    u_ptr,
    up_ptr,
    row,
    expert,
    column,
    width,
    u_stride,
    up_stride_e,
    up_stride_n,
    up_stride_r,
    RANK: tl.constexpr,
    HELD: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return a tile's sums plus its part of ``u B[e]ᵀ``; without an adapter ``RANK`` is 0."""
    for of_rank in tl.static_range(0, RANK, HELD):
        r = of_rank + tl.arange(0, HELD)
        u_at = u_ptr + row.to(tl.int64)[:, None] * u_stride + r[None, :]
        u = tl.load(u_at, mask=(r < RANK)[None, :], other=0.0)
        up_at = (
            up_ptr
            + expert.to(tl.int64) * up_stride_e
            + column[None, :] * up_stride_n
            + r[:, None] * up_stride_r
        )
        up = tl.load(up_at, mask=(r < RANK)[:, None] & (column < width)[None, :], other=0.0)
        total = tl.dot(u.to(KIND), up.to(KIND), total, input_precision="ieee")
    return total


def held_columns(rank: int, on: torch.device) -> int:
    """Return the columns of an adapter that a tile holds at once, a power of 2."""
    most = MAX_ADAPTER_COLUMNS_SMALL if 0 < shared_memory(on) <= 64 << 10 else MAX_ADAPTER_COLUMNS
    return min(most, max(16, next_power_of_2(rank)))


def low_rank_strides(u: Tensor | None, up: Tensor | None) -> tuple[int, ...]:
    """Return the stride of rows of u and the three of B, as kernels take them; 0 for None."""
    of_u = 0 if u is None else u.stride(0)
    return of_u, *((0, 0, 0) if up is None else up.stride())
