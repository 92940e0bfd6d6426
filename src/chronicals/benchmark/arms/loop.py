"""The plain loop: forward, backward, clip, update, over the work's documents as padded rows. Peers and the reference."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.arms.padding import PaddedStep, padded
from chronicals.benchmark.arms.ways import fastest_way, make_states
from chronicals.benchmark.measurement import ArmPlan, Clock, Measurement, Movement, device, peak_gib, reset_peak
from chronicals.benchmark.profile import PROFILED_STEPS, Profiler
from chronicals.benchmark.work import LabelledDocument, Work


def train_padded(
    model: Any,
    work: Work,
    plan: ArmPlan,
    settings: str,
    steps: Sequence[Sequence[LabelledDocument]] | None = None,
    rows: int | None = None,
    updates: bool = True,
    attentions: Sequence[str] = (),
) -> None:
    """Train ``model`` for the planned rounds and hand each in.

    The batches lie on the device beforehand, and nothing waits for it between steps; later rounds take them once more.
    A trial finds the fastest of several attentions first, and where rows differ in length of several ways to cut a step into
    micro-batches; the optimizer has its states by then.

    Args:
        steps: documents of each step; the work's own by default.
        rows: documents in a micro-batch at most, without a trial; the work's by default.
        updates: False never makes optimizer states: for a single step where they do not fit.
        attentions: of transformers, to choose between, the safest last; by default the model's own.
    """
    in_all = plan.in_all + (PROFILED_STEPS if plan.trace else 0)
    steps = list(work.documents_by_step(in_all)) if steps is None else steps
    model.train()
    config = work.config()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon,
        weight_decay=config.weight_decay, fused=device().type == "cuda",
    )  # fmt: skip
    if rows:
        batches = [padded(documents, rows, device()) for documents in steps]
    else:
        if updates:
            make_states(optimizer)
        way, failed = fastest_way(model, steps, work.rows_a_micro_batch, attentions)
        batches = [way.cut(documents, work.rows_a_micro_batch) for documents in steps]
        settings = ", ".join(filter(None, [settings, way.words, *failed]))
    micro_batches = sum(len(batch.micro_batches) for batch in batches) / len(batches)
    settings += f", {micro_batches:.1f} micro-batches a step, sorted by length" if micro_batches > 1 else ""
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
