"""The plain loop over padded rows (forward, backward, clip, update) of reference and peers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.arms.padding import PaddedStep
from chronicals.benchmark.measurement import (
    ArmPlan,
    Clock,
    Measurement,
    Movement,
    device,
    peak_gib,
    reset_peak,
)
from chronicals.benchmark.profile import PROFILED_STEPS, Profiler
from chronicals.benchmark.work import Work


class PaddedLoop:
    """A model, AdamW over its trained parameters, and rounds of steps over padded batches.

    Args:
        updates: False never calls the optimizer, for a single step whose states do not fit.
    """

    def __init__(self, model: Any, work: Work, updates: bool = True):
        config = work.config()
        model.train()
        self.model = model
        self.updates = updates
        self.max_norm = config.max_grad_norm or math.inf
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=device().type == "cuda",
        )
        self.movement = Movement(model)

    def run(self, batches: Sequence[PaddedStep], plan: ArmPlan, settings: str) -> None:
        """Train the planned rounds over ``batches`` and hand each one in.

        The batches are on the device already, and nothing waits for it between steps. Later rounds
        take them once more.

        Args:
            settings: how the model runs, in words; what is decided here is added.
        """
        micro_batches = sum(len(batch.micro_batches) for batch in batches) / len(batches)
        if micro_batches > 1:
            settings += f", {micro_batches:.1f} micro-batches a step, sorted by length"
        if disable_cudnn_for_varying_shapes(batches):
            settings += ", no cuDNN attention"
        loaded = time.perf_counter() - plan.began
        reset_peak()
        another_round = True
        while another_round:
            measured = self.round(batches, plan)
            another_round = plan.hand_in(replace(measured, settings=settings, load_seconds=loaded))

    def step(self, batch: PaddedStep, clock: Clock) -> tuple[Tensor, Tensor]:
        """Train one step.

        Returns:
            the loss and the gradient norm before clipping, scalars on the device.
        """
        total = torch.zeros((), device=device())
        for arguments, share in batch.micro_batches:
            loss = self.model(**arguments).loss
            loss = loss if share == 1 else loss * share
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm).detach()
        if self.updates:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.mark()
        return total, norm

    def round(self, batches: Sequence[PaddedStep], plan: ArmPlan) -> Measurement:
        """Train the steps of one round, starting again at the first batch if they are fewer, and
        the profiled steps if the plan has a trace.
        """
        clock = Clock()
        measured = [batches[step % len(batches)] for step in range(plan.in_all)]
        clock.mark()
        results = [self.step(batch, clock) for batch in measured]
        seconds = clock.seconds()
        peak = peak_gib()
        profile = None
        if plan.trace and not plan.rounds:
            profiler = Profiler(plan.trace)
            for batch in batches[plan.in_all :]:
                self.step(batch, Clock())
            profile = profiler.stop(PROFILED_STEPS, statistics.median(seconds[plan.warm_up :]))
        return Measurement(
            settings="",
            tokens=[batch.tokens for batch in measured],
            slots=[batch.slots for batch in measured],
            seconds=seconds,
            losses=[float(loss) for loss, _ in results],
            grad_norms=[float(norm) for _, norm in results],
            warm_up=plan.discarded,
            peak_gib=peak,
            trained_share=self.movement.trained_share,
            moved_share=self.movement.moved_share(),
            profile=profile,
            first=not plan.rounds,
        )


def disable_cudnn_for_varying_shapes(batches: Sequence[PaddedStep]) -> bool:
    """Switch cuDNN's attention kernels off for this process if steps differ in their shapes.

    The host makes a plan for each shape, which takes longer than the step.

    Returns:
        True if they were switched off.
    """
    varies = device().type == "cuda" and len({str(batch.shapes) for batch in batches}) > 1
    if varies:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return varies
