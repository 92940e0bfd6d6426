"""Adapter: the tensors and numbers of a low-rank addition to a linear layer (Hu et al., 2022)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Adapter(NamedTuple):
    """``y += s · (dropout(x) Aᵀ) Bᵀ``; with a magnitude (DoRA), ``y = m / ‖W + s B A‖ ⊙ (x Wᵀ + s · (dropout(x) Aᵀ) Bᵀ)``.

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
