"""TRL: packing without padding if an attention for packed documents runs here, otherwise its padded
batches.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from chronicals.benchmark.arms.weights import with_peft
from chronicals.benchmark.measurement import ArmPlan, device
from chronicals.benchmark.work import Work
from chronicals.models import load_tokenizer
from peers.models import PEER_DTYPES, base_of_peers, has_experts, load_for_peers
from peers.trainer import train_with_trainer, with_flash_lengths
from peers.ways import flash_attention

logger = logging.getLogger(__name__)

PADDED_ROWS = 8
"""Approximate number of rows of a padded micro-batch."""


def trl(work: Work, plan: ArmPlan) -> None:
    """Train through ``SFTTrainer`` at its documented best: best-fit packing, no padding, Liger's
    kernels if they are installed; over layers of bitsandbytes if the row is in 4 bits.
    """
    _trl(work, plan, recompute=False)


def trl_recompute(work: Work, plan: ArmPlan) -> None:
    """Train as ``trl``, with gradient checkpointing."""
    _trl(work, plan, recompute=True)


def _trl(work: Work, plan: ArmPlan, recompute: bool) -> None:
    model = load_for_peers(
        work, PEER_DTYPES[work.config().mixed_precision], attn_implementation="sdpa"
    )
    attention = flash_attention(model)
    if work.adapts:
        model = with_peft(model, work)
    liger = device().type == "cuda" and find_spec("liger_kernel") is not None
    options: dict[str, Any] = {}
    if attention is not None:
        options = {"collate": with_flash_lengths}
        how = f"packing (bfd), {attention}"
    elif work.data == "fixed":
        how = "rows without padding, sdpa"
    else:
        counts = [len(documents) for documents in work.documents_by_step(plan.in_all)]
        mean = round(sum(counts) / len(counts))
        accumulation = max(1, round(mean / PADDED_ROWS))
        options = {
            "per_device_train_batch_size": max(1, mean // accumulation),
            "gradient_accumulation_steps": accumulation,
        }
        rows = f"{mean // accumulation} rows x {accumulation} sorted by length"
        how = f"padded, {rows}, sdpa: no attention for packed rows runs here"
    settings = (
        f"SFTTrainer, {how}"
        + (", Liger kernels" if liger else "")
        + (", gradient checkpointing" if recompute else "")
    )
    settings += f", {base_of_peers(work)}" if work.in_4_bits else ""
    if liger and work.adapts and has_experts(work):
        # Liger's expert kernels compute gradients of frozen experts, and are tuned for minutes.
        options["liger_kernel_config"] = {"swiglu": False}
        settings += ", experts by grouped_mm"
    if recompute:
        options |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    train_with_trainer(
        model,
        load_tokenizer(work.model),
        work,
        plan,
        settings,
        packing=attention is not None,
        use_liger_kernel=liger,
        bf16=False,
        fp16=False,
        use_cpu=device().type == "cpu",
        **options,
    )
