"""Softmax over the last dimension, of any width.

    y = exp(x − max(x)) / Σ exp(x − max(x))
    dx = y · (dy − Σ dy · y)

``x`` is ``[..., D]`` in fp32, bf16 or fp16; everything is computed in fp32 and rounded once.
Entries of −inf give 0, and rows of −inf alone give NaN, as in torch. Saved for backward: y.

A program holds whole rows of up to ``MAX_ROW_WIDTH`` elements. Wider rows are read twice; maximum
and sum come from one online pass (Milakov and Gimelshein, 2018, algorithm 3). Bytes an element in
16 bit: 4 forward, 6 backward. Wide rows: 6 and 10, less what the second reading finds in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.launch import (
    MAX_ROW_WIDTH,
    Tile,
    differentiable_once,
    in_rows,
    next_power_of_2,
    operator,
    own_tensor,
    runs_triton,
    tl,
    triton,
)


def _tile(width: int, backward: bool) -> Tile:
    """Return the tile for rows of ``width`` elements."""
    if width > MAX_ROW_WIDTH:
        # 32 warps leave no room for a second program on a multiprocessor. So 132 rows are read at
        # a time; of 128 Ki bf16 elements they are 35 MB, which the H200's cache of 50 MB keeps for
        # the second reading.
        return Tile(1, 16384 if backward else 32768, warps=32)
    # 32 elements a thread forward, 16 backward, up to 32 warps.
    block = next_power_of_2(width)
    a_warp = 512 if backward else 1024
    rows = max(1, 4 * a_warp // block)
    return Tile(rows, block, warps=min(32, max(4, rows * block // a_warp)))


@triton.jit
def _softmax_forward_kernel(
    x_ptr, y_ptr, rows, width, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(
        x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=float("-inf")
    ).to(tl.float32)
    e = tl.exp(x - _finite(tl.max(x, axis=1))[:, None])
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    tl.store(
        y_ptr + row[:, None] * width + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _wide_softmax_forward_kernel(x_ptr, y_ptr, width, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        x = tl.load(
            x_ptr + row * x_stride + first + column,
            mask=first + column < width,
            other=float("-inf"),
        ).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - _finite(higher)) + tl.sum(
            tl.exp(x - _finite(higher)), axis=0
        )
        highest = higher
    for first in range(0, width, BLOCK):
        inside = first + column < width
        x = tl.load(x_ptr + row * x_stride + first + column, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        y = tl.exp(x - _finite(highest)) * (1.0 / total)
        tl.store(y_ptr + row * width + first + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finite(highest):
    """Return 0 for a maximum of −inf, so that exp(x − maximum) is 0 and not exp(−inf + inf) = NaN."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, width, dy_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wide_softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, width, dy_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + column < width
        dy = tl.load(dy_ptr + row * dy_stride + first + column, mask=inside, other=0.0).to(
            tl.float32
        )
        products += dy * tl.load(y_ptr + row * width + first + column, mask=inside, other=0.0).to(
            tl.float32
        )
    projection = tl.sum(products, axis=0)
    for first in range(0, width, BLOCK):
        inside = first + column < width
        dy = tl.load(dy_ptr + row * dy_stride + first + column, mask=inside, other=0.0).to(
            tl.float32
        )
        y = tl.load(y_ptr + row * width + first + column, mask=inside, other=0.0).to(tl.float32)
        dx = y * (dy - projection)
        tl.store(dx_ptr + row * width + first + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@operator("chronicals::softmax_forward")
def _forward(x: Tensor) -> Tensor:
    """Launch the forward kernel on ``x`` ``[rows, D]``."""
    y = x.new_empty(x.shape)
    rows, width = x.shape
    tile = _tile(width, backward=False)
    if rows and width > MAX_ROW_WIDTH:
        _wide_softmax_forward_kernel[(rows,)](
            x, y, width, x.stride(0), tile.block, num_warps=tile.warps
        )
    elif rows:
        _softmax_forward_kernel[(triton.cdiv(rows, tile.rows),)](
            x, y, rows, width, x.stride(0), tile.rows, tile.block, num_warps=tile.warps
        )
    return y


@torch.library.register_fake(_forward)
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@operator("chronicals::softmax_backward")
def _backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = y.new_empty(y.shape)
    rows, width = y.shape
    tile = _tile(width, backward=True)
    if rows and width > MAX_ROW_WIDTH:
        _wide_softmax_backward_kernel[(rows,)](
            dy, y, dx, width, dy.stride(0), tile.block, num_warps=tile.warps
        )
    elif rows:
        _softmax_backward_kernel[(triton.cdiv(rows, tile.rows),)](
            dy, y, dx, rows, width, dy.stride(0), tile.rows, tile.block, num_warps=tile.warps
        )
    return dx


@torch.library.register_fake(_backward)
def _(dy: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _forward(in_rows(x))
        ctx.save_for_backward(y)
        return own_tensor(y, x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return (_backward(in_rows(dy), y).view(dy.shape),)


def fused_softmax(x: Tensor) -> Tensor:
    """Return the softmax of ``x`` ``[..., D]`` over D, in the dtype of ``x``; differentiable.

    Raises:
        ValueError: ``x`` has no dimension, or no floating-point dtype.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and type {x.dtype}: expected [..., D] of a "
            "floating-point type"
        )
    if runs_triton(x) and x.shape[-1] > 0:
        return _Softmax.apply(x)
    return softmax_reference(x)


def softmax_reference(x: Tensor) -> Tensor:
    """Compute ``fused_softmax`` in plain torch, differentiable by autograd."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.softmax(wide, -1).to(x.dtype)
