"""A 16- or 32-bit weight, optionally with padding columns for adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chronicals.kernels.products import product
from chronicals.quantization.base import Operand, Storage


class Dense(Storage):
    """``W`` in one buffer with R padding columns and rows, R ≥ 0.

        | W     up |      forward         [x  u] · [W  up]ᵀ      for rows [T, K + R], else x Wᵀ
        | down   · |      input_gradient  [dy  g] · [W ; down]   for rows [T, N + R], else dy W

    Args:
        matrix: W, ``[N, K]``; with padding it is the corner of a buffer ``[N + R, K + R]`` with
            dense rows.
        parts: see ``Base``.
        columns: R.

    Attributes:
        written: record of the adapters that are in the padding now, kept by ``Padding``.
    """

    def __init__(self, matrix: Tensor, parts: Sequence[Tensor], columns: int = 0):
        super().__init__(matrix.shape, matrix.dtype, parts)
        self.matrix = matrix
        self.columns = columns
        self.padded = columns > 0
        self.written: list[tuple] = []

    @classmethod
    def fused(
        cls, weights: Sequence[Tensor], columns: int = 0, device: torch.device | str | None = None
    ) -> Dense:
        """Copy the weights ``[n, K]`` into one new buffer, one below the other, with zero padding.

        Args:
            device: device of the buffer; by default that of the weights.
        """
        outputs = sum(map(len, weights))
        width = weights[0].shape[1]
        buffer = weights[0].new_zeros((outputs + columns, width + columns), device=device)
        found = cls(buffer[:outputs, :width], weights, columns)
        for place, weight in zip(found.places, weights):
            place.copy_(weight.detach())
        return found

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Views of W, ``[n, K]`` for each part."""
        return self.matrix.split([len(part) for part in self.parts])

    @property
    def plain_weight(self) -> Dense:
        return self

    @property
    def up(self) -> Tensor:
        """Padding to the right of W, ``[N, R]``."""
        return self._with_up()[:, self.width :] if self.columns else self.matrix[:, :0]

    @property
    def down(self) -> Tensor:
        """Padding below W, ``[R, K]``."""
        return self._with_down()[self.outputs :] if self.columns else self.matrix[:0]

    def _with_up(self) -> Tensor:
        return self.matrix.as_strided(
            (self.outputs, self.width + self.columns), self.matrix.stride()
        )

    def _with_down(self) -> Tensor:
        return self.matrix.as_strided(
            (self.outputs + self.columns, self.width), self.matrix.stride()
        )

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        rows = x.dense
        matrix = (self.matrix if rows.shape[1] == self.width else self._with_up()).t()
        return (
            product(rows, matrix, rows.dtype) if bias is None else torch.addmm(bias, rows, matrix)
        )

    def input_gradient(self, dy: Operand) -> Tensor:
        rows = dy.dense
        return product(
            rows, self.matrix if rows.shape[1] == self.outputs else self._with_down(), rows.dtype
        )

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        return product(dy.dense.t(), x.dense, x.dense.dtype) if self.trained else None

    def dense(self) -> Tensor:
        return self.matrix

    @classmethod
    def bytes_a_value(cls, itemsize: int) -> float:
        return itemsize
