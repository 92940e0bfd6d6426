"""A frozen weight in 4 bits (QLoRA, Dettmers et al., 2023): dequantised for each product, about
half a byte a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.nf4 import (
    SCALE_BLOCK,
    Scales,
    dequantize_4bit,
    quantize_fp4,
    quantize_nf4,
    quantize_scales,
)
from chronicals.quantization.packed import PackedBase

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
        quantized_from: dtype that the weight had before; None where that is not known.
    """

    codes: Tensor
    scales: Scales
    shape: tuple[int, int]
    dtype: torch.dtype
    block: int = BLOCK
    code: str = "nf4"
    quantized_from: torch.dtype | None = None

    @classmethod
    def of(
        cls, weight: Tensor, block: int = BLOCK, nested: bool = True, code: str = "nf4"
    ) -> Packed:
        """A weight ``[n, K]``, fp32, bf16 or fp16, quantised to NF4 or FP4.

        Args:
            nested: the scales are quantised themselves.
        """
        codes, absmax = (quantize_nf4 if code == "nf4" else quantize_fp4)(weight, block)
        scales = quantize_scales(absmax) if nested else Scales(absmax)
        rows, columns = weight.shape
        return cls(codes, scales, (rows, columns), weight.dtype, block, code, weight.dtype)

    @classmethod
    def base(cls, packed: Sequence[Packed], columns: int = 0, ranks: Sequence[int] = ()) -> NF4:
        """What multiplies by several of them."""
        return NF4(packed, columns, ranks)

    def detached(self) -> Packed:
        """The same, whose codes are no parameter."""
        return replace(self, codes=self.codes.detach())

    def to(self, dtype: torch.dtype) -> Packed:
        """The same, dequantised to another dtype."""
        return replace(self, dtype=dtype)

    def moved(self, device: torch.device) -> Packed:
        """The same on another device."""
        scales: dict[str, Any] = {
            name: x.to(device) for name, x in vars(self.scales).items() if isinstance(x, Tensor)
        }
        return replace(self, codes=self.codes.to(device), scales=replace(self.scales, **scales))

    def into(self, out: Tensor) -> Tensor:
        """Write the values to ``out``, ``[n, K]``, rows dense; by one launch."""
        return dequantize_4bit(self.codes, self.scales, out, self.block, self.code)

    def dense(self) -> Tensor:
        """The values, ``[n, K]``."""
        return self.into(torch.empty(self.shape, dtype=self.dtype, device=self.codes.device))

    @property
    def bytes(self) -> int:
        scales = [
            self.scales.absmax,
            *([self.scales.absmax2] if self.scales.absmax2 is not None else []),
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, *scales))


class NF4(PackedBase):
    """Weights in 4 bits of bitsandbytes."""

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """With nested scales, in blocks of ``BLOCK``; the shared buffers are beside it."""
        return 1 / 2 + 1 / BLOCK + 4 / (BLOCK * SCALE_BLOCK)
