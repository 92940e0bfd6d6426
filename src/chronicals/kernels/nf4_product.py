"""Products of few rows with a weight in 4 bits, which is dequantised inside the product.

    y[r, n] = Σ_k x[r, k] · W[n, k]        W as of ``nf4.py``, rounded to the dtype of x

A token that is generated asks each weight for one row of each sequence, so the bytes of the weight
are what such a product costs (Frantar et al., 2024, MARLIN, arXiv 2408.11743, for 4-bit weights
with scales of groups). Through a dense weight they are 0.5 + 2 + 2 a value, of a weight in 16 bits
2, here 0.5 + scales.

Shapes: R rows, at most ``MOST_ROWS``; K columns, whole blocks of scales; N outputs. x is bf16
or fp16, y that or fp32, sums are fp32. Bytes that must move: N · K · (1/2 + bytes of a scale / block) + 2 · R ·
(K + N). A dequantised tile is never in the card's memory. What limits few rows are the instructions
of the look-ups, some seven a value, so that an H200 reads a fifth of the bytes that it could, and
more values a second than in 16 bits. The columns are split among programs where N is too small to
fill a card; the splits add 8 · R · N bytes each and are summed in a fixed order.

Weights of one input (queries, keys and values; gate and up) are multiplied in one launch, whose
programs each take one of them. Their outputs are side by side.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from chronicals.kernels.launch import (
    in_rows,
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    triton,
)
from chronicals.kernels.nf4 import (
    CODE_VALUES,
    Scales,
    check_codes,
    code_of,
    dequantize_4bit_reference,
)
from chronicals.kernels.products import linear

MOST_ROWS = 64
"""Rows up to which the weight's bytes are most of the cost.

With more, the accumulators of a program and the rows that each reads again are, and a product over
the dense weight is better.
"""

FASTER_ROWS = 16
"""Rows up to which this is at least as fast as the product with a dense weight in 16 bits.

On an H200 the products of a layer of an 8B take 109 µs for 1 and for 8 rows, 133 for 32 and 164 for
64; cuBLAS takes 123 to 130 with the weight in bf16 (``benchmarks/NOTES.md``).
"""

LEAST_ROWS = 16
"""Rows of the smallest product of tensor cores: rows of a program are padded to them."""

OUTPUTS_AT_ONCE = 64
COLUMNS_AT_ONCE = 128
"""Outputs of a program, and columns that are dequantised at once: the fastest tile of 32 to 256
outputs and 64 to 256 columns, for 1 to 64 rows, on an H200.
"""

COLUMNS_OF_A_SPLIT = 256
"""Fewest columns that are worth a split: two steps, of which one is read while one is multiplied."""

PROGRAMS_A_MULTIPROCESSOR = 4
"""Programs that are wanted on each multiprocessor: as many as its registers hold of up to 32 rows."""

MOST_WEIGHTS = 3
"""Weights that one launch multiplies: those of queries, keys and values."""


@dataclass(frozen=True)
class FewRowsLaunch:
    """The launch of the kernel that multiplies.

    Attributes:
        rows: rows of a program, padded to a power of 2.
        splits: programs among which the columns are split; a power of 2.
    """

    rows: int
    splits: int

    def sums(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of the sums of each split, and of how many splits of a tile are done."""
        if self.splits == 1:
            return out, out  # not read
        return out.new_empty((self.splits, out.numel()), dtype=torch.float32), arrivals(out.device)


_arrivals = dict[tuple[torch.device, int], Tensor]()
"""Numbers of splits that are done, all 0 between two launches, by device and stream."""


