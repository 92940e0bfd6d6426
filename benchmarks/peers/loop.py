"""The plain loop for peers, which takes the fastest attention and micro-batches found by a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chronicals.benchmark.arms.loop import PaddedLoop
from chronicals.benchmark.measurement import PROFILED_STEPS, ArmPlan
from chronicals.benchmark.work import MAX_PADDED_ROWS, Work
from peers.ways import fastest_way, make_states


def train_padded(
    model: Any, work: Work, plan: ArmPlan, settings: str, attentions: Sequence[str] = ()
) -> None:
    """Train ``model`` on the work's documents for the planned rounds and hand each one in.

    A trial first finds the fastest attention, and if rows differ in length the fastest way to cut a
    step into micro-batches. The optimizer has its states by then, as in a real step.

    Args:
        settings: how the model runs, in words.
        attentions: names in transformers to choose between, the safest last; by default the
            model's own.
    """
    profiled = PROFILED_STEPS if plan.trace else 0
    steps = list(work.documents_by_step(plan.in_all + profiled))
    loop = PaddedLoop(model, work)
    make_states(loop.optimizer)
    rows = work.config().batch_size if work.data == "fixed" else MAX_PADDED_ROWS
    way, failed = fastest_way(model, steps, rows, attentions)
    batches = [way.cut(documents, rows) for documents in steps]
    loop.run(batches, plan, ", ".join(filter(None, [settings, way.words, *failed])))
