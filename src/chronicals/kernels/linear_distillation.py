"""Knowledge distillation of a linear head: the divergence from a teacher, from the hidden states and heads of both sides.

    x = h Wᵀ + b + α (h Aᵀ) Bᵀ,  x' = h' W'ᵀ + b' + α' (h' A'ᵀ) B'ᵀ      raw logits of student and teacher, V columns each
    Σ_t w_t (u · D_t(x_t, x'_t) + v · (−log q_t(y_t)))                     over targets y_t ≠ −100

D_t, a divergence of the two next-token distributions at a temperature, is in ``divergence_rows.py``. ``h`` is ``[T, D]``, ``W``
``[V, D]``; the teacher's ``h'`` ``[T, D']`` may be of another width, ``W'`` ``[V', D']`` of another number of rows: where
vocabularies are padded to different sizes, both sides are distributions over the first min(V, V') ids, and what is beyond gets
no gradient.

Never more than ``chunk_size`` rows of logits of either side exist. As in ``linear_cross_entropy.py`` the sum is what is
returned, and gradients are made chunk by chunk in the forward pass: two products and what is trained of two more. Floor:
(6·D + 2·D')·T·V operations, less 2·D·T·V where the head is frozen, and 6·V bytes a token in 16 bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chronicals.kernels.adapter import Adapter
from chronicals.kernels.divergence_rows import (
    FOUND,
    DistillationOptions,
    Divergence,
    divergence_and_gradient_,
    divergence_and_gradient_reference_,
    divergence_reference,
)  # fmt: skip
from chronicals.kernels.launch import differentiable_once
from chronicals.kernels.linear_cross_entropy import ROWS, accumulate_of_head, put_of_states, scale_rows, sum_and_gradients
from chronicals.kernels.linear_head import (
    check_head,
    chunk_logits,
    chunks,
    product_type,
    side_by_side,
    trained_rows,
    with_adapter,
)  # fmt: skip
from chronicals.kernels.logit_rows import IGNORED, LossOptions, shaped_reference
from chronicals.kernels.two_streams import at_once


class LinearHead(NamedTuple):
    """Hidden states and what makes logits of them.

    Attributes:
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        adapter: a low-rank addition, or None.
        scale, softcap: applied to the logits, in this order.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None
    scale: float = 1.0
    softcap: float | None = None

    def of_rows(self, vocabulary: int) -> LinearHead:
        """The first so many ids alone."""
        if vocabulary == len(self.weight):
            return self
        bias = None if self.bias is None else self.bias[:vocabulary]
        adapter = None if self.adapter is None else self.adapter._replace(b=self.adapter.b[:vocabulary])
        return self._replace(weight=self.weight[:vocabulary], bias=bias, adapter=adapter)

    def logits(self) -> Tensor:
        """``[T, V]`` at once, in plain torch, fp32 or wider."""
        x = torch.nn.functional.linear(self.hidden, self.weight, self.bias)
        if self.adapter is not None:
            down = torch.nn.functional.dropout(self.hidden, self.adapter.dropout) @ self.adapter.a.t()
            x = x + self.adapter.scale * down @ self.adapter.b.t()
        return shaped_reference(x, self.shape)

    @property
    def shape(self) -> LossOptions:
        return LossOptions(self.scale, self.softcap)


