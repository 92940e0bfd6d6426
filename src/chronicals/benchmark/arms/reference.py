"""The reference over documents: the plain model in fp32, with nothing rounded to TF32.

Its losses and gradient norms are what those of every arm are compared with.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from chronicals.benchmark.arms.loop import PaddedLoop
from chronicals.benchmark.arms.padding import padded
from chronicals.benchmark.arms.split_products import split_frozen
from chronicals.benchmark.arms.weights import load, load_dequantised, with_peft
from chronicals.benchmark.measurement import ArmPlan, device
from chronicals.benchmark.work import Document, Work
from chronicals.models.loading import WEIGHT_DTYPES

TIGHT_STEPS = 3
"""Reference steps of a model whose weights, gradients and states fill the card."""


def reference(work: Work, plan: ArmPlan) -> None:
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
        recompute(model)
    settings = "fp32, sdpa, AdamW"
    if work.adapts:
        model = with_peft(model, work, **plan.changes)
        terms = split_frozen(model)
        if terms:
            settings += f", products with frozen weights of two in TF32, sums of {terms}"
    return model, settings, tight


def recompute(model: Any) -> None:
    """Enable gradient checkpointing that needs no gradient of the layers' inputs."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
