"""Knowledge distillation of a linear head: the divergence between student and teacher.

It is computed from the hidden states and heads of both:

    x = h Wᵀ + b + α (h Aᵀ) Bᵀ,  x' = h' W'ᵀ + b' + α' (h' A'ᵀ) B'ᵀ      raw logits of student and teacher, V columns each
    Σ_t w_t (u · D_t(x_t, x'_t) + v · (−log q_t(y_t)))                     over targets y_t ≠ −100

D_t, a divergence of the two next-token distributions at a temperature, is defined in
``divergence_rows.py``. ``h`` is ``[T, D]``, ``W`` ``[V, D]``; the teacher's ``h'`` is ``[T, D']``
and ``W'`` ``[V', D']``. If vocabularies are padded to different sizes, both distributions are over
the first min(V, V') ids, and the remaining rows of W get no gradient.

Instead of the teacher's states and head the function takes its stored predictions: the
log-probabilities of k ids a position, over which p is normalised (truncation as in Peng et al.,
2024). The teacher's k likeliest tokens give a biased p (Anshumann et al., 2025, section 3). Ids
drawn by the teacher's probabilities, with the logarithms of their frequencies, are the same kind of
input and give an unbiased one.

At most ``chunk_size`` rows of logits of either side exist at a time. As in
``linear_cross_entropy.py`` the function returns sums, and gradients are computed chunk by chunk in
the forward pass: two products for the logits and up to two for gradients. Floor: (6·D + 2·D')·T·V
operations, less 2·D·T·V if the head is frozen, and 6·V bytes a token in 16 bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.divergence_rows import (
    ROW_RESULTS,
    DistillationOptions,
    Divergence,
    divergence_and_gradient_,
    divergence_and_gradient_reference_,
    divergence_reference,
)
from chronicals.kernels.launch import differentiable_once, operator
from chronicals.kernels.linear_cross_entropy import (
    DEFAULT_CHUNK_ROWS,
    add_head_gradients,
    cross_entropy_bytes,
    empty_results,
    scale_rows,
    write_states_gradient,
)
from chronicals.kernels.linear_head import (
    HeadBytes,
    HeadShape,
    HeadWork,
    LinearHead,
    check_head,
    chunk_logits,
    chunks,
    product_type,
    side_by_side,
    trained_rows,
    with_adapter,
)
from chronicals.kernels.logit_rows import IGNORE_INDEX, LossOptions
from chronicals.kernels.products import at_once


class StoredTokens(NamedTuple):
    """Stored predictions of a teacher: k tokens a position; all others have probability 0.

    Attributes:
        ids: int64 ``[T, k]``; an unused entry holds any id of the vocabulary.
        log_p: ``[T, k]``, up to a constant of the row; −∞ in an unused entry. A position with a
            target has at least one used entry.
    """

    ids: Tensor
    log_p: Tensor

    def logits(self, vocabulary: int) -> Tensor:
        """Return all logits ``[T, V]``; −∞ for tokens that were not stored."""
        kind = torch.promote_types(self.log_p.dtype, torch.float32)
        return _spread(
            self.ids, self.log_p, self.log_p.new_empty((len(self.ids), vocabulary), dtype=kind)
        )


def _spread(ids: Tensor, log_p: Tensor, buffer: Tensor) -> Tensor:
    """Write stored log-probabilities to the columns of their ids in the first rows of ``buffer``.

    Other columns become −∞. If an id occurs twice in a row, the larger value counts.
    """
    out = buffer[: len(ids)].fill_(-torch.inf)
    return out.scatter_reduce_(1, ids, log_p.to(out.dtype), "amax")


class DistillationSums(NamedTuple):
    """Weighted sums over the targets that are not −100; fp32 scalars.

    Attributes:
        loss: ``u · divergence + v · cross_entropy``; the others are not differentiable.
        divergence: D.
        cross_entropy, teacher_cross_entropy: −log of the targets' probabilities under the student
            and under the teacher, at temperature 1.
        agreement: positions at which both sides have the same likeliest token.
        accuracy: positions at which the student's likeliest token is the target.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    teacher_cross_entropy: Tensor
    agreement: Tensor
    accuracy: Tensor


