"""Linear layers and experts of the plain arms: quantised weights, and operands rounded to FP8.

**Quantised weights.** The dense weight of a layer is its output for the identity matrix. The weight
of its backward pass may differ: bitsandbytes rounds that one to the dtype the weight had before
quantisation, and that of the forward pass to the dtype of the product. Experts are dequantised by
the definition of their format.

**FP8.** The plain arm of a run with FP8 products rounds operands in plain torch, and shares no code
with the kernels. Every operand is scaled by its amax over the largest e4m3 number and rounded;
products are fp32. Each weight of a linear layer has its own scale here, whereas the kernels share
one scale among the weights of a merged product. Of experts, each weight has a scale, and so does
each input row; the gradients of their weights are computed from unrounded operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.config import ConfigurationError
from chronicals.lora.targets import linear_shape
from chronicals.quantization import PackedExperts

_ROWS = 1024
"""Number of rows of the identity that a layer multiplies at a time."""

AGREES = 0.004
"""Relative tolerance for a product of random rows.

bf16 deviates by 0.001, inputs rounded to 8 bits by 0.006.
"""


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers whose weights are not floats of at least 16 bits.

    Keys are their paths in the model without adapters.
    """
    found = {}
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None) if linear_shape(layer) else None
        if isinstance(weight, Tensor) and (
            not weight.is_floating_point() or weight.element_size() == 1
        ):
            found[path.removesuffix(".base_layer")] = layer
    return found


def weights_of_experts(path: str, experts: PackedExperts) -> dict[str, Tensor]:
    """Return the dequantised weights and the biases of packed experts.

    Keys are the parameter names of the plain class in the model.
    """
    found = {f"{path}.{name}": parameter.detach() for name, parameter in experts.named_parameters()}
    for name in experts.stacked:
        found[f"{path}.{name}"] = experts.reference(name)
    return found


def dense_weight(path: str, layer: nn.Module) -> Tensor:
    """Return the weight that ``layer`` multiplies by in the forward pass, fp32 ``[out, in]``.

    Raises:
        ConfigurationError: the layer also rounds its inputs, so it is not a product with a weight.
    """
    wide, _ = linear_shape(layer)  # type: ignore[misc]
    device = next(layer.parameters()).device
    with _without_bias(layer), torch.no_grad():
        weight = (
            torch.cat([layer(rows).float() for rows in torch.eye(wide, device=device).split(_ROWS)])
            .t()
            .contiguous()
        )
        x = torch.randn(8, wide, device=device).bfloat16().float()
        expected = F.linear(x, weight)
        off = float((layer(x).float() - expected).norm() / expected.norm().clamp(min=1e-30))
    if not off <= AGREES:
        raise ConfigurationError(
            f"model: {path} ({type(layer).__name__}) does not multiply by its weight alone, it "
            "rounds its inputs too (off by "
            f"{off:.1%}), which the plain arms cannot repeat; verify the model without "
            "quantisation, or in 4 bits"
        )
    return weight


def multiply_as(own: nn.Module, plain: Any) -> None:
    """Make the linear layer ``plain`` multiply like the quantised layer ``own``.

    It uses the dtype of ``own``'s products if that sets one. The weight by which the backward pass
    multiplies gradients, fp32 ``[out, in]``, may be another than that of the forward pass.
    """
    wide, narrow = linear_shape(own)  # type: ignore[misc]
    parts = []
    with _without_bias(own), torch.enable_grad():
        for dy in torch.eye(narrow, device=next(own.parameters()).device).split(_ROWS):
            x = torch.zeros(len(dy), wide, device=dy.device, requires_grad=True)
            parts.append(torch.autograd.grad(own(x), x, dy)[0].float())
    dtype = getattr(own, "compute_dtype", None)
    plain.forward = partial(_forward, plain, torch.cat(parts), dtype)


@contextmanager
def _without_bias(layer: Any) -> Iterator[None]:
    """Remove the bias and set training mode in the context.

    In evaluation mode bitsandbytes changes the layout of weights on some CPUs.
    """
    training = layer.training
    bias = layer.bias
    layer.train()
    layer.bias = None
    try:
        yield
    finally:
        layer.train(training)
        layer.bias = bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_of_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(weight_of_gradients)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return dy @ weight.to(dy.dtype), None, None


def _forward(
    layer: nn.Linear, weight_of_gradients: Tensor, dtype: torch.dtype | None, x: Tensor
) -> Tensor:
    y: Tensor = _Product.apply(
        x if dtype is None else x.to(dtype), layer.weight, weight_of_gradients
    )
    return (y if layer.bias is None else y + layer.bias.to(y.dtype)).to(x.dtype)


# --- FP8
# ----------------------------------------------------------------------------------------


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


def rounded_layer(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the output of a linear layer with rounded operands; its bias is added unrounded."""
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


def rounded_experts(layer: Any, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    """Return the output of transformers' experts with rounded operands, one expert after another.

    Args:
        layer: with ``use_experts_implementation``.
        x: ``[T, D]``.
        experts: that each token is sent to, ``[T, k]``.
        shares: of each in the output, ``[T, k]``.
    """
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
    weight = layer._parameters[name][expert]
    upright = weight.t() if layer.is_transposed else weight
    y: Tensor = _ExpertProduct.apply(rows, upright)
    if name in vars(layer):
        added = vars(layer)[name][expert] - weight.detach()
        y = y + F.linear(rows, added.t() if layer.is_transposed else added)
    return y + layer.get_parameter(f"{name}_bias")[expert] if layer.has_bias else y