class Distillation(NamedTuple):
    """Sums over the targets that are not −100, each times its weight; fp32 scalars.

    Attributes:
        loss: ``u · divergence + v · cross_entropy``, the only one that is differentiable.
        divergence: D.
        cross_entropy, teacher_cross_entropy: −log of the targets' probabilities, the student's and the teacher's, at
            temperature 1.
        agreement: tokens at which both sides have the same likeliest one.
        accuracy: targets that are the student's likeliest token.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    teacher_cross_entropy: Tensor
    agreement: Tensor
    accuracy: Tensor


@torch.library.custom_op("chronicals::linear_distillation", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, more: Tensor | None, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_more: Tensor | None, teacher_bias: Tensor | None, targets: Tensor, weights: Tensor | None, numbers: list[float],
    softcap: float | None, teacher_softcap: float | None, chunk_size: int, count: int | None, gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The sums of ``FOUND``, ``[5]``, and the gradients of hidden, weight, more and bias that are ``wanted``, else nothing in
    their place.

    ``more`` ``[V, r]`` continues the columns of ``weight`` ``[V, D]``; ``hidden`` is ``[T, D + r]``. So it is of the teacher.
    """
    options = _options(numbers, softcap, teacher_softcap)
    sums, d_hidden, *of_head = _outputs(hidden, weight, more, bias, gradient_type, wanted)
    narrow, theirs = side_by_side(weight, more, hidden.dtype), side_by_side(teacher_weight, teacher_more, teacher_hidden.dtype)
    rows = trained_rows(targets, count)
    picked, taught, kept = (x if rows is None else x[rows] for x in (hidden, teacher_hidden, targets))
    weights = weights if weights is None or rows is None else weights[rows]
    d_picked = torch.zeros_like(picked) if wanted[0] and rows is not None else d_hidden
    most = min(chunk_size, len(picked))
    ours_buffer, their_buffer = hidden.new_empty((most, len(narrow))), teacher_hidden.new_empty((most, len(theirs)))
    ones = hidden.new_ones(most, dtype=sums.dtype)
    for part in chunks(len(picked), chunk_size):
        x = chunk_logits(picked[part], narrow, bias, ours_buffer)
        y = chunk_logits(taught[part], theirs, teacher_bias, their_buffer)
        of_row = None if weights is None else weights[part]
        found = divergence_and_gradient_(x, y, kept[part], of_row, options, any(wanted))
        sums += (found if of_row is None else found * of_row).sum(1)
        at_once(
            partial(put_of_states, d_picked[part], x, narrow, ones[: len(x)]),
            partial(accumulate_of_head, of_head, x, picked[part], ones[: len(x)], weight.shape[1], part.start == 0),
            x.device,
        )
    if wanted[0] and rows is not None:
        d_hidden[rows] = d_picked
    if not len(picked):
        for gradient in of_head:
            gradient.zero_()
    return [sums, d_hidden, *of_head]


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, more: Tensor | None, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_more: Tensor | None, teacher_bias: Tensor | None, targets: Tensor, weights: Tensor | None, numbers: list[float],
    softcap: float | None, teacher_softcap: float | None, chunk_size: int, count: int | None, gradient_type: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    return _outputs(hidden, weight, more, bias, gradient_type, wanted)


def _outputs(
    hidden: Tensor, weight: Tensor, more: Tensor | None, bias: Tensor | None, gradient_type: torch.dtype, wanted: list[bool]
) -> list[Tensor]:
    total, *gradients = sum_and_gradients(hidden, weight, more, bias, None, gradient_type, [*wanted, False])
    return [total.new_zeros(len(FOUND)), *gradients]


def _numbers(of: DistillationOptions) -> list[float]:
    """All of ``of`` but the softcaps, as an operator takes it."""
    divergence = of.divergence
    return [
        divergence.of_teacher, divergence.of_student, divergence.share, of.temperature, of.of_divergence, of.of_cross_entropy,
        of.student.scale, of.teacher.scale,
    ]  # fmt: skip


def _options(numbers: list[float], softcap: float | None, teacher_softcap: float | None) -> DistillationOptions:
    *of, temperature, of_divergence, of_cross_entropy, scale, teacher_scale = numbers
    student, teacher = LossOptions(scale, softcap), LossOptions(teacher_scale, teacher_softcap)
    return DistillationOptions(Divergence(*of), temperature, of_divergence, of_cross_entropy, student, teacher)


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, more: Tensor | None, bias: Tensor | None, teacher_hidden: Tensor,
        *given: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wanted = [bool(needed) for needed in ctx.needs_input_grad[:4]]
        kind = product_type(hidden)
        teachers_kind = product_type(teacher_hidden) if teacher_hidden.dtype == torch.float32 else teacher_hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            sums, *gradients = _forward(
                hidden.to(kind), weight, more, bias, teacher_hidden.to(teachers_kind), *given, wanted
            )  # fmt: skip
        ctx.save_for_backward(*gradients)
        ctx.types = [x.dtype if x is not None else None for x in (hidden, weight, more, bias)]
        ctx.wanted = wanted
        ctx.mark_non_differentiable(sums)
        numbers = given[5]
        return _loss(sums, *numbers[4:6]), sums

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(
            scale_rows(gradient, upstream, torch.empty_like(gradient, dtype=kind)) if wanted else None
            for gradient, kind, wanted in zip(ctx.saved_tensors, ctx.types, ctx.wanted)
        )


def _loss(sums: Tensor, of_divergence: float, of_cross_entropy: float) -> Tensor:
    """``u · D + v · cross-entropy``; what has no part in it may be infinite."""
    parts = [factor * part for factor, part in zip((of_divergence, of_cross_entropy), sums) if factor]
    return torch.stack(parts).sum() if parts else sums.new_zeros(())


