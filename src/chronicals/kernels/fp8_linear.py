"""A linear layer whose three products run in FP8, each operand scaled by its present maximum.

Micikevicius et al., 2022, section 3:

    y = x Wᵀ       rows of x    [T, K]  by  rows of W     [N, K]
    dx = dy W      rows of dy   [T, N]  by  columns of W  [K, N]
    dW = dyᵀ x     columns of dy [N, T] by  columns of x  [K, T]

Scales of rows, as that of a tensor, can be taken out of the sum: y_tn = s_t s_n Σ_k. Scales of
``block`` are applied to partial sums of 128 (DeepSeek-AI, 2024, section 3.3.2); x and dy are scaled
by runs of 128, W by squares. Sums are fp32; in the forward pass they have the precision of the
tensor cores' accumulators. The output has the dtype of x; the gradient ignores the rounding
(straight-through). Saved for backward: both column layouts, a byte a value. T is padded with rows
of zeros to a multiple of 16, or of 128 with ``block``; K and N must be such multiples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.fp8 import (
    FP8_BLOCK,
    Scaled,
    dequantize,
    fp8_quantize,
    lacks_fp8,
    scale_shape,
)
from chronicals.kernels.launch import differentiable_once

FP8_MULTIPLE = 16
"""Every dimension of an FP8 product on a card must be a multiple of it."""

LINEAR_SCALINGS = {"tensor": "tensor", "row": "row", "block": "square"}
"""The scaling of W for each scaling of x and dy."""

BLOCK_SCALING_CAPABILITY = (9, 0)
"""The only compute capability for which cuBLAS multiplies with scales of blocks."""

BLOCK_SCALING_CUDA = (12, 9)
"""The first CUDA version whose cuBLAS does."""


class Layouts(NamedTuple):
    """A matrix quantised by rows and by columns, each None if not needed."""

    rows: Scaled | None
    columns: Scaled | None


def scaled_product(
    left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Return ``left @ rightᵀ + bias``, ``[M, N]`` of dtype ``dtype``.

    Args:
        left: ``[M, K]``.
        right: ``[N, K]``.
        dtype: dtype of the result.
        fast: keep sums in the tensor cores' accumulators, which have fewer bits than fp32, along
            all of K.
        bias: ``[N]`` of dtype ``dtype``.
    """
    with_bias = False
    of_rows = 1, (len(right.values), 1)
    by_blocks = left.scale.ndim and (left.scale.shape[1], right.scale.shape) != of_rows
    if not left.values.is_cuda:
        y = dequantize(left) @ dequantize(right).t()
        y = y if bias is None else y + bias
        with_bias = True
    elif by_blocks:
        y = _product_of_blocks(left, right)
    else:
        # With scales of rows torch's product writes bf16 only.
        product_dtype = torch.bfloat16 if left.scale.ndim else dtype
        # The product itself adds a bias of its own output dtype, but not in fp32.
        with_bias = product_dtype == dtype != torch.float32
        options: dict[str, Any] = {
            "scale_a": left.scale,
            "scale_b": right.scale.t(),
            "bias": bias if with_bias else None,
            "use_fast_accum": fast,
        }
        y = torch._scaled_mm(left.values, right.values.t(), out_dtype=product_dtype, **options)
    # Dynamo of torch 2.11 must not trace a ``to`` that does nothing: what a Function's forward
    # returns would get gradients of zero (pytorch issue 180642).
    if y.dtype != dtype:
        y = y.to(dtype)
    return y if bias is None or with_bias else y + bias


