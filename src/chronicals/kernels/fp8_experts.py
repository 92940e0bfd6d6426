"""Quantisation of the stacked weights of experts to FP8, with one scale for each expert.

``W[e] ≈ scale_e · values``, in the formats of ``fp8.py``:

    scale_e = max |W[e]| · (1 / 448),   values = fp8(W · (1 / scale_e))

FP8 products sum along the last dimension of both operands, so one pass needs W as it is stored and
the other its transpose. With one scale an expert, both have the same scale and values, and the
scale can be taken out of the sum.

W is ``[E, A, B]`` in fp32, bf16 or fp16. Bytes an element in 16 bit: 2 read for the maximum, unless
the scale is known; 2 read and 1 written for each layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.fp8 import (
    FP8_BLOCK,
    FP8_MAX,
    Scaled,
    _four,
    _in_fours,
    _inverse,
    _put_columns,
    _scale_of,
    _values,
    lacks_fp8,
    magnitude,
    raise_amax,
    scale_of_amax,
)
from chronicals.kernels.launch import absent, operator, runs_triton, tl, triton

EXPERT_DTYPE = torch.float8_e4m3fn
"""The FP8 dtype of experts' weights."""

EXPERT_AMAX_STRIP = (16, 4096)
"""Steps of a program of the maximum kernel, and elements of a step."""


