"""Errors that end a run: nothing is learned, or the memory of the card is exhausted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.distributed import Mesh, local
from chronicals.objectives import Objective
from chronicals.policies.needed_memory import ways_to_take_less
from chronicals.training.errors import TrainingError
from chronicals.training.run.resume import how_to_resume
from chronicals.training.run.run_state import Run
from chronicals.training.step.metrics import StepMetrics
from chronicals.training.step.precision import Precision

logger = logging.getLogger(__name__)

MAX_SKIPPED = 20
"""Maximum of consecutive steps with non-finite gradients, while the fp16 loss scale adapts."""


MOST_FLAT = 50
"""Number of steps at the start after which a run without any gradient counts as learning nothing.

If nine steps in ten have no gradient, one run in 200 begins with so many.
"""


def check_step(
    run: Run, metrics: StepMetrics, config: ChronicalsConfig, objective: Objective
) -> None:
    """Count a step as applied, without a gradient, or skipped.

    Raises:
        TrainingError: loss or gradient is not finite (beyond what fp16 scaling mends), or the
            gradient is zero where the loss of the objective is not flat, or in all of the first
            ``MOST_FLAT`` steps.
    """
    if metrics.skipped:
        run.skipped_in_a_row += 1
        mended = config.mixed_precision == "fp16" and run.skipped_in_a_row <= MAX_SKIPPED
        if not mended:
            applied = "in part" if "optimizer_in_backward" in config.memory_policies else "not"
            raise TrainingError(
                f"step {metrics.step}: gradient norm {metrics.grad_norm}, loss {metrics.loss}: "
                "not finite. The step "
                f"was {applied} applied. Lower learning_rate (now {config.learning_rate}), or "
                "look at the rows of "
                f"this step; {how_to_resume(run.output_dir)}"
            )
        logger.warning("step %d: fp16 overflow, step skipped, loss scale halved", metrics.step)
        return
    run.skipped_in_a_row = 0
    if not math.isfinite(metrics.loss):
        raise TrainingError(
            f"step {metrics.step}: loss {metrics.loss}: not a number, though its gradient is; "
            "look at the rows of this "
            f"step; {how_to_resume(run.output_dir)}"
        )
    if metrics.targets and metrics.grad_norm == 0.0:
        reason = objective.why_no_gradient({"loss": metrics.loss, **metrics.others})
        if reason is None:
            raise TrainingError(
                f"step {metrics.step}: every gradient is zero, nothing is trained (loss "
                f"{metrics.loss}); {how_to_resume(run.output_dir)}"
            )
        run.without_gradient += 1
        if run.without_gradient == 1:
            logger.warning(
                "step %d has no gradient: %s (loss %g); it counts as a step, as do others like it",
                metrics.step,
                reason,
                metrics.loss,
            )
        if not run.applied and run.without_gradient >= MOST_FLAT:
            raise TrainingError(
                f"step {metrics.step}: none of the first {run.without_gradient} steps had a "
                f"gradient, so nothing is learned: {reason} (loss {metrics.loss}). Take another "
                "loss, reference or beta, or data that the model does not know yet"
            )
    else:
        run.applied += 1


@torch.no_grad()
def check_finite_weights(run: Run, parameters: Sequence[Tensor], ranks: Mesh) -> None:
    """Check that all weights are finite, before they replace a good checkpoint.

    All ranks must call it.

    Raises:
        TrainingError: a weight on any rank is not finite.
    """
    own = [local(parameter) for parameter in parameters]
    largest = [torch.linalg.vector_norm(weight, math.inf) for weight in own if weight.numel()]
    finite = (
        all(torch.stack([value.float() for value in largest]).isfinite().tolist())
        if largest
        else True
    )
    if not all(ranks.gather_values(finite)):
        raise TrainingError(
            f"step {run.step}: it left weights that are not finite, though loss and gradient are; "
            "they are not saved. Lower "
            f"learning_rate; {how_to_resume(run.output_dir)}"
        )


def check_that_something_was_applied(run: Run, precision: Precision) -> None:
    """Check that at least one step was applied; log it if some or all steps had a flat loss.

    Raises:
        TrainingError: every step was skipped.
    """
    if run.without_gradient:
        none = (
            "; no step had one, so the weights are those that the run began with"
            if not run.applied
            else ""
        )
        say = logger.info if run.applied else logger.warning
        say(
            "%d of %d steps had no gradient, as the loss was flat there%s",
            run.without_gradient,
            run.step,
            none,
        )
        return
    if run.step and not run.applied:
        raise TrainingError(
            f"none of the {run.step} steps was applied: the gradients of all of them overflow "
            "fp16, though the loss scale "
            f"has fallen to {float(precision.scale):g}. Begin anew with mixed_precision='bf16' or "
            "'fp32', or let it fall "
            f"further in more than max_steps={run.total_steps}: {how_to_resume(run.output_dir)}"
        )


@contextmanager
def saying_what_helps(
    config: ChronicalsConfig, device: torch.device, ranks: int = 1
) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into TrainingError.

    The message says how much memory there is, what uses it, and which settings need less.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = ""
        if device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(device)
            ours = torch.cuda.max_memory_allocated(device)
            others = whole - free - torch.cuda.memory_reserved(device)
            held = (
                f" ({whole / 2**30:.1f} GiB; this run held up to {ours / 2**30:.1f}, the driver "
                f"and others hold {others / 2**30:.1f})"
            )
        ways = "; or ".join(ways_to_take_less(config, ranks))
        raise TrainingError(f"out of memory on {device}{held}. Less is taken by {ways}") from error
