"""PackedExperts: the experts of a layer, whose stacked weights are packed.

    W [E, N, K] is one packed weight: the rows of a matrix [E · N, K]

It replaces the module that holds the experts, computes what that does, and is frozen. Adapters on
its weights (``lora/parameter_layer.py``) are computed as on the class's own. Each product reads the
weight from a dequantisation buffer that all layers of its shape share. If the class computes its
experts itself, the weight is dequantised to a tensor of its own.

The functions below accept any module of experts, packed or not, so callers need not distinguish
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from chronicals.kernels.expert_stacks import ExpertStack
from chronicals.quantization.nf4 import Packed
from chronicals.quantization.packed import PackedStorage, PackedWeight, weight_from
from chronicals.quantization.packed_linear import PackedModule

TAKES_STACKS = "takes_stacks"
"""Attribute of a function that replaces a layer's forward and takes its weights as ``stacks``.

These are weights by name: tensors, or callables that return one (``Stack``).
"""


@dataclass(frozen=True)
class Stack:
    """A packed stacked weight; calling it dequantises it.

    Attributes:
        shape: its shape in the class, three sizes.
        base: the same values as one matrix.
        transposed: True if the matrix has the rows of ``[E, K, N]`` and the class has ``[E, N,
            K]``.
    """

    shape: tuple[int, ...]
    base: PackedStorage
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the dequantised values."""
        return self.base.dtype

    @property
    def dense_slots(self) -> None:
        """None: the experts are in their order."""

    def __call__(self) -> Tensor:
        """Return the values; they are valid until another weight of this shape is dequantised."""
        return _in_shape(self.base.filled(), self.shape, self.transposed)

    def dense(self) -> Tensor:
        """Return the values in their own memory."""
        return _in_shape(self.base.dense(), self.shape, self.transposed)

    def expert_stack(self, transposed: bool) -> ExpertStack | None:
        """Return the weight as products of few tokens read it, or None.

        See ``PackedStack``. The codes must have the rows of ``[E, N, K]``.
        """
        (weight,) = self.base.packed
        if transposed != self.transposed:
            return None
        stack: ExpertStack | None = weight.expert_stack(self.shape[0])
        return stack


