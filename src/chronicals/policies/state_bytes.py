"""Bytes of the optimizer states, which several policies change and a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.optimizers import moment_bytes


def full_state_bytes(config: ChronicalsConfig, count: int) -> int:
    """Return the bytes of the states of ``count`` trained values, without 8-bit moments."""
    each = 2 if config.optimizer_state_dtype == "bf16" else 4
    return 2 * count * each + master_bytes(config, count)


def master_bytes(config: ChronicalsConfig, count: int) -> int:
    """Return the bytes of the lower halves of fp32 masters, which bf16 weights have."""
    splits = config.mixed_precision == "bf16" and not config.use_lora
    return 2 * config.master_weights * splits * count


def state_bytes(config: ChronicalsConfig, model: Any, weights: Sequence[Tensor]) -> int:
    """Return the bytes of both moments and of the masters of these trained weights."""
    count = sum(p.numel() for p in weights)
    if config.use_8bit_optimizer:
        return master_bytes(config, count) + moment_bytes(model, weights)
    return full_state_bytes(config, count)