def _product_of_blocks(left: Scaled, right: Scaled) -> Tensor:
    """Return ``left @ rightᵀ`` in bf16.

    ``left`` is scaled by runs of 128, ``right`` by runs or squares.
    """
    # cuBLAS expects scales of runs stored by columns, and those of squares by rows, padded to a
    # multiple of 4 (its manual, "Scaling factors layouts"). Scales saved for the backward pass may
    # have been made contiguous.
    runs = F.ScalingType.BlockWise1x128
    squares = F.ScalingType.BlockWise128x128
    by_runs = len(right.scale) == len(right.values)
    of_right = (
        right.scale.t().contiguous().t()
        if by_runs
        else F.pad(right.scale, (0, -right.scale.shape[1] % 4)).t()
    )
    return F.scaled_mm(
        left.values,
        right.values.t(),
        left.scale.t().contiguous().t(),
        runs,
        of_right,
        runs if by_runs else squares,
        output_dtype=torch.bfloat16,
    )


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        known: Layouts | None,
        scaling: str,
        gradient_type: torch.dtype,
    ) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        x_rows, x_columns = fp8_quantize(x, scaling, layout="both" if of_weight else "rows")
        rows, columns = known or fp8_quantize(
            weight, LINEAR_SCALINGS[scaling], layout="both" if of_x else "rows"
        )
        saved = x_columns if of_weight else None, columns if of_x else None
        ctx.save_for_backward(*(part for scaled in saved for part in scaled or (None, None)))
        ctx.options = scaling, gradient_type, weight.dtype
        assert x_rows is not None and rows is not None
        return scaled_product(x_rows, rows, x.dtype, fast=True)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_x, of_weight, *_ = ctx.needs_input_grad
        x_values, x_scale, values, scale = ctx.saved_tensors
        scaling, gradient_type, weight_type = ctx.options
        layout = "both" if of_x and of_weight else "rows" if of_x else "columns"
        dy_rows, dy_columns = fp8_quantize(dy, scaling, gradient_type, layout)
        dx = scaled_product(dy_rows, Scaled(values, scale), dy.dtype) if of_x and dy_rows else None
        dw = (
            scaled_product(dy_columns, Scaled(x_values, x_scale), weight_type)
            if of_weight and dy_columns
            else None
        )
        return dx, dw


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scaling: str = "tensor",
    gradient_type: torch.dtype = torch.float8_e4m3fn,
    known: Layouts | None = None,
) -> Tensor:
    """Return ``x Wᵀ + b``, ``[..., N]``, by FP8 products; differentiable in x, weight and bias.

    Args:
        x: ``[..., K]`` in bf16, fp16 or fp32.
        weight: ``[N, K]`` in the dtype of x.
        bias: ``[N]``, or None.
        scaling: ``tensor``, ``row`` or ``block``.
        gradient_type: FP8 dtype of dy. e4m3 has more precision; e5m2 has more range, which scales
            from present maxima do not need. With ``block`` cuBLAS takes e4m3 only.
        known: the weight in FP8, from ``fp8_quantize`` with both layouts, if it is frozen or
            quantised already; scaled by ``square`` for ``block``.

    Raises:
        ValueError: shapes or dtypes do not fit, or the card has no FP8 or no products with such
            scales.
    """
    if lacks_fp8(x.device):
        raise ValueError(
            f"fp8_linear: {lacks_fp8(x.device)}; use torch.nn.functional.linear in bf16 or fp16"
        )
    if scaling not in LINEAR_SCALINGS:
        raise ValueError(f"scaling={scaling!r}: expected one of {', '.join(LINEAR_SCALINGS)}")
    if scaling == "block":
        _check_blocks(x.device, gradient_type)
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} in {x.dtype}, weight {tuple(weight.shape)} in {weight.dtype}: "
            "expected [..., K] and [N, K] of one dtype"
        )
    multiple = FP8_BLOCK if scaling == "block" else FP8_MULTIPLE
    if any(size % multiple for size in weight.shape):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: FP8 products need multiples of {multiple}; "
            "leave it in 16 bit"
        )
    if known is not None:
        if known.rows is None or (x.requires_grad and known.columns is None):
            raise ValueError(
                "known: lacks a layout; give fp8_quantize(weight, scaling, layout='both')"
            )
        if known.rows.scale.shape != scale_shape(weight.shape, LINEAR_SCALINGS[scaling]):
            raise ValueError(
                f"known: was not scaled by scaling={LINEAR_SCALINGS[scaling]!r}, as "
                f"scaling={scaling!r} needs it"
            )
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    filled = F.pad(rows, (0, 0, 0, -count % multiple)) if count % multiple else rows
    y = _FP8Linear.apply(filled, weight, known, scaling, gradient_type)[:count]
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], len(weight))


def _check_blocks(device: torch.device, gradient_type: torch.dtype) -> None:
    """Raise ValueError unless cuBLAS multiplies with scales of blocks on this device."""
    if gradient_type != torch.float8_e4m3fn:
        raise ValueError(
            f"gradient_type={gradient_type}: products with scales of blocks are of "
            "torch.float8_e4m3fn alone"
        )
    if (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) != BLOCK_SCALING_CAPABILITY
    ):
        raise ValueError(
            f"scaling='block': {torch.cuda.get_device_name(device)} has no such products; use "
            "'row' or 'tensor'"
        )
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if device.type == "cuda" and version < BLOCK_SCALING_CUDA:
        raise ValueError(
            f"scaling='block': torch is built for CUDA {torch.version.cuda}, 12.9 has it; use "
            "'row' or 'tensor'"
        )
