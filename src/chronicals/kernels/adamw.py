"""AdamW over many tensors in one launch, with an exact master for bf16 weights.

Loshchilov and Hutter, 2019, algorithm 2:

    g ← factor · g,   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
    w ← (1 − lr · λ) w − lr · (m / c₁) / (sqrt(v / c₂) + ε),   c = 1 − βᵗ

Weights are fp32, or bf16 with the lower half of their fp32 master in int16 (``split_master``).
Moments m and v are fp32, or bf16 with stochastic rounding (Gupta et al., 2015, section 3.1): the
probability of rounding up is the truncated part over the spacing, so updates too small for one
step add up over many. bf16 weights without a master are rounded stochastically, too. Gradients are
fp32, bf16 or fp16.

lr, ``factor`` and whether the step is applied are read from the device, and the kernel finds the
tensors by a table of pointers, so a CUDA graph can replay the launch. Bytes an element, besides the
gradient: 24 for fp32 weights and for bf16 weights with a master; 16 with states in bf16, 12 without
a master.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from chronicals.kernels.launch import lowbias32, runs_triton, tl, triton
from chronicals.kernels.tensor_lists import (
    LIST_BLOCK,
    LIST_CHUNK,
    Table,
    of_triton,
    pointers,
    table_of,
)

EXPONENT_BITS = 0x7F80
"""The exponent bits of a bf16 pattern; with all set it is infinity or NaN."""


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 ``[...]`` into bf16 ``hi`` and int16 ``lo`` of the same shape, without loss.

    With ``bits`` the pattern of the fp32 value, ``hi = (bits + 0x8000) >> 16`` (ties away from
    zero, unlike ``.bfloat16()``) and ``lo = bits − (hi << 16)``, a signed 16-bit remainder: every
    finite fp32 is ``(hi << 16) + lo`` exactly. NaN and infinity keep their kind, with ``lo = 0``.
    """
    bits = value.detach().contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = bits & -0x80000000
    finite = magnitude < EXPONENT_BITS << 16
    # A NaN whose mantissa is all in the lower half keeps a bit of it, or it would become infinity.
    high = torch.where(
        finite, (magnitude + 0x8000) >> 16, (magnitude >> 16) | ((magnitude & 0xFFFF) != 0).int()
    )
    low = torch.where(finite, magnitude - (high << 16), 0)
    pattern = (high | (sign >> 16 & 0x8000)).to(torch.int32)
    # Unsigned 16-bit patterns in int32, as int16 of the same bits.
    wrapped = torch.where(pattern >= 0x8000, pattern - 0x10000, pattern).to(torch.int16)
    return wrapped.view(torch.bfloat16), low.to(torch.int16)


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 value of a pair from ``split_master``."""
    pattern = hi.detach().contiguous().view(torch.int16).to(torch.int32)
    magnitude = ((pattern & 0x7FFF) << 16) + lo.to(torch.int32)
    return (magnitude | torch.where(pattern < 0, -0x80000000, 0).to(torch.int32)).view(
        torch.float32
    )


GOLDEN_RATIO_32 = 0x9E3779B9
"""2³² over the golden ratio, rounded to odd; multiplying by it spreads consecutive seeds."""


@triton.jit
def _joined(high, low):
    """Return the fp32 master of a bf16 weight and its lower half, as ``join_master`` does."""
    pattern = high.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = ((pattern & 0x7FFF) << 16) + low.to(tl.int32)
    return (magnitude | ((pattern & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _split(value):
    """Return bf16 and int16 halves of an fp32 master, as ``split_master`` does."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    special = (magnitude >> 16) | ((magnitude & 0xFFFF) != 0).to(tl.int32)  # a NaN stays one
    high = tl.where(finite, (magnitude + 0x8000) >> 16, special)
    low = tl.where(finite, magnitude - (high << 16), 0)
    return (high | ((bits >> 16) & 0x8000)).to(tl.int16).to(tl.bfloat16, bitcast=True), low.to(
        tl.int16
    )


@triton.jit
def _rounded(value, dice, KIND: tl.constexpr):
    """Return fp32 ``value`` in dtype ``KIND``; to bf16 by stochastic rounding.

    Adds the low 16 bits of ``dice`` to the 16 bits that are cut off. Values must be within range.
    """
    if tl.bfloat16 == KIND:
        bits = (value.to(tl.int32, bitcast=True) + (dice & 0xFFFF).to(tl.int32)) >> 16
        rounded = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value
    return rounded


