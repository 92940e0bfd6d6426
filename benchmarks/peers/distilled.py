"""Distillation in the peers: transformers' student and teacher, with a divergence in plain torch
or Liger's.
"""

from __future__ import annotations

from chronicals.benchmark.arms.reference import (
    DIVERGENCE_ROWS,
    DivergenceLoss,
    StudentOfTeacher,
    plain_divergence,
)
from chronicals.benchmark.arms.weights import load, with_peft
from chronicals.benchmark.measurement import ArmPlan
from chronicals.benchmark.work import DistillationWork
from peers.loop import train_padded
from peers.models import PEER_DTYPES, load_for_peers
from peers.plain import apply_liger_kernels
from peers.ways import flash_attention


def transformers(work: DistillationWork, plan: ArmPlan) -> None:
    """Train transformers' models with the divergence in torch."""
    settings = f"plain divergence, logits of {DIVERGENCE_ROWS} rows at a time"
    _train(work, plan, plain_divergence, settings)


def liger(work: DistillationWork, plan: ArmPlan) -> None:
    """Train with Liger's kernels in both models, and its fused divergence."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    for model in (work.model, work.teacher):
        apply_liger_kernels(model, required=False)
    loss = LigerFusedLinearJSD(jsd_beta=0.5)
    _train(work, plan, loss, "its kernels and its fused divergence")


def _train(work: DistillationWork, plan: ArmPlan, loss: DivergenceLoss, words: str) -> None:
    dtype = PEER_DTYPES[work.config().mixed_precision]
    student = load_for_peers(work, dtype, attn_implementation="sdpa")
    student = with_peft(student, work) if work.adapts else student
    teacher = load(work.teacher, dtype, attn_implementation="sdpa")
    model = StudentOfTeacher(student, teacher, loss)
    flash = flash_attention(model)
    attentions = [*filter(None, [flash]), "sdpa"]
    train_padded(model, work, plan, f"{words}, fused AdamW", attentions)
