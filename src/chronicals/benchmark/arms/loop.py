"""The plain loop: forward, backward, clip, update, over the work's documents as padded rows. Peers and the reference."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.arms.padding import OVERHEAD, TRIED, PaddedStep, padded
from chronicals.benchmark.measurement import Clock, Measurement, Movement, Plan, device, peak_gib, reset_peak
from chronicals.benchmark.profile import PROFILED_STEPS, Profiler
from chronicals.benchmark.work import Document, Work

TRIAL_STEPS = 2
"""Steps that each way of padding runs twice, without an update."""


def train_padded(
    model: Any,
    work: Work,
    plan: Plan,
    settings: str,
    steps: Sequence[Sequence[Document]] | None = None,
    rows: int | None = None,
    updates: bool = True,
) -> None:
    """Train ``model`` for the planned rounds and hand each in.

    The batches lie on the device beforehand, and nothing waits for it between steps; later rounds take them once more.
    Where rows differ in length, the fastest of several ways to cut a step into micro-batches is found by trial first.

    Args:
        steps: documents of each step; the work's own by default.
        rows: documents in a micro-batch at most, without a trial; the work's by default.
        updates: False never makes optimizer states: for a single step where they do not fit.
    """
    in_all = plan.in_all + (PROFILED_STEPS if plan.trace else 0)
    steps = list(work.documents_by_step(in_all)) if steps is None else steps
    model.train()
    overhead = OVERHEAD if rows else fastest_overhead(model, steps, work.rows_a_micro_batch)
    batches = [padded(documents, rows or work.rows_a_micro_batch, device(), overhead) for documents in steps]
    micro_batches = sum(len(batch.micro_batches) for batch in batches) / len(batches)
    settings += f", {micro_batches:.1f} micro-batches a step, sorted by length" if micro_batches > 1 else ""
    config = work.config()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon,
        weight_decay=config.weight_decay, fused=device().type == "cuda",
    )  # fmt: skip
    losses, norms, movement = list[Tensor](), list[Tensor](), Movement(model)

    def run(batch: PaddedStep, clock: Clock) -> None:
        total = torch.zeros((), device=device())
        for given, share in batch.micro_batches:
            loss = model(**given).loss
            loss = loss if share == 1 else loss * share
            loss.backward()
            total += loss.detach()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf).detach())
        if updates:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        clock.mark()

    loaded = time.perf_counter() - plan.began
    reset_peak()
    wanted = True
    while wanted:
        losses.clear()
        norms.clear()
        clock, measured = Clock(), [batches[step % len(batches)] for step in range(plan.in_all)]
        clock.mark()
        for batch in measured:
            run(batch, clock)
        seconds, peak, profile = clock.seconds(), peak_gib(), None
        if plan.trace and not plan.rounds:
            profiler = Profiler(plan.trace)
            for batch in batches[plan.in_all :]:
                run(batch, Clock())
            profile = profiler.stop(PROFILED_STEPS, statistics.median(seconds[plan.warm_up :]))
        wanted = plan.hand_in(
            Measurement(
                settings=settings,
                tokens=[batch.tokens for batch in measured],
                slots=[batch.slots for batch in measured],
                seconds=seconds,
                losses=[float(loss) for loss in losses[: len(measured)]],
                grad_norms=[float(norm) for norm in norms[: len(measured)]],
                warm_up=plan.discarded,
                peak_gib=peak,
                trained_share=movement.trained_share,
                moved_share=movement.moved_share(),
                load_seconds=loaded,
                profile=profile,
                first=not plan.rounds,
            )
        )


def fastest_overhead(model: Any, steps: Sequence[Sequence[Document]], rows: int) -> int:
    """Of ``TRIED``, the one whose micro-batches take ``model`` the least time, forward and backward; those that do not fit in
    memory are out."""
    ways = {overhead: [padded(documents, rows, device(), overhead) for documents in steps[:TRIAL_STEPS]] for overhead in TRIED}
    if len({str([batch.shapes for batch in batches]) for batches in ways.values()}) == 1:
        return OVERHEAD
    seconds = {}
    for overhead, batches in ways.items():
        try:
            _forward_and_backward(model, batches)  # compiles, and picks kernels for these shapes
            began = _now()
            _forward_and_backward(model, batches)
            seconds[overhead] = _now() - began
        except torch.OutOfMemoryError:
            model.zero_grad(set_to_none=True)
    return min(seconds, key=seconds.__getitem__, default=min(TRIED))


def _forward_and_backward(model: Any, batches: Sequence[PaddedStep]) -> None:
    for batch in batches:
        for given, share in batch.micro_batches:
            (model(**given).loss * share).backward()
        model.zero_grad(set_to_none=True)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