@triton.jit
def _amax_kernel(w_ptr, most_ptr, size, programs, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    expert = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * (STEPS * BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        most = tl.maximum(
            most,
            magnitude(
                tl.load(w_ptr + expert * size + at, mask=at < size, other=0.0).to(tl.float32)
            ),
        )
    raise_amax(most_ptr + expert, most)


@triton.jit
def _expert_tiles_kernel(
    # read: weights, maxima (or known scales)
    w_ptr,
    most_ptr,
    # written
    rows_ptr,
    columns_ptr,
    scale_ptr,
    # sizes of one expert
    height,
    width,
    # options
    KNOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    # largest value of the dtype
    LIMIT: tl.constexpr,
    # tile; WHOLE: no tile crosses an edge
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise one tile of one expert, read once as four tensors of every fourth row (``fp8.py``)."""
    # The last tile goes first, since what the maximum kernel read last is still in the cache.
    across = tl.cdiv(width, BLOCK)
    down = tl.cdiv(height, BLOCK)
    last = tl.num_programs(0) - 1 - tl.program_id(0)
    expert = (last // (across * down)).to(tl.int64)
    tile = last % (across * down)
    four = tile // across * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = tile % across * BLOCK + tl.arange(0, BLOCK)
    row = 4 * four
    place = expert * height * width
    a, of_a = _values(w_ptr + place, row, column, height, width, width, WHOLE)
    b, of_b = _values(w_ptr + place, row + 1, column, height, width, width, WHOLE)
    c, of_c = _values(w_ptr + place, row + 2, column, height, width, width, WHOLE)
    d, of_d = _values(w_ptr + place, row + 3, column, height, width, width, WHOLE)
    known = tl.load(most_ptr + expert)
    scale = tl.zeros((BLOCK,), tl.float32) + (known if KNOWN else _scale_of(known, LIMIT))
    tl.store(scale_ptr + expert + tl.arange(0, BLOCK), scale, mask=tile + tl.arange(0, BLOCK) == 0)
    if COLUMNS:
        fours = _four(a, b, c, d, _inverse(scale)[None, :], rows_ptr.dtype.element_ty)
        into = columns_ptr + (place // 4 if columns_ptr.dtype.element_ty == tl.uint32 else place)
        _put_columns(into, fours, four, column, height, width, WHOLE)
    if ROWS:
        parts = (a, b, c, d)
        inside = (of_a, of_b, of_c, of_d)
        for n in tl.static_range(4):
            values = (parts[n].to(tl.float32) * _inverse(scale)[None, :]).to(
                rows_ptr.dtype.element_ty
            )
            at = rows_ptr + place + (row + n).to(tl.int64)[:, None] * width + column[None, :]
            tl.store(at, values, mask=inside[n])


@triton.jit
def _expert_transpose_kernel(
    values_ptr, out_ptr, height, width, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Transpose the bytes of one tile of one expert."""
    across = tl.cdiv(width, BLOCK)
    down = tl.cdiv(height, BLOCK)
    expert = (tl.program_id(0) // (across * down)).to(tl.int64)
    tile = tl.program_id(0) % (across * down)
    four = tile // across * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = tile % across * BLOCK + tl.arange(0, BLOCK)
    place = expert * height * width
    fours = tl.zeros((BLOCK // 4, BLOCK), tl.uint32)
    for n in tl.static_range(4):
        values, _ = _values(values_ptr + place, 4 * four + n, column, height, width, width, WHOLE)
        fours |= values.to(tl.uint32) << 8 * n
    into = out_ptr + (place // 4 if out_ptr.dtype.element_ty == tl.uint32 else place)
    _put_columns(into, fours, four, column, height, width, WHOLE)


@operator("chronicals::fp8_quantize_experts")
def _quantize(w: Tensor, layout: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns, scales = _empty(w, layout, scale)
    count, height, width = w.shape
    known = scale
    if known is None:
        (steps, block) = EXPERT_AMAX_STRIP
        size = height * width
        cells = w.new_zeros(count, dtype=torch.int32)
        programs = triton.cdiv(size, steps * block)
        _amax_kernel[(count * programs,)](w, cells, size, programs, steps, block, num_warps=8)
        known = cells.view(torch.float32)
    # If the kernel writes no rows, it still takes its dtype from this pointer.
    of_rows = rows if layout != "columns" else columns
    fours = _in_fours(columns if layout != "rows" else rows)
    tiles = count * triton.cdiv(height, FP8_BLOCK) * triton.cdiv(width, FP8_BLOCK)
    _expert_tiles_kernel[(tiles,)](
        w,
        known,
        of_rows,
        fours,
        scales,
        height,
        width,
        scale is not None,
        layout != "columns",
        layout != "rows",
        FP8_MAX[EXPERT_DTYPE],
        height % FP8_BLOCK == width % FP8_BLOCK == 0,
        FP8_BLOCK,
        num_warps=4 if w.dtype == torch.bfloat16 else 8,
    )
    return rows, columns, scales


@torch.library.register_fake(_quantize)
def _empty(w: Tensor, layout: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate values of both layouts (``absent`` for one not asked for) and the scales."""
    count, height, width = w.shape
    rows = w.new_empty(w.shape, dtype=EXPERT_DTYPE) if layout != "columns" else absent(w)
    columns = (
        w.new_empty((count, width, height), dtype=EXPERT_DTYPE) if layout != "rows" else absent(w)
    )
    return rows, columns, w.new_empty(count, dtype=torch.float32)


def fp8_quantize_experts(
    w: Tensor, layout: str = "rows", scale: Tensor | None = None
) -> tuple[Scaled | None, Scaled | None]:
    """Quantise ``w`` to e4m3, as it is stored and transposed for each expert.

    Args:
        w: ``[E, A, B]`` in fp32, bf16 or fp16. NaN stays NaN and does not affect scales.
        layout: ``rows``, ``columns`` or ``both``.
        scale: the experts' scales if they are known, fp32 ``[E]``.

    Returns:
        ``Scaled`` with values ``[E, A, B]`` and with values ``[E, B, A]``, scales ``[E]``; None for
        the one not asked for.

    Raises:
        ValueError: the layout is unknown, or w has other dimensions.
    """
    if layout not in ("rows", "columns", "both"):
        raise ValueError(f"layout={layout!r}: expected one of rows, columns, both")
    if w.ndim != 3:
        raise ValueError(f"w has shape {tuple(w.shape)}: expected [E, A, B]")
    if not runs_triton(w) or lacks_fp8(w.device) or not w.numel():
        return fp8_quantize_experts_reference(w, layout, scale)
    rows, columns, scales = _quantize(w.contiguous(), layout, scale)
    by_rows = Scaled(rows, scales) if layout != "columns" else None
    return by_rows, Scaled(columns, scales) if layout != "rows" else None


def fp8_experts_transposed(scaled: Scaled) -> Scaled:
    """Return each expert's transpose ``[E, B, A]`` with the same scales; 2 bytes an element move."""
    values, scale = scaled
    if not runs_triton(scale) or not values.numel():
        return Scaled(values.mT.contiguous(), scale)
    count, height, width = values.shape
    out = values.new_empty(count, width, height)
    tiles = count * triton.cdiv(height, FP8_BLOCK) * triton.cdiv(width, FP8_BLOCK)
    _expert_transpose_kernel[(tiles,)](
        values.view(torch.uint8),
        _in_fours(out),
        height,
        width,
        height % FP8_BLOCK == width % FP8_BLOCK == 0,
        FP8_BLOCK,
        num_warps=4,
    )
    return Scaled(out, scale)


def fp8_quantize_experts_reference(
    w: Tensor, layout: str = "rows", scale: Tensor | None = None
) -> tuple[Scaled | None, Scaled | None]:
    """Compute ``fp8_quantize_experts`` in plain torch."""
    wide = w.float()
    limit = FP8_MAX[EXPERT_DTYPE]
    if scale is None:
        sizes = wide.abs().nan_to_num(0.0, posinf=float("inf")).flatten(1)
        most = sizes.amax(1) if sizes.shape[1] else sizes.new_zeros(len(w))
        scale = scale_of_amax(most, limit)
    values = (wide * (1.0 / scale)[:, None, None]).clamp(-limit, limit).to(EXPERT_DTYPE)
    rows = Scaled(values.contiguous(), scale) if layout != "columns" else None
    return rows, Scaled(values.mT.contiguous(), scale) if layout != "rows" else None
