"""The weighted sum over the experts of each token, in the order of their ranks.

It needs no atomics, so it is reproducible.

    y_t = Σ_j p_tj · z[places[t · k + j]],   j = 0 … k − 1          p = 1 without shares

In fp32, rounded once. Bytes in 16 bit: 2 · D · (k + 1) a token.

Shapes: T tokens, k experts of a token, S = T · k rows of z sorted by expert, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.launch import next_power_of_2, operator, runs_triton, tl, triton


@triton.jit
def _combine_kernel(
    # read
    z_ptr,
    places_ptr,
    shares_ptr,
    # written
    y_ptr,
    # size and strides of rows
    width,
    z_stride,
    y_stride,
    # experts of a token, options, columns of a program
    EACH: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(EACH):
        place = tl.load(places_ptr + token * EACH + rank).to(tl.int64)
        z = tl.load(z_ptr + place * z_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SHARES:
            z *= tl.load(shares_ptr + token * EACH + rank).to(tl.float32)
        total += z
    tl.store(
        y_ptr + token.to(tl.int64) * y_stride + column,
        total.to(y_ptr.dtype.element_ty),
        mask=inside,
    )


@operator("chronicals::expert_combine")
def _combine(z: Tensor, places: Tensor, shares: Tensor | None, each: int) -> Tensor:
    tokens = len(places) // each
    width = z.shape[1]
    y = z.new_empty(tokens, width)
    block = min(2048, next_power_of_2(width))
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        z,
        places,
        shares,
        y,
        width,
        z.stride(0),
        y.stride(0),
        each,
        shares is not None,
        block,
        num_warps=4,
    )
    return y


@torch.library.register_fake(_combine)
def _(z: Tensor, places: Tensor, shares: Tensor | None, each: int) -> Tensor:
    return z.new_empty(len(places) // each, z.shape[1])


def expert_combine(z: Tensor, places: Tensor, each: int, shares: Tensor | None = None) -> Tensor:
    """Sum the rows ``z`` ``[S, D]`` of each token to ``[T, D]``.

    Args:
        z: outputs of the experts, sorted by expert.
        places: int32 ``[S]``, the row of each pair.
        each: k, experts of a token.
        shares: p, ``[S]`` in the order of pairs; None for 1.
    """
    if len(z) and z.stride(1) == 1 and runs_triton(z, shares):
        return _combine(z, places, shares, each)
    return expert_combine_reference(z, places, each, shares)


def expert_combine_reference(
    z: Tensor, places: Tensor, each: int, shares: Tensor | None = None
) -> Tensor:
    """Compute ``expert_combine`` in plain torch."""
    wide = torch.promote_types(z.dtype, torch.float32)
    rows = z[places.long()].to(wide)
    if shares is not None:
        rows = rows * shares.reshape(-1, 1).to(wide)
    return rows.unflatten(0, (-1, each)).sum(1).to(z.dtype)
