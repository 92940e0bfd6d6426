"""RMSNorm over the last dimension, alone or after the addition of a residual.

Zhang and Sennrich, 2019, equation 4:

    s = x + r                             in the promoted dtype; without a residual r, s = x
    y = s / sqrt(mean(s²) + eps) · (offset + w)
    ds = rstd · (g − ŝ · mean(g · ŝ)) (+ the gradient of s itself),   g = dy · (offset + w),   ŝ = s · rstd
    dw = Σ_rows dy · ŝ

``x`` is ``[..., D]`` in fp32, bf16 or fp16, ``w`` ``[D]`` or None. ``offset`` is 1 for models that
store w − 1 (Gemma), else 0. Everything is computed in fp32 and rounded once. Saved for backward: s,
w and one fp32 a row. Bytes a row in 16 bit: 4·D forward, 6·D backward; with a residual 8·D and 8·D,
forward 12·D if that is in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chronicals.kernels.fp8 import Amax, magnitude, new_amax, raise_amax, with_amax
from chronicals.kernels.launch import (
    MAX_ROW_WIDTH,
    Tile,
    absent,
    differentiable_once,
    in_rows,
    multiprocessors,
    next_power_of_2,
    operator,
    own_tensor,
    runs_triton,
    tl,
    triton,
    with_padding,
)

RMSNORM_BACKWARD_WARPS = 16
"""Warps on a multiprocessor in the backward pass; they set the number of programs."""


def _tile(width: int, backward: bool) -> Tile:
    """Return the tile for rows of ``width`` elements."""
    # Measured on an H200 at widths 896, 2048, 4096 and 8192, as a share of the copy rate:
    # forward 0.96, 0.97, 0.97, 0.95; backward 0.90, –, 0.92, 0.92.
    block = next_power_of_2(width)
    if backward:
        # 16 elements a thread, since the next rows are loaded while these are reduced.
        rows = max(1, 1024 // block)
        return Tile(rows, block, warps=min(16, max(2, rows * block // 512)))
    # 32 elements a thread; 64 if the row is wider than 2048.
    rows = {1024: 2, 2048: 1, 4096: 4}.get(block, max(1, 2048 // block))
    return Tile(
        rows, block, warps=min(16, max(2, rows * block // (1024 if block <= 2048 else 2048)))
    )


@triton.jit
def _rmsnorm_forward_kernel(
    # read
    x_ptr,
    r_ptr,
    w_ptr,
    # written
    y_ptr,
    s_ptr,
    rstd_ptr,
    amax_ptr,
    # sizes and strides of rows
    rows,
    width,
    x_stride,
    r_stride,
    y_stride,
    # numbers of the formula
    eps,
    offset,
    # options
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    s = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    if HAS_RESIDUAL:
        r = tl.load(r_ptr + row[:, None] * r_stride + column[None, :], mask=inside, other=0.0)
        s = (s.to(tl.float32) + r.to(tl.float32)).to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + row[:, None] * width + column[None, :], s, mask=inside)
    s = s.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(s * s, axis=1) / width + eps)
    y = s * rstd[:, None]
    if HAS_WEIGHT:
        y *= (
            tl.load(w_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :] + offset
        )
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * y_stride + column[None, :], y, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if HAS_AMAX:
        raise_amax(amax_ptr, tl.max(tl.where(inside, magnitude(y.to(tl.float32)), 0.0), 1))


@triton.jit
def _rmsnorm_backward_kernel(
    # read
    dy_ptr,
    s_ptr,
    w_ptr,
    rstd_ptr,
    extra_ptr,
    # written
    ds_ptr,
    dw_ptr,
    amax_ptr,
    # sizes and strides of rows
    rows,
    width,
    dy_stride,
    s_stride,
    extra_stride,
    ds_stride,
    # of the weight
    offset,
    # options
    HAS_WEIGHT: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ds, and one share of dw for each program.

    A program takes every n-th block of rows, n being the number of programs, and sums its share of
    dw in registers. The shares are added afterwards in one order, so results are reproducible.
    """
    column = tl.arange(0, BLOCK)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    most = tl.zeros((ROWS, BLOCK), tl.float32)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + column, mask=column < width, other=0.0).to(tl.float32) + offset
    step = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    next_s = tl.load(s_ptr + row[:, None] * s_stride + column[None, :], mask=inside, other=0.0)
    next_g = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0)
    for _ in range(tl.program_id(0) * ROWS, rows, step):
        here = inside
        at = row
        s = next_s.to(tl.float32)
        g = next_g.to(tl.float32)
        row += step  # the next rows are loaded while these are reduced
        inside = (row < rows)[:, None] & (column < width)[None, :]
        next_s = tl.load(s_ptr + row[:, None] * s_stride + column[None, :], mask=inside, other=0.0)
        next_g = tl.load(
            dy_ptr + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0
        )
        rstd = tl.load(rstd_ptr + at, mask=at < rows, other=0.0)[:, None]
        s *= rstd
        if WANTS_WEIGHT:
            dw += g * s
        if HAS_WEIGHT:
            g *= w[None, :]
        ds = rstd * (g - s * (tl.sum(g * s, axis=1) / width)[:, None])
        if HAS_EXTRA:
            at_extra = extra_ptr + at[:, None] * extra_stride + column[None, :]
            ds += tl.load(at_extra, mask=here, other=0.0).to(tl.float32)
        ds = ds.to(ds_ptr.dtype.element_ty)
        tl.store(ds_ptr + at[:, None] * ds_stride + column[None, :], ds, mask=here)
        if HAS_AMAX:
            most = tl.maximum(most, tl.where(here, magnitude(ds.to(tl.float32)), 0.0))
    if WANTS_WEIGHT:
        share = tl.program_id(0).to(tl.int64) * width + column
        tl.store(dw_ptr + share, tl.sum(dw, axis=0), mask=column < width)
    if HAS_AMAX:
        raise_amax(amax_ptr, tl.max(most, 1))


