"""Modules with packed weights, and the operator of their products.

    y = x Wᵀ + b,   dx = dy W        W is dequantised for each product and freed after it,
                                 or inside the product (``PackedWeight.product``)

The fused decoder layers read a layer's weight (``packed``) and multiply themselves. A layer that is
called as a module runs one ``torch.library`` operator, ``chronicals::packed_linear``, which
``torch.compile`` does not trace into.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.launch import operator
from chronicals.quantization.packed import PackedWeight, weight_from


class PackedModule(nn.Module, ABC):
    """A module with packed weights: a linear layer, or the experts of a layer.

    Casting the module changes ``dtype``, the dtype of the dequantised values, but never codes or
    scales.

    Attributes:
        dtype: dtype of the dequantised values.
        routed: True if a token is multiplied by the weights of only those experts that it visits.
    """

    dtype: torch.dtype
    routed = False

    @property
    @abstractmethod
    def weights(self) -> dict[str, PackedWeight]:
        """The packed weights by the names of their parameters; experts' are ``[E · N, K]``."""

    @abstractmethod
    def dequantised(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of the packed parameters, in the plain module's shapes."""

    @abstractmethod
    def plain(self) -> nn.Module:
        """Return the plain frozen module with the dequantised weights."""

    @property
    def recipe(self) -> Any:
        """Recipe of its weights, which have one format; see ``PackedWeight.recipe``."""
        return next(iter(self.weights.values())).recipe

    @property
    def format(self) -> str:
        """Name of the format for logs."""
        return next(iter(self.weights.values())).label

    @property
    def values(self) -> int:
        """Number of weights that the codes represent."""
        return sum(math.prod(weight.shape) for weight in self.weights.values())

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(weight.bytes for weight in self.weights.values())

    @abstractmethod
    def why_not_saved(self, path: str, model: str) -> str | None:
        """Return in a sentence why transformers' files cannot hold the module, or None.

        Args:
            path: path of the module.
            model: name of the model's class.
        """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Experts may share one table of codes, so duplicates are kept.
        buffers = dict(self.named_buffers(recurse=False, remove_duplicate=False))
        device = next(iter(self.parameters())).device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        super()._apply(fn, recurse)

        # ``fn`` cast the scales, too; they are put back as they were, on the new device.
        for name, buffer in buffers.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Yield the paths and modules of ``model`` with packed weights, in its order."""
    for path, module in model.named_modules():
        if isinstance(module, PackedModule):
            yield path, module


def packed_weight(layer: Any) -> PackedWeight | None:
    """Return the weight of a packed linear layer; None for any other module."""
    return layer.packed if isinstance(layer, PackedLinear) else None


def is_linear(layer: Any) -> bool:
    """Return whether ``layer`` is an ``nn.Linear`` (or subclass) or a packed linear layer."""
    return isinstance(layer, nn.Linear | PackedLinear)


def product_dtype(layer: nn.Linear | PackedLinear) -> torch.dtype:
    """Return the dtype of a linear layer's weight as its products read it."""
    return layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the paths and packed linear layers of ``model``, in its order."""
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield path, module


def packed_words(model: nn.Module) -> str:
    """Describe the packed modules of ``model``; empty if there are none.

    For example "14 linear layers in nf4 in blocks of 64 and the experts of 2 layers in …".
    """
    modules = [module for _, module in packed_modules(model)]
    layers = [module.format for module in modules if isinstance(module, PackedLinear)]
    experts = [module.format for module in modules if not isinstance(module, PackedLinear)]
    words = []
    if layers:
        words.append(f"{len(layers)} linear layers in {' and '.join(sorted(Counter(layers)))}")
    if experts:
        words.append(f"the experts of {len(experts)} layers in {experts[0]}")
    return " and ".join(words)


class PackedLinear(PackedModule):
    """``x Wᵀ + b`` over packed codes, which never get a gradient.

    Its ``weight`` is the parameter that holds the codes; the other tensors of the weight are
    buffers by the names of ``PackedWeight.PARTS``.

    Args:
        packed: the weight ``[out, in]``.
        bias: ``[out]``, or None.

    Attributes:
        dense_copy: the dequantised values while they are held (``dense_copies``), else None.
    """

    dense_copy: Tensor | None = None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.dtype = packed.dtype
        self.settings = packed.settings
        self.parts = packed.PARTS

        self.weight = nn.Parameter(packed.codes, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        tensors = packed.tensors
        for name in self.parts:
            self.register_buffer(name, tensors[name])

    @property
    def _tensors(self) -> list[Tensor]:
        """The present tensors of the weight, in order."""
        buffers = self._buffers
        present = [buffers[name] for name in self.parts if buffers[name] is not None]
        return [self.weight, *present]  # type: ignore[list-item]

    @property
    def packed(self) -> PackedWeight:
        """The weight."""
        shape = self.out_features, self.in_features
        return weight_from(self.settings, self._tensors, shape, self.dtype)

    @property
    def weights(self) -> dict[str, PackedWeight]:
        """The weight, by the name ``weight``."""
        return {"weight": self.packed}

    def dequantised(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name ``weight`` and its values, ``[out, in]``."""
        yield "weight", self.packed.dense()

    def why_not_saved(self, path: str, model: str) -> str | None:
        """Return in a sentence why transformers' files cannot hold the layer, or None."""
        reason = self.packed.why_not_saved
        return None if reason is None else f"{model} has layers {reason}"

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        """Return the squared norms of the rows of W, ``[out]``, in at least fp32."""
        norms: Tensor = _squared_norms(
            self._tensors, self.settings, self.out_features, self.in_features, self.dtype
        )
        return norms

    def plain(
        self,
        dtype: torch.dtype | None = None,
        update: Callable[[Tensor], Tensor] | None = None,
    ) -> nn.Linear:
        """Return a plain frozen layer with the dequantised weight, rounded to ``self.dtype``.

        Args:
            dtype: dtype of weight and bias; by default they keep theirs.
            update: see ``PackedWeight.with_update``.
        """
        packed = self.packed
        weight = packed.dense() if update is None else packed.with_update(update)
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta"
        )
        linear.weight = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)

        if self.bias is not None:
            bias = self.bias.detach().to(dtype or self.bias.dtype, copy=True)
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, in the dtype of x or of autocast."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self._product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _product(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ``; a layer whose rows lie on several ranks has a product of its own."""
        if self.dense_copy is not None and self.packed.is_faster_dense(x):
            return F.linear(x, self.dense_copy.to(x.dtype))
        y: Tensor = packed_linear(x, self._tensors, self.settings, self.out_features, self.dtype)
        return y

    def extra_repr(self) -> str:
        """Return sizes, format and dtype."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.format}, dtype={self.dtype}"
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        tensors = self.packed.stored(f"{prefix}weight")
        if self.bias is not None:
            tensors[f"{prefix}bias"] = self.bias
        for name, tensor in tensors.items():
            destination[name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy a state dict into the existing tensors."""
        stored = {name: tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        bias = stored.pop(f"{prefix}bias", None)
        try:
            weight = self.packed.read_stored(f"{prefix}weight", stored)
            with torch.no_grad():
                for place, tensor in zip(self._tensors, weight.tensors.values()):
                    assert tensor is not None
                    place.view(-1).copy_(tensor.view(-1))
        except ValueError as error:
            error_msgs.append(str(error))
            return

        if self.bias is not None and bias is not None:
            with torch.no_grad():
                self.bias.copy_(bias)
        elif strict and self.bias is not None:
            missing_keys.append(f"{prefix}bias")

        if strict:
            known = weight.stored(f"{prefix}weight").keys()
            unexpected_keys += [name for name in stored if name not in known]
            if self.bias is None and bias is not None:
                unexpected_keys.append(f"{prefix}bias")


@operator("chronicals::packed_linear")
def packed_linear(
    x: Tensor, tensors: Sequence[Tensor], settings: str, outputs: int, dtype: torch.dtype
) -> Tensor:
    """Return ``x Wᵀ``, ``[..., outputs]``, in the dtype of x.

    Args:
        x: ``[..., K]``.
        tensors: the present tensors of W, in the order of ``PackedWeight.tensors``.
        settings: ``PackedWeight.settings``.
        outputs: n.
        dtype: dtype to which W is dequantised.
    """
    weight = weight_from(settings, tensors, (outputs, x.shape[-1]), dtype)
    return weight.product(x)


@torch.library.register_fake(packed_linear)
def _(
    x: Tensor, tensors: Sequence[Tensor], settings: str, outputs: int, dtype: torch.dtype
) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


@operator("chronicals::packed_linear_input_gradient")
def _input_gradient(
    dy: Tensor, tensors: Sequence[Tensor], settings: str, inputs: int, dtype: torch.dtype
) -> Tensor:
    weight = weight_from(settings, tensors, (dy.shape[-1], inputs), dtype)
    return dy @ weight.dense().to(dy.dtype)


@torch.library.register_fake(_input_gradient)
def _(
    dy: Tensor, tensors: Sequence[Tensor], settings: str, inputs: int, dtype: torch.dtype
) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], inputs))


