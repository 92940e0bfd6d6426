"""Construction of the optimizer of a run: AdamW over the trained parameters."""

from __future__ import annotations

import logging
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import (
    Mesh,
    ShardedAdam8bit,
    ShardedAdamW,
    Shards,
    WeightShards,
    is_divided,
)
from chronicals.optimizers import (
    Adam8bit,
    FusedAdamW,
    HostStates,
    keep_full_moments,
    lora_plus_groups,
)

logger = logging.getLogger(__name__)

HIGHEST_RATE_OF_B = 1.6e-2
"""Highest learning rate of B at which LoRA+ trained: in benchmarks/results/lora-plus.json
held-out loss falls until A learns at 1e-3 and B at 1.6e-2 (5.98, from 6.00 at a tenth of that);
with 4.8e-2 gradients explode, and it ends at 6.25. Adapters of rank 16 and alpha 32."""


def build_optimizer(model: Any, config: ChronicalsConfig, ranks: Mesh | None = None) -> FusedAdamW:
    """Return AdamW over the trained parameters.

    Its groups are LoRA+'s, or have weight decay on matrices only.

    Moments are in 8 bits, or states in host memory, if the configuration asks for it.

    Args:
        model: model with the parameters.
        config: configuration of the run.
        ranks: ranks among which weights and states are sharded; None for no sharding.

    Raises:
        ConfigurationError: no parameter requires a gradient.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        adapted = hasattr(model, "chronicals_lora")
        remedy = (
            "unfreeze lora_A and lora_B of its adapters"
            if adapted
            else "unfreeze some or set use_lora=True"
        )
        raise ConfigurationError(f"the model has no parameter that requires a gradient; {remedy}")
    options: dict[str, Any] = {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "state_dtype": torch.bfloat16 if config.optimizer_state_dtype == "bf16" else torch.float32,
        "master": config.master_weights,
        "host": HostStates() if "offload_optimizer_states" in config.memory_policies else None,
    }
    of_peft = bool(getattr(model, "peft_config", None)) and "use_lora_plus" in config.explicit
    if config.use_lora_plus and (hasattr(model, "chronicals_lora") or of_peft):
        groups = lora_plus_groups(model, config.learning_rate, config.lora_plus_ratio)
    else:
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
    if config.use_8bit_optimizer:
        groups = keep_full_moments(model, groups)
    groups = [group for group in groups if group["params"]]
    options |= {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizer: FusedAdamW
    if ranks is not None:
        sharded = ShardedAdam8bit if config.use_8bit_optimizer else ShardedAdamW
        divided = any(is_divided(p) for p in trained)
        optimizer = sharded(
            groups, (WeightShards if divided else Shards)(ranks, trained), **options
        )
    else:
        optimizer = (Adam8bit if config.use_8bit_optimizer else FusedAdamW)(groups, **options)
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
    return optimizer


def say_learning_rates(config: ChronicalsConfig, optimizer: FusedAdamW) -> None:
    """Log the rates of A and B if B learns faster; warn if B's is above ``HIGHEST_RATE_OF_B``."""
    slow = config.learning_rate
    fast = max(group["peak"] for group in optimizer.param_groups)
    if fast <= slow:
        return
    logger.info(
        "learning rates: A %s, B %s (LoRA+; use_lora_plus=False for one rate)",
        as_rate(slow),
        as_rate(fast),
    )
    if fast > HIGHEST_RATE_OF_B * (1 + 1e-6):
        logger.warning(
            "B learns at %s, and above %s LoRA+ was seen not to train (docs/training.md): set "
            "learning_rate=%s or lower, or "
            "use_lora_plus=False",
            as_rate(fast),
            as_rate(HIGHEST_RATE_OF_B),
            as_rate(HIGHEST_RATE_OF_B / config.lora_plus_ratio),
        )


def as_rate(value: float) -> str:
    """Format a learning rate, as in ``2.0e-4``."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    digits = digits.removesuffix("0")
    return f"{digits}e{int(exponent)}"
