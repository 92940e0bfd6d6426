"""A tile of a weight in any format of ``expert_stacks.py``, dequantised inside a kernel.

    W[n, k] for n in ``OUTPUTS`` outputs and k in ``COLUMNS`` columns, ``[OUTPUTS, COLUMNS]``

Values are rounded to the dtype of the product, as the dense ones are. Those in FP8 are exact and
without scales, which a product takes out of its sums.
"""

from __future__ import annotations

from chronicals.kernels.expert_stacks import (
    FORMAT_4_BIT,
    FORMAT_16_BIT,
    FORMAT_FP8,
    FORMAT_MXFP4,
)
from chronicals.kernels.gguf_blocks import gguf_values
from chronicals.kernels.launch import kernel_constant, tl, triton
from chronicals.kernels.mxfp4 import half_of_scale, mxfp4_values
from chronicals.kernels.nf4_product import scales_of, weight_of

FP8_SCALE_OF_BITS = 256.0
"""The value of e4m3 bits over that of the same bits as fp16 (see ``values_of_e4m3``)."""

_16_BIT = kernel_constant(FORMAT_16_BIT)
_FP8 = kernel_constant(FORMAT_FP8)
_MXFP4 = kernel_constant(FORMAT_MXFP4)
_4_BIT = kernel_constant(FORMAT_4_BIT)


@triton.jit
def values_of_e4m3(bits):
    """Return values of e4m3 over ``FP8_SCALE_OF_BITS``, exactly, in fp16; NaN stays NaN.

    Exponent and mantissa are moved to their places in fp16, whose exponent counts from 15 where
    that of e4m3 counts from 7. No card needs FP8 for it, and subnormal numbers stay exact.
    """
    magnitude = bits.to(tl.uint16) & 0x7F
    sign = (bits.to(tl.uint16) & 0x80) << 8
    values = (sign | (magnitude << 7)).to(tl.float16, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), values)


@triton.jit
def _elements(w_ptr, output, is_output, column, depth, w_row, w_column):
    """Load elements of 8 or 16 bits, one a column, ``[OUTPUTS, COLUMNS]``."""
    return tl.load(
        w_ptr + output[:, None] * w_row + column.to(tl.int64)[None, :] * w_column,
        mask=is_output[:, None] & (column < depth)[None, :],
        other=0,
    )


@triton.jit
def _pairs(w_ptr, output, is_output, first, depth, w_row, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Load bytes of two codes, by groups of columns, ``[OUTPUTS, GROUPS, SIZE / 2]``."""
    byte = first // 2 + tl.arange(0, GROUPS * SIZE // 2)
    packed = tl.load(
        w_ptr + output[:, None] * w_row + byte[None, :],
        mask=is_output[:, None] & (2 * byte < depth)[None, :],
        other=0,
    )
    return tl.reshape(packed, (output.shape[0], GROUPS, SIZE // 2))


@triton.jit
def weight_tile(
    # read: weight or codes, scales, scales' scales, what codes of both stand for
    w_ptr,
    scale_ptr,
    second_ptr,
    code2_ptr,
    offset_ptr,
    code_ptr,
    # place: outputs, first column
    output,
    is_output,
    first,
    # K, the strides of ``Layout``, and the blocks before the weight's first
    depth,
    w_row,
    w_column,
    scale_row,
    blocks_before,
    # of ``Layout``
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    NESTED: tl.constexpr,
    # dtype of the values, look-ups of codes, tile
    DTYPE: tl.constexpr,
    TABLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the values of some outputs and columns of a weight, ``[OUTPUTS, COLUMNS]``.

    The pointers are those of the weight's slot. Beyond N and K values are finite, but not always 0:
    rows that are multiplied with them must be 0 there. Values in FP8 are those of
    ``values_of_e4m3``.
    """
    SIZE: tl.constexpr = min(BLOCK, COLUMNS)  # columns of the tile that share a scale
    GROUPS: tl.constexpr = COLUMNS // SIZE
    column = first + tl.arange(0, COLUMNS)
    in_group = first + tl.arange(0, GROUPS) * SIZE
    is_group = is_output[:, None] & (in_group < depth)[None, :]
    if FORMAT == _16_BIT:
        w = _elements(w_ptr, output, is_output, column, depth, w_row, w_column)
    elif FORMAT == _FP8:
        bits = _elements(w_ptr, output, is_output, column, depth, w_row, w_column)
        w = values_of_e4m3(bits).to(DTYPE)
    elif FORMAT == _MXFP4:
        codes = _pairs(w_ptr, output, is_output, first, depth, w_row, GROUPS, SIZE).to(tl.int32)
        at = scale_ptr + output[:, None] * scale_row
        exponent = tl.load(at + (in_group // BLOCK)[None, :], mask=is_group, other=127)
        half = half_of_scale(exponent.to(tl.int32))[:, :, None]
        # the lower half of a byte is the earlier column
        w = tl.join(mxfp4_values(codes & 15, half), mxfp4_values(codes >> 4, half)).to(DTYPE)
    elif FORMAT == _4_BIT:
        codes = _pairs(w_ptr, output, is_output, first, depth, w_row, GROUPS, SIZE)
        # The scales begin with those of the slot, the scales' scales with those of all slots where
        # blocks are numbered through.
        absmax = scales_of(
            scale_ptr - blocks_before,
            second_ptr,
            code2_ptr,
            offset_ptr,
            blocks_before + (output[:, None] * depth + in_group[None, :]) // BLOCK,
            is_group,
            SECOND,
            NESTED,
        )
        w = weight_of(codes, absmax, code_ptr, DTYPE, TABLE)
    else:
        group = output[:, None] * (depth // SIZE) + (in_group // SIZE)[None, :]
        w = gguf_values(
            w_ptr,
            tl.reshape(group, (OUTPUTS * GROUPS,)),
            tl.reshape(is_group, (OUTPUTS * GROUPS,)),
            SECOND,
            SIZE,
        ).to(DTYPE)
    return tl.reshape(w, (OUTPUTS, COLUMNS))
