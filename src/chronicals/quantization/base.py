"""Base: the weight of a linear product, as an object that multiplies in its own storage format.

    y = x Wᵀ + b,   dx = dy W,   dW = dyᵀ x        W [N, K],  x [T, K],  dy [T, N]

A product calls its base and does not know the format; a new format is a new class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Scaled


class Operand(NamedTuple):
    """x or dy in the forms that the products of a base take.

    Attributes:
        tensor: ``[T, D]``, 16 or 32 bit; None if only ``columns`` was kept for the backward pass.
        rows: quantised, ``[T, D]``, scaled along D.
        columns: quantised and transposed, ``[D, T]``, scaled along T.
        scale: scale of an earlier quantisation, to be used again.
    """

    tensor: Tensor | None
    rows: Scaled | None = None
    columns: Scaled | None = None
    scale: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        """``tensor``, which must not be None."""
        assert self.tensor is not None
        return self.tensor


class Base(ABC):
    """The weight ``W [N, K]`` of one or several linear layers; N is the sum of their outputs.

    Args:
        shape: ``(N, K)``.
        dtype: dtype of the results of its products.
        parts: the parameters that the weight consists of, in order; ``weight_gradient`` is split
            among them.

    Attributes:
        padded: if true and the operands include the padding columns, ``forward`` and
            ``input_gradient`` also multiply by the adapters in the padding around the weight.
        wants_amax: if true, an operand's largest absolute value, computed by the kernel that
            produced it, saves a pass over it.
        bytes_for_host: bytes of 16-bit values that may move to host memory while the products run;
            0 if the products read them, or if they are there already.
        gives_rows: True if ``of_rows`` returns some of its rows, which multiply as the whole does.
        dense_stays: True if the dense values of a frozen weight are on the device of its products.
        packed_bytes: bytes per value of the packed or quantised forms on that device.
    """

    padded = False
    wants_amax = False
    bytes_for_host = 0
    gives_rows: ClassVar[bool] = False
    dense_stays: ClassVar[bool] = True
    packed_bytes: ClassVar[float] = 0

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Tensor]):
        (self.outputs, self.width) = shape
        self.dtype = dtype
        self.parts = tuple(parts)

    @property
    def trained(self) -> bool:
        """True if the weight is trained, so that ``weight_gradient`` returns a gradient."""
        return any(part.requires_grad for part in self.parts)

    def why_not(self, rows: int) -> str | None:
        """Return why operands with ``rows`` rows cannot be multiplied in this format, or None."""
        return None

    def operand(self, x: Tensor, rows: bool, columns: bool, amax: Tensor | None = None) -> Operand:
        """Prepare x or dy, ``[T, D]``, for the products below.

        Args:
            x: the operand.
            rows: it will be used by ``forward`` or ``input_gradient``.
            columns: it will be used by ``weight_gradient``.
            amax: its largest absolute value, fp32 ``[1]``, if known.
        """
        return Operand(x)

    @abstractmethod
    def forward(
        self, x: Operand, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return ``x Wᵀ + bias``, ``[T, N]``; the caller may write into it.

        Args:
            x: ``[T, K]``.
            bias: ``[N]``, or None.
            dtype: of the result, that of x or fp32; by default that of x.
        """

    @abstractmethod
    def input_gradient(self, dy: Operand) -> Tensor:
        """Return ``dy W``, ``[T, K]``; the caller may write into it."""

    @abstractmethod
    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        """Return ``dyᵀ x``, ``[N, K]``; None if the weight is frozen."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return W in ``dtype``, on the device of its products."""

    def of_rows(self, ranges: Sequence[Sequence[slice]], columns: int) -> Any:
        """Return copies of some rows of each part as a frozen ``Dense`` weight.

        Args:
            ranges: of each part its rows, ascending.
            columns: padding columns and rows of the copy.

        Raises:
            NotImplementedError: the products do not read dense values (``gives_rows``).
        """
        raise NotImplementedError(f"{type(self).__name__} does not multiply by dense values")

    def made_once(self) -> AbstractContextManager[None]:
        """Return a context in which dense values are made once for all products.

        The weight must not change within it.
        """
        return nullcontext()

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Return the bytes per value of a frozen weight on the device of its products.

        Buffers that several weights share are not included.

        Args:
            itemsize: bytes per value of the dense weight.
        """
        dense = itemsize if cls.dense_stays else 0
        return dense + cls.packed_bytes

    @property
    def bytes(self) -> int:
        """Bytes on the device of its products; a trained weight is stored densely."""
        itemsize = self.dtype.itemsize
        each = itemsize if self.trained else self.bytes_a_value(itemsize)
        return int(self.outputs * self.width * each)


class Storage(Base):
    """A base whose products read the parameters themselves, without a copy.

    Attributes:
        places: tensors over the memory of each part.
        plain_weight: this storage if it is dense (``Dense``), so that its products may run in
            another format; None if it is packed.
    """

    places: Any
    plain_weight: Any = None

    def copied(self) -> Any:
        """Return the values as a ``Dense`` weight: this one, or a copy of a packed one."""
        return self
