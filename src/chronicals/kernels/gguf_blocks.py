"""Dequantisation of weights in the blocks of GGUF files.

Formats are those of ggml (``ggml-common.h`` and ``ggml-quants.c``):

    w[i] = scale · (code[i] − offset) − least        fp32, each operation rounded by itself, then once to the output's dtype

A row is whole blocks of consecutive elements. A block's bytes, where d and e are fp16 and j counts
groups of one scale:

    Q8_0   32 elements, 34 bytes     d, 32 codes of 8 bits, signed                            scale = d
    Q4_0   32 elements, 18 bytes     d, 16 bytes: element i low, element i + 16 high          scale = d, offset = 8
    Q4_K   256 elements, 144 bytes   d, e, 12 bytes of scales, 128 bytes of codes             scale = d·s[j], least = e·m[j]
    Q6_K   256 elements, 210 bytes   128 bytes of low halves, 64 of upper 2 bits, s[16], d    scale = d·s[j], offset = 32

Q4_K has groups of 32; s and m have 6 bits: the first four of each in the low bits of bytes 0 to 3
and 4 to 7, the others in the halves of bytes 8 to 11 and the upper 2 bits of bytes 0 to 7. Groups
2n and 2n + 1 are the halves of the bytes 32n to 32n + 31. Q6_K has groups of 16, and signed bytes
for s.

Reading a weight as 16 bits moves 3.06 (Q8_0), 2.56 (Q4_0, Q4_K) or 2.82 (Q6_K) bytes an element.
Output rows may be strided, so the weight can be part of a buffer with padding columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.launch import operator, runs_triton, tl, triton

GGUF_KINDS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Elements and bytes of a block, by ggml's name of the format."""

GGUF_GROUP_SIZE = {"Q8_0": 32, "Q4_0": 16, "Q4_K": 32, "Q6_K": 16}
"""Elements that share a scale and whose codes are in the same bits of consecutive bytes."""

GGUF_PROGRAM_ELEMENTS = 2048
"""Elements that a program dequantises."""


def dequantize_gguf(packed: Tensor, out: Tensor, kind: str) -> Tensor:
    """Dequantise a weight into ``out``, in one launch.

    Args:
        packed: uint8, the blocks of all rows, of any shape.
        out: ``[rows, columns]`` in fp32, bf16 or fp16, each row dense; rows may be strided.
        kind: one of ``GGUF_KINDS``.

    Returns:
        ``out``.

    Raises:
        ValueError: ``kind`` is unknown, or sizes do not fit.
    """
    if kind not in GGUF_KINDS:
        raise ValueError(f"kind={kind!r}: give one of {', '.join(GGUF_KINDS)}")
    (rows, columns) = out.shape
    (block, size) = GGUF_KINDS[kind]
    if (
        columns % block
        or packed.dtype != torch.uint8
        or packed.numel() != rows * columns // block * size
    ):
        raise ValueError(
            f"{packed.numel()} elements of {packed.dtype} are not {rows} x {columns} values in "
            f"{kind}: give uint8, {size} "
            f"bytes for each {block} of a row"
        )
    if columns > 1 and out.stride(1) != 1:
        raise ValueError(f"out has strides {out.stride()}: give one whose rows are dense")
    _dequantize(packed.reshape(-1), out, kind)
    return out


@operator("chronicals::dequantize_gguf", mutates=("out",))
def _dequantize(packed: Tensor, out: Tensor, kind: str) -> None:
    rows, columns = out.shape
    if not runs_triton(out):
        out.copy_(dequantize_gguf_reference(packed, (rows, columns), out.dtype, kind))
    elif rows * columns:
        size = GGUF_GROUP_SIZE[kind]
        groups = rows * columns // size
        a_program = GGUF_PROGRAM_ELEMENTS // size
        _dequantize_gguf_kernel[(triton.cdiv(groups, a_program),)](
            packed,
            out,
            groups,
            columns // size,
            out.stride(0),
            list(GGUF_KINDS).index(kind),
            a_program,
            size,
            # ggml rounds the product and the sum one after the other.
            enable_fp_fusion=False,
        )


