"""4-bit weights in bitsandbytes' format: 16 values times a scale for each block.

QLoRA (Dettmers et al., 2023), section 3:

    absmax[b] = max |w| over block b of consecutive elements           fp32
    code[i]   = the nearest of CODE_VALUES["nf4"] to w[i] / absmax[b]  two in a byte, the first in the upper half
    w[i]      ≈ CODE_VALUES[…][code[i]] · absmax[b]                    fp32, rounded once to the output's dtype

A block is 32 to 4096 elements of the flattened weight; the last one may be shorter. The scales may
be quantized too ("double quantization", ibid.): to 8 bits in blocks of 256, after subtraction of
their mean:

    absmax[b] ≈ DYNAMIC[q[b]] · absmax2[b / 256] + offset

so that a weight takes 4 + 8/64 + 32/(64·256) = 4.127 bits with blocks of 64, and reading it as 16
bits moves 2.52 bytes an element. "nf4" has quantiles of a normal distribution, "fp4" a sign, two
bits of exponent and one of mantissa; "fp4" is quantized in plain torch only. Dequantization can
write strided rows, so the weight can be part of a buffer with padding columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from chronicals.kernels.launch import operator, runs_triton, tl, triton

CODE_VALUES = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
"""The value of each code, by format (QLoRA, appendix E; FP4 divided by its largest value)."""

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of elements that may share a scale."""

SCALE_BLOCK = 256
"""Scales in a block of quantized scales."""

MIN_BLOCK_AMAX = 1e-38
"""Divisor of blocks of zeros."""

QUANTIZE_ELEMENTS = 1024
"""Elements that a program quantizes."""

# Plain torch makes some twenty bytes of temporaries for each element.
PIECE_ELEMENTS = 1 << 24
"""Elements that plain torch takes at a time; a multiple of all block sizes."""

# 32 elements a thread: their codes are one load of 16 bytes.
DEQUANTIZE_ELEMENTS = 4096
"""Elements that a program dequantizes."""


@dataclass(frozen=True)
class Scales:
    """The scales of a weight's blocks.

    Attributes:
        absmax: fp32 ``[blocks]``, or uint8 codes if the scales are quantized.
        absmax2: fp32 ``[blocks / block2]``, the largest magnitude of each block of scales after
            subtraction of the offset; None if they are not quantized.
        code2: fp32 ``[256]``, the values of the scales' codes.
        offset: fp32, one element, the mean that was subtracted from the scales.
        block2: scales in a block of scales.
    """

    absmax: Tensor
    absmax2: Tensor | None = None
    code2: Tensor | None = None
    offset: Tensor | None = None
    block2: int = SCALE_BLOCK

    @property
    def nested(self) -> bool:
        """True if the scales are quantized."""
        return self.absmax2 is not None

    def plain(self) -> Tensor:
        """Return the scales as fp32 ``[blocks]``."""
        if self.absmax2 is None or self.code2 is None or self.offset is None:
            return self.absmax
        per_block = self.absmax2.repeat_interleave(self.block2)[: self.absmax.numel()]
        return self.code2[self.absmax.int()] * per_block + self.offset


@cache
def code_of(name: str, device: torch.device) -> Tensor:
    """Return the values of a format's codes, fp32 ``[16]``."""
    return torch.tensor(CODE_VALUES[name], dtype=torch.float32, device=device)


@cache
def _bounds(device: torch.device) -> Tensor:
    """Return the midpoints between the values of NF4, fp32 ``[15]``; a midpoint gets the lower code."""
    code = code_of("nf4", device)
    return (code[:-1] + code[1:]) / 2


@cache
def _guesses(device: torch.device) -> Tensor:
    """Return a table for ``_nearest``, fp32 ``[2, 64]``.

    Column n describes the interval [(n − 17) / 16, (n − 16) / 16): the number of bounds below it,
    which is the code at its beginning, and the one bound that lies inside, or 2 if there is none.
    No bound is near the end of an interval, so rounding does not matter.
    """
    ends = (torch.arange(64) - 17) / 16
    bounds = _bounds(torch.device("cpu"))
    below = (bounds < ends[:, None]).sum(1)
    inside = torch.cat([bounds, torch.tensor([2.0])])[below]
    return torch.stack([below.float(), torch.where(inside < ends + 1 / 16, inside, 2.0)]).to(device)


