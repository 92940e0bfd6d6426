"""Dequantisation of weights in MXFP4: E2M1 codes in blocks of 32 with an E8M0 scale.

This is how gpt-oss ships them (OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 5.4.1):

    w[32 b + i] = v(code[32 b + i]) · 2^(scale[b] − 127)      fp32, rounded once to the output's dtype
    v           = 0, ½, 1, 1½, 2, 3, 4, 6, and the same below zero     bit 3 is the sign

A byte holds two codes, the first in its lower half. Rows are whole blocks, so that the codes of a
row are ``K / 2`` consecutive bytes and its scales ``K / 32``. A scale of 255, which the format
calls NaN, is 2¹²⁸ here, as in transformers (``integrations/mxfp4.py``).

To read a weight as 16 bits moves 0.53 bytes in and 2 out an element. Rows that are written may lie
apart, so that the weight can stand in a buffer with padding columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chronicals.kernels.launch import operator, runs_triton, tl, triton

MXFP4_BLOCK = 32
"""Elements that share a scale."""

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are the same below zero."""

_BLOCKS_A_PROGRAM = 64


def dequantize_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Write a weight's values, by one launch.

    Args:
        codes: uint8, ``n · K / 2`` bytes of any shape, dense.
        scales: uint8, ``n · K / 32`` bytes of any shape, dense.
        out: ``[n, K]`` in fp32, bf16 or fp16, each row dense; rows may lie apart.

    Returns:
        ``out``.

    Raises:
        ValueError: sizes do not fit.
    """
    rows, columns = out.shape
    sizes = codes.numel(), scales.numel()
    if columns % MXFP4_BLOCK or sizes != (rows * columns // 2, rows * columns // MXFP4_BLOCK):
        raise ValueError(
            f"{sizes[0]} bytes of codes and {sizes[1]} scales are not {rows} x {columns} values in "
            f"MXFP4: give a byte for two values and a scale for {MXFP4_BLOCK} of a row"
        )
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}, scales {scales.dtype}: give uint8")
    if columns > 1 and out.stride(1) != 1:
        raise ValueError(f"out has strides {out.stride()}: give one whose rows are dense")
    _dequantize(codes.reshape(-1), scales.reshape(-1), out)
    return out


@operator("chronicals::dequantize_mxfp4", mutates=("out",))
def _dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    if not runs_triton(out):
        out.copy_(dequantize_mxfp4_reference(codes, scales, tuple(out.shape), out.dtype))
    elif scales.numel():
        grid = (triton.cdiv(scales.numel(), _BLOCKS_A_PROGRAM),)
        _dequantize_mxfp4_kernel[grid](
            codes,
            scales,
            out,
            scales.numel(),
            out.shape[1] // MXFP4_BLOCK,
            out.stride(0),
            _BLOCKS_A_PROGRAM,
        )


@triton.jit
def mxfp4_values(code, half):
    """Return the values of codes, fp32; ``half`` is half the scale of each, by broadcasting."""
    # Twice the magnitude is a whole number: 0, 1, and (2 or 3) shifted by the exponent less one.
    magnitude = code & 7
    shifted = (2 + (magnitude & 1)) << (tl.maximum(magnitude >> 1, 1) - 1)
    twice = tl.where(magnitude < 2, magnitude, shifted).to(tl.float32)
    return twice * tl.where(code >= 8, -1.0, 1.0) * half


@triton.jit
def half_of_scale(exponent):
    """Return half the scale of an exponent in E8M0, int32, as fp32."""
    # The bits of 2^(exponent − 128): finite for 255, and for 0 and 1 no normal number.
    subnormal = 0x00200000 << tl.minimum(exponent, 1)
    return tl.where(exponent < 2, subnormal, (exponent - 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize_mxfp4_kernel(
    codes_ptr, scales_ptr, out_ptr, blocks, blocks_a_row, stride, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, 32)[None, :]
    there = block < blocks
    mask = there[:, None]
    byte = tl.load(codes_ptr + block[:, None] * 16 + element // 2, mask=mask, other=0)
    code = (byte.to(tl.int32) >> (4 * (element % 2))) & 15
    half = half_of_scale(tl.load(scales_ptr + block, mask=there, other=127).to(tl.int32))
    row = block // blocks_a_row
    place = out_ptr + row * stride + (block - row * blocks_a_row) * 32
    values = mxfp4_values(code, half[:, None])
    tl.store(place[:, None] + element, values.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_mxfp4_reference(
    codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """``dequantize_mxfp4`` in plain torch, into a new tensor of ``shape`` and ``dtype``."""
    magnitudes = 2 * torch.tensor(MXFP4_VALUES, device=codes.device)
    twice = torch.cat([magnitudes, -magnitudes])
    pairs = codes.reshape(-1, MXFP4_BLOCK // 2, 1)
    codes_of_blocks = torch.cat([pairs & 15, pairs >> 4], 2).flatten(1)
    exponents = scales.reshape(-1, 1).to(torch.int32)
    # The bits of half the scale, as above.
    subnormal = 0x00200000 << exponents.clamp(max=1)
    bits = torch.where(exponents < 2, subnormal, (exponents - 1) << 23).to(torch.int32)
    return (twice[codes_of_blocks.long()] * bits.view(torch.float32)).to(dtype).view(shape)
