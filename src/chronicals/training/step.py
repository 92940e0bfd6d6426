"""The training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chronicals.data.loader import Step
from chronicals.distributed import Ranks
from chronicals.models import PresentedModel
from chronicals.objectives import Objective, divide
from chronicals.optimizers import FusedAdamW
from chronicals.training.precision import Precision


def train_step(
    model: PresentedModel,
    objective: Objective,
    step: Step,
    parameters: list[Tensor],
    optimizer: FusedAdamW,
    precision: Precision,
    ranks: Ranks,
    max_grad_norm: float,
    inspect_gradients: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Forward, backward, clip, update. Nothing here waits for the device.

    Returns:
        Scalars on the device: ``loss`` and ``grad_norm`` of the whole step on all ranks, ``applied`` (1 or 0).
    """
    counts = objective.counts(step.counts)
    total = torch.zeros((), device=precision.device)
    for batch in step.batches:
        with precision.autocast():
            terms = objective(model, batch.to(precision.device, non_blocking=True))
            loss = divide(terms, counts)
        (loss * precision.scale).backward()
        total += loss.detach()

    ranks.sum_gradients(parameters)
    ranks.sum(total)
    grad_norm = gradient_norm(parameters) / precision.scale
    finite = torch.isfinite(grad_norm)
    if inspect_gradients is not None:
        inspect_gradients()
    clip = (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    optimizer.step(factor=clip / precision.scale, apply=finite)
    optimizer.zero_grad()
    precision.update(finite)
    return {"loss": total, "grad_norm": grad_norm, "applied": finite}


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, float32, on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))