def arrivals(device: torch.device) -> Tensor:
    """Return int32 zeros for the tiles of a launch that splits columns.

    Launches of one stream follow each other, and each leaves zeros. What a graph that is being
    captured would allocate ends with the graph, so it has its own, which each replay sets to 0.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _arrivals:
        count = PROGRAMS_A_MULTIPROCESSOR * multiprocessors(device)
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return zeros
        _arrivals[device, stream] = zeros
    return _arrivals[device, stream]


def few_rows_launch(x_RK: Tensor, outputs: int) -> FewRowsLaunch:
    """Choose the launch from the shape and the card.

    Args:
        x_RK: the rows.
        outputs: N.
    """
    rows, columns = x_RK.shape
    tiles = triton.cdiv(outputs, OUTPUTS_AT_ONCE)
    wanted = PROGRAMS_A_MULTIPROCESSOR * multiprocessors(x_RK.device) // tiles
    # the sums of splits, 8 bytes a row and output, move at most as many bytes as the codes
    within_bytes = columns // (16 * rows)
    splits = max(1, min(wanted, within_bytes, columns // COLUMNS_OF_A_SPLIT))
    return FewRowsLaunch(max(LEAST_ROWS, next_power_of_2(rows)), next_power_of_2(splits + 1) // 2)


def table_for(x: Tensor, code: str) -> str:
    """Return PTX of the look-ups of values in the dtype of x; empty where they are in memory.

    A card rounds two fp32 to a pair of 16 bits from Ampere (sm_80) on.
    """
    rounds_pairs = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return _table_code(code, x.dtype) if rounds_pairs else ""


@cache
def _table_code(code: str, dtype: torch.dtype) -> str:
    """Return PTX that makes the 16 values of a block of its scale ``$8``, in 16 bits.

    Registers ``$0`` to ``$3`` get their lower bytes and ``$4`` to ``$7`` the upper ones, four codes
    each, as ``prmt`` takes them.

    Args:
        code: "nf4" or "fp4".
        dtype: of the values, into which they are rounded once.
    """
    kind = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    lines = [".reg .f32 v<16>;", ".reg .b32 p<8>;"]
    for n, value in enumerate(CODE_VALUES[code]):
        lines.append(f"mul.f32 v{n}, $8, 0f{struct.pack('>f', value).hex().upper()};")
    for n in range(8):
        lines.append(f"cvt.rn.{kind}.f32 p{n}, v{2 * n + 1}, v{2 * n};")
    for n in range(4):
        lines.append(f"prmt.b32 ${n}, p{2 * n}, p{2 * n + 1}, 0x6420;")
        lines.append(f"prmt.b32 ${n + 4}, p{2 * n}, p{2 * n + 1}, 0x7531;")
    return "{" + "\n".join(lines) + "}"


@triton.jit
def _pairs_of(packed, absmax, TABLE: tl.constexpr):
    """Return the weights of bytes ``[N, G, B]``, two in 16 bits each, the earlier in the lower half.

    A block has one scale and so 16 values. They are in eight registers, and a look-up is two
    ``prmt`` a value: the three lower bits of a code choose among eight bytes, the fourth between
    two results. In memory it would be an address, a load, a product and a rounding.
    """
    l0, l1, l2, l3, h0, h1, h2, h3 = tl.inline_asm_elementwise(
        TABLE,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [absmax],
        dtype=(tl.int32,) * 8,
        is_pure=True,
        pack=1,
    )
    # Each operand of four bytes takes four registers; those of the tables are four times the same.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, top, u, v, l, h;
        and.b32 low, $4, 0x77777777;
        shr.b32 top, $4, 1;
        lop3.b32 top, top, 0x44444444, 0x32103210, 0xea;  // (top & 0x44444444) | 0x32103210
        prmt.b32 u, $5, $9, low;
        prmt.b32 v, $13, $17, low;
        prmt.b32 l, u, v, top;
        prmt.b32 u, $21, $25, low;
        prmt.b32 v, $29, $33, low;
        prmt.b32 h, u, v, top;
        prmt.b32 $0, l, h, 0x4051;
        prmt.b32 $1, l, h, 0x6273;
        shr.b32 low, low, 16;
        shr.b32 top, top, 16;
        prmt.b32 u, $5, $9, low;
        prmt.b32 v, $13, $17, low;
        prmt.b32 l, u, v, top;
        prmt.b32 u, $21, $25, low;
        prmt.b32 v, $29, $33, low;
        prmt.b32 h, u, v, top;
        prmt.b32 $2, l, h, 0x4051;
        prmt.b32 $3, l, h, 0x6273;
        }
        """,
        "=&r,=&r,=&r,=&r" + ",r" * 33,
        [
            packed,
            l0[:, :, None],
            l1[:, :, None],
            l2[:, :, None],
            l3[:, :, None],
            h0[:, :, None],
            h1[:, :, None],
            h2[:, :, None],
            h3[:, :, None],
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def weight_of(packed, absmax, code_ptr, DTYPE: tl.constexpr, TABLE: tl.constexpr):
    """Return the weights ``[N, G, 2 B]`` of bytes ``[N, G, B]`` and scales ``[N, G]``."""
    if TABLE == "":
        codes = packed.to(tl.int32)
        upper = (tl.load(code_ptr + (codes >> 4)) * absmax[:, :, None]).to(DTYPE)
        lower = (tl.load(code_ptr + (codes & 15)) * absmax[:, :, None]).to(DTYPE)
    else:
        pairs = _pairs_of(packed, absmax, TABLE)
        upper = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        lower = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    # the upper half of a byte is the earlier column
    return tl.join(upper, lower)


@triton.jit
def scales_of(
    absmax_ptr,
    absmax2_ptr,
    code2_ptr,
    offset_ptr,
    block,
    exists,
    BLOCK2: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Return the scales of blocks of the weight; zero where none exists."""
    if NESTED:
        codes = tl.load(absmax_ptr + block, mask=exists, other=0).to(tl.int32)
        absmax = tl.load(code2_ptr + codes) * tl.load(
            absmax2_ptr + block // BLOCK2, mask=exists, other=0.0
        )
        absmax = absmax + tl.load(offset_ptr)
    else:
        absmax = tl.load(absmax_ptr + block, mask=exists, other=0.0)
    return absmax


@triton.jit
def store_tile(total, place, exists, out_ptr, parts_ptr, arrived_ptr, count, SPLITS: tl.constexpr):
    """Store a tile of y; where columns are split, the tile's last program sums those of all splits.

    The sum is in the order of the splits, whoever comes last.

    Args:
        total: the program's sums, fp32 ``[R, N]``.
        place: of each element in y.
        exists: whether it is there.
        out_ptr: y.
        parts_ptr: sums of each split, fp32 ``[splits, count]``.
        arrived_ptr: int32, 0 for each tile, and again afterwards.
        count: elements of y.
        SPLITS: programs of a tile.
    """
    kind = out_ptr.dtype.element_ty
    if SPLITS == 1:
        tl.store(out_ptr + place, total.to(kind), mask=exists)
    else:
        split = tl.program_id(1).to(tl.int64)
        tl.store(parts_ptr + split * count + place, total, mask=exists)
        tl.debug_barrier()  # one thread tells of the stores of all
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1)
        if arrived == SPLITS - 1:
            total = tl.zeros_like(total)
            for each in tl.static_range(SPLITS):
                # past the L1 cache, where another multiprocessor's stores are not seen
                total += tl.load(
                    parts_ptr + each * count + place,
                    mask=exists,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(out_ptr + place, total.to(kind), mask=exists)
            tl.store(arrived_ptr + tl.program_id(0), 0)


@triton.jit
def _nf4_product_kernel(
    # read: rows; codes and scales of each weight, and what the codes of scales stand for
    x_ptr,
    packed0_ptr,
    packed1_ptr,
    packed2_ptr,
    absmax0_ptr,
    absmax1_ptr,
    absmax2_ptr,
    second0_ptr,
    second1_ptr,
    second2_ptr,
    code2_0_ptr,
    code2_1_ptr,
    code2_2_ptr,
    offset0_ptr,
    offset1_ptr,
    offset2_ptr,
    # read: what the codes stand for
    code_ptr,
    # written: y, its sums over each split, and how many splits of a tile are done
    out_ptr,
    parts_ptr,
    arrived_ptr,
    # sizes: rows, outputs of each weight, bytes of codes of an output, and the stride of rows
    rows,
    outputs0,
    outputs1,
    outputs2,
    pairs,
    x_row,
    # options
    BLOCK: tl.constexpr,
    BLOCK2: tl.constexpr,
    NESTED: tl.constexpr,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    # tile, elements of a scale within it, and programs of a tile
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiply a tile of one weight; the tiles of the weights follow each other."""
    packed_ptr = packed0_ptr
    absmax_ptr = absmax0_ptr
    second_ptr = second0_ptr
    code2_ptr = code2_0_ptr
    offset_ptr = offset0_ptr
    outputs = outputs0
    first_output = 0
    tile = tl.program_id(0)
    tiles0 = tl.cdiv(outputs0, OUTPUTS)
    tiles1 = tl.cdiv(outputs1, OUTPUTS)
    if tl.program_id(0) >= tiles0:
        packed_ptr = packed1_ptr
        absmax_ptr = absmax1_ptr
        second_ptr = second1_ptr
        code2_ptr = code2_1_ptr
        offset_ptr = offset1_ptr
        outputs = outputs1
        first_output = outputs0
        tile = tl.program_id(0) - tiles0
    if tl.program_id(0) >= tiles0 + tiles1:
        packed_ptr = packed2_ptr
        absmax_ptr = absmax2_ptr
        second_ptr = second2_ptr
        code2_ptr = code2_2_ptr
        offset_ptr = offset2_ptr
        outputs = outputs2
        first_output = outputs0 + outputs1
        tile = tl.program_id(0) - tiles0 - tiles1
    HALF: tl.constexpr = COLUMNS // 2
    GROUPS: tl.constexpr = COLUMNS // SIZE
    output = tile.to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    byte = tl.arange(0, HALF)
    group = tl.arange(0, GROUPS) * (SIZE // 2)
    each = tl.cdiv(tl.cdiv(pairs, SPLITS), HALF) * HALF
    begin = split * each
    end = tl.minimum(begin + each, pairs)
    at = output * pairs

    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for pair in range(begin, end, HALF):
        packed = tl.load(
            packed_ptr + at[:, None] + (pair + byte)[None, :],
            mask=is_output[:, None] & (pair + byte < end)[None, :],
            other=0,
        )
        absmax = scales_of(
            absmax_ptr,
            second_ptr,
            code2_ptr,
            offset_ptr,
            (at[:, None] + (pair + group)[None, :]) // (BLOCK // 2),
            is_output[:, None] & (pair + group < end)[None, :],
            BLOCK2,
            NESTED,
        )
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * x_row + (2 * pair + column)[None, :],
            mask=(row < rows)[:, None] & (2 * pair + column < 2 * end)[None, :],
            other=0.0,
        )
        packed = tl.reshape(packed, (OUTPUTS, GROUPS, SIZE // 2))
        weight = weight_of(packed, absmax, code_ptr, x.dtype, TABLE)
        weight = tl.reshape(weight, (OUTPUTS, COLUMNS))
        total = tl.dot(x.to(KIND), tl.trans(weight.to(KIND)), total)

    width = outputs0 + outputs1 + outputs2
    place = row.to(tl.int64)[:, None] * width + (first_output + output)[None, :]
    exists = (row < rows)[:, None] & is_output[None, :]
    store_tile(total, place, exists, out_ptr, parts_ptr, arrived_ptr, rows * width, SPLITS)


@operator("chronicals::nf4_product")
def _nf4_product(
    x: Tensor,
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    nested: Sequence[Tensor],
    block2: int,
    outputs: Sequence[int],
    block: int,
    code: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Launch the product.

    Args:
        x: ``[R, K]`` with dense rows.
        packed: codes of each weight, flat.
        absmax: ``Scales.absmax`` of each.
        nested: ``absmax2`` of each, ``code2`` of each, ``offset`` of each; empty if the scales are
            not quantised.
        block2: elements of ``absmax`` that share one of ``absmax2``.
        outputs: N of each.
        block: elements of a weight that share a scale.
        code: "nf4" or "fp4".
        dtype: of the result; None for that of x.
    """
    out = _output(x, packed, absmax, nested, block2, outputs, block, code, dtype)
    rows, columns = x.shape
    if not out.numel():
        return out
    launch = few_rows_launch(x, out.shape[1])
    missing = MOST_WEIGHTS - len(packed)
    count = len(packed)
    of_scales = (
        [nested[at : at + count] for at in (0, count, 2 * count)] if nested else [absmax] * 3
    )
    pointers = [
        pointer
        for tensors in (packed, absmax, *of_scales)
        for pointer in (*tensors, *[tensors[0]] * missing)
    ]
    tiles = sum(triton.cdiv(each, OUTPUTS_AT_ONCE) for each in outputs)
    _nf4_product_kernel[tiles, launch.splits](
        x,
        *pointers,
        code_of(code, x.device),
        out,
        *launch.sums(out),
        rows,
        *outputs,
        *[0] * missing,
        columns // 2,
        x.stride(0),
        block,
        block2,
        bool(nested),
        multiplied_in(x.dtype),
        table_for(x, code),
        launch.rows,
        OUTPUTS_AT_ONCE,
        COLUMNS_AT_ONCE,
        min(block, COLUMNS_AT_ONCE),
        launch.splits,
        num_warps=4,
        num_stages=3,
        # nested scales are those of ``dequantize_4bit``, bit by bit
        enable_fp_fusion=False,
    )
    return out


@torch.library.register_fake(_nf4_product)
def _output(
    x: Tensor,
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    nested: Sequence[Tensor],
    block2: int,
    outputs: Sequence[int],
    block: int,
    code: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Allocate the output."""
    return x.new_empty((x.shape[0], sum(outputs)), dtype=dtype)


def multiplies_few_rows(x: Tensor, block: int = 64) -> bool:
    """Return whether the kernel takes these rows.

    They are 16 bit, on a card, at most ``MOST_ROWS``, and a row of the weight has whole blocks.

    Args:
        x: ``[..., K]``.
        block: elements of the weight that share a scale.
    """
    columns = x.shape[-1]
    is_few = 0 < x.numel() <= MOST_ROWS * columns
    is_16_bit = x.dtype in (torch.bfloat16, torch.float16)
    return is_few and is_16_bit and columns % block == 0 and runs_triton(x)


def nf4_product(
    x: Tensor,
    packed: Tensor,
    scales: Scales,
    outputs: int,
    block: int = 64,
    code: str = "nf4",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``x Wᵀ``, ``[..., N]``; without a gradient.

    Rows that ``multiplies_few_rows`` does not take go to the reference.

    Args:
        x: ``[..., K]``.
        packed: uint8, two codes a byte, of W ``[N, K]``.
        scales: scales of the weight's blocks.
        outputs: N.
        block: elements that share a scale.
        code: "nf4" or "fp4".
        dtype: of the result, that of x or fp32; by default that of x.

    Raises:
        ValueError: sizes do not fit.
    """
    return nf4_products(x, [packed], [scales], [outputs], block, code, dtype)


def nf4_products(
    x: Tensor,
    packed: Sequence[Tensor],
    scales: Sequence[Scales],
    outputs: Sequence[int],
    block: int = 64,
    code: str = "nf4",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``x Wᵀ`` of several weights side by side, ``[..., sum of N]``; without a gradient.

    Up to ``MOST_WEIGHTS`` are one launch. Rows that ``multiplies_few_rows`` does not take, and
    weights whose scales differ in form, go to the reference.

    Args:
        x: ``[..., K]``.
        packed: codes of each weight ``[N, K]``, uint8, two codes a byte.
        scales: scales of each weight's blocks.
        outputs: N of each.
        block: elements that share a scale.
        code: "nf4" or "fp4".
        dtype: of the result, that of x or fp32; by default that of x.

    Raises:
        ValueError: sizes do not fit.
    """
    for codes, of_blocks, each in zip(packed, scales, outputs, strict=True):
        check_codes(codes, of_blocks, each, x.shape[-1], block, code)
    if not multiplies_few_rows(x, block) or not are_one_launch(scales):
        return nf4_products_reference(x, packed, scales, outputs, block, code, dtype)
    first = scales[0]
    of_scales = zip(*((s.absmax2, s.code2, s.offset) for s in scales))
    nested = [tensor for kind in of_scales for tensor in kind if tensor is not None]
    y: Tensor = _nf4_product(
        in_rows(x),
        [codes.view(-1) for codes in packed],
        [of_blocks.absmax for of_blocks in scales],
        nested,
        first.block2,
        outputs,
        block,
        code,
        dtype,
    )
    return y.view(*x.shape[:-1], sum(outputs))


def are_one_launch(scales: Sequence[Scales]) -> bool:
    """Return whether one launch takes weights with these scales: few, and of one form."""
    return len(scales) <= MOST_WEIGHTS and len({(s.nested, s.block2) for s in scales}) == 1


def nf4_product_reference(
    x: Tensor,
    packed: Tensor,
    scales: Scales,
    outputs: int,
    block: int = 64,
    code: str = "nf4",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``nf4_product`` in plain torch."""
    shape = outputs, x.shape[-1]
    weight = dequantize_4bit_reference(packed, scales, shape, x.dtype, block, code)
    return linear(x, weight, dtype)


def nf4_products_reference(
    x: Tensor,
    packed: Sequence[Tensor],
    scales: Sequence[Scales],
    outputs: Sequence[int],
    block: int = 64,
    code: str = "nf4",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``nf4_products`` in plain torch."""
    weights = zip(packed, scales, outputs, strict=True)
    parts = [nf4_product_reference(x, *weight, block, code, dtype) for weight in weights]
    return torch.cat(parts, -1)
