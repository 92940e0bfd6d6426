"""TRL: packing without padding where an attention that keeps packed documents apart is there, else its padded batches."""

from __future__ import annotations

import contextlib
import logging
from importlib.util import find_spec
from typing import Any

import torch

from chronicals.benchmark.arms.plain import DTYPES
from chronicals.benchmark.arms.trainer import train_with_trainer
from chronicals.benchmark.arms.weights import load, with_peft
from chronicals.benchmark.measurement import Plan, device
from chronicals.benchmark.work import Work
from chronicals.models import load_tokenizer

logger = logging.getLogger(__name__)

ROWS = 8
"""Padded rows of a micro-batch, about, where nothing packs."""

PACKED_ATTENTION = ("flash_attention_4", "flash_attention_3", "flash_attention_2")
"""Of transformers, the fastest first; packed rows need one of them."""


def trl(work: Work, plan: Plan) -> None:
    """``SFTTrainer`` at its documented best: best-fit packing, no padding, Liger's kernels where they are installed."""
    model = load(work.model, DTYPES[work.config().mixed_precision], attn_implementation="sdpa")
    attention = _packed_attention(model)
    if work.mode == "lora":
        model = with_peft(model, work)
    liger = device().type == "cuda" and find_spec("liger_kernel") is not None
    sizes: dict[str, int] = {}
    if attention is not None:
        how = f"packing (bfd), {attention}"
    elif work.data == "fixed":
        how = "rows without padding, sdpa"
    else:
        counts = [len(documents) for documents in work.documents_by_step(plan.in_all)]
        mean = round(sum(counts) / len(counts))
        accumulation = max(1, round(mean / ROWS))
        sizes = {"per_device_train_batch_size": max(1, mean // accumulation), "gradient_accumulation_steps": accumulation}
        rows = f"{mean // accumulation} rows x {accumulation} sorted by length"
        how = f"padded, {rows}, sdpa: no attention for packed rows runs here"
    settings = f"SFTTrainer, {how}" + (", Liger kernels" if liger else "")
    train_with_trainer(
        model, load_tokenizer(work.model), work, plan, settings, packing=attention is not None, use_liger_kernel=liger,
        bf16=False, fp16=False, use_cpu=device().type == "cpu", **sizes,
    )  # fmt: skip


def _packed_attention(model: Any) -> str | None:
    """The first attention that trains two packed documents here; the model is left with it, or with sdpa."""
    if device().type != "cuda" or model.dtype == torch.float32:
        return None
    ids = torch.arange(64, device=device())[None]
    positions = ids % 32
    for name in PACKED_ATTENTION:
        with contextlib.suppress(Exception):
            model.set_attn_implementation(name)
            model.train()
            model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
            torch.cuda.synchronize()
            model.zero_grad(set_to_none=True)
            return name
    model.set_attn_implementation("sdpa")
    model.zero_grad(set_to_none=True)
    return None
