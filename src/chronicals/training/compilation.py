"""Compiles what a micro-step launches before the first one runs, so that a run with cold caches
starts sooner.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig
from chronicals.kernels.compilation import can_compile_only, compiling_only
from chronicals.memory import decoder_layers
from chronicals.models import PresentedModel, input_device
from chronicals.objectives import Count, Objective
from chronicals.patching.decoder_layer import products_of_halves
from chronicals.patching.fused_weights import row_norms
from chronicals.training.precision import Precision
from chronicals.training.step import micro_step


def compiles_beforehand(
    config: ChronicalsConfig, model: PresentedModel, updates_in_backward: bool
) -> bool:
    """Whether ``compile_micro_step`` is right here: on a card, where both halves of all layers
    run fused, so that arbitrary values choose no experts and change no buffers; where no weight
    is updated by a backward pass, and nothing is kept of 8-bit values."""
    if (
        input_device(model.model).type != "cuda"
        or not can_compile_only()
        or torch.is_anomaly_enabled()
    ):
        return False
    fused = sum(isinstance(products, list) for products in products_of_halves(model.model))
    return (
        fused == 2 * len(decoder_layers(model.model))
        and not config.use_fp8
        and not updates_in_backward
    )


def compile_micro_step(
    model: PresentedModel,
    objective: Objective,
    batch: Batch,
    counts: Mapping[str, Count],
    precision: Precision,
) -> None:
    """Go through one forward and backward pass in which Triton's kernels are compiled, beside each
    other, and not run.

    Its values mean nothing: its gradients are dropped, norms of rows are not kept, and the state of
        the random numbers is as
    before.
    """
    with torch.random.fork_rng([precision.device]), compiling_only():
        micro_step(model, objective, batch.to(precision.device), counts, precision)
    model.model.zero_grad(set_to_none=True)
    for norms in row_norms(model.model):
        norms.discard()
