"""Weights whose products run in FP8 (``kernels/fp8_linear.py``, ``kernels/fp8_experts.py``).

Each operand and each expert has one scale: its amax over 448. The 16-bit values of a frozen weight
may be in host memory; then 1 byte per value is on the device.

A frozen weight is quantised once, in both layouts. After a write to the weight, the next call in
Python quantises it again into the same memory; writes through ``.data`` are not noticed. A replayed
CUDA graph reads that memory without a call in Python, so it does not notice a write.

A trained weight is quantised at each use: by rows in the forward pass, and by columns with the same
scale in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Scaled, fp8_quantize, fp8_transposed
from chronicals.kernels.fp8_experts import fp8_experts_transposed, fp8_quantize_experts
from chronicals.kernels.fp8_linear import FP8_MULTIPLE, scaled_product
from chronicals.quantization.base import Base, Operand
from chronicals.quantization.dense import Dense


class FP8Base(Base):
    """FP8 products of a 16-bit weight, which stays in memory.

    Args:
        weight: the 16-bit weight.
        device: device of the products.
    """

    wants_amax = True
    layout = "both"
    """Layouts that are kept of a frozen weight."""
    packed_bytes = 2  # one for each layout

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

        layout = "rows" if rows else "columns"
        if rows and columns:
            layout = "both"
        by_rows, by_columns = fp8_quantize(x, layout=layout, amax=amax)
        known = by_rows or by_columns
        assert known is not None
        return Operand(x, by_rows, by_columns, known.scale)

    def forward(
        self, x: Operand, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return ``x Wᵀ + bias``, by default in the dtype of x."""
        rows: Scaled | None
        if self.trained:
            rows, _ = fp8_quantize(self.dense())
            assert rows is not None
            self._scale = rows.scale
        else:
            rows = self._layouts()[0]

        assert x.rows is not None
        return scaled_product(x.rows, rows, dtype or x.dense.dtype, fast=True, bias=bias)

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

        columns = x.columns
        if columns is None:
            _, columns = fp8_quantize(x.dense, layout="columns", scale=x.scale)
        assert dy.columns is not None and columns is not None
        return scaled_product(dy.columns, columns, self.dtype)

    @property
    def bytes_for_host(self) -> int:  # type: ignore[override]
        """Bytes of the 16-bit values of a frozen weight, which the products do not read."""
        return 0 if self.trained else self.weight.bytes

    def dense(self) -> Tensor:
        """Return the 16-bit weight on the device of the products; a copy if it is elsewhere."""
        return self.weight.matrix.to(self.device)

    def _layouts(self) -> list[Scaled]:
        """Return the quantised layouts of a frozen weight, made anew if it was written to."""
        versions = tuple(part._version for part in self.parts)
        if self._known is None or self._known[0] != versions:
            made = fp8_quantize(self.dense(), layout=self.layout)
            self._known = versions, _in_same_memory(self._known, made)
        return self._known[1]


def _in_same_memory(
    known: tuple[Any, list[Scaled]] | None, made: Iterable[Scaled | None]
) -> list[Scaled]:
    """Return the layouts in ``made``, written over the known ones if there are any."""
    layouts = [layout for layout in made if layout is not None]
    if known is None:
        return layouts

    for place, new in zip(known[1], layouts):
        place.values.copy_(new.values)
        place.scale.copy_(new.scale)
    return known[1]


class FP8InHost(FP8Base):
    """FP8 weight with only its rows on the device, transposed at each ``input_gradient``.

    ``weight`` is on the CPU.
    """

    layout = "rows"
    dense_stays = False
    packed_bytes = 1
    bytes_for_host = 0  # they are there already


class FP8Experts:
    """FP8 products of a stacked 16-bit weight, which stays in memory.

    Args:
        weight: the parameter, ``[E, N, K]``, or ``[E, K, N]`` if ``transposed``.
        device: device of the products.

    Attributes:
        waits_for: device of the products if the 16-bit weight is in host memory; else None.
    """

    layout = "both"
    """Layouts that are kept of a frozen weight, by the names that the products use."""

    column_slots: Tensor | None = None
    """The columns are in the order of experts."""

    def __init__(self, weight: Tensor, transposed: bool, device: torch.device):
        self.weight = weight
        self.transposed = transposed
        self.device = device
        self.waits_for: torch.device | None = None
        self._known: tuple[tuple, list[Scaled]] | None = None

    def to_host(self) -> FP8Experts:
        """Move the 16-bit values of a frozen weight to host memory.

        Returns:
            The object that then multiplies in place of this one; this one if the weight is trained
            or already in host memory.
        """
        if self.weight.requires_grad or self.waits_for is not None:
            return self

        waiting = FP8ExpertsInHost(self.weight, self.transposed, self.device)
        waiting.rows()  # while the 16 bits are on the device
        self.weight.data = self.weight.data.to("cpu", copy=True)
        return waiting

    def rows(self) -> Scaled:
        """Return the rows, ``[E, N, K]``, for ``y = x Wᵀ``."""
        layouts = self._made("rows") if self.weight.requires_grad else self._layouts()
        return layouts[0]

    def columns(self, scale: Tensor) -> Scaled:
        """Return the columns, ``[E, K, N]``, for ``dx = dy W``.

        Args:
            scale: scale of the rows in the forward pass.
        """
        if self.weight.requires_grad:
            return self._made("columns", scale)[0]
        rows, *columns = self._layouts()
        return columns[0] if columns else fp8_experts_transposed(rows)

    def _made(self, layout: str, scale: Tensor | None = None) -> list[Scaled]:
        """Return the rows, the columns, or both in this order, as the products read them."""
        stored = layout
        if self.transposed:  # the rows of the products are the columns of the parameter
            stored = {"rows": "columns", "columns": "rows", "both": "both"}[layout]

        with torch.no_grad():
            found = fp8_quantize_experts(self.weight.detach().to(self.device), stored, scale)
        in_order = reversed(found) if self.transposed else found
        return [scaled for scaled in in_order if scaled is not None]

    def _layouts(self) -> list[Scaled]:
        """Return the quantised layouts of a frozen weight, made anew if it was written to."""
        state = self.weight._version, self.weight.dtype
        if self._known is None or self._known[0] != state:
            self._known = state, _in_same_memory(self._known, self._made(self.layout))
        return self._known[1]


class FP8ExpertsInHost(FP8Experts):
    """Frozen FP8 experts whose 16-bit weight is in host memory.

    Only the rows are on the device, 1 byte per value; they are transposed for each gradient.
    """

    layout = "rows"

    def __init__(self, weight: Tensor, transposed: bool, device: torch.device):
        super().__init__(weight, transposed, device)
        self.waits_for = device
