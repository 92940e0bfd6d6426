"""AdamW over many tensors in one launch, with both moments in 8 bits (Dettmers et al., 2022, sections 2 and 3).

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   g times ``factor`` before
    w ← (1 − lr · λ) w − lr · (m / c₁) / (sqrt(v / c₂) + ε),   c = 1 − βᵗ

The update takes m and v as they are in fp32; afterwards they are kept as codes and, for each block of 256 elements along the
tensor, the largest magnitude in fp32. The code is dynamic: a decade for every exponent from 1e-6 to 1, divided into as many
equal cells as a step up the decades doubles, whose means are its values, and 0 and 1; for m with a sign, for v without one,
with twice as many cells. A cell is found by arithmetic, so nothing is searched.
Weights are fp32, or bf16 with or without the lower half of their fp32 master (``adamw.py``); those without are rounded
stochastically. Bytes an element beside the gradient: 4 for bf16 weights, 8 with masters or for fp32, and 4.06 for both tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

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
from chronicals.kernels.launch import tl, triton
from chronicals.kernels.lowbias32 import lowbias32
from chronicals.kernels.master import join_master, split_master
from chronicals.kernels.tensor_lists import BLOCK, CHUNK, Table, of_triton, table_of

SIZE = 256
"""Elements that share a scale."""

DECADES = 7


@dataclass
class QuantizedTensors(Tensors):
    """``Tensors`` whose means and squares are codes, uint8, with their scales.

    Attributes:
        mean_scales, square_scales: fp32 ``[⌈elements / 256⌉]``, the largest magnitude of each block.
    """

    mean_scales: list[Tensor] = field(default_factory=list)
    square_scales: list[Tensor] = field(default_factory=list)


def ranked_values(signed: bool) -> Tensor:
    """fp32, ascending from 0 to 1: what the code's magnitudes stand for. Signed 129, of which 1 has no negative; else 256."""
    values = [torch.zeros(1)]
    for exponent in range(DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (not signed)) + 1)
        values.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - DECADES + 1))
    return torch.cat([*values, torch.ones(1)])


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """fp32 ``[256]``, what each code stands for; signed ones ascend from the least, so that 127 is 0."""
    ranked = ranked_values(signed)
    return (torch.cat([-ranked[1:-1].flip(0), ranked]) if signed else ranked).to(device)


@cache
def _limits(signed: bool, device: torch.device) -> Tensor:
    """fp32 ``[8]``: the least magnitudes that belong to each decade, and to 1: midpoints to the value below."""
    ranked, shift = ranked_values(signed), int(not signed)
    firsts = [2 ** (exponent + shift) - shift for exponent in range(DECADES)] + [len(ranked) - 1]
    return torch.stack([(ranked[first - 1] + ranked[first]) / 2 for first in firsts]).to(device)


@cache
def _tens(device: torch.device) -> Tensor:
    """fp32 ``[7]``: what makes a magnitude of a decade one from 0.1 to 1."""
    return torch.tensor([10.0 ** (DECADES - 1 - exponent) for exponent in range(DECADES)], device=device)


