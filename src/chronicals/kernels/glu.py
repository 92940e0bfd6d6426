"""Gated linear units after their two products, elementwise on ``[..., F]``.

``y = a(gate) · up`` (Shazeer, 2020, equation 6):

    SwiGLU:  a(g) = g · σ(g)                     a′ = σ · (1 + g · (1 − σ))
    GEGLU:   a(g) = g · Φ(g)                     a′ = Φ + g · φ
    tanh:    a(g) = g · σ(2u),  u = √(2/π) · (g + 0.044715 · g³)   (Hendrycks and Gimpel, 2016)
                                                 a′ = s + g · s · (1 − s) · 2u′,  s = σ(2u)
    dgate = dy · up · a′(gate),   dup = dy · a(gate)

Everything is computed in fp32 and rounded once. Saved for backward: the inputs; a(gate) is computed
again. Bytes an element in 16 bit: 6 forward, 10 backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.fp8 import Amax, magnitude, new_amax, raise_amax, with_amax
from chronicals.kernels.launch import (
    INTERPRETED,
    Tile,
    differentiable_once,
    in_rows,
    next_power_of_2,
    operator,
    own_tensor,
    runs_triton,
    tl,
    triton,
    with_padding,
)

APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh"}
"""The activation for each ``approximate`` of ``torch.nn.functional.gelu``."""


def _launch(tensors: list[Tensor]) -> tuple[tuple[int], int, list[int], Tile]:
    """Return grid, width, row strides and tile for ``[rows, F]`` tensors.

    If all are dense they are taken as one long row.
    """
    rows, width = tensors[0].shape
    strides = [x.stride(0) for x in tensors]
    if all(x.is_contiguous() for x in tensors):
        rows, width = 1, rows * width
    # 16 elements a thread: two 16-byte loads of each 16-bit operand.
    tile = Tile(1, min(2048, next_power_of_2(width)), warps=4)
    return (rows * triton.cdiv(width, tile.block),), width, strides, tile


@triton.jit
def sigmoid(x):
    """Return σ(x), fp32."""
    # Four instructions, where a division takes eight: t = 2^(−x · log₂ e), then 1 / (1 + t).
    if INTERPRETED:
        return tl.sigmoid(x)
    code: tl.constexpr = """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
    }"""
    return tl.inline_asm_elementwise(code, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """Return a(g) and its derivative a′(g)."""
    if ACTIVATION == "silu":
        s = sigmoid(g)
        slope = s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        u = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        s = sigmoid(u)
        # σ(−u) in place of 1 − s, which would cancel.
        slope = s + g * s * sigmoid(-u) * (1.5957691216057308 * (1.0 + 0.134145 * g * g))
    return g * s, slope


@triton.jit
def _glu_forward_kernel(
    # read
    gate_ptr,
    up_ptr,
    # written
    y_ptr,
    amax_ptr,
    # size and strides of rows
    width,
    gate_stride,
    up_stride,
    y_stride,
    # options and columns of a program
    ACTIVATION: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = activate(gate, ACTIVATION)
    y = (activated * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_stride + column, y, mask=inside)
    if HAS_AMAX:
        raise_amax(amax_ptr, magnitude(y.to(tl.float32)))


@triton.jit
def _glu_backward_kernel(
    # read
    dy_ptr,
    gate_ptr,
    up_ptr,
    # written
    d_gate_ptr,
    d_up_ptr,
    amax_ptr,
    # size and strides of rows
    width,
    dy_stride,
    gate_stride,
    up_stride,
    d_gate_stride,
    d_up_stride,
    # options and columns of a program
    ACTIVATION: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    activated, slope = activate(gate, ACTIVATION)
    kind = d_gate_ptr.dtype.element_ty
    d_gate = (dy * up * slope).to(kind)
    d_up = (dy * activated).to(kind)
    tl.store(d_gate_ptr + row * d_gate_stride + column, d_gate, mask=inside)
    tl.store(d_up_ptr + row * d_up_stride + column, d_up, mask=inside)
    if HAS_AMAX:
        raise_amax(
            amax_ptr, tl.maximum(magnitude(d_gate.to(tl.float32)), magnitude(d_up.to(tl.float32)))
        )


@operator("chronicals::glu_forward")
def _forward(
    gate: Tensor, up: Tensor, activation: str, padding: int, finds_amax: bool
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel; return y and its amax cell, ``absent`` if not wanted."""
    y = with_padding(gate, gate.shape, padding)
    amax = new_amax(gate, finds_amax)
    if gate.numel():
        grid, width, strides, tile = _launch([gate, up, y])
        _glu_forward_kernel[grid](
            gate,
            up,
            y,
            amax if finds_amax else None,
            width,
            *strides,
            activation,
            finds_amax,
            tile.block,
            num_warps=tile.warps,
            # Which products become multiply-adds depends on the surrounding code. Without fusion
            # a unit that is computed twice has the same bits.
            enable_fp_fusion=False,
        )
    return y, amax