@operator("chronicals::linear_distillation")
def _forward(
    hidden: Tensor,
    weight: Tensor,
    more: Tensor | None,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor | None,
    teacher_more: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_ids: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    numbers: list[float],
    softcap: float | None,
    teacher_softcap: float | None,
    chunk_size: int,
    count: int | None,
    gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    """Compute the sums of ``ROW_RESULTS`` and all gradients that are wanted.

    Args:
        hidden: ``[T, D + r]``.
        weight: ``[V, D]``, the student's head.
        more: ``[V, r]``, further columns of the head, or None.
        bias: ``[V]``, or None.
        teacher_hidden: states of the teacher ``[T, D' + r']``; without ``teacher_weight``
            log-probabilities ``[T, k]`` of ``teacher_ids``.
        teacher_weight: ``[V, D']``, the teacher's head, or None.
        teacher_more: ``[V, r']``, further columns of the teacher's head, or None.
        teacher_bias: ``[V]``, or None.
        teacher_ids: int64 ``[T, k]``, the tokens of stored predictions, or None.
        targets: int64 ``[T]``.
        weights: weights of the rows, ``[T]``, or None.
        numbers: a, b and λ of the divergence, τ, u, v, and the scales of the student's and the
            teacher's logits; a list, since operators take no objects.
        softcap: bound of the student's logits, or None.
        teacher_softcap: bound of the teacher's logits, or None.
        chunk_size: rows of logits of either side that exist at a time, at most.
        count: upper bound on the number of targets that are not ignored, or None.
        gradient_type: dtype in which the head's gradients are summed, at least that of ``hidden``.
        wanted: for hidden, weight, more and bias, whether its gradient is wanted.

    Returns:
        The sums ``[5]``, the gradients of the four and an empty one; those not wanted are empty.
    """
    *of, temperature, of_divergence, of_cross_entropy, scale, teacher_scale = numbers
    options = DistillationOptions(
        Divergence(*of),
        LossOptions(scale, softcap),
        LossOptions(teacher_scale, teacher_softcap),
        temperature,
        of_divergence,
        of_cross_entropy,
    )
    total, d_hidden, *of_head = empty_results(
        hidden, weight, more, bias, None, gradient_type, [*wanted, False]
    )
    sums = total.new_zeros(len(ROW_RESULTS))
    head = side_by_side(weight, more, hidden.dtype)
    teacher_head = (
        None
        if teacher_weight is None
        else side_by_side(teacher_weight, teacher_more, teacher_hidden.dtype)
    )
    rows = trained_rows(targets, count)
    states, teacher_states, state_targets = (
        x if rows is None else x[rows] for x in (hidden, teacher_hidden, targets)
    )
    weights, ids = (x if x is None or rows is None else x[rows] for x in (weights, teacher_ids))
    d_states = torch.zeros_like(states) if wanted[0] and rows is not None else d_hidden
    most = min(chunk_size, len(states))
    buffer = hidden.new_empty((most, len(head)))
    teacher_buffer = teacher_hidden.new_empty(
        (most, len(head)), dtype=sums.dtype if teacher_head is None else None
    )
    ones = hidden.new_ones(most, dtype=sums.dtype)
    for part in chunks(len(states), chunk_size):
        x = chunk_logits(states[part], head, bias, buffer)
        if teacher_head is None:
            assert ids is not None
            y = _spread(ids[part], teacher_states[part], teacher_buffer)
        else:
            y = chunk_logits(teacher_states[part], teacher_head, teacher_bias, teacher_buffer)
        row_weights = None if weights is None else weights[part]
        results = divergence_and_gradient_(
            x, y, state_targets[part], row_weights, options, any(wanted)
        )
        sums += (results if row_weights is None else results * row_weights).sum(1)
        at_once(
            partial(write_states_gradient, d_states[part], x, head, ones[: len(x)]),
            partial(
                add_head_gradients,
                of_head,
                x,
                states[part],
                ones[: len(x)],
                weight.shape[1],
                part.start == 0,
            ),
            x.device,
        )
    if wanted[0] and rows is not None:
        d_hidden[rows] = d_states
    if not len(states):
        for gradient in of_head:
            gradient.zero_()
    return [sums, d_hidden, *of_head]


@torch.library.register_fake(_forward)
def _outputs(
    hidden: Tensor,
    weight: Tensor,
    more: Tensor | None,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor | None,
    teacher_more: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_ids: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    numbers: list[float],
    softcap: float | None,
    teacher_softcap: float | None,
    chunk_size: int,
    count: int | None,
    gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    """Allocate the sums and gradients that ``_forward`` returns."""
    total, *gradients = empty_results(
        hidden, weight, more, bias, None, gradient_type, [*wanted, False]
    )
    return [total.new_zeros(len(ROW_RESULTS)), *gradients]


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        wanted = [bool(needed) for needed in ctx.needs_input_grad[:4]]
        kind = product_type(hidden)
        teacher_kind = (
            product_type(teacher_hidden)
            if teacher_hidden.dtype == torch.float32
            else teacher_hidden.dtype
        )
        with torch.autocast(hidden.device.type, enabled=False):
            sums, *gradients = _forward(
                hidden.to(kind),
                weight,
                more,
                bias,
                teacher_hidden.to(teacher_kind),
                *options,
                wanted,
            )
        ctx.save_for_backward(*gradients)
        ctx.types = [x.dtype if x is not None else None for x in (hidden, weight, more, bias)]
        ctx.wanted = wanted
        ctx.mark_non_differentiable(sums)
        factors = options[6][4:6]
        # A part with factor 0 is left out, since it may be infinite and 0 · ∞ is NaN.
        parts = [factor * part for factor, part in zip(factors, sums) if factor]
        return torch.stack(parts).sum() if parts else sums.new_zeros(()), sums

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(
            scale_rows(gradient, upstream, torch.empty_like(gradient, dtype=kind))
            if wanted
            else None
            for gradient, kind, wanted in zip(ctx.saved_tensors, ctx.types, ctx.wanted)
        )


DISTILLATION_WORK = HeadWork(logits=1, moved=4)
"""The student's logits, each read and replaced by its gradient; the teacher's are of its own pass."""


def distillation_bytes(shape: HeadShape) -> HeadBytes:
    """Return the bytes that ``linear_distillation`` needs at most at a time.

    These are logits of both sides, and what ``cross_entropy_bytes`` has; of the teacher's states,
    whose width is its own, as many as of the student's.
    """
    student = cross_entropy_bytes(shape)
    return student._replace(logits=2 * student.logits, states=student.states + 2 * shape.states)


def linear_distillation(
    student: LinearHead,
    teacher: LinearHead | StoredTokens,
    targets: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    weights: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_ROWS,
    count: int | None = None,
    gradient_type: torch.dtype = torch.float32,
) -> DistillationSums:
    """Return sums of the divergence, of both cross-entropies, and of the loss made of them.

    Args:
        student: its tensors are differentiable if they require it. A frozen head costs no gradient
            of its size.
        teacher: gets no gradient. Its states may have another width and dtype, its vocabulary
            another size; then the ids that both have are compared. With stored predictions every
            divergence is possible except the reverse KL, which is infinite; the teacher's
            cross-entropy is infinite for a target that was not stored.
        targets: int64 ``[T]``; −100 is left out of every sum. A target outside the common ids
            raises IndexError on the CPU; on a card, where a check would make the host wait, it
            makes the loss and the gradients NaN.
        divergence: ``Divergence.forward_kl()``, ``Divergence.jsd(0.5)``, ….
        temperature: τ, by which the logits of both sides are divided in the divergence, not in the
            cross-entropy. As in TRL and Liger, the divergence is not multiplied by τ². Pass τ² as
            ``divergence_weight`` for Hinton's loss.
        divergence_weight: u of the loss.
        cross_entropy_weight: v of the loss.
        weights: optional ``[T]``, not differentiated.
        chunk_size: rows of logits of either side that exist at a time, at most.
        count: upper bound on the number of targets that are not −100, if the host knows one.
        gradient_type: dtype in which the head's gradient is summed over chunks, at least that of
            the hidden states.

    Raises:
        ValueError: shapes or dtypes do not fit, or a number is out of range; the message names it.
    """
    _check(student, teacher, targets, divergence, temperature, weights, chunk_size)
    teacher_tensors: tuple[Tensor | None, ...]
    if isinstance(teacher, StoredTokens):
        teacher_tensors = (teacher.log_p, None, None, None, teacher.ids)
        teacher_scale = 1.0
        teacher_softcap = None
    else:
        vocabulary = min(len(student.weight), len(teacher.weight))
        student = student.of_rows(vocabulary)
        teacher = teacher.of_rows(vocabulary)
        with torch.no_grad():
            teacher_hidden, teacher_more = with_adapter(
                teacher.hidden, teacher.weight, teacher.adapter
            )
        teacher_tensors = (teacher_hidden, teacher.weight, teacher_more, teacher.bias, None)
        teacher_scale = teacher.scale
        teacher_softcap = teacher.softcap
    hidden, more = with_adapter(student.hidden, student.weight, student.adapter)
    numbers = [
        divergence.of_teacher,
        divergence.of_student,
        divergence.share,
        temperature,
        divergence_weight,
        cross_entropy_weight,
        student.scale,
        teacher_scale,
    ]
    loss, sums = _LinearDistillation.apply(
        hidden,
        student.weight,
        more,
        student.bias,
        *(None if x is None else x.detach() for x in teacher_tensors),
        targets.contiguous(),
        None if weights is None else weights.contiguous(),
        numbers,
        student.softcap,
        teacher_softcap,
        chunk_size,
        count,
        gradient_type,
    )
    return DistillationSums(loss, *sums.unbind())


def _check(
    student: LinearHead,
    teacher: LinearHead | StoredTokens,
    targets: Tensor,
    divergence: Divergence,
    temperature: float,
    weights: Tensor | None,
    chunk_size: int,
) -> None:
    """Raise ValueError unless shapes, dtypes and numbers fit."""
    for side, head in (("student", student), ("teacher", teacher)):
        if isinstance(head, StoredTokens):
            ids, log_p = head
            if (
                ids.ndim != 2
                or ids.shape != log_p.shape
                or len(ids) != len(targets)
                or not ids.shape[1]
                or ids.dtype != torch.int64
            ):
                raise ValueError(
                    f"teacher: ids {tuple(ids.shape)} of {ids.dtype} and log_p "
                    f"{tuple(log_p.shape)}: expected [{len(targets)}, k] both, ids of torch.int64"
                )
            if divergence.share == 1.0:
                raise ValueError(
                    "divergence: the reverse KL from a teacher with k stored tokens is infinite, "
                    "since all others have probability 0; take the forward KL, the JSD or a skewed "
                    "one"
                )
            continue
        try:
            check_head(head.hidden, head.weight, targets, head.bias, chunk_size, head.softcap)
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from None
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: must be a positive number")
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}: expected [{len(targets)}]")


def linear_distillation_reference(
    student: LinearHead,
    teacher: LinearHead | StoredTokens,
    targets: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    weights: Tensor | None = None,
) -> DistillationSums:
    """Compute ``linear_distillation`` in plain torch with all logits; differentiable by autograd."""
    z = student.logits()
    teachers_z = (
        teacher.logits(z.shape[1]) if isinstance(teacher, StoredTokens) else teacher.logits()
    )
    return distillation_of_logits(
        z,
        teachers_z,
        targets,
        divergence,
        temperature=temperature,
        divergence_weight=divergence_weight,
        cross_entropy_weight=cross_entropy_weight,
        weights=weights,
    )


def distillation_of_logits(
    z: Tensor,
    teacher_z: Tensor,
    targets: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    weights: Tensor | None = None,
) -> DistillationSums:
    """Compute ``linear_distillation`` from logits in plain torch; differentiable by autograd.

    Args:
        z: the student's logits ``[T, V]``, after scale and softcap.
        teacher_z: the teacher's, ``[T, V']``.
        targets: int64 ``[T]``; −100 is left out of every sum.
        divergence: the divergence D.
        temperature: τ.
        divergence_weight: u of the loss.
        cross_entropy_weight: v of the loss.
        weights: ``[T]``, or None.
    """
    common = min(z.shape[1], teacher_z.shape[1])
    wide = torch.promote_types(torch.promote_types(z.dtype, teacher_z.dtype), torch.float32)
    z = z[:, :common].to(wide)
    teacher_z = teacher_z[:, :common].detach().to(wide)
    ignored = targets == IGNORE_INDEX
    with torch.no_grad():
        options = DistillationOptions(divergence, LossOptions(), LossOptions(), temperature)
        results = divergence_and_gradient_reference_(
            z, teacher_z, targets, None, options, wants_gradient=False
        )
    sums = (results if weights is None else results * weights).sum(1)
    losses = torch.zeros_like(results[0])
    if divergence_weight:
        divergences = divergence_reference(z, teacher_z, divergence, temperature).masked_fill(
            ignored, 0.0
        )
        losses = losses + divergence_weight * divergences
    if cross_entropy_weight:
        losses = losses + cross_entropy_weight * torch.nn.functional.cross_entropy(
            z, targets, reduction="none", ignore_index=IGNORE_INDEX
        )
    return DistillationSums((losses if weights is None else losses * weights).sum(), *sums.unbind())