def quantize_moment(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes, uint8 and shaped like ``values``, and scales, fp32 ``[⌈elements / 256⌉]``; in plain torch."""
    flat = values.float().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % SIZE)).view(-1, SIZE)
    scales = blocks.abs().amax(1) if blocks.numel() else flat.new_empty(0)
    ones = torch.where(scales > 0, 1.0 / scales, 0.0)
    scaled = (blocks * ones.unsqueeze(1)).reshape(-1)[: flat.numel()]
    magnitude, limits = scaled.abs(), _limits(signed, values.device)
    decade = (magnitude.unsqueeze(1) >= limits[1:DECADES]).sum(1)
    cells = 2 ** (decade + (not signed))
    within = magnitude * _tens(values.device)[decade] - 0.1
    cell = (within * (cells.float() * (1 / 0.9))).to(torch.int64).clamp(min=0).minimum(cells - 1)
    rank = cells - int(not signed) + cell
    rank = torch.where(magnitude >= limits[0], rank, 0)
    if not signed:
        return torch.where(magnitude >= limits[DECADES], 255, rank).to(torch.uint8).view(values.shape), scales
    codes = torch.where(scaled < 0, 127 - rank, torch.where(magnitude >= limits[DECADES], 255, 127 + rank))
    return codes.to(torch.uint8).view(values.shape), scales


def dequantize_moment(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """fp32, shaped like ``codes``."""
    each = scales.repeat_interleave(SIZE)[: codes.numel()].view(codes.shape)
    return _values(signed, codes.device)[codes.int()] * each


@triton.jit
def _code(value, scale, SIGNED: tl.constexpr):
    """Codes, int32, of ``value`` ``[BLOCKS, SIZE]`` over ``scale`` ``[BLOCKS]``; those of ``quantize_moment``.

    Over the magnitude, the number of a cell is a concave chain of lines, one a decade: the least of them holds, and the power
    of two in it is the decade. The lower fifth of a decade's first cell is nearer to the value below. The first line runs so
    that this makes 0 of what is nearer to 0, the last one adds the value 1. A product takes half the time of a comparison.
    """
    first: tl.constexpr = 1 if SIGNED else 2  # cells of the lowest decade
    one = tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
    scaled = value * one[:, None]
    magnitude = tl.abs(scaled)
    steepest: tl.constexpr = 0.8 / (0.05e-6 + 0.675e-6 / first)
    cell = tl.fma(magnitude, steepest, first + 1 - steepest * (0.1e-6 + 0.9e-6 / first))
    for decade in tl.static_range(1, 7):
        cell = tl.minimum(cell, tl.fma(magnitude, first / 0.9e-6 * 0.2**decade, first * 2**decade * 8 / 9))
    power = (cell.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    cell = tl.minimum(cell, tl.fma(cell, 1.25, tl.fma(power, -0.25, -0.25)))
    cell = tl.maximum(cell, tl.fma(scaled - 1, 128 * first, 128 * first + 0.45))
    rank = (cell + 8388607.5).to(tl.int32, bitcast=True) - (0x4B000000 + first - 1)  # above 2²³ nothing has a fraction
    return tl.where(scaled < 0, 127 - rank, 127 + rank) if SIGNED else rank


@triton.jit
def _base(table_ptr, tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to the first element of a tensor of a row of the table."""
    base = tl.load(table_ptr + tensor).to(tl.pointer_type(KIND))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def _adamw_8bit_kernel(
    table_ptr, sizes_ptr, tensors_ptr, firsts_ptr, scales_ptr, corrections_ptr, lr_ptr, factor_ptr, apply_ptr, seed_ptr, count,
    mean_values_ptr, square_values_ptr, weight_decay, beta1, rest1, beta2, rest2, eps,
    W: tl.constexpr, G: tl.constexpr, HAS_LOW: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_APPLY: tl.constexpr,
    APPLY_EACH: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """``table`` ``[5, count]``: addresses of weights, gradients, codes of m and v, lower halves; ``scales`` ``[2, count]``."""
    applies = True
    if APPLY_EACH:
        applies = tl.load(apply_ptr + tl.load(tensors_ptr + tl.program_id(0))).to(tl.int1)
    elif HAS_APPLY:
        applies = tl.load(apply_ptr).to(tl.int1)
    if applies:
        tensor = tl.load(tensors_ptr + tl.program_id(0))
        start, size = (tl.program_id(0) - tl.load(firsts_ptr + tensor)) * CHUNK, tl.load(sizes_ptr + tensor)
        if ALIGNED:
            size = tl.multiple_of(size, 8)
        lr = tl.load(lr_ptr).to(tl.float32)
        rate, of_square = lr / tl.load(corrections_ptr + tensor), 1.0 / tl.load(corrections_ptr + count + tensor)
        decay = 1.0 - lr * weight_decay
        factor = 1.0
        if HAS_FACTOR:
            factor = tl.load(factor_ptr).to(tl.float32)
        key = lowbias32(tl.load(seed_ptr).to(tl.uint32) * 0x9E3779B9 + tl.program_id(0).to(tl.uint32))
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
            scale_at, has_scale = (start + offset) // SIZE + blocks, start + offset + blocks * SIZE < size
            w = tl.load(w_ptr + at, mask=inside, other=0.0)
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
            m = tl.load(mean_values_ptr + tl.load(m_ptr + at, mask=inside, other=127).to(tl.int32))
            v = tl.load(square_values_ptr + tl.load(v_ptr + at, mask=inside, other=0).to(tl.int32))
            m = tl.fma(m, (tl.load(m_scale_ptr + scale_at, mask=has_scale, other=0.0) * beta1)[:, None], g * rest1)
            v = tl.fma(v, (tl.load(v_scale_ptr + scale_at, mask=has_scale, other=0.0) * beta2)[:, None], g * g * rest2)
            if HAS_LOW:
                w = _joined(w, tl.load(low_ptr + at, mask=inside, other=0))
            root = tl.rsqrt(tl.sqrt(v * of_square) + eps)  # whose square is a reciprocal without the cases of a division
            w = tl.fma(w.to(tl.float32), decay, -rate * m * root * root)
            if HAS_LOW:
                w, low = _split(w)
                tl.store(low_ptr + at, low, mask=inside)
            elif tl.bfloat16 == W:
                dice = lowbias32(key ^ offset ^ (inner >> 1)) >> (inner % 2 * 16)  # of one number for two elements
                w = _rounded(tl.where(w == w, w, float("nan")), dice, W)  # of the NaN whose bits have no carry
            tl.store(w_ptr + at, w, mask=inside)
            m_scale, v_scale = tl.max(tl.abs(m), axis=1), tl.max(v, axis=1)
            tl.store(m_scale_ptr + scale_at, m_scale, mask=has_scale)
            tl.store(v_scale_ptr + scale_at, v_scale, mask=has_scale)
            tl.store(m_ptr + at, _code(m, m_scale, True).to(tl.uint8), mask=inside)
            tl.store(v_ptr + at, _code(v, v_scale, False).to(tl.uint8), mask=inside)


def adamw_8bit_(
    tensors: QuantizedTensors, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None = None, apply: Tensor | None = None,
) -> None:  # fmt: skip
    """One update in place of weights, moments and steps. Gradients stay.

    Args:
        lr: a number, or a scalar tensor on the device.
        factor: scalar tensor that gradients are multiplied by.
        apply: bool tensor, a scalar or one value for each weight; where False nothing changes, bit for bit.

    Raises:
        ValueError: dtypes are mixed, or ``apply`` has another shape.
    """
    if tensors.weights:
        check_apply(apply, len(tensors.weights))
        adamw_8bit_part_(tensors, Part.whole(tensors, betas), lr, betas, eps, weight_decay, factor, apply)
        count_step_(tensors, apply)


def adamw_8bit_part_(
    tensors: QuantizedTensors, part: Part, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None = None, apply: Tensor | None = None,
) -> None:  # fmt: skip
    """``adamw_8bit_`` of a part of a launch, with the bits of the whole; ``tensors.steps`` are not read, and stay.

    Args:
        apply: a scalar, or one value for each weight of the whole launch.

    Raises:
        ValueError: dtypes are mixed.
    """
    count = len(tensors.weights)
    dtypes = {(w.dtype, g.dtype) for w, g in zip(tensors.weights, tensors.gradients, strict=True)}
    codes = {x.dtype for x in (*tensors.means, *tensors.squares)} - {torch.uint8}
    if len(dtypes) > 1 or codes or {x.dtype for x in tensors.lows} - {torch.int16}:
        raise ValueError(f"weights and gradients are {dtypes}, codes also {codes}: one set of dtypes at a time, codes in uint8")
    apply, corrections = part.applies(apply, count), part.of_each(part.corrections, count)
    if not runs_here(tensors):
        _reference_part_(tensors, corrections, lr, betas, eps, weight_decay, factor, apply)
        return
    table, scales = _table(tensors), _scales(tensors)
    device = table.addresses.device
    lr = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)
    weight_dtype, gradient_dtype = (of_triton(dtype) for dtype in dtypes.pop())
    _adamw_8bit_kernel[(len(table.tensors),)](
        *table.on_device, scales.addresses, corrections, lr,
        factor, apply, part.seed(), count, _values(True, device), _values(False, device),
        weight_decay, betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps,
        weight_dtype, gradient_dtype, bool(tensors.lows), factor is not None, apply is not None,
        apply is not None and apply.ndim == 1, table.aligned, BLOCK, CHUNK, SIZE, num_warps=4,
        enable_fp_fusion=False,  # else variants of the kernel round otherwise, and a part has not the bits of the whole
    )  # fmt: skip
    changed = (tensors.weights, tensors.lows, tensors.means, tensors.squares, tensors.mean_scales, tensors.square_scales)
    torch.autograd.graph.increment_version([x for row in changed for x in row])


def _scales(tensors: QuantizedTensors) -> Table:
    return table_of([tensors.mean_scales, tensors.square_scales])


def looked_up_in_8_bits(tensors: QuantizedTensors) -> list[Tensor]:
    """What a launch for ``tensors`` looks up, made now."""
    return [*_table(tensors).on_device, *_scales(tensors).on_device]


def adamw_8bit_reference_(
    tensors: QuantizedTensors, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None = None, apply: Tensor | None = None,
) -> None:  # fmt: skip
    """``adamw_8bit_`` in plain torch; weights without a master are rounded to the nearest."""
    corrections = Part.whole(tensors, betas).corrections
    _reference_part_(tensors, corrections, lr, betas, eps, weight_decay, factor, apply)
    count_step_(tensors, apply)


def _reference_part_(
    tensors: QuantizedTensors, corrections: Tensor, lr: float | Tensor, betas: tuple[float, float], eps: float,
    weight_decay: float, factor: Tensor | None, apply: Tensor | None,
) -> None:  # fmt: skip
    """Of these tensors alone; ``corrections`` and ``apply`` are theirs."""
    for n, (weight, gradient) in enumerate(zip(tensors.weights, tensors.gradients, strict=True)):
        g = gradient.float() if factor is None else gradient.float() * factor
        value = join_master(weight, tensors.lows[n]) if tensors.lows else weight.float()
        mean = dequantize_moment(tensors.means[n], tensors.mean_scales[n], True) * betas[0] + g * (1 - betas[0])
        square = dequantize_moment(tensors.squares[n], tensors.square_scales[n], False) * betas[1] + g * g * (1 - betas[1])
        root = (square * (1.0 / corrections[1, n])).sqrt() + eps
        new = value * (1 - lr * weight_decay) - (lr / corrections[0, n]) * mean / root
        parts = split_master(new) if tensors.lows else (new.to(weight.dtype),)
        kept = (weight, tensors.lows[n]) if tensors.lows else (weight,)
        states = (tensors.means[n], tensors.mean_scales[n], tensors.squares[n], tensors.square_scales[n])
        quantized = (*quantize_moment(mean, True), *quantize_moment(square, False))
        applies = None if apply is None else apply.expand(len(tensors.weights))[n]
        for old, updated in zip((*kept, *states), (*parts, *quantized), strict=True):
            old.copy_(updated if applies is None else torch.where(applies, updated, old))
