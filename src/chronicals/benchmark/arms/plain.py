"""transformers, torch.compile and Liger, each around transformers' own model; and the fp32
reference.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from chronicals.benchmark.arms.loop import train_padded
from chronicals.benchmark.arms.split_products import split_frozen
from chronicals.benchmark.arms.ways import flash_attention
from chronicals.benchmark.arms.weights import (
    base_of_peers,
    load,
    load_dequantised,
    load_for_peers,
    with_peft,
)
from chronicals.benchmark.measurement import ArmPlan, device
from chronicals.benchmark.work import Document, Work
from chronicals.models.loading import DTYPES as OURS

TIGHT_STEPS = 3
"""Reference steps of a model whose weights, gradients and states fill the card."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.bfloat16, "fp32": torch.float32}


def _model(work: Work) -> tuple[Any, list[str]]:
    """The model, and the attentions it may have here, sdpa last."""
    model = load_for_peers(work, DTYPES[work.config().mixed_precision], attn_implementation="sdpa")
    flash = flash_attention(model)
    return with_peft(model, work) if work.adapts else model, [*filter(None, [flash]), "sdpa"]


def _kept_in(work: Work) -> str:
    kept = {torch.bfloat16: "weights and states bf16", torch.float32: "fp32"}[
        DTYPES[work.config().mixed_precision]
    ]
    return f"{base_of_peers(work)}, the rest {kept}" if work.in_4_bits else kept


def transformers(work: Work, plan: ArmPlan) -> None:
    """transformers' model as it is."""
    model, attentions = _model(work)
    train_padded(model, work, plan, f"fused AdamW, {_kept_in(work)}", attentions=attentions)


def transformers_recompute(work: Work, plan: ArmPlan) -> None:
    """The same with gradient checkpointing."""
    model, attentions = _model(work)
    recompute(model)
    train_padded(
        model,
        work,
        plan,
        f"gradient checkpointing, fused AdamW, {_kept_in(work)}",
        attentions=attentions,
    )


def recompute(model: Any) -> None:
    """Gradient checkpointing that needs no gradient of the layers' inputs."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def torch_compile(work: Work, plan: ArmPlan) -> None:
    """The whole model compiled; shapes are static where rows do not differ."""
    model, attentions = _model(work)
    model.compile(dynamic=False if work.data == "fixed" else None)
    train_padded(
        model, work, plan, f"model.compile, fused AdamW, {_kept_in(work)}", attentions=attentions
    )


def liger(work: Work, plan: ArmPlan) -> None:
    """Liger's kernels for the model's class, its fused linear cross-entropy included (its
    default).
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers import AutoConfig

    kind = AutoConfig.from_pretrained(work.model).model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"Liger has no kernels for {kind}")
    MODEL_TYPE_TO_APPLY_LIGER_FN[kind]()
    model, attentions = _model(work)
    settings = f"fused linear cross-entropy, fused AdamW, {_kept_in(work)}"
    train_padded(model, work, plan, settings, attentions=attentions)


def reference(work: Work, plan: ArmPlan) -> None:
    """The plain model in fp32, and nothing rounded to TF32: what losses and gradients should be.

    Of a base in 4 bits it has the weights that the codes stand for. The plan's changes are fields
    of other adapters.

    Where the weights are a good part of the card, activations are recomputed, one row at a time,
    over few steps.
    """
    model, settings, tight = fp32_model(work, plan)
    count = min(plan.in_all, TIGHT_STEPS) if tight else plan.in_all
    if plan.documents is None:
        steps = list(work.documents_by_step(count))
    else:
        steps = [
            [_document(ids) for ids in step] for step in json.loads(plan.documents.read_text())
        ][:count]
    short = ArmPlan(len(steps), 0, out=plan.out, began=plan.began)
    rows = 1 if tight else 4
    train_padded(model, work, short, settings, steps, rows, updates=len(steps) > 1)


def fp32_model(work: Work, plan: ArmPlan) -> tuple[Any, str, bool]:
    """The model of the reference.

    Returns:
        the model, how it runs in words, and whether its weights are a good part of the card; then
        activations are recomputed.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if work.in_4_bits:
        model = load_dequantised(
            work.model, OURS[work.config().mixed_precision], attn_implementation="sdpa"
        )
    else:
        model = load(work.model, torch.float32, attn_implementation="sdpa")
    weights = 4 * sum(p.numel() for p in model.parameters())
    tight = (
        device().type == "cuda" and weights > torch.cuda.get_device_properties(0).total_memory / 8
    )
    if tight:
        recompute(model)
    settings = "fp32, sdpa, AdamW"
    if work.adapts:
        model = with_peft(model, work, **plan.changes)
        if terms := split_frozen(model):
            settings += f", products with frozen weights of two in TF32, sums of {terms}"
    return model, settings, tight


def _document(ids: list[int]) -> Document:
    return Document(np.array(ids), np.array([-100, *ids[1:]]))