@triton.jit
def _half(ptr, valid):
    """Load an fp16 that may begin at any byte; return it in fp32."""
    low = tl.load(ptr, mask=valid, other=0).to(tl.uint16)
    high = tl.load(ptr + 1, mask=valid, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(code):
    """Return the signed value of a byte, int32."""
    return code.to(tl.int32) - ((code.to(tl.int32) >> 7) << 8)


@triton.jit
def gguf_values(packed_ptr, group, valid, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Return the values of groups, fp32 ``[groups, SIZE]``.

    Args:
        packed_ptr: the blocks.
        group: positions of the groups, ``[groups]``.
        valid: which of them exist, ``[groups]``.
        KIND: the position in ``GGUF_KINDS``.
        SIZE: elements of a group.
    """
    element = tl.arange(0, SIZE)[None, :]
    mask = valid[:, None]
    if KIND == 0:
        at = packed_ptr + group.to(tl.int64) * 34
        values = (
            _signed(tl.load(at[:, None] + 2 + element, mask=mask, other=0)).to(tl.float32)
            * _half(at, valid)[:, None]
        )
    elif KIND == 1:
        at = packed_ptr + (group // 2).to(tl.int64) * 18
        half = group % 2
        code = (
            tl.load(at[:, None] + 2 + element, mask=mask, other=0).to(tl.int32)
            >> (4 * half)[:, None]
        )
        values = _half(at, valid)[:, None] * ((code & 15) - 8).to(tl.float32)
    elif KIND == 2:
        at = packed_ptr + (group // 8).to(tl.int64) * 144
        j = group % 8
        scales = at + 4 + j % 4
        late = j >= 4
        first = tl.load(scales, mask=valid, other=0).to(tl.int32)
        second = tl.load(scales + 4, mask=valid, other=0).to(tl.int32)
        third = tl.load(scales + 8, mask=valid & late, other=0).to(tl.int32)
        s = tl.where(late, (third & 15) | ((first >> 2) & 48), first & 63).to(tl.float32)
        m = tl.where(late, (third >> 4) | ((second >> 2) & 48), second & 63).to(tl.float32)
        scale = _half(at, valid) * s
        least = _half(at + 2, valid) * m
        code = (
            tl.load((at + 16 + j // 2 * 32)[:, None] + element, mask=mask, other=0).to(tl.int32)
            >> (4 * (j % 2))[:, None]
        )
        values = scale[:, None] * (code & 15).to(tl.float32) - least[:, None]
    else:
        at = packed_ptr + (group // 16).to(tl.int64) * 210
        j = group % 16
        half = j // 8
        quarter = j % 8 // 2
        low = tl.load((at + 64 * half + j % 4 * 16)[:, None] + element, mask=mask, other=0).to(
            tl.int32
        )
        high = tl.load(
            (at + 128 + 32 * half + j % 2 * 16)[:, None] + element, mask=mask, other=0
        ).to(tl.int32)
        low = (low >> (quarter // 2 * 4)[:, None]) & 15
        high = (high >> (2 * quarter)[:, None]) & 3
        scale = _half(at + 208, valid) * _signed(tl.load(at + 192 + j, mask=valid, other=0)).to(
            tl.float32
        )
        values = scale[:, None] * ((low | (high << 4)) - 32).to(tl.float32)
    return values


@triton.jit
def _dequantize_gguf_kernel(
    packed_ptr,
    out_ptr,
    groups,
    groups_a_row,
    stride,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Dequantise ``GROUPS`` groups of ``SIZE`` elements; ``KIND`` is the position in ``GGUF_KINDS``."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    valid = group < groups
    values = gguf_values(packed_ptr, group, valid, KIND, SIZE)
    row = group // groups_a_row
    place = out_ptr + row.to(tl.int64) * stride + (group - row * groups_a_row) * SIZE
    element = tl.arange(0, SIZE)[None, :]
    tl.store(place[:, None] + element, values.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def dequantize_gguf_reference(
    packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kind: str
) -> Tensor:
    """Compute ``dequantize_gguf`` in plain torch into a new tensor of ``shape`` and ``dtype``."""
    blocks = packed.reshape(-1, GGUF_KINDS[kind][1])
    if kind == "Q8_0":
        values = blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks, 0)
    elif kind == "Q4_0":
        codes = torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
        values = _halves(blocks, 0) * (codes.float() - 8)
    elif kind == "Q4_K":
        first, second, third = blocks[:, 4:16].split(4, 1)
        s = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1).float()
        m = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1).float()
        codes = blocks[:, 16:].view(-1, 4, 1, 32)
        codes = torch.cat([codes & 15, codes >> 4], 2).view(-1, 8, 32).float()
        scaled = (_halves(blocks, 0) * s)[:, :, None] * codes
        values = scaled - (_halves(blocks, 2) * m)[:, :, None]
    else:
        low = blocks[:, :128].view(-1, 2, 1, 64)
        high = blocks[:, 128:192].view(-1, 2, 1, 32)
        low = torch.cat([low & 15, low >> 4], 2).view(-1, 2, 4, 32)
        high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 2)
        scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
        values = scales[:, :, None] * ((low | high << 4).view(-1, 16, 16).float() - 32)
    return values.to(dtype).view(shape)


def _halves(blocks: Tensor, place: int) -> Tensor:
    """Return the fp16 at byte ``place`` of each block, as fp32 ``[blocks, 1]``."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()
