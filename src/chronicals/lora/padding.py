"""Padding: where the adapters of some linear layers are, so that the products of their weight
compute them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chronicals.kernels.adapter_padding import write_adapters
from chronicals.quantization import Dense

MULTIPLE = 64
"""Of the padding's columns: behind rows of whole multiples, rows then begin at multiples of 128
bytes and products take whole steps, which is up to 3 % faster than with 16."""


def columns_for(ranks: Sequence[int]) -> int:
    """R: padding columns for adapters of these ranks."""
    return -(-sum(ranks) // MULTIPLE) * MULTIPLE


@dataclass(frozen=True)
class Padding:
    """Attributes:
    down: for all A, ``[R, K]``.
    up: for all s·B, ``[N, R]``.
    sizes: outputs of each layer, together N.
    ranks: of each layer's adapter, 0 where there is none.
    written: which adapters are there now, in which version.
    """

    down: Tensor
    up: Tensor
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    written: list[tuple] = field(default_factory=list, compare=False)

    @classmethod
    def beside(cls, weight: Dense, sizes: Sequence[int], ranks: Sequence[int]) -> Padding:
        """In the buffer of a weight that has ``columns_for(ranks)``; others of the same sizes
        and ranks may be there too.
        """
        return cls(weight.down, weight.up, tuple(sizes), tuple(ranks), weight.written)

    @classmethod
    def apart(
        cls, weight: Tensor, sizes: Sequence[int], ranks: Sequence[int], device: torch.device
    ) -> Padding:
        """In buffers of its own, for a weight ``[N, K]`` whose products do not run over it."""
        columns = columns_for(ranks)
        down, up = (
            weight.new_zeros(shape, device=device)
            for shape in ((columns, weight.shape[1]), (len(weight), columns))
        )
        return cls(down, up, tuple(sizes), tuple(ranks))

    @property
    def columns(self) -> int:
        """R."""
        return len(self.down)

    @property
    def used(self) -> int:
        """How many of the R hold an adapter."""
        return sum(self.ranks)

    def write(
        self, downs: Sequence[Tensor | None], ups: Sequence[Tensor | None], scales: Sequence[float]
    ) -> tuple:
        """Put these adapters there, and say which they are, for ``holds``."""
        write_adapters(self.down, self.up, self.sizes, self.ranks, downs, ups, scales)
        there = [x for x in (*downs, *ups) if x is not None]
        self.written[:] = [(tuple((x.data_ptr(), x._version) for x in there), tuple(scales))]
        return self.written[0]

    def holds(self, written: tuple) -> bool:
        """Whether what ``write`` said is still there."""
        return self.written == [written]
