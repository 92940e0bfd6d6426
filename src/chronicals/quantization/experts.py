"""Experts4bit: the experts of a layer with their stacked weights in 4 bits and no other.

    W [E, N, K] as the rows of one matrix [E · N, K], quantised to NF4 (``nf4.py``), whatever E, N
    and K are

It takes the place of the module that holds the experts, computes as that does, and is frozen;
adapters beside its weights (``lora/parameter_layer.py``) are computed as those of the class. Each
product has the weight dequantised in the buffer that all layers of its shape share; where the class
computes its experts itself, in a tensor of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
"""Attribute of a function that replaces a layer's forward and is given its weights by name as
``stacks``: tensors, or what is called for one (``Stack``)."""


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


def can_be_packed(module: nn.Module) -> bool:
    """Whether the module is the experts of a layer: several stacked weights, and beside them
    nothing but biases of its own.
    """
    own = [p for p in module._parameters.values() if p is not None]
    several = sum(p.ndim == 3 for p in own) > 1
    return (
        several
        and next(module.buffers(), None) is None
        and len(list(module.parameters())) == len(own)
    )


class Experts4bit(nn.Module):
    """Args: experts: whose parameters with three dimensions are replaced, and all of whose
    parameters are frozen. packed: these in 4 bits, each ``[E · N, K]``, by name. shapes: what each
    is in the class, ``(E, N, K)``.
    """

    inner: Any
    """A module of the class, with its settings and without memory: no submodule, so nothing
    casts or moves it.
    """

    def __init__(
        self,
        experts: nn.Module,
        packed: Mapping[str, Packed],
        shapes: Mapping[str, tuple[int, ...]],
    ):
        super().__init__()
        self.stacked = dict(shapes)
        first = next(iter(packed.values()))
        self.dtype = first.dtype
        self.quantized_from = first.quantized_from
        inner = copy.copy(experts)
        places = {}
        for name, parameter in experts._parameters.items():
            if parameter is None:
                continue
            value = parameter.detach()
            if name in packed:
                places[name] = torch.empty(shapes[name], dtype=self.dtype, device="meta")
                value = packed[name].codes
                for scale in SCALES:
                    self.register_buffer(f"{name}_{scale}", getattr(packed[name].scales, scale))
            else:
                places[name] = value.to("meta")
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        empty = {name: nn.Parameter(place, requires_grad=False) for name, place in places.items()}
        vars(inner).update(_parameters=empty, _buffers={}, _modules=dict(experts._modules))
        object.__setattr__(self, "inner", inner)
        self._bases: dict[str, tuple[tuple, PackedBase]] = {}
        self.train(experts.training)

    @classmethod
    def of(cls, experts: nn.Module, quantise: Callable[[Tensor], Packed] = Packed.of) -> Self:
        """Experts of transformers, their stacked weights quantised to NF4 in blocks of 64 with
        nested scales.

        Args:
            quantise: makes another of a matrix, with the same blocks.

        Raises:
            ValueError: they hold something else.
        """
        if not can_be_packed(experts):
            raise ValueError(
                f"{type(experts).__name__} holds something else than stacked weights and biases"
            )
        stacks = {
            name: p.detach()
            for name, p in experts._parameters.items()
            if p is not None and p.ndim == 3
        }
        packed = {
            name: pack_stack(stack, quantise).to(stack.dtype) for name, stack in stacks.items()
        }
        return cls(experts, packed, {name: tuple(stack.shape) for name, stack in stacks.items()})

    def packed(self, name: str) -> Packed:
        """A stacked weight, ``[E · N, K]``."""
        *rows, columns = self.stacked[name]
        count = torch.Size(rows).numel()
        scales = Scales(*(getattr(self, f"{name}_{scale}") for scale in SCALES))
        weight = Packed(self.get_parameter(name), scales, (count, columns), self.dtype)
        return replace(weight, quantized_from=self.quantized_from)

    @property
    def values(self) -> int:
        """How many weights the codes stand for."""
        return sum(torch.Size(shape).numel() for shape in self.stacked.values())

    @property
    def bytes(self) -> int:
        """Memory that the stacked weights take."""
        return sum(self.packed(name).bytes for name in self.stacked)

    def stack(self, name: str) -> Stack:
        """A stacked weight."""
        key = self.get_parameter(name).data_ptr(), self.dtype, self.get_parameter(name).device
        if name not in self._bases or self._bases[name][0] != key:
            self._bases[name] = key, Packed.base([self.packed(name)])
        return Stack(self.stacked[name], self._bases[name][1])

    def stacks(self) -> dict[str, Any]:
        """Weights by name: ``Stack`` of what is packed, tensors else."""
        return {**self._parameters, **{name: self.stack(name) for name in self.stacked}}

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has bases of its own."""
        return {**vars(self), "_bases": {}}

    def forward(
        self, *inputs: Any, instead: Mapping[str, Tensor] | None = None, **named: Any
    ) -> Any:
        """As the class.

        Args:
            instead: weights in the place of its own, by name, in their shapes.
        """
        stacks = {**self.stacks(), **(instead or {})}
        forward = vars(self.inner).get("forward")
        if hasattr(getattr(forward, "__func__", None), TAKES_STACKS):
            return self.inner.forward(*inputs, stacks=stacks, **named)
        return as_class(self.inner, stacks, inputs, named)

    def plain(self) -> nn.Module:
        """The module of the class with the values that the codes stand for."""
        plain = copy.copy(self.inner)
        vars(plain).pop("forward", None)
        values = {
            name: x.dense() if isinstance(x, Stack) else x for name, x in self.stacks().items()
        }
        vars(plain)["_parameters"] = {
            name: nn.Parameter(x.detach(), requires_grad=False) for name, x in values.items()
        }
        return plain.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What casts casts the type that weights are dequantised to, never codes or scales."""
        kept = dict(
            self.named_buffers(recurse=False, remove_duplicate=False)
        )  # stacks share a table of codes
        self.dtype = fn(
            torch.empty(0, dtype=self.dtype, device=next(iter(self.parameters())).device)
        ).dtype
        super()._apply(fn, recurse)
        keep_dtypes(self, kept)
        return self

    def extra_repr(self) -> str:
        return (
            f"{type(self.inner).__name__}, {', '.join(self.stacked)} in {self.format}, "
            f"dtype={self.dtype}"
        )

    @property
    def format(self) -> str:
        """In words, as of linear layers."""
        return f"nf4 in blocks of {BLOCK}"


def pack_stack(stack: Tensor, quantise: Callable[[Tensor], Packed] = Packed.of) -> Packed:
    """A stacked weight ``[E, N, K]``, quantised as one matrix ``[E · N, K]``."""
    return quantise(stack.reshape(-1, stack.shape[-1]))


def as_class(inner: Any, stacks: Mapping[str, Any], inputs: tuple, named: Mapping[str, Any]) -> Any:
    """What the class of the experts computes, with dequantised weights that are kept for its
    backward pass.
    """
    dense = {name: x.dense() if isinstance(x, Stack) else x for name, x in stacks.items()}
    return functional_call(inner, dense, inputs, dict(named))
