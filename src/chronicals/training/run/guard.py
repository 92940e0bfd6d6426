"""Checks that warn of a run's end or end it: nothing is learned, or memory or the disk is too small."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.distributed import Mesh, is_divided, local
from chronicals.lora import adapters
from chronicals.memory import Moment, card_memory
from chronicals.objectives import Objective
from chronicals.policies.needed_memory import state_bytes, ways_to_take_less
from chronicals.policies.smaller_steps import saved_in_words
from chronicals.training.errors import CheckpointError, TrainingError
from chronicals.training.run.checkpoint import checkpoints
from chronicals.training.run.resume import how_to_resume
from chronicals.training.run.run_state import Run
from chronicals.training.session import Session
from chronicals.training.step.metrics import StepMetrics
from chronicals.training.step.optimizer import Precision

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
            ``MOST_FLAT`` steps, or the objective finds the metrics wrong.
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
    wrong = objective.why_wrong({"loss": metrics.loss, **metrics.others})
    if wrong is not None:
        raise TrainingError(f"step {metrics.step}: {wrong}; {how_to_resume(run.output_dir)}")
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


LARGEST_DIFFERENCE = 0.05
"""Difference of a measured peak from the planned one, as a ratio, from which both are logged.

That is the error that a plan may have beside the rows in ``benchmarks/results``.
"""


def say_if_memory_was_other(planned: Moment | None, before: int, measured: int) -> None:
    """Log both peaks and the planned parts if a run held other memory than was planned.

    Args:
        planned: largest moment that was expected; None without a card.
        before: bytes that the process had held at most before the first step.
        measured: bytes that it has held at most since it began.
    """
    # A peak before the first step, such as of loading, hides that of the steps.
    if planned is None or measured <= before:
        return
    difference = measured / planned.held - 1
    if abs(difference) > LARGEST_DIFFERENCE:
        logger.info(
            "memory: at most %.2f GiB were held, %+.1f %% of the %.2f that were planned, at %s: %s",
            measured / 2**30,
            100 * difference,
            planned.held / 2**30,
            planned.name,
            planned.words(),
        )


def peak_bytes(device: torch.device) -> int:
    """Return the bytes that tensors of this process have held at most; 0 without a card."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def saying_what_helps(
    config: ChronicalsConfig,
    device: torch.device,
    ranks: int = 1,
    planned: Callable[[], Moment | None] = lambda: None,
    session: Callable[[], Session | None] = lambda: None,
) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into TrainingError.

    The message says how much memory there is, what uses it, what was planned, and which settings
    need less.

    Args:
        config: configuration of the run.
        device: device of the run.
        ranks: number of processes that train together.
        planned: returns the largest moment that is expected; None while it is not known.
        session: returns the session once there is one, which tells how much the settings save.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = ""
        if device.type == "cuda":
            held = f" ({held_on_card(device)})"
        peak = planned()
        expected = ""
        if peak is not None:
            expected = f". Planned were {peak.held / 2**30:.1f} GiB, at {peak.name}: {peak.words()}"
        raise TrainingError(
            f"out of memory on {device}{held}{expected}. {less_is_taken_by(config, ranks, session())}"
        ) from error


def held_on_card(device: torch.device) -> str:
    """Return in words what a card has, and what this process and others hold of it at most."""
    free, whole = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    sizes = {
        "this run held up to": torch.cuda.max_memory_allocated(device),
        "reserves": reserved,
        "may take": card_memory(device),
        "the driver and others hold": whole - free - reserved,
    }
    words = [f"{name} {size / 2**30:.1f}" for name, size in sizes.items()]
    return f"{whole / 2**30:.1f} GiB; {', '.join(words)}"


def less_is_taken_by(config: ChronicalsConfig, ranks: int, session: Session | None) -> str:
    """Return a sentence that names what takes less memory; the first ways say how much they save.

    Args:
        config: the configuration that does not fit.
        ranks: number of processes that train together.
        session: of the run, with the settings that it took beside those of ``config``; None before
            there is one, when bytes are not known.
    """
    if session is None:
        ways = ways_to_take_less(config, ranks)
    else:
        saved = partial(saved_in_words, session.facts, session.decisions)
        ways = ways_to_take_less(session.config, ranks, saved=saved)
    if not ways:
        return "No other setting takes less: take a smaller model, or a larger card"
    return f"Less is taken by {'; or '.join(ways)}"


