"""The dense values of some slots of a stack, in one launch.

    out[i, n, k] = W[records[i], n, k]        in any packed format of ``expert_stacks.py`` but FP8

Experts that are streamed come in waves, whose weights a product of many rows reads dense. Each slot by
itself would be a launch, and with 128 experts of 1.6 M values those take longer than the values.

Values are those of the format's own dequantisation, bit by bit. Bytes: codes and scales read once, 2 a
value written.

Shapes: m records, N outputs, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.expert_stacks import (
    FORMAT_4_BIT,
    FORMAT_16_BIT,
    FORMAT_FP8,
    FORMAT_GGUF,
    ExpertStack,
)
from chronicals.kernels.launch import runs_triton, tl, triton
from chronicals.kernels.nf4 import CODE_VALUES, code_of
from chronicals.kernels.nf4_product import table_for
from chronicals.kernels.weight_tile import weight_tile

OUTPUTS = 32
"""Outputs of a program."""

COLUMNS = 128
"""Columns of a program; those of ``GGUF_COLUMNS`` in GGUF blocks, whose bytes are loaded one by one."""

GGUF_COLUMNS = 64


@triton.jit
def _dense_slots_kernel(
    # read: codes, scales, scales' scales, what codes of both stand for, slots
    w_ptr,
    scale_ptr,
    second_ptr,
    code2_ptr,
    offset_ptr,
    code_ptr,
    records_ptr,
    # written
    out_ptr,
    # N, K and strides of ``Layout``
    outputs,
    depth,
    w_slot,
    w_row,
    w_column,
    scale_slot,
    scale_row,
    second_slot,
    blocks_before,
    # of ``Layout``
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    NESTED: tl.constexpr,
    # look-ups of codes, tile
    TABLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the values of some outputs and columns of a slot."""
    number = tl.program_id(2).to(tl.int64)
    slot = tl.load(records_ptr + number).to(tl.int64)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    first = tl.program_id(0) * COLUMNS
    w = weight_tile(
        w_ptr + slot * w_slot,
        scale_ptr + slot * scale_slot,
        second_ptr + slot * second_slot,
        code2_ptr,
        offset_ptr,
        code_ptr,
        output,
        is_output,
        first,
        depth,
        w_row,
        w_column,
        scale_row,
        slot * blocks_before,
        FORMAT,
        BLOCK,
        SECOND,
        NESTED,
        out_ptr.dtype.element_ty,
        TABLE,
        OUTPUTS,
        COLUMNS,
    )
    column = first + tl.arange(0, COLUMNS)
    tl.store(
        out_ptr + (number * outputs + output)[:, None] * depth + column[None, :],
        w,
        mask=is_output[:, None] & (column < depth)[None, :],
    )


def dense_slots(stack: ExpertStack, records: Tensor, out: Tensor) -> Tensor:
    """Write the dense values of some slots.

    Args:
        stack: weights in a packed format, but not FP8.
        records: int32 ``[m]``, the slots, on the device of the stack.
        out: contiguous ``[m, N, K]``, on the device of the stack.

    Returns:
        ``out``.

    Raises:
        ValueError: the format is another one, or the shape does not fit.
    """
    layout = stack.layout
    if layout.format in (FORMAT_16_BIT, FORMAT_FP8):
        raise ValueError("the stack is in 16 bits or FP8: give one in a packed format")
    expected = len(records), layout.outputs, layout.columns
    if out.shape != expected or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)}: expected contiguous {expected}")
    if not len(records):
        return out
    if not runs_triton(out):
        return dense_slots_reference(stack, records, out)
    tensors = stack.tensors
    columns = GGUF_COLUMNS if layout.format == FORMAT_GGUF else COLUMNS
    code = list(CODE_VALUES)[layout.code]
    has_table = layout.format == FORMAT_4_BIT and out.dtype != torch.float32
    grid = (
        triton.cdiv(layout.columns, columns),
        triton.cdiv(layout.outputs, OUTPUTS),
        len(records),
    )
    _dense_slots_kernel[grid](
        *tensors,
        *[tensors[0]] * (5 - len(tensors)),
        code_of(code, out.device),
        records,
        out,
        layout.outputs,
        layout.columns,
        layout.slot,
        layout.row,
        layout.column,
        layout.scale_slot,
        layout.scale_row,
        layout.second_slot,
        layout.blocks_before,
        layout.format,
        layout.block,
        layout.second,
        bool(layout.nested),
        table_for(out, code) if has_table else "",
        OUTPUTS,
        columns,
        # nested scales are those of ``dequantize_4bit`` and values of GGUF are ggml's, bit by bit
        enable_fp_fusion=False,
    )
    return out


def dense_slots_reference(stack: ExpertStack, records: Tensor, out: Tensor) -> Tensor:
    """Compute ``dense_slots`` in plain torch, slot by slot."""
    for matrix, slot in zip(out, records.tolist()):
        matrix.copy_(stack.dense(slot, out.dtype))
    return out
