"""Products of few rows with a weight in GGUF blocks, which is dequantised inside the product.

    y[r, n] = Σ_k x[r, k] · W[n, k]        W as of ``gguf_blocks.py``, rounded to the dtype of x

As ``nf4_product.py`` it spares the dense values, which cost 4 bytes a value where blocks have 0.56
(Q4_0, Q4_K) to 1.06 (Q8_0). Blocks begin at any byte, so their bytes are loaded one by one.

Shapes: R rows, at most ``MOST_ROWS``; K columns, whole blocks; N outputs. x and y are bf16 or fp16,
sums are fp32. Bytes that must move: those of the blocks and 2 · R · (K + N). The columns are split
among programs where N is too small to fill a card; the splits are summed in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.gguf_blocks import (
    GGUF_GROUP_SIZE,
    GGUF_KINDS,
    dequantize_gguf_reference,
    gguf_values,
)
from chronicals.kernels.launch import in_rows, multiplied_in, operator, tl, triton
from chronicals.kernels.nf4_product import few_rows_launch, multiplies_few_rows, store_tile
from chronicals.kernels.products import linear

OUTPUTS_AT_ONCE = 64
COLUMNS_AT_ONCE = 64
"""Outputs of a program, those of ``nf4_product.py``, for which splits are chosen; and columns that
are dequantised at once: two groups of Q8_0 or four of Q6_K. Not measured on a card.
"""


FASTER_ROWS = {"Q8_0": 16, "Q4_K": 64}
"""Rows up to which this is faster than to dequantise the weight and to multiply; of other kinds none.

On an H200 a layer of an 8B takes 1.3 times as long dequantised for 1 and for 8 rows of Q8_0, 0.8 times
for 64; of Q4_K 1.3 and 1.2 times; of Q4_0 0.9 times and of Q6_K half as long, which have the most
instructions a value (``benchmarks/NOTES.md``).
"""


@triton.jit
def _gguf_product_kernel(
    # read
    x_ptr,
    packed_ptr,
    # written: y, its sums over each split, and how many splits of a tile are done
    out_ptr,
    parts_ptr,
    arrived_ptr,
    # sizes, and the stride of rows
    rows,
    outputs,
    columns,
    x_row,
    # options: the position in ``GGUF_KINDS``, elements of a group, dtype of the product
    FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    # tile, and programs of a tile
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    GROUPS: tl.constexpr = COLUMNS // SIZE
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    groups = columns // SIZE
    each = tl.cdiv(tl.cdiv(columns, SPLITS), COLUMNS) * COLUMNS
    begin = split * each
    end = tl.minimum(begin + each, columns)

    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(begin, end, COLUMNS):
        number = first // SIZE + tl.arange(0, GROUPS)
        group = output[:, None] * groups + number[None, :]
        valid = is_output[:, None] & (number < end // SIZE)[None, :]
        values = gguf_values(
            packed_ptr,
            tl.reshape(group, (OUTPUTS * GROUPS,)),
            tl.reshape(valid, (OUTPUTS * GROUPS,)),
            FORMAT,
            SIZE,
        )
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * x_row + (first + column)[None, :],
            mask=(row < rows)[:, None] & (first + column < end)[None, :],
            other=0.0,
        )
        weight = tl.reshape(values.to(x.dtype), (OUTPUTS, COLUMNS))
        total = tl.dot(x.to(KIND), tl.trans(weight.to(KIND)), total)

    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    exists = (row < rows)[:, None] & is_output[None, :]
    store_tile(total, place, exists, out_ptr, parts_ptr, arrived_ptr, rows * outputs, SPLITS)


@operator("chronicals::gguf_product")
def _gguf_product(
    x: Tensor, packed: Tensor, outputs: int, kind: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Launch the product."""
    out = _output(x, packed, outputs, kind, dtype)
    rows, columns = x.shape
    if not out.numel():
        return out
    launch = few_rows_launch(x, outputs)
    _gguf_product_kernel[triton.cdiv(outputs, OUTPUTS_AT_ONCE), launch.splits](
        x,
        packed,
        out,
        *launch.sums(out),
        rows,
        outputs,
        columns,
        x.stride(0),
        list(GGUF_KINDS).index(kind),
        GGUF_GROUP_SIZE[kind],
        multiplied_in(x.dtype),
        launch.rows,
        OUTPUTS_AT_ONCE,
        COLUMNS_AT_ONCE,
        launch.splits,
        num_warps=4,
        num_stages=2,
        # ggml rounds the product and the sum one after the other.
        enable_fp_fusion=False,
    )
    return out


@torch.library.register_fake(_gguf_product)
def _output(
    x: Tensor, packed: Tensor, outputs: int, kind: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Allocate the output."""
    return x.new_empty((x.shape[0], outputs), dtype=dtype)


def gguf_product(
    x: Tensor, packed: Tensor, outputs: int, kind: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``x Wᵀ``, ``[..., N]``; without a gradient.

    Rows that ``multiplies_few_rows`` does not take go to the reference.

    Args:
        x: ``[..., K]``.
        packed: uint8, the blocks of W ``[N, K]``, of any shape.
        outputs: N.
        kind: one of ``GGUF_KINDS``.
        dtype: of the result, that of x or fp32; by default that of x.

    Raises:
        ValueError: ``kind`` is unknown, or sizes do not fit.
    """
    if kind not in GGUF_KINDS:
        raise ValueError(f"kind={kind!r}: give one of {', '.join(GGUF_KINDS)}")
    block, size = GGUF_KINDS[kind]
    columns = x.shape[-1]
    if columns % block or packed.numel() != outputs * columns // block * size:
        raise ValueError(
            f"{packed.numel()} bytes are not {outputs} x {columns} values in {kind}: give {size} "
            f"bytes for each {block} of a row"
        )
    if not multiplies_few_rows(x, block):
        return gguf_product_reference(x, packed, outputs, kind, dtype)
    y: Tensor = _gguf_product(in_rows(x), packed.reshape(-1), outputs, kind, dtype)
    return y.view(*x.shape[:-1], outputs)


def gguf_product_reference(
    x: Tensor, packed: Tensor, outputs: int, kind: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``gguf_product`` in plain torch."""
    weight = dequantize_gguf_reference(packed, (outputs, x.shape[-1]), x.dtype, kind)
    return linear(x, weight, dtype)
