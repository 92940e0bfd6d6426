"""The training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig
from chronicals.data.loader import Step
from chronicals.distributed import Ranks
from chronicals.kernels.gradient_norm import gradient_norm
from chronicals.models import PresentedModel
from chronicals.objectives import Count, Objective, divide
from chronicals.optimizers import FusedAdamW, learning_rate_factor
from chronicals.training.in_backward import UpdatesInBackward
from chronicals.training.precision import Precision


def train_step(
    model: PresentedModel,
    objective: Objective,
    step: Step,
    parameters: list[Tensor],
    optimizer: FusedAdamW,
    precision: Precision,
    ranks: Ranks,
    max_grad_norm: float | None,
    inspect_gradients: Callable[[], None] | None = None,
    in_backward: UpdatesInBackward | None = None,
) -> dict[str, Tensor]:
    """Forward, backward, clip, update. Nothing here waits for the device.

    Args:
        inspect_gradients: is called when they are there, before the update; of each, where that is ``in_backward``.

    Returns:
        Scalars on the device: ``loss`` and ``grad_norm`` of the whole step on all ranks, ``applied`` (1 or 0).
    """
    counts = counts_of(objective, step, ranks)
    if in_backward is not None:
        in_backward.begin(inspect_gradients)
    total = torch.zeros((), device=precision.device)
    for batch in step.batches:
        total += micro_step(model, objective, batch.to(precision.device, non_blocking=True), counts, precision)
    if in_backward is not None:
        in_backward.end()
        return {"loss": total, **in_backward.scalars()}
    holders = ranks.sum_gradients(parameters, total)
    if inspect_gradients is not None:
        inspect_gradients()
    scalars = update(parameters, optimizer, precision, max_grad_norm, holders)
    optimizer.zero_grad()
    return {"loss": total, **scalars}


def counts_of(objective: Objective, step: Step, ranks: Ranks) -> Mapping[str, Count]:
    """What each term is divided by, over the whole step.

    Raises:
        ValueError: Batches have weights whose sum over all ranks is not among the step's counts.
    """
    counts = step.counts
    if counts.weight is None and any(batch.weights is not None for batch in step.batches):
        if ranks.count > 1:
            raise ValueError(f"Batch.weights: give their sum over all {ranks.count} processes as Counts.weight")
        counts = replace(counts, weight=sum(_weight(batch) for batch in step.batches))
    return objective.counts(counts)


def _weight(batch: Batch) -> float:
    """Sum of the weights of the targets, each 1 without weights."""
    trained = batch.targets != IGNORED
    return float((trained if batch.weights is None else batch.weights[trained]).sum(dtype=torch.float64))


def micro_step(
    model: PresentedModel, objective: Objective, batch: Batch, counts: Mapping[str, Count], precision: Precision
) -> Tensor:
    """Gradients of one forward pass, added to those there are; its share of the step's loss, a scalar on the device."""
    with precision.autocast():
        loss = divide(objective(model, batch), counts)
    (loss * precision.scale).backward()
    return loss.detach()


def update(
    parameters: list[Tensor], optimizer: FusedAdamW, precision: Precision, max_grad_norm: float | None,
    holders: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Clip and apply the gradients, unless they are not finite.

    Args:
        holders: how many ranks had a gradient of each parameter; one that none had is left as a single process leaves a
            parameter without a gradient: neither decayed nor moved.

    Returns:
        ``grad_norm`` before clipping, and ``applied``.
    """
    grad_norm = gradient_norm(gradients_of(parameters)) / precision.scale
    finite = torch.isfinite(grad_norm)
    clip = 1.0 if max_grad_norm is None else (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    used = None if holders is None else dict(zip(parameters, (holders > 0).unbind()))
    optimizer.step(factor=clip / precision.scale, apply=finite, used=used)
    precision.update(finite)
    return {"grad_norm": grad_norm, "applied": finite}


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def rate_factor(config: ChronicalsConfig, number: int, total_steps: int) -> float:
    """Of the peak, what the schedule gives step ``number``, from 0, of a run of so many."""
    warmup = config.warmup_steps
    if "warmup_steps" not in config.explicit:
        warmup = min(warmup, total_steps // 10)
    return learning_rate_factor(config.lr_scheduler, number, total_steps, warmup, config.min_lr_ratio, config.wsd_decay_ratio)


def set_learning_rate(optimizer: FusedAdamW, factor: float) -> None:
    """Of every group so much of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
