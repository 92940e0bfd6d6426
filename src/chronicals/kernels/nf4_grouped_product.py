"""Grouped products of few rows with experts in 4 bits, which are dequantised inside the product.

    y_s = x_s W[e_s]ᵀ + b[e_s]        W [E, N, K] as of ``nf4.py``, rounded to the dtype of x

A decode step sends few tokens to a mixture. Its experts that no token chose are not read, and those
that are chosen once a tile of rows; through dense weights all E are dequantised first, 2.5 bytes
written and read a value. It is the kernel of ``nf4_product.py`` with the rows of an expert, which
are gathered from tokens, in place of all rows (Frantar et al., 2024, MARLIN, arXiv 2408.11743).

Shapes: T tokens, at most ``MOST_ROWS``; S pairs of token and expert, E experts, K columns, whole
blocks of scales; N outputs. x and y are bf16 or fp16, sums are fp32, in one order. Bytes that must
move: those of the chosen experts, N · K · (1/2 + bytes of a scale / block) each, and 2 · S · (K + N).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chronicals.kernels.expert_dispatch import Dispatch
from chronicals.kernels.grouped_product import grouped_product_reference
from chronicals.kernels.launch import (
    in_rows,
    multiplied_in,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
)
from chronicals.kernels.nf4 import Scales, check_codes, code_of, dequantize_4bit_reference
from chronicals.kernels.nf4_product import (
    COLUMNS_AT_ONCE,
    LEAST_ROWS,
    MOST_ROWS,
    OUTPUTS_AT_ONCE,
    scales_of,
    table_for,
    weight_of,
)


@triton.jit
def _nf4_grouped_kernel(
    # read: rows, codes, scales, what the codes of both stand for, bias
    x_ptr,
    packed_ptr,
    absmax_ptr,
    second_ptr,
    code2_ptr,
    offset_ptr,
    code_ptr,
    bias_ptr,
    # written
    y_ptr,
    # read: the dispatch (expert_dispatch.py)
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    # sizes: tiles, outputs, bytes of codes of an output, experts of a token, and strides of rows
    tiles,
    outputs,
    pairs,
    each,
    x_row,
    bias_row,
    experts,
    # options
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK2: tl.constexpr,
    NESTED: tl.constexpr,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    # rows of a tile of the dispatch, and the tile that is multiplied at once
    TALL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Multiply the rows of a tile of the dispatch by some outputs of its expert."""
    HALF: tl.constexpr = COLUMNS // 2
    GROUPS: tl.constexpr = COLUMNS // SIZE
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert < experts:
        first = tl.load(tiles_ptr + tiles + tile)
        end = tl.minimum(tl.load(bounds_ptr + expert + 1), first + TALL)
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < outputs
        column = tl.arange(0, COLUMNS)
        byte = tl.arange(0, HALF)
        group = tl.arange(0, GROUPS) * (SIZE // 2)
        at = (expert.to(tl.int64) * outputs + output) * pairs
        for begin in range(first, end, ROWS):
            row = begin + tl.arange(0, ROWS)
            # Rows beyond the tile's end repeat its last one and are not stored.
            taken = tl.minimum(row, end - 1)
            source = tl.load(order_ptr + taken) // each if GATHERS else taken
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for pair in range(0, pairs, HALF):
                packed = tl.load(
                    packed_ptr + at[:, None] + (pair + byte)[None, :],
                    mask=is_output[:, None] & (pair + byte < pairs)[None, :],
                    other=0,
                )
                absmax = scales_of(
                    absmax_ptr,
                    second_ptr,
                    code2_ptr,
                    offset_ptr,
                    (at[:, None] + (pair + group)[None, :]) // (BLOCK // 2),
                    is_output[:, None] & (pair + group < pairs)[None, :],
                    BLOCK2,
                    NESTED,
                )
                x = tl.load(
                    x_ptr + source.to(tl.int64)[:, None] * x_row + (2 * pair + column)[None, :],
                    mask=(2 * pair + column < 2 * pairs)[None, :],
                    other=0.0,
                )
                packed = tl.reshape(packed, (OUTPUTS, GROUPS, SIZE // 2))
                weight = weight_of(packed, absmax, code_ptr, x.dtype, TABLE)
                weight = tl.reshape(weight, (OUTPUTS, COLUMNS))
                total = tl.dot(x.to(KIND), tl.trans(weight.to(KIND)), total)
            if HAS_BIAS:
                bias = tl.load(
                    bias_ptr + expert.to(tl.int64) * bias_row + output, mask=is_output, other=0.0
                )
                total += bias.to(tl.float32)[None, :]
            tl.store(
                y_ptr + row.to(tl.int64)[:, None] * outputs + output[None, :],
                total.to(y_ptr.dtype.element_ty),
                mask=(row < end)[:, None] & is_output[None, :],
            )


def _rows_at_once(pairs: int, experts: int, tall: int) -> int:
    """Return the rows that are multiplied at once: twice the mean of an expert.

    An expert with more is dequantised again for each such number of rows.

    Args:
        pairs: S.
        experts: E.
        tall: rows of a tile of the dispatch.
    """
    return min(tall, max(LEAST_ROWS, next_power_of_2(2 * -(-pairs // experts))))


@operator("chronicals::nf4_grouped_product")
def _product(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: Sequence[Tensor],
    block2: int,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    tall: int,
    gathers: bool,
    outputs: int,
    bias: Tensor | None,
    block: int,
    code: str,
) -> Tensor:
    """Launch the product. ``nested`` are ``absmax2``, ``code2`` and ``offset``, or empty."""
    pairs = len(order)
    y = x.new_empty((pairs, outputs))
    most = tiles.shape[1]
    experts = len(bounds) - 1
    # a tile in use has a row, so that no more are in use than there are rows
    grid = triton.cdiv(outputs, OUTPUTS_AT_ONCE), min(most, pairs)
    _nf4_grouped_kernel[grid](
        x,
        packed,
        absmax,
        *(nested or [absmax] * 3),
        code_of(code, x.device),
        bias,
        y,
        order,
        bounds,
        tiles,
        most,
        outputs,
        x.shape[1] // 2,
        each,
        x.stride(0),
        0 if bias is None else bias.stride(0),
        experts,
        gathers,
        bias is not None,
        block,
        block2,
        bool(nested),
        multiplied_in(x.dtype),
        table_for(x, code),
        tall,
        _rows_at_once(pairs, experts, tall),
        OUTPUTS_AT_ONCE,
        COLUMNS_AT_ONCE,
        min(block, COLUMNS_AT_ONCE),
        num_warps=4,
        num_stages=3,
        # nested scales are those of ``dequantize_4bit``, bit by bit
        enable_fp_fusion=False,
    )
    return y


@torch.library.register_fake(_product)
def _(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: Sequence[Tensor],
    block2: int,
    order: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    each: int,
    tall: int,
    gathers: bool,
    outputs: int,
    bias: Tensor | None,
    block: int,
    code: str,
) -> Tensor:
    return x.new_empty((len(order), outputs))


def multiplies_few_tokens(x: Tensor, to: Dispatch, block: int = 64) -> bool:
    """Return whether the kernel takes these rows.

    They are 16 bit, on a card, of at most ``MOST_ROWS`` tokens, and a row of the weight has whole
    blocks.

    Args:
        x: ``[S, K]`` or ``[T, K]``.
        to: the dispatch of the rows.
        block: elements of the weight that share a scale.
    """
    is_few = 0 < len(to.order_S) <= MOST_ROWS * to.each
    is_16_bit = x.dtype in (torch.bfloat16, torch.float16)
    return is_few and is_16_bit and x.shape[1] % block == 0 and runs_triton(x)


def nf4_grouped_product(
    x: Tensor,
    packed: Tensor,
    scales: Scales,
    to: Dispatch,
    outputs: int,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    block: int = 64,
    code: str = "nf4",
) -> Tensor:
    """Multiply each row with the weight of its expert; without a gradient.

    Rows that ``multiplies_few_tokens`` does not take go to the reference.

    Args:
        x: ``[S, K]`` sorted by expert, or ``[T, K]`` if ``of_tokens``.
        packed: uint8, two codes a byte, of W ``[E, N, K]``.
        scales: scales of the weight's blocks.
        to: the dispatch of the rows.
        outputs: N.
        of_tokens: gather the rows of x from tokens.
        bias: ``[E, N]``.
        block: elements that share a scale.
        code: "nf4" or "fp4".

    Returns:
        ``[S, N]`` in the dtype of x.

    Raises:
        ValueError: sizes do not fit.
    """
    check_codes(packed, scales, to.experts * outputs, x.shape[-1], block, code)
    rows = len(to.order_S) // to.each if of_tokens else len(to.order_S)
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(f"x is {tuple(x.shape)}: expected [{rows}, K]")
    if not multiplies_few_tokens(x, to, block):
        return nf4_grouped_product_reference(
            x, packed, scales, to, outputs, of_tokens, bias, block, code
        )
    of_scales = (scales.absmax2, scales.code2, scales.offset)
    y: Tensor = _product(
        in_rows(x),
        packed.view(-1),
        scales.absmax,
        [tensor for tensor in of_scales if tensor is not None],
        scales.block2,
        to.order_S,
        to.bounds,
        to.tiles,
        to.each,
        to.rows,
        of_tokens,
        outputs,
        bias,
        block,
        code,
    )
    return y


def nf4_grouped_product_reference(
    x: Tensor,
    packed: Tensor,
    scales: Scales,
    to: Dispatch,
    outputs: int,
    of_tokens: bool = False,
    bias: Tensor | None = None,
    block: int = 64,
    code: str = "nf4",
) -> Tensor:
    """Compute ``nf4_grouped_product`` in plain torch."""
    shape = to.experts * outputs, x.shape[1]
    weight = dequantize_4bit_reference(packed, scales, shape, x.dtype, block, code)
    return grouped_product_reference(x, weight.view(to.experts, outputs, -1), to, of_tokens, bias)
