"""Linear layers with quantised weights, and packed experts, as plain torch.

The dense weight of a layer is its output for the identity matrix. The weight of its backward pass
may differ: bitsandbytes rounds that one to the dtype the weight had before quantisation, and that
of the forward pass to the dtype of the product. Experts are dequantised by the definition of their
format.
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
from chronicals.quantization import PackedExperts, packed_experts
from chronicals.verification.modules import plain_name

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


def quantised_experts(model: nn.Module) -> dict[str, PackedExperts]:
    """Return packed stacked experts by their paths in the model without adapters."""
    return {plain_name(path): module for path, module in packed_experts(model)}


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

    It uses the dtype of ``own``'s products if that sets one.
    """
    plain.forward = partial(
        _forward, plain, _weight_of_gradients(own), getattr(own, "compute_dtype", None)
    )


def _weight_of_gradients(layer: nn.Module) -> Tensor:
    """Return the weight that the backward pass multiplies gradients by, fp32 ``[out, in]``."""
    wide, narrow = linear_shape(layer)  # type: ignore[misc]
    parts = []
    with _without_bias(layer), torch.enable_grad():
        for dy in torch.eye(narrow, device=next(layer.parameters()).device).split(_ROWS):
            x = torch.zeros(len(dy), wide, device=dy.device, requires_grad=True)
            parts.append(torch.autograd.grad(layer(x), x, dy)[0].float())
    return torch.cat(parts)


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
