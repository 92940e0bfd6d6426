"""Distillation in the peers: transformers' student and teacher around a divergence in plain
torch or Liger's; the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chronicals.benchmark.arms.loop import train_padded
from chronicals.benchmark.arms.plain import DTYPES, fp32_model
from chronicals.benchmark.arms.ways import flash_attention
from chronicals.benchmark.arms.weights import load, load_for_peers, with_peft
from chronicals.benchmark.measurement import ArmPlan
from chronicals.benchmark.taught import TaughtWork

ROWS = 2048
"""Of logits that exist together in plain torch."""

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of hidden states and head of the student, those of the teacher, and targets (-100: none), the
mean over the targets.
"""


class Taught(nn.Module):
    """A student that is called as a model with labels, and whose loss is a divergence from a
    teacher.
    """

    def __init__(self, student: Any, teacher: Any, loss: Loss):
        super().__init__()
        self.student = student
        self.loss = loss
        self._teacher = [
            teacher.eval().requires_grad_(False)
        ]  # in a list: its weights are none of this module's

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.student.dtype
        return dtype

    def set_attn_implementation(self, name: str) -> None:
        for model in (self.student, *self._teacher):
            model.set_attn_implementation(name)

    def forward(self, labels: Tensor | None = None, **given: Any) -> Any:
        if labels is None:
            return self.student(**given)
        (teacher,) = self._teacher
        hidden = _hidden(self.student, given)
        with torch.no_grad():
            of_teacher = _hidden(teacher, given)
        heads = self.student.get_output_embeddings().weight, teacher.get_output_embeddings().weight
        return SimpleNamespace(
            loss=self.loss(hidden, heads[0], of_teacher, heads[1], labels[:, 1:].flatten())
        )


def _hidden(model: Any, given: dict[str, Any]) -> Tensor:
    """``[targets, width]`` in front of the head."""
    hidden: Tensor = model.get_decoder()(**given, use_cache=False).last_hidden_state
    return hidden[:, :-1].flatten(0, 1)


def plain_divergence(
    student: Tensor, head: Tensor, teacher: Tensor, of_teacher: Tensor, targets: Tensor
) -> Tensor:
    """``Loss`` in torch; logits of a few rows exist at a time, and are made again in the
    backward pass.
    """
    kept = targets != -100
    student = student[kept]
    teacher = teacher[kept]
    parts = zip(student.split(ROWS), teacher.split(ROWS))
    sums = [
        checkpoint(_sum, rows, head, others, of_teacher, use_reentrant=False)
        for rows, others in parts
    ]
    return torch.stack(sums).sum() / len(student)


def _sum(student: Tensor, head: Tensor, teacher: Tensor, of_teacher: Tensor) -> Tensor:
    log_q = (student @ head.mT).float().log_softmax(-1)
    log_p = (teacher @ of_teacher.mT).float().log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    return 0.5 * ((log_p.exp() * (log_p - log_m)).sum() + (log_q.exp() * (log_q - log_m)).sum())


def transformers(work: TaughtWork, plan: ArmPlan) -> None:
    """transformers' models, and the divergence in torch."""
    _train(work, plan, plain_divergence, f"plain divergence, logits of {ROWS} rows at a time")


def liger(work: TaughtWork, plan: ArmPlan) -> None:
    """Liger's kernels in both, and its fused divergence."""
    from liger_kernel.transformers import LigerFusedLinearJSD
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers import AutoConfig

    for place in (work.model, work.teacher):
        if (kind := AutoConfig.from_pretrained(place).model_type) in MODEL_TYPE_TO_APPLY_LIGER_FN:
            MODEL_TYPE_TO_APPLY_LIGER_FN[kind]()
    _train(work, plan, LigerFusedLinearJSD(jsd_beta=0.5), "its kernels and its fused divergence")


def _train(work: TaughtWork, plan: ArmPlan, loss: Loss, words: str) -> None:
    dtype = DTYPES[work.config().mixed_precision]
    student = load_for_peers(work, dtype, attn_implementation="sdpa")
    student = with_peft(student, work) if work.adapts else student
    model = Taught(student, load(work.teacher, dtype, attn_implementation="sdpa"), loss)
    flash = flash_attention(model)
    train_padded(
        model, work, plan, f"{words}, fused AdamW", attentions=[*filter(None, [flash]), "sdpa"]
    )


def reference(work: TaughtWork, plan: ArmPlan) -> None:
    """Student and teacher in fp32."""
    student, settings, _ = fp32_model(work, plan)
    model = Taught(
        student, load(work.teacher, torch.float32, attn_implementation="sdpa"), plain_divergence
    )
    steps = list(work.documents_by_step(plan.in_all))
    train_padded(
        model, work, ArmPlan(len(steps), 0, out=plan.out, began=plan.began), settings, steps, rows=2
    )
