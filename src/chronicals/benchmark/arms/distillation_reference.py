"""Distillation as one module: a student around a frozen teacher; and its reference in fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chronicals.benchmark.arms.loop import PaddedLoop
from chronicals.benchmark.arms.padding import padded
from chronicals.benchmark.arms.reference import fp32_model
from chronicals.benchmark.arms.weights import load
from chronicals.benchmark.distillation import DistillationWork
from chronicals.benchmark.measurement import ArmPlan, device

DIVERGENCE_ROWS = 2048
"""Rows of logits that exist at a time in plain torch."""

DivergenceLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mean over the targets, of the student's hidden states and head, the teacher's hidden states and
head, and the targets (-100: not trained)."""


class StudentOfTeacher(nn.Module):
    """A student that is called as a model with labels, and whose loss is a divergence from a
    teacher.
    """

    def __init__(self, student: Any, teacher: Any, loss: DivergenceLoss):
        super().__init__()
        self.student = student
        self.loss = loss
        # in a list, so that the teacher's weights are no parameters of this module
        self._teacher = [teacher.eval().requires_grad_(False)]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.student.dtype
        return dtype

    def set_attn_implementation(self, name: str) -> None:
        for model in (self.student, *self._teacher):
            model.set_attn_implementation(name)

    def forward(self, labels: Tensor | None = None, **arguments: Any) -> Any:
        if labels is None:
            return self.student(**arguments)
        teacher = self._teacher[0]
        student_hidden = _hidden_states(self.student, arguments)
        with torch.no_grad():
            teacher_hidden = _hidden_states(teacher, arguments)
        loss = self.loss(
            student_hidden,
            self.student.get_output_embeddings().weight,
            teacher_hidden,
            teacher.get_output_embeddings().weight,
            labels[:, 1:].flatten(),
        )
        return SimpleNamespace(loss=loss)


def _hidden_states(model: Any, arguments: dict[str, Any]) -> Tensor:
    """Return the input of the head, ``[targets, width]``."""
    hidden: Tensor = model.get_decoder()(**arguments, use_cache=False).last_hidden_state
    return hidden[:, :-1].flatten(0, 1)


def plain_divergence(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, targets: Tensor
) -> Tensor:
    """Compute a ``DivergenceLoss`` in torch. Logits of a few rows exist at a time, and are
    computed again in the backward pass.
    """
    trained = targets != -100
    student = student[trained]
    teacher = teacher[trained]
    sums = [
        checkpoint(
            _divergence_sum, rows, student_head, teacher_rows, teacher_head, use_reentrant=False
        )
        for rows, teacher_rows in zip(
            student.split(DIVERGENCE_ROWS), teacher.split(DIVERGENCE_ROWS)
        )
    ]
    return torch.stack(sums).sum() / len(student)


def _divergence_sum(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor
) -> Tensor:
    log_q = (student @ student_head.mT).float().log_softmax(-1)
    log_p = (teacher @ teacher_head.mT).float().log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    return 0.5 * ((log_p.exp() * (log_p - log_m)).sum() + (log_q.exp() * (log_q - log_m)).sum())


def reference(work: DistillationWork, plan: ArmPlan) -> None:
    """Train the student beside its teacher, both in fp32."""
    student, settings, _ = fp32_model(work, plan)
    teacher = load(work.teacher, torch.float32, attn_implementation="sdpa")
    model = StudentOfTeacher(student, teacher, plain_divergence)
    steps = list(work.documents_by_step(plan.in_all))
    loop = PaddedLoop(model, work)
    batches = [padded(documents, 2, device()) for documents in steps]
    loop.run(batches, ArmPlan(len(steps), 0, out=plan.out, began=plan.began), settings)
