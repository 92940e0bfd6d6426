"""The gated unit between an expert's two products, and its gradient.

The backward pass includes the gradient of the router's shares:

    u = a(γ) · (υ + o),   γ = min(gate, l),   υ = min(max(up, −l), l),   a(γ) = γ · σ(α γ), or GELU (``glu.py``)
    du = p · g,           dgate = du · (υ + o) · a′(γ) where gate ≤ l,   dup = du · a(γ) where |up| ≤ l,   dp = Σ_f g · u

p is the share that the router gives to the row's pair. For ``y = p · W u``, g is dy W; then dp needs
neither the saved ``W u`` nor another product of its size. The backward pass also returns ``p · u``,
for the gradient of W. α, l and o are those of gpt-oss (its reference implementation); 1, none and 0
give SwiGLU. Gate and up are halves of ``[S, 2F]``, or alternate along its columns.

Everything is computed in fp32 and rounded once; u is computed again in the backward pass. Bytes a
row in 16 bit: 6 · F forward, 12 · F backward. In FP8: 1 byte an element of the unit or
of dh more, and a scale a row.

Shapes: S pairs sorted by expert, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.fp8 import (
    FP8_MAX,
    Scaled,
    _inverse,
    _scale_of,
    fp8_quantize_reference,
    lacks_fp8,
    magnitude,
)
from chronicals.kernels.glu import activate, sigmoid
from chronicals.kernels.launch import absent, compiled_once, operator, runs_triton, tl, triton

GATE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

GLU_PROGRAM_ELEMENTS = 1024
"""Elements that a program holds at once: a block of a wide row, or several narrow rows."""

UNIT_DTYPE = torch.float8_e4m3fn
"""The FP8 dtype of the unit and of its gradient."""


@dataclass(frozen=True)
class Gate:
    """Options of the gated unit.

    Attributes:
        activation: one of ``GATE_ACTIVATIONS``.
        alpha: α.
        limit: l, or None for no limit.
        offset: o.
        interleaved: gate and up alternate along the columns.
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False


