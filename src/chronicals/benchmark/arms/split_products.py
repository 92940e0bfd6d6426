"""Products in fp32 with frozen weights that are bf16 numbers, by tensor cores: of the reference over a frozen base.

A significand of fp32 has 24 bits, of TF32 11, of bf16 8. ``x`` is taken as the sum of two TF32 numbers: its first 11 bits, and
the 13 that are left, of which the tensor core reads 11. So ``x`` is there to 2⁻²², and each product with a bf16 number is exact
before it is added in fp32 (Ootomo and Yokota 2022, arXiv:2203.03341, for two operands of fp32, which take three products). Two
products at the rate of TF32 take about a quarter of the time of one in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_BITS = -(1 << 13)
"""Keeps of an fp32 number what TF32 has."""

ROWS, WORSE = 256, 8.0
"""Rows by which the products are tried on a card, and how many times the error of plain fp32 they may have."""


def split_frozen(model: nn.Module) -> bool:
    """Have the frozen linear layers of an fp32 model multiply so, where their weights allow it.

    Returns:
        whether they do; False on a card where the products are less exact than is promised, and with no such layer.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _can(module.weight)]
    if not layers or not as_exact(layers[0].weight):
        return False
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    return True


def _can(weight: Tensor) -> bool:
    return not weight.requires_grad and weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float())


def as_exact(weight: Tensor) -> bool:
    """Whether products of random rows are about as near to those in fp64 as fp32's are."""
    x = torch.randn(ROWS, weight.shape[1], device=weight.device)
    exact = F.linear(x.double(), weight.double())
    split, plain = ((found.double() - exact).abs().max() for found in (_times(x, weight.t()), F.linear(x, weight)))
    return bool(split <= WORSE * plain)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if layer.weight.dtype != torch.float32:  # while the model is in bf16
        return F.linear(x, layer.weight, layer.bias)
    out = _SplitProduct.apply(x, layer.weight)
    return out if layer.bias is None else out + layer.bias


class _SplitProduct(torch.autograd.Function):
    """``x [..., K]`` times the transpose of a frozen ``weight [N, K]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _times(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _times(gradients[0], ctx.saved_tensors[0]), None


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """``x [..., K]`` times ``weight [K, N]``."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    first = (flat.view(torch.int32) & FIRST_BITS).view(torch.float32)
    return _sum_of_products(first, flat - first, weight).view(*x.shape[:-1], weight.shape[1])


def _sum_of_products(first: Tensor, rest: Tensor, weight: Tensor) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return (first @ weight).addmm_(rest, weight)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
