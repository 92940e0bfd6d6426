"""LoRALinear: a frozen linear layer with an adapter beside it.

    y = x Wᵀ + b + s · u Bᵀ,   u = dropout(x) Aᵀ
    g = s · dy B,   dx = dy W + g A,   dA = gᵀ x,   dB = s · dyᵀ u        (no dropout)

Without dropout, over a plain linear layer, the adapter's products are added by the products themselves (``addmm``), both
ways: no sum passes over y or dx by itself. Saved beside x, W, A and B: u. A compiler is given the plain formula, whose sums
it puts into what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.launch import differentiable_once
from chronicals.kernels.products import product
from chronicals.lora.config import LoRAConfig


class LoRALinear(nn.Module):
    """``base(x) + s · B (A dropout(x))`` with A ``[r, in]``, B ``[out, r]``, both fp32 whatever the base is.

    A starts uniform as a linear layer does and B at zero, so that the model is at first unchanged.

    Args:
        base_layer: a linear layer whose output is ``[..., out]``; it is frozen.
        config: rank, scale and dropout.
        in_features, out_features: of the base layer.

    Attributes:
        enabled: whether the adapter is on (``without_adapters``).
    """

    def __init__(self, base_layer: nn.Module, config: LoRAConfig, in_features: int, out_features: int):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.in_features, self.out_features = in_features, out_features
        device = next(base_layer.parameters()).device
        self.lora_A = nn.Parameter(torch.empty(config.rank, in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(out_features, config.rank, device=device, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale, self.dropout, self.enabled = config.scale, config.dropout, True

    @property
    def weight(self) -> Tensor:
        """The base's weight with the adapter in it, of the base's shape and type, for a model that reads it instead of calling
        the layer, as Mamba does; of that, no input is dropped.

        Raises:
            AttributeError: the base's weight is quantised.
        """
        weight = cast(Tensor, self.base_layer.weight)
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise AttributeError(f"the {weight.dtype} weight of {type(self.base_layer).__name__} has no adapter in it")
        if not self.enabled:
            return weight
        update = (self.lora_B @ self.lora_A) * self.scale
        return weight + (update if isinstance(self.base_layer, nn.Linear) else update.t()).to(weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        return cast(Tensor | None, self.base_layer.bias)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "base_layer" and type(value).__module__.startswith("peft."):
            raise ValueError(f"PEFT's {type(value).__name__} would go into an adapter of ours: call merge_and_unload() first")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            y: Tensor = self.base_layer(x)
            return y
        dropout = self.dropout if self.training else 0.0
        if not dropout and not torch.compiler.is_compiling() and _is_plain(self.base_layer, x):
            assert isinstance(self.base_layer, nn.Linear)
            weight, bias, rows = self.base_layer.weight, self.base_layer.bias, x.reshape(-1, x.shape[-1])
            y = _WithAdapter.apply(rows, weight, bias, self.lora_A, self.lora_B, self.scale)
            return y.view(*x.shape[:-1], len(weight))
        base = self.base_layer(x)
        down = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A.to(x.dtype))
        return base + F.linear(down, self.lora_B.to(x.dtype)).to(base.dtype) * self.scale


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Paths and modules of the adapted layers."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within: adapted layers compute what their base computes, as a reference policy does. No storage moves.

    Layers that are recomputed in the backward pass must be so within, too.
    """
    layers = [layer for _, layer in adapters(model) if layer.enabled]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def _is_plain(layer: nn.Module, x: Tensor) -> bool:
    """Whether ``layer`` is its frozen weight and bias and nothing else: no hooks, no other forward, no autocast."""
    if type(layer) is not nn.Linear or type(layer.weight) not in (nn.Parameter, Tensor) or "forward" in vars(layer):
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    trained = any(p.requires_grad for p in layer.parameters())
    return not hooks and not trained and layer.weight.dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)


class _WithAdapter(torch.autograd.Function):
    """Of rows, not of any shape: what follows may write into an output only if it is no view made in here.

    The base is frozen: weight and bias get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:  # fmt: skip
        kind = rows.dtype
        down = rows @ a.t().to(kind)
        y = F.linear(rows, weight, bias)
        y.addmm_(down, b.t().to(kind), alpha=scale)
        ctx.save_for_backward(rows, weight, a, b, down)
        ctx.scale = scale
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, a, b, down = ctx.saved_tensors
        kind = rows.dtype
        g = (dy @ b.to(kind)) * ctx.scale
        dx = (dy @ weight).addmm_(g, a.to(kind)) if ctx.needs_input_grad[0] else None
        da = product(g.t(), rows, a.dtype) if ctx.needs_input_grad[3] else None
        db = product(dy.t(), down, b.dtype, ctx.scale) if ctx.needs_input_grad[4] else None
        return dx, None, None, da, db, None
