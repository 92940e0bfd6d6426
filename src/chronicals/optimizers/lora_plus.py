"""LoRA+ (Hayou, Ghosh and Yu, 2024, section 4): matrix B of an adapter learns ``lr_ratio`` times
faster than A. Both matrices of an embedding's adapter learn like A, as in PEFT's optimizer.
"""

from typing import Any

from torch import nn

from chronicals.optimizers.adamw import FusedAdamW


def create_lora_plus_optimizer(
    model: nn.Module,
    base_lr: float,
    lr_ratio: float = 16.0,
    weight_decay: float = 0.0,
    **options: Any,
) -> FusedAdamW:
    """Return ``FusedAdamW`` over ``lora_plus_groups``.

    Args:
        base_lr, lr_ratio: as in ``lora_plus_groups``.
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
    """Return the trainable parameters of ``model`` as optimizer groups.

    Matrices named ``lora_B`` are a group, vectors another one without weight decay, and the other
    matrices a third.

    Args:
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
