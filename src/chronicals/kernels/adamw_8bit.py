"""AdamW over many tensors in one launch, with both moments in 8 bits (Dettmers et al., 2022,
sections 2 and 3).

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   g times ``factor`` before
    w ← (1 − lr · λ) w − lr · (m / c₁) / (sqrt(v / c₂) + ε),   c = 1 − βᵗ

The update takes m and v as they are in fp32; afterwards they are kept as codes and, for each block
of 256 elements along the tensor, the largest magnitude in fp32. The code is dynamic (ibid., section
2.1), with powers of 8 where the paper has powers of 10, so that both directions are arithmetic and
nothing is looked up. A rank r stands for

    P² (7 r − 6 P), P the greatest power of two that is at most r; 0 for 0

times the largest magnitude over what the greatest rank stands for: between 8ᵈ and 8ᵈ⁺¹ there are 2ᵈ
equal steps. A code of m is 127 and a rank with a sign, from −127 to 127, one of v a rank from 0 to
255. A magnitude has the nearest rank, but 1 already from an eighth of the least value on. Weights
are fp32, or bf16 with or without the lower half of their fp32 master (``adamw.py``); those without
are rounded stochastically. Bytes an element beside the gradient: 4 for bf16 weights, 8 with masters
or for fp32, and 4.06 for both tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from chronicals.kernels.adamw import (
    Part,
    Tensors,
    _joined,
    _rounded,
    _split,
    _table,
    check_apply,
    count_step_,
    runs_here,
)
from chronicals.kernels.launch import INTERPRETED, tl, triton
from chronicals.kernels.lowbias32 import lowbias32
from chronicals.kernels.master import join_master, split_master
from chronicals.kernels.tensor_lists import Table, of_triton, table_of

MOMENT_BLOCK = 256
"""Elements that share a scale."""

BLOCK_8BIT = 2048
CHUNK_8BIT = 8192
"""Elements that four warps hold at a time, and of a chunk, whose beginning takes as long as 200
instructions of each thread.
"""

TOP_RANK_VALUES = {True: 64**2 * (7 * 127 - 6 * 64), False: 128**2 * (7 * 255 - 6 * 128)}
"""By whether a moment has a sign, what the rank of a block's largest magnitude stands for; both
are fp32 numbers.
"""

MIN_MOMENT_AMAX = 1e-30
"""A block whose largest magnitude is less counts as zeros."""


@dataclass
class QuantizedTensors(Tensors):
    """``Tensors`` whose means and squares are codes, uint8, with their scales.

    Attributes:
        mean_scales, square_scales: fp32 ``[⌈elements / 256⌉]``, the largest magnitude of each
            block.
    """

    mean_scales: list[Tensor] = field(default_factory=list)
    square_scales: list[Tensor] = field(default_factory=list)


def quantize_moment(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes, uint8 and shaped like ``values``, and scales, fp32 ``[⌈elements / 256⌉]``; in plain
    torch.
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
    """fp32, shaped like ``codes``."""
    each = (
        scales.repeat_interleave(MOMENT_BLOCK)[: codes.numel()].view(codes.shape)
        / TOP_RANK_VALUES[signed]
    )
    rank = codes.float() - (127 if signed else 0)
    power = torch.ldexp(torch.sign(rank), torch.frexp(rank).exponent - 1)
    return (7 * rank - 6 * power) * power.square() * each


@triton.jit
def _sqrt(x):
    """Approximate; 0 where ``x`` has no normal exponent."""
    if INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    """Approximate, 1 ulp; of normal numbers."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _above_2_23(code):
    """2²³ and a code, uint8, as fp32: the sum's lowest bits are those of the code."""
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
    """What codes, uint8, stand for before it is scaled, over 7."""
    rank = _above_2_23(code) - (8388608 + 127 if SIGNED else 8388608)
    power = (rank.to(tl.int32, bitcast=True) & (-0x800000)).to(tl.float32, bitcast=True)
    return tl.fma(power, -6 / 7, rank) * power * power


@triton.jit
def _code(value, scale, LARGEST: tl.constexpr, LEAST: tl.constexpr, SIGNED: tl.constexpr):
    """Codes, int32, of ``value`` ``[BLOCKS, SIZE]`` whose largest magnitudes are ``scale``
    ``[BLOCKS]``; of v no bits but the lowest 8 count."""
    one = tl.where(scale > LEAST, _reciprocal(scale) * LARGEST, 0.0)
    magnitude = tl.abs(value) * one[:, None]
    # A third of an exponent up to 24, rounded down, is 43/128 of it, rounded down.
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
    # Above 2²³ nothing has a fraction, so the sum is rounded to a whole number, which its lowest
    # bits are.
    return tl.fma(seven, 1 / 7, 8388608 + 127 if SIGNED else 8388608).to(tl.int32, bitcast=True)


