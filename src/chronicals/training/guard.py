"""Checks that end a run where going on would hide that nothing is learned."""

from __future__ import annotations

import logging
import math

from chronicals.config import ChronicalsConfig
from chronicals.training.errors import TrainingError
from chronicals.training.metrics import StepMetrics
from chronicals.training.precision import Precision
from chronicals.training.resume import how_to_resume
from chronicals.training.run import Run

logger = logging.getLogger(__name__)

MAX_SKIPPED = 20
"""Steps in a row that may be skipped for a gradient that is not finite, while the fp16 loss scale adapts."""


def check_step(run: Run, metrics: StepMetrics, config: ChronicalsConfig) -> None:
    """Count a step as applied or skipped.

    Raises:
        TrainingError: loss or gradient is not finite (beyond what fp16 scaling mends), or the gradient is zero.
    """
    if metrics.skipped:
        run.skipped_in_a_row += 1
        mended = config.mixed_precision == "fp16" and run.skipped_in_a_row <= MAX_SKIPPED
        if not mended:
            applied = "in part" if "optimizer_in_backward" in config.memory_policies else "not"
            raise TrainingError(
                f"step {metrics.step}: gradient norm {metrics.grad_norm}, loss {metrics.loss}: not finite. The step "
                f"was {applied} applied. Lower learning_rate (now {config.learning_rate}), or look at the rows of "
                f"this step; {how_to_resume(run.output_dir)}"
            )
        logger.warning("step %d: fp16 overflow, step skipped, loss scale halved", metrics.step)
        return
    run.skipped_in_a_row = 0
    run.applied += 1
    if not math.isfinite(metrics.loss):
        raise TrainingError(
            f"step {metrics.step}: loss {metrics.loss}: not a number, though its gradient is; look at the rows of this "
            f"step; {how_to_resume(run.output_dir)}"
        )
    if metrics.targets and metrics.grad_norm == 0.0:
        raise TrainingError(f"step {metrics.step}: every gradient is zero, nothing is trained (loss {metrics.loss})")


def check_that_something_was_applied(run: Run, precision: Precision) -> None:
    """Raises TrainingError where every step of the run was skipped, so that its weights are those it began with."""
    if run.step and not run.applied:
        raise TrainingError(
            f"none of the {run.step} steps was applied: the gradients of all of them overflow fp16, though the loss scale "
            f"has fallen to {float(precision.scale):g}. Begin anew with mixed_precision='bf16' or 'fp32', or let it fall "
            f"further in more than max_steps={run.total_steps}: {how_to_resume(run.output_dir)}"
        )
