"""The plain loop: forward, backward, clip, update, over the work's documents as padded rows.
Peers and the reference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.arms.padding import PaddedStep, padded
from chronicals.benchmark.arms.ways import fastest_way, make_states
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
from chronicals.benchmark.work import Document, Work


def train_padded(
    model: Any,
    work: Work,
    plan: ArmPlan,
    settings: str,
    steps: Sequence[Sequence[Document]] | None = None,
    rows: int | None = None,
    updates: bool = True,
    attentions: Sequence[str] = (),
) -> None:
    """Train ``model`` for the planned rounds and hand each in.

    The batches lie on the device beforehand, and nothing waits for it between steps; later rounds
    take them once more. A trial finds the fastest of several attentions first, and where rows
    differ in length of several ways to cut a step into micro-batches; the optimizer has its states
    by then.

    Args:
        steps: documents of each step; the work's own by default.
        rows: documents in a micro-batch at most, without a trial; the work's by default.
        updates: False never makes optimizer states: for a single step where they do not fit.
        attentions: of transformers, to choose between, the safest last; by default the model's own.
    """
    steps = (
        list(work.documents_by_step(plan.in_all + (PROFILED_STEPS if plan.trace else 0)))
        if steps is None
        else steps
    )
    model.train()
    loop = _Loop(model, work, updates)
    if rows:
        batches = [padded(documents, rows, device()) for documents in steps]
    else:
        if updates:
            make_states(loop.optimizer)
        way, failed = fastest_way(model, steps, work.rows_a_micro_batch, attentions)
        batches = [way.cut(documents, work.rows_a_micro_batch) for documents in steps]
        settings = ", ".join(filter(None, [settings, way.words, *failed]))
    micro_batches = sum(len(batch.micro_batches) for batch in batches) / len(batches)
    settings += (
        f", {micro_batches:.1f} micro-batches a step, sorted by length" if micro_batches > 1 else ""
    )
    if leaves_cudnn(batches):
        settings += ", no cuDNN attention"
    loaded = time.perf_counter() - plan.began
    reset_peak()
    while plan.hand_in(replace(loop.round(batches, plan), settings=settings, load_seconds=loaded)):
        pass


def leaves_cudnn(batches: Sequence[PaddedStep]) -> bool:
    """Where steps differ in their shapes, torch's attention takes no kernels of cuDNN from here
    on: for each shape the host would make a plan, which takes longer than the step. Whether that
    is so."""
    differ = device().type == "cuda" and len({str(batch.shapes) for batch in batches}) > 1
    if differ:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return differ


class _Loop:
    """A model, AdamW over what it trains, and the rounds of its steps.

    Args:
        updates: whether the optimizer makes a step.
    """

    def __init__(self, model: Any, work: Work, updates: bool):
        config = work.config()
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

    def step(self, batch: PaddedStep, clock: Clock) -> tuple[Tensor, Tensor]:
        """Loss, and gradient norm before clipping, on the device."""
        total = torch.zeros((), device=device())
        for given, share in batch.micro_batches:
            loss = self.model(**given).loss
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
        """The steps of a round over the batches, from the first one again where they are fewer,
        and the profiled ones.
        """
        clock = Clock()
        measured = [batches[step % len(batches)] for step in range(plan.in_all)]
        clock.mark()
        found = [self.step(batch, clock) for batch in measured]
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
            losses=[float(loss) for loss, _ in found],
            grad_norms=[float(norm) for _, norm in found],
            warm_up=plan.discarded,
            peak_gib=peak,
            trained_share=self.movement.trained_share,
            moved_share=self.movement.moved_share(),
            profile=profile,
            first=not plan.rounds,
        )