@operator("chronicals::rmsnorm_forward")
def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    padding: int,
    finds_amax: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel on ``x`` ``[rows, D]``; y is of ``dtype``, or else the promoted one.

    Returns:
        y with ``padding`` free columns behind each row, rstd ``[rows]``, the sum (``absent``
        without a residual), and the amax cell of y (``absent`` if not wanted).
    """
    y, rstd, total, amax = _outputs(x, residual, weight, eps, offset, padding, finds_amax, dtype)
    rows, width = x.shape
    if rows:
        tile = _tile(width, backward=False)
        _rmsnorm_forward_kernel[(triton.cdiv(rows, tile.rows),)](
            x,
            residual,
            weight,
            y,
            None if residual is None else total,
            rstd,
            amax if finds_amax else None,
            rows,
            width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            y.stride(0),
            eps,
            offset,
            residual is not None,
            weight is not None,
            finds_amax,
            tile.rows,
            tile.block,
            num_warps=tile.warps,
            # Which products become multiply-adds depends on the surrounding code. Without fusion
            # a norm that recomputation makes from the sum alone has the same bits.
            enable_fp_fusion=False,
        )
    return y, rstd, total, amax


@torch.library.register_fake(_forward)
def _outputs(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    padding: int,
    finds_amax: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what ``_forward`` returns."""
    summed = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    result = summed if weight is None else torch.promote_types(summed, weight.dtype)
    return (
        with_padding(x, x.shape, padding, dtype or result),
        x.new_empty(x.shape[:1], dtype=torch.float32),
        absent(x) if residual is None else x.new_empty(x.shape, dtype=summed),
        new_amax(x, finds_amax),
    )


