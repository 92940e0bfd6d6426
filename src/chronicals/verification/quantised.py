"""Linear layers with quantised weights, in plain torch: by what they multiply, and in which type.

What a layer multiplies by is what it makes of the identity. On the way back that may be another one: bitsandbytes rounds the
weight to the type it had before it was quantised, and on the way there to the type of the product.
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
from chronicals.lora.apply import linear_shape

ROWS = 1024
"""Rows of the identity that a layer multiplies at a time."""

AGREES = 0.004
"""Relative, of a product of random rows: bf16 misses by 0.001, inputs in 8 bits by 0.006."""


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers whose weights are no floating-point numbers of at least 16 bits, by their paths without adapters."""
    found = {}
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None) if linear_shape(layer) else None
        if isinstance(weight, Tensor) and (not weight.is_floating_point() or weight.element_size() == 1):
            found[path.removesuffix(".base_layer")] = layer
    return found


def dense_weight(path: str, layer: nn.Module) -> Tensor:
    """``[out, in]``, fp32, by what ``layer`` multiplies.

    Raises:
        ConfigurationError: its products are not those of a weight alone, since it rounds its inputs too.
    """
    wide, _ = linear_shape(layer)  # type: ignore[misc]
    device = next(layer.parameters()).device
    with _without_bias(layer), torch.no_grad():
        weight = torch.cat([layer(rows).float() for rows in torch.eye(wide, device=device).split(ROWS)]).t().contiguous()
        x = torch.randn(8, wide, device=device).bfloat16().float()
        expected = F.linear(x, weight)
        off = float((layer(x).float() - expected).norm() / expected.norm().clamp(min=1e-30))
    if not off <= AGREES:
        raise ConfigurationError(
            f"model: {path} ({type(layer).__name__}) does not multiply by its weight alone, it rounds its inputs too (off by "
            f"{off:.1%}), which the plain arms cannot repeat; verify the model without quantisation, or in 4 bits"
        )
    return weight


def multiply_as(own: nn.Module, plain: Any) -> None:
    """Let the linear layer ``plain`` multiply as the quantised ``own`` does, in the type of its products where that has one."""
    plain.forward = partial(_forward, plain, _weight_of_gradients(own), getattr(own, "compute_dtype", None))


def _weight_of_gradients(layer: nn.Module) -> Tensor:
    """``[out, in]``, fp32, by what gradients are multiplied on their way back."""
    wide, narrow = linear_shape(layer)  # type: ignore[misc]
    parts = []
    with _without_bias(layer), torch.enable_grad():
        for dy in torch.eye(narrow, device=next(layer.parameters()).device).split(ROWS):
            x = torch.zeros(len(dy), wide, device=dy.device, requires_grad=True)
            parts.append(torch.autograd.grad(layer(x), x, dy)[0].float())
    return torch.cat(parts)


@contextmanager
def _without_bias(layer: Any) -> Iterator[None]:
    """Within: products alone; in training mode, since in evaluation bitsandbytes lays weights out anew on some CPUs."""
    training, bias = layer.training, layer.bias
    layer.train()
    layer.bias = None
    try:
        yield
    finally:
        layer.train(training)
        layer.bias = bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return F.linear(x, there.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return dy @ back.to(dy.dtype), None, None


def _forward(layer: nn.Linear, back: Tensor, kind: torch.dtype | None, x: Tensor) -> Tensor:
    y: Tensor = _Product.apply(x if kind is None else x.to(kind), layer.weight, back)
    return (y if layer.bias is None else y + layer.bias.to(y.dtype)).to(x.dtype)
