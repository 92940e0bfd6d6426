"""Experts4bit: the experts of a layer with their stacked weights in 4 bits and no other.

    W [E, N, K] as the rows of one matrix [E · N, K], quantised to NF4 (``nf4.py``); K a multiple of the block

It takes the place of the module that holds the experts, computes as that does, and is frozen. Each product has the weight
dequantised in the buffer that all layers of its shape share; where the class computes its experts itself, in a tensor of its
own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from chronicals.kernels.nf4 import Scales
from chronicals.quantization.linear import SCALES
from chronicals.quantization.nf4 import BLOCK, Packed
from chronicals.quantization.packed import PackedBase
from chronicals.quantization.packed_linear import keep_dtypes

TAKES_STACKS = "takes_stacks"
"""Attribute of a function that replaces a layer's forward and is given its weights by name as ``stacks``: tensors, or what is
called for one (``Stack``)."""


@dataclass(frozen=True)
class Stack:
    """A stacked weight in 4 bits; called, it is dequantised.

    Attributes:
        shape: as the class has it, three sizes.
        base: of the same values as one matrix.
    """

    shape: tuple[int, ...]
    base: PackedBase

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def __call__(self) -> Tensor:
        """The values, until another weight of this shape is asked for."""
        return self.base.filled().view(self.shape)

    def dense(self) -> Tensor:
        """The values, in memory of their own."""
        return self.base.dense().view(self.shape)


class Experts4bit(nn.Module):
    """Args:
    experts: whose parameters with three dimensions are quantised, and all of whose parameters are frozen.

    Raises:
        ValueError: it has none, or one whose last size is no multiple of the block.
    """

    inner: Any
    """A module of the class, with its settings and without memory: no submodule, so nothing casts or moves it."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        own = {name: p for name, p in experts._parameters.items() if p is not None}
        self.stacked = {name: tuple(p.shape) for name, p in own.items() if p.ndim == 3}
        wrong = [name for name, shape in self.stacked.items() if shape[-1] % BLOCK]
        if not self.stacked or wrong or any(True for _ in experts.buffers()):
            found = f"{wrong[0]} is {self.stacked[wrong[0]]}" if wrong else f"{type(experts).__name__} holds something else"
            raise ValueError(f"{found}: expected stacked weights whose last size is a multiple of {BLOCK}, and biases")
        self.dtype = next(p.dtype for name, p in own.items() if name in self.stacked)
        for name, parameter in own.items():
            value = parameter.detach()
            if name in self.stacked:
                packed = Packed.of(value.reshape(-1, value.shape[-1]))
                value = packed.codes
                for scale in SCALES:
                    self.register_buffer(f"{name}_{scale}", getattr(packed.scales, scale))
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        inner = copy.copy(experts)
        empty = {name: nn.Parameter(p.detach().to("meta"), requires_grad=False) for name, p in own.items()}
        vars(inner).update(_parameters=empty, _buffers={}, _modules=dict(experts._modules))
        object.__setattr__(self, "inner", inner)
        self._bases: dict[str, tuple[tuple, PackedBase]] = {}
        self.train(experts.training)

    def packed(self, name: str) -> Packed:
        """A stacked weight, ``[E · N, K]``."""
        *rows, columns = self.stacked[name]
        count = torch.Size(rows).numel()
        scales = Scales(*(getattr(self, f"{name}_{scale}") for scale in SCALES))
        return Packed(self.get_parameter(name), scales, (count, columns), self.dtype)

    def stacks(self) -> dict[str, Any]:
        """Weights by name: ``Stack`` of what is packed, tensors else."""
        found: dict[str, Any] = dict(self._parameters)
        for name, shape in self.stacked.items():
            key = self.get_parameter(name).data_ptr(), self.dtype, self.get_parameter(name).device
            if name not in self._bases or self._bases[name][0] != key:
                self._bases[name] = key, Packed.base([self.packed(name)])
            found[name] = Stack(shape, self._bases[name][1])
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has bases of its own."""
        return {**vars(self), "_bases": {}}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        stacks, forward = self.stacks(), vars(self.inner).get("forward")
        if hasattr(getattr(forward, "__func__", None), TAKES_STACKS):
            return self.inner.forward(*inputs, stacks=stacks, **named)
        return as_class(self.inner, stacks, inputs, named)

    def plain(self) -> nn.Module:
        """The module of the class with the values that the codes stand for."""
        plain = copy.copy(self.inner)
        vars(plain).pop("forward", None)
        values = {name: x.dense() if isinstance(x, Stack) else x for name, x in self.stacks().items()}
        vars(plain)["_parameters"] = {name: nn.Parameter(x.detach(), requires_grad=False) for name, x in values.items()}
        return plain

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What casts casts the type that weights are dequantised to, never codes or scales."""
        kept = dict(self.named_buffers(recurse=False))
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(iter(self.parameters())).device)).dtype
        super()._apply(fn, recurse)
        keep_dtypes(self, kept)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.inner).__name__}, {', '.join(self.stacked)} in nf4, blocks of {BLOCK}, dtype={self.dtype}"


def as_class(inner: Any, stacks: Mapping[str, Any], inputs: tuple, named: Mapping[str, Any]) -> Any:
    """What the class of the experts computes, with dequantised weights that are kept for its backward pass."""
    dense = {name: x.dense() if isinstance(x, Stack) else x for name, x in stacks.items()}
    return functional_call(inner, dense, inputs, dict(named))
