"""Unsloth's model under TRL's trainers of preferences as it patches them. Its process has
imported it before anything else.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from chronicals.benchmark.measurement import ArmPlan, device
from chronicals.benchmark.pairs import PairWork
from peers.preference import train_pairs
from peers.unsloth import load, states


def unsloth(work: PairWork, plan: ArmPlan) -> None:
    """Train without recomputation."""
    _unsloth(work, plan, recompute=False)


def unsloth_recompute(work: PairWork, plan: ArmPlan) -> None:
    """Train with its own recomputation, its default."""
    _unsloth(work, plan, recompute=True)


def _unsloth(work: PairWork, plan: ArmPlan, recompute: bool) -> None:
    if work.objective == "dpo":
        from unsloth import PatchDPOTrainer

        PatchDPOTrainer()
    model, _ = load(work, recompute)
    how = "its recomputation" if recompute else "no recomputation"
    words = [f"its {work.objective.upper()}Trainer", how, states(work)]
    in_bf16 = work.config().mixed_precision == "bf16" and not work.adapts
    # TRL computes the stored log-probabilities of the reference without autocast.
    with torch.autocast(device().type, torch.bfloat16) if in_bf16 else nullcontext():
        train_pairs(
            model,
            work,
            plan,
            words,
            bf16=True,
            gradient_checkpointing=recompute,
            use_cpu=device().type == "cpu",
        )
