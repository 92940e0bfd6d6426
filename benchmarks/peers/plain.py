"""transformers, torch.compile and Liger, each around transformers' own model."""

from __future__ import annotations

from typing import Any

import torch

from chronicals.benchmark.arms.weights import with_peft
from chronicals.benchmark.measurement import ArmPlan
from chronicals.benchmark.work import Work
from peers.loop import train_padded
from peers.models import PEER_DTYPES, base_of_peers, load_for_peers
from peers.ways import flash_attention


def transformers(work: Work, plan: ArmPlan) -> None:
    """Train transformers' model as it is."""
    model, attentions = _model(work)
    train_padded(model, work, plan, _settings(work), attentions)


def transformers_recompute(work: Work, plan: ArmPlan) -> None:
    """Train transformers' model with gradient checkpointing."""
    model, attentions = _model(work)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    train_padded(model, work, plan, f"gradient checkpointing, {_settings(work)}", attentions)


def torch_compile(work: Work, plan: ArmPlan) -> None:
    """Train the whole model compiled, with static shapes if all rows have one length."""
    model, attentions = _model(work)
    model.compile(dynamic=False if work.data == "fixed" else None)
    train_padded(model, work, plan, f"model.compile, {_settings(work)}", attentions)


def liger(work: Work, plan: ArmPlan) -> None:
    """Train with Liger's kernels for the model's class, including its fused linear cross-entropy
    (its default).
    """
    apply_liger_kernels(work.model)
    model, attentions = _model(work)
    train_padded(model, work, plan, f"fused linear cross-entropy, {_settings(work)}", attentions)


def apply_liger_kernels(model: str, required: bool = True) -> None:
    """Patch transformers' class of a model with Liger's kernels.

    Args:
        model: folder or hub name.
        required: False leaves a class as it is if Liger has none for it.

    Raises:
        ValueError: Liger has no kernels for the class, and they are required.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers import AutoConfig

    model_type = AutoConfig.from_pretrained(model).model_type
    if model_type in MODEL_TYPE_TO_APPLY_LIGER_FN:
        MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]()
    elif required:
        raise ValueError(f"Liger has no kernels for {model_type}")


def _model(work: Work) -> tuple[Any, list[str]]:
    """Load the row's model. Returns it and the attentions that run here, sdpa last."""
    dtype = PEER_DTYPES[work.config().mixed_precision]
    model = load_for_peers(work, dtype, attn_implementation="sdpa")
    attentions = [*filter(None, [flash_attention(model)]), "sdpa"]
    return with_peft(model, work) if work.adapts else model, attentions


def _settings(work: Work) -> str:
    """Say the optimizer and what weights are kept in."""
    in_bf16 = PEER_DTYPES[work.config().mixed_precision] == torch.bfloat16
    dtypes = "weights and states bf16" if in_bf16 else "fp32"
    if work.in_4_bits:
        dtypes = f"{base_of_peers(work)}, the rest {dtypes}"
    return f"fused AdamW, {dtypes}"
