"""A fused decoder layer over the few rows of a decode step, whose kernels do what stands beside a product.

    q, k, v = norm(x) W_qkv                 one kernel, then rotation, pages and attention as usual
    t = x + attended W_o                    one kernel, which also sums the squares of t
    u = a(norm(t) W_gate) · norm(t) W_up    one kernel
    y = t + u W_down                        one kernel, which also sums the squares of y

So five of a layer's twelve kernels are none of their own, and the weights of the others are read early
(``kernels.few_rows_product``). The next layer's norm needs the sums of squares of y: they are handed
on beside it (``RowSquares``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.few_rows_product import (
    RowNorm,
    few_rows_product,
    few_rows_sum,
    takes_few_rows,
)
from chronicals.patching.fused_weights import Group
from chronicals.patching.halves import (
    AttentionHalf,
    FusedHalf,
    MLPHalf,
    PackedTokens,
)

MOST_WEIGHT_BYTES = 128 << 20
"""Bytes of a layer's weights up to which launches and the kernels beside products are much of its time.

Those of a 0.5B have 30 MB, of a 1.5B 94 MB. Products of larger ones are cuBLAS's.
"""


@dataclass
class RowSquares:
    """The sums of squares of the rows that a layer returned, for the norm of the next layer.

    Attributes:
        rows: the tensor that the layer returned.
        version: of that tensor, which writing to it raises.
        squares: fp32 ``[P, R]``, see ``RowNorm``.
    """

    rows: Tensor | None = None
    version: int = 0
    squares: Tensor | None = None

    def keep(self, rows: Tensor, squares: Tensor) -> None:
        """Keep the sums of squares of a tensor's rows."""
        self.rows = rows
        self.version = rows._version
        self.squares = squares

    def of(self, rows: Tensor) -> Tensor | None:
        """Return those of this tensor's rows; None if it is another one, or was written to."""
        if rows is not self.rows or rows._version != self.version:
            return None
        return self.squares


def runs_few_rows(x: Tensor, attention: FusedHalf, mlp: FusedHalf) -> bool:
    """Return whether a layer takes these rows by the kernels of few rows.

    Its halves begin with norms and have none behind, its products are dense and without adapters.

    Args:
        x: ``[T, D]``, rows of the residual.
        attention: the attention half.
        mlp: the MLP half.
    """
    if type(attention) is not AttentionHalf or type(mlp) is not MLPHalf or mlp.tiles:
        return False
    size = 0
    for half in (attention, mlp):
        if half.norms.before is None or half.norms.after is not None or half.multiplier != 1.0:
            return False
        for group in (half.first, half.last):
            weight = group.merged.base.matrix
            if any(group.adapters) or weight is None or not takes_few_rows(x, weight):
                return False
            size += weight.nbytes
    return size <= MOST_WEIGHT_BYTES


def run_few_rows(
    hidden_states: Tensor,
    attention: AttentionHalf,
    mlp: MLPHalf,
    tokens: PackedTokens,
    squares: RowSquares,
    residual: torch.dtype,
) -> Tensor:
    """Run a layer over few rows; without a gradient.

    Args:
        hidden_states: ``[1, T, D]``.
        attention: the attention half.
        mlp: the MLP half; ``runs_few_rows`` is true of both.
        tokens: positions of the rows, and how they attend.
        squares: sums of squares from the layer before; replaced by those of this one.
        residual: dtype of the result.

    Returns:
        ``[1, T, D]``.
    """
    x = hidden_states.squeeze(0)
    of_x = squares.of(hidden_states)
    if of_x is None:  # the first layer's
        of_x = x.float().square().sum(1)[None]
    norm = _norm_of(attention, x, of_x)
    qkv = few_rows_product(x, *_weight(attention.first), norm=norm)
    attended = attention.attend_to_product(qkv, tokens).flatten(1)
    weight, bias = _weight(attention.last)
    x, of_x = few_rows_sum(attended, weight, x, bias)
    norm = _norm_of(mlp, x, of_x)
    unit = few_rows_product(x, *_weight(mlp.first), norm=norm, activation=mlp.reads.activation)
    weight, bias = _weight(mlp.last)
    x, of_x = few_rows_sum(unit, weight, x, bias, dtype=residual)
    out = x.unsqueeze(0)
    squares.keep(out, of_x)
    return out


def _weight(group: Group) -> tuple[Tensor, Tensor | None]:
    """Return weight ``[N, K]`` and bias of a dense product."""
    weight = group.merged.base.matrix
    assert weight is not None
    return weight, group.merged.bias


def _norm_of(half: FusedHalf, x: Tensor, squares: Tensor) -> RowNorm:
    """Return the norm before a half's first product."""
    assert half.norms.before is not None
    name, reads = half.norms.before
    weight, epsilon, offset = reads.arguments(getattr(half.layer, name), x)
    return RowNorm(squares, weight, epsilon, offset)
