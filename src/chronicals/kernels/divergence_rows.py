"""Divergence of each row of a student's logits from a teacher's, and its gradient.

The chunked head of ``linear_distillation.py`` builds on it.

    z = softcap(scale · x)                    of a row of raw logits x; z' likewise of the teacher's
    q = softmax(z / τ),   p = softmax(z' / τ)     the student's and the teacher's distribution
    m = λ p + (1 − λ) q
    D = a · KL(p ‖ m) + b · KL(q ‖ m)
    loss = w · (u · D + v · (lse(z) − z_y))

    | divergence                    | a | b     | λ     | source                                                     |
    |-------------------------------|---|-------|-------|------------------------------------------------------------|
    | forward KL, KL(p ‖ q)         | 1 | 0     | 0     | Hinton et al., 2015, section 2                             |
    | reverse KL, KL(q ‖ p)         | 0 | 1     | 1     | Gu et al., 2024 (MiniLLM), equation 1                      |
    | generalized JSD(β)            | β | 1 − β | β     | Agarwal et al., 2024 (GKD), equation 1                     |
    | skewed forward, KL(p ‖ s p + (1 − s) q) | 1 | 0 | s | Ko et al., 2024 (DistiLLM), section 3.1                  |
    | skewed reverse, KL(q ‖ (1 − s) p + s q) | 0 | 1 | 1 − s | the same                                             |

All ratios are to m, computed from d_j = log p_j − log q_j, and do not overflow:

    h_j = b q_j log(q_j / m_j) − (a (1 − λ) − b λ) q_j p_j / m_j,     Σ_j h_j = −1 for the forward KL
    dD/d(z_j / τ) = h_j − q_j Σ_k h_k
    dloss/dx_j = w · (u / τ · dD/d(z_j / τ) + v (e^{z_j − lse} − 1(j = y))) · scale · (1 − (z_j / softcap)²)

h omits a multiple of q, which the second line would subtract again. (For the JSD, whose factor of
p / m is zero, that multiple would be almost all of h, and would cancel.) The cross-entropy is at
temperature 1. D has no factor τ², as in TRL and Liger; ``u`` can hold one.

A program takes a row. Bytes a row in 16 bit: 4·V for the statistics of both sides, and 6·V for the
gradient, which overwrites the student's logits. Divergences other than the forward KL read both
rows once more, for Σ h. If the rows of all running programs fit in the cache, only the first 4·V
and the 2·V written reach memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.launch import runs_triton, tl, triton
from chronicals.kernels.logit_rows import (
    IGNORE_INDEX,
    LossOptions,
    chain_,
    places_of,
    shaped,
    shaped_reference,
    tile_of,
)

ROW_RESULTS = ("divergence", "cross_entropy", "teacher_cross_entropy", "agreement", "accuracy")
"""Results for a row, in this order: D; minus log of the target's probability at temperature 1,
under the student and under the teacher; 1 if both have the same likeliest token; 1 if the student's
likeliest token is the target.
"""


@dataclass(frozen=True)
class Divergence:
    """``a · KL(p ‖ m) + b · KL(q ‖ m)`` of teacher p and student q, with ``m = λ p + (1 − λ) q``.

    Attributes:
        of_teacher, of_student, share: a, b and λ.
    """

    of_teacher: float
    of_student: float
    share: float

    @classmethod
    def forward_kl(cls) -> Divergence:
        """Return ``KL(p ‖ q)``, under which the student covers all that the teacher may say."""
        return cls(1.0, 0.0, 0.0)

    @classmethod
    def reverse_kl(cls) -> Divergence:
        """Return ``KL(q ‖ p)``, under which the student says only what the teacher may say."""
        return cls(0.0, 1.0, 1.0)

    @classmethod
    def jsd(cls, beta: float = 0.5) -> Divergence:
        """Return ``β KL(p ‖ m) + (1 − β) KL(q ‖ m)`` with ``m = β p + (1 − β) q``.

        At β = 0 it is the forward KL and at β = 1 the reverse KL, as in TRL and Liger; the formula
        itself would be zero there.

        Raises:
            ValueError: ``beta`` is not in [0, 1].
        """
        if not 0 <= beta <= 1:
            raise ValueError(
                f"beta={beta}: must be at least 0, where the JSD is the forward KL, and at most "
                "1, the reverse KL"
            )
        if beta in (0, 1):
            return cls.reverse_kl() if beta else cls.forward_kl()
        return cls(beta, 1.0 - beta, beta)

    @classmethod
    def skew_kl(cls, skew: float = 0.1) -> Divergence:
        """Return ``KL(p ‖ s p + (1 − s) q)`` with skew s.

        Raises:
            ValueError: ``skew`` is not in [0, 1).
        """
        if not 0 <= skew < 1:
            raise ValueError(
                f"skew={skew}: must be at least 0, which skews nothing, and less than 1, which "
                "compares nothing"
            )
        return cls(1.0, 0.0, skew)

    @classmethod
    def skew_reverse_kl(cls, skew: float = 0.1) -> Divergence:
        """Return ``KL(q ‖ (1 − s) p + s q)`` with skew s.

        Raises:
            ValueError: ``skew`` is not in [0, 1).
        """
        checked = cls.skew_kl(skew)
        return cls(0.0, 1.0, 1.0 - checked.share)


@dataclass(frozen=True)
class DistillationOptions:
    """Numbers of the formula, from two rows of raw logits to a loss.

    Attributes:
        student, teacher: scale and softcap of each side's raw logits.
        temperature: τ.
        of_divergence, of_cross_entropy: u and v.
    """

    divergence: Divergence
    student: LossOptions
    teacher: LossOptions
    temperature: float = 1.0
    of_divergence: float = 1.0
    of_cross_entropy: float = 0.0


# Cases of m for which the kernel is compiled: m = q (λ = 0), m = p (λ = 1), or between them.
MIXTURE_IS_STUDENT = 0
MIXTURE_IS_TEACHER = 1
MIXTURE_OF_BOTH = 2


@triton.jit
def _row(
    x_ptr,
    vocabulary,
    scale,
    softcap,
    temperature,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of a row in one pass.

    Returns the largest logit m, its first column, log Σ e^{z − m}, and log Σ e^{(z − m) / τ}.
    """
    largest = tl.full((BLOCK // 8,), -3.0e38, tl.float32)
    place = tl.zeros((BLOCK // 8,), tl.int32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    tempered = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            x_ptr + column, mask=column < vocabulary, other=0.0, eviction_policy="evict_last"
        )
        z = tl.where(column < vocabulary, shaped(x, scale, softcap, HAS_SOFTCAP), -float("inf"))
        z = tl.reshape(z, (BLOCK // 8, 8))
        column = tl.reshape(column, (BLOCK // 8, 8))
        top = tl.max(z, axis=1)
        place = tl.where(
            top > largest, tl.min(tl.where(z == top[:, None], column, vocabulary), axis=1), place
        )
        new = tl.maximum(largest, top)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new[:, None]), axis=1)
        if TEMPERED:
            tempered = tempered * tl.exp((largest - new) / temperature)
            tempered += tl.sum(tl.exp((z - new[:, None]) / temperature), axis=1)
        largest = new
    top = tl.max(largest, axis=0)
    place = tl.min(tl.where(largest == top, place, vocabulary), axis=0)
    rest = tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    tempered_rest = rest
    if TEMPERED:
        tempered_rest = tl.log(tl.sum(tempered * tl.exp((largest - top) / temperature), axis=0))
    return top, place, rest, tempered_rest


@triton.jit
def _parts(log_q, log_p, of_teacher, of_student, share, KIND: tl.constexpr):
    """Return q, the summand of D, and h of some columns."""
    q = tl.exp(log_q)
    p = tl.exp(log_p)
    d = log_p - log_q
    if KIND == 0:  # m is q
        divergence = tl.where(p == 0.0, 0.0, p * d)
        h = -p
    elif KIND == 1:  # m is p
        divergence = tl.where(q == 0.0, 0.0, -q * d)
        h = divergence
    else:
        # A banned token, with probability 0, has an infinite d; banned on both sides, NaN.
        d = tl.minimum(tl.maximum(tl.where(d == d, d, 0.0), -1.0e4), 1.0e4)
        p_below = tl.minimum(d, 0.0)
        q_below = tl.minimum(-d, 0.0)
        p_share = tl.exp(p_below)
        m = share * p_share + (1.0 - share) * tl.exp(q_below)
        log_m = tl.log(m)
        of_q = of_student * q * (q_below - log_m)
        divergence = of_teacher * p * (p_below - log_m) + of_q
        h = of_q - (of_teacher * (1.0 - share) - of_student * share) * q * (p_share / m)
    return q, divergence, h


@triton.jit
def _divergence_kernel(
    # student's logits, overwritten by their gradient
    x_ptr,
    # read
    y_ptr,
    target_ptr,
    weight_ptr,
    # written
    results_ptr,
    # sizes and strides of rows
    rows,
    vocabulary,
    x_stride,
    y_stride,
    # numbers of the formula
    x_scale,
    x_softcap,
    y_scale,
    y_softcap,
    temperature,
    of_teacher,
    of_student,
    share,
    of_divergence,
    of_cross_entropy,
    # options; KIND: which of both m is
    X_SOFTCAP: tl.constexpr,
    Y_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    TEMPERED: tl.constexpr,
    KIND: tl.constexpr,
    WITH_CROSS_ENTROPY: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    results_ptr += row
    target = tl.load(target_ptr + row)
    blocks = tl.cdiv(vocabulary, BLOCK)
    kind = x_ptr.dtype.element_ty
    if target == -100:
        for what in tl.static_range(5):
            tl.store(results_ptr + what * rows, 0.0)
        if WANTS_GRADIENT:
            for block in range(blocks):
                column = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(x_ptr + column, tl.zeros((BLOCK,), kind), mask=column < vocabulary)
    else:
        known = (target >= 0) & (target < vocabulary)
        x_target = shaped(
            tl.load(x_ptr + target, mask=known, other=0.0), x_scale, x_softcap, X_SOFTCAP
        )
        y_target = shaped(
            tl.load(y_ptr + target, mask=known, other=0.0), y_scale, y_softcap, Y_SOFTCAP
        )
        x_top, x_best, x_rest, x_tempered = _row(
            x_ptr, vocabulary, x_scale, x_softcap, temperature, X_SOFTCAP, TEMPERED, BLOCK
        )
        y_top, y_best, y_rest, y_tempered = _row(
            y_ptr, vocabulary, y_scale, y_softcap, temperature, Y_SOFTCAP, TEMPERED, BLOCK
        )
        # NaN, so that a target outside the vocabulary is noticed.
        valid = tl.where(known, 1.0, float("nan"))
        weight = tl.load(weight_ptr + row).to(tl.float32) * valid if HAS_WEIGHTS else valid
        divergences = tl.zeros((BLOCK,), tl.float32)
        sum_of_h = -1.0
        if KIND != 0 or not WANTS_GRADIENT:
            sums = tl.zeros((BLOCK,), tl.float32)
            for block in range(blocks):
                column = block * BLOCK + tl.arange(0, BLOCK)
                inside = column < vocabulary
                x = tl.load(x_ptr + column, mask=inside, other=0.0, eviction_policy="evict_last")
                y = tl.load(y_ptr + column, mask=inside, other=0.0, eviction_policy="evict_last")
                log_q = (
                    shaped(x, x_scale, x_softcap, X_SOFTCAP) - x_top
                ) / temperature - x_tempered
                log_p = (
                    shaped(y, y_scale, y_softcap, Y_SOFTCAP) - y_top
                ) / temperature - y_tempered
                _, divergence, h = _parts(log_q, log_p, of_teacher, of_student, share, KIND)
                divergences += tl.where(inside, divergence, 0.0)
                sums += tl.where(inside, h, 0.0)
            sum_of_h = tl.sum(sums, axis=0)
        if WANTS_GRADIENT:
            of_d = weight * of_divergence / temperature
            of_c = weight * of_cross_entropy
            for back in range(blocks):
                column = (blocks - 1 - back) * BLOCK + tl.arange(0, BLOCK)
                inside = column < vocabulary
                x = tl.load(x_ptr + column, mask=inside, other=0.0, eviction_policy="evict_first")
                y = tl.load(y_ptr + column, mask=inside, other=0.0, eviction_policy="evict_first")
                z = shaped(x, x_scale, x_softcap, X_SOFTCAP)
                log_q = (z - x_top) / temperature - x_tempered
                log_p = (
                    shaped(y, y_scale, y_softcap, Y_SOFTCAP) - y_top
                ) / temperature - y_tempered
                q, divergence, h = _parts(log_q, log_p, of_teacher, of_student, share, KIND)
                if KIND == 0:
                    divergences += tl.where(inside, divergence, 0.0)
                gradient = of_d * (h - q * sum_of_h)
                if WITH_CROSS_ENTROPY:
                    chance = tl.exp(z - x_top - x_rest) if TEMPERED else q
                    gradient += of_c * (chance - tl.where(column == target, 1.0, 0.0))
                gradient *= x_scale
                if X_SOFTCAP:
                    gradient *= 1.0 - (z / x_softcap) * (z / x_softcap)
                tl.store(
                    x_ptr + column, gradient.to(kind), mask=inside, eviction_policy="evict_first"
                )
        tl.store(results_ptr, tl.sum(divergences, axis=0) * valid)
        tl.store(results_ptr + rows, (x_rest - (x_target - x_top)) * valid)
        tl.store(results_ptr + 2 * rows, (y_rest - (y_target - y_top)) * valid)
        tl.store(results_ptr + 3 * rows, tl.where(x_best == y_best, 1.0, 0.0))
        tl.store(results_ptr + 4 * rows, tl.where(x_best == target, 1.0, 0.0))


def divergence_and_gradient_(
    x: Tensor,
    y: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    options: DistillationOptions,
    wants_gradient: bool,
) -> Tensor:
    """Compute ``ROW_RESULTS`` of each row, and overwrite ``x`` with the gradient of the loss.

    Args:
        x: raw logits of the student, ``[rows, V]``, of any floating-point dtype.
        y: those of the teacher.
        targets: int64 ``[rows]``; results and gradient of −100 are zero.
        weights: w, ``[rows]`` or None.
        options: numbers of the formula.
        wants_gradient: if False, ``x`` is left as it is.

    Returns:
        fp32 ``[5, rows]``, not multiplied by ``weights``.
    """
    if not runs_triton(x, y):
        return divergence_and_gradient_reference_(x, y, targets, weights, options, wants_gradient)
    rows, vocabulary = x.shape
    results = x.new_empty((len(ROW_RESULTS), rows), dtype=torch.float32)
    tile = tile_of(vocabulary)
    of = options.divergence
    student = options.student
    teacher = options.teacher
    if rows:
        _divergence_kernel[(rows,)](
            x,
            y,
            targets,
            weights,
            results,
            rows,
            vocabulary,
            x.stride(0),
            y.stride(0),
            student.scale,
            student.softcap or 1.0,
            teacher.scale,
            teacher.softcap or 1.0,
            options.temperature,
            of.of_teacher,
            of.of_student,
            of.share,
            options.of_divergence,
            options.of_cross_entropy,
            student.softcap is not None,
            teacher.softcap is not None,
            weights is not None,
            options.temperature != 1.0,
            {0.0: MIXTURE_IS_STUDENT, 1.0: MIXTURE_IS_TEACHER}.get(of.share, MIXTURE_OF_BOTH),
            options.of_cross_entropy != 0,
            wants_gradient,
            tile.block,
            num_warps=tile.warps,
        )
    return results


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """Return log m of ``m = share · p + (1 − share) · q``."""
    if share in (0.0, 1.0):
        return log_p if share else log_q
    return torch.logaddexp(log_p + math.log(share), log_q + math.log1p(-share))


def divergence_reference(
    z: Tensor, teacher_z: Tensor, of: Divergence, temperature: float
) -> Tensor:
    """Return D of each row of two sides' logits ``[..., V]``, by definition; differentiable in ``z``."""
    log_q = torch.log_softmax(z / temperature, -1)
    log_p = torch.log_softmax(teacher_z / temperature, -1)
    log_m = _log_mixture(log_p, log_q, of.share)
    divergence = torch.zeros_like(log_q[..., 0])
    for coefficient, log in ((of.of_teacher, log_p), (of.of_student, log_q)):
        if coefficient:
            chances = log.exp()
            divergence = divergence + coefficient * (
                chances * (log - log_m).masked_fill(chances == 0, 0.0)
            ).sum(-1)
    return divergence


def divergence_and_gradient_reference_(
    x: Tensor,
    y: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    options: DistillationOptions,
    wants_gradient: bool,
) -> Tensor:
    """Compute ``divergence_and_gradient_`` in plain torch, by the formulas at the top of this file."""
    of = options.divergence
    at_target = places_of(targets, x.shape[1])
    z = shaped_reference(x, options.student)
    teacher_z = shaped_reference(y, options.teacher).to(x.device)
    wide = torch.promote_types(z.dtype, teacher_z.dtype)
    z = z.to(wide)
    teacher_z = teacher_z.to(wide)
    log_chances = torch.log_softmax(z, 1)
    best = z.argmax(1)
    teachers_best = teacher_z.argmax(1)
    divergence = divergence_reference(z, teacher_z, of, options.temperature)
    losses = [
        -log.gather(1, at_target).squeeze(1)
        for log in (log_chances, torch.log_softmax(teacher_z, 1))
    ]
    same = [(best == other).to(wide) for other in (teachers_best, targets)]
    results = torch.stack([divergence, *losses, *same]).masked_fill(targets == IGNORE_INDEX, 0.0)
    if wants_gradient:
        log_q = torch.log_softmax(z / options.temperature, 1)
        log_p = torch.log_softmax(teacher_z / options.temperature, 1)
        log_m = _log_mixture(log_p, log_q, of.share)
        q = log_q.exp()
        h = torch.zeros_like(q)
        if of.of_student:
            # A chance of 0 counts nothing, though the logarithm beside it may be infinite.
            h += of.of_student * torch.where(q == 0, 0.0, q * (log_q - log_m))
        if of.share == 0:
            h -= of.of_teacher * log_p.exp()
        elif of.share != 1:
            of_m = (log_p - log_m).masked_fill(log_p == -math.inf, -math.inf).exp()
            h -= (of.of_teacher * (1 - of.share) - of.of_student * of.share) * q * of_m
        of_divergence = h - q * h.sum(1, keepdim=True)
        gradient = options.of_divergence / options.temperature * of_divergence
        if options.of_cross_entropy:
            chances = log_chances.exp_().scatter_add_(
                1, at_target, torch.full_like(at_target, -1, dtype=wide)
            )
            gradient += options.of_cross_entropy * chances
        counted = (targets != IGNORE_INDEX).to(wide)
        gradient *= (counted if weights is None else counted * weights)[:, None]
        chain_(gradient, z, x, options.student)
    return results
