"""AdamW over many tensors in one launch, with both moments in 8 bits.

Dettmers et al., 2022, sections 2 and 3:

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   g times ``factor`` before
    w ← (1 − lr · λ) w − lr · (m / c₁) / (sqrt(v / c₂) + ε),   c = 1 − βᵗ

The update is computed in fp32. Then m and v are stored as 8-bit codes and, for each block of 256
consecutive elements, the largest magnitude in fp32. The code is dynamic (ibid., section 2.1), but
with powers of 8 instead of 10, so that encoding and decoding are arithmetic and need no table. A
rank r stands for

    P² (7 r − 6 P), with P the greatest power of two that is at most r; 0 for r = 0

times the block's largest magnitude divided by the value of the greatest rank. Between 8ᵈ and 8ᵈ⁺¹
there are 2ᵈ equal steps. A code of m is 127 plus a signed rank from −127 to 127; a code of v is a
rank from 0 to 255. A magnitude gets the nearest rank, except that an eighth of the least value
already gets rank 1.

Weights are fp32, or bf16 with or without the lower half of their fp32 master (``adamw.py``);
without it they are rounded stochastically. Bytes an element, besides the gradient: 4 for bf16
weights, 8 for fp32 weights and those with masters, and 4.06 for both moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from chronicals.kernels.adamw import (
    LaunchPart,
    Tensors,
    _joined,
    _rounded,
    _split,
    count_step_,
    join_master,
    runs_here,
    split_master,
)
from chronicals.kernels.launch import INTERPRETED, lowbias32, tl, triton
from chronicals.kernels.tensor_lists import Table, of_triton, table_of

MOMENT_BLOCK = 256
"""Elements that share a scale."""

BLOCK_8BIT = 2048
"""Elements that a program's four warps hold at a time."""

# Starting a chunk takes as long as 200 instructions of each thread, so chunks are long.
CHUNK_8BIT = 8192
"""Elements of a chunk, which one program updates."""

TOP_RANK_VALUES = {True: 64**2 * (7 * 127 - 6 * 64), False: 128**2 * (7 * 255 - 6 * 128)}
"""The value of the greatest rank, exact in fp32, by whether the moment is signed."""

MIN_MOMENT_AMAX = 1e-30
"""Blocks whose largest magnitude is not above it are stored as zeros."""


@dataclass
class QuantizedTensors(Tensors):
    """``Tensors`` whose means and squares are uint8 codes, with their scales.

    Attributes:
        mean_scales, square_scales: fp32 ``[⌈elements / 256⌉]``, the largest magnitude of each
            block.
    """

    CHUNK: ClassVar[int] = CHUNK_8BIT
    mean_scales: list[Tensor] = field(default_factory=list)
    square_scales: list[Tensor] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """Return the tables that a launch reads: of the tensors, and of the scales."""
        return [*super().tables(), table_of([self.mean_scales, self.square_scales])]