@dataclass(frozen=True)
class DiskUse:
    """Bytes that a run writes.

    Attributes:
        model: weights of the trained model, or its adapter.
        checkpoint: one checkpoint, including its model.
        at_a_time: number of checkpoints that exist at once: those that are kept, and the one that
            is being written.
    """

    model: int
    checkpoint: int
    at_a_time: int


def disk_use(model: Any, config: ChronicalsConfig, run: Run, keeps_best: bool) -> DiskUse:
    """Compute what a run will write from its current step on.

    Args:
        model: the prepared model.
        config: configuration of the run.
        run: state of the run, at the step from which it goes on.
        keeps_best: whether the checkpoint with the lowest held-out loss stays beside the newest.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapted = next(adapters(model), None) is not None or hasattr(model, "get_base_model")
    written = trained if adapted else list(model.parameters())
    saved = sum(parameter.numel() * parameter.element_size() for parameter in written)
    states = state_bytes(config, model, trained)
    if any(is_divided(parameter) for parameter in trained):
        count = sum(parameter.numel() for parameter in trained)
        each = 2 if config.mixed_precision == "bf16" else 4
        saved = count * each
        states += count * each  # fp32 weights take the place of the lower halves of masters
    left = run.total_steps - run.step
    saves = -(-left // config.save_steps) if config.save_steps else 1
    if keeps_best and config.eval_steps:
        saves += left // config.eval_steps
    kept = max(config.save_total_limit, 2 if keeps_best else 1)
    at_a_time = min(saves + len(checkpoints(run.output_dir)), kept + 1)
    return DiskUse(saved, saved + states, at_a_time)


def planned_disk_use(model: Any, config: ChronicalsConfig) -> DiskUse:
    """Compute what a run that has not begun will write, from names and shapes alone.

    Its length is that of ``max_steps``; without it, as many checkpoints are there as are kept.

    Args:
        model: the model as it is trained; may be on the meta device.
        config: configuration of the run.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trained)
    # Adapters are fp32; bf16 weights have masters, whose lower halves are states.
    each = 2 if config.mixed_precision == "bf16" and not config.use_lora else 4
    written = count if config.use_lora else sum(p.numel() for p in model.parameters())
    saved = written * each
    kept = max(config.save_total_limit, 1 if config.keep == "last" else 2)
    saves = kept + 1
    if config.max_steps and config.save_steps:
        saves = -(-config.max_steps // config.save_steps)
    elif not config.save_steps:
        saves = 1
    states = state_bytes(config, model, trained)
    return DiskUse(saved, saved + states, min(saves, kept + 1))


def check_disk(use: DiskUse, config: ChronicalsConfig) -> None:
    """Warn if the disk may become full; the folder of the run must exist.

    Raises:
        CheckpointError: the first checkpoint does not fit.
    """
    folder = config.output_dir
    free = shutil.disk_usage(folder).free
    if use.checkpoint > free:
        raise CheckpointError(
            f"output_dir={str(folder)!r}: its disk is full before the first checkpoint is there: "
            "one takes "
            f"{_size(use.checkpoint)}, and {_size(free)} are free; free some, or choose another "
            "output_dir"
        )
    there = len(checkpoints(folder)) * use.checkpoint
    largest = use.at_a_time * use.checkpoint + use.model  # bytes that exist at the same time
    if largest > free + there:
        fewer = (
            f"lower save_total_limit={config.save_total_limit}, "
            if config.save_total_limit > 1
            else ""
        )
        logger.warning(
            "output_dir=%r: %d checkpoints at a time and the model take %s, and its disk has %s "
            "free; %sfree some, or choose "
            "another output_dir",
            str(folder),
            use.at_a_time,
            _size(largest),
            _size(free + there),
            fewer,
        )


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.2f} MiB"
