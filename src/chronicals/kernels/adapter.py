"""Trained additions to a frozen weight: a low-rank product (LoRA, Hu et al., 2022), or some of its
rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Adapter(NamedTuple):
    """A low-rank addition to a linear layer: ``y += s · (dropout(x) Aᵀ) Bᵀ``.

    With a magnitude (DoRA): ``y = m / ‖W + s B A‖ ⊙ (x Wᵀ + s · (dropout(x) Aᵀ) Bᵀ)``.

    Attributes:
        a: A, ``[r, in]``.
        b: B, ``[out, r]``.
        scale: s.
        dropout: probability with which an element of x is dropped.
        magnitude: m, ``[out]``, or None.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    magnitude: Tensor | None = None


class Rows(NamedTuple):
    """Trained rows of an otherwise frozen weight W: ``W[ids] = values`` in a copy of W.

    Attributes:
        ids: int64 ``[n]``, the numbers of the rows; none occurs twice.
        values: ``[n, in]``.
    """

    ids: Tensor
    values: Tensor

    def within(self, weight: Tensor) -> Tensor:
        """Return a copy of ``weight`` ``[V, in]`` with the values put in, differentiable in them."""
        return weight.index_copy(0, self.ids, self.values.to(weight.dtype))
