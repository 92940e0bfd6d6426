"""A linear layer with operands rounded to FP8, in plain torch: for the plain arm of a run that has FP8 products.

Every operand is scaled by its amax over the largest number of e4m3 and rounded; products are fp32. It shares no code with the
kernels. Here each weight has a scale of its own; there the weights of a merged product share one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rounded(x: Tensor) -> Tensor:
    """``x`` as e4m3 with one scale represents it, fp32."""
    scale = x.abs().max().float().clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = rounded(x), rounded(weight)
        ctx.save_for_backward(x8, weight8)
        ctx.dtypes = x.dtype, weight.dtype
        return F.linear(x8, weight8).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x8, weight8 = ctx.saved_tensors
        dy8 = rounded(dy)
        dx = (dy8 @ weight8).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = (dy8.flatten(0, -2).t() @ x8.flatten(0, -2)).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return dx, dw


def rounded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x Wᵀ``, ``[..., N]``, with rounded operands, in the backward pass too."""
    y: Tensor = _RoundedProduct.apply(x, weight)
    return y


def round_products(layer: nn.Linear) -> None:
    """Let ``layer`` compute with rounded operands; its bias is added as it is."""
    layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    y = rounded_linear(x, layer.weight)
    return y if layer.bias is None else y + layer.bias
