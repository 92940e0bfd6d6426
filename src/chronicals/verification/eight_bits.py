"""Linear layers and experts with operands rounded to FP8, in plain torch: for the plain arm of a
run that has FP8 products.

Every operand is scaled by its amax over the largest number of e4m3 and rounded; products are fp32.
It shares no code with the kernels. Here each weight of a linear layer has a scale of its own; there
the weights of a merged product share one. Of experts each has a scale, and each row of what it
multiplies; the gradients of their weights are products of what is not rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rounded(x: Tensor, by_rows: bool = False) -> Tensor:
    """``x`` as e4m3 with one scale represents it, or with one of each row, fp32."""
    most = x.abs().amax(-1, keepdim=True) if by_rows else x.abs().max()
    scale = most.float().clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8 = rounded(x)
        weight8 = rounded(weight)
        ctx.save_for_backward(x8, weight8)
        ctx.dtypes = x.dtype, weight.dtype
        return F.linear(x8, weight8).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x8, weight8 = ctx.saved_tensors
        dy8 = rounded(dy)
        dx = (dy8 @ weight8).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = (
            (dy8.flatten(0, -2).t() @ x8.flatten(0, -2)).to(ctx.dtypes[1])
            if ctx.needs_input_grad[1]
            else None
        )
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


class _ExpertProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight8 = rounded(weight)
        ctx.save_for_backward(x, weight8)
        ctx.weight_type = weight.dtype
        return F.linear(rounded(x, by_rows=True), weight8).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight8 = ctx.saved_tensors
        dx = (rounded(dy, by_rows=True) @ weight8).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = (dy.float().t() @ x.float()).to(ctx.weight_type) if ctx.needs_input_grad[1] else None
        return dx, dw


def round_experts(layer: nn.Module) -> None:
    """Let experts as transformers defines them (``use_experts_implementation``) compute with
    rounded operands, one after the other."""
    layer.forward = partial(_through_experts, layer)  # type: ignore[method-assign]


def _through_experts(layer: Any, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    y = x.new_zeros(*experts.shape, x.shape[1])
    for expert in range(len(layer.down_proj)):
        token, rank = torch.where(experts == expert)
        if len(token):
            unit = layer._apply_gate(_of_expert(layer, "gate_up_proj", expert, x[token]))
            out = _of_expert(layer, "down_proj", expert, unit)
            y = y.index_put((token, rank), (out * shares[token, rank, None]).to(y.dtype))
    return y.sum(1)


def _of_expert(layer: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    """One of its two products; what an adapter has put in place of the weight adds its
    difference, unrounded.
    """

    def upright(weight: Tensor) -> Tensor:
        return weight.t() if layer.is_transposed else weight

    weight = layer._parameters[name][expert]
    y: Tensor = _ExpertProduct.apply(rows, upright(weight))
    if name in vars(layer):
        y = y + F.linear(rows, upright(vars(layer)[name][expert] - weight.detach()))
    return y + layer.get_parameter(f"{name}_bias")[expert] if layer.has_bias else y
