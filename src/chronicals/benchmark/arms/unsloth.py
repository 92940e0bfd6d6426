"""Unsloth: its model in a plain loop where rows have no padding, its trainer with its own packing where they would.

Its process has imported it before anything else (see ``chronicals.benchmark.arm``).
"""

from __future__ import annotations

from typing import Any

import torch

from chronicals.benchmark.arms.loop import train_padded
from chronicals.benchmark.arms.trainer import train_with_trainer
from chronicals.benchmark.arms.weights import start_from
from chronicals.benchmark.floor import PROJECTIONS
from chronicals.benchmark.measurement import Plan
from chronicals.benchmark.work import Work


def unsloth(work: Work, plan: Plan) -> None:
    """Without recomputation."""
    _unsloth(work, plan, recompute=False)


def unsloth_recompute(work: Work, plan: Plan) -> None:
    """With its own recomputation, its default."""
    _unsloth(work, plan, recompute=True)


def unsloth_padded(work: Work, plan: Plan) -> None:
    """Without recomputation and without packing: padded rows."""
    train_padded(_load(work, False)[0], work, plan, f"plain loop, padded rows, no recomputation, {_states(work)}")


def _unsloth(work: Work, plan: Plan, recompute: bool) -> None:
    model, tokenizer = _load(work, recompute)
    words = f"{'its recomputation' if recompute else 'no recomputation'}, {_states(work)}"
    if work.data == "fixed":
        train_padded(model, work, plan, f"plain loop, {words}")
    else:
        train_with_trainer(
            model, tokenizer, work, plan, f"its SFTTrainer, packing, {words}", packing=True, bf16=True,
            gradient_checkpointing=recompute,
        )  # fmt: skip


def _states(work: Work) -> str:
    return "fused AdamW, weights and states bf16" if work.mode == "full" else "fused AdamW"


def _load(work: Work, recompute: bool) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    config = work.config()
    way: Any = "unsloth" if recompute else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        work.model, max_seq_length=config.max_seq_length, dtype=torch.bfloat16, load_in_4bit=False,
        full_finetuning=work.mode == "full", use_gradient_checkpointing=way,
    )  # fmt: skip
    if work.mode == "lora":
        model = FastLanguageModel.get_peft_model(
            model, r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0, bias="none", use_rslora=config.use_rslora,
            target_modules=config.lora_target_modules or list(PROJECTIONS), use_gradient_checkpointing=way,
        )  # fmt: skip
        start_from(model, work.folder / "adapter")
    FastLanguageModel.for_training(model)
    return model, tokenizer