@torch.library.register_fake(_forward)
def _(
    gate: Tensor, up: Tensor, activation: str, padding: int, finds_amax: bool
) -> tuple[Tensor, Tensor]:
    return with_padding(gate, gate.shape, padding), new_amax(gate, finds_amax)


@operator("chronicals::glu_backward")
def _backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    merged: bool,
    padding: int,
    finds_amax: bool,
) -> list[Tensor]:
    """Launch the backward kernel.

    Returns:
        The gradients of gate and up, or if ``merged`` one tensor ``[T, 2F]`` of both with
        ``padding`` free columns behind each row; then its amax cell, ``absent`` if not wanted.
    """
    *gradients, amax = _gradients(dy, gate, up, activation, merged, padding, finds_amax)
    d_gate, d_up = gradients[0].chunk(2, -1) if merged else gradients
    if dy.numel():
        grid, width, strides, tile = _launch([dy, gate, up, d_gate, d_up])
        _glu_backward_kernel[grid](
            dy,
            gate,
            up,
            d_gate,
            d_up,
            amax if finds_amax else None,
            width,
            *strides,
            activation,
            finds_amax,
            tile.block,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
    return [*gradients, amax]


@torch.library.register_fake(_backward)
def _gradients(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    merged: bool,
    padding: int,
    finds_amax: bool,
) -> list[Tensor]:
    """Allocate what ``_backward`` returns."""
    amax = new_amax(gate, finds_amax)
    if not merged:
        return [gate.new_empty(gate.shape), gate.new_empty(gate.shape), amax]
    rows, width = gate.shape
    return [with_padding(gate, (rows, 2 * width), padding), amax]


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        rows = in_rows(gate), in_rows(up)
        ctx.save_for_backward(*map(own_tensor, rows))
        ctx.activation = activation
        y, _ = _forward(*rows, activation, 0, False)
        return own_tensor(y, gate.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d_gate, d_up, _ = _backward(
            in_rows(dy), *ctx.saved_tensors, ctx.activation, False, 0, False
        )
        return d_gate.view(dy.shape), d_up.view(dy.shape)


class _GLUOfBoth(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        both: Tensor,
        activation: str,
        padding: int,
        gradient_padding: int,
        amax: Amax | None,
        gradient_amax: Amax | None,
    ) -> Tensor:
        ctx.save_for_backward(both)
        ctx.options = (activation, True, gradient_padding, gradient_amax is not None)
        ctx.amax = gradient_amax
        y, cell = _forward(*both.chunk(2, -1), activation, padding, amax is not None)
        return with_amax(amax, own_tensor(y), cell)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (both,) = ctx.saved_tensors
        d_both, cell = _backward(in_rows(dy), *both.chunk(2, -1), *ctx.options)
        return (with_amax(ctx.amax, d_both, cell),)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` for two tensors of one shape and dtype; differentiable in both.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    return _glu(gate, up, "silu")


def fused_geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(gate) · up`` for two tensors of one shape and dtype; differentiable in both.

    Args:
        gate: ``[..., F]``.
        up: ``[..., F]``.
        approximate: ``none`` for the exact Φ, ``tanh`` for its approximation, as in
            ``torch.nn.functional.gelu``.

    Raises:
        ValueError: shapes or dtypes differ, or the approximation is unknown.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate={approximate!r}: expected 'none' or 'tanh'")
    return _glu(gate, up, APPROXIMATIONS[approximate])


def glu_of_both(
    both: Tensor,
    activation: str,
    padding: int = 0,
    gradient_padding: int = 0,
    amax: Amax | None = None,
    gradient_amax: Amax | None = None,
) -> Tensor:
    """Return the gated unit of a merged product ``[T, 2F]``, gate columns before up columns.

    Differentiable; the gradient is one ``[T, 2F]`` tensor too.

    Args:
        both: gate and up, ``[T, 2F]``.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
        padding: columns left free behind each row of the result.
        gradient_padding: columns left free behind each row of the gradient.
        amax: slot that gets the largest absolute value of the result.
        gradient_amax: slot that gets the largest absolute value of the gradient.

    Returns:
        ``[T, F]``.
    """
    if runs_triton(both):
        return _GLUOfBoth.apply(both, activation, padding, gradient_padding, amax, gradient_amax)
    return REFERENCES[activation](*both.chunk(2, -1))


def _glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype}, up is {tuple(up.shape)} {up.dtype}: they "
            "must have one shape and dtype"
        )
    if runs_triton(gate, up):
        return _GLU.apply(gate, up, activation)
    return REFERENCES[activation](gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``fused_swiglu`` in plain torch, differentiable by autograd."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def geglu_reference(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``fused_geglu`` in plain torch, differentiable by autograd."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


REFERENCES = {
    "silu": swiglu_reference,
    "gelu": geglu_reference,
    "gelu_tanh": lambda gate, up: geglu_reference(gate, up, "tanh"),
}
