"""The gated unit of experts and its backward pass with results in e4m3 and a scale for each row, as
FP8 products take them.

    u ≈ scale · values,   scale_s = max_f |u_sf| · (1 / 448)            likewise dh, over gate and up together

The kernels are those of ``expert_glu.py``. They go through a row twice: for its maximum, and to
write. Values are rounded once, from fp32. u and dh are also written in 16 bit if something reads
them: an adapter, or the gradient of a weight or a bias. Bytes a row: 4 · F read and 1 · F written
forward, 6 · F read and 2 · F written backward; the second reading finds the row in the cache.

Shapes: S pairs sorted by expert, F inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.amax import absent
from chronicals.kernels.expert_glu import (
    GLU_PROGRAM_ELEMENTS,
    Gate,
    _block,
    _expert_glu_backward_kernel,
    _expert_glu_forward_kernel,
    expert_glu_gradient_reference,
    expert_glu_reference,
)
from chronicals.kernels.fp8 import FP8_MAX, Scaled, fp8_quantize_reference, lacks_fp8
from chronicals.kernels.launch import runs_triton, triton
from chronicals.kernels.operators import operator

UNIT_DTYPE = torch.float8_e4m3fn
"""The FP8 dtype of the unit and of its gradient."""


def _empty(h: Tensor, width: int, dense: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate 16-bit results ``[S, width]`` (``absent`` if not ``dense``), FP8 values and scales."""
    rows = len(h)
    return (
        h.new_empty(rows, width) if dense else absent(h),
        h.new_empty(rows, width, dtype=UNIT_DTYPE),
        h.new_empty(rows, 1, dtype=torch.float32),
    )


@operator("chronicals::expert_glu_fp8_forward")
def _forward(
    h: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    interleaved: bool,
    dense: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(h)
    width = h.shape[1] // 2
    u, values, scale = _empty(h, width, dense)
    block = _block(width)
    held = GLU_PROGRAM_ELEMENTS // block
    _expert_glu_forward_kernel[(triton.cdiv(rows, held),)](
        h,
        u if dense else None,
        values,
        scale,
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
        True,
        FP8_MAX[UNIT_DTYPE],
        held,
        block,
        num_warps=4,
    )
    return u, values, scale


@torch.library.register_fake(_forward)
def _(
    h: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    interleaved: bool,
    dense: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(h, h.shape[1] // 2, dense)


@operator("chronicals::expert_glu_fp8_backward")
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
    has_unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, width = g.shape
    d_h, values, scale, unit, d_shares = _empty_gradients(h, shares, dense, has_unit)
    block = _block(width)
    held = GLU_PROGRAM_ELEMENTS // block
    _expert_glu_backward_kernel[(triton.cdiv(rows, held),)](
        g,
        h,
        shares,
        order,
        d_h if dense else None,
        values,
        scale,
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
        True,
        FP8_MAX[UNIT_DTYPE],
        held,
        block,
        num_warps=4,
    )
    return d_h, values, scale, unit, d_shares


@torch.library.register_fake(_backward)
def _(
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
    has_unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(h, shares, dense, has_unit)


def _empty_gradients(
    h: Tensor, shares: Tensor, dense: bool, has_unit: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    unit = h.new_empty((len(h), h.shape[1] // 2) if has_unit else 0)
    return *_empty(h, h.shape[1], dense), unit, shares.new_empty(shares.shape, dtype=torch.float32)


def expert_glu_fp8(h: Tensor, gate: Gate, dense: bool = True) -> tuple[Tensor | None, Scaled]:
    """Return the gated unit of ``h`` ``[S, 2F]``: ``[S, F]`` in the dtype of h (None if not
    ``dense``), and in e4m3 with scales ``[S, 1]``.
    """
    if not (len(h) and h.stride(1) == 1 and runs_triton(h)) or lacks_fp8(h.device):
        return expert_glu_fp8_reference(h, gate, dense)
    u, values, scale = _forward(
        h, gate.activation, gate.alpha, gate.limit, gate.offset, gate.interleaved, dense
    )
    return u if dense else None, Scaled(values, scale)


def expert_glu_fp8_gradient(
    g: Tensor,
    h: Tensor,
    shares: Tensor,
    order: Tensor,
    gate: Gate,
    dense: bool = True,
    has_unit: bool = True,
) -> tuple[Tensor | None, Scaled, Tensor | None, Tensor]:
    """Return what ``expert_glu_gradient`` does, with dh twice: in the dtype of h (None if not
    ``dense``), and in e4m3 with scales ``[S, 1]``.
    """
    there = len(h) and h.stride(1) == 1 and g.stride(1) == 1
    if not (there and runs_triton(g, h, shares)) or lacks_fp8(h.device):
        return expert_glu_fp8_gradient_reference(g, h, shares, order, gate, dense, has_unit)
    options = gate.activation, gate.alpha, gate.limit, gate.offset, gate.interleaved
    d_h, values, scale, unit, d_shares = _backward(g, h, shares, order, *options, dense, has_unit)
    return d_h if dense else None, Scaled(values, scale), unit if has_unit else None, d_shares


def expert_glu_fp8_reference(
    h: Tensor, gate: Gate, dense: bool = True
) -> tuple[Tensor | None, Scaled]:
    """Compute ``expert_glu_fp8`` in plain torch."""
    scaled, _ = fp8_quantize_reference(expert_glu_reference(h.float(), gate), "row")
    assert scaled is not None
    return expert_glu_reference(h, gate) if dense else None, scaled


def expert_glu_fp8_gradient_reference(
    g: Tensor,
    h: Tensor,
    shares: Tensor,
    order: Tensor,
    gate: Gate,
    dense: bool = True,
    has_unit: bool = True,
) -> tuple[Tensor | None, Scaled, Tensor | None, Tensor]:
    """Compute ``expert_glu_fp8_gradient`` in plain torch."""
    d_h, unit, d_shares = expert_glu_gradient_reference(g, h.float(), shares, order, gate)
    scaled, _ = fp8_quantize_reference(d_h, "row")
    assert scaled is not None
    return (
        d_h.to(h.dtype) if dense else None,
        scaled,
        unit.to(h.dtype) if has_unit else None,
        d_shares,
    )
