"""Numbers of 8 bits with scales of fp32: ``x ≈ scale · values`` (Micikevicius et al., 2022, sections 3 and 4).

    scale = max |x| · (1 / L),   values = fp8(x · (1 / scale))     L = 448 (e4m3) or 57344 (e5m2)

The maximum is that of the whole tensor (``tensor``), of each row (``row``), of 128 values of a row (``block``) or of 128 × 128
values (``square``). A tensor-core product of FP8 runs along the last dimension of both operands, so a backward pass needs the
transpose of what the forward pass took: ``rows`` are ``[M, K]``, scaled along K, ``columns`` are ``[K, M]``, scaled along M.

x is ``[M, K]`` in fp32, bf16 or fp16. Bytes an element in 16 bit: 2 read and 1 written for each layout; the scale of a tensor,
and those of whole columns, take 2 more, for they are known only at the end, unless what made the tensor found its maximum
(``peak.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.launch import WIDEST, in_rows, next_power_of_2, runs_triton, tl, triton
from chronicals.kernels.peak import new_peak, raise_peak

BLOCK = 128
SCALINGS = ("tensor", "row", "block", "square")
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
PART = (32, 64)
"""Rows and columns of a tile that a program takes where each has a scale of its own."""

REGISTERS, OF_PART = 128, 96
"""Of a thread that takes its share of a whole tile, which leaves a multiprocessor two programs, or of a part of one: ten."""

STRIP = (512, 64)
"""Rows of a strip, and of them at a time."""

SMALLEST = 2.0**-126
"""Of scales: the inverse of a smaller one is infinite."""

FIRST = (8, 9)
"""The first compute capability with FP8."""


@functools.cache
def lacks_fp8(device: torch.device) -> str:
    """Why there are no conversions to FP8 and no products in it; empty where there are, or where all is emulated (CPU)."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else FIRST
    return "" if capability >= FIRST else f"{torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]}) has no FP8"


class Scaled(NamedTuple):
    """A matrix as ``scale · values``.

    Attributes:
        values: fp8, dense ``[M, K]``.
        scale: fp32: ``[]`` for a tensor, ``[M, 1]`` for rows, ``[M, ⌈K / 128⌉]`` for blocks, the second dimension of which is
            the slower one, ``[⌈M / 128⌉, ⌈K / 128⌉]`` for squares.
    """

    values: Tensor
    scale: Tensor


@triton.jit
def _scale_of(most, LIMIT: tl.constexpr):
    return tl.where(most > 0.0, tl.maximum(most * (1.0 / LIMIT), 1.1754943508222875e-38), 1.0)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _values(x_ptr, row, column, rows, width, stride, WHOLE: tl.constexpr):
    """Of these rows and columns, as they are, and which of them there are: all, where every tile is ``WHOLE``."""
    inside = ((row < rows) | WHOLE)[:, None] & ((column < width) | WHOLE)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0), inside


