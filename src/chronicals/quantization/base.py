"""Base: the weight of a linear product as an object that multiplies, whatever format it is stored
in.

    y = x Wᵀ + b,   dx = dy W,   dW = dyᵀ x        W [N, K],  x [T, K],  dy [T, N]

A product asks its base and knows no format; a new format is a new class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Scaled


class Operand(NamedTuple):
    """x or dy as the products of a base take it.

    Attributes:
        tensor: ``[T, D]``, 16 or 32 bit; None where only ``columns`` was kept of it for the
            backward pass.
        rows: quantised, ``[T, D]``, scaled along D.
        columns: quantised and transposed, ``[D, T]``, scaled along T.
        scale: with which it was quantised before, where it may be quantised again.
    """

    tensor: Tensor | None
    rows: Scaled | None = None
    columns: Scaled | None = None
    scale: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        """``tensor``, where it is known to be there."""
        assert self.tensor is not None
        return self.tensor


class Base(ABC):
    """The weight ``W [N, K]`` of one or several linear layers, whose outputs are N together.

    Args:
        shape: ``(N, K)``.
        dtype: of what its products return.
        parts: the parameters that the weight consists of, in order; they get ``weight_gradient``,
            split.

    Attributes:
        padded: ``forward`` and ``input_gradient`` also multiply by the padding columns around the
            weight, where the adapters are, if they are given rows that long.
        wants_amax: the largest absolute value of an operand, where the kernel that made it has
            found it, saves a pass over it.
    """

    padded = False
    wants_amax = False

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Tensor]):
        (self.outputs, self.width) = shape
        self.dtype = dtype
        self.parts = tuple(parts)

    @property
    def trained(self) -> bool:
        """True if ``weight_gradient`` gives one."""
        return any(part.requires_grad for part in self.parts)

    def why_not(self, rows: int) -> str | None:
        """Return why operands of so many rows cannot be multiplied in this format; None where they
        can."""
        return None

    def operand(self, x: Tensor, rows: bool, columns: bool, amax: Tensor | None = None) -> Operand:
        """x or dy, ``[T, D]``, for the products below.

        Args:
            rows: it is wanted for ``forward`` or ``input_gradient``.
            columns: it is wanted for ``weight_gradient``.
            amax: its largest absolute value, fp32 ``[1]``, where that is known.
        """
        return Operand(x)

    @abstractmethod
    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        """``x Wᵀ + bias``, ``[T, N]``; the caller may write into it."""

    @abstractmethod
    def input_gradient(self, dy: Operand) -> Tensor:
        """``dy W``, ``[T, K]``; the caller may write into it."""

    @abstractmethod
    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        """``dyᵀ x``, ``[N, K]``; None where the weight is frozen."""

    @abstractmethod
    def dense(self) -> Tensor:
        """W in ``dtype``, on the device of its products."""

    @classmethod
    @abstractmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Memory of a frozen weight on the device of its products, where the dense weight has
        ``itemsize`` bytes a value.
        """

    @property
    def bytes_for_host(self) -> int:
        """Bytes of 16-bit values that can wait in host memory while the products run; 0 where
        these read them, or they wait there already."""
        return 0

    @property
    def bytes(self) -> int:
        """Memory on the device of its products; a trained weight is held densely."""
        itemsize = self.dtype.itemsize
        return int(
            self.outputs * self.width * (itemsize if self.trained else self.bytes_a_value(itemsize))
        )


class Storage(Base):
    """A base that multiplies by the parameters themselves, in the memory that they have their
    data in.
    """

    @property
    @abstractmethod
    def places(self) -> tuple[Tensor, ...]:
        """Memory where the data of each part are."""

    @property
    def plain_weight(self) -> Any:
        """The storage itself where it is dense (``Dense``), so that its products may run in another
        format; None where it is packed.
        """
        return None