def linear_distillation(
    student: LinearHead,
    teacher: LinearHead,
    targets: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    weights: Tensor | None = None,
    chunk_size: int = ROWS,
    count: int | None = None,
    gradient_type: torch.dtype = torch.float32,
) -> Distillation:
    """Sums of the divergence of ``student`` from ``teacher``, of both sides' cross-entropies, and the loss made of them.

    Args:
        student: its tensors are differentiable where they require it. A frozen head costs no gradient of its size.
        teacher: gets no gradient. Its states may be of another width and type, its vocabulary of another size: then the first
            ids, which both have, are compared.
        targets: int64 ``[T]``; −100 is left out of every sum. One outside the common ids is an IndexError on the CPU; on a
            card, which is not asked, it makes the loss and the gradients NaN.
        divergence: which; ``Divergence.forward_kl()``, ``Divergence.jsd(0.5)``, ….
        temperature: τ, by which the logits of both sides are divided in the divergence, not in the cross-entropy. As in TRL and
            Liger, the divergence is not multiplied by τ²: give ``divergence_weight`` τ² for Hinton's.
        divergence_weight, cross_entropy_weight: u and v of the loss.
        weights: optional ``[T]``, not differentiated.
        chunk_size: no more rows of logits of either side than these exist at a time.
        count: a bound on how many targets are not −100, where the host knows one.
        gradient_type: the type in which the head's gradient is summed over chunks, at least that of the hidden states.

    Raises:
        ValueError: shapes or types do not fit, or a number is out of its range; the message names it.
    """
    _check(student, teacher, targets, temperature, weights, chunk_size)
    vocabulary = min(len(student.weight), len(teacher.weight))
    student, teacher = student.of_rows(vocabulary), teacher.of_rows(vocabulary)
    hidden, more = with_adapter(student.hidden, student.weight, student.adapter)
    with torch.no_grad():
        teacher_hidden, teacher_more = with_adapter(teacher.hidden, teacher.weight, teacher.adapter)
    options = DistillationOptions(
        divergence, temperature, divergence_weight, cross_entropy_weight, student.shape, teacher.shape
    )  # fmt: skip
    theirs = (None if x is None else x.detach() for x in (teacher_hidden, teacher.weight, teacher_more, teacher.bias))
    loss, sums = _LinearDistillation.apply(
        hidden, student.weight, more, student.bias, *theirs, targets.contiguous(),
        None if weights is None else weights.contiguous(), _numbers(options), student.softcap, teacher.softcap, chunk_size,
        count, gradient_type,
    )  # fmt: skip
    return Distillation(loss, *sums.unbind())


def _check(
    student: LinearHead, teacher: LinearHead, targets: Tensor, temperature: float, weights: Tensor | None, chunk_size: int
) -> None:
    """Raises ValueError unless everything fits."""
    for side, head in (("student", student), ("teacher", teacher)):
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
    teacher: LinearHead,
    targets: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    weights: Tensor | None = None,
) -> Distillation:
    """The definition, with all logits of both sides at once; differentiable by autograd."""
    return distillation_of_logits(
        student.logits(), teacher.logits(), targets, divergence, temperature=temperature,
        divergence_weight=divergence_weight, cross_entropy_weight=cross_entropy_weight, weights=weights,
    )  # fmt: skip


def distillation_of_logits(
    z: Tensor, teacher_z: Tensor, targets: Tensor, divergence: Divergence, *, temperature: float = 1.0,
    divergence_weight: float = 1.0, cross_entropy_weight: float = 0.0, weights: Tensor | None = None,
) -> Distillation:  # fmt: skip
    """The same of logits ``[T, V]`` and ``[T, V']`` with scale and softcap, which are there already; for autograd."""
    common = min(z.shape[1], teacher_z.shape[1])
    wide = torch.promote_types(torch.promote_types(z.dtype, teacher_z.dtype), torch.float32)
    z, teacher_z = z[:, :common].to(wide), teacher_z[:, :common].detach().to(wide)
    ignored = targets == IGNORED
    with torch.no_grad():
        options = DistillationOptions(divergence, temperature)
        found = divergence_and_gradient_reference_(z, teacher_z, targets, None, options, wants_gradient=False)
    sums = (found if weights is None else found * weights).sum(1)
    losses = torch.zeros_like(found[0])
    if divergence_weight:
        of_row = divergence_reference(z, teacher_z, divergence, temperature).masked_fill(ignored, 0.0)
        losses = losses + divergence_weight * of_row
    if cross_entropy_weight:
        losses = losses + cross_entropy_weight * torch.nn.functional.cross_entropy(
            z, targets, reduction="none", ignore_index=IGNORED
        )
    return Distillation((losses if weights is None else losses * weights).sum(), *sums.unbind())