@operator("chronicals::rmsnorm_backward")
def _backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    extra: Tensor | None,
    offset: float,
    wants_weight: bool,
    padding: int,
    finds_amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernel.

    ``extra`` is a gradient that reaches the sum s itself and is added to ds, or None.

    Returns:
        ds, its amax cell and dw; the last two are ``absent`` if not wanted.
    """
    rows, width = s.shape
    tile = _tile(width, backward=True)
    programs = min(
        triton.cdiv(rows, tile.rows),
        multiprocessors(s.device) * max(1, RMSNORM_BACKWARD_WARPS // tile.warps),
    )
    ds = with_padding(s, s.shape, padding)
    amax = new_amax(s, finds_amax)
    shares = s.new_empty((programs, width), dtype=torch.float32) if wants_weight else None
    if rows:
        _rmsnorm_backward_kernel[(programs,)](
            dy,
            s,
            weight,
            rstd,
            extra,
            ds,
            shares,
            amax if finds_amax else None,
            rows,
            width,
            dy.stride(0),
            s.stride(0),
            0 if extra is None else extra.stride(0),
            ds.stride(0),
            offset,
            weight is not None,
            wants_weight,
            extra is not None,
            finds_amax,
            tile.rows,
            tile.block,
            num_warps=tile.warps,
        )
    return (
        ds,
        amax,
        absent(s) if shares is None or weight is None else shares.sum(0).to(weight.dtype),
    )


@torch.library.register_fake(_backward)
def _(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    extra: Tensor | None,
    offset: float,
    wants_weight: bool,
    padding: int,
    finds_amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dw = torch.empty_like(weight) if weight is not None and wants_weight else absent(s)
    return with_padding(s, s.shape, padding), new_amax(s, finds_amax), dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float,
        forks: bool,
        paddings: tuple[int, int] = (0, 0),
        amaxes: tuple[Amax | None, Amax | None] = (None, None),
        dtype: torch.dtype | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm; with ``forks`` also the sum, or x if there is no residual.

        The gradient of that second output is added to ds inside the backward kernel.

        ``paddings`` are the free columns behind each row of the norm and of its input's gradient,
        ``amaxes`` slots for the amax of both, ``dtype`` that of the norm.
        """
        rows = in_rows(x)
        weight = None if weight is None else weight.contiguous()
        amax = amaxes[0]
        of_residual = None if residual is None else in_rows(residual)
        y, rstd, total, cell = _forward(
            rows, of_residual, weight, eps, offset, paddings[0], amax is not None, dtype
        )
        total = rows if residual is None else total
        ctx.save_for_backward(own_tensor(total), weight, rstd)
        ctx.offset = offset
        ctx.types = (x.dtype, None if residual is None else residual.dtype)
        ctx.padding = paddings[1]
        ctx.amax = amaxes[1]
        ctx.set_materialize_grads(False)
        y = with_amax(amax, own_tensor(y, x.shape), cell)
        return (y, x if residual is None else own_tensor(total, x.shape)) if forks else y

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, dy: Tensor | None, extra: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        s, weight, rstd = ctx.saved_tensors
        if dy is None and extra is None:
            return None, None, None
        shape = (dy if dy is not None else extra).shape  # type: ignore[union-attr]
        if dy is None:
            ds = extra
            dw = None
        else:
            wants_weight = weight is not None and ctx.needs_input_grad[2]
            rows = None if extra is None else in_rows(extra)
            amax = ctx.amax
            options = ctx.offset, wants_weight, ctx.padding, amax is not None
            ds, cell, dw = _backward(in_rows(dy), s, weight, rstd, rows, *options)
            ds = with_amax(amax, ds.view(shape) if len(shape) != 2 else ds, cell)
            dw = dw if wants_weight else None
        of_x, of_residual = (None if kind is None else ds.to(kind) for kind in ctx.types)  # type: ignore[union-attr]
        return of_x, of_residual, dw


def fused_rmsnorm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """Normalise ``x`` ``[..., D]`` and multiply by ``offset + weight`` ``[D]``.

    Differentiable in ``x`` and ``weight``.

    Returns:
        ``[..., D]`` in the promoted dtype of ``x`` and ``weight``.

    Raises:
        ValueError: ``weight`` is not ``[D]``.
    """
    _check(x, weight)
    if runs_triton(x, weight) and x.shape[-1] <= MAX_ROW_WIDTH:
        return _RMSNorm.apply(x, None, weight, eps, offset, False)
    return rmsnorm_reference(x, weight, eps, offset)


def fused_add_rmsnorm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    padding: int = 0,
    gradient_padding: int = 0,
    amax: Amax | None = None,
    gradient_amax: Amax | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``residual`` to ``x`` and normalise the sum; all are ``[..., D]``.

    Differentiable in ``x``, ``residual`` and ``weight``.

    Args:
        x: ``[..., D]``.
        residual: None if ``x`` is the sum already.
        weight: ``[D]``, or None.
        eps: added to the mean square.
        offset: added to the weight.
        padding: columns left free behind each row of the norm; only for ``[T, D]``.
        gradient_padding: columns left free behind each row of the gradient; only for ``[T, D]``.
        amax: slot that gets the largest absolute value of the norm.
        gradient_amax: slot that gets the largest absolute value of the gradient.
        dtype: dtype of the norm; by default the promoted one of the sum and ``weight``.

    Returns:
        The norm, and the sum, which is the next residual.

    Raises:
        ValueError: ``residual`` or ``weight`` does not fit ``x``.
    """
    _check(x, weight)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}: they must be equal"
        )
    if runs_triton(x, residual, weight) and x.shape[-1] <= MAX_ROW_WIDTH:
        return _RMSNorm.apply(
            x,
            residual,
            weight,
            eps,
            offset,
            True,
            (padding, gradient_padding),
            (amax, gradient_amax),
            dtype,
        )
    return add_rmsnorm_reference(x, residual, weight, eps, offset, dtype)


def _check(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}: weight must be "
            f"[{x.shape[-1]}]"
        )


def rmsnorm_reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``fused_rmsnorm`` in plain torch, in another ``dtype`` if asked; differentiable."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalised.to(dtype or x.dtype)
    return (normalised * (offset + weight.to(wide.dtype))).to(
        dtype or torch.promote_types(x.dtype, weight.dtype)
    )


def add_rmsnorm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``fused_add_rmsnorm`` in plain torch, differentiable by autograd."""
    total = x if residual is None else x + residual
    return rmsnorm_reference(total, weight, eps, offset, dtype), total