@triton.jit
def _raise(most_ptr, most, inside):
    """The integers of their bits, which have the same order; what is no number has none."""
    bits = tl.where(most == most, most, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(most_ptr, bits, mask=inside, sem="relaxed")


@triton.jit
def _extremes_kernel(
    x_ptr, of_rows_ptr, of_columns_ptr, rows, width, stride, SCALING: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, HIGH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """max |x| of all, or of each row and each column: down a strip, some rows at a time while the next are on their way."""
    across = tl.cdiv(width, BLOCK)
    top = tl.program_id(0) // across * HIGH
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros((PART, BLOCK), tl.float32)
    for part in tl.range(0, HIGH, PART, num_stages=3):
        row = top + part + tl.arange(0, PART)
        given, _ = _values(x_ptr, row, column, rows, width, stride, WHOLE)
        sizes = tl.abs(given.to(tl.float32))
        most = tl.maximum(most, sizes)
        if SCALING == "row":
            _raise(of_rows_ptr + row, tl.max(sizes, 1), row < rows)
    if SCALING == "tensor":
        raise_peak(of_rows_ptr, tl.max(most, 1))
    else:
        _raise(of_columns_ptr + column, tl.max(most, 0), column < width)


@triton.jit
def _put_rows(rows_ptr, given, inverse, row, column, inside, width):
    values = (given.to(tl.float32) * inverse[:, None]).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + row.to(tl.int64)[:, None] * width + column[None, :], values, mask=inside)


@triton.jit
def _put_columns(columns_ptr, given, inverse, row, column, inside, rows):
    """Turned in 16 bit, as it came, by matrix loads; 8-bit values would be turned one by one."""
    values = (tl.trans(given).to(tl.float32) * inverse[:, None]).to(columns_ptr.dtype.element_ty)
    tl.store(columns_ptr + column.to(tl.int64)[:, None] * rows + row[None, :], values, mask=tl.trans(inside))


@triton.jit
def _scales(common, most_ptr, scale_ptr, here, size, before, tile, SCALING: tl.constexpr, LIMIT: tl.constexpr):
    """Those of a tile's rows or columns, written by the first tile that has them; ``before`` are the tiles in front of it."""
    scale, at = tl.zeros(here.shape, tl.float32) + common, tl.arange(0, here.shape[0])
    if SCALING == "row":
        scale = _scale_of(tl.load(most_ptr + here, mask=here < size, other=0.0), LIMIT)
        tl.store(scale_ptr + here, scale, mask=here < tl.where(before == 0, size, 0))
    elif SCALING == "tensor":
        tl.store(scale_ptr + at, scale, mask=tile + at == 0)
    else:
        tl.store(scale_ptr + tile + at, scale, mask=at == 0)
    return scale


@triton.jit
def _put_pairs(
    columns_ptr, upper, lower, inverse, pair, column, rows, width,
    KIND: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Two rows as columns: what lies together in a column becomes a number of 16 bits before it is turned."""
    inverse, there = inverse[None, :], ((column < width) | WHOLE)[:, None]
    upper, lower = (upper.to(tl.float32) * inverse).to(KIND), (lower.to(tl.float32) * inverse).to(KIND)
    turned = tl.trans(_pairs(upper, lower, INTERPRETED))
    if columns_ptr.dtype.element_ty == tl.uint16:
        place = columns_ptr + column.to(tl.int64)[:, None] * (rows // 2) + pair[None, :]
        tl.store(place, turned, mask=there & ((pair < rows // 2) | WHOLE)[None, :])
    else:  # a column of an odd length begins anywhere
        place = columns_ptr + column.to(tl.int64)[:, None] * rows + 2 * pair[None, :]
        tl.store(place, (turned & 255).to(tl.uint8), mask=there & (2 * pair < rows)[None, :])
        tl.store(place + 1, (turned >> 8).to(tl.uint8), mask=there & (2 * pair + 1 < rows)[None, :])


@triton.jit
def _pairs(upper, lower, INTERPRETED: tl.constexpr):
    """``upper + 256 · lower`` of their bits; on a card four at a time are two permutations of bytes."""
    upper, lower = upper.to(tl.uint8, bitcast=True), lower.to(tl.uint8, bitcast=True)
    if INTERPRETED:
        return upper.to(tl.uint16) | (lower.to(tl.uint16) << 8)
    permuted: tl.constexpr = "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;"
    return tl.inline_asm_elementwise(permuted, "=r,=r,r,r", [upper, lower], dtype=tl.uint16, is_pure=True, pack=4)


@triton.jit
def _inverses(scale):
    """Gathered from themselves: else each thread divides for all that it has a part of, and what has one scale is converted
    once for both layouts, which Triton 3.6 then stores in a wrong order."""
    return tl.gather(_inverse(scale), tl.arange(0, scale.shape[0]), 0)


@triton.jit
def _tiles_kernel(
    x_ptr, of_rows_ptr, of_columns_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, rows, width, stride,
    SCALING: tl.constexpr, KNOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile, read once, the upper and the lower of each two rows apart. Maxima of tensors and rows are there, or a tensor's
    scale is; that of a square is found here."""
    across, down = tl.cdiv(width, BLOCK), tl.cdiv(rows, BLOCK)
    left, top = tl.program_id(0) % across, tl.program_id(0) // across
    pair, column = top * (BLOCK // 2) + tl.arange(0, BLOCK // 2), left * BLOCK + tl.arange(0, BLOCK)
    row = 2 * pair
    upper, of_upper = _values(x_ptr, row, column, rows, width, stride, WHOLE)
    lower, of_lower = _values(x_ptr, row + 1, column, rows, width, stride, WHOLE)
    common = 0.0
    if SCALING == "tensor":
        common = tl.load(of_rows_ptr)
        if not KNOWN:
            common = _scale_of(common, LIMIT)
    elif SCALING == "square":
        sizes = tl.maximum(tl.abs(upper.to(tl.float32)), tl.abs(lower.to(tl.float32)))
        common = _scale_of(tl.max(tl.max(sizes, 1), 0), LIMIT)
    if ROWS:
        tile = top * across + left
        of_upper_rows = _scales(common, of_rows_ptr, rows_scale_ptr, row, rows, left, tile, SCALING, LIMIT)
        of_lower_rows = _scales(common, of_rows_ptr, rows_scale_ptr, row + 1, rows, left, tile, SCALING, LIMIT)
        _put_rows(rows_ptr, upper, _inverses(of_upper_rows), row, column, of_upper, width)
        _put_rows(rows_ptr, lower, _inverses(of_lower_rows), row + 1, column, of_lower, width)
    if COLUMNS:
        tile = left * down + top
        scale = _scales(common, of_columns_ptr, columns_scale_ptr, column, width, top, tile, SCALING, LIMIT)
        inverse = _inverses(scale)
        _put_pairs(columns_ptr, upper, lower, inverse, pair, column, rows, width, rows_ptr.dtype.element_ty, WHOLE, INTERPRETED)


@triton.jit
def _block_rows(x_ptr, rows_ptr, scale_ptr, row, column, left, rows, width, stride, LIMIT: tl.constexpr):
    given, inside = _values(x_ptr, row, column, rows, width, stride, False)
    scale = _scale_of(tl.max(tl.abs(given.to(tl.float32)), 1), LIMIT)
    tl.store(scale_ptr + left.to(tl.int64) * rows + row, scale, mask=row < rows)
    _put_rows(rows_ptr, given, _inverse(scale), row, column, inside, width)


@triton.jit
def _block_columns(
    x_ptr, columns_ptr, scale_ptr, row, column, top, rows, width, stride, LIMIT: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    given, inside = _values(x_ptr, row, column, rows, width, stride, False)
    scale = _scale_of(tl.max(tl.abs(given.to(tl.float32)), 0), LIMIT)
    tl.store(scale_ptr + top.to(tl.int64) * width + column, scale, mask=column < width)
    inverse = tl.gather(_inverse(scale), tl.arange(0, WIDE), 0)  # itself; else what follows lies as the maximum wants it
    _put_columns(columns_ptr, given, inverse, row, column, inside, rows)


@triton.jit
def _blocks_kernel(
    x_ptr, rows_ptr, rows_scale_ptr, columns_ptr, columns_scale_ptr, rows, width, stride, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``HIGH`` rows of a tile or ``WIDE`` of its columns, 0 of a layout that is not asked for. Programs that follow each other
    find the tile near; one that did all of it would need the registers of two. Without masks a program loads more at once, and
    needs more registers, than pays.
    """
    of_rows: tl.constexpr = BLOCK // HIGH if HIGH else 0
    of_tile: tl.constexpr = of_rows + (BLOCK // WIDE if WIDE else 0)
    across = tl.cdiv(width, BLOCK)
    tile, turn = tl.program_id(0) // of_tile, tl.program_id(0) % of_tile
    left, top = tile % across, tile // across
    row, column = top * BLOCK + tl.arange(0, BLOCK), left * BLOCK + tl.arange(0, BLOCK)
    if turn < of_rows:
        if HIGH:
            row_of_part = top * BLOCK + turn * HIGH + tl.arange(0, HIGH)
            _block_rows(x_ptr, rows_ptr, rows_scale_ptr, row_of_part, column, left, rows, width, stride, LIMIT)
    else:
        if WIDE:
            column_of_part = left * BLOCK + (turn - of_rows) * WIDE + tl.arange(0, WIDE)
            _block_columns(x_ptr, columns_ptr, columns_scale_ptr, row, column_of_part, top, rows, width, stride, LIMIT, WIDE)


@triton.jit
def _rows_kernel(x_ptr, rows_ptr, scale_ptr, width, stride, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """A whole row a program: its scale and its values in one pass."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    scale = _scale_of(tl.zeros((BLOCK,), tl.float32) + tl.max(tl.abs(x), 0), LIMIT)
    tl.store(scale_ptr + row + column, scale, mask=column == 0)
    values = (x * _inverse(scale)).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + row * width + column, values, mask=column < width)


def _outputs(x: Tensor, scaling: str, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """Values and scale of the rows, then of the columns, whichever are asked for."""
    (rows, width), made = x.shape, list[Tensor]()
    for shape, wanted in (((rows, width), "rows"), ((width, rows), "columns")):
        if layout in (wanted, "both"):
            made += [x.new_empty(shape, dtype=dtype), x.new_empty(scale_shape(shape, scaling), dtype=torch.float32)]
    return made


def scale_shape(shape: Sequence[int], scaling: str) -> tuple[int, ...]:
    """As it lies in memory, where the runs of a block come first."""
    outer, inner = shape
    blocks = triton.cdiv(inner, BLOCK)
    return {
        "tensor": (), "row": (outer, 1), "block": (blocks, outer), "square": (triton.cdiv(outer, BLOCK), blocks),
    }[scaling]  # fmt: skip


@torch.library.custom_op("chronicals::fp8_quantize", mutates_args=())
def _quantize(
    x: Tensor, scaling: str, dtype: torch.dtype, layout: str, scale: Tensor | None, most: Tensor | None
) -> list[Tensor]:  # fmt: skip
    made = _outputs(x, scaling, dtype, layout)
    if not x.numel():
        for tensor in made:
            tensor.fill_(1.0)
        return made
    (rows, width), stride, limit = x.shape, x.stride(0), LIMITS[dtype]
    if scaling == "row" and layout == "rows" and width <= WIDEST:
        block = next_power_of_2(width)
        _rows_kernel[(rows,)](x, *made, width, stride, limit, block, num_warps=min(max(block // 1024, 1), 16))
        return made
    # of the layout that is not asked for nothing is read or written
    if scaling == "block":
        high, wide = PART[0] if layout != "columns" else 0, PART[1] if layout != "rows" else 0
        programs = _tiles(x) * sum(BLOCK // part for part in (high, wide) if part)
        registers = OF_PART if x.element_size() == 2 else None
        _blocks_kernel[(programs,)](
            x, *made[:2], *made[-2:], rows, width, stride, limit, BLOCK, high, wide, num_warps=2, maxnreg=registers
        )
        return made
    known = most if scale is None else scale
    extremes = _extremes(x, scaling) if known is None else (known, known)
    whole = rows % BLOCK == width % BLOCK == 0
    turned = made[-2].view(torch.uint8 if made[-2].shape[1] % 2 else torch.uint16)
    _tiles_kernel[(_tiles(x),)](
        x, *extremes, *made[:2], turned, made[-1], rows, width, stride, scaling, scale is not None, layout != "columns",
        layout != "rows", limit, whole, BLOCK, not x.is_cuda, num_warps=8, maxnreg=REGISTERS,
    )  # fmt: skip
    return made


def _tiles(x: Tensor) -> int:
    return triton.cdiv(x.shape[0], BLOCK) * triton.cdiv(x.shape[1], BLOCK)


def _extremes(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """max |x| of all, twice, or of rows and of columns; nothing for squares, which find their own."""
    (rows, width), of_all = x.shape, scaling == "tensor"
    if scaling == "square":
        return x, x
    bits = new_peak(x) if of_all else x.new_zeros(rows + width, dtype=torch.int32)
    of_rows, of_columns = (bits, bits) if of_all else bits.split((rows, width))
    (high, part), stride = STRIP, x.stride(0)
    whole = rows % high == width % BLOCK == 0
    programs = triton.cdiv(rows, high) * triton.cdiv(width, BLOCK)
    _extremes_kernel[(programs,)](x, of_rows, of_columns, rows, width, stride, scaling, whole, BLOCK, high, part, num_warps=4)
    return of_rows.view(torch.float32), of_columns.view(torch.float32)


def _scale(most: Tensor, limit: float) -> Tensor:
    return torch.where(most > 0.0, (most * (1.0 / limit)).clamp(min=SMALLEST), 1.0)


@_quantize.register_fake
def _(
    x: Tensor, scaling: str, dtype: torch.dtype, layout: str, scale: Tensor | None, most: Tensor | None
) -> list[Tensor]:  # fmt: skip
    return _outputs(x, scaling, dtype, layout)


def fp8_quantize(
    x: Tensor, scaling: str = "tensor", dtype: torch.dtype = torch.float8_e4m3fn, layout: str = "rows",
    scale: Tensor | None = None, most: Tensor | None = None,
) -> tuple[Scaled | None, Scaled | None]:  # fmt: skip
    """``x`` in FP8: its rows, and its columns as the rows of the transpose.

    Args:
        x: ``[M, K]`` in fp32, bf16 or fp16. A value that is not a number stays one and has no part in a scale.
        scaling: ``tensor``, ``row``, ``block`` or ``square``.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        layout: ``rows``, ``columns`` or ``both``.
        scale: of a tensor, where it is known, fp32 ``[]``.
        most: max |x|, where that is known, fp32 ``[1]``.

    Returns:
        ``Scaled`` of ``[M, K]`` and of ``[K, M]``; None for the one not asked for.

    Raises:
        ValueError: an option is unknown, x is no matrix, or ``scale`` or ``most`` is given for another scaling than ``tensor``.
    """
    for name, value, known in (
        ("scaling", scaling, SCALINGS), ("dtype", dtype, tuple(LIMITS)), ("layout", layout, ("rows", "columns", "both")),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, known))}")
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected [M, K]")
    if scaling != "tensor" and not (scale is None and most is None):
        raise ValueError(f"scaling={scaling!r}: only the scale or the maximum of a whole tensor can be given")
    if not runs_triton(x) or lacks_fp8(x.device):
        scale = _scale(most.view(()), LIMITS[dtype]) if scale is None and most is not None else scale
        return fp8_quantize_reference(x, scaling, dtype, layout, scale)
    made = _quantize(in_rows(x) if x.numel() else x, scaling, dtype, layout, scale, most)
    found = [Scaled(values, scale.t() if scaling == "block" else scale) for values, scale in zip(made[::2], made[1::2])]
    return found[0] if layout != "columns" else None, found[-1] if layout != "rows" else None


@triton.jit
def _turn_kernel(values_ptr, turned_ptr, rows, width, BLOCK: tl.constexpr):
    """A tile a program; bytes, whatever they stand for."""
    across = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // across) * BLOCK + tl.arange(0, BLOCK)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tile = tl.load(values_ptr + place, mask=(row < rows)[:, None] & (column < width)[None, :], other=0)
    place = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(turned_ptr + place, tl.trans(tile), mask=(column < width)[:, None] & (row < rows)[None, :])


def fp8_turned(scaled: Scaled) -> Scaled:
    """The transpose, ``[K, M]``, of a matrix that has the scale of a tensor: 2 bytes an element.

    Raises:
        ValueError: it has others, which its columns would not share.
    """
    values, scale = scaled
    if scale.ndim:
        raise ValueError(f"scale has shape {tuple(scale.shape)}: only what has the scale of a tensor can be turned")
    if not runs_triton(scale) or not values.numel():
        return Scaled(values.t().contiguous(), scale)
    (rows, width), turned = values.shape, values.new_empty(values.shape[::-1])
    _turn_kernel[(_tiles(values),)](values.view(torch.uint8), turned.view(torch.uint8), rows, width, BLOCK, num_warps=8)
    return Scaled(turned, scale)


def fp8_quantize_reference(
    x: Tensor, scaling: str = "tensor", dtype: torch.dtype = torch.float8_e4m3fn, layout: str = "rows",
    scale: Tensor | None = None,
) -> tuple[Scaled | None, Scaled | None]:  # fmt: skip
    wide = x.float()
    rows = _scaled_reference(wide, scaling, dtype, scale) if layout != "columns" else None
    return rows, _scaled_reference(wide.t(), scaling, dtype, scale) if layout != "rows" else None


def _scaled_reference(x: Tensor, scaling: str, dtype: torch.dtype, known: Tensor | None) -> Scaled:
    if known is not None:  # torch 2.11 makes NaN of what lies beyond the limit, a card and later ones the limit
        limit = LIMITS[dtype]
        return Scaled((x * (1.0 / known)).clamp(-limit, limit).to(dtype).contiguous(), known)
    rows, width = x.shape
    high, wide = {"tensor": (rows, width), "row": (1, width), "block": (1, BLOCK), "square": (BLOCK, BLOCK)}[scaling]
    if not x.numel():
        shape = scale_shape((rows, width), scaling)
        return Scaled(x.to(dtype), x.new_ones(shape[::-1] if scaling == "block" else shape))
    most = x.abs().nan_to_num(0.0, posinf=float("inf"))
    padded = torch.nn.functional.pad(most, (0, -width % wide, 0, -rows % high))
    scale = _scale(padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3)), LIMITS[dtype])
    each = _spread(scale, high, wide, rows, width)
    return Scaled((x * (1.0 / each)).to(dtype).contiguous(), scale.view(()) if scaling == "tensor" else scale)


def dequantize(scaled: Scaled) -> Tensor:
    """What it stands for, fp32 ``[M, K]``."""
    values, scale = scaled
    if scale.ndim == 0:
        return values.float() * scale
    rows, width = values.shape
    high, wide = 1 if len(scale) == rows else BLOCK, width if scale.shape[1] == 1 else BLOCK
    return values.float() * _spread(scale, high, wide, rows, width)


def _spread(scale: Tensor, high: int, wide: int, rows: int, width: int) -> Tensor:
    return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :width]
