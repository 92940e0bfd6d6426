"""DoRA: each row of an adapted weight has a trained length, its magnitude.

The method is that of Liu et al., 2024, arXiv 2402.09353.

    W' = diag(m / n) (W + s B A)        n = ‖W + s B A‖, a constant in the backward pass (section 4.3); at first m = ‖W‖
    n² = ‖W‖² + Σᵣ (2 W Aᵀ + s B A Aᵀ) ⊙ s B

Norms are those of rows, W ``[N, K]``, A ``[r, K]``, B ``[N, r]``, m and n ``[N]``. The second line
needs W in one product as wide as the rank, not W + s B A.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.products import product
from chronicals.quantization import AdapterPadding, Base, packed_weight

IDENTITY_ROWS = 1024
"""Number of rows of the identity that a quantised layer multiplies at a time."""

SHORTEST = 1e-18
"""Smallest norm of a row, so that no division by zero occurs for a row of zeros."""


class RowNorms:
    """Cache of n, the norms of the rows of a base with the adapters in its padding.

    They are computed anew if a weight or an adapter has changed, in the same memory, which CUDA
    graphs read. During the capture of a graph they are computed within the graph.
    """

    def __init__(self) -> None:
        self._norms: tuple[tuple, Tensor] | None = None
        self._squares: tuple[tuple, Tensor] | None = None

    def of(self, base: Base, padding: AdapterPadding) -> Tensor:
        """Return the norms, ``[N]``, in at least fp32."""
        parts = tuple((part.data_ptr(), part._version) for part in base.parts)
        key = parts, tuple(padding.written), _is_captured(padding.down)
        if self._norms is not None and self._norms[0] == key:
            return self._norms[1]
        if self._squares is None or self._squares[0] != parts:
            self._squares = parts, squared_norms(base.dense())
        across = base.forward(base.operand(padding.down, True, False)).t()
        norms = adapted_norms(self._squares[1], across, padding.down, padding.up)
        self._norms = key, norms if self._norms is None else self._norms[1].copy_(norms)
        return self._norms[1]

    def forget(self) -> None:
        """Compute the norms anew when they are needed next.

        The replay of a graph changes adapters without raising their versions.
        """
        if self._norms is not None:
            self._norms = (), self._norms[1]

    def discard(self) -> None:
        """Discard the cache and its memory, for norms that were computed of meaningless values."""
        self._norms = self._squares = None


def _is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured on the device of x, which has norms of its own."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def adapted_norms(squares: Tensor, crossed: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return n, in the dtype of ``squares``.

    Args:
        squares: ‖W‖², ``[N]``.
        crossed: W Aᵀ, ``[N, r]``.
        down: A, ``[r, K]``.
        up: s·B, ``[N, r]``.
    """
    kind = squares.dtype
    down = down.to(kind)
    up = up.to(kind)
    more = ((2 * crossed.to(kind) + up @ (down @ down.t())) * up).sum(1)
    return (squares + more).clamp_(min=SHORTEST**2).sqrt_()


def squared_norms(weight: Tensor) -> Tensor:
    """Return ‖W‖² of the rows, in at least fp32."""
    return torch.linalg.vector_norm(
        weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32)
    ).square_()


def has_plain_values(weight: Any) -> bool:
    """Return whether the weight has floating-point values of at least 16 bits, not codes."""
    return bool(weight.is_floating_point() and weight.element_size() > 1)


def squared_norms_of(layer: Any, width: int) -> Tensor:
    """Return ‖W‖² of the rows of a linear layer, quantised or not.

    An unknown format is read from the layer's outputs for the identity.
    """
    if has_plain_values(layer.weight):
        return squared_norms(upright(layer))
    if packed_weight(layer) is not None:
        norms: Tensor = layer.squared_norms()
        return norms
    device = layer.weight.device
    kind = getattr(layer, "compute_dtype", None) or torch.float32
    parts = torch.eye(width, device=device, dtype=kind).split(IDENTITY_ROWS)
    return torch.stack([unbiased(layer, rows).float().square().sum(0) for rows in parts]).sum(0)


def crossed(layer: Any, down: Tensor) -> Tensor:
    """Return W Aᵀ of a linear layer, quantised or not."""
    if has_plain_values(layer.weight):
        weight = upright(layer)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return product(weight, down.to(weight.dtype).t(), dtype)
    return unbiased(layer, down.to(getattr(layer, "compute_dtype", None) or down.dtype)).t()


def upright(layer: Any) -> Tensor:
    """Return W as ``[N, K]``; a Conv1D stores it as ``[K, N]``."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.t()


def unbiased(layer: Any, x: Tensor) -> Tensor:
    """Return the output of the layer for x, without its bias."""
    y: Tensor = layer(x)
    return y if layer.bias is None else y - layer.bias
