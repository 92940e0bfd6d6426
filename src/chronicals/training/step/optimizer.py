"""Optimizer of a run, and precision: dtypes of weights and products, and the loss scale of fp16."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import (
    Mesh,
    ShardedAdam8bit,
    ShardedAdamW,
    Shards,
    WeightShards,
    is_divided,
)
from chronicals.models import kept_in_fp32
from chronicals.models.peft_kinds import IN_TYPES_OF_THEIR_OWN, kinds
from chronicals.optimizers import (
    Adam8bit,
    FusedAdamW,
    HostStates,
    keep_full_moments,
    lora_plus_groups,
)
from chronicals.quantization import packed_modules

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


START_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class Precision:
    """Mixed precision by name.

    ``bf16``: bf16 weights with an exact fp32 master. ``fp16``: fp16 products over fp32 weights,
    with loss scaling (Micikevicius et al., 2018, section 3.2). ``fp32``: all in fp32.

    The loss scale and its counter are tensors on the device. An overflow halves the scale, and
    ``GROWTH_INTERVAL`` finite steps double it, without waiting on the host.
    """

    def __init__(self, mode: str, device: torch.device):
        self.mode = mode
        self.device = device
        self.scale = torch.tensor(START_SCALE if mode == "fp16" else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)

    def prepare(self, model: Any, optimizer: FusedAdamW) -> None:
        """Cast the weights to their dtype, in place.

        Trained fp32 values are kept exactly by bf16's master. Weights that transformers keeps in
        fp32 for this class, such as routers, stay in fp32.
        """
        frozen = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.mode]
        adapted = hasattr(model, "chronicals_lora")
        patterns = kept_in_fp32(model, frozen)
        # Adapters of some types of PEFT compute with fp32 parameters over a base of any dtype.
        adapters = kinds(model)
        of_peft = bool(adapters) and all(kind in IN_TYPES_OF_THEIR_OWN for kind in adapters)
        for _, module in packed_modules(model):
            module.dtype = frozen
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            value = parameter.data
            stays = value.dtype == torch.float32 and any(pattern in name for pattern in patterns)
            if not parameter.requires_grad:
                parameter.data = value if stays else value.to(frozen)
            elif (
                self.mode == "bf16"
                and not stays
                and not of_peft
                and not (adapted and ".lora_" in name)
            ):
                parameter.data = value.to(torch.bfloat16)
                optimizer.set_master(parameter, value.float())
            else:
                parameter.data = value.float()

    def autocast(self) -> AbstractContextManager:
        """Return a context in which products are in fp16, if the run is."""
        if self.mode == "fp16":
            return torch.autocast(self.device.type, dtype=torch.float16)
        return nullcontext()

    def update(self, finite: Tensor) -> None:
        """Halve or raise the loss scale, depending on whether the step was finite."""
        if self.mode == "fp16":
            good_steps = torch.where(finite, self.good_steps + 1, 0.0)
            grown = good_steps >= GROWTH_INTERVAL
            self.scale.copy_(
                torch.where(finite, torch.where(grown, self.scale * 2, self.scale), self.scale / 2)
            )
            self.good_steps.copy_(torch.where(grown, 0.0, good_steps))

    def state(self) -> dict[str, float]:
        """Return the loss scale and its counter, for a checkpoint."""
        return {"scale": float(self.scale), "good_steps": float(self.good_steps)}

    def load_state(self, state: dict[str, float]) -> None:
        """Set the loss scale and its counter to those of a checkpoint."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])
