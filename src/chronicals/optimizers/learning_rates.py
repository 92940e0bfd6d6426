"""Learning rates: schedules over the steps of a run, and LoRA+'s groups of parameters.

A schedule is a factor of the peak rate: a linear warm-up, then one of ``SCHEDULES``. In LoRA+
(Hayou, Ghosh and Yu, 2024, section 4) matrix B of an adapter learns ``lr_ratio`` times faster than
A.
"""

import math
from typing import Any

from torch import nn

from chronicals.optimizers.adamw import FusedAdamW

SCHEDULES = ("cosine", "linear", "constant", "wsd")
"""Names of schedules. ``wsd`` is warm-up, stable, decay (Hu et al., 2024, section 4.1)."""


def learning_rate_factor(
    schedule: str,
    step: int,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_ratio: float = 0.2,
    warmup_from_zero: bool = False,
) -> float:
    """Return the factor of the peak learning rate for a step.

    Args:
        schedule: one of ``SCHEDULES``.
        step: number of the step, from 0.
        total_steps: steps of the run.
        warmup_steps: steps of its warm-up.
        min_ratio: the factor after the last step.
        decay_ratio: fraction of the run in which ``wsd`` decays.
        warmup_from_zero: the warm-up rises from a factor of 0 at step 0, as in transformers, rather
            than from ``1 / warmup_steps``; either reaches 1 by step ``warmup_steps``.

    Raises:
        KeyError: there is no such schedule.
    """
    if step < warmup_steps:
        risen = step if warmup_from_zero else step + 1
        return risen / warmup_steps
    steps = max(total_steps - warmup_steps, 1)
    progress = min((step - warmup_steps) / steps, 1.0)
    match schedule:
        case "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            factor = 1 - progress
        case "constant":
            factor = 1.0
        case "wsd":
            # From a fraction of the run to one of the steps after warm-up.
            decay = min(decay_ratio * (total_steps / steps), 1.0)
            factor = min(1.0, (1 - progress) / decay)
        case _:
            raise KeyError(schedule)
    return min_ratio + (1 - min_ratio) * factor


def create_lora_plus_optimizer(
    model: nn.Module,
    base_lr: float,
    lr_ratio: float = 16.0,
    weight_decay: float = 0.0,
    **options: Any,
) -> FusedAdamW:
    """Return ``FusedAdamW`` over ``lora_plus_groups``.

    Args:
        model: a model with adapters.
        base_lr: learning rate of all parameters except the B matrices.
        lr_ratio: the B matrices learn at ``base_lr * lr_ratio``.
        weight_decay: weight decay of matrices.
        options: further arguments of ``FusedAdamW``.

    Raises:
        ValueError: the model has no trainable parameter named ``lora_B``.
    """
    return FusedAdamW(
        lora_plus_groups(model, base_lr, lr_ratio), lr=base_lr, weight_decay=weight_decay, **options
    )


def lora_plus_groups(
    model: nn.Module, base_lr: float, lr_ratio: float = 16.0
) -> list[dict[str, Any]]:
    """Return the trainable parameters of ``model`` as optimizer groups for LoRA+.

    Matrices named ``lora_B`` are a group, vectors another one without weight decay, and the other
    matrices a third. Both matrices of an embedding's adapter learn like A, as in PEFT's optimizer.

    Args:
        model: a model with adapters.
        base_lr: learning rate of all parameters except the B matrices.
        lr_ratio: the B matrices learn at ``base_lr * lr_ratio``.

    Raises:
        ValueError: the model has no trainable parameter named ``lora_B``.
    """
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    fast = [parameter for name, parameter in named if "lora_B" in name.split(".")]
    rest = [parameter for name, parameter in named if "lora_B" not in name.split(".")]
    if not fast and not any("lora_embedding_B" in name.split(".") for name, _ in named):
        raise ValueError(
            "lr_ratio has nothing to act on: the model has no trainable lora_B; call apply_lora "
            "first"
        )
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "lr": base_lr},
        {"params": fast, "lr": base_lr * lr_ratio},
        {
            "params": [p for p in rest if p.ndim <= 1],
            "lr": base_lr,
            "weight_decay": 0.0,
        },  # magnitudes
    ]
    return [group for group in groups if group["params"]]