@triton.jit
def _base(table_ptr, tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to the first element of a tensor of a row of the table."""
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
    """``table`` ``[5, count]``: addresses of weights, gradients, codes of m and v, lower halves;
    ``scales`` ``[2, count]``.

    v is computed over ``over`` = (1 − β₂) / (1 − β₁)², so that what is added to it is the square of
    what is added to m; ``under`` is the reciprocal.
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
                dice = lowbias32(key ^ offset ^ (inner >> 1)) >> (
                    inner % 2 * 16
                )  # of one number for two elements
                w = _rounded(
                    tl.where(w == w, w, float("nan")), dice, W
                )  # of the NaN whose bits have no carry
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
) -> None:
    """One update in place of weights, moments and steps. Gradients stay.

    Args:
        lr: a number, or a scalar tensor on the device.
        factor: scalar tensor that gradients are multiplied by.
        apply: bool tensor, a scalar or one value for each weight; where False nothing changes, bit
            for bit.

    Raises:
        ValueError: dtypes are mixed, or ``apply`` has another shape.
    """
    if tensors.weights:
        check_apply(apply, len(tensors.weights))
        adamw_8bit_part_(
            tensors, Part.whole(tensors, betas), lr, betas, eps, weight_decay, factor, apply
        )
        count_step_(tensors, apply)


def adamw_8bit_part_(
    tensors: QuantizedTensors,
    part: Part,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
) -> None:
    """``adamw_8bit_`` of a part of a launch, with the bits of the whole; ``tensors.steps`` are not
    read, and stay.

    Args:
        apply: a scalar, or one value for each weight of the whole launch.

    Raises:
        ValueError: dtypes are mixed.
    """
    count = len(tensors.weights)
    dtypes = {(w.dtype, g.dtype) for w, g in zip(tensors.weights, tensors.gradients, strict=True)}
    codes = {x.dtype for x in (*tensors.means, *tensors.squares)} - {torch.uint8}
    if len(dtypes) > 1 or codes or {x.dtype for x in tensors.lows} - {torch.int16}:
        raise ValueError(
            f"weights and gradients are {dtypes}, codes also {codes}: one set of dtypes at a "
            "time, codes in uint8"
        )
    apply = part.applies(apply, count)
    corrections = part.of_each(part.corrections, count)
    if not runs_here(tensors):
        _reference_part_(tensors, corrections, lr, betas, eps, weight_decay, factor, apply)
        return
    table = _table(tensors, CHUNK_8BIT)
    scales = _scales(tensors)
    device = table.addresses.device
    lr = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)
    over = (1 - betas[1]) / (1 - betas[0]) ** 2
    weight_dtype, gradient_dtype = (of_triton(dtype) for dtype in dtypes.pop())
    _adamw_8bit_kernel[(len(table.tensors),)](
        *table.on_device,
        scales.addresses,
        corrections,
        lr,
        factor,
        apply,
        part.seed(),
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
        apply is not None,
        apply is not None and apply.ndim == 1,
        table.aligned,
        BLOCK_8BIT,
        CHUNK_8BIT,
        MOMENT_BLOCK,
        TOP_RANK_VALUES[True],
        TOP_RANK_VALUES[False],
        MIN_MOMENT_AMAX,
        num_warps=4,
        enable_fp_fusion=False,  # else variants of the kernel round otherwise, and a part has not the bits of the whole
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


def _scales(tensors: QuantizedTensors) -> Table:
    return table_of([tensors.mean_scales, tensors.square_scales])


def looked_up_in_8_bits(tensors: QuantizedTensors) -> list[Tensor]:
    """What a launch for ``tensors`` looks up, made now."""
    return [*_table(tensors, CHUNK_8BIT).on_device, *_scales(tensors).on_device]


def adamw_8bit_reference_(
    tensors: QuantizedTensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
) -> None:
    """``adamw_8bit_`` in plain torch; weights without a master are rounded to the nearest."""
    corrections = Part.whole(tensors, betas).corrections
    _reference_part_(tensors, corrections, lr, betas, eps, weight_decay, factor, apply)
    count_step_(tensors, apply)


def _reference_part_(
    tensors: QuantizedTensors,
    corrections: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None,
    apply: Tensor | None,
) -> None:
    """Of these tensors alone; ``corrections`` and ``apply`` are theirs."""
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
        kept = (weight, tensors.lows[n]) if tensors.lows else (weight,)
        states = (
            tensors.means[n],
            tensors.mean_scales[n],
            tensors.squares[n],
            tensors.square_scales[n],
        )
        quantized = (*quantize_moment(mean, True), *quantize_moment(square, False))
        applies = None if apply is None else apply.expand(len(tensors.weights))[n]
        for old, updated in zip((*kept, *states), (*parts, *quantized), strict=True):
            old.copy_(updated if applies is None else torch.where(applies, updated, old))
