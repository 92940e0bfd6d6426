"""Products of rows sorted by expert with the weight of their expert, both in FP8.

    y_s = (σ_s · τ_e) Σ_k x_sk W_nk[e_s] + u_s B[e_s]ᵀ + b[e_s]        x = σ · values, W[e] = τ_e · values

A row of x has a scale of its own, an expert one for its whole weight, so both leave the sum: the
loop over K holds none. Each is that of the present maximum, as in ``fp8_linear.py``. There x has
one scale, too; here the gradients of rows differ by the shares of their experts, and kernels that
hold whole rows find their maxima in passing. An adapter's u and B stay in 16 bit. Sums are fp32, in
the forward pass as far as the tensor cores' own registers are (``fast``).

dx = dy W is the same product with the transpose of W, which the tensor cores want beside it: of one
scale, it has the same values. The gradient of W is a product in 16 bit (``grouped_product.py``):
its sum runs over rows, whose scales do not leave it.

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
from chronicals.kernels.grouped_product import (
    Adapted,
    ProductLaunch,
    grouped_product_reference,
    launch_product,
    product_launch,
)
from chronicals.kernels.launch import runs_triton
from chronicals.kernels.operators import operator

FP8_STEP_DEPTH = 128
"""Of a step, in elements: rows of 128 bytes, as in 16 bit."""

HOPPER_CAPABILITY = (9, 0)


def fp8_product_launch(
    rows: int, width: int, on: torch.device, rank: int = 0, fast: bool = True
) -> ProductLaunch:
    """That of 16 bit, whose steps have as many bytes. Sums that leave the tensor cores on Hopper
    are in the registers twice: there a tile has half the columns, and each warp half of it; four
    stages are 8 to 11 % faster than three (H100)."""
    launch = product_launch(rows, width, on, rank)
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
) -> Tensor:
    launch = fp8_product_launch(rows, w.shape[1], x.device, 0 if up is None else up.shape[2], fast)
    to = Dispatch(order, order, bounds, tiles, each, rows)
    return launch_product(
        launch, x, w, to, gathers, bias, u, up, scales=(x_scale, w_scale), dtype=dtype, fast=fast
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
) -> Tensor:
    return x.new_empty(len(order), w.shape[1], dtype=dtype)


def fp8_grouped_product(
    x: Scaled,
    weight: Scaled,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: Adapted | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """``[S, N]`` of type ``dtype``: rows times the weight of their expert.

    Args:
        x: e4m3 ``[S, K]`` sorted by expert, with scales ``[S, 1]``; ``[T, K]`` and ``[T, 1]`` where
            ``of_tokens``.
        weight: e4m3 ``[E, N, K]`` with scales ``[E]``, as of ``fp8_quantize_experts``.
        bias: ``[E, N]``.
        adapted: added to it.
        fast: sums stay in the tensor cores' own registers, of fewer bits, all along K.

    Raises:
        ValueError: shapes, types or scales do not fit, or the card has no FP8.
    """
    _check(x, weight, to, of_tokens)
    if reason := lacks_fp8(x.values.device):
        raise ValueError(f"fp8_grouped_product: {reason}; use grouped_product in bf16 or fp16")
    u, up = (None, None) if adapted is None else adapted
    dense = all(part is None or part.stride(-1) == 1 for part in (bias, u)) and (
        u is None or up is None or u.dtype == up.dtype
    )
    if len(to.order_S) and dense and runs_triton(x.scale, weight.scale, bias, u, up):
        given = (
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
        return _product(*given, bias, u, up, dtype, fast)
    return fp8_grouped_product_reference(x, weight, to, of_tokens, bias, adapted, dtype)


def _check(x: Scaled, weight: Scaled, to: Dispatch, of_tokens: bool) -> None:
    rows = len(to.order_S) // to.each if of_tokens else len(to.order_S)
    shape = weight.values.shape
    if (
        x.values.ndim != 2
        or len(shape) != 3
        or x.values.shape != (rows, shape[2])
        or len(weight.values) != to.experts
    ):
        raise ValueError(
            f"x is {tuple(x.values.shape)}, weight {tuple(shape)}: expected [{rows}, K] and "
            f"[{to.experts}, N, K]"
        )
    if x.scale.shape != (rows, 1) or weight.scale.shape != (to.experts,):
        raise ValueError(
            f"scales are {tuple(x.scale.shape)} and {tuple(weight.scale.shape)}: expected "
            f"[{rows}, 1] of rows and "
            f"[{to.experts}] of experts"
        )
    kinds = x.values.dtype, weight.values.dtype
    if kinds != (torch.float8_e4m3fn,) * 2 or not (
        x.values.is_contiguous() and weight.values.is_contiguous()
    ):
        raise ValueError(
            f"values are {kinds[0]} and {kinds[1]}: expected torch.float8_e4m3fn, dense"
        )


def fp8_grouped_product_reference(
    x: Scaled,
    weight: Scaled,
    to: Dispatch,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    adapted: Adapted | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of what both stand for, in fp32, fp64 where that is asked for."""
    wide = torch.promote_types(dtype, torch.float32)
    rows = x.values.to(wide) * x.scale
    dense = weight.values.to(wide) * weight.scale[:, None, None]
    return grouped_product_reference(rows, dense, to, of_tokens, bias, adapted).to(dtype)
