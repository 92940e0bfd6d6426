"""A frozen linear layer that has its weight packed and no other, whatever the format.

    y = x Wᵀ + b,   dx = dy W        W dequantised for each product, and gone after it

The fused decoder layers read what it holds (``packed``) and multiply by themselves; called as a
module it is one operator of ``torch.library``, which ``torch.compile`` sees as a whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """``x Wᵀ + b`` over packed codes, which never get a gradient.

    Its ``weight`` is the parameter that holds the codes, uint8. What casts a model casts the type
    that W is dequantised to, never the codes or scales.

    Args:
        codes: of the weight.
        shape: ``(out, in)``.
        dtype: of the dequantised weight.
        bias: ``[out]``, or None.

    Attributes:
        in_4_bits: whether a code has 4 bits.
    """

    in_4_bits = False

    def __init__(
        self, codes: Tensor, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
    ):
        super().__init__()
        (self.out_features, self.in_features) = shape
        self.dtype = dtype
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    @abstractmethod
    def packed(self) -> Any:
        """The weight, a ``PackedWeight``."""

    @property
    def four_bits(self) -> Any:
        """The weight as ``Packed``, or as much of it as this process holds, where it is in 4
        bits; else None.
        """
        return self.packed if self.in_4_bits else None

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Of the rows of the dequantised weight, ``[out]``, in at least fp32."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """``x Wᵀ``, in the dtype of x."""

    def plain(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain frozen layer of the dequantised weight, rounded to ``self.dtype``.

        Args:
            dtype: the weight's and the bias's, by default that which each has.
        """
        weight = self.packed.dense()
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta"
        )
        linear.weight = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(
                self.bias.detach().to(dtype or self.bias.dtype, copy=True), requires_grad=False
            )
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self._product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        sizes = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
        return f"{sizes}, {self.format}, dtype={self.dtype}"

    @property
    @abstractmethod
    def format(self) -> str:
        """In words."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: buffer for name, buffer in self.named_buffers(recurse=False)}
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        super()._apply(fn, recurse)
        keep_dtypes(self, kept)
        return self


def keep_dtypes(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Put buffers that a cast of the module changed back to what they were, on their new device."""
    for name, buffer in kept.items():
        moved = getattr(module, name)
        if moved.dtype != buffer.dtype:
            setattr(module, name, buffer.to(moved.device))