def _in_shape(matrix: Tensor, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """Return the matrix ``[E · N, K]`` of a stacked weight in its shape in the class."""
    if not transposed:
        return matrix.view(shape)
    experts, rows, columns = shape
    return matrix.view(experts, columns, rows).transpose(1, 2)


def can_be_packed(module: nn.Module) -> bool:
    """Return whether the module is the experts of a layer.

    It must have several stacked weights, and no other parameters than its own biases.
    """
    own = [p for p in module._parameters.values() if p is not None]
    several = sum(p.ndim == 3 for p in own) > 1
    return (
        several
        and next(module.buffers(), None) is None
        and len(list(module.parameters())) == len(own)
    )


class PackedExperts(PackedModule):
    """The experts of a layer with packed stacked weights.

    Args:
        experts: the module to replace. Its parameters with three dimensions are replaced, and all
            its parameters are frozen.
        packed: the packed weights, each ``[E · N, K]``, by name.
        shapes: their shapes ``(E, N, K)`` in the class.
        transposed: names of those whose packed weight has the rows of ``[E, K, N]``.

    Attributes:
        inner: a module of the class with its settings and without weights. It is not a submodule,
            so nothing casts or moves it.
        stacked: ``shapes``.
    """

    inner: Any
    routed = True

    def __init__(
        self,
        experts: nn.Module,
        packed: Mapping[str, PackedWeight],
        shapes: Mapping[str, tuple[int, ...]],
        transposed: Collection[str] = (),
    ):
        super().__init__()
        self.stacked = dict(shapes)
        self.transposed = frozenset(transposed)
        self.dtype = next(iter(packed.values())).dtype
        self._formats = {
            name: (weight.settings, weight.PARTS, weight.shape) for name, weight in packed.items()
        }

        inner = copy.copy(experts)
        places = {}
        for name, parameter in experts._parameters.items():
            if parameter is None:
                continue
            value = parameter.detach()
            if name in packed:
                places[name] = torch.empty(shapes[name], dtype=self.dtype, device="meta")
                value = packed[name].codes
                tensors = packed[name].tensors
                for part in packed[name].PARTS:
                    self.register_buffer(f"{name}_{part}", tensors[part])
            else:
                places[name] = value.to("meta")
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

        empty = {name: nn.Parameter(place, requires_grad=False) for name, place in places.items()}
        vars(inner).update(_parameters=empty, _buffers={}, _modules=dict(experts._modules))
        object.__setattr__(self, "inner", inner)  # not as a submodule

        self._bases: dict[str, tuple[tuple, PackedStorage]] = {}
        self.train(experts.training)

    @classmethod
    def of(cls, experts: nn.Module, quantise: Callable[[Tensor], PackedWeight] = Packed.of) -> Self:
        """Pack the experts of a transformers model.

        The default is NF4 in blocks of 64 with nested scales.

        Args:
            experts: the module of experts.
            quantise: returns the packed weight of a matrix.

        Raises:
            ValueError: the module holds other parameters.
        """
        if not can_be_packed(experts):
            raise ValueError(
                f"{type(experts).__name__} holds something else than stacked weights and biases"
            )

        packed = {}
        shapes = {}
        for name, parameter in experts._parameters.items():
            if parameter is not None and parameter.ndim == 3:
                stack = parameter.detach()
                matrix = stack.reshape(-1, stack.shape[-1])
                packed[name] = quantise(matrix).to(stack.dtype)
                shapes[name] = tuple(stack.shape)
        return cls(experts, packed, shapes)

    def packed(self, name: str) -> PackedWeight:
        """Return a stacked weight as one matrix, ``[E · N, K]``."""
        settings, parts, shape = self._formats[name]
        buffers = [self._buffers[f"{name}_{part}"] for part in parts]
        present = [buffer for buffer in buffers if buffer is not None]
        return weight_from(settings, [self.get_parameter(name), *present], shape, self.dtype)

    @property
    def weights(self) -> dict[str, PackedWeight]:
        """The packed weights by name, each ``[E · N, K]``."""
        return {name: self.packed(name) for name in self.stacked}

    def dequantised(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of the stacked weights, in the shapes of the class."""
        for name in self.stacked:
            yield name, self.stack(name).dense()

    def reference(self, name: str) -> Tensor:
        """Return a dequantised stacked weight in the shape of the class.

        The values are computed in plain torch by the definition of the format.
        """
        matrix = self.packed(name).dense_reference()
        return _in_shape(matrix, self.stacked[name], name in self.transposed)

    def why_not_saved(self, path: str, model: str) -> str | None:
        """Return why transformers' files cannot hold the experts; they never can."""
        return (
            f"{path}: its experts are in 4 bits, which neither transformers nor bitsandbytes reads "
            "from files"
        )

    def stack(self, name: str) -> Stack:
        """Return a stacked weight."""
        codes = self.get_parameter(name)
        key = codes.data_ptr(), self.dtype, codes.device  # others once it was moved or cast
        if name not in self._bases or self._bases[name][0] != key:
            weight = self.packed(name)
            self._bases[name] = key, weight.base([weight])
        return Stack(self.stacked[name], self._bases[name][1], name in self.transposed)

    def stacks(self) -> dict[str, Any]:
        """Return the weights by name: a ``Stack`` if packed, else a tensor."""
        return {**self._parameters, **{name: self.stack(name) for name in self.stacked}}

    def __getstate__(self) -> dict[str, Any]:
        # A copy has bases of its own.
        return {**vars(self), "_bases": {}}

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        for _, base in self._bases.values():
            base.buffer.mark = None  # values of what was there before may be in it

    def forward(
        self, *inputs: Any, instead: Mapping[str, Tensor] | None = None, **named: Any
    ) -> Any:
        """Compute what the class computes.

        Args:
            *inputs: arguments of the class's forward.
            instead: weights that replace its own, by name, in their shapes.
            **named: arguments of the class's forward.
        """
        stacks = {**self.stacks(), **(instead or {})}
        forward = vars(self.inner).get("forward")
        if hasattr(getattr(forward, "__func__", None), TAKES_STACKS):
            return self.inner.forward(*inputs, stacks=stacks, **named)
        return as_class(self.inner, stacks, inputs, named)

    def plain(self) -> nn.Module:
        """Return the plain module of the class with the dequantised weights."""
        plain = copy.copy(self.inner)
        vars(plain).pop("forward", None)
        values = {**self._parameters, **dict(self.dequantised())}
        vars(plain)["_parameters"] = {
            name: nn.Parameter(x.detach(), requires_grad=False)
            for name, x in values.items()
            if x is not None
        }
        return plain.train(self.training)

    def extra_repr(self) -> str:
        """Return class, stacked weights, format and dtype."""
        return (
            f"{type(self.inner).__name__}, {', '.join(self.stacked)} in {self.format}, "
            f"dtype={self.dtype}"
        )


Experts4bit = PackedExperts
"""Older name of ``PackedExperts``, from when NF4 was its only format."""


def as_class(inner: Any, stacks: Mapping[str, Any], inputs: tuple, named: Mapping[str, Any]) -> Any:
    """Return what the class of the experts computes, with weights that are dequantised first.

    They stay in memory for the backward pass.
    """
    dense: dict[str, Any] = {
        name: x if x is None or isinstance(x, Tensor) else x.dense() for name, x in stacks.items()
    }
    return functional_call(inner, dense, inputs, dict(named))


def packed_experts(model: nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    """Yield the paths and packed experts of ``model``, in its order."""
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts):
            yield path, module


def class_module(module: nn.Module) -> Any:
    """Return the module with the class, settings and forward of the experts.

    It is ``inner`` for packed experts, and the module itself otherwise.
    """
    return module.inner if isinstance(module, PackedExperts) else module


def packed_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes ``(E, N, K)`` of packed stacked weights by name; empty if it is plain."""
    return dict(module.stacked) if isinstance(module, PackedExperts) else {}


def packed_stacks(module: nn.Module) -> dict[str, Any] | None:
    """Return all weights of packed experts by name, as ``PackedExperts.stacks`` does.

    It is None for a plain module, which multiplies by its own parameters.
    """
    return module.stacks() if isinstance(module, PackedExperts) else None


def stacked_weight(module: nn.Module, name: str) -> Tensor | Stack:
    """Return a parameter of ``module``, or its ``Stack`` if it is packed."""
    if name in packed_shapes(module):
        return module.stack(name)  # type: ignore[operator, no-any-return]
    return module.get_parameter(name)


def dense_stack(weight: Tensor | Stack) -> Tensor:
    """Return the values of ``stacked_weight``."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def call_with(
    module: nn.Module, instead: Mapping[str, Tensor], inputs: tuple, named: Mapping[str, Any]
) -> Any:
    """Call experts, or any other module, with weights that replace its own, by name."""
    if isinstance(module, PackedExperts):
        return module(*inputs, instead=instead, **named)
    return functional_call(module, dict(instead), inputs, dict(named))