@triton.jit
def _adamw_kernel(
    # addresses, sizes and chunks of the tensors (tensor_lists.py)
    table_ptr,
    sizes_ptr,
    tensors_ptr,
    firsts_ptr,
    # read from the device
    corrections_ptr,
    lr_ptr,
    factor_ptr,
    apply_ptr,
    seed_ptr,
    # tensors, and AdamW's numbers; rest1 is 1 − β₁, rest2 1 − β₂
    count,
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    # dtypes of weights, gradients and moments
    W: tl.constexpr,
    G: tl.constexpr,
    STATE: tl.constexpr,
    # options; APPLY_EACH: one flag for each tensor
    HAS_LOW: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_APPLY: tl.constexpr,
    APPLY_EACH: tl.constexpr,
    # addresses and sizes suit loads of 16 bytes
    ALIGNED: tl.constexpr,
    # elements at a time, and of a program
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update one chunk of one tensor.

    ``table`` is ``[5, count]``: addresses of weights, gradients, m, v and lower halves.
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
        of_square = 1.0 / tl.load(corrections_ptr + count + tensor)
        decay = 1.0 - lr * weight_decay
        factor = 1.0
        if HAS_FACTOR:
            factor = tl.load(factor_ptr).to(tl.float32)
        key = lowbias32(
            tl.load(seed_ptr).to(tl.uint32) * 0x9E3779B9 + tl.program_id(0).to(tl.uint32)
        )
        for offset in range(0, CHUNK, BLOCK):
            at = start + offset + tl.arange(0, BLOCK)
            inside = at < size
            w_at = pointers(table_ptr, tensor, at, W, ALIGNED, BLOCK)
            g_at = pointers(table_ptr + count, tensor, at, G, ALIGNED, BLOCK)
            m_at = pointers(table_ptr + 2 * count, tensor, at, STATE, ALIGNED, BLOCK)
            v_at = pointers(table_ptr + 3 * count, tensor, at, STATE, ALIGNED, BLOCK)
            w = tl.load(w_at, mask=inside, other=0.0)
            g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * factor
            m = tl.fma(tl.load(m_at, mask=inside, other=0.0).to(tl.float32), beta1, g * rest1)
            v = tl.fma(tl.load(v_at, mask=inside, other=0.0).to(tl.float32), beta2, g * g * rest2)
            if HAS_LOW:
                low_at = pointers(table_ptr + 4 * count, tensor, at, tl.int16, ALIGNED, BLOCK)
                w = _joined(w, tl.load(low_at, mask=inside, other=0))
            w = tl.fma(w.to(tl.float32), decay, -rate * m / (tl.sqrt(v * of_square) + eps))
            dice = 0
            if tl.bfloat16 == STATE or (tl.bfloat16 == W and not HAS_LOW):
                dice = lowbias32(key ^ (offset + tl.arange(0, BLOCK)))
            if HAS_LOW:
                w, low = _split(w)
                tl.store(low_at, low, mask=inside)
            elif tl.bfloat16 == W:
                # Another NaN might overflow to a number by the carry; this one does not.
                w = _rounded(tl.where(w == w, w, float("nan")), lowbias32(dice), W)
            tl.store(w_at, w, mask=inside)
            tl.store(m_at, _rounded(m, dice, STATE), mask=inside)
            tl.store(v_at, _rounded(v, dice >> 16, STATE), mask=inside)


@dataclass
class Tensors:
    """The tensors that one launch updates.

    Lists have one entry a weight (``lows`` may be empty). Entries of a weight have its size, except
    ``steps``, and are dense.

    Attributes:
        CHUNK: elements that one program updates.
        means, squares: the moments m and v.
        lows: lower halves of the masters of bf16 weights.
        steps: fp32 scalars on the device, the number of earlier updates of each weight.
    """

    CHUNK: ClassVar[int] = LIST_CHUNK
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    lows: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """Return the tables that a launch for these tensors reads."""
        # Without lower halves the weights take their row, which is not read.
        rows = [self.weights, self.gradients, self.means, self.squares, self.lows or self.weights]
        return [table_of(rows, self.CHUNK)]


@dataclass(frozen=True)
class LaunchPart:
    """The position of a part within a whole launch, whose results it reproduces bit by bit.

    Stochastic rounding depends on an element's chunk in the whole launch, so a part must know its
    place. It has consecutive tensors of the launch; its first may begin at element ``begin``, and
    its last may end early.

    Attributes:
        steps: fp32 ``[count]``, earlier updates of each tensor of the whole launch.
        corrections: fp32 ``[2, count]``, 1 − βᵗ of the coming step, for β₁ and β₂.
        tensor: number of the part's first tensor in the launch.
        begin: first element of that tensor in the part, a multiple of the kernel's ``CHUNK``.
        chunk: number of the part's first chunk, counted over the launch.
    """

    steps: Tensor
    corrections: Tensor
    tensor: int = 0
    begin: int = 0
    chunk: int = 0

    @classmethod
    def whole(cls, tensors: Tensors, betas: tuple[float, float]) -> LaunchPart:
        """Return the part that is the whole launch."""
        steps = torch.stack(tensors.steps)
        # In fp64, since 1 − 0.999 in fp32 is wrong in its fifth digit.
        after = steps.double() + 1
        corrections = torch.stack([1 - beta**after for beta in betas]).float()
        return cls(steps, corrections)

    def of_each(self, values: Tensor, count: int) -> Tensor:
        """Return ``values`` ``[..., tensors of the launch]`` of the part's ``count`` tensors."""
        return values[..., self.tensor : self.tensor + count].contiguous()

    def applies(self, apply: Tensor | None, count: int) -> Tensor | None:
        """Return the part of a launch's ``apply``; a scalar as it is.

        Raises:
            ValueError: ``apply`` is no scalar and has not one value for each weight of the launch.
        """
        if apply is None or apply.ndim == 0:
            return apply
        if apply.shape != self.steps.shape:
            raise ValueError(
                f"apply has the shape {tuple(apply.shape)}: give a scalar, or a value for each of "
                f"{len(self.steps)} weights"
            )
        return self.of_each(apply, count)

    def seed(self) -> Tensor:
        """Return the seed of the rounding: new after every update, the same if a step is repeated."""
        # The kernel hashes seed · GOLDEN_RATIO_32 + chunk modulo 2³² and counts chunks from 0.
        # Adding chunk / GOLDEN_RATIO_32 (modulo 2³²) to the seed shifts its count to the part's.
        of_launch = self.steps.sum(dtype=torch.int64)
        return of_launch + self.chunk * pow(GOLDEN_RATIO_32, -1, 2**32) if self.chunk else of_launch


def fused_adamw_(
    tensors: Tensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
    part: LaunchPart | None = None,
) -> None:
    """Update weights, states and steps in place; gradients are only read.

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
    kinds = {
        (w.dtype, g.dtype, m.dtype)
        for w, g, m in zip(tensors.weights, tensors.gradients, tensors.means, strict=True)
    }
    others = (
        {x.dtype for x in tensors.squares} - {m for _, _, m in kinds},
        {x.dtype for x in tensors.lows} - {torch.int16},
    )
    if len(kinds) > 1 or any(others):
        raise ValueError(
            f"weights, gradients and means are {kinds}, unexpected dtypes of squares and lows "
            f"{others}: give one set of dtypes at a time, squares like means, lows in int16"
        )
    if not runs_here(tensors):
        fused_adamw_reference_(tensors, lr, betas, eps, weight_decay, factor, apply, part)
        return
    count = len(tensors.weights)
    place = part or LaunchPart.whole(tensors, betas)
    applies = place.applies(apply, count)
    kind_of_weight, kind_of_gradient, kind_of_state = (of_triton(kind) for kind in kinds.pop())
    (table,) = tensors.tables()
    device = table.addresses.device
    lr = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)
    _adamw_kernel[(len(table.tensors),)](
        *table.on_device,
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
        1 - betas[1],
        eps,
        kind_of_weight,
        kind_of_gradient,
        kind_of_state,
        bool(tensors.lows),
        factor is not None,
        applies is not None,
        applies is not None and applies.ndim == 1,
        table.aligned,
        LIST_BLOCK,
        LIST_CHUNK,
        num_warps=4,
        # With fusion, variants of the kernel would round differently, and a part would not have
        # the bits of the whole.
        enable_fp_fusion=False,
    )
    torch.autograd.graph.increment_version(
        [*tensors.weights, *tensors.means, *tensors.squares, *tensors.lows]
    )
    if part is None:
        count_step_(tensors, apply)


def count_step_(tensors: Tensors, apply: Tensor | None) -> None:
    """Add 1 to the steps of each weight that was updated."""
    if apply is None:
        torch._foreach_add_(tensors.steps, 1.0)
    else:  # a list, since _foreach_add_ would copy a single tensor to the host
        counted = apply.to(torch.float32)
        torch._foreach_add_(
            tensors.steps,
            list(counted.unbind()) if counted.ndim else [counted] * len(tensors.steps),
        )


def runs_here(tensors: Tensors) -> bool:
    """Return whether a kernel takes these tensors: dense, and weights of fp32 or bf16."""
    rows = tensors.weights, tensors.gradients, tensors.means, tensors.squares, tensors.lows
    dense = all(x.is_contiguous() for row in rows for x in row)
    return (
        dense
        and runs_triton(*tensors.weights, *tensors.gradients)
        and tensors.weights[0].dtype != torch.float16
    )


REFERENCE_COPIES = 7
"""fp32 tensors of a weight's size that the reference holds at most, of the scaled gradient on.

It has six of its own, and of the weight before as many until each is made anew.
"""

REFERENCE_COPIES_OF_MASTERS = 15
"""The same where weights have masters, which are joined and split in 32 and 64-bit integers."""


def fused_adamw_reference_(
    tensors: Tensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
    part: LaunchPart | None = None,
) -> None:
    """Compute ``fused_adamw_`` in plain torch; stochastic rounding draws other random bits."""
    place = part or LaunchPart.whole(tensors, betas)
    count = len(tensors.weights)
    flags = place.applies(apply, count)
    corrections = place.of_each(place.corrections, count)
    for n, (weight, gradient, mean, square) in enumerate(
        zip(tensors.weights, tensors.gradients, tensors.means, tensors.squares, strict=True)
    ):
        number = place.tensor + n
        begin = 0 if n else place.begin
        step = place.steps[number]
        applies = None if flags is None else flags.expand(count)[n]
        if applies is not None and applies.device.type == "cpu":  # a card's host would wait for it
            if not applies:
                continue
            applies = None
        g = gradient.float() if factor is None else gradient.float() * factor
        value = (
            join_master(weight, tensors.lows[n])
            if tensors.lows
            else weight.to(torch.promote_types(weight.dtype, g.dtype))
        )
        # In place wherever the values are a step's own: on a CPU new memory costs more than the
        # arithmetic.
        new_mean = (mean.float() * betas[0]).add_(g * (1 - betas[0]))
        new_square = (square.float() * betas[1]).add_(g.square().mul_(1 - betas[1]))
        root = (new_square / corrections[1, n]).sqrt_().add_(eps)
        change = (new_mean / corrections[0, n]).mul_(lr).div_(root)
        new = (value * (1 - lr * weight_decay)).sub_(change)
        parts = (
            split_master(new)
            if tensors.lows
            else (_in_type(new, weight.dtype, begin, step, number, 2),)
        )
        stored = (weight, tensors.lows[n]) if tensors.lows else (weight,)
        states = (
            _in_type(x, mean.dtype, begin, step, number, which)
            for which, x in enumerate((new_mean, new_square))
        )
        for old, updated in zip((*stored, mean, square), (*parts, *states)):
            old.copy_(updated if applies is None else torch.where(applies, updated, old))
    if part is None:
        count_step_(tensors, apply)


def _in_type(value: Tensor, kind: torch.dtype, begin: int, step: Tensor, *place: int) -> Tensor:
    """Return ``value`` in dtype ``kind``; to bf16 by stochastic rounding.

    Args:
        value: elements of a tensor from number ``begin`` on.
        kind: dtype of the result.
        begin: number of the first element.
        step: earlier updates of the tensor; with ``place`` and the number of an element it
            determines its random bits.
        *place: number of the tensor, and which of its values this is.
    """
    if kind != torch.bfloat16:
        return value.to(kind)
    seed = hash((int(step), *place)) % 2**63
    drawing = torch.Generator().manual_seed(seed)
    dice = torch.randint(0, 2**16, (begin + value.numel(),), generator=drawing, dtype=torch.int32)[
        begin:
    ].view(value.shape)
    cut = (value.float().contiguous().view(torch.int32) + dice.to(value.device)) & -(2**16)
    return torch.where(value.isnan(), value, cut.view(torch.float32)).bfloat16()