@cache
def dynamic_code(device: torch.device) -> Tensor:
    """Return the values of the signed dynamic 8-bit code, fp32 ``[256]``, ascending.

    Each decade has twice as many values as the one below (Dettmers et al., 2022, section 2.1).
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


# --- quantize ---


def quantize_nf4(weight: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Quantize a weight to NF4.

    Args:
        weight: fp32, bf16 or fp16, of any shape.
        block: elements that share a scale, one of ``BLOCK_SIZES``.

    Returns:
        Codes, two in a byte, uint8 ``[⌈elements / 2⌉]``, and scales, fp32 ``[⌈elements / block⌉]``.

    Raises:
        ValueError: ``block`` is not one of ``BLOCK_SIZES``, or the weight has another dtype.
    """
    if block not in BLOCK_SIZES:
        raise ValueError(f"block={block}: give one of {', '.join(map(str, BLOCK_SIZES))}")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weight is {weight.dtype}; give float32, bfloat16 or float16")
    flat = weight.detach().reshape(-1)
    if flat.is_meta:  # sizes alone, without an operation a piece
        return (
            flat.new_empty(-(-flat.numel() // 2), dtype=torch.uint8),
            flat.new_empty(-(-flat.numel() // block), dtype=torch.float32),
        )
    if not runs_triton(flat):
        codes, scales = zip(
            *(quantize_nf4_reference(piece, block) for piece in flat.split(PIECE_ELEMENTS))
        )
        return torch.cat(codes), torch.cat(scales)
    count = flat.numel()
    packed = torch.empty(-(-count // 2), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(-(-count // block), dtype=torch.float32, device=flat.device)
    blocks = max(1, QUANTIZE_ELEMENTS // block)
    if count:
        _quantize_kernel[(triton.cdiv(absmax.numel(), blocks),)](
            flat,
            packed,
            absmax,
            _guesses(flat.device),
            count,
            packed.numel(),
            MIN_BLOCK_AMAX,
            blocks,
            block,
            enable_fp_fusion=False,
        )
    return packed, absmax


@triton.jit
def _quantize_kernel(
    x_ptr,
    packed_ptr,
    absmax_ptr,
    guesses_ptr,
    count,
    pairs,
    SMALLEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(x), axis=1)
    tl.store(absmax_ptr + block, absmax, mask=block * SIZE < count)
    divisor = tl.maximum(absmax, tl.full((BLOCKS,), SMALLEST, tl.float32))
    scale = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), divisor)[:, None]
    first, second = tl.split(tl.reshape(_nearest(x * scale, guesses_ptr), (BLOCKS, SIZE // 2, 2)))
    pair = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    tl.store(packed_ptr + pair, (first * 16 + second).to(tl.uint8), mask=pair < pairs)


@triton.jit
def _nearest(value, guesses_ptr):
    """Return the codes, as fp32, of values from -1 to 1: a guess by the interval, one comparison."""
    # fp32 has no fractions above 2²³, so the sum's low bits are the interval's number.
    interval = (value * 16 + 16.5 + 8388608.0).to(tl.int32, bitcast=True) & 63
    guess = tl.load(guesses_ptr + interval)
    bound = tl.load(guesses_ptr + 64 + interval)
    return guess + (value > bound).to(tl.float32)


def quantize_nf4_reference(weight: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_nf4`` in plain torch."""
    flat = weight.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(1) if blocks.numel() else flat.new_empty(0)
    scaled = blocks * (1.0 / absmax.clamp(min=MIN_BLOCK_AMAX)).unsqueeze(1)
    codes = torch.bucketize(scaled.reshape(-1)[: flat.numel()], _bounds(flat.device)).to(
        torch.uint8
    )
    zero = torch.bucketize(flat.new_zeros(flat.numel() % 2), _bounds(flat.device)).to(torch.uint8)
    pairs = torch.cat([codes, zero]).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], absmax


def quantize_fp4(weight: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Quantize a weight to FP4 in plain torch; arguments and results are as of ``quantize_nf4``.

    Raises:
        ValueError: ``block`` is not one of ``BLOCK_SIZES``.
    """
    if block not in BLOCK_SIZES:
        raise ValueError(f"block={block}: give one of {', '.join(map(str, BLOCK_SIZES))}")
    flat = weight.detach().reshape(-1)
    values, order = code_of("fp4", flat.device)[:8].sort()  # a code's upper bit is the sign
    packed = []
    scales = []
    for piece in flat.split(PIECE_ELEMENTS):
        count = piece.numel()
        blocks = torch.nn.functional.pad(piece.float(), (0, -count % block)).view(-1, block)
        absmax = blocks.abs().amax(1)
        scaled = blocks * (1.0 / absmax.clamp(min=MIN_BLOCK_AMAX)).unsqueeze(1)
        nearest = torch.bucketize(scaled.abs().reshape(-1), (values[:-1] + values[1:]) / 2)
        codes = order[nearest] + 8 * (scaled.reshape(-1) < 0)
        pairs = codes[: count + count % 2].to(torch.uint8).view(-1, 2)
        packed.append(pairs[:, 0] << 4 | pairs[:, 1])
        scales.append(absmax)
    return torch.cat(packed), torch.cat(scales)


def quantize_scales(absmax: Tensor) -> Scales:
    """Quantize scales to 8 bits in blocks of ``SCALE_BLOCK``."""
    offset = absmax.mean()
    code = dynamic_code(absmax.device)
    centred = absmax - offset
    blocks = torch.nn.functional.pad(centred, (0, -centred.numel() % SCALE_BLOCK)).view(
        -1, SCALE_BLOCK
    )
    largest = blocks.abs().amax(1)
    scaled = blocks * (1.0 / largest.clamp(min=MIN_BLOCK_AMAX)).unsqueeze(1)
    bounds = (code[:-1] + code[1:]) / 2
    codes = torch.bucketize(scaled.reshape(-1)[: centred.numel()], bounds).to(torch.uint8)
    return Scales(codes, largest, code, offset)


# --- dequantize ---


def check_codes(
    packed: Tensor, scales: Scales, rows: int, columns: int, block: int, code: str
) -> None:
    """Check that codes and scales are those of a weight ``[rows, columns]``.

    Raises:
        ValueError: sizes do not fit, or the code or the size of blocks is not known.
    """
    count = rows * columns
    if code not in CODE_VALUES or block not in BLOCK_SIZES:
        codes = ", ".join(CODE_VALUES)
        blocks = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"code={code!r}, block={block}: give one of {codes} and one of {blocks}")
    if packed.numel() != -(-count // 2) or scales.absmax.numel() != -(-count // block):
        raise ValueError(
            f"{packed.numel()} bytes and {scales.absmax.numel()} scales are not those of {rows} x "
            f"{columns} values in blocks of {block}"
        )


def dequantize_4bit(
    packed: Tensor, scales: Scales, out: Tensor, block: int = 64, code: str = "nf4"
) -> Tensor:
    """Dequantize a weight into ``out``, in one launch.

    Args:
        packed: uint8, two codes a byte.
        scales: scales of the weight's blocks.
        out: ``[rows, columns]`` in fp32, bf16 or fp16, each row dense; rows may be strided.
        block: elements that share a scale.
        code: "nf4" or "fp4".

    Returns:
        ``out``.

    Raises:
        ValueError: sizes do not fit.
    """
    rows, columns = out.shape
    check_codes(packed, scales, rows, columns, block, code)
    if columns > 1 and out.stride(1) != 1:
        raise ValueError(f"out has strides {out.stride()}: give one whose rows are dense")
    _dequantize(
        packed.view(-1),
        scales.absmax,
        scales.absmax2,
        scales.code2,
        scales.offset,
        scales.block2,
        out,
        block,
        code,
    )
    return out


@operator("chronicals::dequantize_4bit", mutates=("out",))
def _dequantize(
    packed: Tensor,
    absmax: Tensor,
    absmax2: Tensor | None,
    code2: Tensor | None,
    offset: Tensor | None,
    block2: int,
    out: Tensor,
    block: int,
    code: str,
) -> None:
    rows, columns = out.shape
    if not runs_triton(out):
        scales = Scales(absmax, absmax2, code2, offset, block2)
        if not out.is_contiguous():
            out.copy_(
                dequantize_4bit_reference(packed, scales, (rows, columns), out.dtype, block, code)
            )
            return
        flat = out.view(-1)
        absmax = scales.plain()
        for start in range(0, flat.numel(), PIECE_ELEMENTS):
            piece = flat[start : start + PIECE_ELEMENTS]
            of_piece = Scales(absmax[start // block : -(-(start + len(piece)) // block)])
            codes = packed[start // 2 : -(-(start + len(piece)) // 2)]
            shape = tuple(piece.shape)
            piece.copy_(dequantize_4bit_reference(codes, of_piece, shape, out.dtype, block, code))
    elif rows * columns:
        nested = absmax2 is not None
        count = rows * columns
        blocks = DEQUANTIZE_ELEMENTS // block
        _dequantize_kernel[(triton.cdiv(absmax.numel(), blocks),)](
            packed,
            absmax,
            *((absmax2, code2, offset) if nested else (absmax, absmax, absmax)),
            code_of(code, out.device),
            out,
            count,
            columns,
            out.stride(0),
            block2,
            nested,
            out.stride(0) == columns,
            columns % block == 0,
            count % DEQUANTIZE_ELEMENTS == 0,
            blocks,
            block,
            # bitsandbytes rounds the product and the sum of nested scales one after the other.
            enable_fp_fusion=False,
        )


@triton.jit
def _dequantize_kernel(
    # read: codes, scales, what the codes of both stand for
    packed_ptr,
    absmax_ptr,
    absmax2_ptr,
    code2_ptr,
    offset_ptr,
    code_ptr,
    # written
    out_ptr,
    # sizes and the stride of rows
    count,
    columns,
    stride,
    # options
    BLOCK2: tl.constexpr,
    NESTED: tl.constexpr,
    DENSE: tl.constexpr,
    WHOLE: tl.constexpr,
    FULL: tl.constexpr,
    # blocks of a program, elements of a block
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Dequantize ``BLOCKS`` blocks of ``SIZE`` elements.

    ``DENSE``: rows of the output are contiguous. ``WHOLE``: no block crosses the end of a row.
    ``FULL``: every program has all its blocks, so nothing is masked.
    """
    # Blocks are counted in 32 bits, and elements from the program's first one, since 64-bit
    # arithmetic is slow.
    tile = tl.program_id(0)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, BLOCKS) * SIZE
    start = tile.to(tl.int64) * (BLOCKS * SIZE)
    left = tl.minimum(tl.maximum(count - start, 0), BLOCKS * SIZE).to(tl.int32)
    valid = None if FULL else within < left
    if NESTED:
        codes = tl.load(absmax_ptr + block, mask=valid).to(tl.int32)
        absmax = tl.load(code2_ptr + codes, mask=valid) * tl.load(
            absmax2_ptr + block // BLOCK2, mask=valid
        )
        absmax = absmax + tl.load(offset_ptr)
    else:
        absmax = tl.load(absmax_ptr + block, mask=valid)
    pair = (within // 2)[:, None] + tl.arange(0, SIZE // 2)[None, :]
    packed = tl.load(
        packed_ptr + start // 2 + pair,
        mask=None if FULL else pair < (left + 1) // 2,
        other=None if FULL else 0,
    )
    packed = packed.to(tl.int32)
    first = tl.load(code_ptr + (packed >> 4)) * absmax[:, None]
    second = tl.load(code_ptr + (packed & 15)) * absmax[:, None]
    element = within[:, None] + tl.arange(0, SIZE)[None, :]
    if DENSE:
        place = out_ptr + start + element
    elif WHOLE:
        a_row = columns // SIZE
        row = block // a_row
        place = (
            out_ptr
            + (row.to(tl.int64) * stride + (block - row * a_row) * SIZE)[:, None]
            + tl.arange(0, SIZE)[None, :]
        )
    else:
        place = out_ptr + (start + element) // columns * stride + (start + element) % columns
    values = tl.interleave(first, second)
    tl.store(place, values.to(out_ptr.dtype.element_ty), mask=None if FULL else element < left)


def dequantize_4bit_reference(
    packed: Tensor,
    scales: Scales,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    block: int = 64,
    code: str = "nf4",
) -> Tensor:
    """Compute ``dequantize_4bit`` in plain torch into a new tensor of ``shape`` and ``dtype``."""
    count = torch.Size(shape).numel()
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(-1)[:count]
    absmax = scales.plain().repeat_interleave(block)[:count]
    return (code_of(code, packed.device)[codes.int()] * absmax).to(dtype).view(shape)
