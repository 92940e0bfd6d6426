"""A weight whose three products run in FP8 (``kernels/fp8_linear.py``).

Each operand has one scale: its amax over 448. The 16-bit values of a frozen weight may be in host
memory; then 1 byte per value is on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Scaled, fp8_quantize, fp8_transposed
from chronicals.kernels.fp8_linear import FP8_MULTIPLE, scaled_product
from chronicals.quantization.base import Base, Operand
from chronicals.quantization.dense import Dense


class FP8Base(Base):
    """FP8 products of a 16-bit weight, which stays in memory.

    A frozen weight is quantised once, in both layouts. After a write to the weight, the next call
    in Python quantises it again into the same memory; writes through ``.data`` are not noticed. A
    replayed CUDA graph reads that memory without a call in Python, so it does not notice a write.

    A trained weight is quantised at each use: by rows in the forward pass, and by columns with the
    same scale in the backward pass.

    Args:
        weight: the 16-bit weight.
        device: device of the products.
    """

    wants_amax = True
    layout = "both"
    """Layouts that are kept of a frozen weight."""

    def __init__(self, weight: Dense, device: torch.device):
        super().__init__(weight.matrix.shape, weight.dtype, weight.parts)
        self.weight = weight
        self.device = device
        self._known: tuple[tuple[int, ...], list[Scaled]] | None = None
        self._scale: Tensor | None = None

    def why_not(self, rows: int) -> str | None:
        """Return why so many rows cannot be multiplied in FP8, or None."""
        return f"FP8 products need multiples of {FP8_MULTIPLE}" if rows % FP8_MULTIPLE else None

    def operand(self, x: Tensor, rows: bool, columns: bool, amax: Tensor | None = None) -> Operand:
        """Quantise x or dy in the layouts that the products below read."""
        if not (rows or columns):
            return Operand(x)
        layout = "both" if rows and columns else "rows" if rows else "columns"
        by_rows, by_columns = fp8_quantize(x, layout=layout, amax=amax)
        known = by_rows or by_columns
        assert known is not None
        return Operand(x, by_rows, by_columns, known.scale)

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        """Return ``x Wᵀ + bias`` in the dtype of x."""
        rows: Scaled | None
        if self.trained:
            rows, _ = fp8_quantize(self.dense())
            assert rows is not None
            self._scale = rows.scale
        else:
            rows = self._layouts()[0]
        assert x.rows is not None
        return scaled_product(x.rows, rows, x.dense.dtype, fast=True, bias=bias)

    def input_gradient(self, dy: Operand) -> Tensor:
        """Return ``dy W`` in the dtype of dy."""
        columns: Scaled | None
        if self.trained:
            _, columns = fp8_quantize(self.dense(), layout="columns", scale=self._scale)
        else:
            rows, *kept_columns = self._layouts()
            columns = kept_columns[0] if kept_columns else fp8_transposed(rows)
        assert dy.rows is not None and columns is not None
        return scaled_product(dy.rows, columns, dy.dense.dtype)

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        """Return ``dyᵀ x`` in the dtype of W; None if the weight is frozen."""
        if not self.trained:
            return None
        columns = x.columns or fp8_quantize(x.dense, layout="columns", scale=x.scale)[1]
        assert dy.columns is not None and columns is not None
        return scaled_product(dy.columns, columns, self.dtype)

    @property
    def bytes_for_host(self) -> int:  # type: ignore[override]
        """Bytes of the 16-bit values of a frozen weight, which the products do not read."""
        return 0 if self.trained else self.weight.bytes

    def dense(self) -> Tensor:
        """Return the 16-bit weight."""
        return self.weight.matrix

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Return the bytes of a 16-bit value and of its two layouts in FP8."""
        return itemsize + 2

    def _layouts(self) -> list[Scaled]:
        """Return the quantised layouts of a frozen weight, made anew if it was written to."""
        versions = tuple(part._version for part in self.parts)
        if self._known is None or self._known[0] != versions:
            layouts = [
                layout
                for layout in fp8_quantize(self.dense(), layout=self.layout)
                if layout is not None
            ]
            if self._known is not None:
                for place, new in zip(self._known[1], layouts):
                    place.values.copy_(new.values)
                    place.scale.copy_(new.scale)
                layouts = self._known[1]
            self._known = versions, layouts
        return self._known[1]


class FP8InHost(FP8Base):
    """FP8 weight with only its rows on the device, transposed at each ``input_gradient``.

    ``weight`` is on the CPU.
    """

    layout = "rows"
    bytes_for_host = 0  # they are there already

    def dense(self) -> Tensor:
        """Return a copy of the 16-bit weight on the device of the products."""
        return self.weight.matrix.to(self.device)

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        """Return the byte of the rows."""
        return 1
