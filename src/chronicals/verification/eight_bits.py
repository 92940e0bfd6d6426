"""Linear layers and experts with operands rounded to FP8, in plain torch.

They are for the plain arm of a run with FP8 products and share no code with the kernels. Every
operand is scaled by its amax over the largest e4m3 number and rounded; products are fp32. Each
weight of a linear layer has its own scale here, whereas the kernels share one scale among the
weights of a merged product. Of experts, each weight has a scale, and so does each input row; the
gradients of their weights are computed from unrounded operands.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rounded(x: Tensor, by_rows: bool = False) -> Tensor:
    """Return ``x`` rounded to e4m3 and back, in fp32, with one scale or with one per row."""
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
    """Return ``x Wᵀ``, ``[..., N]``, with operands rounded in the forward and the backward pass."""
    y: Tensor = _RoundedProduct.apply(x, weight)
    return y


def round_products(layer: nn.Linear) -> None:
    """Make ``layer`` compute with rounded operands; its bias is added unrounded."""
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
    """Make transformers' experts compute with rounded operands, one expert after another.

    ``layer`` is a module with ``use_experts_implementation``.
    """
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
    """Return one of an expert's two products with rounded operands.

    An adapter replaces the weight; its difference from the weight is added unrounded.
    """

    def upright(weight: Tensor) -> Tensor:
        return weight.t() if layer.is_transposed else weight

    weight = layer._parameters[name][expert]
    y: Tensor = _ExpertProduct.apply(rows, upright(weight))
    if name in vars(layer):
        y = y + F.linear(rows, upright(vars(layer)[name][expert] - weight.detach()))
    return y + layer.get_parameter(f"{name}_bias")[expert] if layer.has_bias else y
