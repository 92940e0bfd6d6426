"""Grouped products in FP8: rows sorted by expert times the weight of their expert.

    y_s = (σ_s · τ_e) Σ_k x_sk W_nk[e_s] + u_s B[e_s]ᵀ + b[e_s]        x = σ · values, W[e] = τ_e · values

A row of x has a scale σ, an expert one scale τ for its whole weight, so both can be taken out of
the sum over K. They come from the present maxima, as in ``fp8_linear.py``, where x may have one
scale for all; here each row has one, since gradients of rows differ by the shares of their experts.
Kernels that hold whole rows find the maxima in passing. An adapter's u and B stay in 16 bit. Sums
are fp32; in the forward pass (``fast``) they have the precision of the tensor cores' accumulators.

dx = dy W is the same product with the transpose of W, whose values are the same. The gradient of W
is a product in 16 bit (``grouped_product.py``): it sums over rows, so scales of rows cannot be
taken out.

Floor at S rows: ``2 · S · N · K`` FLOP; bytes: ``S · K + E · N · K + 2 · S · N``. Values are e4m3
and dense along K.

Shapes: S pairs of token and expert, T tokens, E experts, K inputs, N outputs, R rank of an adapter.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from chronicals.kernels.expert_dispatch import Dispatch
from chronicals.kernels.fp8 import Scaled, lacks_fp8
from chronicals.kernels.grouped_launch import ProductLaunch
from chronicals.kernels.grouped_product import (
    check_product,
    grouped_product_reference,
    launch_product,
    product_launch,
)
from chronicals.kernels.launch import operator, runs_triton
from chronicals.kernels.low_rank_term import LowRankTerm

FP8_STEP_DEPTH = 128
"""Depth of a step of the sum over K: 128 elements are rows of 128 bytes, as in 16 bit."""

HOPPER_CAPABILITY = (9, 0)


def fp8_product_launch(
    rows: int, width: int, on: torch.device, rank: int = 0, fast: bool = True
) -> ProductLaunch:
    """Return the launch of the product: that of 16 bit, whose steps have as many bytes."""
    launch = product_launch(rows, width, on, rank)
    # Exact fp32 sums on Hopper leave the tensor cores and are in registers twice. So a tile then
    # has half the columns and twice the warps. Four stages are 8 to 11 % faster than three (H100).
    if fast or on.type != "cuda" or torch.cuda.get_device_capability(on) != HOPPER_CAPABILITY:
        return replace(launch, depth=FP8_STEP_DEPTH)
    return replace(
        product_launch(rows, min(width, 128), on, rank), depth=FP8_STEP_DEPTH, warps=8, stages=4
    )


@operator("chronicals::fp8_grouped_product")
def _product(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    rows: int,
    gathers: bool,
    bias: Tensor | None,
    u: Tensor | None,
    up: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
    slots: Tensor | None,
) -> Tensor:
    launch = fp8_product_launch(rows, w.shape[1], x.device, 0 if up is None else up.shape[2], fast)
    to = Dispatch(order, order, bounds, tiles, each, rows)
    return launch_product(
        launch,
        x,
        w,
        to,
        gathers,
        bias,
        u,
        up,
        scales=(x_scale, w_scale),
        dtype=dtype,
        fast=fast,
        slots=slots,
    )


@torch.library.register_fake(_product)
def _(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    rows: int,
    gathers: bool,
    bias: Tensor | None,
    u: Tensor | None,
    up: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
    slots: Tensor | None,
) -> Tensor:
    return x.new_empty(len(order), w.shape[1], dtype=dtype)


def fp8_grouped_product(
    x: Scaled,
    weight: Scaled,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: LowRankTerm | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
    slots: Tensor | None = None,
) -> Tensor:
    """Multiply each row with the weight of its expert.

    Args:
        x: e4m3 ``[S, K]`` sorted by expert, with scales ``[S, 1]``; ``[T, K]`` and ``[T, 1]`` if
            ``of_tokens``.
        weight: e4m3 ``[E, N, K]`` with scales ``[E]``, as from ``fp8_quantize_experts``; with
            ``slots`` matrices of any number, and the scales are those of the experts.
        to: the dispatch of the rows.
        of_tokens: gather the rows of x from tokens.
        bias: ``[E, N]``.
        adapted: the adapter's part, added to the result.
        dtype: dtype of the result.
        fast: keep sums in the tensor cores' accumulators, which have fewer bits than fp32, along
            all of K.
        slots: int32 ``[E]``, the place in ``weight`` of each expert's matrix.

    Returns:
        ``[S, N]``.

    Raises:
        ValueError: shapes, dtypes or scales do not fit, or the card has no FP8.
    """
    check_product(x.values, weight.values, to, of_tokens, slots)
    rows = len(x.values)
    if x.scale.shape != (rows, 1) or weight.scale.shape != (to.experts,):
        raise ValueError(
            f"scales are {tuple(x.scale.shape)} and {tuple(weight.scale.shape)}: expected "
            f"[{rows}, 1] of rows and [{to.experts}] of experts"
        )
    kinds = x.values.dtype, weight.values.dtype
    dense_weight = weight.values[0].is_contiguous() if len(weight.values) else True
    both_dense = x.values.is_contiguous() and dense_weight
    if kinds != (torch.float8_e4m3fn,) * 2 or not both_dense:
        raise ValueError(
            f"values are {kinds[0]} and {kinds[1]}: expected torch.float8_e4m3fn, dense"
        )
    if reason := lacks_fp8(x.values.device):
        raise ValueError(f"fp8_grouped_product: {reason}; use grouped_product in bf16 or fp16")
    u, up = (None, None) if adapted is None else adapted
    dense = all(part is None or part.stride(-1) == 1 for part in (bias, u)) and (
        u is None or up is None or u.dtype == up.dtype
    )
    if len(to.order_S) and dense and runs_triton(x.scale, weight.scale, bias, u, up):
        operands = (
            x.values,
            x.scale,
            weight.values,
            weight.scale,
            to.order_S,
            to.bounds,
            to.tiles,
            to.each,
            to.rows,
            of_tokens,
        )
        return _product(*operands, bias, u, up, dtype, fast, slots)
    return fp8_grouped_product_reference(x, weight, to, of_tokens, bias, adapted, dtype, slots)


def fp8_grouped_product_reference(
    x: Scaled,
    weight: Scaled,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: LowRankTerm | None = None,
    dtype: torch.dtype = torch.bfloat16,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute the product of the dequantised operands in plain torch, in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    rows = x.values.to(wide) * x.scale
    values = weight.values if slots is None else weight.values[slots.long().clamp(min=0)]
    dense = values.to(wide) * weight.scale[:, None, None]
    return grouped_product_reference(rows, dense, to, of_tokens, bias, adapted).to(dtype)
