"""Unsloth: its model in a plain loop if all rows have one length, otherwise its trainer with its own
packing.

Its process has imported it before anything else (see ``unsloth_import``).
"""

from __future__ import annotations

from typing import Any

import torch

from chronicals.benchmark.arms.weights import start_from, start_of
from chronicals.benchmark.measurement import ArmPlan
from chronicals.benchmark.work import UNEVEN_FIELDS, Work
from peers.loop import train_padded
from peers.trainer import train_with_trainer


def unsloth(work: Work, plan: ArmPlan) -> None:
    """Train without recomputation."""
    _unsloth(work, plan, recompute=False)


def unsloth_recompute(work: Work, plan: ArmPlan) -> None:
    """Train with its own recomputation, its default."""
    _unsloth(work, plan, recompute=True)


def unsloth_padded(work: Work, plan: ArmPlan) -> None:
    """Train padded rows, without recomputation."""
    model, _ = load(work, recompute=False)
    train_padded(model, work, plan, f"plain loop, padded rows, no recomputation, {states(work)}")


def unsloth_compiled(work: Work, plan: ArmPlan) -> None:
    """Train LoRA through ``FastModel``, which compiles transformers' modules, as its full
    fine-tuning does; without recomputation.
    """
    model, tokenizer = load(work, recompute=False, compiled=True)
    _train(model, tokenizer, work, plan, "FastModel", recompute=False)


def _unsloth(work: Work, plan: ArmPlan, recompute: bool) -> None:
    packed_lora = work.adapts and work.data != "fixed"
    attention = [f"attention {packed_attention()}"] if packed_lora else []
    model, tokenizer = load(work, recompute)
    _train(model, tokenizer, work, plan, *attention, recompute=recompute)


def _train(
    model: Any, tokenizer: Any, work: Work, plan: ArmPlan, *words: str, recompute: bool
) -> None:
    how = ", ".join(
        ["its recomputation" if recompute else "no recomputation", states(work), *words]
    )
    if work.data == "fixed":
        train_padded(model, work, plan, f"plain loop, {how}")
    else:
        train_with_trainer(
            model,
            tokenizer,
            work,
            plan,
            f"its SFTTrainer, packing, {how}",
            packing=True,
            bf16=True,
            gradient_checkpointing=recompute,
        )


def packed_attention() -> str:
    """Return the attention that its LoRA layers take for packed documents here.

    Raises:
        ValueError: it would make one call for each document, five times slower.
    """
    from unsloth.utils import attention_dispatch

    backend = attention_dispatch.select_attention_backend(use_varlen=True)
    if backend != attention_dispatch.SDPA:
        return backend
    if getattr(attention_dispatch, "_TORCH_VARLEN_ATTN", None) is not None:
        return "torch varlen"
    raise ValueError(
        "its packed LoRA would take one call of attention a document, for it finds no kernel for "
        "packed ones; "
        "install xformers==0.0.35 and nvidia-cuda-runtime-cu12, or FlashAttention 2"
    )


def states(work: Work) -> str:
    """Return in words its optimizer and the dtype of its weights."""
    if work.in_4_bits:
        return "fused AdamW, base in bitsandbytes' NF4"
    return "fused AdamW" if work.adapts else "fused AdamW, weights and states bf16"


def load(work: Work, recompute: bool, compiled: bool = False) -> tuple[Any, Any]:
    """Load its model, with the row's adapters, and the tokenizer.

    Raises:
        ValueError: adapters differ between layers.
    """
    from unsloth import FastLanguageModel, FastModel

    loader = FastModel if compiled else FastLanguageModel
    config = work.config()
    for name in UNEVEN_FIELDS:
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)!r}: it is measured with plain adapters of one rank "
                "in all layers; leave it out of --against"
            )
    checkpointing: Any = "unsloth" if recompute else False
    model, tokenizer = loader.from_pretrained(
        work.model,
        max_seq_length=config.max_seq_length,
        dtype=torch.bfloat16,
        load_in_4bit=work.in_4_bits,
        full_finetuning=not work.adapts,
        use_gradient_checkpointing=checkpointing,
    )
    if work.adapts:
        start = start_of(work, config)
        model = loader.get_peft_model(
            model,
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=0,
            bias="none",
            use_rslora=config.use_rslora,
            target_modules=sorted({name.split(".")[-3] for name in start}),
            use_gradient_checkpointing=checkpointing,
        )
        start_from(model, start)
    loader.for_training(model)
    return model, tokenizer
