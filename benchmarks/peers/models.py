"""The row's model as a peer on transformers has it."""

from __future__ import annotations

from typing import Any

import torch

from chronicals.benchmark.arms.weights import (
    copy_values,
    load,
    load_in_4_bits,
    without_router_loss,
)
from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Work
from chronicals.quantization import packed_experts
from chronicals.step_work import DecoderShape

PEER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.bfloat16, "fp32": torch.float32}
"""Dtype of a peer's weights by the row's ``mixed_precision``."""


def load_for_peers(work: Work, dtype: torch.dtype, **options: Any) -> Any:
    """Load the row's model, over layers of bitsandbytes if the row is in 4 bits. That library has
    no stacked experts; they have the values of ours in 16 bits.

    Raises:
        ImportError, ValueError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    from chronicals.models import load_by_bitsandbytes

    if not work.in_4_bits:
        return load(work.model, dtype, **options)
    model = load_by_bitsandbytes(AutoModelForCausalLM, work.model, dtype, device(), **options)
    without_router_loss(model)
    if has_experts(work):
        copy_values(model, packed_experts(load_in_4_bits(work.model, dtype)))
    return model


def base_of_peers(work: Work) -> str:
    """Return in words what ``load_for_peers`` loads for a row in 4 bits."""
    return "base in bitsandbytes' NF4" + (", its experts in 16 bits" if has_experts(work) else "")


def has_experts(work: Work) -> bool:
    """Return whether the row's model is a mixture of experts."""
    from transformers import AutoConfig

    return DecoderShape.of(AutoConfig.from_pretrained(work.model)).routed
