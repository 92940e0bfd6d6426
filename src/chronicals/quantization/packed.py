"""Frozen weights that are dequantised for each product, whatever their format: what these share.

The dense values stand in a buffer, with padding columns for adapters, that all bases of one shape
and device share. The forward pass writes it anew; the backward pass reads it where it still holds
this weight, as it does after a layer was recomputed, and writes it again where another layer came
between.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from chronicals.quantization.base import Operand, Storage
from chronicals.quantization.dense import Dense


class PackedWeight(Protocol):
    """The weight ``[n, K]`` of one linear layer, packed; frozen dataclasses are it.

    Attributes:
        codes: uint8, the layer's parameter.
        dtype: of what it is dequantised to.
        bytes: memory that it takes.
    """

    @property
    def codes(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def bytes(self) -> int: ...

    def detached(self) -> Self:
        """The same, whose codes are no parameter."""
        ...

    def to(self, dtype: torch.dtype) -> Self:
        """The same, dequantised to another dtype."""
        ...

    def into(self, out: Tensor) -> Tensor:
        """Write the values to ``out``, ``[n, K]``, rows dense; by one launch."""
        ...

    def dense(self) -> Tensor:
        """The values, ``[n, K]``."""
        ...

    @classmethod
    def base(cls, packed: Sequence[Any], columns: int = 0, ranks: Sequence[int] = ()) -> PackedBase:
        """What multiplies by several weights of this format."""
        ...


class PackedBase(Storage):
    """Linear layers of one input whose weights are packed, each by itself, one below the other.

    Args:
        packed: of each layer; its codes are the layer's parameter.
        columns: R, padding columns and rows for adapters, as ``Dense`` has them.
        ranks: of the adapters of each layer: bases that share a buffer write theirs to the same
            places of it.
    """

    def __init__(self, packed: Sequence[PackedWeight], columns: int = 0, ranks: Sequence[int] = ()):
        sizes = [part.shape[0] for part in packed]
        width = packed[0].shape[1]
        dtype = packed[0].dtype
        super().__init__((sum(sizes), width), dtype, [part.codes for part in packed])
        self.packed = [part.detached() for part in packed]
        self.padded = columns > 0
        self._shared = _Buffer.of(
            (*sizes,), width, columns, (*ranks,), dtype, packed[0].codes.device
        )

    @property
    def places(self) -> tuple[Tensor, ...]:
        return tuple(part.codes for part in self.packed)

    @property
    def buffer(self) -> Dense:
        """What the products read; its padding holds the adapters."""
        return self._shared.weight

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        self._shared.fill(self)
        return self.buffer.forward(x, bias)

    def input_gradient(self, dy: Operand) -> Tensor:
        self.filled()
        return self.buffer.input_gradient(dy)

    def filled(self) -> Tensor:
        """W in the shared buffer, ``[N, K]``: until another weight is written there."""
        if not self._shared.holds(self):
            self._shared.fill(self)
        return self.buffer.matrix

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        return None

    def into(self, out: Tensor) -> Tensor:
        """Write W to ``out``, ``[N, K]``, rows dense; a launch for each layer."""
        for part, place in zip(self.packed, out.split([part.shape[0] for part in self.packed])):
            part.into(place)
        return out

    def dense(self) -> Tensor:
        return self.into(
            torch.empty(
                (self.outputs, self.width), dtype=self.dtype, device=self.packed[0].codes.device
            )
        )

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.packed)


class _Buffer:
    """Dense values of one weight after the other; freed with the last base that uses it."""

    _known: ClassVar[weakref.WeakValueDictionary[tuple, _Buffer]] = weakref.WeakValueDictionary()

    def __init__(self, weight: Dense):
        self.weight = weight
        self._holds: Any = None

    @classmethod
    def of(
        cls,
        sizes: tuple[int, ...],
        width: int,
        columns: int,
        ranks: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Buffer:
        key = sizes, width, columns, ranks, dtype, device
        found = cls._known.get(key)
        if found is None:
            with torch.inference_mode(
                False
            ):  # a tensor made within could not be written to after it
                buffer = torch.zeros(
                    (sum(sizes) + columns, width + columns), dtype=dtype, device=device
                )
            found = cls._known[key] = cls(Dense(buffer[: sum(sizes), :width], (), columns))
        return found

    def holds(self, base: PackedBase) -> bool:
        return self._holds is not None and self._holds() is base

    def fill(self, base: PackedBase) -> None:
        base.into(self.weight.matrix)
        self._holds = weakref.ref(base)