@triton.jit
def _halves(h_ptr, row, h_stride, column, width, inside, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        at = h_ptr + row * h_stride + 2 * column
        return tl.load(at, mask=inside, other=0.0).to(tl.float32), tl.load(
            at + 1, mask=inside, other=0.0
        ).to(tl.float32)
    at = h_ptr + row * h_stride + column
    return tl.load(at, mask=inside, other=0.0).to(tl.float32), tl.load(
        at + width, mask=inside, other=0.0
    ).to(tl.float32)


@triton.jit
def _activated(g, alpha, ACTIVATION: tl.constexpr):
    """Return a(g) and its derivative a′(g)."""
    if ACTIVATION == "silu":
        s = sigmoid(alpha * g)
        return g * s, s * (1.0 + alpha * g * (1.0 - s))
    return activate(g, ACTIVATION)


@triton.jit
def _unit(
    # where to read
    h_ptr,
    row,
    h_stride,
    column,
    width,
    inside,
    # numbers of the formula
    alpha,
    limit,
    offset,
    # options
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    gate, up = _halves(h_ptr, row, h_stride, column, width, inside, INTERLEAVED)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    activated, _ = _activated(gate, alpha, ACTIVATION)
    return activated * (up + offset)


@compiled_once(sizes=("rows",))
def _expert_glu_forward_kernel(
    # read
    h_ptr,
    # written: the unit, and in FP8 its values and scales
    u_ptr,
    values_ptr,
    scale_ptr,
    # sizes and strides of rows
    rows,
    width,
    h_stride,
    u_stride,
    # numbers of the formula
    alpha,
    limit,
    offset,
    # options
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    IN_FP8: tl.constexpr,
    MOST: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the unit.

    ``IN_FP8``: also write values with scales of rows, which takes a second pass over each row.
    ``MOST``: the largest value of the FP8 dtype.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    if IN_FP8:
        most = tl.zeros((ROWS,), tl.float32)
        for first in range(0, width, BLOCK):
            column = (first + tl.arange(0, BLOCK))[None, :]
            inside = (row < rows) & (column < width)
            u = _unit(
                h_ptr,
                row,
                h_stride,
                column,
                width,
                inside,
                alpha,
                limit,
                offset,
                ACTIVATION,
                LIMITED,
                INTERLEAVED,
            )
            most = tl.maximum(most, tl.max(tl.where(inside, magnitude(u), 0.0), 1))
        scale = _scale_of(most, MOST)[:, None]
        tl.store(scale_ptr + row, scale, mask=row < rows)
        inverse = _inverse(scale)
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        inside = (row < rows) & (column < width)
        u = _unit(
            h_ptr,
            row,
            h_stride,
            column,
            width,
            inside,
            alpha,
            limit,
            offset,
            ACTIVATION,
            LIMITED,
            INTERLEAVED,
        )
        if HAS_UNIT:
            tl.store(u_ptr + row * u_stride + column, u.to(u_ptr.dtype.element_ty), mask=inside)
        if IN_FP8:
            tl.store(
                values_ptr + row * width + column,
                (u * inverse).to(values_ptr.dtype.element_ty),
                mask=inside,
            )


@triton.jit
def _gradients(
    # where to read
    g_ptr,
    h_ptr,
    share,
    row,
    g_stride,
    h_stride,
    column,
    width,
    inside,
    # numbers of the formula
    alpha,
    limit,
    offset,
    # options
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return dgate, dup, the unit and g · unit."""
    raw_gate, raw_up = _halves(h_ptr, row, h_stride, column, width, inside, INTERLEAVED)
    gate = raw_gate
    up = raw_up
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    activated, slope = _activated(gate, alpha, ACTIVATION)
    g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = activated * (up + offset)
    d_u = share * g
    d_gate = d_u * (up + offset) * slope
    d_up = d_u * activated
    if LIMITED:
        d_gate = tl.where(raw_gate <= limit, d_gate, 0.0)
        d_up = tl.where((raw_up <= limit) & (raw_up >= -limit), d_up, 0.0)
    return d_gate, d_up, u, g * u


@triton.jit
def _put_halves(
    out_ptr, row, stride, column, width, inside, of_gate, of_up, INTERLEAVED: tl.constexpr
):
    kind = out_ptr.dtype.element_ty
    if INTERLEAVED:
        at = out_ptr + row * stride + 2 * column
        tl.store(at, of_gate.to(kind), mask=inside)
        tl.store(at + 1, of_up.to(kind), mask=inside)
    else:
        at = out_ptr + row * stride + column
        tl.store(at, of_gate.to(kind), mask=inside)
        tl.store(at + width, of_up.to(kind), mask=inside)


@compiled_once(sizes=("rows",), places=("order_ptr",))
def _expert_glu_backward_kernel(
    # read
    g_ptr,
    h_ptr,
    shares_ptr,
    order_ptr,
    # written: dh, in FP8 its values and scales, p · u, dp
    d_h_ptr,
    values_ptr,
    scale_ptr,
    unit_ptr,
    d_shares_ptr,
    # sizes and strides of rows
    rows,
    width,
    g_stride,
    h_stride,
    d_h_stride,
    unit_stride,
    # numbers of the formula
    alpha,
    limit,
    offset,
    # options
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    IN_FP8: tl.constexpr,
    MOST: tl.constexpr,
    # tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dh, p · u and dp; ``IN_FP8`` and ``MOST`` are as in the forward kernel, for dh."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(order_ptr + number, mask=number < rows, other=0)
    share = tl.load(shares_ptr + pair, mask=number < rows, other=0.0).to(tl.float32)[:, None]
    row = number.to(tl.int64)[:, None]
    if IN_FP8:
        most = tl.zeros((ROWS,), tl.float32)
        for first in range(0, width, BLOCK):
            column = (first + tl.arange(0, BLOCK))[None, :]
            inside = (row < rows) & (column < width)
            d_gate, d_up, _, _ = _gradients(
                g_ptr,
                h_ptr,
                share,
                row,
                g_stride,
                h_stride,
                column,
                width,
                inside,
                alpha,
                limit,
                offset,
                ACTIVATION,
                LIMITED,
                INTERLEAVED,
            )
            most = tl.maximum(
                most,
                tl.max(tl.where(inside, tl.maximum(magnitude(d_gate), magnitude(d_up)), 0.0), 1),
            )
        scale = _scale_of(most, MOST)[:, None]
        tl.store(scale_ptr + row, scale, mask=row < rows)
        inverse = _inverse(scale)
    d_share = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        inside = (row < rows) & (column < width)
        d_gate, d_up, u, product = _gradients(
            g_ptr,
            h_ptr,
            share,
            row,
            g_stride,
            h_stride,
            column,
            width,
            inside,
            alpha,
            limit,
            offset,
            ACTIVATION,
            LIMITED,
            INTERLEAVED,
        )
        d_share += product
        if HAS_GRADIENT:
            _put_halves(d_h_ptr, row, d_h_stride, column, width, inside, d_gate, d_up, INTERLEAVED)
        if IN_FP8:
            _put_halves(
                values_ptr,
                row,
                2 * width,
                column,
                width,
                inside,
                d_gate * inverse,
                d_up * inverse,
                INTERLEAVED,
            )
        if HAS_UNIT:
            tl.store(
                unit_ptr + row * unit_stride + column,
                (share * u).to(unit_ptr.dtype.element_ty),
                mask=inside,
            )
    tl.store(d_shares_ptr + pair, tl.sum(d_share, 1), mask=number < rows)


def _block(width: int) -> int:
    """Return the widest block that divides the row, since idle lanes cost as much as busy ones."""
    return next((block for block in (1024, 512, 256) if width % block == 0), 256)


@operator("chronicals::expert_glu_forward")
def _forward(
    h: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    interleaved: bool,
    dense: bool,
    in_fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(h)
    width = h.shape[1] // 2
    u, values, scale = _outputs(h, activation, alpha, limit, offset, interleaved, dense, in_fp8)
    block = _block(width)
    program_rows = GLU_PROGRAM_ELEMENTS // block
    _expert_glu_forward_kernel[(triton.cdiv(rows, program_rows),)](
        h,
        u if dense else None,
        values if in_fp8 else None,
        scale if in_fp8 else None,
        rows,
        width,
        h.stride(0),
        width,
        alpha,
        limit or 0.0,
        offset,
        activation,
        limit is not None,
        interleaved,
        dense,
        in_fp8,
        FP8_MAX[UNIT_DTYPE] if in_fp8 else 0.0,
        program_rows,
        block,
        num_warps=4,
    )
    return u, values, scale


@torch.library.register_fake(_forward)
def _outputs(
    h: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    interleaved: bool,
    dense: bool,
    in_fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the unit, and its values and scales in FP8; ``absent`` for what is not wanted."""
    rows = len(h)
    width = h.shape[1] // 2
    return (
        h.new_empty(rows, width) if dense else absent(h),
        h.new_empty(rows, width, dtype=UNIT_DTYPE) if in_fp8 else absent(h),
        h.new_empty(rows, 1, dtype=torch.float32) if in_fp8 else absent(h),
    )


@operator("chronicals::expert_glu_backward")
def _backward(
    g: Tensor,
    h: Tensor,
    shares: Tensor,
    order: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    interleaved: bool,
    dense: bool,
    in_fp8: bool,
    has_unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, width = g.shape
    d_h, values, scale, unit, d_shares = _empty_gradients(
        g, h, shares, order, activation, alpha, limit, offset, interleaved, dense, in_fp8, has_unit
    )
    block = _block(width)
    program_rows = GLU_PROGRAM_ELEMENTS // block
    _expert_glu_backward_kernel[(triton.cdiv(rows, program_rows),)](
        g,
        h,
        shares,
        order,
        d_h if dense else None,
        values if in_fp8 else None,
        scale if in_fp8 else None,
        unit if has_unit else None,
        d_shares,
        rows,
        width,
        g.stride(0),
        h.stride(0),
        2 * width,
        width,
        alpha,
        limit or 0.0,
        offset,
        activation,
        limit is not None,
        interleaved,
        dense,
        has_unit,
        in_fp8,
        FP8_MAX[UNIT_DTYPE] if in_fp8 else 0.0,
        program_rows,
        block,
        num_warps=4,
    )
    return d_h, values, scale, unit, d_shares


@torch.library.register_fake(_backward)
def _empty_gradients(
    g: Tensor,
    h: Tensor,
    shares: Tensor,
    order: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    interleaved: bool,
    dense: bool,
    in_fp8: bool,
    has_unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate dh, its values and scales in FP8, p · u and dp; ``absent`` for what is not wanted."""
    rows = len(h)
    return (
        h.new_empty(h.shape) if dense else absent(h),
        h.new_empty(h.shape, dtype=UNIT_DTYPE) if in_fp8 else absent(h),
        h.new_empty(rows, 1, dtype=torch.float32) if in_fp8 else absent(h),
        h.new_empty(rows, h.shape[1] // 2) if has_unit else absent(h),
        shares.new_empty(shares.shape, dtype=torch.float32),
    )


def expert_glu(
    h: Tensor, gate: Gate, dense: bool = True, in_fp8: bool = False
) -> tuple[Tensor | None, Scaled | None]:
    """Return the gated unit ``[S, F]`` of ``h`` ``[S, 2F]``.

    It is returned in the dtype of h (None if not ``dense``), and in e4m3 with scales ``[S, 1]``
    (None if not ``in_fp8``).
    """
    launchable = len(h) and h.stride(1) == 1 and runs_triton(h)
    if launchable and not (in_fp8 and lacks_fp8(h.device)):
        options = gate.activation, gate.alpha, gate.limit, gate.offset, gate.interleaved
        u, values, scale = _forward(h, *options, dense, in_fp8)
        return u if dense else None, Scaled(values, scale) if in_fp8 else None
    scaled = None
    if in_fp8:
        scaled, _ = fp8_quantize_reference(expert_glu_reference(h.float(), gate), "row")
    return expert_glu_reference(h, gate) if dense else None, scaled


def expert_glu_gradient(
    g: Tensor,
    h: Tensor,
    shares: Tensor,
    order: Tensor,
    gate: Gate,
    has_unit: bool = True,
    dense: bool = True,
    in_fp8: bool = False,
) -> tuple[Tensor | None, Scaled | None, Tensor | None, Tensor]:
    """Return the gradients of ``h`` and of the shares, and the unit times the shares.

    Args:
        g: ``[S, F]``, dy W of the second product, without the shares.
        h: ``[S, 2F]``.
        shares: p, ``[S]`` in the order of pairs.
        order: the pair of each row, int32.
        gate: options of the unit.
        has_unit: whether ``p · u`` is wanted.
        dense: whether dh in the dtype of h is wanted.
        in_fp8: whether dh in e4m3 is wanted.

    Returns:
        dh ``[S, 2F]`` or None, dh in e4m3 with scales ``[S, 1]`` or None, p · u ``[S, F]`` or None,
        dp ``[S]`` in the order of pairs, fp32 (fp64 for fp64 inputs).
    """
    launchable = len(h) and h.stride(1) == 1 and g.stride(1) == 1 and runs_triton(g, h, shares)
    if launchable and not (in_fp8 and lacks_fp8(h.device)):
        options = gate.activation, gate.alpha, gate.limit, gate.offset, gate.interleaved
        d_h, values, scale, unit, d_shares = _backward(
            g, h, shares, order, *options, dense, in_fp8, has_unit
        )
        scaled = Scaled(values, scale) if in_fp8 else None
        return d_h if dense else None, scaled, unit if has_unit else None, d_shares
    scaled = None
    exact = h.float() if in_fp8 else h
    d_h, unit, d_shares = expert_glu_gradient_reference(g, exact, shares, order, gate)
    if in_fp8:
        scaled, _ = fp8_quantize_reference(d_h, "row")
    return (
        d_h.to(h.dtype) if dense else None,
        scaled,
        unit.to(h.dtype) if has_unit else None,
        d_shares,
    )


def expert_glu_reference(h: Tensor, gate: Gate) -> Tensor:
    """Compute ``expert_glu`` in plain torch."""
    activated, up = _parts(h.to(_wide(h)), gate)
    return (activated * up).to(h.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of the plain computation.

    It is fp64 on a CPU. There the last values of a tensor are computed by other instructions than
    those before them, whose fp32 exponential differs in the last bit, so that the bits of a row
    would depend on how many rows a call has.
    """
    return torch.float64 if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)


def _parts(h: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Return a(γ) and υ + o."""
    of_gate, up = (h[:, ::2], h[:, 1::2]) if gate.interleaved else h.chunk(2, 1)
    if gate.limit is not None:
        of_gate = of_gate.clamp(max=gate.limit)
        up = up.clamp(-gate.limit, gate.limit)
    if gate.activation == "silu":
        return of_gate * torch.sigmoid(gate.alpha * of_gate), up + gate.offset
    return F.gelu(
        of_gate, approximate="tanh" if gate.activation == "gelu_tanh" else "none"
    ), up + gate.offset


def expert_glu_gradient_reference(
    g: Tensor, h: Tensor, shares: Tensor, order: Tensor, gate: Gate
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``expert_glu_gradient`` in plain torch, by autograd."""
    wide = _wide(h)
    result = torch.promote_types(h.dtype, torch.float32)
    g = g.to(wide)
    pairs = order.long()
    share = shares.to(wide)[pairs, None]
    with torch.enable_grad():
        leaf = h.detach().to(wide).requires_grad_()
        activated, up = _parts(leaf, gate)
        unit = activated * up
    (d_h,) = torch.autograd.grad(unit, leaf, share * g)
    d_shares = torch.empty_like(shares, dtype=result)
    d_shares[pairs] = (g * unit.detach()).sum(1).to(result)
    return d_h.to(h.dtype), (share * unit.detach()).to(h.dtype), d_shares