@operator("chronicals::packed_linear_squared_norms")
def _squared_norms(
    tensors: Sequence[Tensor], settings: str, outputs: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    weight = weight_from(settings, tensors, (outputs, inputs), dtype).dense()
    exact = torch.promote_types(dtype, torch.float32)
    return torch.linalg.vector_norm(weight, dim=1, dtype=exact).square_()


@torch.library.register_fake(_squared_norms)
def _(
    tensors: Sequence[Tensor], settings: str, outputs: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    return tensors[0].new_empty(outputs, dtype=torch.promote_types(dtype, torch.float32))


def _with_gradient(
    keys: Any,
    x: Tensor,
    tensors: Sequence[Tensor],
    settings: str,
    outputs: int,
    dtype: torch.dtype,
) -> Tensor:
    # ``torch.library.custom_op`` would flatten the list of tensors and check what is returned in
    # each call, 30 µs of the host's time and more.
    if x.requires_grad and torch.is_grad_enabled():
        y: Tensor = _Differentiated.apply(x, keys, settings, outputs, dtype, *tensors)
        return y
    return _below_autograd(keys, x, tensors, settings, outputs, dtype)


class _Differentiated(torch.autograd.Function):
    """Autograd function of ``packed_linear`` with the gradient of x; the weight is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keys: Any,
        settings: str,
        outputs: int,
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.settings = settings
        ctx.inputs = x.shape[-1]
        ctx.dtype = dtype
        return _below_autograd(keys, x, tensors, settings, outputs, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors
        dx = _input_gradient(dy, tensors, ctx.settings, ctx.inputs, ctx.dtype)
        return dx, None, None, None, None, *(None,) * len(tensors)


def _below_autograd(
    keys: Any,
    x: Tensor,
    tensors: Sequence[Tensor],
    settings: str,
    outputs: int,
    dtype: torch.dtype,
) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        y: Tensor = packed_linear.redispatch(
            keys & torch._C._after_autograd_keyset, x, tensors, settings, outputs, dtype
        )
    return y


_LIBRARY = torch.library.Library("chronicals", "FRAGMENT")
_LIBRARY.impl("packed_linear", _with_gradient, "Autograd", with_keyset=True)
