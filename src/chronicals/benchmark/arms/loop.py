"""The plain loop: forward, backward, clip, update, over the work's documents as padded rows. Peers and the reference."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.benchmark.measurement import Clock, Measurement, Movement, Plan, device, peak_gib, reset_peak
from chronicals.benchmark.profile import PROFILED_STEPS, Profiler
from chronicals.benchmark.work import Document, Work


@dataclass(frozen=True)
class PaddedStep:
    """A step as micro-batches of padded rows.

    Attributes:
        micro_batches: arguments of the model, each with the share of the step's targets that it holds.
        tokens: real tokens.
        slots: positions, padding included.
    """

    micro_batches: list[tuple[dict[str, Tensor], float]]
    tokens: int
    slots: int


def padded(documents: Sequence[Document], rows: int, place: torch.device) -> PaddedStep:
    """``documents`` in order as micro-batches of at most ``rows`` rows, as even as they can be, padded on the right.

    A batch without padding has no mask, so that attention may take its causal path.
    """
    count = -(-len(documents) // rows)
    groups = [[documents[i] for i in part] for part in np.array_split(np.arange(len(documents)), count)]
    targets = [sum(int((document.labels[1:] != -100).sum()) for document in group) for group in groups]
    micro_batches, slots = [], 0
    for group, held in zip(groups, targets):
        width = max(len(document) for document in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, document in enumerate(group):
            ids[row, : len(document)] = torch.from_numpy(np.asarray(document.ids, np.int64))
            labels[row, : len(document)] = torch.from_numpy(np.asarray(document.labels, np.int64))
            mask[row, : len(document)] = 1
        given = {"input_ids": ids, "labels": labels} | ({} if bool(mask.all()) else {"attention_mask": mask})
        micro_batches.append(({name: x.to(place) for name, x in given.items()}, held / sum(targets)))
        slots += ids.numel()
    return PaddedStep(micro_batches, sum(len(document) for document in documents), slots)


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

    Args:
        steps: documents of each step; the work's own by default.
        rows: documents in a micro-batch; the work's by default.
        updates: False never makes optimizer states: for a single step where they do not fit.
    """
    in_all = plan.in_all + (PROFILED_STEPS if plan.trace else 0)
    steps = list(work.documents_by_step(in_all)) if steps is None else steps
    batches = [padded(documents, rows or work.rows_a_micro_batch, device()) for documents in steps]
    config = work.config()
    model.train()
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
