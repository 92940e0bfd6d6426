"""Compilation of a micro-step's Triton kernels before the first step, for a faster start."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig
from chronicals.kernels.launch import can_compile_only, compiling_only
from chronicals.memory import decoder_layers
from chronicals.models import PresentedModel, input_device
from chronicals.objectives import Count, Objective
from chronicals.patching.decoder_layer import products_of_halves
from chronicals.patching.fused_weights import row_norms
from chronicals.training.step.optimizer import Precision
from chronicals.training.step.training_step import micro_step

MOST_TOKENS = 1 << 15
"""Tokens of a micro-batch up to which its kernels are compiled beforehand.

Attention and products run all the same, on host memory of their own where activations go there; over
more tokens that takes longer than kernels that are compiled one after the other, some five seconds.
"""


def compiles_beforehand(
    config: ChronicalsConfig, model: PresentedModel, updates_in_backward: bool
) -> bool:
    """Return whether ``compile_micro_step`` has no side effects for this run.

    It needs a GPU, and fused layers throughout: kernels that do not run leave arbitrary values,
    which must not select experts or change buffers. It must not be used if the backward pass
    updates weights, or with FP8, which keeps quantised values.
    """
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
    """Compile the Triton kernels of a forward and backward pass in parallel, without running them.

    Nothing is done for more than ``MOST_TOKENS`` tokens.

    The computed values are meaningless: gradients and norms of rows are discarded, and the state of
    the random number generator is restored.
    """
    if len(batch) > MOST_TOKENS:
        return
    with torch.random.fork_rng([precision.device]), compiling_only():
        micro_step(model, objective, batch.to(precision.device), counts, precision)
    model.model.zero_grad(set_to_none=True)
    for norms in row_norms(model.model):
        norms.discard()