def quantize_moment(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise a moment in plain torch.

    Returns:
        Codes, uint8 shaped like ``values``, and scales, fp32 ``[⌈elements / 256⌉]``.
    """
    flat = values.float().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    scales = blocks.abs().amax(1) if blocks.numel() else flat.new_empty(0)
    ones = torch.where(scales > MIN_MOMENT_AMAX, TOP_RANK_VALUES[signed] / scales, 0.0)
    scaled = (blocks * ones.unsqueeze(1)).reshape(-1)[: flat.numel()]
    magnitude = scaled.abs()
    octave = torch.frexp(magnitude).exponent.clamp(min=-8) - 1
    power = torch.ldexp(torch.ones_like(magnitude), octave.div(3, rounding_mode="floor"))
    rank = ((magnitude / power.square() + 6 * power) / 7).round() * scaled.sign()
    return (rank + (127 if signed else 0)).to(torch.uint8).view(values.shape), scales


def dequantize_moment(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the values of codes and their scales, fp32 shaped like ``codes``, in plain torch."""
    each = (
        scales.repeat_interleave(MOMENT_BLOCK)[: codes.numel()].view(codes.shape)
        / TOP_RANK_VALUES[signed]
    )
    rank = codes.float() - (127 if signed else 0)
    power = torch.ldexp(torch.sign(rank), torch.frexp(rank).exponent - 1)
    return (7 * rank - 6 * power) * power.square() * each


@triton.jit
def _sqrt(x):
    """Return an approximate square root; 0 of zero and subnormal numbers."""
    if INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    """Return 1 / x within 1 ulp, for normal x."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _above_2_23(code):
    """Return 2²³ + code, fp32, of a uint8 code."""
    # The low bits of such a sum are the code itself, so bytes are inserted instead of converted:
    # one instruction for each of four elements.
    if INTERPRETED:
        return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    beside: tl.constexpr = """
    prmt.b32 $0, $4, 0x4B000000, 0x7440;
    prmt.b32 $1, $4, 0x4B000000, 0x7441;
    prmt.b32 $2, $4, 0x4B000000, 0x7442;
    prmt.b32 $3, $4, 0x4B000000, 0x7443;
    """
    return tl.inline_asm_elementwise(
        beside, "=r,=r,=r,=r,r", [code], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def _value(code, SIGNED: tl.constexpr):
    """Return the values of uint8 codes before scaling, divided by 7."""
    rank = _above_2_23(code) - (8388608 + 127 if SIGNED else 8388608)
    power = (rank.to(tl.int32, bitcast=True) & (-0x800000)).to(tl.float32, bitcast=True)
    return tl.fma(power, -6 / 7, rank) * power * power


@triton.jit
def _code(value, scale, LARGEST: tl.constexpr, LEAST: tl.constexpr, SIGNED: tl.constexpr):
    """Return the codes of ``value`` ``[BLOCKS, SIZE]`` as int32, of which the lowest 8 bits count.

    ``scale`` ``[BLOCKS]`` are the largest magnitudes.
    """
    one = tl.where(scale > LEAST, _reciprocal(scale) * LARGEST, 0.0)
    magnitude = tl.abs(value) * one[:, None]
    # P is 2 to a third of the exponent: for exponents up to 24, ⌊e / 3⌋ = ⌊43 e / 128⌋.
    third = (magnitude.to(tl.int32, bitcast=True) >> 23) * (43 << 16) + (
        (127 << 23) - 127 * (43 << 16)
    )
    power = third & 0x7F800000
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    seven = tl.fma(magnitude * inverse, inverse, power.to(tl.float32, bitcast=True) * 6.0)
    if SIGNED:
        sign = value.to(tl.int32, bitcast=True) & (-0x80000000)
        seven = ((seven.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(
            tl.float32, bitcast=True
        )
    # fp32 has no fractions above 2²³, so this sum rounds to a whole number, held in its low bits.
    return tl.fma(seven, 1 / 7, 8388608 + 127 if SIGNED else 8388608).to(tl.int32, bitcast=True)


@triton.jit
def _base(table_ptr, tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the first element of a tensor in a row of the table."""
    base = tl.load(table_ptr + tensor).to(tl.pointer_type(KIND))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def _adamw_8bit_kernel(
    # addresses, sizes and chunks of the tensors (tensor_lists.py)
    table_ptr,
    sizes_ptr,
    tensors_ptr,
    firsts_ptr,
    # addresses of the moments' scales
    scales_ptr,
    # read from the device
    corrections_ptr,
    lr_ptr,
    factor_ptr,
    apply_ptr,
    seed_ptr,
    # tensors, and AdamW's numbers; rest1 is 1 − β₁
    count,
    weight_decay,
    beta1,
    rest1,
    beta2,
    over,
    under,
    eps,
    # dtypes of weights and gradients
    W: tl.constexpr,
    G: tl.constexpr,
    # options; APPLY_EACH: one flag for each tensor
    HAS_LOW: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_APPLY: tl.constexpr,
    APPLY_EACH: tl.constexpr,
    # addresses and sizes suit loads of 16 bytes
    ALIGNED: tl.constexpr,
    # elements at a time, of a program, and that share a scale
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    # constants of the 8-bit code
    M_LARGEST: tl.constexpr,
    V_LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Update one chunk of one tensor.

    ``table`` is ``[5, count]``: addresses of weights, gradients, codes of m and v, lower halves;
    ``scales`` is ``[2, count]``. Inside the kernel v is divided by ``over`` = (1 − β₂) / (1 − β₁)²;
    then the term added to v is the square of the term added to m. ``under`` is 1 / ``over``.
    """
    applies = True
    if APPLY_EACH:
        applies = tl.load(apply_ptr + tl.load(tensors_ptr + tl.program_id(0))).to(tl.int1)
    elif HAS_APPLY:
        applies = tl.load(apply_ptr).to(tl.int1)
    if applies:
        tensor = tl.load(tensors_ptr + tl.program_id(0))
        start = (tl.program_id(0) - tl.load(firsts_ptr + tensor)) * CHUNK
        size = tl.load(sizes_ptr + tensor)
        if ALIGNED:
            size = tl.multiple_of(size, 8)
        lr = tl.load(lr_ptr).to(tl.float32)
        rate = lr / tl.load(corrections_ptr + tensor)
        of_root = tl.rsqrt(tl.load(corrections_ptr + count + tensor) * under)
        decay = 1.0 - lr * weight_decay
        factor = 1.0
        if HAS_FACTOR:
            factor = tl.load(factor_ptr).to(tl.float32)
        key = lowbias32(
            tl.load(seed_ptr).to(tl.uint32) * 0x9E3779B9 + tl.program_id(0).to(tl.uint32)
        )
        w_ptr = _base(table_ptr, tensor, W, ALIGNED)
        g_ptr = _base(table_ptr + count, tensor, G, ALIGNED)
        m_ptr = _base(table_ptr + 2 * count, tensor, tl.uint8, ALIGNED)
        v_ptr = _base(table_ptr + 3 * count, tensor, tl.uint8, ALIGNED)
        low_ptr = _base(table_ptr + 4 * count, tensor, tl.int16, ALIGNED)
        m_scale_ptr = _base(scales_ptr, tensor, tl.float32, False)
        v_scale_ptr = _base(scales_ptr + count, tensor, tl.float32, False)
        blocks = tl.arange(0, BLOCK // SIZE)
        inner = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        for offset in range(0, CHUNK, BLOCK):
            at = start + offset + inner
            inside = at < size
            scale_at = (start + offset) // SIZE + blocks
            has_scale = start + offset + blocks * SIZE < size
            w = tl.load(w_ptr + at, mask=inside, other=0.0)
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
            m = _value(tl.load(m_ptr + at, mask=inside, other=127), True)
            v = _value(tl.load(v_ptr + at, mask=inside, other=0), False)
            m_scale = tl.load(m_scale_ptr + scale_at, mask=has_scale, other=0.0) * (
                beta1 * (7 / M_LARGEST)
            )
            v_scale = tl.load(v_scale_ptr + scale_at, mask=has_scale, other=0.0) * (
                beta2 * under * (7 / V_LARGEST)
            )
            g *= factor * rest1
            m = tl.fma(m, m_scale[:, None], g)
            v = tl.fma(v, v_scale[:, None], g * g)
            if HAS_LOW:
                w = _joined(w, tl.load(low_ptr + at, mask=inside, other=0))
            w = tl.fma(
                w.to(tl.float32), decay, m * -rate * _reciprocal(tl.fma(_sqrt(v), of_root, eps))
            )
            if HAS_LOW:
                w, low = _split(w)
                tl.store(low_ptr + at, low, mask=inside)
            elif tl.bfloat16 == W:
                # One 32-bit hash gives the random bits of two neighbours.
                dice = lowbias32(key ^ offset ^ (inner >> 1)) >> (inner % 2 * 16)
                # Another NaN might overflow to a number by the carry; this one does not.
                w = _rounded(tl.where(w == w, w, float("nan")), dice, W)
            tl.store(w_ptr + at, w, mask=inside)
            m_scale = tl.max(tl.abs(m), axis=1)
            v_scale = tl.max(v, axis=1)
            tl.store(m_scale_ptr + scale_at, m_scale, mask=has_scale)
            tl.store(v_scale_ptr + scale_at, v_scale * over, mask=has_scale)
            tl.store(
                m_ptr + at, _code(m, m_scale, M_LARGEST, LEAST, True).to(tl.uint8), mask=inside
            )
            tl.store(
                v_ptr + at, _code(v, v_scale, V_LARGEST, LEAST, False).to(tl.uint8), mask=inside
            )


def adamw_8bit_(
    tensors: QuantizedTensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
    part: LaunchPart | None = None,
) -> None:
    """Update weights, moments and steps in place; gradients are only read.

    Args:
        tensors: weights, gradients and states.
        lr: a number, or a scalar tensor on the device.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        factor: scalar tensor that gradients are multiplied by.
        apply: bool tensor, a scalar or one value for each weight of the launch; a weight with
            False and its states do not change by a bit.
        part: the position of ``tensors`` in a launch that is done in parts, bit by bit as the
            whole. Then steps are read from it, and ``tensors.steps`` neither read nor changed.

    Raises:
        ValueError: dtypes are mixed, or ``apply`` has another shape.
    """
    if not tensors.weights:
        return
    dtypes = {(w.dtype, g.dtype) for w, g in zip(tensors.weights, tensors.gradients, strict=True)}
    codes = {x.dtype for x in (*tensors.means, *tensors.squares)} - {torch.uint8}
    if len(dtypes) > 1 or codes or {x.dtype for x in tensors.lows} - {torch.int16}:
        raise ValueError(
            f"weights and gradients are {dtypes}, codes also {codes}: one set of dtypes at a "
            "time, codes in uint8"
        )
    if not runs_here(tensors):
        adamw_8bit_reference_(tensors, lr, betas, eps, weight_decay, factor, apply, part)
        return
    count = len(tensors.weights)
    place = part or LaunchPart.whole(tensors, betas)
    applies = place.applies(apply, count)
    table, scales = tensors.tables()
    device = table.addresses.device
    lr = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)
    over = (1 - betas[1]) / (1 - betas[0]) ** 2
    weight_dtype, gradient_dtype = (of_triton(dtype) for dtype in dtypes.pop())
    _adamw_8bit_kernel[(len(table.tensors),)](
        *table.on_device,
        scales.addresses,
        place.of_each(place.corrections, count),
        lr,
        factor,
        applies,
        place.seed(),
        count,
        weight_decay,
        betas[0],
        1 - betas[0],
        betas[1],
        over,
        1 / over,
        eps,
        weight_dtype,
        gradient_dtype,
        bool(tensors.lows),
        factor is not None,
        applies is not None,
        applies is not None and applies.ndim == 1,
        table.aligned,
        BLOCK_8BIT,
        CHUNK_8BIT,
        MOMENT_BLOCK,
        TOP_RANK_VALUES[True],
        TOP_RANK_VALUES[False],
        MIN_MOMENT_AMAX,
        num_warps=4,
        # With fusion, variants of the kernel would round differently, and a part would not have
        # the bits of the whole.
        enable_fp_fusion=False,
    )
    changed = (
        tensors.weights,
        tensors.lows,
        tensors.means,
        tensors.squares,
        tensors.mean_scales,
        tensors.square_scales,
    )
    torch.autograd.graph.increment_version([x for row in changed for x in row])
    if part is None:
        count_step_(tensors, apply)


REFERENCE_COPIES = 13
"""fp32 tensors of a weight's size that the reference holds at most, while it quantises a moment."""


def adamw_8bit_reference_(
    tensors: QuantizedTensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
    part: LaunchPart | None = None,
) -> None:
    """Compute ``adamw_8bit_`` in plain torch; weights without a master are rounded to nearest."""
    place = part or LaunchPart.whole(tensors, betas)
    count = len(tensors.weights)
    flags = place.applies(apply, count)
    corrections = place.of_each(place.corrections, count)
    for n, (weight, gradient) in enumerate(zip(tensors.weights, tensors.gradients, strict=True)):
        g = gradient.float() if factor is None else gradient.float() * factor
        value = join_master(weight, tensors.lows[n]) if tensors.lows else weight.float()
        mean = dequantize_moment(tensors.means[n], tensors.mean_scales[n], True) * betas[0] + g * (
            1 - betas[0]
        )
        square = dequantize_moment(tensors.squares[n], tensors.square_scales[n], False) * betas[
            1
        ] + g * g * (1 - betas[1])
        root = (square * (1.0 / corrections[1, n])).sqrt() + eps
        new = value * (1 - lr * weight_decay) - (lr / corrections[0, n]) * mean / root
        parts = split_master(new) if tensors.lows else (new.to(weight.dtype),)
        stored = (weight, tensors.lows[n]) if tensors.lows else (weight,)
        states = (
            tensors.means[n],
            tensors.mean_scales[n],
            tensors.squares[n],
            tensors.square_scales[n],
        )
        quantized = (*quantize_moment(mean, True), *quantize_moment(square, False))
        applies = None if flags is None else flags.expand(count)[n]
        for old, updated in zip((*stored, *states), (*parts, *quantized), strict=True):
            old.copy_(updated if applies is None else torch.where(applies, updated, old))
    if part is None:
        count_step_(tensors, apply)
