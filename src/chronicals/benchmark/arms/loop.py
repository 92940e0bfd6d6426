"""The plain loop over padded rows (forward, backward, clip, update) of reference and peers.

A step's documents are micro-batches of padded rows, sorted by length to save padding.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.benchmark.measurement import (
    PROFILED_STEPS,
    ArmPlan,
    Clock,
    Measurement,
    Movement,
    Profiler,
    device,
    peak_gib,
    reset_peak,
)
from chronicals.benchmark.work import Document, Work

MICRO_BATCH_OVERHEAD = 2048
"""Positions that cost as much as one more micro-batch, unless a trial finds another number."""


@dataclass(frozen=True)
class PaddedStep:
    """A step as micro-batches of padded rows.

    Attributes:
        micro_batches: arguments of the model, each with the share of the step's targets that it
            holds.
        tokens: real tokens.
        slots: positions, padding included.
    """

    micro_batches: list[tuple[dict[str, Any], float]]
    tokens: int
    slots: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Rows and width of each micro-batch."""
        return [tuple(arguments["input_ids"].shape) for arguments, _ in self.micro_batches]


def padded(
    documents: Sequence[Document],
    rows: int,
    place: torch.device,
    overhead: int = MICRO_BATCH_OVERHEAD,
) -> PaddedStep:
    """Return the documents sorted by length, in micro-batches of rows padded on the right.

    Sums over the step do not depend on the order. A batch without padding has no mask, so that
    attention can take its causal path.

    Args:
        documents: of a step.
        rows: of a micro-batch, at most.
        place: device of the micro-batches.
        overhead: positions of padding that cost as much as one more micro-batch.
    """
    ordered = sorted(documents, key=len, reverse=True)
    lengths = [len(document) for document in ordered]
    groups = [ordered[start:end] for start, end in grouped(lengths, rows, overhead)]
    targets = []
    for group in groups:
        targets.append(sum(int((document.labels[1:] != -100).sum()) for document in group))
    micro_batches = []
    slots = 0
    for group, group_targets in zip(groups, targets):
        width = len(group[0])
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for row, document in enumerate(group):
            ids[row, : len(document)] = torch.from_numpy(np.asarray(document.ids, np.int64))
            labels[row, : len(document)] = torch.from_numpy(np.asarray(document.labels, np.int64))
            mask[row, : len(document)] = 1
        arguments = {"input_ids": ids, "labels": labels}
        if not bool(mask.all()):
            arguments["attention_mask"] = mask
        placed = {name: x.to(place) for name, x in arguments.items()}
        micro_batches.append((placed, group_targets / sum(targets)))
        slots += ids.numel()
    return PaddedStep(micro_batches, sum(lengths), slots)


def grouped(lengths: Sequence[int], rows: int, overhead: int) -> list[tuple[int, int]]:
    """Return the bounds of the consecutive groups that cost least.

    The cost of a group is its positions, padding included, plus ``overhead``.

    Args:
        lengths: of sorted documents, the longest first.
        rows: of a group, at most.
        overhead: positions that cost as much as one more group.
    """
    costs = [0.0]
    starts = [0]
    for end in range(1, len(lengths) + 1):
        candidates = []
        for start in range(max(0, end - rows), end):
            count = end - start
            # The last term makes groups even where costs are equal.
            cost = costs[start] + overhead + count * lengths[start] + 1e-6 * count**2
            candidates.append((cost, -start))
        cost, negated_start = min(candidates)
        costs.append(cost)
        starts.append(-negated_start)
    bounds = []
    end = len(lengths)
    while end:
        bounds.append((starts[end], end))
        end = starts[end]
    return bounds[::-1]


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
            batches: the steps.
            plan: the rounds.
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
        """Train the steps of one round, and the profiled steps if the plan has a trace.

        It starts again at the first batch if there are fewer than steps.
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
