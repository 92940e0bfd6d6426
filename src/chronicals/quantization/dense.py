"""A 16- or 32-bit weight, optionally with padding columns for adapters.

The products of the weight then compute the adapters, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chronicals.kernels.adapter_padding import write_adapters
from chronicals.kernels.products import product
from chronicals.quantization.base import Operand, Storage

COLUMN_MULTIPLE = 64
"""The number of padding columns is a multiple of this.

Rows then begin at multiples of 128 bytes and products take whole steps, which is up to 3 % faster
than with 16.
"""


def columns_for(ranks: Sequence[int]) -> int:
    """Return R, the number of padding columns for adapters of these ranks."""
    return -(-sum(ranks) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


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
        written: record of the adapters that are in the padding now, kept by ``AdapterPadding``.
    """

    gives_rows = True

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
            weights: the weights.
            columns: R, padding columns and rows.
            device: device of the buffer; by default that of the weights.
        """
        outputs = sum(map(len, weights))
        width = weights[0].shape[1]
        buffer = weights[0].new_zeros((outputs + columns, width + columns), device=device)

        fused = cls(buffer[:outputs, :width], weights, columns)
        for place, weight in zip(fused.places, weights):
            place.copy_(weight.detach())
        return fused

    @property
    def places(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Views of W, ``[n, K]`` for each part."""
        return self.matrix.split([len(part) for part in self.parts])

    @property
    def plain_weight(self) -> Dense:  # type: ignore[override]
        """This weight."""
        return self

    @property
    def up(self) -> Tensor:
        """Padding to the right of W, ``[N, R]``."""
        return self._reaching(self.columns, 0)[:, self.width :]

    @property
    def down(self) -> Tensor:
        """Padding below W, ``[R, K]``."""
        return self._reaching(0, self.columns)[self.outputs :]

    def _reaching(self, right: int, below: int) -> Tensor:
        """Return W with so many columns and rows of the padding."""
        if not right and not below:
            return self.matrix
        shape = self.outputs + below, self.width + right
        return self.matrix.as_strided(shape, self.matrix.stride())

    def forward(
        self, x: Operand, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return ``x Wᵀ + bias``; with padding columns behind x, the adapters' part, too."""
        rows = x.dense
        kind = dtype or rows.dtype
        right = 0 if rows.shape[1] == self.width else self.columns
        matrix = self._reaching(right, 0).t()

        if bias is None:
            return product(rows, matrix, kind)
        if kind != rows.dtype:
            return product(rows, matrix, kind).add_(bias)
        return torch.addmm(bias, rows, matrix)

    def input_gradient(self, dy: Operand) -> Tensor:
        """Return ``dy W``; with padding columns behind dy, the adapters' part, too."""
        rows = dy.dense
        below = 0 if rows.shape[1] == self.outputs else self.columns
        return product(rows, self._reaching(0, below), rows.dtype)

    def weight_gradient(self, dy: Operand, x: Operand) -> Tensor | None:
        """Return ``dyᵀ x`` in the dtype of x; None if the weight is frozen."""
        if not self.trained:
            return None
        return product(dy.dense.t(), x.dense, x.dense.dtype)

    def dense(self) -> Tensor:
        """Return W itself."""
        return self.matrix

    def of_rows(self, ranges: Sequence[Sequence[slice]], columns: int) -> Dense:
        """Return copies of some rows of each part as a frozen weight; see ``Base``."""
        return copied_rows(self.matrix, [len(part) for part in self.parts], ranges, columns)


def copied_rows(
    matrix: Tensor, sizes: Sequence[int], ranges: Sequence[Sequence[slice]], columns: int
) -> Dense:
    """Return copies of some rows of each part of a matrix as a weight.

    Args:
        matrix: ``[N, K]``, whose parts lie one below the other.
        sizes: number of rows of each part.
        ranges: of each part its rows.
        columns: padding columns and rows of the copy.
    """
    places = matrix.detach().split(list(sizes))
    chosen = [torch.cat([place[rows] for rows in own]) for place, own in zip(places, ranges)]
    return Dense.fused(chosen, columns)


@dataclass(frozen=True)
class AdapterPadding:
    """Buffers for the adapters of several layers.

    Attributes:
        down: all A, ``[R, K]``.
        up: all s·B, ``[N, R]``.
        sizes: number of outputs of each layer, together N.
        ranks: rank of each layer's adapter, 0 if it has none.
        written: identity and version of the adapters that are there now; one entry or none.
    """

    down: Tensor
    up: Tensor
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    written: list[tuple] = field(default_factory=list, compare=False)

    @classmethod
    def beside(cls, weight: Dense, sizes: Sequence[int], ranks: Sequence[int]) -> AdapterPadding:
        """Return padding in the buffer of a weight that has ``columns_for(ranks)`` columns.

        Several paddings of the same sizes and ranks may share it.
        """
        return cls(weight.down, weight.up, tuple(sizes), tuple(ranks), weight.written)

    @property
    def columns(self) -> int:
        """R."""
        return len(self.down)

    @property
    def used(self) -> int:
        """Number of the R columns that hold an adapter."""
        return sum(self.ranks)

    def write(
        self, downs: Sequence[Tensor | None], ups: Sequence[Tensor | None], scales: Sequence[float]
    ) -> tuple:
        """Write the adapters to the buffers; return a token by which ``holds`` knows them."""
        write_adapters(self.down, self.up, self.sizes, self.ranks, downs, ups, scales)

        matrices = [x for x in (*downs, *ups) if x is not None]
        versions = tuple((x.data_ptr(), x._version) for x in matrices)
        self.written[:] = [(versions, tuple(scales))]
        return self.written[0]

    def holds(self, written: tuple) -> bool:
        """Return whether the adapters of this ``write`` are still in the buffers."""
        return self.written == [written]
