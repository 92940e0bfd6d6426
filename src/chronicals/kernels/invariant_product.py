"""Product whose rows get the same bits, whatever rows are computed beside them.

    y_mn = Σ_k x_mk · w_kn

A library chooses tiles by the number of rows, and for few rows splits the sum over k among programs;
both change the order of the sum, and so its rounding (He and Thinking Machines Lab, 2025, "Defeating
Nondeterminism in LLM Inference"). Here tiles are the same for any number of rows, rows that are
missing are zeros, and each program goes over all k in order.

Shapes: M rows, K inner size, N columns; x and w of one dtype, w with any strides. The sum is fp32, of
16 bits by tensor cores, of fp32 without TF32. Bytes that must move: (M · K + K · N + M · N) values, so
a step of few rows is bound by the weight at the copy rate. What it costs beside a library: with few
rows, K is not split, so that N / 64 programs read the weight; with many, tiles of 64 x 64 reuse less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.launch import multiplied_in, operator, runs_triton, tl, triton


@dataclass(frozen=True)
class ProductTile:
    """The tile of one program, the same for every product of a dtype.

    Attributes:
        rows, columns: of the output.
        inner: values of k that are multiplied at once.
        warps: warps of a program.
        stages: tiles that are read ahead.
    """

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 2


TILES = {2: ProductTile(64, 64, 64), 4: ProductTile(64, 64, 32)}
"""Tiles by the bytes of a value; two stages of both operands take 32 KiB, and Turing has 64."""


@triton.jit
def _invariant_product_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    columns,
    inner,
    x_row,
    x_inner,
    w_inner,
    w_column,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row = row < rows
    is_column = column < columns
    x_at = x_ptr + row[:, None] * x_row
    w_at = w_ptr + column[None, :] * w_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        k = (start + tl.arange(0, INNER)).to(tl.int64)
        x = tl.load(
            x_at + k[None, :] * x_inner, mask=is_row[:, None] & (k < inner)[None, :], other=0.0
        )
        w = tl.load(
            w_at + k[:, None] * w_inner, mask=(k < inner)[:, None] & is_column[None, :], other=0.0
        )
        total = tl.dot(x.to(KIND), w.to(KIND), total, input_precision="ieee")
    tl.store(
        y_ptr + row[:, None] * columns + column[None, :],
        total.to(y_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@operator("chronicals::invariant_product")
def _invariant_product(x: Tensor, w: Tensor) -> Tensor:
    """Launch the kernel."""
    y = _output(x, w)
    if not y.numel():
        return y
    tile = TILES[x.element_size()]
    grid = triton.cdiv(y.shape[0], tile.rows), triton.cdiv(y.shape[1], tile.columns)
    _invariant_product_kernel[grid](
        x,
        w,
        y,
        *y.shape,
        x.shape[1],
        *x.stride(),
        *w.stride(),
        multiplied_in(x.dtype),
        tile.rows,
        tile.columns,
        tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@torch.library.register_fake(_invariant_product)
def _output(x: Tensor, w: Tensor) -> Tensor:
    """Allocate the output."""
    return x.new_empty(x.shape[0], w.shape[1])


def invariant_product(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """Compute ``x @ w``, ``[M, N]``; without a gradient. A row's bits depend on that row only.

    The kernel takes 16 bit and fp32 on a card; other dtypes and devices take the reference, of which
    that is not known.

    Args:
        x_MK: rows, of any strides.
        w_KN: the weight, of any strides.
    """
    trains = torch.is_grad_enabled() and (x_MK.requires_grad or w_KN.requires_grad)
    if not trains and x_MK.dtype == w_KN.dtype and runs_triton(x_MK, w_KN):
        return _invariant_product(x_MK, w_KN)  # type: ignore[no-any-return]
    return invariant_product_reference(x_MK, w_KN)


def invariant_product_reference(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """Compute ``invariant_product`` in plain torch."""
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    return torch.mm(x_MK.to(wide), w_KN.to(wide)).to(x_MK.dtype)
