"""Quantisation to 8-bit floating point with fp32 scales: ``x ≈ scale · values``.

Micikevicius et al., 2022, sections 3 and 4:

    scale = max |x| · (1 / L),   values = fp8(x · (1 / scale))     L = 448 (e4m3) or 57344 (e5m2)

The maximum is taken over the whole tensor (``tensor``), each row (``row``), 128 values of a row
(``block``) or 128 × 128 values (``square``). An FP8 product of tensor cores sums along the last
dimension of both operands, so the backward pass needs the transpose of the operands of the forward
pass. Hence two layouts: ``rows`` are ``[M, K]``, scaled along K, ``columns`` are ``[K, M]``, scaled
along M.

x is ``[M, K]`` in fp32, bf16 or fp16. Bytes an element in 16 bit: 2 read and 1 written for each
layout. The scale of a tensor, and those of whole columns, cost 2 more, since they are known only
after all has been read; not if the kernel that wrote the tensor found its maximum: an
``Amax`` passes it on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chronicals.kernels.launch import (
    INTERPRETED,
    MAX_ROW_WIDTH,
    absent,
    in_rows,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
)

FP8_BLOCK = 128
"""Elements that share a scale along one dimension, in ``block`` and ``square`` scaling."""

FP8_SCALINGS = ("tensor", "row", "block", "square")

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest value of each dtype."""

AMAX_STRIP = (512, 64)
"""Rows that a program of the maximum kernel goes down, and rows that it loads at a time."""

MIN_SCALE = 2.0**-126
"""The smallest normal fp32; the inverse of a smaller scale can be infinite."""

FIRST_FP8_CAPABILITY = (8, 9)
"""The first compute capability with FP8."""


@functools.cache
def lacks_fp8(device: torch.device) -> str:
    """Return why a device has no FP8, as a phrase for error messages; empty if it has.

    The CPU counts as having it, by emulation.
    """
    capability = (
        torch.cuda.get_device_capability(device) if device.type == "cuda" else FIRST_FP8_CAPABILITY
    )
    return (
        ""
        if capability >= FIRST_FP8_CAPABILITY
        else f"{torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]}) has no FP8"
    )


class Scaled(NamedTuple):
    """A matrix as ``scale · values``.

    Attributes:
        values: fp8, dense ``[M, K]``.
        scale: fp32: ``[]`` for a tensor, ``[M, 1]`` for rows, ``[M, ⌈K / 128⌉]`` for blocks, with
            the first dimension dense, ``[⌈M / 128⌉, ⌈K / 128⌉]`` for squares.
    """

    values: Tensor
    scale: Tensor


@triton.jit
def magnitude(x):
    """Return |x|, and 0 for NaN, so that a maximum ignores it."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def raise_amax(amax_ptr, most):
    """Raise the cell to the largest of ``most``, fp32 ``[n]``, at least 0.

    The cell is int32 and holds the bits of a non-negative fp32, whose order as integers is their
    order as numbers.
    """
    bits = tl.max(most, 0).to(tl.int32, bitcast=True)
    # Most programs find the cell already higher and skip the atomic, the costly part.
    tl.atomic_max(amax_ptr, bits, mask=bits > tl.load(amax_ptr), sem="relaxed")


def new_amax(like: Tensor, wanted: bool = True) -> Tensor:
    """Return a cell for ``raise_amax``, int32 ``[1]`` at 0; ``absent`` if not ``wanted``."""
    return like.new_zeros(1, dtype=torch.int32) if wanted else absent(like)


class _Measured(NamedTuple):
    """An amax with the tensor that it was measured on."""

    identity: tuple
    storage: StorageWeakRef
    amax: Tensor


class Amax:
    """A slot that carries a tensor's largest absolute value (amax) to the operation that quantises it.

    So the quantising kernel need not read the tensor twice.

    Both operations get the same ``Amax`` object. The first calls ``put`` with its output, the
    second ``take`` with its input. Between them autograd or a hook may have replaced or changed
    the tensor (it may have added another gradient), so the amax would be wrong. ``put`` therefore
    records which tensor was measured: address, shape, strides, dtype and version counter, and a
    weak reference to its storage, because a freed address can be given to another tensor.
    ``take`` returns the amax only if its tensor agrees in all of these and the storage still
    lives; otherwise it returns None, and the caller measures again. A slot is read once.
    """

    _measured: _Measured | None = None

    def put(self, x: Tensor, cell: Tensor) -> None:
        """Record ``cell``, int32 ``[1]`` from ``raise_amax``, as the amax of ``x``."""
        self._measured = _Measured(
            _identity(x), StorageWeakRef(x.untyped_storage()), cell.view(torch.float32)
        )

    def take(self, x: Tensor) -> Tensor | None:
        """Return the amax of ``x``, fp32 ``[1]``, and empty the slot.

        None if ``x`` is another tensor than was measured, or has changed since.
        """
        measured = self._measured
        self._measured = None
        if measured is None or measured.identity != _identity(x) or measured.storage.expired():
            return None
        return measured.amax


def with_amax(amax: Amax | None, x: Tensor, cell: Tensor) -> Tensor:
    """Return ``x``, after ``cell`` was recorded as its amax if the caller passed a slot."""
    if amax is not None:
        amax.put(x, cell)
    return x


def _identity(x: Tensor) -> tuple:
    """Return what changes if ``x`` is replaced or written; valid while its storage lives."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version


