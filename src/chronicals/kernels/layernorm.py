"""LayerNorm (Ba et al., 2016, equations 3 and 4) over the last dimension.

    x̂ = (x − μ) · rstd,   μ = mean(x),   rstd = 1 / sqrt(mean((x − μ)²) + eps)
    y = x̂ · w + b
    dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)),   g = dy · w
    dw = Σ_rows dy · x̂,   db = Σ_rows dy

``x`` is ``[..., D]`` in fp32, bf16 or fp16, ``w`` and ``b`` are ``[D]`` or None. Everything is
computed in fp32 and rounded once. Saved for backward: x, w and two fp32 a row, μ and rstd. Bytes a
row in 16 bit: 4·D forward, 6·D backward.
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
    multiprocessors,
    next_power_of_2,
    operator,
    own_tensor,
    runs_triton,
    tl,
    triton,
)

LAYERNORM_BACKWARD_WARPS = 16
"""Warps on a multiprocessor in the backward pass; they set the number of programs.

Few programs suffice, since each loads its next rows while it reduces the present ones.
"""


def _tile(width: int, backward: bool) -> Tile:
    """Return the tile for rows of ``width`` elements."""
    # 32 elements a thread forward. 16 backward, which holds five values of each element in
    # registers besides the next one.
    block = next_power_of_2(width)
    rows = max(1, (1024 if backward else 4096) // block)
    return Tile(
        rows,
        block,
        warps=min(16, max(2 if backward else 4, rows * block // (512 if backward else 1024))),
    )


@triton.jit
def _layernorm_forward_kernel(
    # read
    x_ptr,
    w_ptr,
    b_ptr,
    # written
    y_ptr,
    mean_ptr,
    rstd_ptr,
    # sizes and the stride of rows
    rows,
    width,
    x_stride,
    eps,
    # options
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=1) / width + eps)
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(w_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + row[:, None] * width + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside
    )
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _layernorm_backward_kernel(
    # read
    dy_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    # written
    dx_ptr,
    shares_ptr,
    # sizes and strides of rows
    rows,
    width,
    dy_stride,
    x_stride,
    # options
    HAS_WEIGHT: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dx, and one share of dw and db for each program.

    A program takes every n-th block of rows, n being the number of programs, and sums its shares
    in registers. They are added afterwards in one order, so results are reproducible.
    """
    column = tl.arange(0, BLOCK)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    step = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    next_x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    next_g = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0)
    for _ in range(tl.program_id(0) * ROWS, rows, step):
        here = inside
        at = row
        x = next_x.to(tl.float32)
        g = next_g.to(tl.float32)
        row += step  # the next rows are loaded while these are reduced
        inside = (row < rows)[:, None] & (column < width)[None, :]
        next_x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        next_g = tl.load(
            dy_ptr + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0
        )
        mean = tl.load(mean_ptr + at, mask=at < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + at, mask=at < rows, other=0.0)[:, None]
        x = (x - mean) * rstd  # nonzero beyond the row, but there g is zero
        if WANTS_WEIGHT:
            dw += g * x
        if WANTS_BIAS:
            db += g
        if HAS_WEIGHT:
            g *= w[None, :]
        # Both sums in one reduction, so that threads wait for each other once.
        mean_g, mean_gx = tl.split(tl.sum(tl.join(g, g * x), axis=1) / width)
        dx = rstd * (g - mean_g[:, None] - x * mean_gx[:, None])
        tl.store(
            dx_ptr + at[:, None] * width + column[None, :],
            dx.to(dx_ptr.dtype.element_ty),
            mask=here,
        )
    share = tl.program_id(0).to(tl.int64) * (WANTS_WEIGHT + WANTS_BIAS) * width + column
    if WANTS_WEIGHT:
        tl.store(shares_ptr + share, tl.sum(dw, axis=0), mask=column < width)
    if WANTS_BIAS:
        tl.store(shares_ptr + share + WANTS_WEIGHT * width, tl.sum(db, axis=0), mask=column < width)


@operator("chronicals::layernorm_forward")
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel on ``x`` ``[rows, D]``; return y, mean and rstd."""
    y, mean, rstd = _outputs(x, weight, bias, eps)
    rows, width = x.shape
    if rows:
        tile = _tile(width, backward=False)
        _layernorm_forward_kernel[(triton.cdiv(rows, tile.rows),)](
            x,
            weight,
            bias,
            y,
            mean,
            rstd,
            rows,
            width,
            x.stride(0),
            eps,
            weight is not None,
            bias is not None,
            tile.rows,
            tile.block,
            num_warps=tile.warps,
        )
    return y, mean, rstd


@torch.library.register_fake(_forward)
def _outputs(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate y, mean and rstd."""
    mean, rstd = (x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape, dtype=_widest(x, weight, bias)), mean, rstd


@operator("chronicals::layernorm_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel.

    Returns:
        dx, and fp32 ``[n, D]`` with the wanted ones of dw and db in this order; n is 0 to 2.
    """
    rows, width = x.shape
    tile = _tile(width, backward=True)
    programs = min(
        triton.cdiv(rows, tile.rows),
        multiprocessors(x.device) * max(1, LAYERNORM_BACKWARD_WARPS // tile.warps),
    )
    dx = x.new_empty(x.shape)
    shares = x.new_empty((programs, wants_weight + wants_bias, width), dtype=torch.float32)
    if rows:
        _layernorm_backward_kernel[(programs,)](
            dy,
            x,
            weight,
            mean,
            rstd,
            dx,
            shares,
            rows,
            width,
            dy.stride(0),
            x.stride(0),
            weight is not None,
            wants_weight,
            wants_bias,
            tile.rows,
            tile.block,
            num_warps=tile.warps,
        )
    return dx, shares.sum(0)


@torch.library.register_fake(_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(
        (wants_weight + wants_bias, x.shape[1]), dtype=torch.float32
    )


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        rows = in_rows(x)
        (w, b) = (None if t is None else t.contiguous() for t in (weight, bias))
        y, mean, rstd = _forward(rows, w, b, eps)
        ctx.save_for_backward(own_tensor(rows), w, mean, rstd)
        ctx.types = [None if t is None else t.dtype for t in (weight, bias)]
        return own_tensor(y, x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = ctx.needs_input_grad[1:3]
        dx, sums = _backward(in_rows(dy), *ctx.saved_tensors, *wanted)
        left = iter(sums.unbind(0))
        return dx.view(dy.shape), *(
            next(left).to(kind) if want else None for want, kind in zip(wanted, ctx.types)
        )


def fused_layernorm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """Normalise ``x`` ``[..., D]``, multiply by ``weight`` and add ``bias``, both ``[D]`` or None.

    Differentiable in all three.

    Returns:
        ``[..., D]`` in the promoted dtype of all.

    Raises:
        ValueError: ``weight`` or ``bias`` is not ``[D]``.
    """
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, x {tuple(x.shape)}: {name} must be "
                f"[{x.shape[-1]}]"
            )
    if runs_triton(x, weight, bias) and x.shape[-1] <= MAX_ROW_WIDTH:
        return _LayerNorm.apply(x, weight, bias, eps)
    return layernorm_reference(x, weight, bias, eps)


def layernorm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """Compute ``fused_layernorm`` in plain torch, differentiable by autograd."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(y.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(_widest(x, weight, bias))


def _widest(*tensors: Tensor | None) -> torch.dtype:
    """Return the promoted dtype of all tensors that are given."""
    kinds = [x.dtype for x in tensors if x is not None]
    result = kinds[0]
    for kind in kinds[1:]:
        result = torch.promote_types(result, kind)
    return result
