"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) over many tensors in one launch, with an exact
master for bf16 weights.

    g ← factor · g,   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
    w ← (1 − lr · λ) w − lr · (m / c₁) / (sqrt(v / c₂) + ε),   c = 1 − βᵗ

Weights are fp32, or bf16 with the lower half of their fp32 master in int16 (see ``master.py``). m
and v are fp32, or bf16 rounded stochastically (Gupta et al., 2015, section 3.1): up as often as the
part cut off is of a spacing, so that what is too small for one step adds up over many; so are bf16
weights without a master. Gradients are fp32, bf16 or fp16. lr, ``factor`` and whether the step
counts at all are read from the device, and a table of pointers leads to the tensors: a launch can
be replayed as it is. Bytes an element: 24 and the gradient for bf16 weights as for fp32 ones; 16
with states in bf16, 12 without a master.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from chronicals.kernels.launch import runs_triton, tl, triton
from chronicals.kernels.lowbias32 import lowbias32
from chronicals.kernels.master import join_master, split_master
from chronicals.kernels.tensor_lists import (
    LIST_BLOCK,
    LIST_CHUNK,
    Table,
    of_triton,
    pointers,
    table_of,
)

GOLDEN_RATIO_32 = 0x9E3779B9
"""2³² over the golden ratio, odd: what seeds are spread by."""