@triton.jit
def _scale_of(most, LIMIT: tl.constexpr):
    """Return the scale of a maximum, at least ``MIN_SCALE``; 1 for a maximum of 0."""
    return tl.where(most > 0.0, tl.maximum(most * (1.0 / LIMIT), 1.1754943508222875e-38), 1.0)


@triton.jit
def _inverse(scale):
    """Return 1 / scale, correctly rounded, of normal numbers; 0 of infinity."""
    # tl.div_rn contains a call, for subnormal operands, around which a tile would be spilled from
    # the registers. Scales are never subnormal, so one Newton step from an approximation within an
    # ulp rounds correctly (Markstein, 1990).
    if INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    newton: tl.constexpr = """{
        .reg .f32 guess, error;
        .reg .pred finite;
        rcp.approx.ftz.f32 guess, $1;
        fma.rn.f32 error, $1, guess, 0fBF800000;
        neg.f32 error, error;
        fma.rn.f32 guess, guess, error, guess;
        setp.lt.f32 finite, $1, 0f7F800000;
        selp.f32 $0, guess, 0f00000000, finite;
    }"""
    return tl.inline_asm_elementwise(
        newton, "=r,r", [scale], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _values(x_ptr, row, column, rows, width, stride, WHOLE: tl.constexpr):
    """Load a tile; return it in the dtype of x, and its mask, all true if ``WHOLE``."""
    inside = ((row < rows) | WHOLE)[:, None] & ((column < width) | WHOLE)[None, :]
    return tl.load(
        x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0
    ), inside


@triton.jit
def _raise(most_ptr, most, inside):
    """Raise cells to ``most`` by integer maxima of the bits, whose order is the same; skip NaN."""
    bits = tl.where(most == most, most, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(most_ptr, bits, mask=inside, sem="relaxed")


@triton.jit
def _extremes_kernel(
    # read
    x_ptr,
    # written
    of_rows_ptr,
    of_columns_ptr,
    # sizes and the stride of rows
    rows,
    width,
    stride,
    # options
    SCALING: tl.constexpr,
    WHOLE: tl.constexpr,
    # columns and rows of a strip, and rows at a time
    BLOCK: tl.constexpr,
    HIGH: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute max |x| of the tensor, or of each row and each column.

    A program goes down a strip of ``HIGH`` rows, ``PART`` at a time, and prefetches the next ones.
    """
    across = tl.cdiv(width, BLOCK)
    top = tl.program_id(0) // across * HIGH
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros((PART, BLOCK), tl.float32)
    for part in tl.range(0, HIGH, PART, num_stages=3):
        row = top + part + tl.arange(0, PART)
        values, _ = _values(x_ptr, row, column, rows, width, stride, WHOLE)
        sizes = tl.abs(values.to(tl.float32))
        most = tl.maximum(most, sizes)
        if SCALING == "row":
            _raise(of_rows_ptr + row, tl.max(sizes, 1), row < rows)
    if SCALING == "tensor":
        raise_amax(of_rows_ptr, tl.max(most, 1))
    else:
        _raise(of_columns_ptr + column, tl.max(most, 0), column < width)


@triton.jit
def _scales(
    # maxima of the rows or columns, in registers or in memory
    most,
    most_ptr,
    # written
    scale_ptr,
    # numbers of the rows or columns, and how many there are
    here,
    size,
    # place of the tile along them, and its number
    beside,
    tile,
    # options
    SCALING: tl.constexpr,
    KNOWN: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return the scales of a tile's rows or columns, and write them.

    Tiles beside each other may share scales; the first of them, ``beside`` 0, writes.
    """
    at = tl.arange(0, here.shape[0])
    if SCALING == "row":
        most = tl.load(most_ptr + here, mask=here < size, other=0.0)
    scale = tl.zeros(here.shape, tl.float32) + (most if KNOWN else _scale_of(most, LIMIT))
    if SCALING == "tensor":
        tl.store(scale_ptr + at, scale, mask=tile + at == 0)
    elif SCALING == "row":
        tl.store(scale_ptr + here, scale, mask=here < tl.where(beside == 0, size, 0))
    elif SCALING == "block":
        tl.store(scale_ptr + beside.to(tl.int64) * size + here, scale, mask=here < size)
    else:
        tl.store(scale_ptr + tile + at, scale, mask=at == 0)
    return scale


@triton.jit
def _largest(a, b, c, d):
    """Return max(|a|, |b|, |c|, |d|), fp32."""
    # In their own dtype: of fp32 copies the compiler would keep all four in registers for later.
    if INTERPRETED:  # numpy cannot compare bf16 with NaN
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        c = c.to(tl.float32)
        d = d.to(tl.float32)
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d))).to(
        tl.float32
    )


