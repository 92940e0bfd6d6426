"""Compiles what a micro-step launches before the first one runs, so that a run with cold caches starts sooner."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chronicals.batch import Batch
from chronicals.kernels.compilation import compiling_only
from chronicals.models import PresentedModel
from chronicals.objectives import Count, Objective
from chronicals.training.precision import Precision
from chronicals.training.step import micro_step


def compile_micro_step(
    model: PresentedModel, objective: Objective, batch: Batch, counts: Mapping[str, Count], precision: Precision
) -> None:  # fmt: skip
    """Go through one forward and backward pass in which Triton's kernels are compiled, beside each other, and not run.

    Its values mean nothing: its gradients are dropped, and the state of the random numbers is as before.
    """
    with torch.random.fork_rng([precision.device]), compiling_only():
        micro_step(model, objective, batch.to(precision.device), counts, precision)
    model.model.zero_grad(set_to_none=True)
