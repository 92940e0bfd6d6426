"""Products in fp32 with frozen weights that are bf16 numbers, by tensor cores.

They are those of the reference over a frozen base.

A significand of fp32 has 24 bits, of TF32 11, of bf16 8. ``x`` is taken as the sum of two TF32
numbers: its first 11 bits, and the 13 that are left, of which the tensor core reads 11. So ``x`` is
there to 2⁻²², and each product with a bf16 number is exact before it is added (Ootomo and Yokota
2022, arXiv:2203.03341, for two operands of fp32, which take three products). As they found, a
tensor core cuts off what its sums have beyond fp32, where fp32 units round, and such errors grow
with a sum's length: sums of the first parts are short ones, added in fp32. Two products at the rate
of TF32 take about a quarter of the time of one in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_BITS = -(1 << 13)
"""Keeps of an fp32 number what TF32 has."""

TERMS = (4096, 512, 128)
"""Terms that a tensor core may sum by itself; the largest number that is exact enough on the card
is taken."""

TRIAL_ROWS = 256
"""Rows by which the products are tried on a card."""

ERROR_FACTOR = 8.0
"""Largest error of the products, as a multiple of that of plain fp32."""


def split_frozen(model: nn.Module) -> int | None:
    """Let the frozen linear layers of an fp32 model multiply by tensor cores.

    These are the layers whose weights are bf16 numbers.

    Returns:
        the terms that a tensor core sums by itself. None if no layer is changed: none is such, or
        the products are not exact enough on this card.
    """
    layers = []
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.requires_grad:
            continue
        weight = module.weight
        if weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float()):
            layers.append(module)
    if not layers:
        return None
    largest = max((layer.weight for layer in layers), key=lambda weight: max(weight.shape))
    terms = next((terms for terms in TERMS if as_exact(largest, terms)), None)
    if terms is not None:
        for layer in layers:
            layer.forward = partial(_forward, layer, terms)  # type: ignore[method-assign]
    return terms


def as_exact(weight: Tensor, terms: int) -> bool:
    """Return whether products with the weight, and with its transpose, are exact enough.

    Those of random rows must be about as near to products in fp64 as fp32's.
    """
    for right in (weight, weight.t()):
        x = torch.randn(TRIAL_ROWS, right.shape[0], device=right.device)
        exact = x.double() @ right.double()
        split_error = (_times(x, right, terms).double() - exact).abs().max()
        plain_error = ((x @ right).double() - exact).abs().max()
        if not bool(split_error <= ERROR_FACTOR * plain_error):
            return False
    return True


def _forward(layer: nn.Linear, terms: int, x: Tensor) -> Tensor:
    if layer.weight.dtype != torch.float32:  # while the model is in bf16
        return F.linear(x, layer.weight, layer.bias)
    out = _SplitProduct.apply(x, layer.weight, terms)
    return out if layer.bias is None else out + layer.bias


class _SplitProduct(torch.autograd.Function):
    """``x [..., K]`` times the transpose of a frozen ``weight [N, K]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, terms: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.terms = terms
        return _times(x, weight.t(), terms)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _times(gradients[0], ctx.saved_tensors[0], ctx.terms), None, None


def _times(x: Tensor, right: Tensor, terms: int) -> Tensor:
    """Return ``x [..., K]`` times ``right [K, N]``."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    first = (flat.view(torch.int32) & FIRST_BITS).view(torch.float32)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        out = (flat - first) @ right
        for begin in range(0, len(right), terms):
            _add_product(out, first[:, begin : begin + terms], right[begin : begin + terms])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return out.view(*x.shape[:-1], right.shape[1])


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    out.addmm_(left, right)
