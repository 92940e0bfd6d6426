"""A frozen weight in FP8 with a scale a block, as DeepSeek V3's files hold it: 1 byte per value.

    w = q · s        q: E4M3;   s: fp32, one of each block of rows × columns

It is dequantised for each product, in fp32 and rounded once, to the values that transformers
dequantises it to as it reads it. Files hold a weight ``name`` as ``name``, ``[N, K]`` in FP8, beside
``name_scale_inv``, ``[N / rows, K / columns]``; a weight smaller than a block is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from chronicals.quantization.packed import PackedWeight

STORED = "F8_E4M3"
"""Dtype of the values in the names of safetensors."""

SCALES = "_scale_inv"
"""End of the name of the scales."""


@dataclass(frozen=True)
class FP8Blocks(PackedWeight):
    """One or several weights in FP8 blocks, one below the other.

    Attributes:
        codes: uint8, the bytes of ``n · K`` values in E4M3.
        scales: fp32, one a block.
        shape: ``(n, K)``.
        dtype: dtype of the dequantised values.
        rows_of_block, columns_of_block: sizes of a block.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    rows_of_block: int
    columns_of_block: int

    PARTS: ClassVar[tuple[str, ...]] = ("scales",)
    DIVIDED: ClassVar[tuple[str, ...]] = ("codes", "scales")

    label = "FP8 in blocks"

    @property
    def options(self) -> tuple[str, ...]:
        """Rows and columns of a block."""
        return str(self.rows_of_block), str(self.columns_of_block)

    @classmethod
    def of_tensors(
        cls,
        options: tuple[str, ...],
        tensors: Sequence[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Self:
        """Return the weight with these sizes of a block."""
        codes, scales = tensors
        rows, columns = map(int, options)
        return cls(codes, scales, shape, dtype, rows, columns)

    @classmethod
    def of_matrices(
        cls, matrices: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> FP8Blocks:
        """Return the weight that matrices of a file make, one below the other.

        Args:
            matrices: bytes of the values, uint8 ``[N, K]``, and scales ``[n, k]`` of each.
            dtype: dtype of the dequantised values.

        Raises:
            ValueError: blocks do not fill a matrix, or are not the same of all.
        """
        sizes = {
            (rows / scales.shape[0], columns / scales.shape[1])
            for values, scales in matrices
            for rows, columns in [values.shape]
        }
        block = next(iter(sizes))
        if len(sizes) > 1 or any(size % 1 for size in block):
            shapes = [(list(values.shape), list(scales.shape)) for values, scales in matrices]
            raise ValueError(
                f"its values in FP8 and their scales are {shapes}: blocks do not fill a matrix, or "
                "are not the same of all"
            )
        codes = torch.cat([values for values, _ in matrices])
        scales = torch.cat([scales.float() for _, scales in matrices])
        rows, columns = map(int, block)
        shape = (len(codes), codes.shape[1])
        return cls(codes.reshape(-1), scales.reshape(-1), shape, dtype, rows, columns)

    def into(self, out: Tensor) -> Tensor:
        """Write the dequantised values to ``out``, and return it."""
        rows, columns = self.shape
        down, across = rows // self.rows_of_block, columns // self.columns_of_block
        values = self.codes.view(torch.float8_e4m3fn).float()
        blocks = values.view(down, self.rows_of_block, across, self.columns_of_block)
        wide = blocks * self.scales.view(down, 1, across, 1)
        return out.copy_(wide.view(rows, columns))

    def divides(self, count: int) -> bool:
        """Return whether the rows can be split among ``count`` ranks without dividing a block."""
        return self.shape[0] % count == 0 and self.shape[0] // count % self.rows_of_block == 0
