"""LoRAParameter: an adapter of a bare parameter of a layer, such as the weights of all experts.

    W'[e] = W[e] + s · B[e] A[e]          W [E, N, K], or [E, K, N] where the class says ``is_transposed``; or one matrix [N, K]

In PEFT's format (``target_parameters``) A is ``[E · r, K]`` with the ranks of an expert together, B
``[N, r · E]`` with the experts of a rank together. A layer with several adapted parameters is
wrapped several times, in the order of its parameters.

For experts as transformers 5 computes them, A and B are products of their own beside the base's
(``stacked_experts``). Any other layer runs with W' in place of W, in the dtype of W, for the length
of the call. W of packed experts is the dequantised weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import AdapterLayer, exact, start_matrices
from chronicals.lora.stacked_experts import Factors, adapted_experts, expert_inputs, has_hooks
from chronicals.quantization import (
    Stack,
    call_with,
    class_module,
    dense_stack,
    packed_stacks,
    stacked_weight,
)

WRAPPED = "base_layer"
"""Attribute and path component of the wrapped layer."""


class LoRAParameter(AdapterLayer):
    """A layer with an adapter of one of its parameters.

    Args:
        base_layer: the layer, or a LoRAParameter around it; it is frozen.
        parameter_name: name of a matrix, or of a tensor with a matrix for each expert.
        config: rank, scale and starting values.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, base_layer: nn.Module, parameter_name: str, config: LoRAConfig):
        super().__init__(base_layer, config)
        self.parameter_name = parameter_name
        self.rank = config.rank
        layer = innermost(base_layer)
        shapes = shapes_for(layer, parameter_name, config.rank)
        self._make_matrices(*shapes, device=layer.get_parameter(parameter_name).device)
        start_matrices(self.lora_A, self.lora_B, config)

    @property
    def parameter(self) -> Tensor | Stack:
        """W."""
        return stacked_weight(innermost(self), self.parameter_name)

    def named_at(self, path: str) -> str:
        """Return the path of the adapted parameter in the model without adapters."""
        return f"{without_wraps(path)}.{self.parameter_name}"

    def factors(self, dtype: torch.dtype) -> Factors:
        """Return A ``[E, r, K]`` and B ``[E, N, r]``; views if the dtype is theirs."""
        a, b = (matrix.to(dtype) for matrix in self.pair)
        down_ERK = a.view(-1, self.rank, a.shape[1])
        up_ENR = b.view(len(b), self.rank, -1).permute(2, 0, 1)
        return Factors(down_ERK, up_ENR, self.scale)

    def adapted(self) -> Tensor:
        """Return W', in the dtype of W."""
        weight = dense_stack(self.parameter)
        down_ERK, up_ENR, scale = self.factors(weight.dtype)
        with torch.autocast(weight.device.type, enabled=False):
            if weight.ndim == 2:
                return torch.addmm(weight, up_ENR[0], down_ERK[0], alpha=scale)
            if is_transposed(innermost(self)):
                return torch.baddbmm(
                    weight, down_ERK.transpose(1, 2), up_ENR.transpose(1, 2), alpha=scale
                )
            return torch.baddbmm(weight, up_ENR, down_ERK, alpha=scale)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped layer, which a class may read instead of calling it.

        An adapted parameter is returned with its adapter added.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED or "_modules" not in vars(self):
                raise
        enabled = _enabled_adapters(self)
        return enabled[name].adapted() if name in enabled else getattr(innermost(self), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the layer's output, with the adapters that are on."""
        layer = innermost(self)
        enabled = _enabled_adapters(self)
        if not enabled:
            return layer(*inputs, **named)
        y = _by_products(layer, enabled, inputs, named)
        if y is not None:
            return y
        adapted = {name: adapter.adapted() for name, adapter in enabled.items()}
        return call_with(layer, adapted, inputs, named)

    @torch.no_grad()
    def merge(self) -> None:
        """Add ``s · B A`` to the parameter, matrix by matrix."""
        weight = dense_stack(self.parameter)
        down_ERK, up_ENR, scale = self.factors(torch.float32)
        transposed = is_transposed(innermost(self)) and weight.ndim == 3
        matrices = weight if weight.ndim == 3 else [weight]
        for matrix, down, up in zip(matrices, down_ERK, up_ENR, strict=True):
            update = scale * (up @ down)
            matrix.copy_(exact(matrix) + (update.t() if transposed else update))


@torch.compiler.disable
def _by_products(
    layer: Any, enabled: Mapping[str, LoRAParameter], inputs: tuple, named: Mapping[str, Any]
) -> Tensor | None:
    """Return the output of a layer of experts with A and B as products of their own.

    The result is None for other layers. It is not compiled, since the compiler would compile anew
    for every number of rows of an expert.
    """
    inner = class_module(layer)
    if inner is not layer and has_hooks(layer):
        return None
    routed = expert_inputs(inner, enabled, inputs, named)
    if routed is None:
        return None
    stacks = packed_stacks(layer)
    factors = {name: adapter.factors(adapter.parameter.dtype) for name, adapter in enabled.items()}
    return adapted_experts(inner, factors, routed, stacks)


def shapes_for(layer: nn.Module, name: str, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of A and B for a parameter of ``layer``."""
    shape = stacked_weight(layer, name).shape
    experts, narrow, wide = shape if len(shape) == 3 else (1, *shape)
    if len(shape) == 3 and is_transposed(layer):
        narrow, wide = wide, narrow
    return (experts * rank, wide), (narrow, experts * rank)


def innermost(layer: nn.Module) -> nn.Module:
    """Return the layer within all adapters of its parameters."""
    while isinstance(layer, LoRAParameter):
        layer = layer.base_layer
    return layer


def without_wraps(path: str) -> str:
    """Return the path of a wrapped layer in the model without adapters."""
    return ".".join(part for part in path.split(".") if part != WRAPPED)


def _enabled_adapters(layer: nn.Module) -> dict[str, LoRAParameter]:
    """Return this adapter and those within it that are on, by the names of their parameters."""
    enabled = {}
    while isinstance(layer, LoRAParameter):
        if layer.enabled:
            enabled[layer.parameter_name] = layer
        layer = layer.base_layer
    return enabled


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the matrices of a layer's experts are ``[in, out]``."""
    return bool(getattr(class_module(layer), "is_transposed", False))