@triton.jit
def _apart(x):
    """Return ``x`` in fp32."""
    # By impure inline code. If a conversion occurs twice the compiler keeps the first result, and a
    # tile in fp32 takes as many registers as two in bf16.
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    permuted: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
    return tl.inline_asm_elementwise(
        permuted, "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2
    )


@triton.jit
def _four(a, b, c, d, inverse, KIND: tl.constexpr):
    """Quantise four rows and pack each column's four bytes into a uint32, the first row lowest."""
    a = _apart(a) * inverse
    b = _apart(b) * inverse
    c = _apart(c) * inverse
    d = _apart(d) * inverse
    if INTERPRETED:
        low = (
            a.to(KIND).to(tl.uint8, bitcast=True)
            | b.to(KIND).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        )
        high = (
            c.to(KIND).to(tl.uint8, bitcast=True)
            | d.to(KIND).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        )
        return low | high << 16
    convert: tl.constexpr = (
        "cvt.rn.satfinite.e5m2x2.f32 " if tl.float8e5 == KIND else "cvt.rn.satfinite.e4m3x2.f32 "
    )
    code: tl.constexpr = (
        "{.reg .b16 x, y; " + convert + "x, $2, $1; " + convert + "y, $4, $3; mov.b32 $0, {x, y};}"
    )
    return tl.inline_asm_elementwise(
        code, "=r,r,r,r,r", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _put_columns(columns_ptr, fours, four, column, rows, width, WHOLE: tl.constexpr):
    """Write packed bytes ``[rows / 4, columns]`` to the transposed layout."""
    transposed = tl.trans(fours)
    inside = ((column < width) | WHOLE)[:, None]
    if columns_ptr.dtype.element_ty == tl.uint32:
        place = columns_ptr + column.to(tl.int64)[:, None] * (rows // 4) + four[None, :]
        tl.store(place, transposed, mask=inside & ((four < rows // 4) | WHOLE)[None, :])
    else:  # with M no multiple of 4 a column begins at any byte
        place = columns_ptr + column.to(tl.int64)[:, None] * rows + 4 * four[None, :]
        for n in tl.static_range(4):
            tl.store(
                place + n,
                (transposed >> 8 * n & 255).to(tl.uint8),
                mask=inside & (4 * four + n < rows)[None, :],
            )


@triton.jit
def _tiles_kernel(
    # read: x, maxima (or a known scale) of rows and of columns
    x_ptr,
    of_rows_ptr,
    of_columns_ptr,
    # written: values and scales of both layouts
    rows_ptr,
    rows_scale_ptr,
    columns_ptr,
    columns_scale_ptr,
    # sizes and the stride of rows
    rows,
    width,
    stride,
    # options
    SCALING: tl.constexpr,
    KNOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    # largest value of the dtype
    LIMIT: tl.constexpr,
    # tile; WHOLE: no tile crosses an edge
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise one tile to one or both layouts, reading it once.

    Maxima of tensors and of rows are given, or the scale of a tensor (``KNOWN``); maxima of blocks
    and squares are computed here.
    """
    # The tile is loaded as four tensors of every fourth row, so that four neighbours of a column
    # are packed into 32 bits in registers before they are transposed. The last tile goes first,
    # since what was read or written last is still in the cache.
    across = tl.cdiv(width, BLOCK)
    down = tl.cdiv(rows, BLOCK)
    last = tl.num_programs(0) - 1 - tl.program_id(0)
    left = last % across
    top = last // across
    four = top * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = left * BLOCK + tl.arange(0, BLOCK)
    row = 4 * four
    a, of_a = _values(x_ptr, row, column, rows, width, stride, WHOLE)
    b, of_b = _values(x_ptr, row + 1, column, rows, width, stride, WHOLE)
    c, of_c = _values(x_ptr, row + 2, column, rows, width, stride, WHOLE)
    d, of_d = _values(x_ptr, row + 3, column, rows, width, stride, WHOLE)
    most = 0.0
    if SCALING == "tensor":
        most = tl.load(of_rows_ptr)
    elif SCALING != "row":
        most = tl.max(_largest(a, b, c, d), 0)
    if SCALING == "square":
        most = tl.max(most, 0)
    if COLUMNS:
        tile = left * down + top
        scale = _scales(
            most, of_columns_ptr, columns_scale_ptr, column, width, top, tile, SCALING, KNOWN, LIMIT
        )
        fours = _four(a, b, c, d, _inverse(scale)[None, :], rows_ptr.dtype.element_ty)
        _put_columns(columns_ptr, fours, four, column, rows, width, WHOLE)
    if ROWS:
        tile = top * across + left
        parts = (a, b, c, d)
        inside = (of_a, of_b, of_c, of_d)
        for n in tl.static_range(4):
            values = parts[n].to(tl.float32)
            if SCALING == "block":
                most = tl.max(tl.abs(values), 1)
            scale = _scales(
                most, of_rows_ptr, rows_scale_ptr, row + n, rows, left, tile, SCALING, KNOWN, LIMIT
            )
            values = (values * _inverse(scale)[:, None]).to(rows_ptr.dtype.element_ty)
            place = rows_ptr + (row + n).to(tl.int64)[:, None] * width + column[None, :]
            tl.store(place, values, mask=inside[n])


@triton.jit
def _rows_kernel(
    x_ptr, rows_ptr, scale_ptr, width, stride, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantise one row a program, scale and values in one pass over it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    scale = _scale_of(tl.zeros((BLOCK,), tl.float32) + tl.max(tl.abs(x), 0), LIMIT)
    tl.store(scale_ptr + row + column, scale, mask=column == 0)
    values = (x * _inverse(scale)).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + row * width + column, values, mask=column < width)


def scale_shape(shape: Sequence[int], scaling: str) -> tuple[int, ...]:
    """Return the shape of the scales in memory; those of ``block`` are stored transposed."""
    outer, inner = shape
    blocks = triton.cdiv(inner, FP8_BLOCK)
    return {
        "tensor": (),
        "row": (outer, 1),
        "block": (blocks, outer),
        "square": (triton.cdiv(outer, FP8_BLOCK), blocks),
    }[scaling]


@operator("chronicals::fp8_quantize")
def _quantize(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    layout: str,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _outputs(x, scaling, dtype, layout, scale, amax)
    if not x.numel():
        for tensor in results:
            tensor.fill_(1.0)
        return results
    by_rows = results[:2]
    by_columns = results[2:]
    (rows, width) = x.shape
    stride = x.stride(0)
    limit = FP8_MAX[dtype]
    if scaling == "row" and layout == "rows" and width <= MAX_ROW_WIDTH:
        block = next_power_of_2(width)
        warps = min(max(block // 1024, 1), 16)
        _rows_kernel[(rows,)](x, *by_rows, width, stride, limit, block, num_warps=warps)
        return results
    known = amax if scale is None else scale
    extremes = _extremes(x, scaling) if known is None else (known, known)
    whole = rows % FP8_BLOCK == width % FP8_BLOCK == 0
    warps = 4 if x.dtype == torch.bfloat16 else 8
    if layout == "columns":  # the kernel writes no rows, but takes its dtype from this pointer
        by_rows = by_columns
    values, of_columns = by_rows if layout == "rows" else by_columns
    tiles = triton.cdiv(rows, FP8_BLOCK) * triton.cdiv(width, FP8_BLOCK)
    _tiles_kernel[(tiles,)](
        x,
        *extremes,
        *by_rows,
        _in_fours(values),
        of_columns,
        rows,
        width,
        stride,
        scaling,
        scale is not None,
        layout != "columns",
        layout != "rows",
        limit,
        whole,
        FP8_BLOCK,
        num_warps=warps,
    )
    return results


def _in_fours(columns: Tensor) -> Tensor:
    """View columns as uint32, or as bytes if their length is no multiple of 4."""
    return columns.view(torch.uint8 if columns.shape[-1] % 4 else torch.uint32)


def _extremes(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """Compute max |x| of rows and of columns, or twice that of the tensor.

    For blocks and squares, whose maxima the tile kernel computes, return placeholders.
    """
    (rows, width) = x.shape
    of_all = scaling == "tensor"
    if scaling in ("block", "square"):
        return x, x
    bits = new_amax(x) if of_all else x.new_zeros(rows + width, dtype=torch.int32)
    of_rows, of_columns = (bits, bits) if of_all else bits.split((rows, width))
    (high, part) = AMAX_STRIP
    stride = x.stride(0)
    whole = rows % high == width % FP8_BLOCK == 0
    programs = triton.cdiv(rows, high) * triton.cdiv(width, FP8_BLOCK)
    _extremes_kernel[(programs,)](
        x,
        of_rows,
        of_columns,
        rows,
        width,
        stride,
        scaling,
        whole,
        FP8_BLOCK,
        high,
        part,
        num_warps=4,
    )
    return of_rows.view(torch.float32), of_columns.view(torch.float32)


def scale_of_amax(most: Tensor, limit: float) -> Tensor:
    """Return the scale of each maximum in ``most`` for values of at most ``limit``; 1 for 0."""
    return torch.where(most > 0.0, (most * (1.0 / limit)).clamp(min=MIN_SCALE), 1.0)


@torch.library.register_fake(_quantize)
def _outputs(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    layout: str,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate values and scale of the rows, then of the columns; ``absent`` for what is not wanted."""
    shape = x.shape
    results: list[Tensor] = []
    for of_layout, wanted in ((shape, layout != "columns"), (shape[::-1], layout != "rows")):
        if wanted:
            results.append(x.new_empty(of_layout, dtype=dtype))
            results.append(x.new_empty(scale_shape(of_layout, scaling), dtype=torch.float32))
        else:
            results += [absent(x), absent(x)]
    values, scales, transposed, transposed_scales = results
    return values, scales, transposed, transposed_scales


def fp8_quantize(
    x: Tensor,
    scaling: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    layout: str = "rows",
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Scaled | None, Scaled | None]:
    """Quantise ``x`` to FP8, by rows and by columns.

    Args:
        x: ``[M, K]`` in fp32, bf16 or fp16. NaN stays NaN and does not affect scales.
        scaling: ``tensor``, ``row``, ``block`` or ``square``.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        layout: ``rows``, ``columns`` or ``both``.
        scale: the scale of the tensor if it is known, fp32 ``[]``, 2⁻¹²⁶ to 2¹²⁵.
        amax: max |x| if that is known, fp32 ``[1]``.

    Returns:
        ``Scaled`` of ``[M, K]`` and of its transpose ``[K, M]``; None for the one not asked for.

    Raises:
        ValueError: an option is unknown, x is no matrix, or ``scale`` or ``amax`` is given with
            another scaling than ``tensor``.
    """
    for name, value, known in (
        ("scaling", scaling, FP8_SCALINGS),
        ("dtype", dtype, tuple(FP8_MAX)),
        ("layout", layout, ("rows", "columns", "both")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, known))}")
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected [M, K]")
    if scaling != "tensor" and not (scale is None and amax is None):
        raise ValueError(
            f"scaling={scaling!r}: only the scale or the maximum of a whole tensor can be given"
        )
    if not runs_triton(x) or lacks_fp8(x.device):
        if scale is None and amax is not None:
            scale = scale_of_amax(amax.view(()), FP8_MAX[dtype])
        return fp8_quantize_reference(x, scaling, dtype, layout, scale)
    rows, of_rows, columns, of_columns = _quantize(
        in_rows(x) if x.numel() else x, scaling, dtype, layout, scale, amax
    )
    if scaling == "block":
        of_rows = of_rows.t()
        of_columns = of_columns.t()
    by_rows = Scaled(rows, of_rows) if layout != "columns" else None
    return by_rows, Scaled(columns, of_columns) if layout != "rows" else None


@triton.jit
def _transpose_kernel(
    values_ptr, transposed_ptr, rows, width, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Transpose bytes, a tile a program, packed by fours as in ``_tiles_kernel``."""
    across = tl.cdiv(width, BLOCK)
    four = (tl.program_id(0) // across) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    fours = tl.zeros((BLOCK // 4, BLOCK), tl.uint32)
    for n in tl.static_range(4):
        values, _ = _values(values_ptr, 4 * four + n, column, rows, width, width, WHOLE)
        fours |= values.to(tl.uint32) << 8 * n
    _put_columns(transposed_ptr, fours, four, column, rows, width, WHOLE)


def fp8_transposed(scaled: Scaled) -> Scaled:
    """Return the transpose ``[K, M]`` of a matrix with one scale; 2 bytes an element move.

    Raises:
        ValueError: it has several scales, which do not belong to columns.
    """
    values, scale = scaled
    if scale.ndim:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}: only a matrix with one scale can be transposed"
        )
    if not runs_triton(scale) or not values.numel():
        return Scaled(values.t().contiguous(), scale)
    (rows, width) = values.shape
    out = values.new_empty(values.shape[::-1])
    whole = rows % FP8_BLOCK == width % FP8_BLOCK == 0
    tiles = triton.cdiv(rows, FP8_BLOCK) * triton.cdiv(width, FP8_BLOCK)
    _transpose_kernel[(tiles,)](
        values.view(torch.uint8), _in_fours(out), rows, width, whole, FP8_BLOCK, num_warps=4
    )
    return Scaled(out, scale)


def fp8_quantize_reference(
    x: Tensor,
    scaling: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    layout: str = "rows",
    scale: Tensor | None = None,
) -> tuple[Scaled | None, Scaled | None]:
    """Compute ``fp8_quantize`` in plain torch."""
    wide = x.float()
    rows = _scaled_reference(wide, scaling, dtype, scale) if layout != "columns" else None
    return rows, _scaled_reference(wide.t(), scaling, dtype, scale) if layout != "rows" else None


def _scaled_reference(x: Tensor, scaling: str, dtype: torch.dtype, known: Tensor | None) -> Scaled:
    if known is not None:
        # Values beyond the limit are clamped here, as a card and torch ≥ 2.12 do; torch 2.11 makes
        # them NaN.
        limit = FP8_MAX[dtype]
        return Scaled((x * (1.0 / known)).clamp(-limit, limit).to(dtype).contiguous(), known)
    rows, width = x.shape
    high, wide = {
        "tensor": (rows, width),
        "row": (1, width),
        "block": (1, FP8_BLOCK),
        "square": (FP8_BLOCK, FP8_BLOCK),
    }[scaling]
    if not x.numel():
        shape = scale_shape((rows, width), scaling)
        return Scaled(x.to(dtype), x.new_ones(shape[::-1] if scaling == "block" else shape))
    most = x.abs().nan_to_num(0.0, posinf=float("inf"))
    padded = torch.nn.functional.pad(most, (0, -width % wide, 0, -rows % high))
    scale = scale_of_amax(
        padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3)), FP8_MAX[dtype]
    )
    each = _spread(scale, high, wide, rows, width)
    return Scaled(
        (x * (1.0 / each)).to(dtype).contiguous(), scale.view(()) if scaling == "tensor" else scale
    )


def dequantize(scaled: Scaled) -> Tensor:
    """Return ``scale · values``, fp32 ``[M, K]``."""
    values, scale = scaled
    if scale.ndim == 0:
        return values.float() * scale
    rows, width = values.shape
    high = 1 if len(scale) == rows else FP8_BLOCK
    wide = width if scale.shape[1] == 1 else FP8_BLOCK
    return values.float() * _spread(scale, high, wide, rows, width)


def _spread(scale: Tensor, high: int, wide: int, rows: int, width: int) -> Tensor:
    """Repeat each scale over its ``high`` × ``wide`` elements, to ``[rows, width]``."""
    return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :width]
