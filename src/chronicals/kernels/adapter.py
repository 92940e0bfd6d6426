"""What is trained beside a frozen weight: a low-rank addition (Hu et al., 2022), or some of its
rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Adapter(NamedTuple):
    """``y += s · (dropout(x) Aᵀ) Bᵀ``; with a magnitude (DoRA), ``y = m / ‖W + s B A‖ ⊙ (x Wᵀ + s ·
    (dropout(x) Aᵀ) Bᵀ)``.

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
    """``W[ids] = values`` in a copy of W, of which nothing but this is trained.

    Attributes:
        ids: int64 ``[n]``, each row once.
        values: ``[n, in]``.
    """

    ids: Tensor
    values: Tensor

    def within(self, weight: Tensor) -> Tensor:
        """A copy of ``weight`` ``[V, in]`` with the values in it, differentiable in them."""
        return weight.index_copy(0, self.ids, self.values.to(weight.dtype))