@triton.jit
def _joined(high, low):
    pattern = high.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = ((pattern & 0x7FFF) << 16) + low.to(tl.int32)
    return (magnitude | ((pattern & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _split(value):
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    kept = (magnitude >> 16) | ((magnitude & 0xFFFF) != 0).to(tl.int32)  # a NaN stays one
    high = tl.where(finite, (magnitude + 0x8000) >> 16, kept)
    low = tl.where(finite, magnitude - (high << 16), 0)
    return (high | ((bits >> 16) & 0x8000)).to(tl.int16).to(tl.bfloat16, bitcast=True), low.to(
        tl.int16
    )


@triton.jit
def _rounded(value, dice, KIND: tl.constexpr):
    """``value`` in ``KIND``; bf16 by adding 16 random bits below those that stay. Not for values
    beyond its range.
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
    """``table`` ``[5, count]``: addresses of weights, gradients, m, v and lower halves."""
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
                w = _rounded(
                    tl.where(w == w, w, float("nan")), lowbias32(dice), W
                )  # of the NaN whose bits have no carry
            tl.store(w_at, w, mask=inside)
            tl.store(m_at, _rounded(m, dice, STATE), mask=inside)
            tl.store(v_at, _rounded(v, dice >> 16, STATE), mask=inside)


@dataclass
class Tensors:
    """What one launch updates: lists of equal length, tensor by tensor of one size and all dense.

    Attributes:
        lows: lower halves of the masters of bf16 weights, or none.
        steps: fp32 scalars on the device, how often each was updated before.
    """

    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    lows: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)


def fused_adamw_(
    tensors: Tensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
) -> None:
    """One update in place of weights, states and steps. Gradients stay.

    Args:
        lr: a number, or a scalar tensor on the device.
        factor: scalar tensor that gradients are multiplied by.
        apply: bool tensor, a scalar or one value for each weight; where False nothing changes, bit
            for bit.

    Raises:
        ValueError: types are mixed, or ``apply`` has another shape.
    """
    if tensors.weights:
        check_apply(apply, len(tensors.weights))
        fused_adamw_part_(
            tensors, Part.whole(tensors, betas), lr, betas, eps, weight_decay, factor, apply
        )
        count_step_(tensors, apply)


@dataclass(frozen=True)
class Part:
    """Where tensors lie in a longer launch, with whose bits they are to be updated, and what of it
    all its parts read.

    They are consecutive tensors of that launch: of the first perhaps what follows on ``begin``, of
        the last perhaps not all.

    Attributes:
        steps: fp32 ``[count]``, how often each tensor of the launch was updated before.
        corrections: fp32 ``[2, count]``, 1 − βᵗ of the step to come.
        tensor: number of the first tensor.
        begin: the first element of it that is here, a multiple of the kernel's ``CHUNK``.
        chunk: number of the first chunk, of as many elements, counted over the launch.
    """

    steps: Tensor
    corrections: Tensor
    tensor: int = 0
    begin: int = 0
    chunk: int = 0

    @classmethod
    def whole(cls, tensors: Tensors, betas: tuple[float, float]) -> Part:
        """All of a launch."""
        steps = torch.stack(tensors.steps)
        return cls(steps, _corrections(steps, betas))

    def of_each(self, values: Tensor, count: int) -> Tensor:
        """Of ``values`` ``[..., count of the launch]`` those of the ``count`` tensors that are
        here.
        """
        return values[..., self.tensor : self.tensor + count].contiguous()

    def applies(self, apply: Tensor | None, count: int) -> Tensor | None:
        """The same of a launch's ``apply``."""
        return apply if apply is None or apply.ndim == 0 else self.of_each(apply, count)

    def seed(self) -> Tensor:
        """Of the rounding: another whenever any weight was updated, the same when the step is
        repeated.

        A kernel's dice depend on ``seed * GOLDEN + chunk`` modulo 2³², where it counts chunks from
        0.
        """
        of_launch = self.steps.sum(dtype=torch.int64)
        return of_launch + self.chunk * pow(GOLDEN_RATIO_32, -1, 2**32) if self.chunk else of_launch


def fused_adamw_part_(
    tensors: Tensors,
    part: Part,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
) -> None:
    """``fused_adamw_`` of a part of a launch, with the bits of the whole; ``tensors.steps`` are not
    read, and stay.

    Args:
        apply: a scalar, or one value for each weight of the whole launch.

    Raises:
        ValueError: types are mixed.
    """
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
            f"weights, gradients and means are {kinds}, squares and lows of other types than "
            f"these and int16 {others}: "
            "one set of types at a time, squares like means, lows in int16"
        )
    count = len(tensors.weights)
    apply = part.applies(apply, count)
    corrections = part.of_each(part.corrections, count)
    if not runs_here(tensors):
        _reference_part_(tensors, part, lr, betas, eps, weight_decay, factor, apply)
        return
    kind_of_weight, kind_of_gradient, kind_of_state = (of_triton(kind) for kind in kinds.pop())
    table = _table(tensors)
    device = table.addresses.device
    lr = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)
    _adamw_kernel[(len(table.tensors),)](
        *table.on_device,
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
        1 - betas[1],
        eps,
        kind_of_weight,
        kind_of_gradient,
        kind_of_state,
        bool(tensors.lows),
        factor is not None,
        apply is not None,
        apply is not None and apply.ndim == 1,
        table.aligned,
        LIST_BLOCK,
        LIST_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,  # else variants of the kernel round otherwise, and a part has not the bits of the whole
    )
    torch.autograd.graph.increment_version(
        [*tensors.weights, *tensors.means, *tensors.squares, *tensors.lows]
    )


def check_apply(apply: Tensor | None, count: int) -> None:
    """Raises ValueError where it is neither a scalar nor one value for each of ``count``
    weights.
    """
    if apply is not None and apply.shape not in ((), (count,)):
        raise ValueError(
            f"apply has the shape {tuple(apply.shape)}: give a scalar, or a value for each of "
            f"{count} weights"
        )


def count_step_(tensors: Tensors, apply: Tensor | None) -> None:
    """One step more for each weight that was updated."""
    if apply is None:
        torch._foreach_add_(tensors.steps, 1.0)
    else:  # a list, since one tensor for all would be brought to the host
        counted = apply.to(torch.float32)
        torch._foreach_add_(
            tensors.steps,
            list(counted.unbind()) if counted.ndim else [counted] * len(tensors.steps),
        )


def runs_here(tensors: Tensors) -> bool:
    """Whether a kernel takes them: dense, and weights of fp32 or bf16."""
    dense = all(x.is_contiguous() for row in _rows(tensors) for x in row)
    return (
        dense
        and runs_triton(*tensors.weights, *tensors.gradients)
        and tensors.weights[0].dtype != torch.float16
    )


def _rows(tensors: Tensors) -> list[list[Tensor]]:
    return [
        tensors.weights,
        tensors.gradients,
        tensors.means,
        tensors.squares,
        tensors.lows or tensors.weights,
    ]


def _table(tensors: Tensors, chunk: int = LIST_CHUNK) -> Table:
    return table_of(_rows(tensors), chunk)


def looked_up(tensors: Tensors) -> list[Tensor]:
    """What a launch for ``tensors`` looks up, made now."""
    return _table(tensors).on_device


def _corrections(steps: Tensor, betas: tuple[float, float]) -> Tensor:
    """1 − βᵗ of the step to come, fp32 ``[2, count]``; made in fp64, since 1 − 0.999 in fp32 is
    wrong in its fifth digit.
    """
    after = steps.double() + 1
    return torch.stack([1 - beta**after for beta in betas]).float()


def fused_adamw_reference_(
    tensors: Tensors,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    apply: Tensor | None = None,
) -> None:
    part = Part.whole(tensors, betas)
    _reference_part_(tensors, part, lr, betas, eps, weight_decay, factor, apply)
    count_step_(tensors, apply)


def _reference_part_(
    tensors: Tensors,
    part: Part,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None,
    apply: Tensor | None,
) -> None:
    """Of these tensors alone; ``apply`` is theirs."""
    corrections = part.of_each(part.corrections, len(tensors.weights))
    for n, (weight, gradient, mean, square) in enumerate(
        zip(tensors.weights, tensors.gradients, tensors.means, tensors.squares, strict=True)
    ):
        number = part.tensor + n
        begin = 0 if n else part.begin
        step = part.steps[number]
        g = gradient.float() if factor is None else gradient.float() * factor
        value = (
            join_master(weight, tensors.lows[n])
            if tensors.lows
            else weight.to(torch.promote_types(weight.dtype, g.dtype))
        )
        new_mean = mean.float() * betas[0] + g * (1 - betas[0])
        new_square = square.float() * betas[1] + g.square() * (1 - betas[1])
        root = (new_square / corrections[1, n]).sqrt_().add_(eps)
        new = value * (1 - lr * weight_decay) - lr * (new_mean / corrections[0, n]) / root
        parts = (
            split_master(new)
            if tensors.lows
            else (_in_type(new, weight.dtype, begin, step, number, 2),)
        )
        kept = (weight, tensors.lows[n]) if tensors.lows else (weight,)
        states = (
            _in_type(x, mean.dtype, begin, step, number, which)
            for which, x in enumerate((new_mean, new_square))
        )
        applies = None if apply is None else apply.expand(len(tensors.weights))[n]
        for old, updated in zip((*kept, mean, square), (*parts, *states)):
            old.copy_(updated if applies is None else torch.where(applies, updated, old))


def _in_type(value: Tensor, kind: torch.dtype, begin: int, step: Tensor, *place: int) -> Tensor:
    """``value``, a tensor's elements from ``begin`` on, in ``kind``: to bf16 it is rounded
    stochastically, by dice that depend on step, place and element alone."""
    if kind != torch.bfloat16:
        return value.to(kind)
    seed = hash((int(step), *place)) % 2**63
    drawing = torch.Generator().manual_seed(seed)
    dice = torch.randint(0, 2**16, (begin + value.numel(),), generator=drawing, dtype=torch.int32)[
        begin:
    ].view(value.shape)
    cut = (value.float().contiguous().view(torch.int32) + dice.to(value.device)) & -(2**16)
    return torch.where(value.isnan(), value, cut.view(torch.float32)).bfloat16()
