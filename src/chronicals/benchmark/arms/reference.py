"""The reference over documents: the plain model in fp32, with nothing rounded to TF32.

For distillation it is a student around a frozen teacher, as one module. Its losses and gradient
norms are what those of every arm are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chronicals.benchmark.arms.loop import PaddedLoop, padded
from chronicals.benchmark.arms.split_products import split_frozen
from chronicals.benchmark.arms.weights import load, load_dequantised, with_peft
from chronicals.benchmark.measurement import ArmPlan, device
from chronicals.benchmark.work import DistillationWork, Document, Work
from chronicals.models.loading import WEIGHT_DTYPES

TIGHT_STEPS = 3
"""Reference steps of a model whose weights, gradients and states fill the card."""


def train_reference(work: Work, plan: ArmPlan) -> None:
    """Train the work's first steps, or the documents of the plan's file.

    If the weights fill much of the card, there are few steps, of one row at a time, with
    activations recomputed. The plan's changes are fields of other adapters.
    """
    model, settings, tight = fp32_model(work, plan)
    count = min(plan.in_all, TIGHT_STEPS) if tight else plan.in_all
    if plan.documents is None:
        steps = list(work.documents_by_step(count))
    else:
        steps = [
            [Document(np.array(ids), np.array([-100, *ids[1:]])) for ids in step]
            for step in json.loads(plan.documents.read_text())[:count]
        ]
    rows = 1 if tight else 4
    loop = PaddedLoop(model, work, updates=len(steps) > 1)
    batches = [padded(documents, rows, device()) for documents in steps]
    loop.run(batches, ArmPlan(len(steps), 0, out=plan.out, began=plan.began), settings)


def fp32_model(work: Work, plan: ArmPlan) -> tuple[Any, str, bool]:
    """Load the row's model in fp32, with its adapters and the changes of the plan.

    A base in 4 bits has the weights that the codes stand for.

    Returns:
        the model, how it runs in words, and whether its weights fill much of the card; then
        activations are recomputed.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if work.in_4_bits:
        dtype = WEIGHT_DTYPES[work.config().mixed_precision]
        model = load_dequantised(work.model, dtype, attn_implementation="sdpa")
    else:
        model = load(work.model, torch.float32, attn_implementation="sdpa")
    weights = 4 * sum(p.numel() for p in model.parameters())
    tight = (
        device().type == "cuda" and weights > torch.cuda.get_device_properties(0).total_memory / 8
    )
    if tight:
        # Not reentrant, which would need a gradient of the layers' inputs.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = "fp32, sdpa, AdamW"
    if work.adapts:
        model = with_peft(model, work, **plan.changes)
        terms = split_frozen(model)
        if terms:
            settings += f", products with frozen weights of two in TF32, sums of {terms}"
    return model, settings, tight


DIVERGENCE_ROWS = 2048
"""Rows of logits that exist at a time in plain torch."""

DivergenceLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mean over the targets, of the student's hidden states and head, the teacher's hidden states and
head, and the targets (-100: not trained)."""


class StudentOfTeacher(nn.Module):
    """A student whose loss is a divergence from a teacher.

    It is called as a model with labels.
    """

    def __init__(self, student: Any, teacher: Any, loss: DivergenceLoss):
        super().__init__()
        self.student = student
        self.loss = loss
        # in a list, so that the teacher's weights are no parameters of this module
        self._teacher = [teacher.eval().requires_grad_(False)]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the student's weights."""
        dtype: torch.dtype = self.student.dtype
        return dtype

    def set_attn_implementation(self, name: str) -> None:
        """Set the attention of student and teacher."""
        for model in (self.student, *self._teacher):
            model.set_attn_implementation(name)

    def forward(self, labels: Tensor | None = None, **arguments: Any) -> Any:
        """Return the loss of ``labels``, as ``output.loss``; without them, the student's output."""
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
    """Compute a ``DivergenceLoss`` in torch.

    Logits of a few rows exist at a time, and are computed again in the backward pass.
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


def train_distillation_reference(work: DistillationWork, plan: ArmPlan) -> None:
    """Train the student beside its teacher, both in fp32."""
    student, settings, _ = fp32_model(work, plan)
    teacher = load(work.teacher, torch.float32, attn_implementation="sdpa")
    model = StudentOfTeacher(student, teacher, plain_divergence)
    steps = list(work.documents_by_step(plan.in_all))
    loop = PaddedLoop(model, work)
    batches = [padded(documents, 2, device()) for documents in steps]
    loop.run(batches, ArmPlan(len(steps), 0, out=plan.out, began=plan.began), settings)
