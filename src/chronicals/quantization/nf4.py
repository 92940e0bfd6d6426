"""A frozen weight in 4 bits (QLoRA, Dettmers et al., 2023): dequantised for each product, about half a byte a value.

The dense values stand in a buffer, with padding columns for adapters, that all bases of one shape and device share. The
forward pass writes it anew; the backward pass reads it where it still holds this weight, as it does after a layer was
recomputed, and writes it again where another layer came between.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from chronicals.kernels.nf4 import SCALE_BLOCK, Scales, dequantize_4bit, quantize_nf4, quantize_scales
from chronicals.quantization.base import Operand, Storage
from chronicals.quantization.dense import Dense

BLOCK = 64
"""Values that share a scale, as in QLoRA."""


@dataclass(frozen=True)
class Packed:
    """The weight of one linear layer in 4 bits.

    Attributes:
        codes: uint8, two codes a byte, of any shape.
        scales: of its blocks.
        shape: ``(n, K)`` of the weight.
        dtype: of what it is dequantised to.
        block: values that share a scale.
        code: "nf4" or "fp4".
    """

    codes: Tensor
    scales: Scales
    shape: tuple[int, int]
    dtype: torch.dtype
    block: int = BLOCK
    code: str = "nf4"

    @classmethod
    def of(cls, weight: Tensor, block: int = BLOCK, nested: bool = True) -> Packed:
        """A weight ``[n, K]``, fp32, bf16 or fp16, quantised to NF4.

        Args:
            nested: the scales are quantised themselves.
        """
        codes, absmax = quantize_nf4(weight, block)
        rows, columns = weight.shape
        return cls(codes, quantize_scales(absmax) if nested else Scales(absmax), (rows, columns), weight.dtype, block)

    def to(self, dtype: torch.dtype) -> Packed:
        """The same, dequantised to another dtype."""
        return replace(self, dtype=dtype)

    def into(self, out: Tensor) -> Tensor:
        """Write the values to ``out``, ``[n, K]``, rows dense; by one launch."""
        return dequantize_4bit(self.codes, self.scales, out, self.block, self.code)

    def dense(self) -> Tensor:
        """The values, ``[n, K]``."""
        return self.into(torch.empty(self.shape, dtype=self.dtype, device=self.codes.device))

    @property
    def bytes(self) -> int:
        scales = [self.scales.absmax, *([self.scales.absmax2] if self.scales.absmax2 is not None else [])]
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, *scales))


class NF4(Storage):
    """Linear layers of one input whose weights are packed, each by itself, one below the other.

    Args:
        packed: of each layer; its codes are the layer's parameter.
        columns: R, padding columns and rows for adapters, as ``Dense`` has them.
        ranks: of the adapters of each layer: bases that share a buffer write theirs to the same places of it.
    """

    def __init__(self, packed: Sequence[Packed], columns: int = 0, ranks: Sequence[int] = ()):
        sizes, width, dtype = [part.shape[0] for part in packed], packed[0].shape[1], packed[0].dtype
        super().__init__((sum(sizes), width), dtype, [part.codes for part in packed])
        self.packed = [replace(part, codes=part.codes.detach()) for part in packed]
        self.padded = columns > 0
        self._shared = _Buffer.of((*sizes,), width, columns, (*ranks,), dtype, packed[0].codes.device)

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
        if not self._shared.holds(self):
            self._shared.fill(self)
        return self.buffer.input_gradient(dy)

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        return None

    def into(self, out: Tensor) -> Tensor:
        """Write W to ``out``, ``[N, K]``, rows dense; a launch for each layer."""
        for part, place in zip(self.packed, out.split([part.shape[0] for part in self.packed])):
            part.into(place)
        return out

    def dense(self) -> Tensor:
        return self.into(torch.empty((self.outputs, self.width), dtype=self.dtype, device=self.packed[0].codes.device))

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """With nested scales, in blocks of ``BLOCK``; the shared buffers are beside it."""
        return 1 / 2 + 1 / BLOCK + 4 / (BLOCK * SCALE_BLOCK)

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
        cls, sizes: tuple[int, ...], width: int, columns: int, ranks: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> _Buffer:
        key = sizes, width, columns, ranks, dtype, device
        found = cls._known.get(key)
        if found is None:
            with torch.inference_mode(False):  # a tensor made within could not be written to after it
                buffer = torch.zeros((sum(sizes) + columns, width + columns), dtype=dtype, device=device)
            found = cls._known[key] = cls(Dense(buffer[: sum(sizes), :width], (), columns))
        return found

    def holds(self, base: NF4) -> bool:
        return self._holds is not None and self._holds() is base

    def fill(self, base: NF4) -> None:
        base.into(self.weight.matrix)
        self._holds = weakref.ref(base)
